"""A server with OpenAI's chat completions, scripted: it does sums, and what else ``script`` says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from http_loopback import Answer, Request, loopback

Script = Callable[[dict[str, Any], int], Answer | None]
"""(body, number of the request) -> what is answered in place of the sum."""


def completion(text: str | None, reason: str | None = "stop", **message: Any) -> Answer:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": reason}
    return Answer({"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": {}})


@dataclass
class ScriptedOpenAi:
    models: tuple[str, ...] = ("small", "large")
    key: str | None = None
    script: Script | None = None
    lists_models: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_running: int = 0
    num_most: int = 0

    async def handle(self, request: Request) -> Answer:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return Answer({"error": {"message": f"Incorrect API key provided: {self.key}"}}, 401)
        if request.path == "/v1/models" and self.lists_models:
            return Answer({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})
        if request.path == "/v1/models/alias":
            return Answer({"id": "alias"})
        if request.path != "/v1/chat/completions":
            return Answer({"error": {"message": "no such thing"}}, 404)
        return await self._chat(request.body)

    async def _chat(self, body: dict[str, Any]) -> Answer:
        number = len(self.bodies)
        self.bodies.append(body)
        self.num_running += 1
        self.num_most = max(self.num_most, self.num_running)
        try:
            await asyncio.sleep(0)
            if body["model"] not in (*self.models, "alias"):
                return Answer({"error": {"message": f"The model {body['model']} does not exist"}}, 404)
            answer = self.script(body, number) if self.script is not None else None
            return answer or self._sum(body)
        finally:
            self.num_running -= 1

    def _sum(self, body: dict[str, Any]) -> Answer:
        """The large model is right, the small one where the first operand is even."""
        a, b = (int(n) for n in re.findall(r"\d+", body["messages"][-1]["content"])[:2])
        is_right = body["model"] == "large" or a % 2 == 0
        return completion(str(a * b if is_right else a * b + 1))


@asynccontextmanager
async def serving(server: ScriptedOpenAi) -> AsyncIterator[str]:
    """Its address, up to and with the version."""
    async with loopback(server.handle) as url:
        yield f"{url}/v1"
