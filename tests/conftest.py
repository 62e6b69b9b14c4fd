"""What all tests share: one torch thread, no network, and skips that CI must know of."""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch or transformers, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
_skips: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Results depend on the number of threads, so a test that changes it must not change its neighbours'."""
    _reset_threads()
    yield
    _reset_threads()


def _reset_threads() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched where it is not there yet."""
    from headrace.model.fetch import fetch_model

    return fetch_model("smollm2-135m")


# -------------------------------------------------------------------------------------------------- skips


def read_allowed_skips(text: str) -> list[tuple[str, str]]:
    """(test id pattern, part of the reason) of each line that is no comment."""
    lines = (line.split("#")[0].split(maxsplit=1) for line in text.splitlines())
    return [(line[0], line[1].strip() if len(line) > 1 else "") for line in lines if line]


def unlisted_skips(skips: dict[str, str], allowed: list[tuple[str, str]]) -> dict[str, str]:
    return {
        test: reason
        for test, reason in skips.items()
        if not any(fnmatch.fnmatch(test, pattern) and part in reason for pattern, part in allowed)
    }


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skips[report.nodeid] = reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") != "true":
        return
    unlisted = unlisted_skips(_skips, read_allowed_skips(ALLOWED_SKIPS.read_text(encoding="utf-8")))
    for test, reason in unlisted.items():
        print(f"\nskip not listed in {ALLOWED_SKIPS.name}: {test}: {reason}", file=sys.stderr)
    if unlisted and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
