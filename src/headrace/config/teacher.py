"""The ``[teacher]`` section: on-policy distillation, beside the rewards or instead of them."""

from __future__ import annotations

from typing import Literal

from headrace.config.base import Section


class TeacherConfig(Section):
    """A frozen model that scores what the policy sampled; the policy is drawn towards it on those very tokens
    (``algorithm.distillation``)."""

    path: str
    """As ``model.path``. It must speak the policy's ids: the same tokenizer."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    stream: Literal["rl", "distillation"] = "rl"
    """``rl``: tokens are trained by the rewards and by the teacher. ``distillation``: by the teacher alone; rewards are
    recorded and evaluated, and move nothing."""
