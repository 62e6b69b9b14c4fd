"""Plays and judges episodes of the policy that an engine serves: for training, for evaluation, for anybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.config.schema import EvaluationConfig
from headrace.control.checks import check_score
from headrace.control.watchdog import DeadlineError, await_with_deadline
from headrace.environments.runner import EpisodeRunner
from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.result import EvaluationResult
from headrace.protocols import Reward
from headrace.types import AttemptKey, Episode, ErrorClass, PolicyVersion, Sampling, ScoreError, Task

REWARD_MARGIN_S = 5.0
"""On top of the reward's own deadline, which it should be the first to notice."""


@dataclass(kw_only=True)
class Player:
    """A runner and the reward that judges what it brings."""

    runner: EpisodeRunner
    reward: Reward
    sampling: Sampling
    evaluation_reward: Reward | None = None
    """Judges evaluations, where they are judged by more than training is (the gold standard)."""
    greedy_member: int | None = None
    """The member of each training group that is its greedy baseline."""

    @property
    def greedy(self) -> Sampling:
        """The same, always taking the likeliest token."""
        return replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)

    def sampling_of(self, key: AttemptKey) -> Sampling:
        """How a training attempt is sampled."""
        return self.greedy if key.member == self.greedy_member else self.sampling

    async def play(
        self,
        key: AttemptKey,
        task: Task,
        sampling: Sampling,
        stream: str,
        reward: Reward | None = None,
        version: PolicyVersion | None = None,
    ) -> Episode:
        """One episode, judged by ``reward`` or the player's own. Without a score where the machinery failed, with a
        classed error where the reward did. ``stream`` separates random streams of equal keys (rollouts,
        evaluations). ``version``: the only one that may play it."""
        episode = await self.runner.run(key, task, sampling=sampling, stream=stream, version=version)
        self.runner.watchdog.progress(f"episode {key}")
        if episode.outcome.is_failure:
            return episode
        reward = reward or self.reward
        name = reward.name
        try:
            result = await await_with_deadline(
                reward.score(episode),
                watchdog=self.runner.watchdog,
                waiter=f"episode {key}",
                on="reward",
                what=f"score of {name}",
                deadline_s=reward.deadline_s + REWARD_MARGIN_S,
            )
        except DeadlineError as error:
            result = ScoreError(error_class=ErrorClass.TIMEOUT, message=str(error), reward=name)
        except Exception as error:  # a third party's reward class; its own functions never get here
            message = f"{type(error).__name__}: {error}"
            result = ScoreError(error_class=ErrorClass.EXCEPTION, message=message, reward=name)
        return replace(episode, score=check_score(result, reward.value_range, name))

    async def evaluate(self, tasks: Sequence[Task], config: EvaluationConfig, *, concurrency: int) -> EvaluationResult:
        """The tasks on the engine's current version. Seeds are the same at each evaluation, so that two of them differ
        by the policy and not by luck."""
        tasks = tasks[: config.num_tasks]
        index = {task.id: number for number, task in enumerate(tasks)}
        version, reward = self.runner.engine.version, self.evaluation_reward  # pinned, also where engines are at two

        async def run_episode(task: Task, sample: int, is_greedy: bool) -> Episode:
            key = AttemptKey(index[task.id], sample)
            if is_greedy:
                return await self.play(key, task, self.greedy, "evaluation-greedy", reward, version)
            return await self.play(key, task, self.sampling, "evaluation", reward, version)

        return await evaluate(
            tasks,
            run_episode,
            num_samples=config.num_samples,
            greedy=config.greedy,
            deadline_s=config.deadline_s,
            concurrency=concurrency,
            clock=self.runner.clock,
        )
