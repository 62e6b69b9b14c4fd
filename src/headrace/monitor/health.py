"""Health checks over the metrics of each rollout batch: pure, no input or output, so that tests feed them curves.

An alarm says what was seen, where, and what to do. Checks look at moving averages and ask for both a large and a
statistically clear change, since a reward over 32 samples moves by 0.09 from batch to batch on its own.
FAILURES 48, 66, 70, 71, 73 and D13, D17, D19 are the failures behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

from headrace.config.schema import GuardsConfig

Level = Literal["warn", "stop"]

COLLAPSE_FRACTION = 0.7
"""Share of the best moving average (above the floor of the reward) that must be lost."""
COLLAPSE_Z = 6.0
"""Standard errors that the loss must exceed: the best of many windows is itself lucky by 2 to 3 of them. Simulated
runs of 150 batches that do not collapse raise the alarm in under 1 % of cases where samples are independent (32 to
256 a batch), and in under 5 % where each task is all but solved or hopeless (tests/unit/test_monitor_health.py)."""
ENTROPY_LOST = 0.1
"""Entropy below this share of its first value, without a gain in reward, is a collapse."""
ENTROPY_BLOWN_UP = 3.0
ENTROPY_GARBLED_NATS = 2.0
"""FAILURES 70: above 2 nats a token the text is garbled."""
GAP_FACTOR = 3.0
GAP_MIN_NATS = 0.05
ZERO_VARIANCE_SHARE = 0.8
ERROR_SHARE_WARN = 0.05
TRUNCATED_SHARE = 0.9
TRUNCATED_RISE = 0.25
DISTINCT_SHARE = 0.26
"""A little above 1 / 4: identical members of a group of 4 or more."""
DISTINCT_MIN_NATS = 4.5
"""Mean entropy of a whole reply (about 90 equally likely ones) from which equal replies cannot be chance. At 3 nats the
learning fixture, where some tasks are certain and others open, comes down to 0.28 by itself."""
GRAD_NORM_FACTOR = 10.0
MAX_ADVANTAGE = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing that is wrong as of ``step``. ``is_new`` is False while it goes on."""

    name: str
    level: Level
    message: str
    step: int
    since_step: int
    is_new: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


