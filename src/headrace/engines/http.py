"""Calls to a server over HTTP: every one with a deadline, repeated only where that is safe, and one clear error each.

The client is httpx2 (extra ``http``), imported when the first client is made: no other run needs it. A key is read from
the environment variable that the configuration names, is sent as a bearer token, and is cut out of everything that is
told of a call.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engines.errors import EngineError
from headrace.errors import ConfigError
from headrace.protocols import Clock
from headrace.record.redact import REDACTED, redact

if TYPE_CHECKING:
    import httpx2

Sleep = Callable[[float], Awaitable[None]]

IDLE_CONNECTION_S = 2.0
"""Below the 5 s after which uvicorn hangs up on an idle connection: a call on one that just closed would be lost."""
CONNECT_DEADLINE_S = 10.0
FIRST_DELAY_S = 0.25
MAX_DELAY_S = 20.0
MAX_TOLD_CHARACTERS = 400
"""Of what a server said, in an error message."""
NO_ANSWER = 0
"""Status of a call that was sent and not answered."""
UNSENT = -1
"""Status of a call that never left, so that repeating it cannot do anything twice."""
KEEP_ALIVE_IDLE_S, KEEP_ALIVE_INTERVAL_S, NUM_KEEP_ALIVES = 30, 10, 3
"""A machine that vanished without a word is noticed after a minute, however long the caller would wait."""


class HttpError(EngineError):
    """A call did not succeed. ``status``: of the answer, or NO_ANSWER, or UNSENT."""

    def __init__(self, message: str, status: int = NO_ANSWER) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """What is tried again, with growing pauses. The call's own deadline bounds it too."""

    statuses: frozenset[int]
    patience_s: float
    """From the first failure on."""


CONNECT_ONLY = Repeat(statuses=frozenset({UNSENT}), patience_s=3.0)
"""For calls that must not happen twice."""


def api_key(variable: str | None) -> str | None:
    """The value of an environment variable that the configuration names. Raises ConfigError where it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"engine.api_key_variable names the environment variable {variable}, which is not set: export it, or "
            "remove the option where the server wants no key"
        )
    return key


class HttpClient:
    """One server. Call it from one event loop."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        key: str | None = None,
        key_variable: str | None = None,
        use_proxies: bool,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """``name``: of the server in error messages. ``use_proxies``: as the environment says; never for a server of
        the run's own cluster. ``transport``: in place of sockets."""
        httpx = _httpx()
        self.name = f"{name} at {url}"
        self._url = url.rstrip("/")
        self._key = key
        self._key_variable = key_variable
        self._clock = clock
        self._sleep = sleep
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_CONNECTION_S)
        if transport is None and not use_proxies:
            transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False, socket_options=_keep_alive())
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # Whole calls have deadlines; within one, only connecting has a bound of its own.
            timeout=httpx.Timeout(None, connect=CONNECT_DEADLINE_S),
            limits=limits,
            transport=transport,
            trust_env=use_proxies,
        )

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        deadline_s: float | None,
        repeat: Repeat = CONNECT_ONLY,
    ) -> Any:
        """The decoded JSON of a successful answer, or its text where it is no JSON. Raises HttpError.

        ``deadline_s``: for all tries together; None: the caller's, which must have one (I19).
        """
        started_s = self._clock()
        first_failure_s: float | None = None
        delay_s = FIRST_DELAY_S
        while True:
            left_s = None if deadline_s is None else deadline_s - (self._clock() - started_s)
            try:
                return await asyncio.wait_for(self._once(method, path, body, query), left_s)
            except TimeoutError as error:
                limit = "the operating system allows" if deadline_s is None else f"{deadline_s:g} s"
                raise HttpError(f"{self.name} took more than {limit} for {path}", NO_ANSWER) from error
            except _Failed as failed:
                now_s = self._clock()
                first_failure_s = now_s if first_failure_s is None else first_failure_s
                wait_s = max(failed.retry_after_s, delay_s * random.uniform(0.5, 1.0))
                end_s = first_failure_s + repeat.patience_s
                if deadline_s is not None:
                    end_s = min(end_s, started_s + deadline_s)
                if failed.error.status not in repeat.statuses or now_s + wait_s > end_s:
                    raise failed.error from failed.__cause__
            await self._sleep(wait_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, Any] | None
    ) -> Any:
        httpx = _httpx()
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            response = await self._client.request(
                method, self._url + path, content=content, headers=headers, params=dict(query or {})
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            message = f"nothing answers at {self._url}{path} ({self._told(str(error)) or type(error).__name__})"
            raise _Failed(HttpError(f"{message}: is {self.name} running, and is the address right?", UNSENT)) from error
        except httpx.RequestError as error:
            message = f"{self.name} hung up during {path}: {type(error).__name__}: {self._told(str(error))}"
            raise _Failed(HttpError(message, NO_ANSWER)) from error
        if not response.is_success:
            raise _Failed(
                HttpError(self._refusal(path, response.status_code, response.text), response.status_code),
                _retry_after_s(response.headers.get("retry-after")),
            )
        try:
            return response.json()
        except ValueError:
            return response.text

    def _refusal(self, path: str, status: int, text: str) -> str:
        said = self._told(_message(text))
        if status in (401, 403):
            which = f"the key in ${self._key_variable}" if self._key else "a call without a key"
            advice = "check its value" if self._key else "name the variable that holds it in engine.api_key_variable"
            return f"{self.name} refused {which} for {path} ({status}): {said or 'it does not say why'}; {advice}"
        return f"{self.name} answered {path} with status {status}: {said or 'and nothing else'}"

    def _told(self, text: str) -> str:
        """For a message: short, and without secrets."""
        text = text if self._key is None else text.replace(self._key, REDACTED)
        return str(redact(" ".join(text.split())))[:MAX_TOLD_CHARACTERS]

    async def close(self) -> None:
        await self._client.aclose()


class _Failed(Exception):
    """One try that failed."""

    def __init__(self, error: HttpError, retry_after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


def _httpx() -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(
            'an engine that is reached over HTTP needs the package httpx2: pip install "headrace[http]"'
        ) from error
    return httpx2


def _message(text: str) -> str:
    """What an error answer says: ``error.message``, ``message`` or ``detail``, else all of it."""
    try:
        said = json.loads(text)
    except ValueError:
        return text
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(key):
            said = said[key]
    return said if isinstance(said, str) else json.dumps(said)


def _retry_after_s(header: str | None) -> float:
    """Seconds that a server asks for; 0 where it does not, or names a date."""
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:
        return 0.0


def _keep_alive() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    values = {"TCP_KEEPIDLE": KEEP_ALIVE_IDLE_S, "TCP_KEEPINTVL": KEEP_ALIVE_INTERVAL_S, "TCP_KEEPCNT": NUM_KEEP_ALIVES}
    return options + [
        (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in values.items() if hasattr(socket, name)
    ]
