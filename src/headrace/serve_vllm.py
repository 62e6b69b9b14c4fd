"""The program of a vLLM server. Started by ``engines.vllm.client`` with the Python that has vLLM, never by hand.

``python -P serve_vllm.py --socket FD --weights JSON --options JSON [--frozen JSON]``

That Python need not have headrace installed, and must not find the packages of the trainer's. So this file gives it the
package names that it needs, without running what their ``__init__`` imports: from then on, ``headrace.weights`` is the
folder beside it, and nothing more.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from types import ModuleType


def name_packages() -> None:
    """Make the modules beside this file importable where headrace is not installed."""
    here = Path(__file__).resolve().parent
    for name in ("headrace", "headrace.engines", "headrace.weights"):
        package = ModuleType(name)
        package.__path__ = [str(here.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


def main(arguments: list[str]) -> None:
    """Load, say 'ready' or why not, serve until the client is gone."""
    parser = argparse.ArgumentParser(prog="serve_vllm")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--weights", type=json.loads, required=True)
    parser.add_argument("--frozen", type=json.loads)
    parser.add_argument("--options", required=True)
    parsed = parser.parse_args(arguments)

    from headrace.engines.vllm.server.backend import BackendOptions
    from headrace.engines.vllm.server.serving import Connection, Server
    from headrace.weights.receivers import make_receiver

    connection = Connection(socket.socket(fileno=parsed.socket))
    options = BackendOptions.from_json(json.loads(parsed.options))
    try:
        from headrace.engines.vllm.server.versions import load_backend

        reader = make_receiver(parsed.weights)
        frozen = None if parsed.frozen is None else make_receiver(parsed.frozen)
        backend = load_backend(options)
    except Exception as error:
        connection.send({"event": "failed", "error": f"{type(error).__name__}: {error}"})
        raise
    Server(
        connection,
        backend,
        reader,
        frozen=frozen,
        max_batch_size=options.max_batch_size,
        recompute=options.recompute,
    ).run()


if __name__ == "__main__":
    name_packages()
    main(sys.argv[1:])
