"""The loop against the plainest program that can be written over the same verbs (I8, I18)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import assert_same_weights, books, last_weights, small_config, surviving, tokens_by_attempt

from headrace.algorithms.registry import build_algorithm
from headrace.checked import Policy, load_policy
from headrace.config.schema import RunConfig
from headrace.control.cursor import TaskCursor
from headrace.control.samples import samples_from_episode
from headrace.engine_wiring import build_engine
from headrace.environments.runner import attempt_seed
from headrace.environments.tasks import build_tasks
from headrace.protocols import Engine
from headrace.rewards.build import build_rewards
from headrace.run import train
from headrace.trainer.plan import num_steps_per_batch, plan_update
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import (
    AttemptKey,
    Episode,
    GenerationRequest,
    Group,
    Outcome,
    PolicyVersion,
    RolloutBatch,
    Sampling,
    Segment,
    Source,
    Task,
    Trace,
    Turn,
)


async def sequential(config: RunConfig) -> dict[str, torch.Tensor]:
    """Generate a batch, score it, train it, publish it, again. Returns the trained weights."""
    torch.set_num_threads(1)
    policy = load_policy(config)
    tasks = build_tasks(config.tasks).train
    reward = build_rewards(config.rewards)
    await reward.start()
    algorithm = build_algorithm(
        config.algorithm,
        asynchronous=False,
        max_new_tokens=config.sampling.max_new_tokens,
        min_group_size=config.rollout.min_group_size,
    )
    num_steps = config.trainer.num_batches * num_steps_per_batch(config.trainer)
    trainer = PolicyTrainer(policy.loaded, config.trainer, num_steps=num_steps)
    engine = build_engine(config, policy, PolicyVersion(0, 0))
    cursor = TaskCursor(len(tasks), config.seed)
    for index in range(config.trainer.num_batches):
        draws = [cursor.next() for _ in range(config.rollout.groups_per_batch)]
        members = range(config.rollout.group_size)
        episodes = await asyncio.gather(
            *(
                episode(config, policy, engine, AttemptKey(d.group, m), tasks[d.task_index])
                for d in draws
                for m in members
            )
        )
        groups = []
        for draw in draws:
            own = [e for e in episodes if e.key.group == draw.group]
            judged = tuple([replace(e, score=await reward.score(e)) for e in own])
            groups.append(Group(id=draw.group, task=tasks[draw.task_index], episodes=judged))
        samples = [
            s
            for g in groups
            for e in g.episodes
            for s in samples_from_episode(e, f"group-{g.id}", config.sampling.temperature)
        ]
        batch = RolloutBatch(index=index, groups=tuple(groups), samples=tuple(samples), version=trainer.version)
        max_new_tokens = config.sampling.max_new_tokens
        for minibatch in plan_update(
            batch, algorithm, trainer, config.trainer, max_new_tokens=max_new_tokens, seed=config.seed
        ):
            trainer.forward_backward(minibatch, algorithm)
            trainer.optim_step()
        update = trainer.publish()
        await engine.pause("keep")
        await engine.update_weights(update)
        await engine.resume()
    await engine.close()
    await reward.close()
    return {name: p.detach().clone() for name, p in policy.loaded.model.named_parameters()}


async def episode(config: RunConfig, policy: Policy, engine: Engine, key: AttemptKey, task: Task) -> Episode:
    prompt_ids = policy.renderer.render(task.messages)
    sampling = Sampling(**{**config.sampling.model_dump(), "stop_ids": policy.renderer.stop_ids})
    generation = await engine.generate(
        GenerationRequest(id=str(key), prompt_ids=prompt_ids, sampling=sampling, seed=attempt_seed(config.seed, key))
    )
    segments = (
        Segment(source=Source.TEMPLATE, ids=prompt_ids),
        Segment(
            source=Source.POLICY,
            ids=generation.ids,
            parent=0,
            logprobs=generation.logprobs,
            version_spans=generation.version_spans,
            kept_ids=generation.kept_ids,
        ),
    )
    return Episode(
        key=key,
        task=task,
        turns=(Turn(reply=policy.renderer.decode(generation.ids), finish_reason=generation.finish_reason),),
        trace=Trace(segments=segments),
        outcome=Outcome.TRUNCATED if generation.finish_reason == "length" else Outcome.DONE,
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "one step": {},
    "minibatches, epochs, several waves": {
        "trainer": {"num_minibatches": 2, "num_epochs": 2, "max_microbatch_tokens": 128},
        "engine": {"max_batch_size": 8},
    },
    "truncated sampling": {"sampling": {"top_p": 0.9, "temperature": 0.8}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_with_max_staleness_0_is_the_sequential_program_bit_for_bit(name: str, tmp_path: Path) -> None:
    """I8: weights after every batch are those of generate, score, train, publish, one after another."""
    config = small_config(tmp_path, **SETTINGS[name])
    result = train(config)
    assert result.num_updates == config.trainer.num_batches and not result.stopped
    reference = asyncio.run(sequential(config))
    weights = last_weights(result.run_dir)
    start = {n: p.detach() for n, p in load_policy(config).loaded.model.named_parameters()}
    assert reference.keys() <= weights.keys()
    assert all(torch.equal(reference[n], weights[n]) for n in reference)
    assert not all(torch.equal(start[n], weights[n]) for n in reference), "nothing was trained: the test shows nothing"


def test_two_equal_runs_are_equal_in_weights_episodes_and_books(tmp_path: Path) -> None:
    """I18: same seed and configuration on the same machine, same run; another seed, another run."""
    settings = {"evaluation": {"every": 3, "at_start": True, "num_samples": 2}}
    first, second, other = (
        train(small_config(tmp_path, name, seed=seed, **settings)) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert tokens_by_attempt(first.run_dir) == tokens_by_attempt(second.run_dir)
    assert_same_weights(first.run_dir, second.run_dir)
    assert surviving(first.run_dir) == surviving(second.run_dir)
    assert (first.run_dir / "ledger/lineage-0.jsonl").read_text() == (
        second.run_dir / "ledger/lineage-0.jsonl"
    ).read_text()
    accuracy = [[e.metrics()["eval/sampled_accuracy"] for _, e in r.evaluations] for r in (first, second)]
    assert accuracy[0] == accuracy[1] and len(accuracy[0]) == 3
    assert tokens_by_attempt(first.run_dir) != tokens_by_attempt(other.run_dir)


def test_a_run_with_failing_and_retried_members_is_reproducible_too(tmp_path: Path) -> None:
    """I18: which wave a retry is in does not depend on timing."""
    settings: dict[str, Any] = {
        "rewards": [{"type": f"{Path(__file__).parents[1] / 'loop_rewards.py'}:fails_on_some", "deadline_s": 5.0}],
        "trainer": {"num_batches": 3, "schedule": {"warmup_steps": 0}},
        "guards": {"max_error_share": 0.9},
    }
    first, second = (train(small_config(tmp_path, name, **settings)) for name in ("a", "b"))
    assert books(first.run_dir).summary()["failed"] > 0
    assert surviving(first.run_dir) == surviving(second.run_dir)
    assert tokens_by_attempt(first.run_dir) == tokens_by_attempt(second.run_dir)
    assert_same_weights(first.run_dir, second.run_dir)
