"""I4, F54, F68, F95: training on a mesh of 2 and 4 processes equals training in one, whatever the axes.

All layouts of one size share their processes (starting them costs more than most checks); each test looks at one
layout's results. The workers' code is ``parallel_worker.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parallel_worker import run

BOUNDS = {"float32": 1e-5, "float64": 1e-10}
COMPARED = ("loss", "gradient", "norm", "weights_sgd", "weights_adamw", "logprobs", "last_logprobs", "metrics")

Job = dict[str, Any]

BALANCED = {"router_aux_coefficient": 0.5}
REPLAYED = {"router_replay": True}

ONE_AXIS: dict[str, Job] = {
    "dp_replicate": {"model": "llama-tied", "layout": {"dp_replicate": 2}},
    "dp_shard": {"model": "llama-tied", "layout": {"dp_shard": 2}},
    "tp": {"model": "qwen3-untied", "layout": {"tp": 2}},
    "tp, tied": {"model": "llama-tied", "layout": {"tp": 2}},
    "pp, gpipe": {"model": "qwen3-untied", "layout": {"pp": 2, "pp_schedule": "gpipe"}},
    "pp, 1f1b": {"model": "llama-tied", "layout": {"pp": 2, "pp_schedule": "1f1b"}},
    "cp": {"model": "llama-tied", "layout": {"cp": 2}},
    "ep": {"model": "qwen3-moe", "layout": {"ep": 2}},
    "ep, balanced": {"model": "qwen3-moe", "layout": {"ep": 2}, "trainer": BALANCED},
    "tp, balanced": {"model": "qwen3-moe", "layout": {"tp": 2}, "trainer": BALANCED},
    "cp, balanced, replayed": {"model": "qwen3-moe", "layout": {"cp": 2}, "trainer": BALANCED | REPLAYED},
}
PAIRS: dict[str, Job] = {
    "dp_shard x tp": {"model": "qwen3-untied", "layout": {"dp_shard": 2, "tp": 2}},
    "dp_shard x pp": {"model": "llama-tied", "layout": {"dp_shard": 2, "pp": 2}},
    "dp_shard x cp": {"model": "llama-tied", "layout": {"dp_shard": 2, "cp": 2}},
    "dp_shard x ep": {"model": "qwen3-moe", "layout": {"dp_shard": 2, "ep": 2}},
    "tp x pp": {"model": "qwen3-untied", "layout": {"tp": 2, "pp": 2}},
    "tp x cp": {"model": "qwen3-untied", "layout": {"tp": 2, "cp": 2}},
    "tp x ep": {"model": "qwen3-moe", "layout": {"tp": 2, "ep": 2}},
    "pp x ep, balanced, replayed": {
        "model": "qwen3-moe",
        "layout": {"pp": 2, "ep": 2},
        "trainer": BALANCED | REPLAYED,
    },
}
MORE_PAIRS: dict[str, Job] = {
    "dp_replicate x dp_shard": {"model": "llama-tied", "layout": {"dp_replicate": 2, "dp_shard": 2}},
    "dp_replicate x ep": {"model": "qwen3-moe", "layout": {"dp_replicate": 2, "ep": 2}},
    "dp_replicate x tp": {"model": "llama-tied", "layout": {"dp_replicate": 2, "tp": 2}},
    "pp x cp, gpipe": {"model": "llama-tied", "layout": {"pp": 2, "cp": 2, "pp_schedule": "gpipe"}},
    "pp x ep": {"model": "qwen3-moe", "layout": {"pp": 2, "ep": 2}},
    "cp x ep": {"model": "qwen3-moe", "layout": {"cp": 2, "ep": 2}},
    "tp, experts whole": {"model": "qwen3-moe", "layout": {"tp": 2, "dp_shard": 2}},
    "dp_shard 4": {"model": "qwen3-moe", "layout": {"dp_shard": 4}},
    "tp 4": {"model": "qwen3-untied", "layout": {"tp": 4}},
    "cp 4": {"model": "qwen3-untied", "layout": {"cp": 4}},
    "ep 4": {"model": "qwen3-moe", "layout": {"ep": 4}},
    "dp_shard x ep, balanced": {"model": "qwen3-moe", "layout": {"dp_shard": 2, "ep": 2}, "trainer": BALANCED},
    "tp x ep, balanced": {"model": "qwen3-moe", "layout": {"tp": 2, "ep": 2}, "trainer": BALANCED},
    "cp x tp, balanced, replayed": {
        "model": "qwen3-moe",
        "layout": {"cp": 2, "tp": 2},
        "trainer": BALANCED | REPLAYED,
    },
    "pp 4, gpipe": {"model": "llama-tied", "layers": 4, "layout": {"pp": 4, "pp_schedule": "gpipe"}},
    "pp 4, 1f1b": {"model": "qwen3-untied", "layers": 5, "layout": {"pp": 4}},
}


def parity_jobs(layouts: dict[str, Job], *dtypes: str) -> dict[str, Job]:
    return {
        f"{name}, {dtype}": {**job, "check": "parity", "dtype": dtype}
        for name, job in layouts.items()
        for dtype in dtypes
    }


TWO = parity_jobs(ONE_AXIS, "float32", "float64")
FOUR = parity_jobs(PAIRS, "float64")
SLOW_FOUR = {
    "float32": parity_jobs(MORE_PAIRS | PAIRS, "float32"),
    "float64": parity_jobs(MORE_PAIRS, "float64"),
}


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return run(TWO, 2, 240)


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    return run(FOUR, 4, 240)


@pytest.fixture(scope="module")
def slow_float32() -> dict[str, Any]:
    return run(SLOW_FOUR["float32"], 4, 600)


@pytest.fixture(scope="module")
def slow_float64() -> dict[str, Any]:
    return run(SLOW_FOUR["float64"], 4, 600)


def check_numbers(job: Job, found: dict[str, Any]) -> None:
    bound = BOUNDS[job["dtype"]]
    # log-probabilities and metrics leave the trainer in float32
    limits = {n: max(bound, 1e-6) if n in ("logprobs", "last_logprobs", "metrics") else bound for n in COMPARED}
    assert {n: found[n] for n in COMPARED if not found[n] <= limits[n]} == {}
    assert found["moved_sgd"] > 1e-4 and found["moved_adamw"] > 1e-4, "steps too small to prove anything"


def check_sharding(job: Job, found: dict[str, Any]) -> None:
    """Local shapes: every weight is split as often as the layout says, and held by its pipeline stage only."""
    axes = {"dp_replicate": 1, "dp_shard": 1, "ep": 1, "cp": 1, "tp": 1, "pp": 1} | job["layout"]
    fsdp, efsdp = axes["ep"] * axes["dp_shard"] * axes["cp"], axes["dp_shard"] * axes["cp"] * axes["tp"]
    holders: dict[str, int] = {}
    for local, whole in zip(found["local"], found["global"], strict=True):
        for name, shape in local.items():
            holders[name] = holders.get(name, 0) + 1
            norm = "norm" in name or name.endswith("mlp.gate.weight")  # routers are replicated over tp, too
            parts = fsdp if norm else fsdp * axes["tp"]
            if ".experts." in name and axes["ep"] * axes["tp"] > 1:
                parts = efsdp * axes["ep"]
            assert size(shape) * parts == size(whole[name]), (name, shape, whole[name], parts)
    tied = job["model"].rpartition("-")[2] == "tied"
    for name, count in holders.items():
        both_ends = 2 if tied and "embed_tokens" in name and axes["pp"] > 1 else 1
        assert count * axes["pp"] == len(found["local"]) * both_ends, name


def size(shape: list[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


@pytest.mark.parametrize("name", TWO)
def test_two_processes(name: str, two: dict[str, Any]) -> None:
    check_numbers(TWO[name], two[name])
    check_sharding(TWO[name], two[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_processes(name: str, four: dict[str, Any]) -> None:
    check_numbers(FOUR[name], four[name])
    check_sharding(FOUR[name], four[name])


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("dtype", "name"), [(dtype, name) for dtype, jobs in SLOW_FOUR.items() for name in jobs])
def test_more_layouts_of_four_processes(dtype: str, name: str, request: pytest.FixtureRequest) -> None:
    found: dict[str, Any] = request.getfixturevalue(f"slow_{dtype}")
    check_numbers(SLOW_FOUR[dtype][name], found[name])
    check_sharding(SLOW_FOUR[dtype][name], found[name])


# --------------------------------------------------------------------- what else must hold on every layout

CHECKPOINTS: dict[str, Job] = {
    "ep": {
        "model": "qwen3-moe",
        "layout": {"dp_shard": 2, "ep": 2},
        "restore": {
            "tp x pp": {"tp": 2, "pp": 2},
            "dp_shard": {"dp_shard": 4},
            "cp x ep": {"cp": 2, "ep": 2},
        },
    },
    "tp x pp, tied": {
        "model": "llama-tied",
        "layout": {"tp": 2, "pp": 2},
        "restore": {
            "dp_shard x tp": {"dp_shard": 2, "tp": 2},
            "dp_replicate x pp": {"dp_replicate": 2, "pp": 2},
            "dp_shard x cp": {"dp_shard": 2, "cp": 2},
        },
    },
}


EXTRAS: dict[str, Job] = {
    "dp_shard x tp": {"layout": {"dp_shard": 2, "tp": 2}, "by_budget": True, "recomputed": 1},
    "pp x cp": {"layout": {"pp": 2, "cp": 2}, "by_budget": False, "recomputed": 1},
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    jobs: dict[str, Job] = {
        "publish, ep": {
            "check": "publish",
            "model": "qwen3-moe",
            "layout": {"dp_shard": 2, "ep": 2, "bucket_bytes": 100_000},
        },
        "publish, pp": {
            "check": "publish",
            "model": "llama-tied",
            "layout": {"tp": 2, "pp": 2, "bucket_bytes": 50_000},
        },
        "uneven, dp_shard": {"check": "uneven", "model": "llama-tied", "layout": {"dp_shard": 4}},
        "uneven, ep": {"check": "uneven", "model": "qwen3-moe", "layout": {"ep": 2, "cp": 2}},
        "uneven, pp": {"check": "uneven", "model": "llama-tied", "layout": {"dp_shard": 2, "pp": 2}},
        "faults": {"check": "faults", "model": "llama-tied", "layout": {"dp_shard": 2, "pp": 2}},
        "offload": {
            "check": "parity",
            "model": "llama-tied",
            "layout": {"dp_shard": 2, "tp": 2, "offload_optimizer": True},
        },
    }
    for name, job in EXTRAS.items():
        for dtype in ("float64", "bfloat16"):
            jobs[f"extras, {name}, {dtype}"] = {"check": "extras", "model": "llama-tied", "dtype": dtype, **job}
    jobs |= {
        f"checkpoint, {n}": {"check": "checkpoint", "folder": str(folder / n), **j} for n, j in CHECKPOINTS.items()
    }
    return run({name: {"dtype": "float64", **job} for name, job in jobs.items()}, 4, 240)


@pytest.mark.parametrize("name", ["publish, ep", "publish, pp"])
def test_published_buckets_are_the_whole_model_and_bounded(name: str, others: dict[str, Any]) -> None:
    found = others[name]
    assert found["missing"] == [] and found["error"] == 0.0 and found["bounded"]
    assert found["largest_bytes"] < found["whole_bytes"] / 2, "the whole model in one bucket proves nothing"


@pytest.mark.parametrize("name", ["uneven, dp_shard", "uneven, ep", "uneven, pp"])
def test_processes_without_samples_work_along(name: str, others: dict[str, Any]) -> None:
    """F95: one episode on four processes neither hangs nor changes the gradient; nothing to learn moves nothing."""
    assert others[name]["error"] <= 1e-10
    assert others[name]["unmoved"] and others[name]["num_empty_steps"] == 1.0


def test_faults_of_one_process_are_errors_on_all(others: dict[str, Any]) -> None:
    """I13: a NaN loss, different samples, and an infinite weight: the same error everywhere, nothing changed."""
    found = others["faults"]
    assert found["unchanged"] and found["version"] == 0
    for loss, samples, weights in found["messages"]:
        assert "is nan in the micro-batch of g1m1/0" in loss
        assert "different samples (rank 0 has 3, rank 1 has 4 or others; 3 ranks differ)" in samples
        assert "1 shards of weights are not finite" in weights


def test_optimizer_in_host_memory_makes_the_same_steps(others: dict[str, Any]) -> None:
    assert max(others["offload"][n] for n in ("gradient", "weights_sgd", "weights_adamw")) <= 1e-10


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", EXTRAS)
def test_reference_recomputing_and_bfloat16(name: str, dtype: str, others: dict[str, Any]) -> None:
    """The reference stays where it was while the policy moves; recomputed activations give the same gradient; bfloat16
    compute over float32 masters differs by its rounding only."""
    found = others[f"extras, {name}, {dtype}"]
    bound, of_logprobs = (1e-10, 1e-6) if dtype == "float64" else (5e-2, 1e-1)
    assert max(found["loss"], found["gradient"], found["weights"]) <= bound
    assert found["reference"] <= of_logprobs < found["moved"]


@pytest.mark.parametrize(
    ("saved", "restored"),
    [(n, r) for n, job in CHECKPOINTS.items() for r in (*job["restore"], "one process", "from one process")],
)
def test_a_checkpoint_resumes_in_another_layout(saved: str, restored: str, others: dict[str, Any]) -> None:
    """Weights, both moments and the next step are those of one process that never stopped."""
    found = others[f"checkpoint, {saved}"][restored]
    assert found.keys() == {"weights", "exp_avg", "exp_avg_sq", "next_step"}
    assert max(found.values()) <= 1e-10
