"""Gains of stored plans as they were measured on two H200, and as they are simulated without and with the limit of power.

    python benchmarks/power_accuracy.py [--out FILE]

The plans are those of `results/h200/plans_*.tar.xz`, made when they were measured, and Paddle's own of the same sitting; steps are those of
`testbed_layers.json`. Simulated with the shipped profile, of which nothing is fitted to steps. The testbed's attention is faster than the
profile's, so that steps come out too long; gains compare two steps and hardly depend on it.
"""

from __future__ import annotations

import argparse
import json
import tarfile
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from measuring import RESULTS, meta, store

from interlace.cost_model import CostModel, load_profile
from interlace.ir import load
from interlace.ir.dump import find_dumps
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from interlace.scheduler.target import GPU

H200 = RESULTS / "h200"
ARCHIVES = {
    "2026-11-22 06:25": ("plans_2026-11-22", "2026-11-22_0625"),
    "2026-11-22 06:35": ("plans_2026-11-22", "2026-11-22_0635"),
    "2026-11-22 20:17": ("plans_2026-11-22_evening", "20-17"),
    "2026-11-22 21:03": ("plans_2026-11-22_evening", "21-03"),
}
"""Sitting -> archive and its folder, of those that hold Paddle's baseline plans too."""
LEAST_GAIN = 0.01
"""Smaller gains are left out of ratios: they are within the spread of steps."""
Row = dict[str, Any]


def rows() -> list[Row]:
    """Every measured plan that is stored: its step measured, simulated, and with the limit of power, with clocks and energy."""
    cost, found = CostModel(load_profile("h200")), []
    with tempfile.TemporaryDirectory() as folder:
        for name in {archive for archive, _ in ARCHIVES.values()}:
            with tarfile.open(H200 / f"{name}.tar.xz") as archive:
                archive.extractall(Path(folder) / name, filter="data")
        for run in json.loads((H200 / "testbed_layers.json").read_text())["runs"]:
            where = ARCHIVES.get(run["sitting"][:16])
            plan = Path(folder, *where, run["case"], run["plan"]) if where and "step_ms" in run else None
            files = find_dumps([str(plan)]) if plan and plan.is_dir() else []
            if len(files) == run["world"]:
                found.append(
                    {
                        "case": run["case"],
                        "plan": run["plan"],
                        "sitting": run["sitting"][:16],
                        "measured_ms": run["step_ms"]["median"],
                        **_simulated([load(file) for file in files], cost),
                    }
                )
    return found


def _simulated(programs: list[Any], cost: CostModel) -> Row:
    without, limited = (simulate(programs, cost, Options.of(GPU, power=power), with_memory=False) for power in (False, True))
    return {
        "simulated_ms": round(without.step_ns / 1e6, 2),
        "limited_ms": round(limited.step_ns / 1e6, 2),
        "mhz": [round(limited.mean_mhz(at)) for at in range(len(programs))],
        "joules": [round(each, 1) for each in limited.joules],
    }


def gains(found: list[Row]) -> list[Row]:
    """Gain over Paddle's baseline of the same sitting, measured and both ways simulated."""
    stock = {(row["sitting"], row["case"]): row for row in found if row["plan"] == "stock"}
    names = ("measured_ms", "simulated_ms", "limited_ms")
    return [
        {
            "case": row["case"],
            "plan": row["plan"],
            "sitting": row["sitting"],
            **{name.removesuffix("_ms"): round(own[name] / row[name] - 1, 4) for name in names},
        }
        for row in found
        if row["plan"] != "stock" and (own := stock.get((row["sitting"], row["case"])))
    ]


def summary(found: list[Row]) -> Row:
    """How far gains of one percent and more are off: median ratio, median relative error, how many have the right sign, mean points."""
    large = [row for row in found if abs(row["measured"]) >= LEAST_GAIN]
    return {
        "gains": len(large),
        **{
            name: {
                "median_ratio": round(median(row[name] / row["measured"] for row in large), 2),
                "median_relative_error": round(median(abs(row[name] / row["measured"] - 1) for row in large), 2),
                "right_sign": sum(row[name] * row["measured"] > 0 for row in large),
                "mean_points": round(100 * sum(abs(row[name] - row["measured"]) for row in large) / len(large), 2),
            }
            for name in ("simulated", "limited")
        },
    }


def main() -> None:
    """Simulate and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/power_accuracy.json")
    args = parser.parse_args()
    steps = rows()
    found = gains(steps)
    result = {**meta(), "profile": "h200", "summary": summary(found), "gains": found, "steps": steps}
    store("power_accuracy", result, args.out)
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
