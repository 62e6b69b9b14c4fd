"""Builds the engine that a configuration names, and what carries weights to it. ``wiring.py`` builds the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from headrace.checked import (
    Policy,
    expected_server,
    sglang_calls,
)
from headrace.cluster.engines import engine_starter
from headrace.cluster.workers import Workers
from headrace.config.base import LoraConfig
from headrace.config.engine_checks import NO_TRAINING
from headrace.config.engines import SglangEngineConfig, TransformersEngineConfig, VllmEngineConfig
from headrace.config.fleet import FleetConfig
from headrace.config.schema import RunConfig
from headrace.config.vllm_python import find_python
from headrace.control.watchdog import Watchdog
from headrace.engines.embedded import TransformersEngine
from headrace.engines.fleet.fleet import FleetEngine
from headrace.engines.fleet.supervisor import StartEngine
from headrace.engines.fleet.tally import OnSpan
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.vllm.client import Frozen, VllmEngine
from headrace.engines.vllm.in_process import ServerThread
from headrace.engines.vllm.launch import Launch, backend_options, in_a_process
from headrace.engines.vllm.server.backend import AdapterOptions
from headrace.errors import ConfigError
from headrace.model.load import ADAPTER_NAME
from headrace.model.paths import resolve_model_path
from headrace.protocols import Engine, WeightUpdate
from headrace.types import NO_VERSION, PolicyVersion
from headrace.weights.carried import CarriedWeights
from headrace.weights.carrier import WeightSender
from headrace.weights.checksums import named_parameters
from headrace.weights.inprocess import CopiedWeights, SharedWeights, WeightUpdateError
from headrace.weights.model_folder import ModelFolders
from headrace.weights.parameters import adapter_travels, all_travel
from headrace.weights.receivers import make_receiver
from headrace.weights.senders import make_sender
from headrace.weights.shared_memory import SharedMemorySender
from headrace.weights.shared_sender import SharedSender
from headrace.weights.streamed import StreamedWeights


def num_threads(config: RunConfig) -> tuple[int, int]:
    """(one engine, trainer): all cores each where they take turns or the engine has its own machine, half each where
    they run at the same time; divided by the processes of the run, and the engines' among themselves."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    takes_turns = config.rollout.max_staleness == 0 or isinstance(config.engine, SglangEngineConfig)  # elsewhere
    shares = config.parallel.world_size if takes_turns else 2 * config.parallel.world_size
    default = max(1, num_cores // shares)
    num_engines = 1 if config.fleet is None else config.fleet.num_engines
    return config.engine.num_threads or max(1, default // num_engines), config.trainer.num_threads or default


def build_engine(
    config: RunConfig,
    policy: Policy,
    version: PolicyVersion,
    carrier: StreamedWeights | CarriedWeights | CopiedWeights | None = None,
    log_path: Path | None = None,
) -> TransformersEngine | VllmEngine | SglangEngine:
    """The engine that the configuration names, serving ``version``; ``carrier``: of a trainer of several processes;
    ``log_path``: for what an engine in another process prints."""
    engine_threads, _ = num_threads(config)
    if isinstance(config.engine, VllmEngineConfig):
        return _build_vllm(config, config.engine, policy, version, carrier, log_path)
    if isinstance(config.engine, SglangEngineConfig):
        return _build_sglang(config, config.engine, policy, version, carrier, model_folders(config, config.engine))
    if not isinstance(config.engine, TransformersEngineConfig):
        raise ConfigError(NO_TRAINING)
    return TransformersEngine(
        carrier or _own_weights(config, config.engine, policy, version),
        config.engine.model_copy(update={"num_threads": engine_threads}),
        vocab_size=policy.loaded.vocab_size,
        decode=policy.renderer.decode,
        record_routing=config.trainer.router_replay,
    )


def _own_weights(
    config: RunConfig, engine: TransformersEngineConfig, policy: Policy, version: PolicyVersion
) -> SharedWeights | CopiedWeights | CarriedWeights:
    """What the embedded engine runs, beside a trainer of one process."""
    model = policy.loaded.model
    if engine.shares_weights:
        return SharedWeights(model, version)
    travels = all_travel if config.model.lora is None else adapter_travels
    if engine.carrier.type == "memory":
        return CopiedWeights(model, version, travels)
    sender = make_sender(engine.carrier, config.run_dir / "weights")
    return CarriedWeights(model, version, make_receiver(sender.receiver), sender, travels)


def _build_vllm(
    config: RunConfig,
    engine: VllmEngineConfig,
    policy: Policy,
    version: PolicyVersion,
    carrier: StreamedWeights | CarriedWeights | CopiedWeights | None,
    log_path: Path | None,
    sender: WeightSender | None = None,
) -> VllmEngine:
    """It starts from the weights of ``carrier``, else from the trainer's own: they are read at the first call, which
    the loop makes before any optimizer step. ``sender``: shared with other engines, in place of one of its own."""
    engine_threads, _ = num_threads(config)
    engine = engine.model_copy(update={"num_threads": engine_threads})
    model = carrier.model if carrier is not None else policy.loaded.model
    sender = sender or make_sender(engine.carrier, config.run_dir / "weights")
    tensors, once, frozen = named_parameters(model), None, None
    if config.model.lora is not None:
        base = {name: tensor for name, tensor in tensors.items() if not adapter_travels(name)}
        tensors = {name: tensor for name, tensor in tensors.items() if adapter_travels(name)}
        once = SharedMemorySender()
        frozen = Frozen(once, WeightUpdate(version=version, tensors=base))
    options = backend_options(
        engine,
        model=Path(resolve_model_path(config.model.path)).expanduser(),
        dtype=config.model.dtype,
        vocab_size=policy.loaded.vocab_size,
        max_context=policy.loaded.max_context,
        adapter=adapter_options(config.model.lora, policy.loaded.model),
    )
    launch: Launch
    if engine.mode == "in_process":
        launch = partial(
            ServerThread,
            options,
            make_receiver(sender.receiver),
            frozen=None if once is None else make_receiver(once.receiver),
            log_path=log_path,
        )
    else:
        python = find_python(engine.python)
        launch = in_a_process(
            options,
            python=python,
            weights=sender.receiver,
            frozen=None if once is None else once.receiver,
            inherit=sender.inherit if once is None else (*sender.inherit, *once.inherit),
            log_path=log_path,
        )
    return VllmEngine(
        engine,
        sender,
        WeightUpdate(version=version, tensors=tensors),
        launch,
        frozen=frozen,
        vocab_size=policy.loaded.vocab_size,
        decode=policy.renderer.decode,
        max_context=policy.loaded.max_context,
        make_update_error=WeightUpdateError,
    )


def adapter_options(lora: LoraConfig | None, model: nn.Module) -> AdapterOptions | None:
    """What vLLM must know of the trainer's adapter. Its layers are read off the model, since the configuration may name
    them by a pattern."""
    if lora is None:
        return None
    layers = {name.split(".lora_A.")[0].rpartition(".")[2] for name in named_parameters(model) if ".lora_A." in name}
    return AdapterOptions(rank=lora.rank, alpha=lora.alpha, target_modules=sorted(layers), name=ADAPTER_NAME)


def _build_sglang(
    config: RunConfig,
    engine: SglangEngineConfig,
    policy: Policy,
    version: PolicyVersion,
    carrier: StreamedWeights | CarriedWeights | CopiedWeights | None,
    folders: ModelFolders,
    index: int = 0,
) -> SglangEngine:
    """A client of the ``index``-th server; its weights start from the trainer's, as for vLLM. ``folders``: one for all
    servers of the run."""
    model = carrier.model if carrier is not None else policy.loaded.model
    expected = replace(expected_server(config), max_context=engine.max_context or policy.loaded.max_context)
    return SglangEngine(
        engine,
        sglang_calls(engine, engine.urls[index]),
        folders,
        WeightUpdate(version=version, tensors=named_parameters(model)),
        expected=expected,
        vocab_size=policy.loaded.vocab_size,
        decode=policy.renderer.decode,
        make_update_error=WeightUpdateError,
    )


def model_folders(config: RunConfig, engine: SglangEngineConfig) -> ModelFolders:
    """Where the run's versions lie for servers to read."""
    root = (engine.weights_path or config.run_dir / "weights").expanduser()
    return ModelFolders(root, Path(resolve_model_path(config.model.path)).expanduser())


def build_fleet(
    config: RunConfig,
    fleet: FleetConfig,
    policy: Policy,
    version: PolicyVersion,
    template: StreamedWeights | CarriedWeights | None,
    *,
    workers: Workers | None,
    watchdog: Watchdog,
    run_path: Path,
    on_span: OnSpan,
    on_event: Callable[[str], None],
) -> FleetEngine:
    """Engines of the kind that the configuration names, behind one. ``template``: the whole model with the present
    weights, where the trainer has several processes. An engine that is started again begins with whatever weights are
    at hand, as no version at all: it is given the published ones, and proved, before it serves. ``workers``: what
    carries engines in processes of their own."""

    folders = model_folders(config, config.engine) if isinstance(config.engine, SglangEngineConfig) else None
    shared: SharedSender | None = None
    if isinstance(config.engine, VllmEngineConfig) and config.engine.carrier.type in ("file", "delta"):
        shared = SharedSender(make_sender(config.engine.carrier, config.run_dir / "weights"))
    travels = all_travel if config.model.lora is None else adapter_travels

    async def start(index: int, incarnation: int) -> Engine:
        held, log_path = version if incarnation == 0 else NO_VERSION, run_path / f"engine-{index}.log"
        if isinstance(config.engine, VllmEngineConfig):
            sender = None if shared is None else shared.handle()
            vllm = _build_vllm(config, config.engine, policy, held, template, log_path, sender)
            try:
                await vllm.start()
            except BaseException:
                await vllm.close()  # its process, and its hold on what it shares with the others
                raise
            return vllm
        if isinstance(config.engine, SglangEngineConfig) and folders is not None:
            sglang = _build_sglang(config, config.engine, policy, held, template, folders, index)
            await sglang.start()
            return sglang
        own = CopiedWeights(policy.loaded.model if template is None else template.model, held, travels)
        return build_engine(config, policy, held, own)

    starter: StartEngine = start
    if workers is not None and folders is None:
        starter = engine_starter(workers, config, num_threads(config)[0])
    return FleetEngine(starter, fleet, version=version, watchdog=watchdog, on_span=on_span, on_event=on_event)
