"""``[engine]`` as a union: which keys belong to which engine, and where vLLM's Python is looked for."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path
from typing import Any

import pytest

from headrace.config.carriers import DeltaCarrierConfig, FileCarrierConfig, MemoryCarrierConfig
from headrace.config.checks import check_config
from headrace.config.engines import TransformersEngineConfig, VllmEngineConfig
from headrace.config.load import load_config, resolved, restore_config
from headrace.config.schema import RunConfig
from headrace.config.vllm_python import VARIABLE, check_this_python, find_python
from headrace.errors import ConfigError

BASE = 'tasks = {type = "arithmetic"}\nrewards = [{type = "exact"}]\nmodel = {path = "smollm2-135m"}\n'


def load(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(BASE + text)
    return load_config(path)


def test_an_engine_without_a_type_is_the_embedded_one(tmp_path: Path) -> None:
    """Files from before there was a choice mean what they meant."""
    assert load(tmp_path, "").engine == TransformersEngineConfig()
    assert load(tmp_path, "[engine]\nnum_threads = 2").engine == TransformersEngineConfig(num_threads=2)
    engine = load(tmp_path, '[engine]\ntype = "vllm"\nmax_batch_size = 3').engine
    assert engine == VllmEngineConfig(max_batch_size=3)


def test_a_recorded_run_comes_back_with_its_engine(tmp_path: Path) -> None:
    """A resume finds the engine that the run had, and the keys that were set."""
    config = load(tmp_path, '[engine]\ntype = "vllm"\nkv_cache_bytes = 2000000')
    again = restore_config(resolved(config), "run.json")
    assert again.engine == config.engine
    assert again.engine.model_fields_set == {"type", "kv_cache_bytes"}


def test_a_carrier_is_chosen_by_type(tmp_path: Path) -> None:
    """Memory unless something else is said; a recorded run comes back with its carrier."""
    assert load(tmp_path, "").engine.carrier == MemoryCarrierConfig()
    text = '[engine]\ntype = "vllm"\n[engine.carrier]\n'
    assert load(tmp_path, text + 'type = "file"\nkeep = 3').engine.carrier == FileCarrierConfig(keep=3)
    config = load(tmp_path, text + 'type = "delta"\nanchor_every = 5\npath = "/nowhere"')
    assert config.engine.carrier == DeltaCarrierConfig(anchor_every=5, path=Path("/nowhere"))
    assert restore_config(resolved(config), "run.json").engine.carrier == config.engine.carrier


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[engine.carrier]\ntype = "fil"', "must be one of memory, file, delta, broadcast; did you mean 'file'?"),
        ('[engine.carrier]\ntype = "file"\nanchor_every = 3', "engine.carrier.anchor_every is not a known key"),
        ("[engine.carrier]\nkeep = 3", "engine.carrier.keep is not a known key"),
        ('[engine.carrier]\ntype = "delta"\nkeep = 0', "engine.carrier.keep = 0"),
    ],
)
def test_wrong_keys_of_a_carrier_are_named(tmp_path: Path, text: str, message: str) -> None:
    """I20: of the carrier that was chosen."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[engine.carrier]\ntype = "file"', 'engine.carrier has no effect: engine.weights = "shared"'),
        ('[engine.carrier]\ntype = "memory"', 'engine.carrier has no effect: engine.weights = "shared"'),
        ('[engine]\nweights = "copy"\n[engine.carrier]\ntype = "broadcast"', "there is nobody to broadcast to"),
        (
            '[engine]\ntype = "vllm"\nmode = "in_process"\n[engine.carrier]\ntype = "broadcast"',
            "there is nobody to broadcast to",
        ),
        ('[engine]\nweights = "copy"\n[engine.carrier]\ntype = "delta"', None),
        ('[parallel]\ndp_shard = 2\n[engine.carrier]\ntype = "delta"', None),
        ('[engine]\ntype = "vllm"\n[engine.carrier]\ntype = "broadcast"', None),
    ],
)
def test_a_carrier_that_carries_nothing_is_refused(tmp_path: Path, text: str, message: str | None) -> None:
    """I20: an option without effect in the chosen setting; what has an effect passes."""
    if message is None:
        check_config(load(tmp_path, text))
        return
    with pytest.raises(ConfigError) as caught:
        check_config(load(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[engine]\ntype = "vllm"\nweights = "copy"', "engine.weights is not a known key"),
        ("[engine]\nmax_batchsize = 3", "engine.max_batchsize is not a known key; did you mean engine.max_batch_size?"),
        ('[engine]\ntype = "vlm"', "must be one of transformers, vllm, sglang, openai; did you mean 'vllm'?"),
        ('[engine]\ntype = "vllm"\nmax_batch_size = 0', "engine.max_batch_size = 0"),
        ('[engine]\ntype = "sglang"', "engine.urls"),
        ('[engine]\ntype = "sglang"\nurls = ["10.0.0.7:30000"]', "engine.urls"),
        ('[engine]\ntype = "openai"\nurl = "https://me:secret@example.org/v1"', "engine.url"),
        ('[engine]\ntype = "openai"\nurl = "https://e/v1"\napi_key = "sk-1"', "engine.api_key is not a known key"),
        ('[engine]\ntype = "openai"\nurl = "https://e/v1"\napi_key_variable = "sk-1"', "engine.api_key_variable"),
        ("max_batch_size = 3", "did you mean engine.max_batch_size?"),
    ],
)
def test_wrong_keys_are_named(tmp_path: Path, text: str, message: str) -> None:
    """I20: of the engine that was chosen."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)


def config(**sections: Any) -> RunConfig:
    base = {"model": {"path": "m"}, "tasks": {"type": "arithmetic"}, "rewards": ({"type": "exact"},)}
    return RunConfig(**{**base, "engine": {"type": "vllm"}, **sections})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "m", "lora": {"rank": 600}}}, "model.lora.rank = 600: vLLM takes 512 at most"),
        ({"engine": {"type": "vllm", "mode": "in_process", "python": "p"}}, "engine.python has no effect"),
        (
            {"engine": {"type": "vllm", "mode": "in_process"}, "parallel": {"dp_shard": 2}},
            "the process group of the process that they share",
        ),
        (
            {"engine": {"type": "vllm", "mode": "in_process"}, "fleet": {"num_engines": 2}},
            "fleet.num_engines = 2 with engine.mode = .in_process.: a process holds one vLLM",
        ),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p = 0.9 without sampling.top_k"),
        ({"sampling": {"temperature": 2.5}}, "sampling.temperature = 2.5: vLLM takes 2 at most"),
        ({"engine": {"type": "vllm", "kv_policy": "keep"}}, "engine.kv_policy has no effect"),
    ],
)
def test_what_vllm_cannot_do_is_refused(sections: dict[str, Any], message: str) -> None:
    """I20: no silent fallback."""
    with pytest.raises(ConfigError, match=message):
        check_config(config(**sections))


SGLANG = {"type": "sglang", "urls": ("http://10.0.0.7:30000",)}
ASYNC = {"max_staleness": 1}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "m", "lora": {}}}, "adapters do not travel to SGLang yet"),
        ({"sampling": {"top_p": 0.9, "top_k": 5}}, "SGLang measures top-p over all ids"),
        ({"engine": {**SGLANG, "kv_policy": "keep"}, "rollout": ASYNC}, "has no effect: guards.canary_every is 1"),
        ({"engine": {**SGLANG, "kv_policy": "recompute"}}, "engine.kv_policy has no effect"),
        ({"engine": {**SGLANG, "urls": ("http://a", "http://b")}}, "names 2 servers, and the run has one engine"),
    ],
)
def test_what_sglang_cannot_do_is_refused(sections: dict[str, Any], message: str) -> None:
    """I20: no silent fallback."""
    with pytest.raises(ConfigError, match=message):
        check_config(config(**{"engine": SGLANG, **sections}))


def test_what_sglang_can_do_is_accepted() -> None:
    check_config(config(engine=SGLANG, sampling={"top_k": 100}))
    check_config(config(engine=SGLANG, sampling={"top_p": 0.9}, rollout=ASYNC))
    check_config(config(engine={**SGLANG, "kv_policy": "keep"}, rollout=ASYNC, guards={"canary_every": 4}))


def test_what_vllm_can_do_is_accepted() -> None:
    check_config(config(sampling={"top_p": 0.9, "top_k": 100}))
    check_config(config(model={"path": "m", "lora": {"rank": 8}}))
    check_config(config(engine={"type": "vllm", "mode": "in_process"}))
    check_config(config(rollout={"max_staleness": 1}, engine={"type": "vllm", "kv_policy": "recompute"}))


def fake_python(path: Path, python: tuple[int, int] = (3, 12), vllm: str = '["0.32.1"]') -> Path:
    """A program that answers as a Python of version ``python`` would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho \'{{"python": {list(python)}, "vllm": {vllm}}}\'\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_where_the_python_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """engine.python, then the variable, then .venv-vllm of the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    here = fake_python(tmp_path / ".venv-vllm" / "bin" / "python")
    assert find_python(None) == here
    named = fake_python(tmp_path / "named", vllm='["0.32.0+cpu"]')
    monkeypatch.setenv(VARIABLE, str(named))
    assert find_python(None) == named
    configured = fake_python(tmp_path / "configured", vllm="[]")
    assert find_python(str(configured)) == configured


