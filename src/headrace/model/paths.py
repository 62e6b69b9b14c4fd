"""Where fetched models lie, and what ``model.path`` may be. No torch here: ``--dry-run`` uses it too."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.errors import HeadraceError

FETCHABLE = ("smollm2-135m",)
"""Names that ``headrace model fetch`` knows."""


class ModelNotFetchedError(HeadraceError):
    """``model.path`` is the name of a model that is not on this machine yet."""


def models_dir() -> Path:
    """``$HEADRACE_HOME/models``, or ``~/.cache/headrace/models``: fetched once for all projects of a user."""
    home = os.environ.get("HEADRACE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "headrace") / "models"


def resolve_model_path(path: str) -> str:
    """What to load for ``model.path``: a folder as it is, a fetched model's folder for its name, else a hub id.

    Raises:
        ModelNotFetchedError: for a fetchable name whose folder is not there.
    """
    if Path(path).expanduser().is_dir() or path not in FETCHABLE:
        return path
    folder = models_dir() / path
    if not (folder / "config.json").is_file():
        raise ModelNotFetchedError(f"model '{path}' is not in {folder} yet; fetch it with: headrace model fetch {path}")
    return str(folder)
