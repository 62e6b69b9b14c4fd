"""Calls of an actor's methods, wherever it runs: each is executed at most once, also where messages get lost or double.

A carrier (a pipe, a socket, the simulation's lossy transport) moves messages between a :class:`MessageHandle`, the
caller's end, and an :class:`ActorHost`, which holds the object. Messages are values that ``wire.py`` makes bytes of::

    caller -> host   {"session": str, "call": int, "method": str, "args": (...), "settled": [int, ...], "floor": int}
                     {"session": str, "settled": [int, ...], "floor": int}
    host -> caller   {"session": str, "reply": int, "value": any}
                     {"session": str, "reply": int, "error": [type name, message]}
                     {"session": str, "gone": True}         what is there now is another incarnation of the actor

* The caller sends a call again until it is answered. The host executes each call id once and answers a repeated call
  with the reply that it remembers.
* ``settled`` names calls whose caller has its answer or wants none any more, ``floor`` says that all below it are
  settled. The host forgets the replies of settled calls, cancels those that still run, and never starts one.
* One session is one handle and one incarnation: what an older incarnation was sent does nothing to its successor, and
  its handle learns that its actor is gone.

Nothing here waits for ever by itself or gives up by itself: the caller bounds each wait (I19), and a cancelled call is
settled, which cancels it at the host too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from headrace.errors import HeadraceError, PartLost

Message = dict[str, Any]
Send = Callable[[Message], None]
"""Hand a message to the carrier. It may get lost, and never raises for that."""

PING = "$ping"
"""The one method that the host itself answers."""
MAX_RESEND_S = 30.0
"""Between two sendings of one call; they begin close together and double."""


class ActorDied(PartLost):
    """The actor is gone: its process ended, or another incarnation has its place. What it was doing is lost."""


class RemoteError(HeadraceError):
    """The actor's method raised. ``kind`` is the exception's type, which does not travel itself."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ActorHandle(Protocol):
    """An actor as its caller sees it. Waits are the caller's to bound."""

    async def call(self, method: str, *args: Any) -> Any:
        """The method's result. Raises ActorDied where the actor is gone, also while the call runs; what the method
        raises comes as RemoteError from another process, as it is from this one."""
        ...

    async def is_alive(self) -> bool:
        """True once the actor has answered, False where it is known to be gone. One that hangs does not answer."""
        ...

    async def close(self) -> None:
        """End the actor. Open calls raise ActorDied; a second close does nothing."""
        ...


def public_method(target: object, name: str) -> Callable[..., Any]:
    """Raises AttributeError for what is private or no method: those cannot be called from outside."""
    method = None if name.startswith("_") else getattr(target, name, None)
    if not callable(method):
        raise AttributeError(f"{type(target).__name__} has no public method {name!r}")
    return method  # type: ignore[no-any-return]


class InProcessHandle:
    """An actor in this process and event loop: the reference that other carriers are tested against."""

    def __init__(self, name: str, target: object) -> None:
        self._name, self._target = name, target
        self._is_closed = False
        self._calls: set[asyncio.Future[Any]] = set()

    async def call(self, method: str, *args: Any) -> Any:
        if self._is_closed:
            raise ActorDied(f"actor {self._name} was closed before the call of {method}")
        call = asyncio.ensure_future(_run(public_method(self._target, method), args))
        self._calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            self._calls.discard(call)
            call.cancel()
        if call.cancelled():
            raise ActorDied(f"actor {self._name} was closed during the call of {method}")
        return call.result()

    async def is_alive(self) -> bool:
        return not self._is_closed

    async def close(self) -> None:
        self._is_closed = True
        for call in self._calls:
            call.cancel()