def test_no_vllm_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names where it looked, and the command that makes one."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"none is at /nowhere/python: `make setup-vllm` makes one in \.venv-vllm"):
        find_python("/nowhere/python")
    without = fake_python(tmp_path / "python", vllm="null")
    with pytest.raises(ConfigError, match=r"has no package vllm.*make setup-vllm"):
        find_python(str(without))
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.0 is installed in .*python, but headrace works with 0\.32"):
        find_python(str(fake_python(without, vllm='["0.33.0"]')))
    with pytest.raises(ConfigError, match=r"is Python 3\.10, and headrace needs 3\.11 or later"):
        find_python(str(fake_python(without, python=(3, 10))))
    without.write_text("#!/bin/sh\nexit 2\n")
    with pytest.raises(ConfigError, match=r"could not say what it has: it exited with status 2; is it a Python 3\.11"):
        find_python(str(without))
    without.write_text("no program")
    with pytest.raises(ConfigError, match=r"does not run: .*make setup-vllm"):
        find_python(str(without))


def test_in_process_needs_vllm_in_this_python() -> None:
    """The error says which Python, and with which one to start the run."""
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("this Python has vLLM")
    with pytest.raises(ConfigError, match=r"needs vLLM in the Python that runs headrace, and .* has none.*server"):
        check_this_python()
