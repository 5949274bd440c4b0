"""Measure on GPUs: `python -m testbed.h200 --gpus N --out FOLDER`.

Times single operations and the host's cost of an operation and a job, then trains GPT and Llama layers of hidden size 4096 with
Paddle's own plan and with Interlace's. Many runs are prepared at once; each is measured while no other uses its GPUs. One JSON
file a case is written as soon as it is known: machine, versions, step times with their spread, peak memory, losses, a summary of
the traced step. The traces themselves, and every rank's program and plan, lie beside them.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from testbed import measure

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"TESTBED_CUBLAS": "libcublas.so.13", "TESTBED_NCCL": "libnccl.so.2", "TESTBED_CUDNN": "libcudnn.so.9"}
STEPS = 12
BIG = ("--hidden", "4096", "--heads", "32", "--vocab", "8192", "--steps", str(STEPS), "--optimizer", "sgd", "--learning-rate", "1e-3",
       "--amp", "O2", "--master-grad", "--attention", "flash", "--schedule", "1F1B")  # fmt: skip
SMALL = ("--layers", "2", "--steps", "8", "--micro-batches", "4", "--schedule", "1F1B")
DRY = ("--hidden", "64", "--heads", "4", "--vocab", "64", "--seq-len", "16")  # after BIG: the same runs, small
OPS_STEPS, OPS_WARM = 30, 5
CASE_TIMEOUT_S, ALONE_TIMEOUT_S, PREPARED_TIMEOUT_S = 240.0, 90.0, 100.0
WARM_STEPS = 2  # and the last step, which is traced, does not count


@dataclass(frozen=True, slots=True)
class Case:
    """A script, its ranks and arguments, and the plans to run it with: name -> configuration text; none is Paddle's own."""

    name: str
    script: str
    world: int
    args: tuple[str, ...]
    plans: tuple[tuple[str, str | None], ...]
    env: tuple[tuple[str, str], ...] = ()


def _pairs(form: str, offload: float = 0.0, more: str = "") -> str:
    text = f"device: h200\nschedule_1f1b: {{interleave: {form}, allowance_bytes: 40GB, only_gains: off}}\n{more}"
    return text + (f"offload_activations: {{fraction: {offload}, min_bytes: 1MB}}\n" if offload else "")


STOCK, AGAIN = ("stock", None), ("stock-again", None)
COLUMN, DX, MIXED = ("column", _pairs("off")), ("dx-first", _pairs("dx-first")), ("mixed", _pairs("mixed"))
OFFLOADS = tuple((f"offload-{share:g}", _pairs("dx-first", share)) for share in (0.5, 1.0))
ALL = (STOCK, COLUMN, DX, MIXED, *OFFLOADS)
SOME = (STOCK, DX, MIXED, OFFLOADS[1])
ORDER = "device: h200\nschedule_1f1b: {interleave: off}\nsplit_backward: off\noverlap_column_backward: off\n"
PEAK = (STOCK, ("plain", ORDER + "offload_activations: off\n"),
        ("offload", ORDER + "offload_activations: {fraction: 1.0, min_bytes: 1MB}\n"))  # fmt: skip
UNHELD = "assign_streams: {hold_host: off}\n"
FREE = (("dx-first-free", _pairs("dx-first", 0.0, UNHELD)), ("offload-1-free", _pairs("dx-first", 1.0, UNHELD)))
BY_KERNEL = (("TESTBED_SWITCHES", "d2h_by_kernel=1"),)
Plans = tuple[tuple[str, str | None], ...]


def _layers(
    script: str, seq: int, mp: int, pp: int = 1, vpp: int = 1, plans: Plans = ALL, batch: int = 1, more: tuple[str, ...] = ()
) -> Case:
    """Layers of the 6.7B size: two a stage and chunk, eight micro-batches of `batch` sequences."""
    parts = [script, f"s{seq}", f"mp{mp}", *([f"pp{pp}"] if pp > 1 else []), *([f"vpp{vpp}"] if vpp > 1 else []),
             *([f"b{batch}"] if batch > 1 else []), *(["fused"] if "--fused" in more else [])]  # fmt: skip
    args = (*BIG, "--layers", str(2 * pp * vpp), "--seq-len", str(seq), "--batch-size", str(8 * batch), "--micro-batches", "8",
            "--mp", str(mp), "--pp", str(pp), *more)  # fmt: skip
    if script == "llama":
        args += ("--intermediate", "11008")
    if vpp > 1:  # Paddle 3.3.1 cannot build VPP with master gradients
        args = (*(word for word in args if word != "--master-grad"), "--vpp", str(vpp), "--schedule", "VPP")
    return Case("-".join(parts), script, mp * pp, args, plans)


