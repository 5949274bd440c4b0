"""`interlace accuracy`: predictions from profiles for stored training runs, compared with the measurements."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

DESCRIPTION = """Compare predictions with measured training runs: step times, gains over Paddle's baseline, peaks of memory, energy, and the
order of plans by step time. If the plan of a run is stored, it is simulated now, without and with the power limit; otherwise the prediction
is the one made when the run was measured. Neither Paddle nor a GPU is needed."""

DAY = re.compile(r"(\d{4}-\d\d-\d\d( \d\d(:\d\d)?)?)?")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `accuracy` to the command line."""
    parser = subparsers.add_parser("accuracy", help="compare predictions with measured training runs", description=DESCRIPTION)
    parser.add_argument("runs", nargs="?", default="", metavar="FOLDER", help="folder with DEVICE/testbed_*.json (default: the checkout's)")
    parser.add_argument("--device", action="append", metavar="NAME", help="only this device profile, by name or path; may be repeated")
    parser.add_argument(
        "--since", default="", metavar="DAY", help="only runs measured on this day or later, such as 2026-11-27 or '2026-11-27 14:00'"
    )
    parser.add_argument("--each", action="store_true", help="also print every run whose plan is stored")
    parser.add_argument("--json", metavar="FILE", help="write all runs, groups and errors to FILE")
    parser.add_argument("--write", action="store_true", help="store the errors in the profiles; only in a checkout")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    import sys
    from datetime import date

    from interlace.cli.outputs import check_apart, write_json
    from interlace.cli.progress import Alive
    from interlace.cost_model import load_profile, profile_names
    from interlace.errors import ConfigError
    from interlace.report import accuracy

    check_apart({"--json": args.json}, [args.runs] if args.runs else [])
    if args.since and args.write:
        raise ConfigError("--since with --write: profiles store the errors of all runs; leave one of the two out")
    if not _is_day(args.since):
        raise ConfigError(f"--since {args.since}: expected a day, as 2026-11-27, or with an hour, as '2026-11-27 14:00'")
    folder = accuracy.results_folder(args.runs)
    names = args.device or [name for name in profile_names() if accuracy.stored_runs(folder, name, args.since)]
    when = f" since {args.since}" if args.since else ""
    if not names:
        raise ConfigError(f"{folder}: no runs of {', '.join(profile_names())}{when}; expected DEVICE/testbed_*.json in it")
    found: dict[str, Any] = {}

    def tell(line: str) -> None:
        print(f"interlace accuracy: {line}", file=sys.stderr)

    for name in names:
        profile = load_profile(name)
        with Alive("accuracy", f"predicting the runs of {name}"):
            runs = accuracy.predicted_runs(folder, accuracy.folder_of(name, profile), profile, tell, args.since)
        if not runs:
            where = folder / accuracy.folder_of(name, profile)
            raise ConfigError(f"{where}: no measured run{when}; expected testbed_*.json with runs of {profile.device}")
        if args.write and (others := accuracy.of_other_networks(runs)):
            raise ConfigError(
                f"--write: {folder} has runs of {', '.join(others)}, and profiles store errors of GPT and Llama only; leave --write out, "
                "or move these runs elsewhere"
            )
        found[name] = {
            "device": profile.device,
            "accuracy": accuracy.accuracy_of(runs, date.today().isoformat()),
            "groups": groups(runs),
            "runs": [{key: row[key] for key in (*KEPT, *accuracy.PREDICTIONS) if key in row} for row in runs],
        }
        print("\n".join(_lines(name, profile.device, runs, args.each)))
        if args.write:
            print(f"written to {accuracy.write_into(name, found[name]['accuracy'])}")
    write_json(args.json, {"devices": found})
    return 0


def _is_day(since: str) -> bool:
    """Whether a text is empty, a day, or a day and a time.

    >>> [_is_day(each) for each in ("2026-11-27", "2026-11-27 14:00", "", "2026-13-45", "2026-11-27 25:00")]
    [True, True, True, False, False]
    """
    if not DAY.fullmatch(since):
        return False
    day, _, hour = since.partition(" ")
    try:
        return not since or bool(datetime.fromisoformat(f"{day}T{hour or '00'}"))
    except ValueError:
        return False


KEPT = ("case", "plan", "sitting", "world", "file", "step_ms", "joules")
"""What the JSON has of a run, besides its predictions."""


