"""Does each term of each formula, and each condition of each rule, make a test fail? Mutants of the algorithms room
and of the control room against their tests.

::

    python tests/mutation/rooms.py                                   # both rooms, all modules; make mutation
    python tests/mutation/rooms.py --room control --module ledger -v # one module, with what killed each mutant
    python tests/mutation/rooms.py --list                            # the mutants alone

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
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from equivalent import EQUIVALENT  # noqa: E402
from mutants import Mutant, mutants  # noqa: E402


@dataclass(frozen=True)
class Room:
    """A room of the package: its modules that are mutated, and the tests that hold them, what kills soonest first."""

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    preloaded: tuple[str, ...]
    """Imported once, before the forks; nothing of the room itself."""
    limit_s: int
    """Processor time of one mutant, several times what the tests take."""

    def source(self, module: str) -> str:
        return (ROOT / "src" / "headrace" / self.name / f"{module}.py").read_text()


ALGORITHMS = Room(
    name="algorithms",
    modules=(
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
    ),
    # Error messages and wiring are held by the unit tests behind the parity tests.
    tests=(
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
    ),
    preloaded=("torch", "pytest", "hypothesis", "headrace.types", "headrace.protocols", "headrace.model.logprobs"),
    limit_s=600,
)
CONTROL = Room(
    name="control",
    modules=(
        "admission",
        "books",
        "checks",
        "cursor",
        "engine_states",
        "grouping",
        "intervals",
        "lease",
        "ledger",
        "router",
        "samples",
        "staleness",
        "watchdog",
    ),
    tests=(
        "tests/unit/test_control_admission.py",
        "tests/unit/test_control_cursor.py",
        "tests/unit/test_control_grouping.py",
        "tests/unit/test_control_baseline.py",
        "tests/unit/test_control_checks.py",
        "tests/unit/test_control_staleness.py",
        "tests/unit/test_control_watchdog.py",
        "tests/unit/test_control_terms.py",
        "tests/unit/test_control_terms_router.py",
        "tests/unit/test_control_terms_samples.py",
        "tests/unit/test_control_terms_watchdog.py",
        "tests/unit/test_control_engine_states.py",
        "tests/unit/test_control_lease.py",
        "tests/unit/test_control_router.py",
        "tests/unit/test_control_ledger.py",
        "tests/unit/test_control_room.py",
    ),
    preloaded=("pytest", "hypothesis", "hypothesis.stateful", "headrace.types", "headrace.protocols"),
    limit_s=60,
)
ROOMS = {room.name: room for room in (ALGORITHMS, CONTROL)}


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    room: str
    module: str
    killer: str
    """The test that failed, or what else ended the run; empty: it survived."""

    @property
    def key(self) -> str:
        return f"{self.room}.{self.module}.{self.mutant.name}"


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source text."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, f"<mutant of {self.name}>", "exec"), module.__dict__)


def run_tests(room: Room, module: str, source: str, report: int, *, silent: bool) -> int:
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
    resource.setrlimit(resource.RLIMIT_CPU, (room.limit_s, room.limit_s + 5))
    sys.meta_path.insert(0, _Replaced(f"headrace.{room.name}.{module}", source))
    os.chdir(ROOT)
    # Preloaded modules are not rewritten for their assertions, which is no error here.
    ignored = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-x", "-q", "-W", ignored, "-p", "no:cacheprovider", "--no-header"]
    own = [test for test in room.tests if f"_{module}." in test]  # what is most likely to kill it
    rest = [test for test in room.tests if test not in own]
    return (own and int(pytest.main([*options, *own], plugins=[Killer()]))) or int(
        pytest.main([*options, *rest], plugins=[Killer()])
    )


def judge(room: Room, module: str, source: str, *, silent: bool = True) -> str:
    """The test that failed with this source, in a child process; empty where all passed. Raises RuntimeError where the
    run itself broke down, which is no kill."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            os._exit(run_tests(room, module, source, write, silent=silent))
        except BaseException:
            traceback.print_exc()
            os._exit(70)
    os.close(write)
    _, done = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(done)
    with os.fdopen(read) as pipe:
        failed = pipe.read()
    if status == -signal.SIGXCPU:
        return f"out of time ({room.limit_s} s)"
    if status and not failed:
        raise RuntimeError(f"the tests ended with exit code {status} and no failed test; run --module {module} -v")
    return failed


def judge_module(room: Room, module: str, *, verbose: bool) -> list[Verdict]:
    verdicts = []
    for mutant in mutants(room.source(module)):
        verdict = Verdict(mutant, room.name, module, judge(room, module, mutant.source))
        verdicts.append(verdict)
        if verbose or not verdict.killer:
            what = verdict.killer or f"SURVIVED ({EQUIVALENT.get(verdict.key, 'unexplained')})"
            print(f"{module}.py:{mutant.line}  {mutant.name}\n    {what}", flush=True)
    num_killed = sum(bool(v.killer) for v in verdicts)
    print(f"{module}: {num_killed} of {len(verdicts)} mutants killed", flush=True)
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", action="append", choices=sorted(ROOMS), help="both by default")
    names = sorted(module for room in ROOMS.values() for module in room.modules)
    parser.add_argument("--module", action="append", choices=names, help="again for more; all by default")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("-v", "--verbose", action="store_true", help="print killed mutants too")
    options = parser.parse_args(arguments)
    chosen = [
        (room, module)
        for name, room in ROOMS.items()
        for module in room.modules
        if name in (options.room or ROOMS) and module in (options.module or room.modules)
    ]
    if options.list:
        for room, module in chosen:
            for mutant in mutants(room.source(module)):
                print(f"{room.name}/{module}.py:{mutant.line}  {mutant.name}")
        return 0
    verdicts: list[Verdict] = []
    # The control room first: what the other one's tests load would stand in the way of its mutants.
    for room in (CONTROL, ALGORITHMS):
        modules = [module for of, module in chosen if of is room]
        if modules:
            if not prepare(room, modules[0]):
                return 1
            verdicts += [
                verdict for module in modules for verdict in judge_module(room, module, verbose=options.verbose)
            ]
    return report(verdicts, {f"{room.name}.{module}" for room, module in chosen})


def prepare(room: Room, module: str) -> bool:
    """Import what every child needs; False where the tests fail without a mutant."""
    for name in room.preloaded:
        importlib.import_module(name)
    if loaded := [name for name in sys.modules if name.startswith(f"headrace.{room.name}.")]:
        raise RuntimeError(f"these would run unmutated: {loaded}")
    if killer := judge(room, module, room.source(module), silent=False):
        print(f"the tests of the {room.name} room fail without any mutant: {killer}", file=sys.stderr)
        return False
    return True


def report(verdicts: Sequence[Verdict], modules: set[str]) -> int:
    """Prints what survived; returns the exit code."""
    survivors = {v.key for v in verdicts if not v.killer}
    stale = {key for key in EQUIVALENT if ".".join(key.split(".")[:2]) in modules} - survivors
    unexplained = survivors - EQUIVALENT.keys()
    print(f"{len(verdicts)} mutants, {len(survivors)} survived: {len(survivors - unexplained)} explained")
    for key in sorted(unexplained):
        print(f"unexplained survivor: {key}")
    for key in sorted(stale):
        print(f"explained, but it did not survive: {key}")
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
