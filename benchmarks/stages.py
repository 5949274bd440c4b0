"""Large worlds from one rank of each pipeline stage: CPU and wall seconds of `interlace dump --stages`, `plan`, `check`, `timeline` and
`report`, by ranks, micro-batches and layers. GPT-3 6.7B, by default with two layers per stage, `auto` within the memory of Paddle's
baseline.

    python benchmarks/stages.py [--quick] [--work DIR] [-o FILE]

Building with Paddle takes most of the time. With `--work` the programs are kept in DIR, and later runs use them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from measuring import ROOT, meta, store

from interlace.ir import load, save
from interlace.ir.dump import find_dumps

SCRIPT = ROOT / "examples" / "gpt.py"


class Case(msgspec.Struct, frozen=True):
    """A world and its step; `built` is the number of micro-batches with which its programs were built, if it differs."""

    pp: int
    mp: int
    dp: int
    layers: int
    micro_batches: int
    built: int = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.mp * self.dp

    @property
    def folder(self) -> str:
        """Name of the folder of its dumps."""
        return f"pp{self.pp}-mp{self.mp}-dp{self.dp}-l{self.layers}-m{self.built or self.micro_batches}"

    def arguments(self) -> list[str]:
        """Arguments of the script, with one sequence per micro-batch and replica."""
        degrees = {"pp": self.pp, "mp": self.mp, "dp": self.dp, "layers": self.layers, "micro-batches": self.built or self.micro_batches}
        words = [word for name, degree in degrees.items() for word in (f"--{name}", str(degree))]
        return ["--preset", "gpt3-6.7b", "--seq-len", "2048", "--batch-size", str(self.dp * (self.built or self.micro_batches)), *words]


RANKS = [Case(2, 8, 4, 4, 16), Case(4, 8, 4, 8, 16), Case(8, 8, 4, 16, 16), Case(16, 8, 16, 32, 32)]
MICRO_BATCHES = [Case(4, 8, 4, 8, count, 16) for count in (8, 32, 64)]
LAYERS = [Case(4, 8, 4, layers, 16) for layers in (16, 32)]
LONG = [Case(8, 4, 1, 32, 64)]
"""The step whose planning must take less than a minute of wall time."""
QUICK = [Case(2, 2, 2, 2, 4)]


def timed(*words: object) -> tuple[dict[str, float], str]:
    """CPU and wall seconds of a command with all its processes, and its output.

    Raises:
        RuntimeError: The command failed.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([sys.executable, "-m", "interlace", *map(str, words)], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"interlace {words[0]}: exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu_s, 2), "wall_s": round(time.monotonic() - start, 2)}, done.stdout


def dumps_of(case: Case, work: Path) -> tuple[Path, dict[str, float]]:
    """The folder with a case's programs, which are built if they are missing, and the time to build them."""
    folder, took = work / case.folder, work / f"{case.folder}.json"
    if not took.exists():
        seconds, _ = timed("dump", SCRIPT, "--world", case.world, "--stages", "-o", folder, "--", *case.arguments())
        took.write_text(json.dumps(seconds))
    if case.built:
        folder = _with_micro_batches(folder, case.micro_batches, work)
    return folder, json.loads(took.read_text())


def _with_micro_batches(folder: Path, count: int, work: Path) -> Path:
    """The same programs for another number of micro-batches, on which only the scale of the loss depends."""
    other = work / f"{folder.name}-as-m{count}"
    for path in find_dumps([folder]):
        program = load(path)
        pipeline = msgspec.structs.replace(program.pipeline, num_micro_batches=count)
        save(msgspec.structs.replace(program, pipeline=pipeline), other / path.name)
    return other


def measure(case: Case, work: Path) -> dict[str, Any]:
    folder, dump = dumps_of(case, work)
    programs = [load(path) for path in find_dumps([folder])]
    plan, out = work / f"{folder.name}-plan", {}
    row: dict[str, Any] = {
        **msgspec.to_builtins(case),
        "world": case.world,
        "programs": len(programs),
        "ops_a_program": round(sum(len(each.ops) for each in programs) / len(programs)),
        "dump": dump,
    }
    for name, words in {
        "plan": (folder, "--device", "h200", "-o", plan),
        "check": (plan,),
        "timeline": (plan, "-o", work / "trace.json"),
        "report": (plan, "-o", work / "report.html"),
    }.items():
        row[name], out[name] = timed(name, *words)
    return {**row, "safe": "safe: no race" in out["check"], "step": out["plan"].strip().splitlines()[-1]}


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each case."""
    heads = ("ranks", "pp", "layers", "micro-batches", *(f"{name} s" for name in ("dump", "plan", "check", "timeline", "report")))
    lines = ["  ".join(f"{head:>13}" for head in heads)]
    for row in rows:
        cells = [row["world"], row["pp"], row["layers"], row["micro_batches"]]
        cells += [row[name]["cpu_s"] for name in ("dump", "plan", "check", "timeline", "report")]
        lines.append("  ".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small world")
    parser.add_argument("--work", type=Path, help="where programs and plans stay (default: a temporary folder)")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        work = args.work or Path(made)
        work.mkdir(parents=True, exist_ok=True)
        rows = []
        for case in QUICK if args.quick else [*RANKS, *MICRO_BATCHES, *LAYERS, *LONG]:
            rows.append(measure(case, work))
            print(f"{case.folder}, {case.micro_batches} micro-batches: {rows[-1]}", file=sys.stderr, flush=True)
    print(show(rows))
    import paddle

    store("stages", {**meta(paddle=paddle.__version__), "rows": rows}, args.output)


if __name__ == "__main__":
    main()
