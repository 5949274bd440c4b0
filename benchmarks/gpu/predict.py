"""Predict what `benchmarks.gpu.training` will measure: `python -m benchmarks.gpu.predict --gpus N --only ... --device h100 --out FILE`.

No GPU is needed. The programs of each case are built on the CPU and planned like its run; every plan and Paddle's own are simulated without
and with the device's power limit: steps, clocks, joules per step, peaks. The plan of a run is made from the program that the testbed
captures, whose type conversions may differ from those on the CPU; its record says what was planned.

`python -m benchmarks.gpu.predict --out FILE --against MEASURED`, with a file of `benchmarks.gpu.results`, prints both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import results, training


def predict(case: training.Case, device: str, out: Path) -> dict[str, results.Row]:
    """Plan -> simulated results; plans are stored below `out` like those of a run."""
    programs = out / "programs" / case.name
    if not programs.exists():
        _run("dump", os.fspath(case.path), "--world", str(case.world), "-o", os.fspath(programs), "--", *case.args)
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
    parser.add_argument(
        "--against", type=Path, metavar="MEASURED", help="predict nothing; print FILE's predictions beside what was measured"
    )
    parser.add_argument("--device", action="append", default=[], metavar="PROFILE", help="by name or path; may be given more than once")
    parser.add_argument("--steps", type=int, metavar="N", help="as for benchmarks.gpu.training")
    parser.add_argument("--threads", action="store_true", help="the small sizes of its dry run")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="predictions; of other cases and devices there, what is there stays"
    )
    args = parser.parse_args(argv)
    if args.against:
        print(table(json.loads(args.out.read_text())["predictions"], json.loads(args.against.read_text())))
        return 0
    if not args.device:
        parser.error("--device PROFILE: which GPUs to predict for?")
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


def table(predictions: Sequence[results.Row], measured: results.Row) -> str:
    """Measured runs with the predictions for their GPU: steps, gains over the baseline of the session, joules of all GPUs, highest peaks.

    Three numbers in a cell are measured, predicted, and predicted with the power limit; two are measured and predicted.
    """
    told = {(row["device"], row["case"], row["plan"]): row for row in predictions}
    runs = {results.run_of(row): row for row in measured["runs"] if "step_ms" in row}
    lines = ["| case | plan | sitting | step ms | gain % | clock MHz | J a step | peak GB |", "| --- " * 8 + "|"]
    for (case, plan, sitting), row in runs.items():
        device = "h200" if "H200" in measured["sittings"][sitting]["gpus"] else "h100"
        given, stock = told.get((device, case, plan), {}), runs.get((case, "stock", sitting))
        if "limited" not in given:
            continue
        base = told.get((device, case, "stock"), {})
        steps = [row["step_ms"]["median"], given["step_ms"], given["limited"]["step_ms"]]
        bases = [stock["step_ms"]["median"], base["step_ms"], base["limited"]["step_ms"]] if stock and "limited" in base else []
        power = [each for each in row.get("power", ()) if "failed" not in each]
        cells = [
            ", ".join(f"{each:.1f}" for each in steps),
            ", ".join(f"{100 * (one / each - 1):+.1f}" for one, each in zip(bases, steps, strict=True))
            if bases and plan != "stock"
            else "",
            f"{_each(each['mhz'] for each in power)}, {_each(given['limited']['mhz'])}",
            f"{sum(each['joules_a_step'] for each in power):.0f}, {sum(given['limited']['joules']):.0f}",
            ", ".join(
                f"{max(peaks) / 1e9:.2f}"
                for peaks in ([each["allocated"] + each["outside"] for each in row["peak_bytes_by_rank"]], given[results.PEAKS])
            ),
        ]
        lines.append(f"| {case} | {plan} | {sitting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _each(clocks: Iterable[float]) -> str:
    return "/".join(f"{each:.0f}" for each in clocks)


def _room(folder: Path, device: str) -> Path:
    """A separate folder for each device, with the same programs."""
    (folder / "programs").mkdir(exist_ok=True)
    (folder / device).mkdir(exist_ok=True)
    link = folder / device / "programs"
    if not link.exists():
        link.symlink_to(folder / "programs")
    return folder / device


if __name__ == "__main__":
    sys.exit(main())
