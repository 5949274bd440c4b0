"""Times of collectives between CPU processes, through Interlace's own transport and without Paddle."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from statistics import median

import numpy as np

from interlace.cost_model.profile import CommSample
from interlace.errors import ConfigError
from interlace.temporary import temporary_folder

GROUP = 2
"""Number of processes that take part in a collective."""


def cpu_collectives(quick: bool) -> list[CommSample]:
    """Times of an all-reduce of float32 between processes that use the CPU transport, without Paddle.

    Raises:
        ConfigError: A process failed or took more than a minute; the message has the last line of its output.
    """
    sizes = [1 << 16, 1 << 20] if quick else [1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with temporary_folder() as made, contextlib.ExitStack() as stack:
        folder = str(made)
        ranks = []
        for rank in range(GROUP):
            code = f"from interlace.bridge.calibrate.cpu_collectives import all_reduce_rank; all_reduce_rank({rank}, {folder!r}, {sizes})"
            process = subprocess.Popen(
                [sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        said = [_last_words(process) for process in ranks]
    return [CommSample("all_reduce", GROUP, size, dur, spread, num_runs=15) for size, dur, spread in json.loads(said[0])]


def _last_words(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired as error:
        raise ConfigError("CPU collectives: a measuring process did not answer within 60 s") from error
    if process.returncode:
        raise ConfigError(f"CPU collectives: a measuring process failed: {err.strip().rpartition(chr(10))[2]}")
    return out


def all_reduce_rank(rank: int, folder: str, sizes: list[int]) -> None:
    """What each process runs: measure all sizes (in bytes), and print `[[bytes, median ns, spread ns], ...]` as JSON. `folder` is where the
    processes meet."""
    from interlace.cpu.transport import Transport

    found = []
    with Transport(rank, GROUP, folder, timeout_s=30) as transport:
        for size in sizes:
            array, times = np.ones(size // 4, np.float32), []
            for _ in range(17):
                start = time.perf_counter_ns()
                transport.all_reduce(array, "sum", 0, range(GROUP))
                times.append(time.perf_counter_ns() - start)
            times = times[2:]
            found.append((size, round(median(times)), max(times) - min(times)))
        transport.all_reduce(np.ones(1, np.float32), "sum", 0, range(GROUP))  # all leave together
    print(json.dumps(found))
