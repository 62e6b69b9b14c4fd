"""Real vLLM for tests: one engine over a tiny model, and transformers' forward pass to compare it with."""

from __future__ import annotations

import asyncio
import copy
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import small_data

from headrace.config.engines import VllmEngineConfig
from headrace.config.vllm_python import find_python
from headrace.engines.vllm.client import Frozen, VllmEngine
from headrace.engines.vllm.in_process import ServerThread
from headrace.engines.vllm.launch import PROGRAM, backend_options, in_a_process
from headrace.engines.vllm.server.backend import AdapterOptions, BackendOptions
from headrace.engines.vllm.server.versions import load_backend
from headrace.errors import ConfigError
from headrace.model.attention import ATTENTION_NAME
from headrace.protocols import WeightUpdate
from headrace.testing import SMALL_ALPHABET, tiny_model, tiny_tokenizer
from headrace.types import Generation, GenerationRequest, PolicyVersion, Sampling, VersionSpan
from headrace.weights.checksums import checksums, named_parameters
from headrace.weights.inprocess import WeightUpdateError
from headrace.weights.parameters import adapter_travels
from headrace.weights.receivers import make_receiver
from headrace.weights.senders import make_sender
from headrace.weights.shared_memory import SharedMemorySender

VOCAB = len(tiny_tokenizer()) - 5
"""Fewer than the model has rows: the rest is padding, and may never be drawn."""


PROMPT = tuple(range(3, 43))
"""Two and a half blocks of the prefix cache."""
EXACT = 1e-4
"""Issue 4: in float32 p99 must stay under 1e-3; 1e-5 was measured."""
MODE = os.environ.get("HEADRACE_TEST_VLLM_MODE", "server")
"""``in_process`` where test_engine_vllm_in_process.py runs these tests again, with the Python that has vLLM."""


def vllm_python() -> Path:
    """Skips where there is none."""
    if MODE == "in_process":
        return Path(sys.executable)
    try:
        return find_python(None)
    except ConfigError as error:
        pytest.skip(f"no vLLM here: {error}")


def vllm_model(**options: Any) -> Any:
    """Shapes that vLLM's attention on CPUs takes, and logits far from uniform."""
    options = {"hidden_size": 128, "num_kv_heads": 2, "initializer_range": 0.2, **options}
    return tiny_model(**options)


def save_config(model: Any, folder: Path) -> Path:
    """All that the server reads: the weights come from the trainer."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def make_vllm(
    model: Any,
    folder: Path,
    *,
    program: Path = PROGRAM,
    load: Callable[[BackendOptions], Any] = load_backend,
    vocab_size: int = VOCAB,
    adapter: AdapterOptions | None = None,
    sender: Any = None,
    initial: WeightUpdate | None = None,
    **config: Any,
) -> VllmEngine:
    """``program``: of a server, ``load``: of a thread, where a test takes something out. ``sender`` and ``initial``: of
    an engine that joins others, in place of its own and of ``model``'s weights."""
    python = vllm_python()  # first: whoever skips leaves nothing open
    options = {"max_batch_size": 4, "kv_cache_bytes": 1 << 27, "num_threads": 1, "start_deadline_s": 200.0, **config}
    engine = VllmEngineConfig(**options)
    sender = sender or make_sender(engine.carrier, folder / "weights")
    backend = backend_options(
        engine,
        model=save_config(model, folder),
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=vocab_size,
        max_context=256,
        adapter=adapter,
    )
    log_path = folder / "engine.log"
    frozen = None
    if adapter is not None:
        base = {name: tensor for name, tensor in named_parameters(model).items() if not adapter_travels(name)}
        frozen = Frozen(SharedMemorySender(), WeightUpdate(version=PolicyVersion(0, 0), tensors=base))
    if MODE == "server":
        launch = in_a_process(
            backend,
            python=python,
            weights=sender.receiver,
            frozen=None if frozen is None else frozen.sender.receiver,
            inherit=sender.inherit if frozen is None else (*sender.inherit, *frozen.sender.inherit),
            log_path=log_path,
            program=program,
        )
    else:
        once = None if frozen is None else make_receiver(frozen.sender.receiver)
        launch = partial(
            ServerThread, backend, make_receiver(sender.receiver), frozen=once, log_path=log_path, load=load
        )
    return VllmEngine(
        engine,
        sender,
        initial or WeightUpdate(version=PolicyVersion(0, 0), tensors=travelling(model)),
        launch,
        frozen=frozen,
        vocab_size=vocab_size,
        decode=tiny_tokenizer().decode,
        max_context=256,
        make_update_error=WeightUpdateError,
    )


def travelling(model: Any) -> dict[str, torch.nn.Parameter]:
    """All parameters, or of a model with an adapter those of the adapter."""
    parameters = named_parameters(model)
    adapter = {name: parameter for name, parameter in parameters.items() if adapter_travels(name)}
    return adapter or parameters


