"""Calibration of a reward model, and pairs: numbers by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from headrace.environments.preferences import Pair
from headrace.offline.calibration import calibrate, write_calibration
from headrace.offline.pairs import CONTENT_FREE, content_free_pairs, pair_accuracy


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_ece_by_hand() -> None:
    """Guo et al. 2017, eq. 3: 4 pairs at 0.72 of which 3 right, 2 at 0.97 of which 1 right, one tie."""
    differences = [logit(0.72)] * 3 + [-logit(0.72), logit(0.97), -logit(0.97), 0.0]
    found = calibrate(differences)
    assert [(b.num, round(b.confidence, 6), b.accuracy) for b in found.bins] == [
        (1, 0.5, 0.5),
        (4, 0.72, 0.75),
        (2, 0.97, 0.5),
    ]
    assert found.ece == pytest.approx((4 * 0.03 + 2 * 0.47) / 7)
    assert all(b.low <= b.confidence <= b.high and b.accuracy_low <= b.accuracy <= b.accuracy_high for b in found.bins)


def test_extreme_differences_and_none() -> None:
    assert calibrate([1e6, -1e6]).ece == pytest.approx(0.5)
    with pytest.raises(ValueError, match="at least one"):
        calibrate([])


def test_files(tmp_path: Path) -> None:
    write_calibration(calibrate([1.0, -0.5, 3.0]), tmp_path)
    data = json.loads((tmp_path / "calibration.json").read_text())
    assert data["num"] == 3 and len(data["bins"]) == 3
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")


def pair(prompt: str, chosen: str = "yes", rejected: str = "no") -> Pair:
    return Pair(messages=({"role": "user", "content": prompt},), chosen=chosen, rejected=rejected, where="x")


def test_accuracy_is_clustered_by_prompt() -> None:
    """Pairs of one prompt resemble each other (FAILURES 177): the interval counts prompts."""
    pairs = [pair(str(i // 10)) for i in range(40)]
    differences = [1.0] * 20 + [-1.0] * 20
    clustered = pair_accuracy(pairs, differences)
    spread = pair_accuracy([pair(str(i)) for i in range(40)], differences)
    assert clustered.mean == spread.mean == 0.5
    assert clustered.num_tasks == 4 and clustered.high - clustered.low > spread.high - spread.low
    assert pair_accuracy(pairs[:2], [0.0, 0.0]).mean == 0.5


def test_content_free_pairs() -> None:
    """FAILURES 162: a share of further pairs against replies that say nothing; never equal sides."""
    pairs = [pair(str(i), chosen=CONTENT_FREE[i % len(CONTENT_FREE)] or "x") for i in range(100)]
    found = content_free_pairs(pairs, 0.3, seed=1)
    assert len(found) == 30 and found == content_free_pairs(pairs, 0.3, seed=1)
    assert all(p.rejected in CONTENT_FREE and p.rejected != p.chosen for p in found)
    assert content_free_pairs(pairs, 0.0, seed=1) == []
