"""Measure on a GPU: `python -m testbed.h200 --gpus N --out FOLDER`.

Times single operations, then trains GPT and Llama layers of hidden size 4096 with Paddle's own plan and with Interlace's, and
writes one JSON file a case as soon as it is known: machine, versions, step times with their spread, peak memory, losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT_VARIABLE = "TESTBED_REPORT"  # see world.py
LIBRARIES = {"TESTBED_CUBLAS": "libcublas.so.13", "TESTBED_NCCL": "libnccl.so.2"}
BIG = ("--hidden", "4096", "--heads", "32", "--vocab", "8192", "--layers", "2", "--steps", "6",
       "--optimizer", "sgd", "--learning-rate", "1e-3")  # fmt: skip
SMALL = ("--layers", "2", "--steps", "3", "--micro-batches", "4", "--schedule", "1F1B")
BF16 = ("--amp", "O2", "--master-grad")
MIXED_BF16 = ("--amp", "O1")  # with mp: the CPU, where models are made, cannot shard bfloat16 parameters
OPS_STEPS, OPS_WARM = 30, 5
CASE_TIMEOUT_S = 150.0


@dataclass(frozen=True, slots=True)
class Case:
    """A script, its ranks and arguments, and the plans to run it with: name -> configuration text; none is Paddle's own."""

    name: str
    script: str
    world: int
    args: tuple[str, ...]
    plans: tuple[tuple[str, str | None], ...]


def _pairs(form: str, offload: float = 0.0) -> str:
    text = f"device: h200\nschedule_1f1b: {{interleave: {form}}}\n"
    return text + (f"offload_activations: {{fraction: {offload}, min_bytes: 1MB}}\n" if offload else "")


STOCK = ("stock", None)
COLUMN, DX, MIXED = ("column", _pairs("off")), ("dx-first", _pairs("dx-first")), ("mixed", _pairs("mixed"))
OFFLOADS = tuple((f"offload-{share:g}", _pairs("dx-first", share)) for share in (0.5, 1.0))


def cases(gpus: int) -> list[Case]:
    """What is run on so many GPUs."""
    plain = ("--seq-len", "2048", "--batch-size", "8", "--micro-batches", "8", "--schedule", "1F1B")
    seq = (*plain, *BF16)
    if gpus == 1:
        return [
            Case("small-gpt-fp32", "gpt", 1, SMALL, (STOCK, DX, ("offload-1", _pairs("dx-first", 1.0).replace("1MB", "1KB")))),
            Case("small-llama-bf16", "llama", 1, (*SMALL, *BF16), (STOCK, DX)),
            Case("gpt-4096-bf16", "gpt", 1, (*BIG, *seq), (STOCK, DX, *OFFLOADS)),
            Case("llama-4096-bf16", "llama", 1, (*BIG, *seq), (STOCK, DX)),
        ]
    mp = ("--mp", str(gpus))
    found = [
        Case(f"gpt-4096-bf16-mp{gpus}", "gpt", gpus, (*BIG, *plain, *MIXED_BF16, *mp), (STOCK, COLUMN, DX, MIXED, *OFFLOADS)),
        Case(f"llama-4096-bf16-mp{gpus}", "llama", gpus, (*BIG, *plain, *MIXED_BF16, *mp), (STOCK, DX, MIXED)),
    ]
    found.append(Case(f"small-gpt-fp32-mp{gpus}", "gpt", gpus, (*SMALL, *mp), (STOCK, DX)))
    if gpus == 2:
        found.append(Case("small-gpt-fp32-pp2", "gpt", 2, (*SMALL, "--pp", "2"), (STOCK, DX)))
        found.append(Case("gpt-4096-bf16-pp2", "gpt", 2, (*BIG, *plain, *MIXED_BF16, "--pp", "2"), (STOCK, DX, MIXED, *OFFLOADS)))
    return found


def find_libraries() -> dict[str, str]:
    """cuBLAS and NCCL where Python packages brought them; the loader looks for those that are not named here."""
    places = [Path(folder) / "nvidia" for folder in sys.path if folder] + [Path("/usr/local")]
    found: dict[str, str] = {}
    for variable, name in LIBRARIES.items():
        paths = [path for place in places if place.is_dir() for path in place.glob(f"*/lib*/{name}")]
        paths += [path for place in places if place.is_dir() for path in place.glob(f"*/*/lib*/{name}")]
        if paths:
            found[variable] = os.fspath(paths[0])
    return found


