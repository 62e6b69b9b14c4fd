"""Engines that die when told to, and fleets of them, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.config.fleet import FleetConfig
from headrace.control.watchdog import Watchdog
from headrace.engines.errors import EngineError
from headrace.engines.fleet.fleet import FleetEngine
from headrace.protocols import EngineStats, Probed, WeightUpdate
from headrace.scripted import Reply, ScriptedEngine
from headrace.types import Generation, GenerationRequest, PolicyVersion, Sampling

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
NO_VERSION = PolicyVersion(-1, 0)


def telling(text: str, *, token_s: float = 1.0) -> Callable[[GenerationRequest], Reply]:
    """Each request is answered with ``text``, one character in ``token_s``; a continued one with the rest of it."""

    def script(request: GenerationRequest) -> Reply:
        rest = text[request.first_draw :]
        return Reply(text=rest, duration_s=token_s * (len(rest) + 1))

    return script


class MortalEngine(ScriptedEngine):
    """``die_on``: names of calls that kill it; ``die()`` does at once. ``tells_partial``: a death hands over tokens."""

    def __init__(
        self,
        script: Any = None,
        *,
        version: PolicyVersion = V0,
        tells_partial: bool = True,
        die_on: Sequence[str] = (),
        refuse: bool = False,
        stats: EngineStats | None = None,
    ) -> None:
        super().__init__(script)
        self.version = version
        self.tells_partial = tells_partial
        self.die_on = set(die_on)
        self.refuse = refuse
        self.is_closed = False
        self.served: list[tuple[str, PolicyVersion]] = []
        """(request, version at its arrival)."""
        self._stats = stats
        self._dead = asyncio.Event()

    def die(self) -> None:
        self.is_healthy = False
        self._dead.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        await self._call("generate")
        self.served.append((request.id, self.version))
        call = asyncio.ensure_future(super().generate(request))
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({call, dead}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            error = EngineError(f"request {request.id}: the engine was killed")
            if self.tells_partial:
                self._may_run.set()
                self._aborted[request.id].set()
                error.partial = await call
            raise error
        finally:
            dead.cancel()
            call.cancel()

    async def update_weights(self, update: WeightUpdate) -> None:
        if self.refuse:
            raise EngineError("these weights do not fit")
        await super().update_weights(update)

    def stats(self) -> EngineStats:
        return self._stats or super().stats()

    async def close(self) -> None:
        self.is_closed = True
        await super().close()

    async def _call(self, name: str) -> None:
        if name in self.die_on:
            self.die()
        if self._dead.is_set() and name not in ("close", "healthy", "abort"):
            raise EngineError(f"{name}: the engine is dead")
        await super()._call(name)


@dataclass
class Yard:
    """Makes engines: ``make(index, incarnation)``, or mortal ones that tell ``text``. ``starts``: what was made."""

    make: Callable[[int, int], MortalEngine] | None = None
    text: str = "abcdef"
    start_s: float = 0.0
    starts: list[tuple[int, int, float]] = field(default_factory=list)
    engines: dict[tuple[int, int], MortalEngine] = field(default_factory=dict)

    async def __call__(self, index: int, incarnation: int) -> MortalEngine:
        self.starts.append((index, incarnation, asyncio.get_running_loop().time()))
        await asyncio.sleep(self.start_s)
        version = V0 if incarnation == 0 else NO_VERSION
        make = self.make or (lambda i, n: MortalEngine(telling(self.text), version=version))
        engine = make(index, incarnation)
        self.engines[index, incarnation] = engine
        return engine


@dataclass
class ReadyCatchUp:
    """``protocols.CatchUp``: hands out ``version``, or nothing where it is None; ``verdict`` says what a proof says."""

    version: PolicyVersion | None = V0
    verdict: bool | Exception = True
    proved: list[str] = field(default_factory=list)

    async def update(self) -> WeightUpdate | None:
        return None if self.version is None else WeightUpdate(version=self.version, tensors={})

    async def prove(self, name: str, engine: Probed, update: WeightUpdate) -> bool:
        self.proved.append(name)
        assert engine.version == update.version
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


def make_fleet(yard: Yard, *, catch_up: ReadyCatchUp | None = None, **options: Any) -> FleetEngine:
    """Inside the virtual event loop."""
    clock = asyncio.get_running_loop().time
    events: list[str] = []
    spans: list[tuple[Any, ...]] = []
    fleet = FleetEngine(
        yard,
        FleetConfig(**options),
        version=V0,
        watchdog=Watchdog(clock, 1e9),
        on_span=lambda *span, **ids: spans.append((*span, ids)),
        on_event=events.append,
    )
    fleet.events, fleet.spans = events, spans  # type: ignore[attr-defined]
    if catch_up is not None:
        fleet.catch_up_by(catch_up)
    return fleet


async def proved(fleet: FleetEngine) -> FleetEngine:
    """As after the loop's first canary."""
    for name in await fleet.unproved():
        fleet.proved(name, fleet.version)
    return fleet


async def publish(fleet: FleetEngine, version: PolicyVersion, *, mode: Literal["keep", "abort"] = "keep") -> None:
    """As the loop does."""
    await fleet.pause(mode)
    await fleet.update_weights(WeightUpdate(version=version, tensors={}))
    await proved(fleet)
    await fleet.resume()


def request(name: str, *, prompt: Sequence[int] = (1, 2, 3), max_new_tokens: int = 16, **options: Any) -> Any:
    sampling = Sampling(max_new_tokens=max_new_tokens, stop_strings=options.pop("stop_strings", ()))
    return GenerationRequest(id=name, prompt_ids=tuple(prompt), sampling=sampling, seed=7, **options)


def text_of(generation: Generation) -> str:
    return "".join(map(chr, generation.ids))
