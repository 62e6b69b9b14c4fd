"""The whole idea of headrace in one file: a language model learns from its own attempts.

    python examples/tiny_loop.py                                          # SmolLM2 learns one-digit multiplication
    python examples/tiny_loop.py --model path/to/any/folder --batches 10

Round and round: the engine samples several replies to each task, a reward scores them, the algorithm compares the
replies to one task with each other, the trainer makes the better ones likelier, and the engine goes on with the new
weights. ``headrace train`` is this loop with everything that a long run needs besides: deadlines, a ledger,
checkpoints, evaluation, overlap of generation and training, health checks (src/headrace/loop.py).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace

from headrace.algorithms.registry import build_algorithm
from headrace.config.schema import (
    AlgorithmConfig,
    ArithmeticTasks,
    RewardConfig,
    TrainerConfig,
    TransformersEngineConfig,
)
from headrace.control.samples import samples_from_episode
from headrace.engines import TransformersEngine
from headrace.environments.runner import attempt_seed
from headrace.environments.tasks import build_tasks
from headrace.model.load import load_model
from headrace.model.renderer import ChatRenderer, generation_eos_ids
from headrace.protocols import Engine, Renderer, Reward, TaskSource
from headrace.rewards.build import build_rewards
from headrace.trainer.plan import plan_update
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import (
    AttemptKey,
    Episode,
    GenerationRequest,
    Group,
    Outcome,
    RolloutBatch,
    Sampling,
    Segment,
    Source,
    Task,
    Trace,
    Turn,
)
from headrace.weights import SharedWeights

GROUPS_PER_BATCH = 4  # tasks in each batch
GROUP_SIZE = 8  # attempts at each task
MAX_NEW_TOKENS = 12
TEMPERATURE = 1.0
LEARNING_RATE = 2e-5
SEED = 0


async def attempt(engine: Engine, renderer: Renderer, reward: Reward, key: AttemptKey, task: Task) -> Episode:
    """One attempt at a task, judged."""
    # Text becomes token ids once, here. From now on ids travel, so that the trainer sees what the engine saw.
    prompt_ids = renderer.render(task.messages)
    generation = await engine.generate(
        GenerationRequest(
            id=str(key),
            prompt_ids=prompt_ids,
            sampling=Sampling(max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE, stop_ids=renderer.stop_ids),
            seed=attempt_seed(SEED, key),  # which run, group and member: the same seed draws the same reply
            prefix_key=f"group {key.group}",  # the members of a group share one prefill of their prompt
        )
    )
    # The trace records where each id came from: only what the policy sampled is trained, never the prompt.
    prompt = Segment(source=Source.TEMPLATE, ids=prompt_ids)
    reply = Segment(
        source=Source.POLICY,
        ids=generation.ids,
        parent=0,  # it continues segment 0, the prompt
        logprobs=generation.logprobs,  # how likely each id was when it was sampled
        version_spans=generation.version_spans,  # and which weights sampled it
    )
    episode = Episode(
        key=key,
        task=task,
        turns=(Turn(reply=renderer.decode(generation.ids), finish_reason=generation.finish_reason),),
        trace=Trace(segments=(prompt, reply)),
        outcome=Outcome.TRUNCATED if generation.finish_reason == "length" else Outcome.DONE,
    )
    # A number, or an error with a class; an error is never taken for a number.
    return replace(episode, score=await reward.score(episode))


async def rollouts(
    engine: Engine, renderer: Renderer, reward: Reward, tasks: TaskSource, first_group: int
) -> tuple[Group, ...]:
    """The groups of one batch: all attempts run at once, the engine batches them, each is scored as it ends."""
    chosen = {group: tasks[group % len(tasks)] for group in range(first_group, first_group + GROUPS_PER_BATCH)}
    episodes = await asyncio.gather(
        *(
            attempt(engine, renderer, reward, AttemptKey(group, member), task)
            for group, task in chosen.items()
            for member in range(GROUP_SIZE)
        )
    )
    # The attempts at one task are compared with each other and with nothing else.
    return tuple(
        Group(id=group, task=task, episodes=tuple(e for e in episodes if e.key.group == group))
        for group, task in chosen.items()
    )


async def main(args: argparse.Namespace) -> list[dict[str, float]]:
    """Train; returns the metrics of each batch."""
    # The model, and the renderer that turns its chat messages into ids: ChatML without a system prompt where the
    # model knows ChatML, else the model's own template.
    loaded = load_model(args.model)
    template = "chatml" if "<|im_start|>" in loaded.tokenizer.get_added_vocab() else None
    renderer = ChatRenderer(loaded.tokenizer, template, generation_eos_ids(args.model))

    # The tasks: "What is 3 * 4?", with the answer "12" beside it. The reward: 1 where the last number is right.
    tasks = build_tasks(ArithmeticTasks(operation="multiply")).train
    reward = build_rewards([RewardConfig(type="last_number")])
    await reward.start()

    # The algorithm says which replies are better, and by which loss to get there. The trainer owns weights and
    # optimizer, and does not know which algorithm runs.
    algorithm = build_algorithm(AlgorithmConfig(preset="grpo"), asynchronous=False, max_new_tokens=MAX_NEW_TOKENS)
    trainer_config = TrainerConfig(learning_rate=LEARNING_RATE, num_batches=args.batches)
    trainer = PolicyTrainer(loaded, trainer_config, num_steps=args.batches)

    # The engine generates. Here it shares the trainer's weights, so that new ones need no copying.
    weights = SharedWeights(loaded.model, trainer.version)
    engine = TransformersEngine(weights, TransformersEngineConfig(), vocab_size=loaded.vocab_size)

    history = []
    for batch_index in range(args.batches):
        # 1. Rollouts: several attempts at each of a few tasks, scored, in groups.
        started_s = time.perf_counter()
        groups = await rollouts(engine, renderer, reward, tasks, first_group=batch_index * GROUPS_PER_BATCH)
        generated_s = time.perf_counter()

        # 2. Samples, which is what a trainer reads: ids, a mask (1 where sampled), what the engine said about each.
        samples = tuple(
            sample
            for group in groups
            for episode in group.scored  # what could not be scored is not trained
            for sample in samples_from_episode(episode, f"group {group.id}", TEMPERATURE)
        )
        batch = RolloutBatch(index=batch_index, groups=groups, samples=samples, version=trainer.version)

        # 3. Advantages: how much better than its group was each reply? And minibatches of them; here just one.
        minibatches = plan_update(batch, algorithm, trainer, trainer_config, max_new_tokens=MAX_NEW_TOKENS, seed=SEED)

        # 4. Steps. The weights are shared, so nothing may generate meanwhile. A group whose attempts all scored the
        #    same teaches nothing: its gradient is 0, and is not even computed.
        await engine.pause("keep")
        metrics: dict[str, float] = {}
        for minibatch in minibatches:
            metrics |= trainer.forward_backward(minibatch, algorithm)
            metrics |= trainer.optim_step()

        # 5. Publish: the weights get a new version number, and the engine goes on with them.
        await engine.update_weights(trainer.publish())
        await engine.resume()

        rewards = [value for group in groups for value in group.rewards]
        metrics["reward"] = sum(rewards) / max(1, len(rewards))
        metrics["generation_s"], metrics["training_s"] = generated_s - started_s, time.perf_counter() - generated_s
        history.append(metrics)
        print(f"batch {batch_index + 1:3}  {described(metrics)}  {groups[0].episodes[0].reply!r}", flush=True)

    await engine.close()
    await reward.close()
    return history


def described(metrics: dict[str, float]) -> str:
    """One line. The ratio error compares the trainer's probabilities of the sampled ids with the engine's, before the
    step: were it not near 0, we would train on something other than what was sampled."""
    return (
        f"reward {metrics['reward']:.2f}  gradient norm {metrics['grad_norm']:5.2f}  "
        f"ratio error {metrics.get('max_ratio_error', 0.0):.0e}  "
        f"skipped {metrics['num_skipped_samples']:.0f} of {metrics['num_samples']:.0f}  "
        f"generation {metrics['generation_s']:.1f} s  training {metrics['training_s']:.1f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a fetched model's name, a folder, or a hub id")
    parser.add_argument("--batches", type=int, default=10)
    asyncio.run(main(parser.parse_args()))
