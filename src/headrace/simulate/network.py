"""A transport that loses, delays, doubles and reorders messages, seeded; any actor can be killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from headrace.cluster.actors import ActorHost, Message, MessageHandle
from headrace.simulate.scenario import Weather

RESEND_S = 1.0
NOTICE_S = 5.0
"""Longest time until a carrier notices that its actor died."""
OnEvent = Callable[[str, str], bool]


class Network:
    """Carries every message of one life. ``on_event`` is told of each delivery before it happens, and says
    whether it may: nothing reaches the dead."""

    def __init__(self, rng: random.Random, weather: Weather, on_event: OnEvent) -> None:
        self._rng, self._weather, self._on_event = rng, weather, on_event

    def start(self, name: str, incarnation: int, target: object) -> SimulatedActor:
        """An actor and the handle that calls it."""
        return SimulatedActor(self, name, incarnation, target)

    def carry(self, what: str, message: Message, deliver: Callable[[Message], None]) -> None:
        rng, weather = self._rng, self._weather
        for _ in range(1 + (rng.random() < weather.duplicate)):
            if rng.random() < weather.loss:
                continue
            delay_s = rng.expovariate(1.0) * weather.delay_s
            if rng.random() < weather.long_delay:
                delay_s *= 100.0
            asyncio.get_running_loop().call_later(delay_s, self._arrive, what, message, deliver)

    def notice_s(self) -> float:
        return self._rng.random() * NOTICE_S

    def _arrive(self, what: str, message: Message, deliver: Callable[[Message], None]) -> None:
        if self._on_event(what, _named(message)):
            deliver(message)


class SimulatedActor:
    """One incarnation of an actor: its host, its handle, and the link between them."""

    def __init__(self, network: Network, name: str, incarnation: int, target: object) -> None:
        self.name = f"{name}#{incarnation}"
        self.target = target
        self.is_dead = False
        self._network = network
        self._host = ActorHost(self.name, target, self._to_caller)
        self.handle = MessageHandle(self.name, self.name, self._to_host, resend_s=RESEND_S, end=self._end)

    def kill(self, *, is_noticed: bool) -> None:
        """It computes no more and answers no more. Noticed: its carrier tells the handle, somewhat later."""
        self.is_dead = True
        self._host.close()
        if is_noticed:
            loop = asyncio.get_running_loop()
            loop.call_later(self._network.notice_s(), self.handle.died, f"actor {self.name} was killed")

    async def _end(self) -> None:
        self.is_dead = True
        self._host.close()

    def _to_host(self, message: Message) -> None:
        self._network.carry(f"{self.name} <-", message, self._receive)

    def _to_caller(self, message: Message) -> None:
        if not self.is_dead:
            self._network.carry(f"{self.name} ->", message, self.handle.receive)

    def _receive(self, message: Message) -> None:
        if not self.is_dead:
            self._host.receive(message)


def _named(message: Message) -> str:
    """For the event log."""
    if "call" in message:
        first: Any = message["args"][0] if message["args"] else ""
        return f"call {message['call']} {message['method']} {getattr(first, 'id', getattr(first, 'key', ''))}"
    if "reply" in message:
        return f"reply {message['reply']}" + (f" {message['error']}" if "error" in message else "")
    return "gone" if "gone" in message else f"settled {message['settled']}"
