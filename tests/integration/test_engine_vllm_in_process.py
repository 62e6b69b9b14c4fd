"""``engine.mode = "in_process"``: the server's tests once more, with vLLM in the process that runs them. That takes a
Python that has both vLLM and headrace, so each file runs in a process of its own. Skips where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from vllm_fixture import vllm_python

from headrace.child_process import child_environment

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
TIMEOUT_S = 420.0
ONLY_A_SERVER = "of a server in another process"
"""Why a test of these files is skipped here."""


@pytest.fixture(scope="module")
def python() -> Path:
    """Skips where the Python that has vLLM has no headrace, as one that only serves need not."""
    found = vllm_python()
    done = subprocess.run(
        [str(found), "-P", "-c", "import headrace, pytest_timeout, peft, pyarrow"], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"no vLLM here: {found} has no headrace beside it; make setup-vllm does that: {done.stderr[-200:]}")
    return found


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("name", "least"),
    [("real", 8), ("changes", 4), ("runs", 8), ("lora", 3)],
)
def test_the_same_in_the_runs_own_process(python: Path, tmp_path: Path, name: str, least: int) -> None:
    """Issue 4, done line 1: everything that holds for a server holds in process, the stale head included."""
    environment = child_environment(
        {"HEADRACE_TEST_VLLM_MODE": "in_process", "PYTHONPATH": str(SOURCE), "CI": os.environ.get("CI", "")}
    )
    report = tmp_path / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-o", "filterwarnings=", f"--junitxml={report}"]
    done = subprocess.run(
        [str(python), "-P", "-m", "pytest", *options, str(HERE / f"test_engine_vllm_{name}.py")],
        cwd=HERE.parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0
    cases = ElementTree.parse(report).getroot().iter("testcase")
    skipped = {case.attrib["name"]: case.find("skipped") for case in cases}
    reasons = [skip.attrib["message"] for skip in skipped.values() if skip is not None]
    assert all(ONLY_A_SERVER in reason for reason in reasons), reasons
    assert len(skipped) - len(reasons) >= least
