"""The power that communication adds in training steps, beside computation or while it waits for its peers.

`python -m benchmarks.gpu.beside_energy --device h100 [--of waiting_w] -o FILE`

Uses stored runs with a plan and Paddle's baseline that record the host's time around steps (earlier runs measured too few steps): those
with tensor parallelism and no pipeline for `Power.beside_w`; those with a pipeline, whose baseline waits more than plans do, for
`Power.waiting_w`. Each run is simulated with and without these watts. The result is the value with which the simulated energies of plans,
relative to the baseline's, are closest to the measured ones (least squares; each configuration, which is a case and plan, counts once with
the mean of its runs). The error of a configuration is computed with the value from all others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.profile import DeviceProfile
from interlace.grouping import grouped
from interlace.ir import load
from interlace.ir.target import GPU
from interlace.report.accuracy import BASELINE, FLOAT32, kind_of, place_of, results_folder, runnable, stored_plans, stored_runs
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate

PROBE_W = 100.0
"""Energy is assumed to be linear in the watts; this is the second point of the line."""
Row = dict[str, Any]


class Change(NamedTuple):
    """A plan's energy relative to the baseline's, minus 1: measured, simulated without the watts, and what each watt adds."""

    measured: float
    without: float
    per_watt: float


MESHES: dict[str, Callable[[str], bool]] = {
    "beside_w": lambda place: "mp" in place and "pp" not in place,
    "waiting_w": lambda place: "pp" in place,
}
"""Field of `Power` -> the meshes whose runs determine it best."""


def changes(device: str, profile: DeviceProfile, folder: Path, field: str) -> Iterator[tuple[tuple[str, str], Change]]:
    """Case, plan and change of each comparable run."""
    costs = [CostModel(_with_watts(profile, field, watts)) for watts in (0.0, PROBE_W)]
    runs = (row for row in stored_runs(folder, device) if row.get("power") and row["traced_step"].get("host_around_us"))
    rows = [row for row in runs if MESHES[field](place_of(row["case"])) and not row["case"].startswith(FLOAT32)]
    baselines = {(row["case"], row["sitting"], row["file"]): row for row in rows if row["plan"] == BASELINE}
    known: dict[tuple[str, ...], list[float]] = {}
    with stored_plans(folder, device) as plans:
        for row in rows:
            baseline = baselines.get((row["case"], row["sitting"], row["file"]))
            if kind_of(row["plan"]) == BASELINE or baseline is None or not all("joules_a_step" in each for each in row["power"]):
                continue
            mine, theirs = plans(row), plans(baseline)
            if mine and theirs:
                own, base = (_joules(known, files, costs) for files in (mine, theirs))
                without, probe = (one / other - 1 for one, other in zip(own, base, strict=True))
                measured = _measured(row) / _measured(baseline) - 1
                yield (row["case"], row["plan"]), Change(measured, without, (probe - without) / PROBE_W)


def _with_watts(profile: DeviceProfile, field: str, watts: float) -> DeviceProfile:
    assert profile.power is not None
    return msgspec.structs.replace(profile, power=msgspec.structs.replace(profile.power, **{field: watts}))


def _joules(known: dict[tuple[str, ...], list[float]], files: Sequence[Path], costs: Sequence[CostModel]) -> list[float]:
    key = tuple(map(str, files))
    if key not in known:
        programs = runnable([load(file) for file in files], costs[0])
        known[key] = [sum(simulate(programs, each, Options.of(GPU, power=True), with_memory=False).joules) for each in costs]
    return known[key]


def _measured(row: Row) -> float:
    return fmean(each["joules_a_step"] for each in row["power"])


def fit(found: Sequence[Change]) -> float:
    """Watts with which the simulated changes are nearest to the measured ones; not below 0.

    >>> fit([Change(-0.02, -0.04, 0.0001), Change(-0.03, -0.04, 0.0001)])
    150.0
    """
    slope = sum(each.per_watt**2 for each in found)
    return max(0.0, round(sum(each.per_watt * (each.measured - each.without) for each in found) / slope, 1)) if slope else 0.0


def summary(found: Mapping[tuple[str, str], Sequence[Change]]) -> Row:
    """The fit of all configurations, and each one's error with the fit of the others."""
    mean = {key: Change(*(fmean(part) for part in zip(*runs, strict=True))) for key, runs in found.items()}
    rows = []
    for (case, plan), each in sorted(mean.items()):
        watts = fit([other for key, other in mean.items() if key != (case, plan)])
        row = {"case": case, "plan": plan, "num_runs": len(found[case, plan]), "others_w": watts}
        changes = {"measured": each.measured, "without": each.without, "predicted": each.without + watts * each.per_watt}
        rows.append(row | {key: round(value, 4) for key, value in changes.items()})
    return {"watts": fit(list(mean.values())), "configurations": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.beside_energy", description="Energy of communication in training steps."
    )
    parser.add_argument("--of", choices=MESHES, default="beside_w", help="field of the profile's power part")
    parser.add_argument("--device", required=True, metavar="NAME", help="the shipped profile of this name, and the runs stored for it")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    found = summary(grouped(changes(args.device, load_profile(args.device), results_folder(), args.of)))
    if not found["configurations"]:
        parser.error(f"no stored run of {args.device} says anything about {args.of}: joules of its steps, and Paddle's baseline beside it")
    lines = ",\n".join(json.dumps(row) for row in found["configurations"])
    args.output.write_text(f'{{"watts": {found["watts"]}, "configurations": [\n{lines}\n]}}\n')
    print(f"{found['watts']} W from {len(found['configurations'])} configurations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