def machine() -> dict[str, str]:
    """The GPUs and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        shown = "no nvidia-smi"
    import importlib.metadata

    from interlace.version import VERSION

    return {"gpus": shown, "paddle": importlib.metadata.version("paddlepaddle"), "interlace": VERSION, "python": sys.version.split()[0]}


def run_case(case: Case, variant: str, out: Path) -> dict[str, Any]:
    """Run one case with each of its plans, and write what was found."""
    head = {"case": case.name, "world": case.world, "args": list(case.args), "variant": variant}
    result: dict[str, Any] = {**head, **machine(), "plans": {}}
    for name, config in case.plans:
        result["plans"][name] = _run_plan(case, name, config, variant, out)
        print(f"{case.name} {name}: {_headline(result['plans'][name])}", flush=True)
        (out / f"testbed_{case.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _run_plan(case: Case, plan: str, config: str | None, variant: str, out: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        words = [sys.executable, "-m", "interlace.cli", "run", str(ROOT / "examples" / f"{case.script}.py"), "--place", "testbed",
                 "--world", str(case.world), "--json", str(room / "run.json"),
                 "--log-dir", str(room / "log"), "--timeout", "60"]  # fmt: skip
        env = {"NCCL_NVLS_ENABLE": "0", **os.environ, **find_libraries(), "TESTBED_VARIANT": variant, REPORT_VARIABLE: folder,
               "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}  # fmt: skip
        if config is None:
            env["INTERLACE_DISABLE"] = "1"
        else:
            (room / "plan.yaml").write_text(config)
            words += ["--config", str(room / "plan.yaml")]
        start = time.monotonic()
        try:
            command = [*words, "--", *case.args]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            done = subprocess.CompletedProcess(words, 124, "", f"no end within {CASE_TIMEOUT_S:g} s: {error.stderr!r}")
        if done.returncode:
            (out / f"{case.name}_{plan}.log").write_text(done.stdout + done.stderr + _logs(room))
            return {"failed": done.stderr[-1500:]}
        return {"wall_s": round(time.monotonic() - start, 1), **_found(room)}


def _logs(room: Path) -> str:
    return "".join(f"\n== {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in sorted(room.rglob("rank*.log")))


def _found(room: Path) -> dict[str, Any]:
    ranks = json.loads((room / "run.json").read_text())["runs"]["run"]["ranks"]
    memory = [json.loads(path.read_text()) for path in sorted(room.glob("memory*.json"))]
    steps = [max(rank["losses"][k]["dur_ns"] for rank in ranks) / 1e6 for k in range(len(ranks[0]["losses"]))]
    warm = steps[2:] or steps[-1:]
    losses = [loss["raw_hex"] for loss in ranks[-1]["losses"]]
    return {"step_ms": {"median": statistics.median(warm), "min": min(warm), "max": max(warm), "all": steps},
            "losses": [loss["values"] for loss in ranks[-1]["losses"]], "loss_bits": losses, "memory": memory}  # fmt: skip


def _headline(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"FAILED: {found['failed'][-700:]}"
    peaks = [f"{each['allocated_peak'] / 1e9:.2f}+{each['outside_peak'] / 1e9:.2f}" for each in found["memory"]]
    last = found["losses"][-1]
    mean = sum(last) / len(last) if last else float("nan")
    step = found["step_ms"]
    return f"{step['median']:.1f} ms a step ({step['min']:.1f}-{step['max']:.1f}), peak GB {peaks}, loss {mean:.6f}"


# -- operations alone ------------------------------------------------------------------------------------------------


def time_ops(out: Path) -> dict[str, Any]:
    """Device times of single operations in bfloat16 at the sizes of a 4096 layer, sequence 2048, and the host's cost of an op."""
    from testbed import device

    os.environ.update(find_libraries())
    device.load()
    import paddle

    paddle.enable_static()
    found: dict[str, Any] = {**machine(), "dtype": "bfloat16", "ops": {}}
    for name, build, flops, moved in _op_cases(paddle):
        found["ops"][name] = _time_op(paddle, device, build, flops, moved)
        print(f"op {name}: {found['ops'][name]}", flush=True)
        (out / "testbed_ops.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _op_cases(paddle: Any) -> list[tuple[str, Any, float, float]]:
    f = paddle.nn.functional
    t, h, w = 2048, 4096, 2
    row = t * h * w

    def data(name: str, *shape: int) -> Any:
        return paddle.cast(paddle.static.data(name, list(shape), "float32"), "bfloat16")

    return [
        ("matmul 2048x4096x16384", lambda: paddle.matmul(data("x", t, h), data("y", h, 4 * h)), 2.0 * t * h * 4 * h, 0),
        ("matmul 8192x4096x16384", lambda: paddle.matmul(data("x", 4 * t, h), data("y", h, 4 * h)), 8.0 * t * h * 4 * h, 0),
        ("matmul heads 32x2048x128x2048", lambda: paddle.matmul(data("x", 32, t, 128), data("y", 32, t, 128), transpose_y=True),
         64.0 * t * t * 128, 0),
        ("layer_norm 2048x4096", lambda: f.layer_norm(data("x", t, h), h), 0, 2 * row),
        ("softmax 32x2048x2048", lambda: f.softmax(data("x", 32, t, t)), 0, 2 * 32 * t * t * w),
        ("gelu 2048x16384", lambda: f.gelu(data("x", t, 4 * h), approximate=True), 0, 8 * row),
        ("add 2048x4096", lambda: data("x", t, h) + data("z", t, h), 0, 3 * row),
        ("add row 2048x4096", lambda: data("x", t, h) + data("b", h), 0, 2 * row),
        ("transpose 2048x32x128", lambda: paddle.transpose(data("x", t, 32, 128), [1, 0, 2]), 0, 2 * row),
    ]


def _time_op(paddle: Any, device: Any, build: Any, flops: float, moved: float) -> dict[str, float]:
    import numpy as np

    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        out = build()
        paddle._C_ops.set_persistable_value(out, "kept")
    block = main.global_block()
    feed = {op.attrs()["name"]: np.random.default_rng(0).standard_normal(op.result(0).shape).astype("float32") * 0.02
            for op in block.ops if op.name() == "pd_op.data"}  # fmt: skip
    place = paddle.CustomPlace(device.NAME, 0)
    executor, scope = paddle.static.Executor(place), paddle.static.global_scope()
    core_place = paddle.base.core.Place()
    core_place.set_place(place)
    for name, array in feed.items():
        scope.var(name).get_tensor().set(array, place)
    job = paddle.base.core.Job("default")
    job.set_skip_gc_vars(set(feed))
    plan = paddle.base.core.Plan([job], {"default": main})
    run = paddle.base.core.StandaloneExecutor(core_place, plan, scope)
    for _ in range(OPS_WARM):
        run.run(list(feed), False)
    start = time.perf_counter()
    for _ in range(OPS_STEPS):
        run.run(list(feed), False)
    host_us = (time.perf_counter() - start) / OPS_STEPS * 1e6
    with device.traced() as trace:
        for _ in range(OPS_STEPS):
            run.run(list(feed), False)
    del executor
    times = sorted(each.end_us - each.begin_us for each in trace.intervals if each.name not in ("cast", "copy_d2d"))
    median = statistics.median(times)
    found = {"median_us": round(median, 2), "min_us": round(times[0], 2), "host_us_a_run": round(host_us, 1)}
    if flops:
        found["tflops"] = round(flops / median / 1e6, 1)
    if moved:
        found["gb_per_s"] = round(moved / median / 1e3, 1)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m testbed.h200", description="Measure Paddle's plan and Interlace's on GPUs.")
    parser.add_argument("--gpus", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200", metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--no-ops", action="store_true", help="leave out the single operations")
    parser.add_argument("--threads", action="store_true", help="host threads for streams: a dry run of the small cases")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    variant = "threads" if args.threads else "cuda"
    if not args.no_ops and not args.threads:
        command = [sys.executable, "-c", f"import pathlib, testbed.h200 as h; h.time_ops(pathlib.Path({os.fspath(args.out)!r}))"]
        subprocess.run(command, env={**os.environ, "TESTBED_VARIANT": variant}, cwd=ROOT, timeout=CASE_TIMEOUT_S, check=False)
    for case in cases(args.gpus):
        if args.only in case.name and not (args.threads and "4096" in case.name):
            run_case(case, variant, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