def cases(gpus: int) -> list[Case]:
    """What is run on so many GPUs, what matters most first."""
    models, widths = ("gpt", "llama"), [mp for mp in (2, 4) if mp <= gpus]
    found = [_layers(model, 2048, mp, batch=4, plans=(*ALL, *FREE, AGAIN)) for mp in widths for model in models]
    found += [_layers("llama", 2048, mp, batch=4, plans=SOME, more=("--fused",)) for mp in widths]
    found += [_layers(model, 4096, mp, batch=2) for mp in widths for model in models]
    found += [_layers(model, 2048, mp) for mp in widths for model in models]
    if gpus > 1:
        found += [_layers("gpt", 2048, 1, 2), _layers("llama", 2048, 1, 2, plans=SOME), _layers("gpt", 2048, 1, 2, 2, plans=SOME)]
        found += _peaks()
        wide = _layers("gpt", 2048, 2, batch=4, plans=(DX, *OFFLOADS))
        found.append(replace(wide, name=f"{wide.name}-bykernel", env=BY_KERNEL))
    if gpus > 3:
        found += [_layers(model, 2048, 2, 2, plans=SOME, batch=2) for model in models]
        found += [_layers(model, 4096, 2, 2, 2, plans=SOME) for model in models]
    found += [_layers(model, 2048, 1, plans=(STOCK, DX, *OFFLOADS)) for model in models]
    found += [_layers(model, 4096, mp, plans=(STOCK, DX, MIXED)) for mp in (1, *widths) for model in models]
    return [*found, *_small(gpus), *_puzzle(gpus)]


