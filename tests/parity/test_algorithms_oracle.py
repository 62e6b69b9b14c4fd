"""Losses, gradients and advantages against the scalar oracle, in float64 to 1e-9 (I17), for every composition."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.algorithms import advantages as adv
from headrace.algorithms import build_algorithm
from headrace.algorithms.fields import TokenFields, Totals
from headrace.algorithms.shaping import overlong_penalty
from headrace.config.schema import AlgorithmConfig
from headrace.types import AttemptKey


def _load_oracle() -> ModuleType:
    """By path, so that pytest's import mode does not matter."""
    spec = importlib.util.spec_from_file_location("headrace_oracle", Path(__file__).with_name("oracle.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


oracle = _load_oracle()
CASE = oracle.CASE
LENGTHS = [len(v) for v in CASE.new]
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum")

# name -> (configuration, oracle arguments)
COMPOSITIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo": ({"clip_high": 0.28}, {"objective": "ppo", "clip_high": 0.28}),
    "ppo-dual": ({"dual_clip": 1.5}, {"objective": "ppo", "dual": 1.5}),
    "cispo": (
        {"objective": "cispo", "clip_low": 0.3, "clip_high": 0.4},
        {"objective": "cispo", "clip_low": 0.3, "clip_high": 0.4},
    ),
    "cispo-preset": ({"preset": "cispo"}, {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.28}),
    "reinforce": ({"objective": "reinforce"}, {"objective": "reinforce"}),
    "gspo": ({"preset": "gspo"}, {"objective": "ppo", "level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo-wide": (
        {"preset": "gspo", "clip_low": 0.2, "clip_high": 0.4},
        {"objective": "ppo", "level": "sequence", "clip_low": 0.2, "clip_high": 0.4},
    ),
    "cispo-sequence": (
        {"objective": "cispo", "ratio_level": "sequence"},
        {"objective": "cispo", "level": "sequence"},
    ),
    "decoupled": ({"correction": {"type": "decoupled"}}, {"objective": "ppo", "correction": ("decoupled", None, None)}),
    "decoupled-cap": (
        {"correction": {"type": "decoupled", "high": 1.08}},
        {"objective": "ppo", "correction": ("decoupled", None, 1.08)},
    ),
    "tis": (
        {"correction": {"type": "truncated", "high": 1.03}},
        {"objective": "ppo", "correction": ("truncated", None, 1.03)},
    ),
    "tis-default": (
        {"correction": {"type": "truncated"}},
        {"objective": "ppo", "correction": ("truncated", None, 2.0)},
    ),
    "icepop": (
        {"correction": {"type": "masked", "low": 0.92, "high": 1.11}},
        {"objective": "ppo", "correction": ("masked", 0.92, 1.11)},
    ),
    "icepop-reinforce": (
        {"objective": "reinforce", "correction": {"type": "masked", "low": 0.92, "high": 1.11}},
        {"objective": "reinforce", "correction": ("masked", 0.92, 1.11)},
    ),
    **{
        f"kl-{name}": (
            {"kl": {"coefficient": 0.3, "estimator": name, "placement": "loss"}},
            {"objective": "ppo", "kl": (0.3, name)},
        )
        for name in ("k1", "k2", "k3", "k3+")
    },
    "kl-with-icepop": (
        {
            "kl": {"coefficient": 0.3, "estimator": "k2", "placement": "loss"},
            "correction": {"type": "masked", "low": 0.92, "high": 1.11},
        },
        {"objective": "ppo", "kl": (0.3, "k2"), "correction": ("masked", 0.92, 1.11)},
    ),
}


def flat(nested: list[list[float]]) -> torch.Tensor:
    return torch.tensor([v for inner in nested for v in inner], dtype=torch.float64)


def implementation(config: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the whole case as one micro-batch."""
    parsed = AlgorithmConfig.model_validate(config)
    algorithm = build_algorithm(parsed, asynchronous=False, max_new_tokens=CASE.max_length)
    logprobs_N = flat(CASE.new).requires_grad_()
    num_tokens = len(logprobs_N)
    fields = TokenFields(
        advantages_N=flat(CASE.advantage),
        behaviour_logprobs_N=flat(CASE.roll),
        proximal_logprobs_N=flat(CASE.old),
        reference_logprobs_N=flat(CASE.ref),
        weights_N=torch.ones(num_tokens, dtype=torch.float64),
        episode_index_N=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        num_episodes=len(LENGTHS),
        totals=Totals(num_tokens=num_tokens, num_episodes=len(LENGTHS), max_length=CASE.max_length),
    )
    output = algorithm.loss(logprobs_N, fields)
    loss = output.per_token_N.sum() / output.denominator
    loss.backward()
    assert logprobs_N.grad is not None
    return loss.item(), logprobs_N.grad


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_loss_and_gradient(name: str, aggregation: str) -> None:
    """I17: value and gradient of each composition under each aggregation; GSPO's gradient in its token form."""
    config, arguments = COMPOSITIONS[name]
    loss, gradient_N = implementation({"preset": "grpo", **config, "aggregation": aggregation})
    expected_loss, expected_gradient = oracle.loss_and_gradient(CASE, aggregation=aggregation, **arguments)
    assert loss == pytest.approx(expected_loss, abs=1e-12, rel=1e-9)
    assert gradient_N.tolist() == pytest.approx(flat(expected_gradient).tolist(), abs=1e-12, rel=1e-9)


def test_every_branch_binds() -> None:
    """The case itself: each bound acts on some token and leaves some other alone, else the parity proves nothing."""
    both = {(low, high, sign) for low, high in ((True, False), (False, True), (False, False)) for sign in (True, False)}
    tokens = [(r, a) for r, a in zip(flat(oracle.ratios(CASE, "token")), flat(CASE.advantage), strict=True)]
    assert {(bool(r < 0.8), bool(r > 1.28), bool(a > 0)) for r, a in tokens} == both
    assert any(r > 1.5 and a < 0 for r, a in tokens), "dual clip"
    assert any(r < 0.7 for r, _ in tokens) and any(r > 1.4 for r, _ in tokens), "cispo"
    sequences = [(inner[0], a[0]) for inner, a in zip(oracle.ratios(CASE, "sequence"), CASE.advantage, strict=True)]
    assert any(s > 1.4 and a > 0 for s, a in sequences) and any(s < 0.8 and a < 0 for s, a in sequences), "gspo clipped"
    assert any(s < 1 and a > 0 for s, a in sequences) and any(s > 1 and a < 0 for s, a in sequences), "gspo free"
    rho = (flat(CASE.old) - flat(CASE.roll)).exp().tolist()
    assert min(rho) < 0.92 and max(rho) > 2, "icepop below, truncation at 2"
    assert any(0.92 <= x <= 1.03 for x in rho) and any(1.03 < x < 1.08 for x in rho), "kept, and capped at 1.03"


REWARDS = [0.25, -1.5, 3.0, 0.125, 0.7, 0.7]


@pytest.mark.parametrize("name", ["group_normalised", "group_centred", "leave_one_out"])
def test_group_advantages(name: str) -> None:
    """I17: group-relative advantages, to 12 digits."""
    values = getattr(adv, name)(torch.tensor(REWARDS, dtype=torch.float64))
    assert values.tolist() == pytest.approx(getattr(oracle, name)(REWARDS), rel=1e-12, abs=1e-12)


def test_reinforce_plus_plus() -> None:
    """I17: token KL penalties, undiscounted return, whitening over all tokens with unbiased variance."""
    rewards, beta = [1.0, 0.0, -0.5, 0.25], 0.1
    episodes = []
    for i, reward in enumerate(rewards):
        reward_T = -beta * (flat([CASE.old[i]]) - flat([CASE.ref[i]]))
        reward_T[-1] += reward
        episodes.append(adv.EpisodeRewards(key=AttemptKey(0, i), reward=float(reward_T.sum()), reward_T=reward_T))
    expected = oracle.reinforce_plus_plus(rewards, CASE.old, CASE.ref, beta)
    for got, want in zip(adv.batch_whitened(episodes), expected, strict=True):
        assert got.tolist() == pytest.approx(want, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("length", [1, 11, 12, 13, 15, 16, 17, 40])
def test_overlong(length: int) -> None:
    """I17: DAPO's soft punishment around both of its bounds."""
    assert overlong_penalty(length, 16, 4) == oracle.overlong(length, 16, 4)
