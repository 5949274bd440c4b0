"""Costs of jobs in Paddle's executor: time to build them, memory, and host time per operation and per job.

Building a program takes time quadratic in its operations, so the size of a job is bounded (`max_ops_per_job`). Every job costs host time,
so a backward and a forward are one job, instead of one for each piece between collectives. Everything runs on the CPU place with tiny
tensors, so that host time dominates. Each row is measured in its own process.

    python benchmarks/executor.py [--quick] [--runs N] [-o FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from measuring import meta, middle, store

SIZES = (500, 1000, 2000, 4000)
JOBS = (1, 4, 16, 64)
OPS = 1024
TRACE = "FLAGS_enable_pir_in_executor_trace_run"


def build(num_ops: int) -> dict[str, float]:
    """Build one program of two interleaved chains and run it."""
    import paddle

    program, _ = _program(num_ops, 1)
    run, memory = _executor([("j0", program)])
    before = memory()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    made = {"build_s": time.perf_counter() - wall, "build_cpu_s": time.process_time() - cpu, "mb": (memory() - before) / 1e6}
    del paddle
    return {**made, "us_per_op": _warm(run) / num_ops * 1e6}


def jobs(num_jobs: int, num_ops: int) -> dict[str, float]:
    """Run the same operations cut into jobs, each of which reads the values of the previous one."""
    made = [(f"j{k}", _program(num_ops // num_jobs, k + 1)[0]) for k in range(num_jobs)]
    run, _ = _executor(made)
    run()
    return {"us_per_step": _warm(run) * 1e6}


def _program(num_ops: int, number: int) -> tuple[Any, str]:
    """A program that reads `x` and writes `out<number>`; two chains that meet, so that there are dependencies to find."""
    import paddle

    paddle.enable_static()
    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()):
        x = paddle.static.data("x", [4, 4], "float32")
        a = b = x
        for _ in range(num_ops // 4):
            a, b = paddle.tanh(a), paddle.tanh(b)
            a = a + b
            b = b * a
        paddle._C_ops.set_persistable_value(a, f"out{number}")
    return program, f"out{number}"


def _executor(programs: list[tuple[str, Any]]) -> tuple[Any, Any]:
    import numpy as np
    import paddle
    from paddle.base import core

    made = []
    for name, _ in programs:
        job = core.Job(name)
        job.set_micro_batch_id(0)
        job.set_skip_gc_vars({"x"})
        made.append(job)
    place, scope = core.Place(), core.Scope()
    place.set_place(paddle.CPUPlace())
    plan = core.Plan(made, dict(programs))
    with paddle.static.scope_guard(scope):
        executor = core.StandaloneExecutor(place, plan, scope)

    def run() -> float:
        scope.var("x").get_tensor().set(np.ones((4, 4), "float32"), paddle.CPUPlace())
        with paddle.static.scope_guard(scope):
            start = time.perf_counter()
            executor.run(["x"], False)
            return time.perf_counter() - start

    return run, lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _warm(run: Any) -> float:
    """The shortest of many runs: the host's own time without other load."""
    return min(run() for _ in range(40))


def child(what: str, *sizes: int, trace: bool = False) -> dict[str, Any]:
    """One measurement in a separate process."""
    environment = {**os.environ, TRACE: "1" if trace else "0", "GLOG_v": "0"}
    command = [sys.executable, __file__, "--child", json.dumps([what, *sizes])]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if found.returncode:
        raise SystemExit(f"{what} {sizes} failed:\n{found.stderr[-2000:]}")
    made: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
    return made


def sizes_of(sizes: tuple[int, ...], runs: int) -> list[dict[str, Any]]:
    """A row for each program size."""
    rows = []
    for size in sizes:
        found = [child("build", size) for _ in range(runs)]
        traced = child("build", size, trace=True)
        row = {key: middle([one[key] for one in found], 3) for key in found[0]}
        rows.append({"ops": size, **row, "us_per_op_traced": round(traced["us_per_op"], 3)})
        print(rows[-1], flush=True)
    return rows


def jobs_of(counts: tuple[int, ...], num_ops: int, runs: int) -> dict[str, Any]:
    """Host time of a step by number of jobs, and the cost of an additional job."""
    rows: list[dict[str, Any]] = []
    for count in counts:
        row: dict[str, Any] = {"jobs": count, "ops": num_ops}
        for name, trace in (("us_per_step", False), ("us_per_step_traced", True)):
            row[name] = middle([child("jobs", count, num_ops, trace=trace)["us_per_step"] for _ in range(runs)], 1)
        rows.append(row)
        print(rows[-1], flush=True)
    first, last = rows[0], rows[-1]
    cost = {
        f"us_per_job{name}": round((last[key]["median"] - first[key]["median"]) / (last["jobs"] - first["jobs"]), 2)
        for name in ("", "_traced")
        for key in (f"us_per_step{name}",)
    }
    return {"rows": rows, **cost}


def growth(rows: list[dict[str, Any]]) -> float:
    """Exponent of the build time as a function of size: 1 is linear, 2 quadratic."""
    from math import log

    first, last = rows[0], rows[-1]
    return round(log(last["build_cpu_s"]["median"] / first["build_cpu_s"]["median"]) / log(last["ops"] / first["ops"]), 2)


def main(argv: list[str] | None = None) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, once")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        what, *numbers = json.loads(args.child)
        print(json.dumps({"build": build, "jobs": jobs}[what](*numbers)))
        return
    runs = 1 if args.quick else args.runs
    rows = sizes_of((40, 80) if args.quick else SIZES, runs)
    cut = jobs_of((1, 4) if args.quick else JOBS, 64 if args.quick else OPS, runs)
    result = {
        **meta(paddle=importlib.metadata.version("paddlepaddle")),
        "place": "cpu",
        "programs": rows,
        "build_grows_with_ops_to_the": growth(rows),
        "jobs": cut,
        "us_per_op": round(median(row["us_per_op"]["median"] for row in rows), 2),
    }
    store("executor", result, args.out)


if __name__ == "__main__":
    main()
