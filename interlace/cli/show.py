"""`interlace show`: a dump or a plan as text."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from interlace.cli.plans import read_files
from interlace.cli.target import profile_of
from interlace.user_passes import add_import, import_own

if TYPE_CHECKING:
    from interlace.cli.plans import PlanFile
    from interlace.ir import Program
    from interlace.planning.plan import Record


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `show` to the command line."""
    parser = subparsers.add_parser(
        "show",
        help="print a dump, a plan, one job, or what a pass changed",
        description="Print a dump or a plan. FILE may be a folder with one file; with --why and --rows, a folder of plans.",
    )
    parser.add_argument("file", metavar="FILE", help="a dump or plan file; with --why and --rows also a folder of plans")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--job", metavar="J", help="only this job's operations, in issue order: its name or slot, such as 0B+2F")
    one.add_argument("--before-after", metavar="PASS", help="what this pass of a plan added, removed and moved, job by job")
    one.add_argument("--why", action="store_true", help="what each pass of a plan did and declined, with reasons, by rule")
    one.add_argument("--costs", action="store_true", help="times of operations, summed by kind and by layer, and how these times are known")
    one.add_argument("--rows", action="store_true", help="the schedule of the plans in a folder as text, with a row for each stage")
    parser.add_argument(
        "--all",
        action="store_true",
        help="with --why every place, with --costs every operation, with --before-after the difference between program texts",
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="R",
        help="with --why only remarks of this rule, which is named in [] at the end of each line; may be repeated",
    )
    parser.add_argument("--device", metavar="NAME", default="", help="device profile for --costs (default: that of the plan, else h200)")
    add_import(parser)
    parser.add_argument("--json", metavar="FILE", help="write the same to FILE in machine-readable form")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, or 2 for user errors."""
    from interlace.cli.outputs import check_apart, write_json
    from interlace.errors import ConfigError
    from interlace.ir.dump import find_dumps

    if args.device and not args.costs:
        raise ConfigError(f"--device {args.device}: only --costs uses a device profile; add --costs or leave --device out")
    if args.all and not (args.why or args.costs or args.before_after):
        raise ConfigError(
            "--all: goes with --why, --costs or --before-after, which print summaries without it; everything else is printed in full"
        )
    if args.rule and not args.why:
        raise ConfigError(f"--rule {args.rule[0]}: selects remarks of --why; add --why or leave --rule out")
    check_apart({"--json": args.json}, [args.file, args.device, *(args.imports or ())])
    import_own(args.imports)
    several = args.rows or (args.why and len(find_dumps([args.file])) > 1)
    path = Path(args.file) if several else find_dumps([args.file], one=True)[0]
    shown = _shown(path, args)
    write_json(args.json, {"file": str(path), **shown.data})
    for line in shown.lines:
        print(line)
    return 0


class Shown(NamedTuple):
    """What is printed, and the same as data for `--json`."""

    lines: list[str]
    data: dict[str, Any]


def _shown(path: Path, args: argparse.Namespace) -> Shown:
    from interlace.ir import load, show
    from interlace.planning.loaded import require_its_record
    from interlace.planning.plan import read_record

    if not (args.rows or args.before_after or args.why or args.costs):
        program = load(path)
        return _job(program, args.job) if args.job else Shown(show(program).splitlines(), {"program": program})
    files = read_files([path])
    if args.rows:
        return _rows(files)
    if args.before_after or args.why:
        records = [file.record or read_record(file.path) for file in files]
        for file, record in zip(files, records, strict=True):
            require_its_record(file.path, file.program, record)
    if args.before_after:
        return _difference(path, args.before_after, args.all)
    if args.why:
        return _why(files, records, args.all, args.rule)
    return _costs(files[0].program, args.device or profile_of(files)[0], args.all)


def _rows(files: Sequence[PlanFile]) -> Shown:
    from interlace.cli.plans import require_world
    from interlace.planning.rows import rows_of, rows_text

    require_world(files, partial=True)
    rows = rows_of([file.program for file in files])
    return Shown(rows_text(rows).splitlines(), {"rows": {stage: [str(slot) for slot in slots] for stage, slots in rows.items()}})


def _job(program: Program, name: str) -> Shown:
    from interlace.errors import PlanError
    from interlace.ir.text import show_op
    from interlace.scheduler.jobs.parts import slot_text

    jobs = {job.name: job for job in program.jobs}
    name = next((job.name for job in program.jobs if slot_text(job.name) == name), name)
    if name not in jobs:
        known = ", ".join(f"{known} ({slot_text(known)})" for known in jobs)
        raise PlanError(f"no job {name!r}; there are {known or 'none, as this program has no schedule'}")
    ops = {op.id: op for op in program.ops}
    values = {value.id: value for value in program.values}
    items = [(micro_batch, show_op(ops[op_id], values)) for op_id, micro_batch in jobs[name].items]
    lines = [f"job {name} {jobs[name].kind}", *(f"  mb{micro_batch} {text}" for micro_batch, text in items)]
    return Shown(lines, {"job": jobs[name], "ops": [ops[op_id] for op_id, _ in jobs[name].items]})


def _difference(path: Path, name: str, every: bool) -> Shown:
    from interlace.ir import show
    from interlace.planning.plan import replay
    from interlace.report.changes import changes, changes_text

    name = name.replace("_", "-")
    before, after = replay(path, name)
    found = changes(before, after)
    if every:
        texts = show(before).splitlines(), show(after).splitlines()
        lines = list(difflib.unified_diff(*texts, f"before {name}", f"after {name}", n=2, lineterm=""))
    else:
        head = f"{name}: operations {len(before.ops)} -> {len(after.ops)}, jobs {len(before.jobs)} -> {len(after.jobs)}"
        lines = [head, *changes_text(found)] if found else []
    return Shown(lines or [f"{name} changed nothing"], {"pass": name, "changes": found, "before": before, "after": after})


def _why(files: Sequence[PlanFile], records: Sequence[Record], every: bool, rules: Sequence[str]) -> Shown:
    """What the passes of a plan did; for several plans, those of the first rank of each stage."""
    from interlace.report.screen import imbalance_lines, places_text, reports_text

    first = {file.program.pipeline.stage: k for k, file in reversed([*enumerate(files)])}
    stages = sorted(first)
    selected = dict(zip(stages, _selected([records[first[stage]] for stage in stages], rules), strict=True))
    lines = [] if every or rules else imbalance_lines(records[first[stages[0]]].outcome)
    for stage, each in selected.items():
        lines += [f"stage {stage} ({files[first[stage]].path}):"] if len(files) > 1 else []
        lines += places_text(each.reports) if every else reports_text(each.reports, names_rules=True)
    return Shown(lines, {"records": selected} if len(files) > 1 else {"record": selected[stages[0]]})


def _selected(records: Sequence[Record], rules: Sequence[str]) -> list[Record]:
    """The records with only the remarks of these rules, and only the passes that have such remarks; without rules, unchanged. Raises
    ConfigError if no plan has a remark of a rule."""
    import msgspec

    from interlace.errors import ConfigError

    there = sorted({each.rule for record in records for report in record.reports for each in report.remarks})
    for rule in rules:
        if rule not in there:
            raise ConfigError(f"--rule {rule}: the plan has no remark of this rule; its rules are {', '.join(there) or 'none'}")
    if not rules:
        return list(records)
    found = []
    for record in records:
        kept = [(report, tuple(each for each in report.remarks if each.rule in rules)) for report in record.reports]
        reports = tuple(msgspec.structs.replace(report, remarks=remarks) for report, remarks in kept if remarks)
        found.append(msgspec.structs.replace(record, reports=reports))
    return found


def _costs(program: Program, device: str, every: bool) -> Shown:
    from interlace.cost_model import CostModel, load_profile
    from interlace.cost_model.base import explain_rows
    from interlace.report.costs import by_kind, by_layer, op_lines, sums_text

    rows = CostModel(load_profile(device)).table(program)
    kinds, layers = by_kind(rows), by_layer(rows)
    lines = [
        f"device profile {device}",
        *sums_text("kind", kinds, every),
        "",
        *sums_text("layers", layers, every),
        "",
        *(op_lines(rows) if every else []),
        *explain_rows(rows).splitlines(),
    ]
    return Shown(lines, {"device": device, "by_kind": kinds, "by_layer": layers, "ops": rows})
