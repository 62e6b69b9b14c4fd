"""``headrace plan run.toml``: is the layout possible, and what does each rank need? No weights, no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.common import add_command
from headrace.config.schema import RunConfig
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.cli.common import Subparsers
    from headrace.model.parallel.forecast import MemoryForecast

_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "reference")
_AXES = ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp")


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "plan",
        "Check a run's [parallel] section against its model and forecast the memory of each rank",
        "Any key can be overridden, for example:  headrace plan run.toml --parallel.tp 2",
    )
    parser.add_argument("config", type=Path, metavar="RUN.TOML")
    parser.set_defaults(handler=_plan)


def _plan(args: argparse.Namespace) -> int:
    from headrace.config.checks import check_config
    from headrace.config.load import load_config
    from headrace.model.parallel.check import ModelShape, check_layout
    from headrace.model.parallel.forecast import Pass, forecast, num_weights

    config = load_config(args.config, args.overrides)
    check_config(config)
    shape = ModelShape.of_folder(_folder(config))
    check_layout(config.parallel, shape)
    axes = ", ".join(f"{name} {getattr(config.parallel, name)}" for name in _AXES if getattr(config.parallel, name) > 1)
    work = Pass.of(config)
    print(f"model       {num_weights(shape) / 1e6:,.1f} million weights ({shape.architecture})")
    print(f"processes   {config.parallel.world_size} ({axes or 'one process'})")
    print(f"a pass      {work.num_tokens:,} tokens in {work.dtype}, logits of {work.max_logit_tokens:,} at once\n")
    _print_table(forecast(config.parallel, shape, work))
    for name in ("critic", "teacher"):
        if getattr(config, name) is not None:
            print(f"\nThe {name} is not part of this forecast.")
    if config.model.lora is not None:
        print("\nThis is the forecast of training all weights; an adapter (model.lora) needs less.")
    return 0


def _folder(config: RunConfig) -> Path:
    from headrace.model.paths import resolve_model_path

    folder = Path(resolve_model_path(config.model.path)).expanduser()
    if not folder.is_dir():
        raise HeadraceError(
            f"model.path = {config.model.path}: the forecast reads the model's config.json, and there is no such "
            "folder; download the model first and give its folder"
        )
    return folder


def _print_table(stages: list[MemoryForecast]) -> None:
    titles = [f"stage {f.stage}" for f in stages] if len(stages) > 1 else ["each rank"]
    print(f"{'GiB':<12}" + "".join(f"{title:>12}" for title in titles))
    for part in _PARTS:
        values = [getattr(f, f"{part}_bytes") for f in stages]
        if any(values):
            print(f"{part:<12}" + "".join(f"{value / 2**30:>12.2f}" for value in values))
    if any(f.num_recomputed for f in stages):
        print(f"{'recomputed':<12}" + "".join(f"{f'{f.num_recomputed} layers':>12}" for f in stages))
    print(f"{'training':<12}" + "".join(f"{f.training_bytes / 2**30:>12.2f}" for f in stages))
    print(f"{'loading':<12}" + "".join(f"{f.loading_bytes / 2**30:>12.2f}" for f in stages))
    print(f"{'peak':<12}" + "".join(f"{f.peak_bytes / 2**30:>12.2f}" for f in stages))