async def _run(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = method(*args)
    return await result if inspect.isawaitable(result) else result


class ActorHost:
    """Executes the calls of one session on ``target``. The carrier hands each message to :meth:`receive`."""

    def __init__(self, session: str, target: object, send: Send) -> None:
        self._session, self._target, self._send = session, target, send
        self._running: dict[int, asyncio.Task[None]] = {}
        self._replies: dict[int, Message] = {}
        """Of calls that are not settled, as far as the host knows."""
        self._floor = 0
        self._settled: set[int] = set()
        """Numbers from the floor on."""

    @property
    def num_remembered(self) -> int:
        """Replies that are kept for a caller who may not have them yet."""
        return len(self._replies)

    def receive(self, message: Message) -> None:
        """Never raises for what the message asks: errors are replies."""
        if message["session"] != self._session:
            self._send({"session": message["session"], "gone": True})
            return
        self._settle(message["settled"], message["floor"])
        if "call" not in message:
            return
        number = message["call"]
        if number in self._replies:
            self._send(self._replies[number])
        elif number not in self._running and not self._is_settled(number):
            task = asyncio.ensure_future(self._execute(number, message["method"], message["args"]))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number))

    def close(self) -> None:
        """Cancel what runs."""
        for task in self._running.values():
            task.cancel()

    def _settle(self, numbers: list[int], floor: int) -> None:
        self._settled.update(numbers)
        if floor > self._floor:
            self._floor = floor
            self._settled = {n for n in self._settled if n >= floor}
        for number in [n for n in self._replies if self._is_settled(n)]:
            del self._replies[number]
        for number, task in self._running.items():
            if self._is_settled(number):
                task.cancel()

    def _is_settled(self, number: int) -> bool:
        return number < self._floor or number in self._settled

    async def _execute(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        reply: Message = {"session": self._session, "reply": number}
        try:
            reply["value"] = None if method == PING else await _run(public_method(self._target, method), args)
        except Exception as error:  # it is the caller's
            reply["error"] = [type(error).__name__, str(error)]
        if not self._is_settled(number):
            self._replies[number] = reply
            self._send(reply)


class MessageHandle:
    """The caller's end of a session. The carrier hands each message of the host to :meth:`receive`, and says
    :meth:`died` once it knows that the actor is gone."""

    def __init__(
        self,
        name: str,
        session: str,
        send: Send,
        *,
        resend_s: float | None = None,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``resend_s``: seconds until a call is sent for the second time; None where the carrier loses nothing.
        ``end``: ends the actor; for :meth:`close`."""
        self._name, self._session, self._send = name, session, send
        self._resend_s, self._end = resend_s, end
        self._next = 0
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._settled: list[int] = []
        """Since the last message: the next one tells them."""
        self._death: str | None = None

    async def call(self, method: str, *args: Any) -> Any:
        if self._death is not None:
            raise ActorDied(self._death)
        number = self._next
        self._next += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            await self._ask(number, method, args, answer)
            return answer.result()
        except asyncio.CancelledError:
            answer.cancel()
            raise
        finally:
            del self._open[number]
            self._settled.append(number)
            if answer.cancelled():  # the host need not go on, and nothing else may be sent for long
                self._tell({})

    async def is_alive(self) -> bool:
        try:
            await self.call(PING)
        except ActorDied:
            return False
        return True

    async def close(self) -> None:
        self.died(f"actor {self._name} was closed")
        end, self._end = self._end, None
        if end is not None:
            await end()

    def receive(self, message: Message) -> None:
        """Answers to calls that nobody waits for any more, and second copies, are dropped."""
        if message["session"] != self._session:
            return
        if "gone" in message:
            self.died(f"actor {self._name} is gone: another incarnation has its place")
            return
        answer = self._open.get(message["reply"])
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(RemoteError(*message["error"]))
        else:
            answer.set_result(message["value"])

    def died(self, reason: str) -> None:
        """Every open and later call raises ActorDied. The first reason stands."""
        if self._death is None:
            self._death = reason
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(ActorDied(self._death))

    async def _ask(self, number: int, method: str, args: tuple[Any, ...], answer: asyncio.Future[Any]) -> None:
        pause_s = self._resend_s
        while not answer.done():
            self._tell({"call": number, "method": method, "args": args})
            await asyncio.wait({answer}, timeout=pause_s)
            if pause_s is not None:
                pause_s = min(2 * pause_s, MAX_RESEND_S)

    def _tell(self, message: Message) -> None:
        settled, self._settled = self._settled, []
        floor = min(self._open, default=self._next)
        self._send({"session": self._session, "settled": settled, "floor": floor, **message})
