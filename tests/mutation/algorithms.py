"""Does each term of each formula make a test fail? Mutants of the algorithms room against its tests.

::

    python tests/mutation/algorithms.py                     # all modules; make mutation
    python tests/mutation/algorithms.py --module kl -v      # one of them, with what killed each mutant
    python tests/mutation/algorithms.py --list              # the mutants alone

Every mutant runs in a process of its own, forked from one that holds torch already, with the mutated source in the
place of the module's. It is killed by the first test that fails, or by running out of time. A survivor must be in
``equivalent.py`` with a reason; a reason without a survivor is an error too. Exit code 1 where either happens.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROOM = ROOT / "src" / "headrace" / "algorithms"
sys.path.insert(0, str(HERE))

from equivalent import EQUIVALENT  # noqa: E402
from mutants import Mutant, mutants  # noqa: E402

MODULES = (
    "advantages",
    "aggregations",
    "composed",
    "corrections",
    "flat",
    "kl",
    "objectives",
    "policy_term",
    "ratios",
    "selections",
    "shaping",
    "streams",
    "values",
)
# What kills soonest comes first. Error messages and wiring are held by the unit tests behind the parity tests.
TESTS = (
    "tests/parity/test_oracle_join_objectives.py",
    "tests/parity/test_oracle_join_corrections.py",
    "tests/parity/test_oracle_join_advantages.py",
    "tests/parity/test_oracle_join_critic.py",
    "tests/parity/test_oracle_join_parts.py",
    "tests/unit/test_algorithms_terms.py",
    "tests/unit/test_algorithms_loss.py",
    "tests/unit/test_algorithms_streams.py",
    "tests/unit/test_algorithms_selection.py",
    "tests/parity/test_algorithms_family.py",
    "tests/unit/test_algorithms_advantage.py",
    "tests/unit/test_algorithms_values.py",
    "tests/unit/test_algorithms_config.py",
    "tests/unit/test_algorithms_padding.py",
    "tests/unit/test_algorithms_split.py",
)
PRELOADED = ("torch", "pytest", "hypothesis", "headrace.types", "headrace.protocols", "headrace.model.logprobs")
DEADLINE_S = 600.0
"""Of one mutant; the tests take a fortieth of it on one core."""


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    module: str
    killer: str
    """The test that failed, or what else ended the run; empty: it survived."""

    @property
    def key(self) -> str:
        return f"{self.module}.{self.mutant.name}"


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source text."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, f"<mutant of {self.name}>", "exec"), module.__dict__)


def run_tests(module: str, source: str, report: int, *, silent: bool) -> int:
    """In the forked child. Writes the first failed test to the descriptor ``report``; returns pytest's exit code."""
    import pytest

    class Killer:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                os.write(pipe, report.nodeid.encode())

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                os.write(pipe, f"import of {report.nodeid}".encode())

    pipe = report
    if silent:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    sys.meta_path.insert(0, _Replaced(f"headrace.algorithms.{module}", source))
    os.chdir(ROOT)
    # Preloaded modules are not rewritten for their assertions, which is no error here.
    ignored = "ignore::pytest.PytestAssertRewriteWarning"
    arguments = ["-x", "-q", "-W", ignored, "-p", "no:cacheprovider", "--no-header", *TESTS]
    return int(pytest.main(arguments, plugins=[Killer()]))


def judge(module: str, source: str, *, silent: bool = True) -> str:
    """The test that failed with this source, in a child process; empty where all passed. Raises RuntimeError where the
    run itself broke down, which is no kill."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            os._exit(run_tests(module, source, write, silent=silent))
        except BaseException:
            traceback.print_exc()
            os._exit(70)
    os.close(write)
    deadline = time.monotonic() + DEADLINE_S
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return f"out of time ({DEADLINE_S:g} s)"
        time.sleep(0.01)
    status = os.waitstatus_to_exitcode(done[1])
    with os.fdopen(read) as pipe:
        failed = pipe.read()
    if status and not failed:
        raise RuntimeError(f"the tests ended with exit code {status} and no failed test; run --module {module} -v")
    return failed


def judge_module(module: str, *, verbose: bool) -> list[Verdict]:
    verdicts = []
    for mutant in mutants((ROOM / f"{module}.py").read_text()):
        verdict = Verdict(mutant, module, judge(module, mutant.source))
        verdicts.append(verdict)
        if verbose or not verdict.killer:
            what = verdict.killer or f"SURVIVED ({EQUIVALENT.get(verdict.key, 'unexplained')})"
            print(f"{module}.py:{mutant.line}  {mutant.name}\n    {what}", flush=True)
    num_killed = sum(bool(v.killer) for v in verdicts)
    print(f"{module}: {num_killed} of {len(verdicts)} mutants killed", flush=True)
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", choices=MODULES, help="again for more; all by default")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("-v", "--verbose", action="store_true", help="print killed mutants too")
    options = parser.parse_args(arguments)
    modules = options.module or MODULES
    if options.list:
        for module in modules:
            for mutant in mutants((ROOM / f"{module}.py").read_text()):
                print(f"{module}.py:{mutant.line}  {mutant.name}")
        return 0
    for name in PRELOADED:
        importlib.import_module(name)
    if loaded := [name for name in sys.modules if name.startswith("headrace.algorithms")]:
        raise RuntimeError(f"these would run unmutated: {loaded}")
    if killer := judge(modules[0], (ROOM / f"{modules[0]}.py").read_text(), silent=False):
        print(f"the tests fail without any mutant: {killer}", file=sys.stderr)
        return 1
    verdicts = [verdict for module in modules for verdict in judge_module(module, verbose=options.verbose)]
    survivors = {v.key for v in verdicts if not v.killer}
    stale = {key for key in EQUIVALENT if key.split(".")[0] in modules} - survivors
    unexplained = survivors - EQUIVALENT.keys()
    print(f"{len(verdicts)} mutants, {len(survivors)} survived: {len(survivors - unexplained)} explained")
    for key in sorted(unexplained):
        print(f"unexplained survivor: {key}")
    for key in sorted(stale):
        print(f"explained, but it did not survive: {key}")
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
