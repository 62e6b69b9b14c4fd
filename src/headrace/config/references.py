"""Load what ``module:name`` or ``path/file.py:name`` refers to: a third party's function or class."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.config.problems import nearest
from headrace.errors import ConfigError


def load_reference(reference: str, what: str) -> Any:
    """The object that ``reference`` names; ``what`` says in errors what it was wanted for.

    Raises:
        ConfigError: for a reference that is not of this form, a module or file that is not there or fails to
            import, and a name that it does not define.
    """
    module_name, colon, attribute = reference.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{what} {reference!r} must be 'module:name' or 'path/file.py:name'")
    try:
        module = _module_of_file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    except FileNotFoundError:
        raise ConfigError(f"{what} {reference!r}: there is no file {module_name}") from None
    except ModuleNotFoundError as error:
        hint = "is its package installed, or its folder on PYTHONPATH?"
        raise ConfigError(f"{what} {reference!r}: {error}; {hint}") from error
    except Exception as error:
        raise ConfigError(f"{what} {reference!r}: importing it failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        match = nearest(attribute, public)
        hint = f"; did you mean {match!r}?" if match else ""
        raise ConfigError(f"{what} {reference!r}: {module_name} defines no {attribute!r}{hint}") from None


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _module_of_file(path: Path) -> ModuleType:
    """A file is imported once per process, under a name that no installed package has."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(path)
    name = f"headrace_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
