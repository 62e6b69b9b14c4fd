"""What a configuration names: checked, cheapest first, before any work, then the models that a run starts from.

Nothing is written and no model is loaded before everything that can be known to be wrong is known to be right.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from headrace.algorithms.registry import algorithm_of
from headrace.config.checks import AlgorithmTraits, check_config
from headrace.config.critic import SeparateCriticConfig
from headrace.config.engines import OpenAiEngineConfig, SglangEngineConfig, VllmEngineConfig
from headrace.config.schema import RunConfig
from headrace.config.vllm_python import check_this_python, find_python
from headrace.engines.http import HttpClient, api_key
from headrace.engines.openai import OpenAiEngine, make_client
from headrace.engines.openai import check_before_work as check_openai
from headrace.engines.sglang.calls import SglangCalls
from headrace.engines.sglang.start import Expected
from headrace.engines.sglang.start import check_before_work as check_sglang
from headrace.environments.preferences import Conversation, Rows, read_supervised
from headrace.environments.registry import check_environments
from headrace.environments.tasks import TaskSplits, build_tasks
from headrace.errors import ConfigError
from headrace.model.load import LoadedModel, load_model
from headrace.model.memory import keep_large_buffers
from headrace.model.parallel.check import ModelShape, check_layout
from headrace.model.parallel.forecast import Pass, recomputed_layers
from headrace.model.paths import resolve_model_path
from headrace.model.renderer import ChatRenderer, generation_eos_ids
from headrace.protocols import Algorithm, Reward
from headrace.rewards.build import build_rewards
from headrace.rewards.composite import with_gold
from headrace.trainer.critic import Critic
from headrace.trainer.plan import num_steps_per_batch


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the configuration names, made without loading a model."""

    config: RunConfig
    splits: TaskSplits
    algorithm: Algorithm
    reward: Reward
    gold: Reward | None = None
    """Reward and gold standard together, for evaluations: the value is the reward's, gold is a component."""
    conversations: Rows[Conversation] | None = None
    """What is imitated beside the rollouts."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A loaded model, and the renderer that speaks its ids."""

    loaded: LoadedModel
    renderer: ChatRenderer


def check_before_work(config: RunConfig, *, trains: bool = True, asks_servers: bool = True) -> Checked:
    """All that can be refused without loading a model. ``trains``: False for an evaluation; ``asks_servers``: False in
    processes beside the one that has asked. Raises ConfigError and its kin, EngineError where a server that the
    configuration names is not what a run can build on."""
    algorithm = algorithm_of(config)
    composed = getattr(algorithm, "resolved", None)  # a third party's algorithm knows its own options
    check_config(
        config,
        algorithm=AlgorithmTraits(
            group_relative=getattr(composed, "is_group_relative", False),
            dynamic_sampling=getattr(composed, "dynamic_sampling", True),
            ratio_is_one=getattr(composed, "ratio_is_one_on_one_step", True),
            needs_values=algorithm.needs.values,
        ),
        trains=trains,
    )
    if isinstance(config.engine, VllmEngineConfig):
        if config.engine.mode == "in_process":
            check_this_python()
        else:
            find_python(config.engine.python)
    if not isinstance(config.engine, OpenAiEngineConfig):  # whose model is the server's
        _check_layout(config)
    if config.parallel.world_size > 1 and algorithm.needs.prepare:
        raise ConfigError(
            f"algorithm '{config.algorithm.preset}' chooses tokens or weights over a whole minibatch, which several "
            "processes cannot do yet; set all axes of [parallel] to 1, or take algorithm.selection and "
            "correction.batch_normalised away"
        )
    splits = build_tasks(config.tasks)
    check_environments([splits.train, splits.held_out])
    evaluation = config.evaluation
    if (evaluation.every or evaluation.at_start or evaluation.at_end) and not len(splits.held_out):
        raise ConfigError(
            "evaluation is on, but there are no held-out tasks; set tasks.held_out_path or tasks.held_out_fraction, "
            "or turn evaluation.every, at_start and at_end off"
        )
    reward = build_rewards(config.rewards)
    if getattr(composed, "refuses_negative_rewards", False) and reward.value_range[0] < 0:
        raise ConfigError(
            f"reward '{reward.name}' ranges from {reward.value_range[0]}, and algorithm '{config.algorithm.preset}' "
            "divides by the mean reward of a group: use rewards from 0 up, or another algorithm"
        )
    gold = None
    if config.gold is not None:
        gold = with_gold(reward, build_rewards(config.gold.rewards, where="gold.rewards"))
    for section in ("supervised_data", "teacher"):
        if getattr(config, section) is not None and composed is None:
            raise ConfigError(
                f"{section} with algorithm '{config.algorithm.preset}', which is not one of headrace's own and may "
                "know no such stream; remove the section or choose another preset"
            )
    alone = config.teacher is not None and config.teacher.stream == "distillation"
    if alone and getattr(composed, "dynamic_sampling", False):
        raise ConfigError(
            f"algorithm '{config.algorithm.preset}' replaces groups by their rewards (dynamic sampling), and "
            'teacher.stream = "distillation" trains without rewards; choose a preset without it, such as grpo'
        )
    conversations = read_supervised(config.supervised_data, splits.held_out)
    if asks_servers:
        _ask_servers(config)
    return Checked(
        config=config, splits=splits, algorithm=algorithm, reward=reward, gold=gold, conversations=conversations
    )


