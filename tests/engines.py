"""The engines that numba compiles, compiled once for all processes of a test run: in a fresh checkout that takes half a minute of processor
time, which each worker of pytest-xdist, and each process that forks ranks, would spend on its own."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from interlace.config import load_config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.planning.plan import make_plans
from interlace.scheduler.simulate import simulator
from interlace.scheduler.simulate.arrays import SimInput
from interlace.scheduler.simulate.lower import lower
from tests.captured.stored import programs_of

ROOT = Path(__file__).parents[1]
MODULES = ("interlace.scheduler.simulate.compiled", "interlace.scheduler.interleave.compiled")
"""Engines that a process takes for small plans too once it has them; their results are those of the plain ones."""
MOST_S = 180.0
"""Who has waited so long for an engine compiles it itself."""
WARM = "pp2, half offload, pp micro-batches"
"""The stored case that is planned."""


def plan() -> None:
    """Plan a model: this process and its forks have the engines then, errors of the profile's curves and modules that are imported late."""
    for name in MODULES:
        importlib.import_module(name)
    named = make_config({"schedule_1f1b": {"interleave": "mixed", "search": False}})  # a search would load nothing else
    make_plans(programs_of(WARM), named, CostModel(load_profile("h200")), "h200", 1)


def _split() -> None:
    """Split a step into its parts, compiled: nearly half of the time that all compiling takes."""
    sim = _baseline()
    times = simulator.run(sim, engine="plain").times
    importlib.import_module(MODULES[0]).split_rank(simulator.columns_of(sim, times, 0), 1, 1)


def _plan() -> None:
    """Compile what simulates; then plan, which takes the split that is stored and compiles the rest."""
    simulator.run(_baseline(), engine="fast")
    _wait_for("split")
    plan()


def _baseline() -> SimInput:
    """The arrays of a step by Paddle's own plan."""
    costs = CostModel(load_profile("h200"))
    return lower([each.program for each in make_plans(programs_of(WARM), load_config("baseline"), costs, "h200", 1)], costs)


PARTS: dict[str, Callable[[], None]] = {"split": _split, "plan": _plan}
"""What is compiled side by side."""


class Compiling:
    """Processes that compile the engines; `wait_for_engines` waits for them."""

    def __init__(self) -> None:
        self._processes = list[subprocess.Popen[bytes]]()
        for part in PARTS:
            with _lock(part).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # held until the process ends, which has the same open file
                words = [sys.executable, "-m", "tests.engines", part]
                self._processes.append(subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[lock.fileno()]))

    def end(self) -> None:
        """Whoever needs an engine now compiles it."""
        for process in self._processes:
            process.kill()
            process.wait()


def wait_for_engines() -> None:
    """Until nobody compiles them, or for `MOST_S`."""
    for part in PARTS:
        _wait_for(part)


def _wait_for(part: str) -> None:
    until = time.monotonic() + MOST_S
    with _lock(part).open("a") as lock:
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)


def _lock(part: str) -> Path:
    checkout = hashlib.sha256(os.fsencode(ROOT)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"interlace-tests-{checkout}-{part}.lock"


if __name__ == "__main__":
    PARTS[sys.argv[1]]()
