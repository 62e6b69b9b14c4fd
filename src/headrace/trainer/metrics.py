"""Sums and counts over the micro-batches of one minibatch, turned into means once (never a mean of means, F53)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

RATIO_BAND = (0.9, 1.1)


class MinibatchMetrics:
    """Gathers what the micro-batches of one minibatch report. Per-token tensors are detached and on the CPU."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._gaps: list[Tensor] = []
        self._fresh_errors: list[Tensor] = []
        self._engine_gaps: dict[str, list[Tensor]] = {"gap": [], "in_flight_gap": []}
        self._entropies: list[Tensor] = []
        self.loss = 0.0

    def add(self, algorithm_metrics: Mapping[str, tuple[float, float]], loss: float) -> None:
        self.loss += loss
        for name, (total, count) in algorithm_metrics.items():
            old_total, old_count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (old_total + total, old_count + count)

    def add_tokens(self, *, proximal_N: Tensor | None, behaviour_N: Tensor, entropy_N: Tensor) -> None:
        """``proximal_N``: of the policy at the start of the rollout batch; None where nobody computed it."""
        if proximal_N is not None:
            self._gaps.append((proximal_N - behaviour_N).detach().float().cpu())
        self._entropies.append(entropy_N.detach().float().cpu())

    def add_fresh(self, current_N: Tensor, behaviour_N: Tensor) -> None:
        """Tokens that the weights of this very moment sampled: their ratio must be 1 (I5)."""
        self._fresh_errors.append((current_N - behaviour_N).detach().float().exp().sub(1).abs().cpu())

    def add_same_weights(self, trainer_N: Tensor, behaviour_N: Tensor, is_whole_N: Tensor) -> None:
        """Tokens that engine and trainer scored with the same weights, those of the batch's start. ``is_whole_N``: one
        version sampled the whole reply, so the two must agree. Elsewhere the reply began under an older version, and
        the gap is what its older keys and values cost (``kv_policy = "keep"``; with recompute there is none)."""
        gap_N = (trainer_N - behaviour_N).detach().float().abs()
        self._engine_gaps["gap"].append(gap_N[is_whole_N].cpu())
        self._engine_gaps["in_flight_gap"].append(gap_N[~is_whole_N].cpu())

    def merge(self, other: MinibatchMetrics) -> None:
        """Add what another process gathered of the same minibatch."""
        self.add(other._sums, other.loss)
        self._gaps += other._gaps
        self._fresh_errors += other._fresh_errors
        for name, gaps in other._engine_gaps.items():
            self._engine_gaps[name] += gaps
        self._entropies += other._entropies

    def result(self) -> dict[str, float]:
        """Names and values; a metric about tokens is absent where there was no such token."""
        out = {"loss": self.loss}
        out.update({name: total / count for name, (total, count) in self._sums.items() if count})
        if self._gaps:
            signed_N = torch.cat(self._gaps)
            gap_N = signed_N.abs()
            p50, p95, p99 = _quantiles(gap_N, (0.5, 0.95, 0.99))
            ratio_N = signed_N.exp()
            outside = (ratio_N < RATIO_BAND[0]) | (ratio_N > RATIO_BAND[1])
            out["logprob_gap_p50"], out["logprob_gap_p95"] = p50, p95
            out["logprob_gap_p99"], out["logprob_gap_max"] = p99, float(gap_N.max())
            out["ratio_outside_share"] = float(outside.float().mean())
        if self._entropies:
            out["entropy"] = float(torch.cat(self._entropies).mean())
        for name, gaps in self._engine_gaps.items():
            gap_N = torch.cat(gaps) if gaps else torch.empty(0)
            if len(gap_N):
                (p99,) = _quantiles(gap_N, (0.99,))
                out[f"engine/{name}_p99"], out[f"engine/{name}_max"] = p99, float(gap_N.max())
                out[f"engine/num_{name}_tokens"] = float(len(gap_N))
        errors_N = torch.cat(self._fresh_errors) if self._fresh_errors else torch.empty(0)
        if len(errors_N):
            out["max_ratio_error"] = float(errors_N.max())
        return out


def _quantiles(values_N: Tensor, levels: tuple[float, ...]) -> list[float]:
    """By sorting: torch.quantile refuses more than 2**24 entries."""
    ordered_N = values_N.sort().values
    return [float(ordered_N[min(len(ordered_N) - 1, int(level * len(ordered_N)))]) for level in levels]
