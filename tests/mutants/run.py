"""`make mutants`: plants each fault of the table and says which of them the tests named there do not find.

A fault lives in memory only. Every mutant has a process of its own, forked from one that has pytest and the large libraries
loaded, in which an import hook gives the changed text for the one module; nothing in the checkout is written. Random tests draw
the same examples every time.

Why a table and no tool: `mutmut` and `cosmic-ray` mutate every operator of every line (some ten thousand here, most of them in
messages, or without effect), find the tests of a mutant by coverage or run them all, and expect a package where it is imported
from, while the top-level folders here are imported as `interlace.*`. What matters here is of another kind: a dropped order, the first
in place of each, an option that is ignored. These are chosen by hand, each with the fast test that is there for it.
`tests/mutants/sample.py` plants random ones, to see what share of them the tests beside a file find.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.table import mutants

LIBRARIES = ("hypothesis", "msgspec", "networkx", "numba", "numpy", "yaml")
LEAST_SECONDS, TIMES_BASELINE = 120.0, 10
"""A mutant that never ends is found, too: so long may its tests take, or so many times what they take without a fault."""
PASSED, FAILED, NOT_LOADED = 0, 1, 100
COMPILED = (
    "scheduler/simulate/arrays.py",
    "scheduler/simulate/simulator.py",
    "scheduler/simulate/compiled.py",
    *(f"scheduler/interleave/{name}.py" for name in ("clock", "columns", "list_schedule", "compiled")),
)
"""Files whose constants and functions go into compiled code, which is stored: a fault there must not read or leave any."""


class Plant(MetaPathFinder):
    """Gives one module from another file."""

    def __init__(self, mutant: Mutant, file: Path) -> None:
        self.mutant, self.file = mutant, file

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The changed module; all others are not ours."""
        if fullname != self.mutant.module:
            return None
        inside = [str((ROOT / self.mutant.path).parent)] if self.mutant.path.endswith("__init__.py") else None
        return spec_from_file_location(fullname, self.file, submodule_search_locations=inside)


@dataclass(slots=True)
class Task:
    """Tests that run in a process of their own, with a fault or without."""

    tests: tuple[str, ...]
    mutant: Mutant | None = None
    seconds: float = float("inf")
    code: int | None = None
    took: float = 0.0
    output: str = ""

    def verdict(self) -> str:
        """`killed`, `alive`, or what kept the tests from telling."""
        if self.code is None:
            return "killed"
        told = {
            PASSED: "alive",
            FAILED: "killed",
            NOT_LOADED: "its tests never load the file",
            2: "its tests cannot be loaded with it",
            4: "its tests are not there",
            5: "its tests are not there",
        }
        return told.get(self.code, f"its tests ended with code {self.code}")


