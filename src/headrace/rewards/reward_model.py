"""Reward type ``reward_model``: a learned reward, served in this process on a thread of its own.

The value is the model's score in standard deviations of its training replies, around their mean, cut at +-``bound``;
the component ``clipped`` tells where it was cut. What is scored is what was trained: the conversation by the model's
own template, the reply, its end-of-turn id. torch is imported when the reward starts.

By default each reply is scored in a pass of its own: its score then depends on nothing but itself, and a synchronous
run is the same twice (I18). ``max_batch_size`` above 1 is faster and moves the last bits with the neighbours.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from headrace.config.base import Section
from headrace.daemon_thread import DaemonThread
from headrace.errors import ConfigError
from headrace.rewards.base import RewardBase, invalid
from headrace.rewards.worker_pool import RewardStartError
from headrace.types import Episode, ErrorClass, Message, Score, ScoreError, ScoreResult

if TYPE_CHECKING:
    from headrace.model.reward_model import Probe, RewardModel

DESCRIPTION_FILE = "reward_model.json"
QUEUE_DEADLINE_S = 600.0
"""Longest wait for the passes of the replies that came before."""
MAX_PROBE_ERROR = {"float32": 1e-3, "bfloat16": 0.5}
"""Of a probe's score, in standard deviations, between the process that wrote it and this one. In bfloat16 another
machine rounds otherwise: between bfloat16 and float32 SmolLM2-135M's scores differ by 0.29 at most (root mean square
0.08); other weights, another template or place move some probe further."""
CONTENT_FREE = ("", ".", ":")
"""Replies that must not beat chosen ones (FAILURES 162)."""


class RewardModelOptions(Section):
    path: Path
    """The folder that ``headrace reward-model`` exported."""
    bound: float = Field(10.0, gt=0)
    """Values are cut at so many standard deviations of the training replies."""
    max_batch_size: int = Field(1, ge=1)
    """Replies scored in one pass."""
    num_threads: int = Field(1, ge=1)
    """Torch threads of a pass."""
    canaries: Literal["stop", "off"] = "stop"
    """Refuse, at start, a model to which replies that say nothing are worth as much as chosen ones."""


class _Waiting(NamedTuple):
    messages: tuple[Message, ...]
    reply: str
    result: asyncio.Future[ScoreResult]


class RewardModelReward(RewardBase):
    """Judges by a learned model."""

    def __init__(self, options: RewardModelOptions, deadline_s: float, name: str = "reward_model") -> None:
        """Raises ConfigError where the folder holds no reward model."""
        super().__init__(name, (-options.bound, options.bound))
        if not (options.path / DESCRIPTION_FILE).is_file():
            raise ConfigError(
                f"reward {name!r}: {options.path} holds no reward model (no {DESCRIPTION_FILE}); train one with "
                "headrace reward-model and give its export folder"
            )
        self._options = options
        self._pass_deadline_s = deadline_s
        self._thread: DaemonThread | None = None
        self._model: RewardModel | None = None
        self._start_lock = asyncio.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._server: asyncio.Task[None] | None = None
        self._hung = False

    @property
    def deadline_s(self) -> float:
        return QUEUE_DEADLINE_S + self._pass_deadline_s

    async def start(self) -> None:
        """Load the model and self-test it: probes score what they scored when it was written, and content-free replies
        are worth less than chosen ones. Raises RewardStartError."""
        async with self._start_lock:
            if self._model is not None:
                return
            thread = DaemonThread(f"headrace-{self.name}", self._limit_threads)
            try:
                self._model = await thread.call(self._load)
            except BaseException:
                thread.stop()
                raise
            self._thread = thread

    async def score(self, episode: Episode) -> ScoreResult:
        await self.start()
        result: asyncio.Future[ScoreResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(conversation(episode), episode.reply, result))
        if self._server is None or self._server.done():
            self._server = asyncio.create_task(self._serve(), name=f"reward {self.name}")
        try:
            async with asyncio.timeout(self.deadline_s):
                return await result
        except TimeoutError:
            return self._error(ErrorClass.TIMEOUT, f"no score in {self.deadline_s:g} s, the queue included")

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
        for waiting in self._waiting:
            self._settle(waiting, self._closed())
        self._waiting.clear()
        if self._thread is not None:
            self._thread.stop()

    # ------------------------------------------------------------------------------------- on the loop

    async def _serve(self) -> None:
        """One pass after the other until nobody waits."""
        while self._waiting:
            size = min(len(self._waiting), self._options.max_batch_size)
            batch = [self._waiting.popleft() for _ in range(size)]
            try:
                results = await self._pass([(w.messages, w.reply) for w in batch])
            except asyncio.CancelledError:  # by close()
                for waiting in batch:
                    self._settle(waiting, self._closed())
                raise
            for waiting, result in zip(batch, results, strict=True):
                self._settle(waiting, result)

    async def _pass(self, texts: Sequence[tuple[tuple[Message, ...], str]]) -> Sequence[ScoreResult]:
        assert self._thread is not None
        if self._hung:
            return [self._error(ErrorClass.INFRASTRUCTURE, "an earlier pass hangs on its thread")] * len(texts)
        try:
            async with asyncio.timeout(self._pass_deadline_s):
                scores = await self._thread.call(self._score, texts)
        except TimeoutError:
            self._hung = True  # a thread cannot be killed
            message = f"a pass of {len(texts)} replies took more than {self._pass_deadline_s:g} s (deadline_s)"
            return [self._error(ErrorClass.TIMEOUT, message)] * len(texts)
        except Exception as error:
            return [self._error(ErrorClass.EXCEPTION, f"{type(error).__name__}: {error}")] * len(texts)
        return [self._to_score(score) for score in scores]

    def _to_score(self, normalised: float) -> ScoreResult:
        if not math.isfinite(normalised):
            return invalid(self.name, f"gave {normalised}; a score must be finite")
        bound = self._options.bound
        value = max(-bound, min(bound, normalised))
        return Score(value=value, components={"clipped": float(value != normalised)})

    def _settle(self, waiting: _Waiting, result: ScoreResult) -> None:
        if not waiting.result.done():  # its episode may have been cancelled meanwhile
            waiting.result.set_result(result)

    def _closed(self) -> ScoreError:
        return self._error(ErrorClass.INFRASTRUCTURE, "was closed before it had judged")

    def _error(self, error_class: ErrorClass, message: str) -> ScoreError:
        return ScoreError(error_class=error_class, message=f"reward {self.name!r}: {message}", reward=self.name)

    # ----------------------------------------------------------------------------------- on its thread

    def _limit_threads(self) -> None:
        import torch

        torch.set_num_threads(self._options.num_threads)

    def _load(self) -> RewardModel:
        from headrace.model.reward_model import load_reward_model

        model = load_reward_model(self._options.path)
        self._test_probes(model)
        if self._options.canaries == "stop":
            self._test_canaries(model)
        return model

    def _score(self, texts: Sequence[tuple[tuple[Message, ...], str]]) -> list[float]:
        assert self._model is not None
        model = self._model
        samples = [model.sample(m, reply, row=row) for row, (m, reply) in enumerate(texts)]
        return [model.normalise(score) for score in model.score(samples)]

    def _test_probes(self, model: RewardModel) -> None:
        """The same texts score the same as when the model was written: same weights, template, tokenizer, place."""
        probes = _probes(model, self.name)
        bound = MAX_PROBE_ERROR[model.description.dtype] * model.description.std
        texts = [(p.messages, side) for p in probes for side in (p.chosen, p.rejected)]
        written = [s for p in probes for s in (p.chosen_score, p.rejected_score)]
        for (messages, reply), expected, now in zip(texts, written, model.score_texts(texts), strict=True):
            if not abs(now - expected) <= bound:
                raise RewardStartError(
                    f"reward {self.name!r}: the reply {reply[:60]!r} to {str(messages[-1])[:60]} scores {now:.6g}, but "
                    f"scored {expected:.6g} when {self._options.path} was written: weights, tokenizer or template "
                    "changed. Export it again with headrace reward-model"
                )

    def _test_canaries(self, model: RewardModel) -> None:
        probes = _probes(model, self.name)
        chosen = sum(p.chosen_score for p in probes) / len(probes)
        for text in CONTENT_FREE:
            empty = sum(model.score_texts([(p.messages, text) for p in probes])) / len(probes)
            if not empty < chosen:
                raise RewardStartError(
                    f"reward {self.name!r}: the content-free reply {text!r} scores {empty:.3g} on average over "
                    f"{len(probes)} prompts, chosen replies {chosen:.3g}: the policy would learn to say nothing. Train "
                    "the reward model with bradley_terry.content_free_share above 0, or set options.canaries = 'off'"
                )


def _probes(model: RewardModel, name: str) -> Sequence[Probe]:
    if not model.description.probes:
        raise RewardStartError(f"reward {name!r}: its folder holds no probes to test it with; export it again")
    return model.description.probes


def conversation(episode: Episode) -> tuple[Message, ...]:
    """What stood before the last reply of the episode."""
    messages: list[Message] = [dict(m) for m in episode.task.messages]
    for turn in episode.turns[:-1]:
        messages.append({"role": "assistant", "content": turn.reply})
        messages += [dict(m) for m in turn.observation]
    return tuple(messages)
