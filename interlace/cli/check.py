"""`interlace check`: whether the plans of a world are safe, and what the time of a step consists of."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interlace.cli.plans import add_partial
from interlace.cli.target import Setting, add_options

if TYPE_CHECKING:
    from interlace.cli.plans import PlanFile
    from interlace.ir import Program
    from interlace.scheduler.hazards import Finding

COLUMNS = ("step_ns", "compute_ns", "exposed_comm_ns", "bubble_ns", "host_ns")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `check` to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="prove that plans have no races, deadlocks or premature frees; predict the step",
        description="Check the plans or dumps of all ranks of a world together. Neither Paddle nor a GPU is needed.",
        epilog="Exit code 0: safe; 1: the plan is not safe, or was changed after it was made; 2: the files or options are wrong.",
    )
    parser.add_argument("files", nargs="+", metavar="PLAN_OR_DUMP", help="dump or plan files, or folders of them")
    add_options(parser)
    add_partial(parser)
    parser.add_argument("--all", action="store_true", help="print every finding (default: many are summarized, one line per class)")
    parser.add_argument("--json", metavar="FILE", help="write all findings and the times to FILE")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 if the plan is safe, 1 if it is not or was changed, 2 for user errors."""
    from interlace.cli.outputs import check_apart, write_json
    from interlace.cli.plans import read_files, require_world
    from interlace.ir.equivalent_ranks import missing_ranks
    from interlace.planning.loaded import why_not_its_record
    from interlace.scheduler.hazards import check

    check_apart({"--json": args.json}, [*args.files, args.device])
    files = read_files(args.files)
    setting = Setting.of(files, args).of_plans(files)
    require_world(files, args.partial, is_proved=True)
    programs = sorted((file.program for file in files), key=lambda program: program.rank)
    faults = {path: why_not_its_record(path, program, record) for path, program, record in files if record}
    findings = [*check(programs, setting.target), *_breaks([file for file in files if faults.get(file.path) == ""])]
    scheduled = all(program.jobs for program in programs)
    times, imbalance, stall = _times(programs, setting) if scheduled and not any(f.kind in STALLS for f in findings) else ([], "", "")
    write_json(
        args.json,
        {
            "device": setting.profile,
            "target": setting.target.name,
            "ranks": times,
            "imbalance": imbalance,
            "findings": findings,
            "stall": stall,
        },
    )
    changed = [fault for fault in faults.values() if fault]
    said = [*_head(programs, setting.target.name), *changed, *_finding_lines(findings, args.all, bool(missing_ranks(programs)))]
    print("\n".join([*said, *([stall] if stall else []), *_time_lines(times, imbalance, setting), *_power_lines(times)]))
    return 1 if findings or stall or changed else 0


STALLS = frozenset({"deadlock", "collective-order", "p2p-mismatch", "event-order", "read-before-write", "wrong-group"})
"""Classes of findings with which a step cannot be simulated."""


def _breaks(files: Sequence[PlanFile]) -> list[Finding]:
    """A finding for each pass after which ranks have different orders of communication, according to the records of plans."""
    from interlace.ir import load
    from interlace.planning.orders import history_of
    from interlace.scheduler.hazards.pass_orders import breaks

    histories = [
        history_of(load(path.parent / "captured" / path.name), planned, record.captured_orders, record.reports)
        for path, planned, record in files
        if record
    ]
    return [each.finding() for each in breaks(histories)]


def _times(programs: Sequence[Program], setting: Setting) -> tuple[list[dict[str, Any]], str, str]:
    """The parts of each rank's simulated step, and a text about imbalance between stages; or, as the third, why a step cannot be simulated.
    Missing ranks count as always ready."""
    from interlace.errors import PlanError
    from interlace.ir.equivalent_ranks import missing_ranks
    from interlace.planning.outcome import Step
    from interlace.report.causes import held, waits
    from interlace.report.outcome import imbalance
    from interlace.report.page.tables import communication_of
    from interlace.scheduler.memory.pools import reserved_bytes

    try:
        result = setting.simulate(programs)
    except PlanError as error:
        return [], "", f"no times: {error}"
    names = (*COLUMNS, "hidden_comm_ns", "peak_bytes", "pinned_bytes")
    times = [
        {
            "rank": rank.rank,
            **{name: int(getattr(rank, name)) for name in names},
            "pools_bytes": reserved_bytes([result.memory[at]], setting.target),
            "ranks": list(programs[at].ranks),
            "joules": round(result.joules[at], 3) if result.joules else 0.0,
            "mean_mhz": round(result.mean_mhz(at)) if result.joules else 0,
            "waits_for": waits(result, at),
            "communication": communication_of(result, at),
            "holds": held(result.memory[at].at_peak()),
        }
        for at, rank in enumerate(result.ranks)
    ]
    return times, "" if missing_ranks(programs) else imbalance(Step.of(result)), ""


