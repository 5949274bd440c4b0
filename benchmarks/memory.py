"""Memory that Paddle's executor holds on the CPU, compared with the prediction of the memory model from the plan of the same run.

Each case trains an example on CPU ranks and reads Paddle's allocation statistics (`host_memory_stat_*`: bytes of tensors, including copies
in host memory, without buffers of Python and of the transport). On the CPU a separate thread frees tensors, and is late on a busy machine.
Every step is therefore measured in two ways: *free*, as it runs, and *settled*, in which each operation is followed by a wait until nothing
more is freed. The prediction is for the second.

    python benchmarks/memory.py [--quick] [-o FILE]
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import ROOT, meta, store

SIZES = "--layers 4 --hidden 128 --seq-len 256 --batch-size 8"
QUICK_SIZES = "--layers 2 --hidden 64 --seq-len 128 --batch-size 8"
CASES = {
    "gpt, one rank": (1, "gpt", "--schedule 1F1B --micro-batches 4"),
    "gpt, pp2": (2, "gpt", "--pp 2 --micro-batches 4"),
    "gpt, mp2": (2, "gpt", "--mp 2 --schedule 1F1B --micro-batches 4"),
    "llama, mp2, sequence parallel": (2, "llama", "--mp 2 --sequence-parallel --schedule 1F1B --micro-batches 4"),
    "llama, pp2, recompute": (2, "llama", "--pp 2 --micro-batches 4 --recompute full"),
}
PLAIN = {"schedule_1f1b": {"interleave": "off"}, "split_backward": "off", "overlap_column_backward": "off"}
DX_FIRST = {"schedule_1f1b": {"interleave": "dx-first", "only_gains": False}}
PLANS: dict[str, dict[str, Any]] = {
    "stock": PLAIN,
    "dx-first": DX_FIRST,
    "dx-first, offload": {**DX_FIRST, "offload_activations": {"fraction": 1.0, "min_bytes": 64}},
}
"""Configurations; `stock` is run by Paddle alone and predicted from Interlace's plan of the same schedule."""
Rows = list[dict[str, Any]]
OUT_VARIABLE, STEPS_VARIABLE = "INTERLACE_MEMORY_OUT", "INTERLACE_MEMORY_STEPS"
_WAIT_S, _STILL, _MOST_WAITS = 0.0003, 3, 400


# -- in a rank -------------------------------------------------------------------------------------------------------


class Probe:
    """Adds a wait after every operation of a program, which is active while `on`."""

    def __init__(self, core: Any) -> None:
        self.core, self.on, self.functions = core, False, []

    def held(self) -> int:
        """Bytes that tensors hold now."""
        return int(self.core.host_memory_stat_current_value("Allocated", 0))

    def settle(self) -> int:
        """Wait until the collector has nothing left to free."""
        last, still = self.held(), 0
        for _ in range(_MOST_WAITS):
            time.sleep(_WAIT_S)
            now = self.held()
            still = still + 1 if now == last else 0
            last = now
            if still == _STILL:
                break
        return last

    def put(self, program: Any) -> None:
        """Add the waits to a program."""
        import numpy as np
        import paddle
        from paddle.static.python_op import register_op

        from interlace.cpu.ops import to_tensor

        def wait() -> Any:
            if self.on:
                self.settle()
            return to_tensor(np.zeros(1, np.int64), "int64")

        def shape() -> Any:
            return paddle.static.MetaTensor(shape=[1], dtype=paddle.int64)

        with paddle.static.program_guard(program):
            for op in list(program.global_block().ops):
                if op.name() not in ("builtin.shadow_output", "builtin.set_parameter"):
                    paddle.pir.set_insertion_point_after(op)
                    self.functions.append(wait)
                    name = f"memory_probe_{len(self.functions)}"
                    register_op(wait, name=name, infer_meta=shape, input_names=[], output_names=["out"])()


def rank(model: str, arguments: list[str]) -> None:
    """Train this rank and store the peak of each step. The first step is a warm-up; the second half of the steps is settled."""
    sys.path.insert(0, str(ROOT / "examples"))
    example, common = importlib.import_module(model), importlib.import_module("common")
    from paddle.base import core
    from paddle.distributed.auto_parallel.static.engine import Engine

    from interlace.cpu import ops

    probe, rows, steps = Probe(core), [], int(os.environ[STEPS_VARIABLE])
    prepare, run = ops.rewrite_program, Engine.run

    def prepare_probed(program: Any, job: str) -> Any:
        counts = prepare(program, job)
        if job != "startup":
            probe.put(program)
        return counts

    def run_measured(engine: Any, *args: Any, **kwargs: Any) -> Any:
        gc.collect()
        probe.on = len(rows) > steps // 2
        before = probe.settle()
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        result = run(engine, *args, **kwargs)
        peak = int(core.host_memory_stat_peak_value("Allocated", 0))
        rows.append({"settled": probe.on, "before": before, "peak": peak})
        return result

    ops.rewrite_program, Engine.run = prepare_probed, run_measured
    common.main(example.parse([*arguments, "--steps", str(steps)]), example.build)
    path = Path(os.environ[OUT_VARIABLE]) / f"rank{os.environ['PADDLE_TRAINER_ID']}.json"
    path.write_text(json.dumps(rows))


