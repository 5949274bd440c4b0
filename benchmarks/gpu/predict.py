"""Predict what `benchmarks.gpu.training` will measure: `python -m benchmarks.gpu.predict --gpus N --only ... --device h100 --out FILE`.

No GPU is needed. Each case's programs are built on the CPU and planned as its run will be, and every plan and Paddle's own is simulated,
without and with the device's limit of power: steps, clocks, joules a step, peaks. A run's own plan is made from the program that the
testbed captures, whose conversions between the CPU's types may differ; its record says what was planned.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import results, training
from testbed.gpus import ROOT


def predict(case: training.Case, device: str, out: Path) -> dict[str, results.Row]:
    """By plan, what is simulated; plans lie below `out` as those of a run do."""
    programs = out / "programs" / case.name
    if not programs.exists():
        script = os.fspath(ROOT / "examples" / f"{case.script}.py")
        _run("dump", script, "--world", str(case.world), "-o", os.fspath(programs), "--", *case.args)
    for plan in case.plans:
        if plan.config is None:
            continue
        config = out / f"{plan.name}.yaml"
        config.write_text(f"device: {device}\n{plan.config}")
        _run("plan", os.fspath(programs), "--config", os.fspath(config), "-o", os.fspath(out / "plans" / case.name / plan.name))
    return {name.partition(" ")[2]: row for name, row in results.simulate(out).items() if name.startswith(f"{case.name} ")}


def _run(*words: str) -> None:
    done = results._interlace(*words)
    if done.returncode:
        raise SystemExit(f"interlace {' '.join(words)}: {(done.stderr or done.stdout)[-1500:]}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.predict", description="Predict what benchmarks.gpu.training measures.")
    parser.add_argument("--gpus", type=int, default=2, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases and plans, as for benchmarks.gpu.training")
    parser.add_argument("--device", action="append", required=True, metavar="PROFILE", help="by name or path; may be given more than once")
    parser.add_argument("--steps", type=int, metavar="N", help="as for benchmarks.gpu.training")
    parser.add_argument("--threads", action="store_true", help="the small sizes of its dry run")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="predictions; of other cases and devices there, what is there stays"
    )
    args = parser.parse_args(argv)
    stored: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"predictions": []}
    with tempfile.TemporaryDirectory() as folder:
        for case in training.chosen_cases(args.gpus, args.only, args.threads, args.steps):
            for device in args.device:
                head = {"case": case.name, "device": Path(device).stem}
                found = predict(case, device, _room(Path(folder), Path(device).stem))
                kept = [row for row in stored["predictions"] if (row["case"], row["device"]) != (head["case"], head["device"])]
                made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                rows = [{**head, "plan": plan.name, "made": made, **found.get(plan.name, {})} for plan in case.plans if plan.name in found]
                stored["predictions"] = kept + rows
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(stored, separators=(",", ":")).replace('{"case"', '\n{"case"') + "\n")
                for row in rows:
                    print(f"{row['case']} {row['device']} {row['plan']}: {row.get('step_ms')} ms, limited {row.get('limited')}", flush=True)
    return 0


def _room(folder: Path, device: str) -> Path:
    """A folder of its own for each device, with the same programs."""
    (folder / "programs").mkdir(exist_ok=True)
    (folder / device).mkdir(exist_ok=True)
    link = folder / device / "programs"
    if not link.exists():
        link.symlink_to(folder / "programs")
    return folder / device


if __name__ == "__main__":
    sys.exit(main())
