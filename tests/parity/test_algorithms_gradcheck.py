"""The gradient of every composition is that of its loss, where what the formula holds constant is held constant (I17).

Numerical differentiation moves the log-probabilities, and with them everything that was detached from them. So the
detached values are recorded once, at the point, and given back at every later evaluation. Legend: N trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from join_support import build, fields_of, flat
from oracle_core import AGGREGATIONS
from oracle_inputs import BATCH, TOKEN_BATCH
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from headrace.algorithms import PRESETS
from headrace.algorithms.fields import StreamTotals, Totals
from headrace.algorithms.objectives import OBJECTIVES
from headrace.algorithms.resolve import ResolvedAlgorithm

SEQUENCE = {"correction": {"type": "truncated", "high": 1.8, "level": "sequence"}}
COMPOSITIONS: list[dict[str, Any]] = [
    *({"preset": name} for name in PRESETS),
    {"objective": "dppo_tv_penalised", "penalty": 0.3},
    {"objective": "ratio", "ratio_level": "trajectory"},
    {"objective": "cispo", "ratio_level": "sequence"},
    {"objective": "topr", "ratio_level": "token"},
    {"objective": "sapo", "ratio_anchor": "behaviour"},
    {"dual_clip": 3.0},
    *({"kl": {"coefficient": 0.3, "estimator": name}} for name in ("k1", "k2", "k3", "k3+")),
    *({"kl": {"coefficient": 0.3, "estimator": name, "unbiased": True}} for name in ("k1", "k3")),
    {"preset": "rloo", "correction": {"type": "truncated", "high": 2.0, "proximal": "interpolated"}},
    {"correction": {"type": "masked", "low": 0.5, "high": 2.0, "proximal": "interpolated", "veto": 1e-4}},
    {"correction": {"type": "rejected", "level": "geometric", "low": 0.9, "high": 1.2, "max_drift": 0.1}},
    {**SEQUENCE, "kl": {"coefficient": 0.1, "aggregation": "token_mean"}},
    {"preset": "kl_cov", "kl": {"coefficient": 0.2, "estimator": "k3+"}},
    {"preset": "dapo", "distillation": {"estimator": "k3", "unbiased": True}},
]


@contextmanager
def detached(values: list[Tensor], *, recording: bool) -> Iterator[None]:
    """Every ``detach()`` is recorded into ``values``, or gives back what was recorded, in the order of the calls."""
    given = iter(values)
    detach = Tensor.detach

    def record(self: Tensor) -> Tensor:
        values.append(detach(self).clone())
        return values[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "detach", record if recording else lambda self: next(given))
        yield
    assert recording or next(given, None) is None, "another number of detached values than at the point"


def frozen(loss: Callable[[Tensor], Tensor], point_N: Tensor) -> Callable[[Tensor], Tensor]:
    """``loss`` with whatever it detaches held at its value at ``point_N``."""
    values: list[Tensor] = []
    with detached(values, recording=True):
        loss(point_N)

    def held(logprobs_N: Tensor) -> Tensor:
        with detached(values, recording=False):
            return loss(logprobs_N)

    return held


def loss_of(config: dict[str, Any], *, first_step: bool) -> Callable[[Tensor], Tensor]:
    """On the oracle's tokens; advantages differ within an episode where the objective allows it. On the first step of
    a batch the proximal policy is the current one."""
    algorithm = build(**config)
    r: ResolvedAlgorithm = algorithm.resolved
    takes_episodes = r.objective in ("gmpo", "quadratic") or r.ratio_level in ("sequence", "trajectory")
    batch = BATCH if takes_episodes or r.correction.max_drift is not None else TOKEN_BATCH
    point_N = flat(batch.new, batch.mask)
    changes: dict[str, Any] = {
        "ages_N": torch.arange(len(point_N)) % 3,
        "selected_N": torch.arange(len(point_N)) % 3 == 1,
        "teacher_logprobs_N": flat(batch.ref, batch.mask) + 0.1,
        "totals": Totals(num_tokens=18, num_episodes=7, max_length=6, distillation=StreamTotals(num_tokens=9)),
    }
    if first_step:
        changes["proximal_logprobs_N"] = None
    fields = fields_of(batch, **changes)

    def loss(logprobs_N: Tensor) -> Tensor:
        output = algorithm.loss(logprobs_N, fields)
        return output.per_token_N.sum() / output.denominator

    return frozen(loss, point_N)


@pytest.mark.parametrize("config", COMPOSITIONS, ids=str)
def test_gradcheck_with_the_detached_parts_frozen(config: dict[str, Any]) -> None:
    """I17: for every preset and every part, on a later step of a batch; aggregations take turns."""
    config = dict(config)
    if "preset" not in config:
        config["aggregation"] = AGGREGATIONS[COMPOSITIONS.index(config) % len(AGGREGATIONS)]
    point_N = flat(BATCH.new, BATCH.mask).requires_grad_()
    assert torch.autograd.gradcheck(loss_of(config, first_step=False), point_N, atol=1e-7, rtol=1e-6)


# On the first step a ratio to the proximal policy is exactly 1, on no kink of these.
@pytest.mark.parametrize("preset", ["grpo", "gspo", "gmpo", "sapo", "cispo", "rloo", "m2po", "topr", "dro"])
def test_gradcheck_on_the_first_step(preset: str) -> None:
    """I5, I17: the current policy, detached, takes the place of the proximal one."""
    point_N = flat(BATCH.new, BATCH.mask).requires_grad_()
    assert torch.autograd.gradcheck(loss_of({"preset": preset}, first_step=True), point_N, atol=1e-7, rtol=1e-6)


def test_the_compositions_reach_every_objective() -> None:
    """The test above proves something."""
    assert {build(**config).resolved.objective for config in COMPOSITIONS} == set(OBJECTIVES)


def test_freezing_finds_a_gradient_that_is_missing() -> None:
    """The check itself can fail: a loss whose numerical and written derivative differ by a detached factor that is
    not a constant of the formula, and the same written right."""
    point_N = torch.tensor([0.3, -0.7], dtype=torch.float64).requires_grad_()
    right = frozen(lambda x_N: (x_N.detach().exp() * x_N).sum(), point_N)
    assert torch.autograd.gradcheck(right, point_N)
    hidden = torch.tensor([0.1, 0.2], dtype=torch.float64)
    wrong = frozen(lambda x_N: (x_N * torch.from_numpy((x_N + hidden).data.numpy())).sum(), point_N)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(wrong, point_N)
