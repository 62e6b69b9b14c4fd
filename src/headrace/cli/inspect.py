"""``headrace inspect RUN_DIR``: what a run is and how far it came. ``headrace report RUN_DIR``: its report again.

Both only read files, so they work on a run that is still going on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.common import add_command

if TYPE_CHECKING:
    from headrace.cli.common import Subparsers

_SHOWN = ("reward/", "eval/")


def add_parsers(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "inspect", "Summarise a run: progress, reward, checkpoints, books")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.set_defaults(handler=_inspect)
    parser = add_command(subparsers, "report", "Write a run's report.html and curve.png again from its record")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.set_defaults(handler=_report)


def _inspect(args: argparse.Namespace) -> int:
    for name, value in summary(args.run_dir):
        print(f"{name:<15} {value}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from headrace.monitor.curve import write_curve_png
    from headrace.monitor.report import write_report

    print(write_report(args.run_dir))
    print(write_curve_png(args.run_dir))
    return 0


def summary(run_dir: Path) -> Iterator[tuple[str, str]]:
    """(what, value) pairs about the run in ``run_dir``.

    Raises:
        RecordError: where ``run_dir`` is no run's folder, or its record is damaged.
    """
    from headrace.record.checkpoints import find_checkpoints
    from headrace.record.metrics import read_metrics
    from headrace.record.run_dir import read_run_info

    info = read_run_info(run_dir)
    config = info["config"]
    yield "run", f"{info['name']} (headrace {info['packages'].get('headrace', '?')}, started {_when(info)})"
    yield "model", f"{config['model']['path']} ({config['model']['dtype']})"
    lines = list(read_metrics(run_dir))
    done = lines[-1]["update"] if lines else 0
    if kind := info.get("kind"):  # training without rollouts
        yield "command", f"headrace {kind}"
        yield "rows", str(config["data"]["path"])
        yield "progress", f"{done} optimizer steps"
        yield "export", str(run_dir / "export") if (run_dir / "export").is_dir() else "none yet"
    else:
        yield "tasks", str(config["tasks"]["type"])
        yield "algorithm", str(config["algorithm"]["preset"])
        yield "progress", f"{done} of {config['trainer']['num_batches']} rollout batches"
    last: dict[str, Any] = {}
    for line in lines:
        last |= {name: (value, line["update"]) for name, value in line.items() if name.startswith(_SHOWN)}
    for name, (value, update) in last.items():
        if isinstance(value, (int, float)):
            yield name, f"{value:.4g}" + (f" (batch {update})" if update != done else "")
    checkpoints = find_checkpoints(run_dir / "checkpoints")
    yield "checkpoints", ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
    yield "books", _books(run_dir)


def _books(run_dir: Path) -> str:
    """The ledger's totals along the surviving lineage, checked to balance (I10)."""
    from headrace.control.ledger import Ledger
    from headrace.record.ledger_store import read_records

    ledger = Ledger()
    for record in read_records(run_dir / "ledger"):
        ledger.apply(record)
    books = ledger.surviving()
    books.check(str(run_dir))
    return ", ".join(f"{name} {count}" for name, count in books.summary().items()) or "empty"


def _when(info: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(info["created_unix_s"]))
