"""Options shared by all tests."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

from interlace.local import processes
from interlace.passes import REGISTRY
from interlace.scheduler.interleave import planner
from interlace.user_passes import imported
from tests import engines, proofs, searches
from tests import forked as forked_module

searches.shorten()  # before any module with tests is imported
pytest.register_assert_rewrite("tests.golden")  # so that a difference is shown
settings.register_profile("any machine", deadline=None)  # others may use it, too
settings.load_profile("any machine")
SEEN_TOGETHER = 1_000_000
"""How many new objects Python's garbage collector looks at together: tests make more cycles than commands do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites expected texts; review the difference before you commit it. `--long`: see the mark of that name."""
    parser.addoption("--update-golden", action="store_true", help="rewrite expected texts instead of comparing with them")
    parser.addoption("--long", action="store_true", help="run tests marked long too")
    parser.addoption("--examples", type=float, default=1, help="run random tests with so many times their examples, 0.2 for fewer")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules all of whose tests have a mark that `-m` leaves out are not imported, and Paddle with them, which takes seconds in each
    worker."""
    left_out = [part.removeprefix("not ") for part in config.getoption("markexpr").split(" and ") if part.startswith("not ")]
    if not left_out or collection_path.suffix != ".py":
        return None
    of_all = re.findall(r"^pytestmark = .*", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    return True if any(re.search(rf"pytest\.mark\.{mark}\b", line) for line in of_all for mark in left_out) else None


APART = (
    "tests/benchmarks/test_benchmarks.py",
    "tests/captured/",
    "tests/training/test_training.py",
    "tests/training/test_zoo.py",
    "tests/training/test_engine.py",
    "tests/testbed/test_training.py",
)
"""Where each test takes seconds of its own: with several workers they are spread."""
LONG = (
    "tests/report/test_accuracy.py",
    "tests/benchmarks/test_zoo.py",
    "tests/testbed/",
    "tests/training/test_guides_run.py",
    "tests/training/test_tuning.py",
    "tests/scheduler/test_mutations.py",
    "tests/planning/",
    "tests/passes/",
    "tests/scheduler/",
    "tests/cpu/",
    "tests/bridge/",
    "tests/benchmarks/",
    "tests/captured/",
    "tests/training/",
    "tests/test_guides.py",
    "tests/test_verdict.py",
    "tests/report/",
)
"""What takes longest comes first, and what takes seconds a test after it, so that workers end together."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers the tests of a file stay together, and those that share a module's fixture; the longest come first.

    Before pytest-xdist's own hook, which writes the groups into the names of tests.
    """
    if config.getoption("--examples") != 1:
        _give_examples(items, config.getoption("--examples"))
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: `make test-long`, or `pytest --long`"))
    if not config.pluginmanager.hasplugin("xdist"):
        return
    items.sort(key=lambda item: next((k for k, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG)))
    for item in items:
        file = item.nodeid.partition("::")[0]
        shared = [name for name in getattr(item, "fixturenames", ()) if name.startswith("baseline_")]
        if shared or not file.startswith(APART):
            item.add_marker(pytest.mark.xdist_group(" ".join([file, *shared])))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a pytest with which pytest-xdist, which writes groups of tests into `_nodeid`, groups none without a word. Let signals reach
    the tests, and the processes that they start, where a shell in the background, or `nohup`, turned them off."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError(
            f"pytest-xdist groups no tests with pytest {pytest.__version__}, so that each worker would make every "
            "fixture; expected the version that pyproject.toml asks for: pip install -e '.[test]'"
        )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the engines beside the workers' collection of tests."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        compiling = engines.Compiling()
        session.config.add_cleanup(compiling.end)


def pytest_collection_finish() -> None:
    """Wait for the engines; look for garbage less often."""
    engines.wait_for_engines()
    gc.collect()
    gc.freeze()
    gc.set_threshold(SEEN_TOGETHER, 20, 20)


def _give_examples(items: Sequence[pytest.Item], times: float) -> None:
    """Random tests take their number of examples from their settings, which no profile changes."""
    for test in {item.function for item in items if isinstance(item, pytest.Function) and is_hypothesis_test(item.function)}:
        asked = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = settings(asked, max_examples=_times(times, asked.max_examples))


def _times(times: float, count: int) -> int:
    return max(1, round(times * count))


@pytest.fixture(scope="session")
def examples(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How many examples a test that draws its own takes in place of a number."""
    return partial(_times, request.config.getoption("--examples"))


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether expected texts are rewritten."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def rank_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forked_module.Servers]:
    """Processes that fork ranks; workers of pytest-xdist share them."""
    base, is_worker = tmp_path_factory.getbasetemp(), "PYTEST_XDIST_WORKER" in os.environ
    servers = forked_module.Servers((base.parent if is_worker else base) / "ranks", os.getppid() if is_worker else os.getpid())
    yield servers
    servers.end()


@pytest.fixture(scope="module")
def forked_ranks(rank_servers: forked_module.Servers) -> Iterator[None]:
    """Ranks that a module's tests start are forked from a process that has imported Paddle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start", rank_servers.start)
        yield


@pytest.fixture
def forked(rank_servers: forked_module.Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for one test."""
    monkeypatch.setattr(processes, "start", rank_servers.start)


@pytest.fixture
def whole_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a pair's order spends as much as in a run, for tests that ask for a good plan."""
    monkeypatch.setattr(planner, "SEARCH_WORK", searches.WHOLE)


@pytest.fixture(scope="module")
def few_forms() -> Iterator[None]:
    """Plans that a module's tests make are for commands and reports; which form they have does not matter."""
    with searches.few_forms():
        yield


@pytest.fixture(autouse=True)
def _plans_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan that a test makes in this process goes through the proof."""
    proofs.proving(monkeypatch)


@pytest.fixture(autouse=True)
def _own_passes_go_again(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test registers or imports from a file of its own is not there for the next one."""
    passes, path, names, folder = dict(REGISTRY), list(sys.path), list(imported), str(tmp_path_factory.getbasetemp())
    modules, newest = set(sys.modules), next(reversed(sys.modules))
    yield
    if (len(sys.modules), next(reversed(sys.modules))) != (len(modules), newest):
        own = {kind.__module__ for name, kind in REGISTRY.items() if name not in passes} - {kind.__module__ for kind in passes.values()}
        for name in sys.modules.keys() - modules:
            if (name in own and "." not in name) or str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]
    REGISTRY.clear()
    REGISTRY.update(passes)
    sys.path[:], imported[:] = path, names
