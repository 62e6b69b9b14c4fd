"""SGLang's HTTP contract, read out of its real wheel with ``ast``. Nothing of SGLang is imported or run.

``python tests/sglang_contract.py WHEEL`` writes ``tests/data/sglang_contract.json``: the routes of its server, the
fields of the request types behind them, the fields and keys of what it answers, each with the type that SGLang's source
gives it. The contract test holds our client to that file, the scripted server is built from it, and a slow test derives
it again from the wheel (``make sglang-wheel``).
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "sglang_contract.json"

_SERVER = "sglang/srt/entrypoints/http_server.py"
_STRUCTS = "sglang/srt/managers/io_struct.py"
_API = "sglang/api/v1/api_types.py"
_TOKENIZER_MANAGER = "sglang/srt/managers/tokenizer_manager.py"
_FINISH = "sglang/srt/managers/schedule_batch.py"
_VERSIONS = "sglang/srt/utils/weight_versions.py"
_SCHEDULER = "sglang/srt/managers/scheduler.py"
_WEIGHT_UPDATER = "sglang/srt/managers/scheduler_components/weight_updater.py"
_SERVER_ARGS = ("exec_", "model", "serving", "memory", "parallel")

ROUTES = (
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/update_weight_version",
    "/flush_cache",
    "/weights_checker",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/model_info",
    "/server_info",
)
API_TYPES = ("GenerateRequest", "SamplingParams", "GenerateResponse", "GenerateMetaInfo", "WeightVersionSpan")
API_TYPES += ("LogprobEntry", "FinishStop", "FinishLength", "FinishAbort", "GetModelInfoResponse")
API_TYPES += ("GetServerInfoResponse", "ErrorBody")
STRUCTS = ("ChecksumInfo", "ParallelismInfo", "UpdateWeightFromDiskReqOutput")


class Source:
    """The files of a wheel, parsed."""

    def __init__(self, wheel: Path) -> None:
        self._archive = zipfile.ZipFile(wheel)
        self._trees: dict[str, ast.Module] = {}

    def text(self, name: str) -> str:
        return self._archive.read(name).decode()

    def tree(self, name: str) -> ast.Module:
        if name not in self._trees:
            self._trees[name] = ast.parse(self.text(name))
        return self._trees[name]

    def node(self, file: str, name: str) -> Any:
        """The class or function ``name`` of a file, at whatever depth."""
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [n for n in ast.walk(self.tree(file)) if isinstance(n, kinds) and n.name == name]
        if not found:
            raise LookupError(f"{file} has no {name}")
        return found[-1]

    def fields(self, file: str, name: str) -> dict[str, str]:
        """Annotated fields of a class and its bases in the same file: name -> type (``= ...``: has a default)."""
        node = self.node(file, name)
        found: dict[str, str] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes(file):
                found |= self.fields(file, base.id)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[line.target.id] = ast.unparse(line.annotation) + (" = ..." if line.value is not None else "")
        return found

    def classes(self, file: str) -> set[str]:
        return {n.name for n in self.tree(file).body if isinstance(n, ast.ClassDef)}

    def aliases(self, file: str) -> dict[str, str]:
        """``Name = type`` of a file."""
        return {
            line.targets[0].id: ast.unparse(line.value)
            for line in self.tree(file).body
            if isinstance(line, ast.Assign)
            and isinstance(line.targets[0], ast.Name)
            and line.targets[0].id[0].isupper()
        }

    def keys(self, file: str, function: str) -> list[str]:
        """Every constant string that ``function`` uses as a key of a dict that it writes."""
        found: set[str] = set()
        for node in ast.walk(self.node(file, function)):
            if isinstance(node, ast.Dict):
                found |= {k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                        found.add(str(target.slice.value))
        return sorted(found)


def routes(source: Source) -> dict[str, Any]:
    """Path -> methods, type of the body (None: it has none), query parameters."""
    found: dict[str, Any] = {}
    for node in ast.walk(source.tree(_SERVER)):
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func).startswith("app.")):
                continue
            path = decorator.args[0].value if decorator.args and isinstance(decorator.args[0], ast.Constant) else None
            if path not in ROUTES:
                continue
            methods = next((ast.literal_eval(k.value) for k in decorator.keywords if k.arg == "methods"), None)
            body = next((a for a in node.args.args if a.arg == "obj"), None)
            found[path] = {
                "methods": methods or [ast.unparse(decorator.func).removeprefix("app.").upper()],
                "body": None if body is None else _body_type(body.annotation),
                "query": {a.arg: ast.unparse(a.annotation) for a in node.args.args if a.arg not in ("obj", "request")},
                "answers": source.keys(_SERVER, node.name),
            }
    return {path: found[path] for path in ROUTES}


def _body_type(annotation: ast.expr | None) -> str:
    """``Annotated[Optional[X], Body()]`` and the like: X."""
    names = [n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)] if annotation is not None else []
    return next(name for name in names if name not in ("Annotated", "Optional", "Body"))


def derive(wheel: Path) -> dict[str, Any]:
    """The contract of one wheel."""
    source = Source(wheel)
    found = routes(source)
    bodies = {route["body"] for route in found.values() if route["body"]}
    manager = ("_handle_batch_output", "add_logprob_to_meta_info", "_handle_abort_req")
    meta_info = {key for function in manager for key in source.keys(_TOKENIZER_MANAGER, function)}
    meta_info |= set(source.keys(_VERSIONS, "add_weight_versions_to_meta_info"))
    server_info = {}
    for name in _SERVER_ARGS:
        file = f"sglang/srt/arg_groups/fields/{name}.py"
        for group in source.classes(file):
            server_info |= source.fields(file, group)
    state = source.fields(_TOKENIZER_MANAGER, "ReqState")
    return {
        "package": "sglang",
        "version": wheel.name.split("-")[1],
        "wheel": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "routes": found,
        "bodies": {name: source.fields(_STRUCTS, name) for name in sorted(bodies)},
        "api": {name: source.fields(_API, name) for name in API_TYPES},
        "api_says": {name: ast.get_docstring(source.node(_API, name)) for name in API_TYPES},
        "structs": {name: source.fields(_STRUCTS, name) for name in STRUCTS},
        "aliases": source.aliases(_API) | {"SamplingParamsOrList": "Union[SamplingParams, List[SamplingParams]]"},
        "meta_info": sorted(meta_info),
        "kept_ids": {name: state[name] for name in ("output_token_sampling_mask", "output_token_sampling_logprobs")},
        "model_info": source.keys(_SERVER, "model_info"),
        "server_args": {k: _short(v) for k, v in sorted(server_info.items()) if k in _SERVER_ARGS_READ},
        "scheduler_info": source.keys(_SCHEDULER, "get_init_info"),
        "finish": {
            name: source.keys(_FINISH, name) for name in ("FINISH_MATCHED_TOKEN", "FINISH_LENGTH", "FINISH_ABORT")
        },
        "session_is_needed": [
            name
            for name in ("update_weights_from_distributed", "update_weights_from_tensor")
            if "must run between" in ast.unparse(source.node(_WEIGHT_UPDATER, name))
        ],
    }


_SERVER_ARGS_READ = ("dtype", "enable_deterministic_inference", "page_size", "model_path", "skip_tokenizer_init")


def _short(annotation: str) -> str:
    """``A[type, 'help ...']``: the type."""
    node = ast.parse(annotation.removesuffix(" = ..."), mode="eval").body
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        return ast.unparse(node.slice.elts[0])
    return annotation


def load() -> dict[str, Any]:
    contract: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return contract


def text(contract: dict[str, Any]) -> str:
    return json.dumps(contract, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(text(derive(Path(sys.argv[1]))), encoding="utf-8")
    print(f"wrote {DATA}")
