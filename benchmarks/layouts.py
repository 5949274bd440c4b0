"""Searches for layouts: number of candidates, how many bounds exclude, what is built and planned, and the time; all steps are simulated.

The programs are built by Paddle without parameters. Results include the load of the machine, as other work makes building slower.

With `--known` nothing is built, and what interrupted searches have found is stored. Other cases in FILE are kept.

    PYTHONPATH=. python benchmarks/layouts.py [--case NAME ...] [--keep DIR [--known]] [--jobs J] [-o FILE]     (with Paddle)
    PYTHONPATH=. python benchmarks/layouts.py --quick [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import RESULTS, ROOT, meta, store

from benchmarks.gpu.training import DEVICE, LAYOUT_MODEL, LAYOUT_WORDS, LAYOUTS

GPT, LLAMA, MOE = "examples/gpt.py", "examples/llama.py", "examples/moe.py"
VARIES = "--pp {pp} --mp {mp} --dp {dp} --micro-batches {m} --sharding-stage {sharding} --recompute {recompute}"
HALF = "--attention flash --amp O2 --master-grad"
FEW = (
    "--gpus 8 --layers 32 --heads 32 --batch-size 64 --try pp=1,2,4 --try mp=1,2,4,8 --try vpp=1 --try m=8 --try sharding=0,1 "
    "--try recompute=none --finalists 1"
)
ROOMY = "--device h200 --memory 125GB --config baseline"
"""With this much memory Paddle's own plans fit, so that only the search is compared."""
LLAMA_FEW = f"--preset llama-7b {HALF} --batch-size 64 --vpp {{vpp}} {VARIES}"
MEASURED = {gpus: [each for each in LAYOUTS if each["pp"] * each["mp"] * each["dp"] == gpus] for gpus in (2, 4)}
"""Layouts that `benchmarks.gpu.training` trains, by the number of GPUs."""
CASES: dict[str, tuple[str, str, str]] = {
    "GPT-3 6.7B layers, 4 of them, 4 GPUs": (
        GPT,
        "--gpus 4 --layers 4 --heads 32 --batch-size 16 --layouts 8",
        f"--preset gpt3-6.7b --layers 4 {HALF} --batch-size 16 {VARIES}",
    ),
    "GPT-3 6.7B, 8 GPUs": (
        GPT,
        "--gpus 8 --layers 32 --heads 32 --batch-size 64 --layouts 8 --finalists 1",
        f"--preset gpt3-6.7b {HALF} --batch-size 64 --vpp {{vpp}} {VARIES}",
    ),
    "Llama 7B, 8 GPUs, all layouts of few values": (LLAMA, f"{FEW} --all", LLAMA_FEW),
    "Llama 7B, 8 H200, all layouts of few values": (LLAMA, f"{FEW} {ROOMY} --all", LLAMA_FEW),
    "Llama 7B, 8 H200, few values": (LLAMA, f"{FEW} {ROOMY} --layouts 6", LLAMA_FEW),
    "Llama 7B, 64 GPUs": (
        LLAMA,
        "--gpus 64 --gpus-a-host 8 --layers 32 --heads 32 --batch-size 512 --try m=8 --try recompute=none --try sharding=0,1 --layouts 4 "
        "--finalists 1",
        f"--preset llama-7b {HALF} --batch-size 512 {VARIES}",
    ),
    "Llama 13B, 8 GPUs": (
        LLAMA,
        "--gpus 8 --layers 40 --heads 40 --batch-size 64 --try sharding=0,1 --layouts 6 --finalists 1",
        f"--preset llama-13b {HALF} --batch-size 64 {VARIES}",
    ),
    "Llama 13B, 16 GPUs, listed": (
        LLAMA,
        "--gpus 16 --gpus-a-host 8 --layers 40 --heads 40 --batch-size 128 --all --finalists 0",
        f"--preset llama-13b {HALF} --batch-size 128 --vpp {{vpp}} {VARIES}",
    ),
    "Llama 13B, 64 GPUs": (
        LLAMA,
        "--gpus 64 --gpus-a-host 8 --layers 40 --heads 40 --batch-size 512 --try sharding=0,1 --layouts 6 --finalists 1",
        f"--preset llama-13b {HALF} --batch-size 512 {VARIES}",
    ),
    "Llama 7B, 512 GPUs": (
        LLAMA,
        "--gpus 512 --gpus-a-host 8 --layers 32 --heads 32 --batch-size 2048 --try m=4,8 --try recompute=none --try sharding=1 --layouts 4 "
        "--finalists 1",
        f"--preset llama-7b {HALF} --batch-size 2048 {VARIES}",
    ),
    "Llama 13B, 512 GPUs": (
        LLAMA,
        "--gpus 512 --gpus-a-host 8 --layers 40 --heads 40 --batch-size 2048 --try m=4,8 --try recompute=none --try sharding=1 --layouts 4 "
        "--finalists 1",
        f"--preset llama-13b {HALF} --batch-size 2048 {VARIES}",
    ),
    "GPT-3 175B, 1,024 GPUs": (
        GPT,
        "--gpus 1024 --gpus-a-host 8 --layers 96 --heads 96 --batch-size 1536 --try sharding=0,1 --layouts 4 --finalists 1",
        f"--preset gpt3-175b {HALF} --batch-size 1536 {VARIES}",
    ),
    "GPT-3 175B, 1,024 GPUs, with chunks and a split sequence": (
        GPT,
        "--gpus 1024 --gpus-a-host 8 --layers 96 --heads 96 --batch-size 1536 --try pp=4,8,16 --try vpp=1,6,12 --try sharding=1 "
        "--try sequence=sequence-parallel,no-sequence-parallel --try recompute=none,full --layouts 4 --finalists 1 "
        "--config benchmarks/mixed.yaml",
        f"--preset gpt3-175b --attention flash --amp O2 --batch-size 1536 --vpp {{vpp}} --{{sequence}} {VARIES}",
    ),
    "experts, 8 of 7B, 64 GPUs": (
        MOE,
        "--gpus 64 --gpus-a-host 8 --layers 32 --heads 32 --batch-size 512 --try dp=4,8 --try m=64,128 --try sharding=0 --layouts 8 "
        "--finalists 1",
        f"--preset 8x7b {HALF} --batch-size 512 {VARIES}",
    ),
    **{
        f"GPT-3 6.7B layers, 4 of them, {gpus} GPUs, listed": (
            GPT,
            f"--gpus {gpus} --layers 4 --heads 32 --batch-size 32 --all --device {DEVICE.relative_to(ROOT)} --finalists {len(listed)}",
            " ".join((*LAYOUT_MODEL, *LAYOUT_WORDS)),
        )
        for gpus, listed in MEASURED.items()
    },
}
LISTED: dict[str, Sequence[Mapping[str, int | str]]] = {
    **{f"GPT-3 6.7B layers, 4 of them, {gpus} GPUs, listed": listed for gpus, listed in MEASURED.items()},
    "Llama 13B, 16 GPUs, listed": [
        {"pp": 4, "mp": 1, "dp": 4, "vpp": 10, "m": 32, "sharding": 1, "recompute": "none"},
        {"pp": 4, "mp": 1, "dp": 4, "vpp": 1, "m": 32, "sharding": 1, "recompute": "none"},
        {"pp": 2, "mp": 1, "dp": 8, "vpp": 1, "m": 16, "sharding": 1, "recompute": "none"},
        {"pp": 1, "mp": 2, "dp": 8, "vpp": 1, "m": 16, "sharding": 1, "recompute": "none"},
        {"pp": 1, "mp": 1, "dp": 16, "vpp": 1, "m": 8, "sharding": 1, "recompute": "none"},
    ],
}
"""Layouts of cases that list them in a file of alternatives; the first one is that of NVIDIA's summary of NeMo 24.09."""
COMMON = "--memory 70GB --device h100"
QUICK = (GPT, "--gpus 2 --layers 2 --heads 4 --batch-size 4 --layouts 2 --finalists 1 --try m=1,2", f"{VARIES} --layers 2 --batch-size 4")