class HealthMonitor:
    """Feed it each batch's metrics, in order; it returns the alarms that hold now.

    A resumed run feeds it the recorded lines first, so that references reach back before the restart. Metrics that
    are missing leave their checks silent.

    Example::

        monitor = HealthMonitor(config.guards)
        for alarm in monitor.update({"step": 12, "reward/mean": 0.4, "reward/std": 0.5, "reward/num": 64}):
            print(alarm)
    """

    def __init__(self, config: GuardsConfig, on_over_optimisation: Level = "warn") -> None:
        self._config = config
        self._half = max(2, config.collapse_window // 2)
        """Batches of a moving average: half the window is now, the other half what it is compared with."""
        self._history: dict[str, list[float]] = {}
        self._references: dict[int, tuple[float, int]] = {}
        """Batches averaged -> (reward, last step) that a collapse is measured from."""
        self._current: set[str] = set()
        self._steps: list[int] = []
        self._since: dict[str, int] = {}
        self._checks: dict[str, tuple[Level, Callable[[], str | None]]] = {
            "reward_collapse": (config.on_collapse, self._reward_collapse),
            "entropy_collapse": (config.on_collapse, self._entropy_collapse),
            "entropy_blow_up": (config.on_collapse, self._entropy_blow_up),
            "logprob_gap_rising": ("warn", self._gap_rising),
            "zero_variance": ("warn", self._zero_variance),
            "error_share": ("stop", self._error_share_stop),
            "errors": ("warn", self._error_share_warn),
            "truncation": ("warn", self._truncation),
            "identical_replies": ("warn", self._identical_replies),
            "grad_norm_spike": ("warn", self._grad_norm_spike),
            "large_advantage": ("warn", self._large_advantage),
            "not_finite": ("stop", self._not_finite),
            "over_optimisation": (on_over_optimisation, self._over_optimisation),
        }

    def update(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Take in one batch; ``metrics`` has ``step`` and the flat numbers of its line in metrics.jsonl."""
        self._steps.append(int(metrics.get("step", len(self._steps) + 1)))
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                # Lines that lack a metric (a batch without scored episode) leave no hole in its own history.
                self._history.setdefault(name, []).append(float(value))
        self._current = {k for k, v in metrics.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        self._remember_best()
        step = self._steps[-1]
        alarms = []
        for name, (level, check) in self._checks.items():
            message = check()
            if message is None:
                self._since.pop(name, None)
                continue
            is_new = name not in self._since
            since = self._since.setdefault(name, step)
            alarms.append(Alarm(name=name, level=level, message=message, step=step, since_step=since, is_new=is_new))
        return alarms

    # ------------------------------------------------------------------------------------ histories

    def _now(self, name: str) -> float | None:
        """This batch's value; None where this batch has none."""
        return self._history[name][-1] if name in self._current else None

    def _mean(self, name: str) -> float | None:
        """Moving average over the last half window; None until it is full or where this batch has no value."""
        values = self._history.get(name, [])
        return fmean(values[-self._half :]) if name in self._current and len(values) >= self._half else None

    def _first(self, name: str) -> float | None:
        """Mean of the first half window; None until a second one has followed it."""
        values = self._history.get(name, [])
        return fmean(values[: self._half]) if len(values) >= 2 * self._half else None

    def _remember_best(self) -> None:
        """Keep what a fall is measured from: the best moving averages of two widths, and the first one and two batches
        (a learning rate far too high ruins the policy in its first update, before any average is full)."""
        rewards = self._history.get("reward/mean", [])
        if "reward/mean" not in self._current:
            return
        step = self._steps[-1]
        if len(rewards) in (1, 2):
            self._references[len(rewards)] = (fmean(rewards), step)
        for width in (self._half, 2 * self._half):
            if width > 2 and len(rewards) >= width + self._half:
                candidate = fmean(rewards[-width - self._half : -self._half])
                if width not in self._references or candidate > self._references[width][0]:
                    self._references[width] = (candidate, step - self._half)

    def _reward_noise(self) -> float:
        """Standard deviation of one batch's mean reward.

        The larger of what the samples say, std / sqrt(num), and of what successive batches say: half their mean
        squared difference (von Neumann 1941). The second sees that the episodes of a group are not independent. The
        one to three largest differences are left out, so that a fall does not hide itself in the noise it makes.
        """
        rewards = self._history["reward/mean"]
        stds, nums = self._history.get("reward/std", []), self._history.get("reward/num", [])
        sampling = max((s * s / n for s, n in zip(stds, nums, strict=False) if n > 0), default=0.0)
        num_dropped = min(3, max(1, len(rewards) // 8))
        squares = sorted((b - a) ** 2 for a, b in pairwise(rewards))[:-num_dropped]
        between = fmean(squares) / 2 if squares else 0.0
        return math.sqrt(max(sampling, between))

    # --------------------------------------------------------------------------------------- checks

    def _reward_collapse(self) -> str | None:
        rewards = self._history.get("reward/mean", [])
        if "reward/mean" not in self._current or not self._references:
            return None
        floor, noise = min(0.0, min(rewards)), self._reward_noise()
        for width, (best, step) in self._references.items():
            # One or two batches are weak evidence, and the noise is not known yet: they wait for a whole window.
            for recent in (self._half, 2 * self._half) if width > 2 else (2 * self._half,):
                if len(rewards) < recent + width:
                    continue
                now = fmean(rewards[-recent:])
                is_clear = best - now > COLLAPSE_Z * noise * math.sqrt(1 / width + 1 / recent)
                if is_clear and best - now > COLLAPSE_FRACTION * (best - floor):
                    return (
                        f"the mean reward of the last {recent} batches is {now:.3f}; around step {step} it was "
                        f"{best:.3f}. The policy has collapsed, or the tasks became much harder. Lower "
                        "trainer.learning_rate (a third is a good try) and go on from a checkpoint before the fall"
                    )
        return None

    def _entropy_collapse(self) -> str | None:
        entropy, first = self._mean("policy/entropy_mean"), self._first("policy/entropy_mean")
        if entropy is None or first is None or entropy > ENTROPY_LOST * first:
            return None
        reward, reward_first = self._mean("reward/mean"), self._first("reward/mean")
        if reward is not None and reward_first is not None:
            # Sharpening onto right answers also takes entropy away, and is what training is for.
            has_risen = reward - reward_first > 2 * self._reward_noise() * math.sqrt(2 / self._half)
            if has_risen or reward >= 0.9:
                return None
        return (
            f"the entropy fell from {first:.3g} to {entropy:.3g} nats a token without a gain in reward: the policy "
            "repeats itself and explores no more. Lower trainer.learning_rate, or raise the upper clip bound or "
            "the sampling temperature"
        )

    def _entropy_blow_up(self) -> str | None:
        entropy, first = self._mean("policy/entropy_mean"), self._first("policy/entropy_mean")
        if entropy is None or first is None or entropy <= max(ENTROPY_GARBLED_NATS, ENTROPY_BLOWN_UP * first):
            return None
        return (
            f"the entropy rose from {first:.3g} to {entropy:.3g} nats a token: replies turn into garbled text. Lower "
            "trainer.learning_rate, and look at sample episodes in the report"
        )

    def _gap_rising(self) -> str | None:
        name = "policy/logprob_gap_p95"
        gap, first = self._mean(name), self._first(name)
        if gap is None or first is None or gap <= max(GAP_MIN_NATS, GAP_FACTOR * first):
            return None
        return (
            f"the gap between engine and trainer log-probabilities (95th percentile) rose from {first:.3g} to "
            f"{gap:.3g} nats: they drift apart, which comes before instability. Compute in float32, lower "
            "rollout.max_staleness, or use an importance correction"
        )

    def _zero_variance(self) -> str | None:
        share, reward = self._mean("reward/zero_variance_share"), self._mean("reward/mean")
        if share is None or share <= ZERO_VARIANCE_SHARE:
            return None
        remedy = "make tasks easier or harder, use larger groups, or turn on dynamic sampling"
        if reward is not None and reward >= 0.9:
            remedy = "the tasks are solved: stop here, or take harder ones"
        return f"in {share:.0%} of groups all members scored the same, so they teach nothing; {remedy}"

    def _error_share_stop(self) -> str | None:
        share, bound = self._now("score/error_share"), self._config.max_error_share
        if share is None or share <= bound:
            return None
        return (
            f"{share:.0%} of this batch's episodes have no score (guards.max_error_share is {bound:.0%}). See their "
            "classes in metrics.jsonl (score/errors/...) and mend the reward, the environment or the engine"
        )

    def _error_share_warn(self) -> str | None:
        share = self._mean("score/error_share")
        if share is None or share <= ERROR_SHARE_WARN or self._error_share_stop() is not None:
            return None
        return (
            f"{share:.0%} of the last {self._half} batches' episodes have no score. They are left out of baselines; "
            "see their classes in metrics.jsonl (score/errors/...)"
        )

    def _truncation(self) -> str | None:
        name = "episode/truncated_share"
        share, first = self._mean(name), self._first(name)
        if share is None:
            return None
        has_risen = first is not None and share - first > TRUNCATED_RISE
        if share <= TRUNCATED_SHARE and not has_risen:
            return None
        rise = f" (it was {first:.0%} at first)" if has_risen else ""
        return (
            f"{share:.0%} of replies run into sampling.max_new_tokens{rise}: their ends are never seen by the reward. "
            "Raise it, or use overlong shaping"
        )

    def _identical_replies(self) -> str | None:
        distinct, entropy = self._mean("episode/distinct_reply_share"), self._mean("policy/entropy_mean")
        length = self._mean("episode/length_mean")
        if distinct is None or entropy is None or length is None:
            return None
        if distinct >= DISTINCT_SHARE or entropy * length < DISTINCT_MIN_NATS:
            return None
        return (
            f"only {distinct:.0%} of a group's replies differ, although the policy is random enough for more "
            f"({entropy * length:.1f} nats a reply): attempts seem to share a random seed. Check the engine's seeds"
        )

    def _grad_norm_spike(self) -> str | None:
        now = self._now("train/grad_norm")
        before = [g for g in self._history.get("train/grad_norm", [])[:-1] if 0 < g < math.inf][-4 * self._half :]
        if now is None or len(before) < self._half:
            return None
        # Against the largest too: norms are heavy-tailed where most groups are skipped.
        if now <= GRAD_NORM_FACTOR * median(before) or now <= 3 * max(before):
            return None
        return (
            f"the gradient norm is {now:.3g}, {now / median(before):.0f} times its recent median. Clipping bounds this "
            "step; if it happens again, lower trainer.learning_rate and look at the samples of this batch"
        )

    def _large_advantage(self) -> str | None:
        largest = self._now("train/advantage_max_abs")
        if largest is None or largest <= MAX_ADVANTAGE:
            return None
        return (
            f"the largest advantage is {largest:.3g} in size (bound {MAX_ADVANTAGE:g}): a division by a deviation "
            "near zero, or rewards of very different scale. Check the rewards' ranges and the normalisation"
        )

    def _over_optimisation(self) -> str | None:
        """Decided by evaluation/gold.py at each evaluation; it holds until the next one says otherwise."""
        if not self._history.get("gold/over_optimised", [0.0])[-1]:
            return None
        change, rise, since = (self._history[f"gold/{n}"][-1] for n in ("change", "proxy_rise", "reference_update"))
        return (
            f"on held-out tasks gold fell by {-change:.3g} since update {since:.0f} while the reward went on, "
            f"{rise:.3g} above its start, both beyond chance: the policy exploits the reward. Go back to a checkpoint "
            "before, raise algorithm.kl.coefficient, or train the reward model on replies of this policy"
        )

    def _not_finite(self) -> str | None:
        bad = sorted(name for name in self._current if not math.isfinite(self._history[name][-1]))
        if not bad:
            return None
        return (
            f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not a finite number. Go on from the last checkpoint "
            "with a lower trainer.learning_rate; if it comes back at once, look for it in the rewards"
        )


def worst(alarms: Sequence[Alarm]) -> Level | None:
    """'stop' where any alarm asks for it, else 'warn', else None."""
    if any(a.level == "stop" for a in alarms):
        return "stop"
    return "warn" if alarms else None
