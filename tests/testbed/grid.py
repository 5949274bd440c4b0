"""The grid of equal results, too long for every run of the tests: `python -m tests.testbed.grid [-o FILE]` (ten minutes on two cores).

A small GPT trains four steps on the testbed at every point of stages x chunks x micro-batches x offload, under random delays, with
`dx-first` and one optimizer job; losses and parameters are compared with Paddle's baseline on the testbed, bit for bit. Points that
Paddle itself cannot train (VPP wants micro-batches in multiples of the stages) are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from interlace.errors import InterlaceError
from interlace.local.launch import LaunchResult, launch
from testbed.build import build
from tests.training.cases import EXAMPLES

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "grid.json"
FRACTIONS = (0.0, 0.5, 1.0)
STEPS = 4


def points() -> Iterator[tuple[int, int, int]]:
    """Stages, chunks a stage, micro-batches."""
    for pp in (1, 2, 4):
        for vpp in (1, 2) if pp > 1 else (1,):
            for micro_batches in (pp, 2 * pp, 2 * pp + 1):
                if vpp == 1 or micro_batches % pp == 0:
                    yield pp, vpp, micro_batches


def words(pp: int, vpp: int, micro_batches: int) -> list[str]:
    """Arguments of the example. Micro-batches of one sequence meet a fault of Paddle's in-place pass at pp 1 (docs/paddle-limits.md)."""
    count = f"--batch-size {2 * micro_batches} --layers {max(2, pp * vpp)} --steps {STEPS}"
    if pp == 1:
        return f"{count} --gradient-accumulation {micro_batches}".split()
    return f"{count} --pp {pp} --micro-batches {micro_batches} {f'--vpp {vpp}' if vpp > 1 else ''}".split()


def train(point: tuple[int, int, int], fraction: float | None, folder: Path, seed: int) -> LaunchResult:
    """Train a point: with this share of the activations moved, or (None) by Paddle's plan."""
    env = {"INTERLACE_TARGET": "testbed", "GLOG_minloglevel": "2"}
    if fraction is None:
        env["INTERLACE_DISABLE"] = "1"
    else:
        options: dict[str, Any] = {"device": "h200", "schedule_1f1b": {"interleave": "dx-first", "only_gains": False}}
        options |= {"offload_activations": {"fraction": fraction, "min_bytes": 64}} if fraction else {}
        (folder / "config.yaml").write_text(yaml.safe_dump(options))
        env |= {"INTERLACE_CONFIG": os.fspath(folder / "config.yaml"), "TESTBED_DELAYS": f"seed={seed},permille=25,max_us=3000"}
    return launch(EXAMPLES / "gpt.py", words(*point), point[0], env, None, folder / "logs", 120.0)


def compared(point: tuple[int, int, int], folder: Path, seed: int) -> list[dict[str, Any]]:
    """A row for each share of offload."""
    baseline = _bits(train(point, None, folder, 0))
    rows = []
    for fraction in FRACTIONS:
        row: dict[str, Any] = dict(zip(("pp", "vpp", "micro_batches"), point, strict=True)) | {"fraction": fraction, "seed": seed}
        try:
            row["same"] = _bits(train(point, fraction, folder, seed)) == baseline
        except InterlaceError as error:
            row |= {"same": False, "error": str(error)[-500:]}
        rows.append(row)
    return rows


def _bits(result: LaunchResult) -> list[Any]:
    return [([loss.raw_hex for loss in report.losses], report.parameters) for report in result.reports]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 where a point differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.testbed.grid", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=RESULT)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    build()
    rows: list[dict[str, Any]] = []
    for point in points():
        with tempfile.TemporaryDirectory() as folder:
            rows += compared(point, Path(folder), args.seed)
        print(rows[-len(FRACTIONS) :], flush=True)
    sys.path.insert(0, os.fspath(ROOT / "benchmarks"))
    from measuring import meta, store

    store("grid", {**meta(), "steps": STEPS, "rows": msgspec.to_builtins(rows)}, args.out)
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