def searched(
    case: tuple[str, str, str],
    keep: Path,
    listed: Sequence[Mapping[str, int | str]] = (),
    *,
    known: bool = False,
    jobs: int = 0,
    common: str = COMMON,
) -> dict[str, Any]:
    """One search, in a separate process.

    Args:
        case: Script, arguments of `choose`, arguments of the script.
        keep: The folder of the search; time and programs of earlier runs in it are counted too.
        listed: Layouts for a file of alternatives.
        known: Whether the search is not continued.
        jobs: Number of processes at a time; 0 for one per core.
        common: Arguments of `choose` before those of the case.
    """
    script, words, arguments = case
    words += f" --jobs {jobs}" if jobs else ""
    answer_file = keep / "answer.json"
    command = [sys.executable, "-m", "interlace", "choose", script, *common.split(), *words.split()]
    keep.mkdir(parents=True, exist_ok=True)
    if listed:
        (keep / "alternatives.yaml").write_text(json.dumps({"layouts": listed}))
        command += ["--alternatives", str(keep / "alternatives.yaml")]
    command += ["--layouts", "0", "--finalists", "0"] if known else []
    command += ["-o", str(keep), "--json", str(answer_file), "--", *arguments.split()]
    environment, spent = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}, keep / "spent.json"
    runs: list[dict[str, float]] = json.loads(spent.read_text()) if spent.is_file() else []
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        figures = {"wall_s": time.perf_counter() - start, "processor_s": used, "load": os.getloadavg()[1]}
        if after.ru_maxrss > before.ru_maxrss:  # otherwise a process of an earlier case held more
            figures["peak_rss_bytes"] = after.ru_maxrss * 1024
        runs.append(figures)
        spent.write_text(json.dumps(runs))
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-3000:]}")
    row = row_of(json.loads(answer_file.read_text()))
    runs[-1]["built"] = row["counts"]["programs built"]
    spent.write_text(json.dumps(runs))
    row["counts"]["programs built"] = sum(int(each.get("built", 0)) for each in runs)
    peaks = [each["peak_rss_bytes"] for each in runs if "peak_rss_bytes" in each]
    return {
        "command": f"interlace choose {script} {common} {words} -- {arguments}",
        **({"alternatives": listed} if listed else {}),
        **row,
        **{name: round(sum(each[name] for each in runs), 1) for name in ("wall_s", "processor_s")},
        "runs": len(runs),
        "interrupted": known,
        "programs": len([*(keep / "programs").glob("*.gz")]),
        **({"peak_rss_bytes": int(max(peaks))} if len(peaks) == len(runs) else {}),
        "load": round(max(each["load"] for each in runs), 1),
    }


