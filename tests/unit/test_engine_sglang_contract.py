"""Every field that our SGLang client sends or reads exists in SGLang's real source, with the type that we take it for.

The contract is read out of the wheel with ``ast`` (tests/sglang_contract.py); the slow test derives it once more.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import sglang_contract
from sglang_scripted_server import mismatch, problems

from headrace.engines.sglang import calls, wire

CONTRACT = sglang_contract.load()
WHEELS = Path(__file__).parents[2] / "build" / "wheels"

SENT_TYPES = {
    "/generate": {
        "rid": "Optional[StringOrList]",
        "input_ids": "Optional[TokenIdsOrList]",
        "sampling_params": "Optional[SamplingParamsOrList]",
        "return_logprob": "Optional[BoolOrList]",
        "return_sampling_mask": "Optional[BoolOrList]",
        "stream": "Optional[bool]",
        "cache_salt": "Optional[StringOrList]",
    },
    "/abort_request": {"rid": "Optional[str]", "abort_all": "bool"},
    "/pause_generation": {"mode": "Literal['abort', 'retract', 'in_place']"},
    "/continue_generation": {"torch_empty_cache": "bool"},
    "/update_weights_from_disk": {
        "model_path": "str",
        "load_format": "Optional[str]",
        "weight_version": "Optional[str]",
        "flush_cache": "bool",
    },
    "/init_weights_update_group": {
        "master_address": "str",
        "master_port": "int",
        "rank_offset": "int",
        "world_size": "int",
        "group_name": "str",
        "backend": "str",
    },
    "/destroy_weights_update_group": {"group_name": "str"},
    "/begin_weight_update": {"selector": "Literal['target', 'draft', 'all']"},
    "/update_weights_from_distributed": {
        "names": "List[str]",
        "dtypes": "List[str]",
        "shapes": "List[List[int]]",
        "group_name": "str",
        "flush_cache": "bool",
        "weight_version": "Optional[str]",
    },
    "/update_weights_from_tensor": {
        "serialized_named_tensors": "Annotated[List[bytes], Base64Bytes()]",
        "flush_cache": "bool",
        "weight_version": "Optional[str]",
    },
    "/end_weight_update": {},
    "/update_weight_version": {"new_version": "str", "abort_all_requests": "bool"},
    "/flush_cache": {},
    "/weights_checker": {"action": "str"},
    "/release_memory_occupation": {"tags": "Optional[List[str]]"},
    "/resume_memory_occupation": {"tags": "Optional[List[str]]"},
    "/model_info": {},
    "/server_info": {},
}
SAMPLING_TYPES = {
    "max_new_tokens": "Optional[int]",
    "temperature": "Optional[float]",
    "top_p": "Optional[float]",
    "top_k": "Optional[int]",
    "sampling_seed": "Optional[int]",
    "stop": "Optional[StringOrList]",
    "stop_token_ids": "Optional[Int64List]",
    "ignore_eos": "Optional[bool]",
    "no_stop_trim": "Optional[bool]",
    "skip_special_tokens": "Optional[bool]",
}
META_TYPES = {
    "prompt_tokens": "int",
    "completion_tokens": "int",
    "cached_tokens": "int",
    "finish_reason": "Optional[FinishReason]",
    "weight_version": "Optional[str]",
    "weight_versions": "List[WeightVersionSpan]",
    "output_token_logprobs": "Optional[LogprobEntries]",
}
KEPT_TYPES = {
    "output_token_sampling_mask": "List[List[int]]",
    "output_token_sampling_logprobs": "List[Union[float, List[float]]]",
}
SERVER_TYPES = {
    "version": "str",
    "enable_deterministic_inference": "bool",
    "dtype": "str",
    "max_req_input_len": None,
}


def plain(kind: str) -> str:
    """Without the mark of a default. ``dataclasses.field(...)`` is one too."""
    return kind.removesuffix(" = ...")


def test_the_contract_is_of_the_version_that_the_client_names() -> None:
    assert CONTRACT["version"] == wire.CONTRACT_VERSION
    assert any(wire.CONTRACT_VERSION.startswith(f"{minor}.") for minor in wire.SUPPORTED)
    assert len(CONTRACT["sha256"]) == 64


@pytest.mark.parametrize("route", sorted(wire.SENT))
def test_what_is_sent_exists_with_its_type(route: str) -> None:
    """Route, method, body and each field of it."""
    known = CONTRACT["routes"][route]
    assert ("GET" if route in ("/model_info", "/server_info") else "POST") in known["methods"]
    assert wire.SENT[route] == set(SENT_TYPES[route])
    fields = {} if known["body"] is None else CONTRACT["bodies"][known["body"]]
    if route == "/generate":
        assert wire.SENT[route] <= set(fields), "the server's own dataclass takes them too"
        fields = CONTRACT["api"]["GenerateRequest"]
    assert {name: plain(fields[name]) for name in wire.SENT[route]} == SENT_TYPES[route]
    needed = {name for name, kind in fields.items() if not kind.endswith("= ...")}
    assert needed <= wire.SENT[route]


def test_sampling_parameters_exist_with_their_types() -> None:
    """SGLang refuses a request with any other key there."""
    assert "unknown keys rejected" in CONTRACT["api_says"]["SamplingParams"]
    fields = CONTRACT["api"]["SamplingParams"]
    assert set(SAMPLING_TYPES) == wire.SENT_SAMPLING
    assert {name: plain(fields[name]) for name in SAMPLING_TYPES} == SAMPLING_TYPES


def test_what_is_read_of_a_reply_exists_with_its_type() -> None:
    """In the published schema, and among the keys that the server's code writes."""
    assert set(META_TYPES) | set(KEPT_TYPES) == wire.READ_META_INFO
    fields = CONTRACT["api"]["GenerateMetaInfo"]
    assert {name: plain(fields[name]) for name in META_TYPES} == META_TYPES
    assert set(CONTRACT["meta_info"]) >= wire.READ_META_INFO
    assert {name: plain(kind) for name, kind in CONTRACT["kept_ids"].items()} == KEPT_TYPES
    response = CONTRACT["api"]["GenerateResponse"]
    assert plain(response["output_ids"]) == "Optional[TokenIds]"
    assert plain(response["meta_info"]) == "Optional[GenerateMetaInfo]"
    assert CONTRACT["api_says"]["LogprobEntry"].endswith("JSON positional array [logprob, token_id, text].")
    entry = {name: plain(kind) for name, kind in CONTRACT["api"]["LogprobEntry"].items()}
    assert entry == {"logprob": "Optional[float]", "token_id": "int", "text": "Optional[str]"}
    span = {name: plain(kind) for name, kind in CONTRACT["api"]["WeightVersionSpan"].items()}
    assert span == {"version": "str", "start": "int", "end": "int"}
    assert CONTRACT["finish"]["FINISH_MATCHED_TOKEN"] == ["matched", "type"]
    assert CONTRACT["finish"]["FINISH_LENGTH"] == ["length", "type"]
    assert {"message", "type"} <= set(CONTRACT["finish"]["FINISH_ABORT"])