# -- in the launcher -------------------------------------------------------------------------------------------------


def measure(world: int, model: str, arguments: str, options: dict[str, Any], folder: Path, steps: int = 5) -> Rows:
    """One case on local ranks: for every rank the predicted peak, and the measured peaks, settled and free.

    With the options `PLAIN`, one step with Interlace stores the plan, and Paddle alone is measured.
    """
    from interlace.ir import load
    from interlace.ir.target import CPU, with_paddles_jobs
    from interlace.scheduler.memory.live import in_order

    folder.mkdir(parents=True, exist_ok=True)
    stock = options == PLAIN
    config = folder / "config.json"
    config.write_text(json.dumps({**options, "device": "h200", "dump": str(folder / "plan")}))
    environment = {OUT_VARIABLE: str(folder), STEPS_VARIABLE: str(steps)}
    environment |= {"INTERLACE_CONFIG": str(config), "INTERLACE_TARGET": "cpu"}
    if stock:
        _launch(world, model, arguments, {**environment, STEPS_VARIABLE: "1"}, folder)
        environment["INTERLACE_DISABLE"] = "1"
    _launch(world, model, arguments, environment, folder)
    rows = []
    for number in range(world):
        profile = in_order(load(folder / "plan" / f"rank{number}.ilp"), target=with_paddles_jobs(CPU) if stock else CPU)
        found = json.loads((folder / f"rank{number}.json").read_text())
        settled = [row["peak"] for row in found if row["settled"]]
        free = [row["peak"] for row in found[1:] if not row["settled"]]
        predicted = profile.peak("all")
        rows.append(
            {
                "rank": number,
                "predicted_bytes": predicted,
                "settled_bytes": min(settled),
                "settled_max_bytes": max(settled),
                "free_bytes": [min(free), max(free)],
                "error_percent": round(100 * (predicted / min(settled) - 1), 3),
                "error_free_percent": [round(100 * (predicted / peak - 1), 2) for peak in (min(free), max(free))],
                "before_ours_percent": round(100 * (_plain(folder, number) / min(settled) - 1), 3),
                "always_bytes": profile.persistable_bytes("all"),
                "pinned_bytes": profile.peak("pinned"),
                "device_bytes": profile.peak(),
            }
        )
    return rows


def _plain(folder: Path, number: int) -> int:
    """The peak of the program alone, if its operations run one after another."""
    from interlace.ir import load
    from interlace.scheduler.memory.live import in_order

    return in_order(load(folder / "plan" / f"rank{number}.ilp")).peak("all")


def _launch(world: int, model: str, arguments: str, environment: dict[str, str], folder: Path) -> None:
    from interlace.local.launch import launch

    launch(__file__, ["--rank", model, *arguments.split()], world, environment, None, folder / "logs", 300.0)


def main(argv: list[str] | None = None) -> None:
    """Measure all cases, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args(argv)
    sizes, rows = (QUICK_SIZES if args.quick else SIZES), []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (world, model, arguments)) in enumerate(CASES.items()):
            for plan, options in PLANS.items():
                found = measure(world, model, f"{sizes} {arguments}", options, Path(folder) / f"{number}-{plan}")
                rows.append({"model": name, "plan": plan, "ranks": found})
                ranks = [f"{r['predicted_bytes']} for {r['settled_bytes']}, {r['error_percent']} %" for r in found]
                print(name, plan, *ranks, sep=" | ", flush=True)
    errors = sorted(abs(rank["error_percent"]) for row in rows for rank in row["ranks"])
    result = {
        **meta(paddle=importlib.metadata.version("paddlepaddle")),
        "sizes": sizes,
        "steps": "1 warm-up, 2 free, 2 settled",
        "worst_error_percent": errors[-1],
        "median_error_percent": errors[len(errors) // 2],
        "rows": rows,
    }
    store("memory", result, args.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], sys.argv[3:])
    else:
        main()