def row_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The row that is stored for an answer."""
    rows = [row for row in answer["rows"] if row["paddles"] or row["ours"]]
    kept = [
        {
            "layout": row["layout"],
            **{
                f"{whose}_{name}": row[whose][name]
                for whose in ("paddles", "ours")
                if row[whose]
                for name in ("step_ns", "peak_bytes", "fits", "rel_error", "compute_ns", "exposed_ns", "bubble_ns")
            },
            "least_ns": row["least_ns"],
        }
        for row in rows
    ]
    reasons = [row["why"] for row in answer["rows"] if row["state"] == "refused"]
    holds = sum("holds" in row["why"] for row in answer["rows"] if row["state"] == "excluded")
    return {
        "simulated": True,
        "counts": answer["counts"],
        "excluded_by_memory": holds,
        "excluded_by_time": answer["counts"]["excluded"] - holds,
        "refused": sorted({reason[:160] for reason in reasons}),
        "tokens": answer["tokens"],
        "gap": answer["gap"],
        "layouts": kept,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--keep", type=Path, help="folder of what is built; what is there already is not built again")
    parser.add_argument("--known", action="store_true", help="build nothing: what an interrupted search has in --keep")
    parser.add_argument("--jobs", type=int, default=0, metavar="J", help="processes of a search at once (default: all cores)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "layouts.json")
    args = parser.parse_args(argv)
    stored: dict[str, Any] = json.loads(args.output.read_text()) if args.output.is_file() else {"cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in ["quick"] if args.quick else args.case:
            keep = (args.keep or Path(folder)) / name.replace(" ", "_").replace(",", "")
            case, listed = QUICK if args.quick else CASES[name], LISTED.get(name, ())
            stored["cases"][name] = searched(case, keep, listed, known=args.known, jobs=args.jobs)
            store("layouts", {**meta(), "cases": stored["cases"]}, args.output)
            print(f"{name}: {json.dumps(stored['cases'][name]['counts'])}, {stored['cases'][name]['wall_s']} s", flush=True)


if __name__ == "__main__":
    main()