def test_what_is_read_of_the_server_exists() -> None:
    """Its identity, its settings, and whether an update was done."""
    assert set(CONTRACT["model_info"]) >= wire.READ_MODEL_INFO
    assert set(SERVER_TYPES) == wire.READ_SERVER_INFO
    types = CONTRACT["api"]["GetServerInfoResponse"] | CONTRACT["server_args"]
    for name, kind in SERVER_TYPES.items():
        if kind is None:  # no type is declared: it is a key of what the scheduler tells
            assert name in CONTRACT["scheduler_info"]
        else:
            assert plain(types[name]) == kind
    for route in ("/update_weights_from_disk", "/update_weights_from_distributed", "/begin_weight_update"):
        assert {"success", "message"} <= set(CONTRACT["routes"][route]["answers"])
    assert "per_engine_checksum" in CONTRACT["routes"]["/weights_checker"]["answers"]


def test_updates_over_a_group_or_as_tensors_need_a_session() -> None:
    """Since 0.5.23 the server refuses them outside of begin_weight_update and end_weight_update."""
    assert CONTRACT["session_is_needed"] == ["update_weights_from_distributed", "update_weights_from_tensor"]
    assert hasattr(calls.SglangCalls, "begin_update") and hasattr(calls.SglangCalls, "end_update")


@pytest.mark.parametrize(
    ("value", "kind", "is_right"),
    [
        (True, "int", False),
        (1, "Optional[float]", True),
        ("abort", "Literal['abort', 'retract', 'in_place']", True),
        ("keep", "Literal['abort', 'retract', 'in_place']", False),
        ([1, 2], "Optional[TokenIdsOrList]", True),
        (["a"], "Optional[TokenIdsOrList]", False),
        (None, "Optional[str]", True),
        (None, "str", False),
        ({"temperature": 1.0}, "Optional[SamplingParamsOrList]", True),
        ({"temperature": "hot"}, "Optional[SamplingParamsOrList]", False),
        ({"temprature": 1.0}, "Optional[SamplingParamsOrList]", False),
    ],
)
def test_the_scripted_server_tells_right_from_wrong(value: Any, kind: str, is_right: bool) -> None:
    """It could hold nobody to anything if it did not."""
    assert (mismatch(value, kind, "it") is None) == is_right


def test_the_scripted_server_refuses_unknown_and_missing_fields() -> None:
    fields = CONTRACT["bodies"]["UpdateWeightFromDiskReqInput"]
    assert problems({"model_path": "x"}, fields, "body") == []
    assert problems({"path": "x"}, fields, "body") == ["body has no field path", "body lacks model_path"]


@pytest.mark.slow
def test_the_contract_is_what_the_wheel_says() -> None:
    """From the wheel itself: ``make sglang-wheel`` fetches it."""
    wheel = Path(os.environ.get("HEADRACE_SGLANG_WHEEL") or WHEELS / CONTRACT["wheel"])
    if not wheel.is_file():
        pytest.skip("no SGLang wheel here: make sglang-wheel")
    assert sglang_contract.text(sglang_contract.derive(wheel)) == sglang_contract.DATA.read_text(encoding="utf-8")