@dataclass(slots=True)
class Report:
    """What was found, by folder."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    bad: list[str] = field(default_factory=list)

    def add(self, mutant: Mutant, verdict: str) -> None:
        """Count a mutant; all but killed and equivalent ones are listed."""
        known = verdict if verdict in ("killed", "alive", "equivalent") else "error"
        self.counts[mutant.folder][known] += 1
        if known in ("alive", "error"):
            self.bad.append(
                f"{verdict}: {mutant.path}: {mutant.breaks}\n    - {mutant.find.strip()}\n    + {mutant.put.strip()}\n"
                f"    tests: {', '.join(mutant.tests)}"
            )

    def text(self) -> str:
        """The table, and what must be mended."""
        lines = [f"{'folder':24s}{'killed':>8s}{'alive':>8s}{'error':>8s}{'equivalent':>12s}"]
        for folder, count in sorted(self.counts.items()):
            lines.append(f"{folder:24s}{count['killed']:8d}{count['alive']:8d}{count['error']:8d}{count['equivalent']:12d}")
        total = sum(self.counts.values(), Counter())
        lines.append(f"{'all':24s}{total['killed']:8d}{total['alive']:8d}{total['error']:8d}{total['equivalent']:12d}")
        return "\n".join([*self.bad, *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every mutant is killed, 1 where one lives or its tests cannot tell, 2 where the table or the tests are wrong."""
    options = _parser().parse_args(argv)
    try:
        every = mutants()
    except ValueError as error:
        print(error)
        return 2
    chosen = [m for m in every if not options.words or any(word in f"{m.path} {m.breaks} {' '.join(m.tests)}" for word in options.words)]
    bad = [told for mutant in chosen if (told := wrong(mutant)) is not None]
    if bad or not chosen:
        print("\n".join(bad or [f"no mutant fits {options.words}; words are looked for in paths, descriptions and tests"]))
        return 2
    load_libraries(options.paddle)
    given = tuple(options.tests)
    tasks = [Task(given or mutant.tests, mutant) for mutant in chosen if not mutant.equivalent]
    by_file: dict[str, set[str]] = defaultdict(set)
    for test in {test for task in tasks for test in task.tests}:
        by_file[test.partition("::")[0]].add(test)
    baseline = {file: Task(tuple(sorted(tests))) for file, tests in by_file.items()}
    run_all(baseline.values(), options.jobs, lambda task: None)
    failed = [task for task in baseline.values() if task.code != PASSED]
    if failed:
        print("\n".join(f"{task.output}\nwithout any fault these do not pass: {' '.join(task.tests)}" for task in failed))
        return 2
    for task in tasks:
        took = sum(baseline[file].took for file in {test.partition("::")[0] for test in task.tests})
        task.seconds = max(LEAST_SECONDS, TIMES_BASELINE * took)
    report = Report()
    for mutant in chosen:
        if mutant.equivalent:
            report.add(mutant, "equivalent")

    def tell(task: Task) -> None:
        assert task.mutant is not None
        verdict = task.verdict()
        report.add(task.mutant, verdict)
        if options.verbose or verdict != "killed":
            print(f"{verdict:8s}{task.took:6.1f} s  {task.mutant.path}: {task.mutant.breaks}", flush=True)
        if options.verbose > 1 or verdict not in ("killed", "alive"):
            print(task.output)

    run_all(tasks, options.jobs, tell)
    print(report.text())
    return 1 if report.bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants with one of these words in path, description or tests")
    parser.add_argument("--tests", nargs="+", default=(), metavar="ID", help="run these tests in place of those of the table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: one a core)")
    parser.add_argument("--paddle", action="store_true", help="load Paddle once, in front of all tests")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="say it of killed ones too; twice: with what the tests say")
    return parser


def wrong(mutant: Mutant) -> str | None:
    """Why a mutant cannot be planted; None where it can."""
    try:
        mutant.source()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def load_libraries(with_paddle: bool) -> None:
    """Load what every process needs; nothing of Interlace, which is loaded with the fault in it."""
    for name in (*LIBRARIES, *(("paddle",) if with_paddle else ())):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from hypothesis import Phase, settings

    # a fault is found by any example that fails: no time goes into a smaller one
    settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "interlace")
    assert not loaded, loaded


def run_all(tasks: Iterable[Task], jobs: int, tell: Callable[[Task], None]) -> None:
    """Run tasks, each in a process forked from this one, some at a time."""
    waiting, running = list(tasks)[::-1], {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        number = 0
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                task, folder = waiting.pop(), Path(scratch) / str(number)
                number += 1
                folder.mkdir()
                process = get_context("fork").Process(target=_child, args=(task, folder))
                process.start()
                running[process.sentinel] = (task, folder, process, time.monotonic())
            connection.wait(list(running), timeout=1.0)
            for sentinel, (task, folder, process, began) in list(running.items()):
                task.took = time.monotonic() - began
                if process.exitcode is None and task.took < task.seconds:
                    continue
                if process.exitcode is None:
                    process.kill()
                process.join()
                task.code = process.exitcode if task.took < task.seconds else None
                task.output = (folder / "output").read_text(encoding="utf-8", errors="replace")
                del running[sentinel]
                tell(task)


def _child(task: Task, folder: Path) -> None:
    """Run a task's tests with its fault in place; the exit code is pytest's, or says that the fault was never loaded."""
    with open(folder / "output", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    mutant = task.mutant
    if mutant is not None:
        file = folder / Path(mutant.path).name
        file.write_text(mutant.source(), encoding="utf-8")
        sys.meta_path.insert(0, Plant(mutant, file))
        if mutant.path in COMPILED:
            _store_compiled_in(folder)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = str(folder)
    code = int(pytest.main([*task.tests, "-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]))
    if code == PASSED and mutant is not None and mutant.module not in sys.modules:
        code = NOT_LOADED
    sys.stdout.flush()
    os._exit(code)


def _store_compiled_in(folder: Path) -> None:
    with contextlib.suppress(ImportError):
        import numba

        numba.config.CACHE_DIR = str(folder)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