def _check_layout(config: RunConfig) -> None:
    """Does the model fit into the processes that were asked for?"""
    folder = Path(resolve_model_path(config.model.path)).expanduser()
    if folder.is_dir() and (config.parallel.world_size > 1 or config.model.activation_budget_bytes is not None):
        shape = ModelShape.of_folder(folder)
        check_layout(config.parallel, shape)
        recomputed_layers(config.parallel, shape, Pass.of(config))  # raises where the budget is too small


def _ask_servers(config: RunConfig) -> None:
    """Last, for a server that is being started may take its time to answer."""
    engine = config.engine
    if isinstance(engine, SglangEngineConfig):
        expected = expected_server(config)
        for url in engine.urls:
            check_sglang(functools.partial(sglang_calls, engine, url), expected, engine.start_deadline_s)
    elif isinstance(engine, OpenAiEngineConfig):
        check_openai(functools.partial(make_openai_engine, engine, config.model.path))


def sglang_calls(engine: SglangEngineConfig, url: str) -> SglangCalls:
    """A client of one server that the configuration names. Raises ConfigError where its key is not there."""
    key = api_key(engine.api_key_variable)
    name, variable = "the SGLang server", engine.api_key_variable
    return SglangCalls(HttpClient(url, name=name, key=key, key_variable=variable, use_proxies=False))


def make_openai_engine(engine: OpenAiEngineConfig, model: str) -> OpenAiEngine:
    """Of the model that the server knows as ``model``. Raises ConfigError where its key is not there."""
    return OpenAiEngine(engine, model, make_client(engine))


def expected_server(config: RunConfig) -> Expected:
    """What a server must serve: the model of the configuration, as its folder says."""
    path = Path(resolve_model_path(config.model.path)).expanduser() / "config.json"
    model = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return Expected(
        dtype=config.model.dtype,
        architectures=tuple(model.get("architectures") or ()),
        model_type=model.get("model_type", ""),
        max_context=config.engine.max_context or 0,
    )


def load_policy(config: RunConfig) -> Policy:
    """The model that the run starts from."""
    keep_large_buffers()
    path = resolve_model_path(config.model.path)
    device = config.model.device if config.parallel.world_size == 1 else "cpu"  # where the mesh is
    loaded = load_model(path, config.model.dtype, lora=config.model.lora, seed=config.seed, device=device)
    return Policy(
        loaded=loaded,
        renderer=ChatRenderer(loaded.tokenizer, config.model.chat_template, generation_eos_ids(path)),
    )


def load_critic(config: RunConfig, policy: Policy) -> Critic | None:
    """The critic that the configuration names; None where it names none. Raises ConfigError for a model that does not
    fit the policy."""
    if config.critic is None:
        return None
    own = None
    if isinstance(config.critic, SeparateCriticConfig):
        path = resolve_model_path(config.critic.path or config.model.path)
        own = load_model(
            path, config.model.dtype, lora=config.critic.lora, seed=config.seed, device=config.model.device
        )
        needed = config.engine.max_context or policy.loaded.max_context
        if own.max_context < needed:
            raise ConfigError(
                f"critic.path: the model allows {own.max_context} tokens, but prompt and reply may have {needed}; "
                "choose a model with a longer context, or lower engine.max_context"
            )
    num_steps = config.trainer.num_batches * num_steps_per_batch(config.trainer)
    return Critic(config.critic, policy.loaded, own=own, num_steps=num_steps)
