"""What a seed means: the run's configuration, the weather of the transport, how the actors behave, and who dies when.

Everything that an actor does follows from (seed, what it is asked), not from when it is asked: an attempt that is
issued again meets the same environment and the same judge.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config.load import restore_config
from headrace.config.schema import RunConfig

NUM_TASKS = 7
NUM_FAULTY_LIVES = 3
"""After so many lives nothing is killed any more, so that every run must come to its end."""

VICTIMS = ("controller", "controller", "controller", "engine", "engine", "trainer", "reward", "environment", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Of every link. Delays are exponential."""

    loss: float
    duplicate: float
    delay_s: float
    long_delay: float
    """Share of messages that take a hundred times as long, which is how they overtake each other by far."""


CALM = Weather(loss=0.0, duplicate=0.0, delay_s=0.01, long_delay=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Before event number ``event`` of its life ``victim`` dies. ``is_noticed``: its carrier says so; else silence."""

    event: int
    victim: str
    is_noticed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run and what happens to it."""

    seed: int
    config: RunConfig
    weather: Weather
    num_workers: int
    max_turns: int
    slow: float
    """Share of groups whose tokens take twenty times as long."""
    failures: float
    """Share of replies, environment steps and scores that fail or hang."""
    faults: tuple[tuple[Fault, ...], ...]
    """Of each life."""

    def chance(self, *what: object) -> float:
        """A number in [0, 1) that depends on the seed and on ``what`` alone."""
        return zlib.crc32("/".join(map(str, (self.seed, *what))).encode()) / 2**32

    def fails(self, *what: object) -> bool:
        return self.failures > 0 and self.chance("fails", *what) < self.failures


def scenario(seed: int, folder: Path, *, calm: bool = False) -> Scenario:
    """``calm``: the same run without loss, delay, and faults, for comparison."""
    rng = random.Random(f"headrace/simulate/{seed}")
    config = restore_config(_config(rng, seed, folder), f"seed {seed}")
    weather = Weather(
        loss=rng.choice((0.0, 0.05, 0.3)),
        duplicate=rng.choice((0.0, 0.1, 0.4)),
        delay_s=rng.choice((0.01, 0.3, 2.0)),
        long_delay=rng.choice((0.0, 0.02)),
    )
    rollout = config.rollout
    # Where one failed member costs a whole group, more failures only make longer runs.
    is_strict = rollout.on_failure == "discard" or rollout.min_group_size == rollout.group_size
    num_attempts = config.trainer.num_batches * rollout.groups_per_batch * rollout.group_size
    num_events = 200 + 30 * num_attempts
    faults = tuple(
        tuple(
            Fault(event=rng.randrange(num_events), victim=rng.choice(VICTIMS), is_noticed=rng.random() < 0.6)
            for _ in range(rng.choice((0, 1, 1, 2, 3)))
        )
        for _ in range(NUM_FAULTY_LIVES)
    )
    return Scenario(
        seed=seed,
        config=config,
        weather=CALM if calm else weather,
        num_workers=rng.choice((1, 2)),
        max_turns=rng.choice((1, 1, 2)),
        slow=rng.choice((0.0, 0.2)),
        failures=rng.choice((0.0, 0.0, 0.02, 0.03 if is_strict else 0.12)),
        faults=() if calm else faults,
    )


def _config(rng: random.Random, seed: int, folder: Path) -> dict[str, Any]:
    group_size = rng.choice((2, 3))
    num_engines = rng.choice((0, 0, 2, 3))
    fleet = {
        "num_engines": num_engines,
        "max_engine_lag": rng.choice((0, 0, 1)),
        "max_restarts": rng.choice((1, 3)),
        "start_deadline_s": 60.0,
        "sync_deadline_s": 60.0,
    }
    return {
        "fleet": fleet if num_engines else None,
        "name": f"seed-{seed}",
        "seed": seed,
        "output_dir": str(folder),
        "model": {"path": "none"},
        "tasks": {"type": "python", "factory": "none:none"},
        "rewards": [{"type": "exact"}],
        "engine": {"weights": "copy"},
        "sampling": {"max_new_tokens": rng.choice((2, 4))},
        "algorithm": {"dynamic_sampling": rng.random() < 0.25},
        "trainer": {"num_batches": rng.choice((3, 4, 5, 6)), "num_minibatches": rng.choice((1, 1, 2))},
        "rollout": {
            "groups_per_batch": rng.choice((1, 2, 3)),
            "group_size": group_size,
            "min_group_size": rng.choice((2, group_size)),
            "on_failure": rng.choice(("refill", "refill", "shrink", "discard")),
            "max_retries": rng.choice((0, 1, 2)),
            "max_staleness": rng.choice((0, 0, 1, 2, 3)),
            "on_overage": rng.choice(("wait", "wait", "mask", "drop")),
            "max_concurrent": rng.choice((3, 64)),
            "max_filter_factor": rng.choice((2, 3)),
            "generation_deadline_s": 300.0,
            "episode_deadline_s": 400.0,
        },
        "evaluation": {
            "every": rng.choice((0, 0, 2)),
            "at_start": rng.random() < 0.2,
            "at_end": rng.random() < 0.2,
            "num_samples": 1,
            "deadline_s": 500.0,
        },
        "checkpoint": {"every": rng.choice((0, 1, 1, 2, 3)), "keep": rng.choice((1, 2)), "overlap": rng.random() < 0.3},
        "waits": {
            "forward_backward_s": 600.0,
            "optim_step_s": 600.0,
            "publish_s": 600.0,
            "checkpoint_s": 900.0,
            "rollout_batch_s": 20000.0,
        },
        "guards": {"max_error_share": 1.0, "stall_min_s": 3000.0},
        "monitor": {"progress": False},
    }
