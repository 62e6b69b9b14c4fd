"""Calls over HTTP: deadlines, what is repeated and for how long, one clear error each, and no key in any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from headrace.engines import http
from headrace.engines.http import NO_ANSWER, UNSENT, HttpClient, HttpError, Repeat, api_key
from headrace.errors import ConfigError

KEY = "sk-verysecretkey1234"
BUSY = Repeat(statuses=frozenset({429, 503, NO_ANSWER, UNSENT}), patience_s=60.0)
Answers = Callable[[httpx2.Request, int], httpx2.Response]


class Clock:
    """Time passes in sleeps alone."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def call(answers: Answers, clock: Clock | None = None, **options: Any) -> Any:
    """One call to a server that answers its n-th request with ``answers(request, n)``."""
    clock = clock or Clock()
    count = iter(range(1000))

    def handle(request: httpx2.Request) -> httpx2.Response:
        return answers(request, next(count))

    async def main() -> Any:
        client = HttpClient(
            "http://engine:1/v1/",
            name="the server",
            key=KEY,
            key_variable="MY_KEY",
            use_proxies=False,
            transport=httpx2.MockTransport(handle),
            clock=clock,
            sleep=clock.sleep,
        )
        try:
            return await client.call("POST", "/x", body={"a": 1}, **{"deadline_s": 30.0, "repeat": BUSY, **options})
        finally:
            await client.close()

    return asyncio.run(main())


def test_a_call_carries_the_key_and_returns_json_or_text() -> None:
    def answer(request: httpx2.Request, n: int) -> httpx2.Response:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        assert str(request.url) == "http://engine:1/v1/x" and request.content == b'{"a":1}'
        return httpx2.Response(200, json={"b": 2})

    assert call(answer) == {"b": 2}
    assert call(lambda request, n: httpx2.Response(200, text="done")) == "done"


def test_a_busy_server_is_asked_again_with_growing_pauses() -> None:
    """429 and 503 pass; Retry-After is obeyed; the pauses grow and are not all alike."""
    clock = Clock()
    statuses = [429, 503, 503]

    def answer(request: httpx2.Request, n: int) -> httpx2.Response:
        if n < len(statuses):
            return httpx2.Response(statuses[n], headers={"Retry-After": "3"} if n == 0 else {})
        return httpx2.Response(200, json=n)

    assert call(answer, clock) == 3
    assert clock.slept[0] == 3.0
    assert 0.25 <= clock.slept[1] <= 0.5 < clock.slept[2] <= 1.0


def test_one_deadline_bounds_all_tries() -> None:
    """I19: the last error is told once the next pause would not fit any more."""
    clock = Clock()
    with pytest.raises(HttpError, match="status 503: overloaded") as caught:
        call(lambda request, n: httpx2.Response(503, json={"error": {"message": "overloaded"}}), clock)
    assert caught.value.status == 503
    assert 15.0 < clock.now_s <= 30.0


def test_a_server_that_does_not_answer_runs_into_the_deadline() -> None:
    """I19, and what it waits for is named."""

    async def main() -> None:
        async def hang(request: httpx2.Request) -> httpx2.Response:
            await asyncio.sleep(60)
            raise AssertionError

        client = HttpClient("http://e", name="it", use_proxies=False, transport=httpx2.MockTransport(hang))
        with pytest.raises(HttpError, match=r"it at http://e took more than 0\.05 s for /y") as caught:
            await client.call("GET", "/y", deadline_s=0.05)
        assert caught.value.status == NO_ANSWER
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "status", "is_repeated"),
    [(httpx2.ConnectError("refused"), UNSENT, True), (httpx2.ReadError("reset"), NO_ANSWER, False)],
)
def test_what_may_have_arrived_is_not_repeated_by_itself(error: Exception, status: int, is_repeated: bool) -> None:
    """Nothing is done twice: only a call that never left is tried again, unless the caller says otherwise."""
    tries = []

    def answer(request: httpx2.Request, n: int) -> httpx2.Response:
        tries.append(n)
        raise error

    with pytest.raises(HttpError) as caught:
        call(answer, repeat=http.CONNECT_ONLY)
    assert caught.value.status == status
    assert (len(tries) > 1) == is_repeated


@pytest.mark.parametrize("status", [400, 401, 404, 503])
def test_no_error_tells_the_key(status: int) -> None:
    """Servers like to repeat it. Other secrets go too, and long answers are cut."""
    said = {"error": {"message": f"Incorrect API key provided: {KEY} and hf_abcdefghijklmnop " + "x" * 5000}}
    with pytest.raises(HttpError) as caught:
        call(lambda request, n: httpx2.Response(status, json=said), repeat=http.CONNECT_ONLY)
    text = str(caught.value)
    assert KEY not in text and "hf_abc" not in text and "[redacted]" in text and len(text) < 700
    if status == 401:
        assert "refused the key in $MY_KEY for /x (401)" in text


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", " k ")
    assert api_key("MY_KEY") == "k" and api_key(None) is None
    monkeypatch.setenv("MY_KEY", "")
    with pytest.raises(ConfigError, match="environment variable MY_KEY, which is not set: export it"):
        api_key("MY_KEY")


def test_a_missing_package_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "httpx2", None)
    with pytest.raises(ConfigError, match=r'needs the package httpx2: pip install "headrace\[http\]"'):
        HttpClient("http://e", name="it", use_proxies=False)