class Session:
    """An engine and the event loop that it lives in, for several tests."""

    def __init__(self, make: Callable[[], VllmEngine]) -> None:
        self.runner = asyncio.Runner()
        self.engine = self.run(_made(make))

    def run(self, call: Awaitable[Any]) -> Any:
        async def main() -> Any:
            return await asyncio.wait_for(call, 240.0)

        return self.runner.run(main())

    def close(self) -> None:
        self.run(self.engine.close())
        assert not self.engine._server.is_alive
        self.runner.close()


async def _made(make: Callable[[], VllmEngine]) -> VllmEngine:
    engine = make()
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    return engine


def request(name: str, prompt_ids: Sequence[int], seed: int = 0, **options: Any) -> GenerationRequest:
    salt = options.pop("cache_salt", None)
    sampling = Sampling(**options)
    return GenerationRequest(id=name, prompt_ids=tuple(prompt_ids), sampling=sampling, seed=seed, cache_salt=salt)


@torch.no_grad()
def gaps(model: Any, asked: GenerationRequest, reply: Generation) -> torch.Tensor:
    """|engine - plain forward pass| for each token [T], under the declared distribution."""
    ids = torch.tensor([asked.prompt_ids + reply.ids])
    model.set_attn_implementation("eager")
    try:
        logits = model(ids, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1, :VOCAB].double()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    logits = logits / (asked.sampling.temperature or 1.0)
    if reply.kept_ids is not None:
        for t, kept in enumerate(reply.kept_ids):
            out = torch.ones(VOCAB, dtype=torch.bool)
            out[list(kept)] = False
            logits[t, out] = -torch.inf
    scored = logits.log_softmax(-1).gather(1, torch.tensor(reply.ids)[:, None])[:, 0]
    return (scored - torch.tensor(reply.logprobs, dtype=torch.float64)).abs()


def perturb(model: Any, names: Sequence[str] | None = None, scale: float = 0.05, seed: int = 0) -> None:
    """Move these parameters, or all."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in named_parameters(model).items():
            if names is None or name in names:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * scale)


async def sync(engine: VllmEngine, model: Any, number: int) -> None:
    """Pause, publish what travels of ``model`` as version 0.number, resume."""
    await engine.pause("keep")
    version = PolicyVersion(0, number)
    await engine.update_weights(WeightUpdate(version=version, tensors=travelling(model)))
    await engine.resume()


class Shared:
    """An engine, the model whose weights it serves, and the number of its next version."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.config = {name: options.pop(name) for name in ("kv_policy", "max_batch_size") if name in options}
        self.model = vllm_model(**options)
        self.session = Session(lambda: make_vllm(self.model, folder, **self.config))
        self.engine = self.session.engine
        self.run = self.session.run
        self.number = 0

    def sync(self) -> None:
        self.number += 1
        self.run(sync(self.engine, self.model, self.number))

    def generate(self, *requests: GenerationRequest) -> list[Generation]:
        async def main() -> list[Generation]:
            return list(await asyncio.gather(*(self.engine.generate(r) for r in requests)))

        return self.run(main())

    def worst(self, *requests: GenerationRequest) -> float:
        replies = self.generate(*requests)
        return float(max(gaps(self.model, r, reply).max() for r, reply in zip(requests, replies, strict=True)))


def check_every_parameter(shared: Shared) -> None:
    asked = request("r", PROMPT[:9], max_new_tokens=6)
    for number, (name, parameter) in enumerate(named_parameters(shared.model).items()):
        old_sums, old_model = shared.engine.weight_checksums(), copy.deepcopy(shared.model)
        perturb(shared.model, [name], seed=number)
        assert torch.isfinite(parameter).all()
        shared.sync()
        reply = shared.generate(asked)[0]
        assert float(gaps(shared.model, asked, reply).max()) < EXACT, name
        assert float(gaps(old_model, asked, reply).max()) > EXACT, name
        assert reply.version_spans == (VersionSpan(PolicyVersion(0, shared.number), 0, 6),)
        new_sums = shared.engine.weight_checksums()
        assert new_sums == checksums(named_parameters(shared.model).items())
        assert [n for n in new_sums if new_sums[n] != old_sums[n]] == [name]


def run_data(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    """A run of 8 batches with vLLM over a tiny model, which learns to write letters."""
    model = folder / "model"
    if not model.exists():
        tokenizer = tiny_tokenizer(SMALL_ALPHABET)
        made = vllm_model(vocab_size=len(tokenizer), initializer_range=0.02, max_context=64)
        made.save_pretrained(model)
        save_config(made, model)
        tokenizer.save_pretrained(model)
    base: dict[str, Any] = {
        "rewards": [{"type": f"{Path(__file__).with_name('vllm_reward.py')}:share_of_letters"}],
        "engine": {"type": "vllm", "mode": MODE, "max_batch_size": 16, "kv_cache_bytes": 1 << 26, "num_threads": 1},
        "trainer": {"num_batches": 8, "learning_rate": 2e-3, "schedule": {"type": "constant"}},
        "checkpoint": {"every": 4},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    data = small_data(folder, name, **base)
    data["model"] = {"path": str(model)}
    return data