def _power_lines(times: Sequence[dict[str, Any]]) -> list[str]:
    """Energy of a step and mean clocks, if the profile has a power limit."""
    if not any(row["joules"] for row in times):
        return []
    clocks = sorted(row["mean_mhz"] for row in times)
    span = f"{clocks[0]}" if clocks[0] == clocks[-1] else f"{clocks[0]} to {clocks[-1]}"
    joules = sum(row["joules"] * len(row["ranks"]) for row in times)
    return [f"energy {joules:.1f} J a step, clocks {span} MHz on average (simulated with the profile's power limit)"]


def _head(programs: Sequence[Program], target: str) -> list[str]:
    from interlace.ir.equivalent_ranks import missing_ranks, representatives
    from interlace.units import ranks_text

    stands, missing = representatives(programs), missing_ranks(programs)
    items = sum(len(job.items) for program in programs for job in program.jobs)
    what = f"{items} operations to issue" if all(program.jobs for program in programs) else "not scheduled (micro-batches one by one)"
    lines = [f"{len(programs) + len(stands)} of {programs[0].world} ranks, {what}, rules of the {target} target"]
    lines += [f"the {len(programs)} given ranks represent {len(stands)} more of their stages"] if stands else []
    return lines + ([f"not given: {ranks_text(missing)}; their agreement with the others is not checked"] if missing else [])


def _finding_lines(findings: Sequence[Finding], in_full: bool, in_part: bool) -> list[str]:
    """`in_full`: one line for each finding; `in_part`: ranks are missing."""
    from interlace.scheduler.hazards import findings_text

    if not findings:
        return [f"safe{' as far as the given ranks show' if in_part else ''}: no race, no early free, no disagreement, no deadlock"]
    lines = [f"- {line}" for line in findings_text(findings, in_full)]
    rest = ["--all or --json FILE gives each of them"] if len(lines) < len(findings) else []
    return [f"{len(findings)} finding(s):", *lines, *rest]


def _time_lines(times: Sequence[dict[str, Any]], imbalance: str, setting: Setting) -> list[str]:
    """A table with one line for equivalent ranks; then the imbalance of stages, what computation waits for, how much of each kind of
    communication is hidden, and what memory holds at the peak."""
    from interlace.report.causes import held_text, waits_text
    from interlace.report.page.tables import communication_text
    from interlace.report.split import merged
    from interlace.units import Unit

    if not times:
        return []
    sizes = ("peak_bytes", *(["pools_bytes"] if any(row["pools_bytes"] for row in times) else []), "pinned_bytes")
    unit = Unit.of(row[name] for row in times for name in sizes)
    heads = [name.removesuffix("_ns").replace("_", " ") + " ms" for name in COLUMNS]
    heads += [f"{name.removesuffix('_bytes')} {unit.name}" for name in sizes]
    bodies: dict[int, str] = {}
    causes: dict[int, str] = {}
    for row in times:
        cells = [f"{row[name] / 1e6:16.3f}" for name in COLUMNS] + [f"{unit.figure(row[name]):>16}" for name in sizes]
        waited = (
            f"compute waits for {waits_text(row['waits_for'])}\n      communication: {communication_text(row['communication'])}\n"
            f"      at the peak: {held_text(row['holds'])}"
        )
        bodies |= dict.fromkeys(row["ranks"], " ".join(cells))
        causes |= dict.fromkeys(row["ranks"], waited)
    title = f"{setting}, a step of each rank:"
    wide = max(5, *(len(label) for label, _ in (*merged(bodies), *merged(causes))))
    table = [
        " ".join(["ranks".rjust(wide), *(f"{head:>16}" for head in heads)]),
        *(f"{label:>{wide}} {bodies[rank]}" for label, rank in merged(bodies)),
    ]
    return [title, *table, *filter(None, [imbalance]), *(f"{label:>{wide}} {causes[rank]}" for label, rank in merged(causes))]