def _peaks() -> list[Case]:
    """Peaks that lie in what forward keeps for backward: few parameters, a small vocabulary, two micro-batches under way."""
    found = []
    for hidden, seq in ((4096, 4096), (2048, 8192)):
        more = ("--hidden", str(hidden), "--heads", str(hidden // 128), "--vocab", "512")
        found.append(replace(_layers("gpt", seq, 1, 2, plans=PEAK, more=more), name=f"peak-gpt-h{hidden}-s{seq}-pp2"))
    return found


def _small(gpus: int) -> list[Case]:
    """The examples' own sizes in float32: losses to compare with the CPU's."""
    tiny = ("offload-1", _pairs("dx-first", 1.0).replace("1MB", "1KB"))
    found = [Case("small-gpt-fp32", "gpt", 1, SMALL, (STOCK, DX, tiny))]
    if gpus > 1:
        found += [Case("small-gpt-fp32-pp2", "gpt", 2, (*SMALL, "--pp", "2"), (STOCK, DX, tiny)),
                  Case("small-llama-fp32-mp2", "llama", 2, (*SMALL, "--mp", "2", "--sequence-parallel"), (STOCK, DX))]  # fmt: skip
    if gpus > 3:
        vpp = (*SMALL, "--pp", "2", "--mp", "2", "--vpp", "2", "--layers", "4", "--schedule", "VPP")
        found.append(Case("small-gpt-fp32-pp2-mp2-vpp2", "gpt", 4, vpp, (STOCK, DX, tiny)))
    return found


def _puzzle(gpus: int) -> list[Case]:
    """Two cases that were not understood at first: losses that changed with Paddle's in-place pass, and slow steps on two GPUs."""
    args = ("--hidden", "4096", "--heads", "32", "--vocab", "8192", "--layers", "2", "--steps", "6", "--optimizer", "sgd",
            "--learning-rate", "1e-3", "--seq-len", "2048", "--batch-size", "8", "--micro-batches", "8", "--schedule", "1F1B",
            "--amp", "O2", "--master-grad")  # fmt: skip
    found = [
        Case(f"inplace-{name}", "gpt", 1, args, (STOCK, DX), (("TESTBED_INPLACE", value),)) for name, value in (("off", "0"), ("on", "1"))
    ]
    if gpus > 1:
        wide = (*({"O2": "O1", "--master-grad": "--mp"}.get(word, word) for word in args), "2")
        found += [Case(f"gpt-mp2-O1-{name}", "gpt", 2, wide, (STOCK, DX), (("TESTBED_TRACE_RUN", value),))
                  for name, value in (("threads", "0"), ("one-thread", "1"))]  # fmt: skip
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


# -- runs ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """Prepares many runs at once; results go to files as they come."""

    out: Path
    variant: str
    gpus: int
    ranks_at_once: int
    until: float
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    gate: Path = field(init=False)

    def __post_init__(self) -> None:
        (self.out / "traces").mkdir(parents=True, exist_ok=True)

    def run(self, wanted: Sequence[Case]) -> None:
        """In waves: the runs of one are prepared together, and measured when the machine is quiet again."""
        jobs = [(case, name, config) for case in wanted for name, config in case.plans]
        while jobs:
            wave: list[tuple[Case, str, str | None]] = []
            while jobs and sum(case.world for case, _, _ in wave) + jobs[0][0].world <= self.ranks_at_once:
                wave.append(jobs.pop(0))
            if time.monotonic() > self.until:
                for case, name, _ in wave:
                    self._keep(case, name, {"failed": "not started: no time was left"})
                continue
            self._wave(wave)

    def _wave(self, wave: list[tuple[Case, str, str | None]]) -> None:
        self.gate = Path(tempfile.mkdtemp(prefix="gate"))
        turns = dict.fromkeys((1, 2, 4), 0)
        with ThreadPoolExecutor(len(wave)) as pool:
            done = []
            for case, name, config in wave:
                first = turns[case.world] * case.world % self.gpus // case.world * case.world
                turns[case.world] += 1
                done.append(pool.submit(self._one, case, name, config, list(range(first, first + case.world))))
            ranks = sum(case.world for case, _, _ in wave)
            deadline = time.monotonic() + PREPARED_TIMEOUT_S
            while len(list(self.gate.glob("*.ready"))) < ranks and time.monotonic() < deadline:
                ranks = sum(case.world for (case, _, _), each in zip(wave, done, strict=True) if not each.done())
                time.sleep(0.05)
            time.sleep(1.0)
            (self.gate / "open").touch()
        shutil.rmtree(self.gate, ignore_errors=True)

    def _one(self, case: Case, name: str, config: str | None, gpus: list[int]) -> None:
        try:
            found = self._run_plan(case, name, config, gpus)
        except Exception as error:  # one run's failure is a result
            found = {"failed": f"{type(error).__name__}: {error}"}
        self._keep(case, name, found)

    def _keep(self, case: Case, plan: str, found: dict[str, Any]) -> None:
        with self.lock:
            head = {"case": case.name, "world": case.world, "args": list(case.args), "variant": self.variant}
            result = self.results.setdefault(case.name, {**head, **machine(), "plans": {}})
            result["plans"][plan] = found
            print(f"{case.name} {plan}: {_headline(found)}", flush=True)
            (self.out / f"testbed_{case.name}.json").write_text(json.dumps(result, indent=1) + "\n")

    def _run_plan(self, case: Case, plan: str, config: str | None, gpus: list[int]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            room = Path(folder)
            words = [sys.executable, "-m", "interlace.cli", "run", str(ROOT / "examples" / f"{case.script}.py"), "--place", "testbed",
                     "--world", str(case.world), "--json", str(room / "run.json"),
                     "--log-dir", str(room / "log"), "--timeout", "300"]  # fmt: skip
            env = {"NCCL_NVLS_ENABLE": "0", **os.environ, **find_libraries(), "TESTBED_VARIANT": self.variant, **dict(case.env),
                   "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "PYTHONPATH": _python_path(),
                   measure.FOLDER_VARIABLE: folder, measure.STEPS_VARIABLE: case.args[case.args.index("--steps") + 1],
                   measure.TRACE_VARIABLE: "1", measure.GATE_VARIABLE: f"{self.gate}:{','.join(map(str, gpus))}"}  # fmt: skip
            if config is None:
                env["INTERLACE_DISABLE"] = "1"
            else:
                (room / "plan.yaml").write_text(config + f"dump: {self.out / 'plans' / case.name / plan}\n")
                words += ["--config", str(room / "plan.yaml")]
            start = time.monotonic()
            try:
                done = subprocess.run(
                    [*words, "--", *case.args], env=env, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired as error:
                done = subprocess.CompletedProcess(words, 124, "", f"no end within {CASE_TIMEOUT_S:g} s: {error.stderr!r}")
            if done.returncode:
                (self.out / f"{case.name}_{plan}.log").write_text(done.stdout[-20000:] + done.stderr[-20000:] + _logs(room))
                return {"failed": done.stderr[-1500:]}
            for path in sorted(room.glob("trace*.pickle")):
                shutil.copy(path, self.out / "traces" / f"{case.name}_{plan}_{path.name}")
            return {"wall_s": round(time.monotonic() - start, 1), "gpus": gpus, **_found(room)}


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _logs(room: Path) -> str:
    return "".join(f"\n== {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in sorted(room.rglob("rank*.log")))


def _found(room: Path) -> dict[str, Any]:
    ranks = json.loads((room / "run.json").read_text())["runs"]["run"]["ranks"]
    measured = [json.loads((room / f"rank{rank}.json").read_text()) for rank in range(len(ranks))]
    steps = [max(each["steps"][k]["ms"] for each in measured) for k in range(len(measured[0]["steps"]))]
    warm = steps[WARM_STEPS:-1] or steps[:-1] or steps
    with_loss = [rank for rank in ranks if rank["losses"] and rank["losses"][0]["raw_hex"]]
    peaks = [{name: max(step["memory"][name] for step in each["steps"][1:-1] or each["steps"]) for name in each["steps"][0]["memory"]}
             for each in measured]  # fmt: skip
    return {
        "step_ms": {"median": statistics.median(warm), "min": min(warm), "max": max(warm), "all": [round(each, 3) for each in steps]},
        "memory": peaks,
        "pinned_buffers_by_step": [[step["memory"]["pinned_buffers"] for step in each["steps"]] for each in measured],
        "pinned_after_step": [[step["memory"]["pinned"] for step in each["steps"]] for each in measured],
        "losses": [statistics.fmean(loss["values"]) for loss in with_loss[-1]["losses"]],
        "loss_bits": [loss["raw_hex"] for loss in with_loss[-1]["losses"]],
        "parameters": _digest([rank["parameters"] for rank in ranks]),
        "traced_step": [each["trace"] for each in measured],
    }


def _digest(parameters: list[dict[str, str]]) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()


def _headline(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"FAILED: {found['failed'][-500:]}"
    peaks = [
        f"{each['allocated_peak'] / 1e9:.2f}/{each['reserved_peak'] / 1e9:.2f}+{each['outside_peak'] / 1e9:.2f}"
        for each in found["memory"][:1]
    ]
    step, traced = found["step_ms"], found["traced_step"][0]
    where = {name: round(value / 1e3, 1) for name, value in traced.get("busy_us", {}).items()}
    return (f"{step['median']:.2f} ms ({step['min']:.2f}-{step['max']:.2f}), GB {peaks}, loss {found['losses'][-1]:.6f}, "
            f"device {traced.get('device_us', 0) / 1e3:.1f} busy {where} host {traced.get('host_us')}, {found['wall_s']} s")  # fmt: skip


def write_traces(folder: Path, into: Path) -> None:
    """Turn the kept traces of `folder` into Chrome traces, one a run."""
    from testbed import trace

    into.mkdir(parents=True, exist_ok=True)
    runs = sorted({path.name.rpartition("_")[0] for path in folder.glob("*_trace*.pickle")})
    for run in runs:
        ranks = []
        for path in sorted(folder.glob(f"{run}_trace*.pickle")):
            with open(path, "rb") as file:
                ranks.append(pickle.load(file))
        trace.write_trace(ranks, into / f"{run}.json")


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
        try:
            found["ops"][name] = _time_op(paddle, device, build, flops, moved, name.split()[0])
        except Exception as error:  # one operation's failure is a result
            found["ops"][name] = {"failed": f"{type(error).__name__}: {error}"[:600]}
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
        (
            "matmul heads 32x2048x128x2048",
            lambda: paddle.matmul(data("x", 32, t, 128), data("y", 32, t, 128), transpose_y=True),
            64.0 * t * t * 128,
            0,
        ),
        ("layer_norm 2048x4096", lambda: f.layer_norm(data("x", t, h), h), 0, 2 * row),
        ("softmax 32x2048x2048", lambda: f.softmax(data("x", 32, t, t)), 0, 2 * 32 * t * t * w),
        ("gelu 2048x16384", lambda: f.gelu(data("x", t, 4 * h), approximate=True), 0, 8 * row),
        ("add 2048x4096", lambda: data("x", t, h) + data("z", t, h), 0, 3 * row),
        ("add row 2048x4096", lambda: data("x", t, h) + data("b", h), 0, 2 * row),
        (
            "cross_entropy 2048x8192 float32",
            lambda: f.cross_entropy(paddle.static.data("l", [t, 8192], "float32"), _labels(paddle, t), reduction="none"),
            0,
            8 * t * 8192,
        ),
        ("silu 2048x11008", lambda: f.silu(data("x", t, 11008)), 0, 4 * t * 11008),
        ("multiply 2048x11008", lambda: data("x", t, 11008) * data("z", t, 11008), 0, 6 * t * 11008),
        ("cast 2048x16384 to float32", lambda: paddle.cast(data("x", t, 4 * h), "float32"), 0, 6 * t * 4 * h),
        *_attention_cases(paddle, data),
        ("transpose 2048x32x128", lambda: paddle.transpose(data("x", t, 32, 128), [1, 0, 2]), 0, 2 * row),
    ]


def _labels(paddle: Any, rows: int) -> Any:
    return paddle.full([rows, 1], 7, "int64")


def _attention_cases(paddle: Any, data: Any) -> list[tuple[str, Any, float, float]]:
    """Causal attention forward, and forward with backward, of one sequence; a causal one counts half of the products."""
    found: list[tuple[str, Any, float, float]] = []
    for seq, heads in ((2048, 32), (2048, 16), (4096, 32)):
        shape, products = (1, seq, heads, 128), 2.0 * heads * seq * seq * 128

        def forward(shape: tuple[int, ...] = shape) -> Any:
            q, k, v = (data(name, *shape) for name in "qkv")
            return paddle._C_ops.flash_attn(q, k, v, None, None, 0.0, True, False, False, "")[0]

        def both(shape: tuple[int, ...] = shape) -> Any:
            q, k, v = (data(name, *shape) for name in "qkv")
            out, _, lse, seed = paddle._C_ops.flash_attn(q, k, v, None, None, 0.0, True, False, False, "")
            return paddle._C_ops.flash_attn_grad(q, k, v, out, lse, seed, None, data("g", *shape), 0.0, True)[0]

        found += [
            (f"attention {seq} heads {heads}", forward, products, 0),
            (f"attention_grad {seq} heads {heads}", both, 2.5 * products, 0),
        ]
    return found


def _time_op(paddle: Any, device: Any, build: Any, flops: float, moved: float, kernel: str) -> dict[str, float]:
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
    kernel = {"matmul": "gemm", "gelu": "gelu_tanh"}.get(kernel, kernel)
    times = sorted(each.end_us - each.begin_us for each in trace.intervals if each.name == kernel)
    if kernel == "cast":  # the operands' own casts come first
        times = sorted(each.end_us - each.begin_us for each in trace.intervals if each.name == kernel)[::2]
    median = statistics.median(times)
    found = {"median_us": round(median, 2), "min_us": round(times[0], 2), "host_us_a_run": round(host_us, 1)}
    if flops:
        found["tflops"] = round(flops / median / 1e6, 1)
    if moved:
        found["gb_per_s"] = round(moved / median / 1e3, 1)
    return found


# -- collectives alone -----------------------------------------------------------------------------------------------

COLLECTIVE_MIB, COLLECTIVE_REPEATS, RING = (4, 16, 64, 256), 12, 91


def time_collectives(out: Path, variant: str, gpus: int) -> None:
    """Every collective alone on 2, 4, ... GPUs, a process a rank: device time and bus bandwidth, in bfloat16."""
    found: dict[str, Any] = {**machine(), "dtype": "bfloat16", "worlds": {}}
    for world in (each for each in (2, 4, 8) if each <= gpus):
        with tempfile.TemporaryDirectory() as folder:
            command = "import sys, testbed.h200 as h; h.collective_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
            ranks = []
            for rank in range(world):
                env = {"NCCL_NVLS_ENABLE": "0", **os.environ, **find_libraries(), "TESTBED_VARIANT": variant, "PYTHONPATH": _python_path(),
                       "CUDA_VISIBLE_DEVICES": ",".join(map(str, [rank, *(k for k in range(world) if k != rank)]))}  # fmt: skip
                ranks.append(subprocess.Popen([sys.executable, "-c", command, str(rank), str(world), folder], env=env, cwd=ROOT))
            deadline = time.monotonic() + ALONE_TIMEOUT_S
            try:
                for each in ranks:
                    each.wait(max(deadline - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                print(f"collectives of {world}: no end within {ALONE_TIMEOUT_S:g} s", flush=True)
            for each in ranks:
                each.kill()
            path = Path(folder) / "found.json"
            found["worlds"][str(world)] = json.loads(path.read_text()) if path.exists() else {"failed": "a rank gave nothing"}
        (out / "testbed_collectives.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"collectives of {world}: {found['worlds'][str(world)]}", flush=True)


def collective_rank(rank: int, world: int, folder: str) -> None:
    """One rank of `time_collectives`; the first writes what it measured."""
    from testbed import device
    from testbed.world import make_ring

    device.load()
    import paddle

    paddle.enable_static()
    make_ring(RING, rank, world, Path(folder) / "ring")
    calls = paddle._C_ops
    kinds: dict[str, tuple[Any, float]] = {  # how to make it, and bus bytes a byte of the whole buffer
        "all_reduce": (lambda x: calls.all_reduce(x, RING, 0), 2 * (world - 1) / world),
        "all_gather": (lambda x: calls.all_gather(x, RING, world), (world - 1) / world),
        "reduce_scatter": (lambda x: calls.reduce_scatter(x, RING, world), (world - 1) / world),
        "all_to_all": (lambda x: calls.all_to_all(x, RING), (world - 1) / world),
        "broadcast": (lambda x: calls.broadcast(x, RING, 0), 1.0),
        "reduce": (lambda x: calls.reduce(x, RING, 0, 0), 1.0),
    }
    found: dict[str, Any] = {}
    for size in COLLECTIVE_MIB if device.variant() == "cuda" else (1,):
        for name, (make, share) in kinds.items():
            elements = size * 2**20 // 2 // (world if name == "all_gather" else 1)
            times = _collective_us(paddle, device, name, make, elements)
            median = statistics.median(times)
            found[f"{name} {size} MiB"] = {"median_us": round(median, 2), "min_us": round(times[0], 2), "max_us": round(times[-1], 2),
                                           "bus_gb_per_s": round(size * 2**20 * share / median / 1e3, 1)}  # fmt: skip
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))


def _collective_us(paddle: Any, device: Any, name: str, make: Any, elements: int) -> list[float]:
    """Sorted device times of one collective that follows itself on a stream; the first, which waits for the other ranks, left out."""
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        x = paddle.full([elements], 1.0, "bfloat16")
        for _ in range(COLLECTIVE_REPEATS):
            make(x).get_defining_op().set_execution_stream("alone")
    core = paddle.base.core
    place = core.Place()
    place.set_place(paddle.CustomPlace(device.NAME, 0))
    run = core.StandaloneExecutor(place, core.Plan([core.Job("default")], {"default": main}), core.Scope())
    for _ in range(2):
        run.run([], False)
    with device.traced() as trace:
        run.run([], False)
    times = [each.end_us - each.begin_us for each in sorted(trace.intervals) if each.name == name]
    return sorted(times[1:])


def time_host(out: Path) -> dict[str, Any]:
    """The executor's host cost of an operation and of a job: how long the host takes to issue programs of tiny operations."""
    from testbed import device

    os.environ.update(find_libraries())
    device.load()
    import paddle

    paddle.enable_static()
    paddle.set_flags({"FLAGS_new_executor_sequential_run": True, "FLAGS_pir_apply_inplace_pass": False})
    found: dict[str, Any] = {**machine(), "runs": {}}
    for collector in ("fast", "event", "fast in one thread"):
        paddle.set_flags({"FLAGS_fast_eager_deletion_mode": collector != "event",
                          "FLAGS_enable_pir_in_executor_trace_run": collector.endswith("one thread")})  # fmt: skip
        for num_jobs, num_ops, streams in ((1, 50, 1), (1, 550, 1), (1, 550, 2), (21, 50, 1), (1, 1050, 1)):
            times = _issue_us(paddle, device, num_jobs, num_ops, streams)
            key = f"{collector} collection, {num_jobs} jobs of {num_ops} operations on {streams} streams"
            found["runs"][key] = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
        start = f"{collector} collection, "
        runs = {name.removeprefix(start): each["median_us"] for name, each in found["runs"].items() if name.startswith(start)}
        one, many = runs["1 jobs of 50 operations on 1 streams"], runs["1 jobs of 550 operations on 1 streams"]
        an_op, jobs = (many - one) / 500, runs["21 jobs of 50 operations on 1 streams"]
        found[collector] = {"an_op_us": an_op, "a_job_us": (jobs - one - 1000 * an_op) / 20,
                            "an_op_us_two_streams": (runs["1 jobs of 550 operations on 2 streams"] - one) / 500}  # fmt: skip
        print(f"host, {collector} collection: {found[collector]}", flush=True)
    (out / "testbed_host.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _issue_us(paddle: Any, device: Any, num_jobs: int, num_ops: int, streams: int) -> list[float]:
    programs = {}
    for number in range(num_jobs):
        main = paddle.static.Program()
        with paddle.static.program_guard(main, paddle.static.Program()):
            x = paddle.static.data("x", [16], "float32")
            for k in range(num_ops):
                x = paddle.tanh(x)
                if streams > 1 and k % 2:
                    x.get_defining_op().set_execution_stream("side")
            paddle._C_ops.set_persistable_value(x, f"kept{number}")
        programs[f"job{number}"] = main
    place, core_place = paddle.CustomPlace(device.NAME, 0), paddle.base.core.Place()
    core_place.set_place(place)
    import numpy as np

    scope = paddle.base.core.Scope()
    scope.var("x").get_tensor().set(np.ones(16, "float32"), place)
    jobs = [paddle.base.core.Job(name) for name in programs]
    for job in jobs:
        job.set_skip_gc_vars({"x"})
    executor = paddle.base.core.StandaloneExecutor(core_place, paddle.base.core.Plan(jobs, programs), scope)
    times = []
    for _ in range(15):
        device.synchronize()
        start = time.perf_counter()
        executor.run(["x"], False)
        times.append((time.perf_counter() - start) * 1e6)
    device.synchronize()
    return times[5:]


# -- the same plans, simulated ---------------------------------------------------------------------------------------


def simulate(out: Path) -> None:
    """What `interlace check` says of every plan that was run, and of Paddle's own as a plan of ours: `simulated.json`."""
    folders = sorted(path for path in out.glob("plans/*/*") if list(path.glob("*.ilp")))
    firsts = {path.parent: path for path in reversed(folders) if list(path.glob("captured/*.ilp"))}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        stock = list(pool.map(_stock_plan, firsts.values()))
        found = dict(pool.map(_simulated, [*folders, *(path for path in stock if path)]))
    (out / "simulated.json").write_text(json.dumps(found, indent=1) + "\n")


def _interlace(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "interlace.cli", *words], env={**os.environ, "PYTHONPATH": _python_path()}, cwd=ROOT,
                          capture_output=True, text=True, check=False)  # fmt: skip


def _stock_plan(planned: Path) -> Path | None:
    into = planned.parent / "stock"
    _interlace("plan", os.fspath(planned / "captured"), "--config", "stock", "--device", "h200", "-o", os.fspath(into))
    return into if list(into.glob("*.ilp")) else None


def _simulated(folder: Path) -> tuple[str, dict[str, Any]]:
    """The slowest rank's times and the fullest rank's memory: `gpu` counts what side streams hold, `in_order` is as tensors are freed."""
    from interlace.ir import load
    from interlace.scheduler.memory import in_order

    found: dict[str, Any] = {}
    for place in ("custom", "gpu"):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            done = _interlace("check", os.fspath(folder), "--place", place, "--json", file.name)
            text = Path(file.name).read_text()
        ranks = json.loads(text).get("ranks", []) if text else []
        if not ranks:
            found[place] = {"failed": (done.stderr or done.stdout)[-300:]}
            continue
        found[place] = {key: max(rank[key] for rank in ranks) for key in ("step_ns", "exposed_comm_ns", "peak_bytes", "pinned_bytes")}
        found[place]["peak_bytes_by_rank"] = [rank["peak_bytes"] for rank in ranks]
    found["in_order_peak_bytes_by_rank"] = [in_order(load(path)).peak() for path in sorted(folder.glob("rank*.ilp"))]
    return f"{folder.parent.name} {folder.name}", found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m testbed.h200", description="Measure Paddle's plan and Interlace's on GPUs.")
    parser.add_argument("--gpus", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "h200", metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT",
                        help="these cases, comma-separated, with * and ? as in a shell; NAME:PLAN+PLAN: these plans")  # fmt: skip
    parser.add_argument("--no-ops", action="store_true", help="leave out single operations and collectives, and the host's costs")
    parser.add_argument("--ranks-at-once", type=int, default=0, metavar="N", help="ranks alive at once; 0: two thirds of the cores")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="S", help="start no run after so many seconds")
    parser.add_argument("--simulate", action="store_true", help="simulate the plans in the folder; nothing is run")
    parser.add_argument("--threads", action="store_true", help="host threads for streams and small sizes: a dry run")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.simulate:
        simulate(args.out)
        return 0
    variant = "threads" if args.threads else "cuda"
    if not args.no_ops:
        _alone(args.out, variant)
        time_collectives(args.out, variant, args.gpus)
    wanted = _chosen(cases(args.gpus), args.only)
    if args.threads:
        wanted = [replace(case, args=(*case.args, *DRY)) for case in wanted]
    ranks = max(args.ranks_at_once or (os.cpu_count() or 1) * 2 // 3, args.gpus)
    Bench(args.out, variant, args.gpus, ranks, time.monotonic() + args.budget).run(wanted)
    return 0


def _chosen(found: Sequence[Case], only: str) -> list[Case]:
    """What `--only` names, in its order; everything where it names nothing."""
    if not only:
        return list(found)
    chosen: list[Case] = []
    for word in only.split(","):
        name, _, plans = word.partition(":")
        named = [case for case in found if fnmatch.fnmatchcase(case.name, name)]
        if not named:
            raise SystemExit(f"no case {name!r}; there are {[case.name for case in found]}")
        for case in named:
            kept = tuple(each for each in case.plans if not plans or each[0] in plans.split("+"))
            chosen.append(replace(case, plans=kept))
    return chosen


def _alone(out: Path, variant: str) -> None:
    """What needs no world, in processes of their own."""
    for function in ("time_ops", "time_host") if variant == "cuda" else ("time_host",):
        command = [sys.executable, "-c", f"import pathlib, testbed.h200 as h; h.{function}(pathlib.Path({os.fspath(out)!r}))"]
        env = {**os.environ, "TESTBED_VARIANT": variant, "PYTHONPATH": _python_path()}
        try:
            subprocess.run(command, env=env, cwd=ROOT, timeout=ALONE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            print(f"{function}: no end within {ALONE_TIMEOUT_S:g} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