def groups(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors of each prediction, by mesh and kind of plan; small meshes are first, and all runs of a mesh before its kinds."""
    from interlace.report import accuracy

    keys: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(runs, key=lambda row: (row["world"], accuracy.place_of(row["case"]))):
        place = accuracy.place_of(row["case"])
        for kind in ("all", accuracy.kind_of(row["plan"])):
            keys.setdefault((place, kind), []).append(row)
    found = []
    for (place, kind), rows in keys.items():
        if kind != "all":
            stocks = [row for row in keys[place, "all"] if row["plan"] == accuracy.BASELINE]
            rows = rows if kind == accuracy.BASELINE else [*rows, *stocks]
        found.append({"mesh": place, "kind": kind, **_said(rows, kind)})
    return found


def _said(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Errors by prediction. For one kind of plan, the steps are those of that kind, and the gains are those over Paddle's baseline."""
    import msgspec

    from interlace.report import accuracy

    own = [row for row in rows if kind in ("all", accuracy.kind_of(row["plan"]))]
    found: dict[str, Any] = {}
    for how in accuracy.PREDICTIONS:
        every, mine = accuracy.errors(rows, how), accuracy.errors(own, how)
        if mine.steps:
            names = ("steps", "step_bias", "step_median", "step_worst", "pairs", "right_order")
            found[how] = msgspec.to_builtins(msgspec.structs.replace(every, **{name: getattr(mine, name) for name in names}))
            peaks = [abs(accuracy.peak_error(row, how)) for row in own if accuracy.is_compared(row, how) and accuracy.has_peaks(row, how)]
            found[how] |= {"peaks": len(peaks), "peak_worst": round(max(peaks, default=0.0), 4)}
    energies = [row["limited"]["joules"] / row["joules"] - 1 for row in own if row.get("limited") and "joules" in row]
    return found | ({"joules": [round(each, 4) for each in energies]} if energies else {})


def _lines(name: str, device: str, runs: Sequence[dict[str, Any]], each: bool) -> list[str]:
    from interlace.cost_model.profile import is_path
    from interlace.report import accuracy

    now = [row for row in runs if accuracy.is_compared(row, "now")]
    lines = [f"{name} ({device}): {len(runs)} measured runs; the plans of {len(now)} are stored, and simulated now"]
    head = (
        f"  {'mesh, plans':30s}{'steps':>6s}  {'bias, median, worst':24s}{'gains':>6s}  {'ratio, off, points':22s}{'order':>9s}{'peak':>8s}"
    )
    for how, what in accuracy.PREDICTIONS.items():
        if how == "simulated" and is_path(name):  # those predictions were made with other profiles
            continue
        rows = [(f"{row['mesh']}, {row['kind']}", row[how]) for row in groups(runs) if how in row]
        if rows:
            lines += [f"predicted {what}:", head, *(_line(label, said) for label, said in rows)]
            lines.append(_line("all", _said(runs, "all")[how]))
    energies = [(row, row["limited"]["joules"]) for row in runs if row.get("limited") and "joules" in row]
    lines += [
        f"  {row['case']} {row['plan']}: {row['joules']:.1f} J a step measured, {joules:.1f} predicted ({joules / row['joules'] - 1:+.1%})"
        for row, joules in energies
    ]
    if each:
        lines += [
            f"  {row['case']} {row['plan']}: {row['step_ms']['median']:.1f} ms measured, now {row['now']['step_ms']:.1f} "
            f"({accuracy.step_error(row, 'now'):+.1%})"
            + (f", with power {row['limited']['step_ms']:.1f} ({accuracy.step_error(row, 'limited'):+.1%})" if row.get("limited") else "")
            for row in now
        ]
    return lines


def _line(label: str, said: dict[str, Any]) -> str:
    steps = f"{said['step_bias']:+.1%}, {said['step_median']:.1%}, {said['step_worst']:+.1%}"
    gains = f"{said['gain_ratio']:.2f}, {said['gain_median']:.0%}, {100 * said['gain_points']:.1f}" if said["gains"] else ""
    order = f"{said['right_order']}/{said['pairs']}" if said["pairs"] else ""
    peak = f"{said['peak_worst']:.2%}" if said["peaks"] else ""
    return f"  {label:30s}{said['steps']:>6d}  {steps:24s}{said['gains'] or '':>6}  {gains:22s}{order:>9s}{peak:>8s}"
