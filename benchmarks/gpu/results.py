"""Simulated and measured results of runs of `benchmarks.gpu.training`.

`python -m benchmarks.gpu.results FOLDER --into FILE --sitting "date, GPUs"`.

Rows of the folder replace the file's rows with the same case, plan and session (*sitting*); other rows are kept. `--traces INTO` writes the
stored traces as gzipped Chrome traces, measured and simulated. `--tables` prints a file's step times and the errors of the simulator.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from interlace.report.accuracy import CLEAR, PEAKS, SWITCHED, as_run, count_order, has_peaks, is_compared, peak_error, step_error
from testbed.gpus import ROOT, python_path

Row = dict[str, Any]
RESULTS = ROOT / "benchmarks" / "results"
NOT_STARTED = "not started"
"""Mark of a run for which its session had no time."""
PLANS = (
    "stock",
    "column",
    "dx-first",
    "mixed",
    "zb-h1",
    "lag-0-1",
    "lag-1",
    "lag-1-2",
    "lag-2",
    "auto",
    "auto-8gb",
    "offload-0.5",
    "offload-1",
)
PINNED = ("pinned_reserved", "pinned_allocations")
KERNELS_KEPT = 12
DIGEST = 16
"""Number of hexadecimal digits that are kept of a digest."""
BUDGET = "budget-"
"""Prefix of the names of plans under a memory budget; the share of the memory of Paddle's baseline follows."""


# -- simulated -------------------------------------------------------------------------------------------------------


def simulate(out: Path, device: str = "") -> dict[str, Row]:
    """Simulated results of every plan that was run, and of Paddle's own, by "case plan"; with the device profile `device`, or else with
    that of the plan."""
    plans = [(folder, device or profile_of(folder)) for folder in plan_folders(out)]
    firsts = {folder.parent: (folder, profile) for folder, profile in reversed(plans) if list(folder.glob("captured/*.ilp"))}
    stock = [(_stock_plan(folder, profile), profile) for folder, profile in firsts.values()]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(pool.map(_simulated, [*plans, *stock]))


def plan_folders(out: Path) -> list[Path]:
    """The plans in a folder, without those that differ only by a switch, and without Paddle's own that an earlier call put there."""
    return sorted(
        path
        for path in out.glob("plans/*/*")
        if list(path.glob("*.ilp")) and path.name != "stock" and _without_switch(path.name) == path.name
    )


def _without_switch(plan: str) -> str:
    return next((plan.removesuffix(f"-{switch}") for switch in SWITCHED if plan.endswith(f"-{switch}")), plan)


def _interlace(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "interlace", *words],
        env={**os.environ, "PYTHONPATH": python_path()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def _stock_plan(planned: Path, profile: str) -> Path:
    """Paddle's baseline as the testbed runs it."""
    from interlace.cost_model import CostModel, load_profile
    from interlace.ir import load, save

    into, costs = planned.parent / "stock", CostModel(load_profile(profile))
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    for path in sorted(planned.glob("captured/*.ilp")):
        save(as_run(load(path), costs), into / path.name)
    return into


def profile_of(planned: Path) -> str:
    """The profile with which a plan was made. Its folder and file name are looked up among the stored results, as the plan may come from
    another machine."""
    from interlace.planning.plan import read_record

    profile = read_record(min(planned.glob("rank*.ilp"))).profile
    here = RESULTS / Path(profile).parent.name / Path(profile).name
    return os.fspath(here) if here.is_file() else profile


def _simulated(plan: tuple[Path, str]) -> tuple[str, Row]:
    """The name of a plan (given by its folder and profile), the slowest rank's times and each rank's memory.

    `held` includes what side streams hold, `in_order` is the memory if operations run one after another. Times follow the rules of the GPU
    target, like the testbed: the host waits where the plan says so. `limited` is with the power limit, if the profile has one.
    """
    from interlace.cost_model import CostModel, load_profile
    from interlace.ir import load
    from interlace.ir.target import GPU, IDEAL, with_paddles_jobs
    from interlace.planning.budget import peak_bytes
    from interlace.planning.plan import read_record
    from interlace.scheduler.memory.live import in_order
    from interlace.scheduler.simulate.arrays import Options
    from interlace.scheduler.simulate.simulator import simulate

    folder, profile = plan
    name = f"{folder.parent.name} {folder.name}"
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        done = _interlace("check", os.fspath(folder), "--target", "gpu", "--device", profile, "--json", file.name)
        text = Path(file.name).read_text()
    ranks = json.loads(text).get("ranks", []) if text else []
    if not ranks:
        return name, {"failed": (done.stderr or done.stdout)[-300:]}
    paths = sorted(folder.glob("rank*.ilp"))
    programs = [load(path) for path in paths]
    place = with_paddles_jobs(IDEAL) if folder.name == "stock" else IDEAL
    costs = CostModel(load_profile(profile))
    as_freed = simulate(programs, costs, Options.of(IDEAL), target=place)
    free = simulate(programs, costs, Options.of(GPU, power=False), with_memory=False).ranks
    found: Row = {
        f"{name}_ms": round(max(getattr(rank, key) for rank in free) / 1e6, 2)
        for name, key in (("step", "step_ns"), ("exposed", "exposed_comm_ns"))
    }
    found["peak_bytes_by_rank"] = [rank.peak_bytes for rank in as_freed.ranks]
    found["held_peak_bytes_by_rank"] = [rank["peak_bytes"] for rank in ranks]
    if folder.name == "stock":
        found["held_peak_bytes_by_rank"] = [peak_bytes(program, costs, with_paddles_jobs(GPU)) for program in programs]
    found[PEAKS] = [in_order(program, target=place).peak() for program in programs]
    if load_profile(profile).power:
        limited = simulate(programs, costs, Options.of(GPU, power=True), with_memory=False)
        found["limited"] = {
            "step_ms": round(limited.step_ns / 1e6, 2),
            "mhz": [round(limited.mean_mhz(at)) for at in range(len(programs))],
            "joules": [round(each, 1) for each in limited.joules],
        }
    if folder.name.startswith(BUDGET):
        found["budget_bytes"] = read_record(paths[0]).memory_budget
    return name, found


# -- measured --------------------------------------------------------------------------------------------------------


def cases_of(out: Path) -> list[Row]:
    """The results of each case in a folder, which may also have other files."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("testbed_*.json"))]
    return [each for each in found if "plans" in each]


def rows(cases: Sequence[Row], sitting: str, simulated: dict[str, Row]) -> Iterator[Row]:
    """One row for each run."""
    for case in cases:
        for plan, found in case["plans"].items():
            head = {"case": case["case"], "plan": plan, "world": case["world"], "sitting": sitting}
            if "failed" in found and NOT_STARTED in found["failed"]:
                continue
            if "failed" in found:
                yield {**head, "failed": found["failed"].strip()[-260:]}
                continue
            row = {**head, **_measured(found, case["case"].startswith("small"))}
            stock = case["plans"].get("stock", {})
            if "loss_bits" in stock and len(stock["loss_bits"]) == len(found["loss_bits"]):  # the data depend on the number of steps
                row["losses_equal_stock"] = found["loss_bits"] == stock["loss_bits"]
                row["parameters_equal_stock"] = found["parameters"] == stock["parameters"]
            yield {**row, **({"simulated": given} if (given := simulated.get(f"{case['case']} {plan}")) else {})}


def _measured(found: Row, all_losses: bool) -> Row:
    step = {key: round(value, 2) for key, value in found["step_ms"].items() if key != "all"}
    longest = max(found["traced_step"], key=lambda each: each.get("device_us", 0))
    kept = ("device_us", "busy_us", "comm_alone_us", "idle_us", "host_us", "ops_issued", "still_between_us", "host_around_us")
    buffers = found["pinned_buffers_by_step"]
    return {
        "gpus": found["gpus"],
        "step_ms": step,
        "steps_ms": [round(each, 2) for each in found["step_ms"]["all"]],
        "peak_bytes_by_rank": [{key.removesuffix("_peak"): each[key] for key in each if key.endswith("_peak")} for each in found["memory"]],
        "pinned_by_rank": [{key: each[key] for key in PINNED if key in each} for each in found["memory"]],
        "pinned_buffers_first_last": [max(each[0] for each in buffers), max(each[-1] for each in buffers)],
        "losses": found["losses"] if all_losses else found["losses"][-1:],
        "bits": {"losses": _digest(found["loss_bits"]), "parameters": found["parameters"][:DIGEST]},
        "traced_step": {key: longest[key] for key in kept if key in longest},
        "kernels_us": dict(list(found["traced_step"][0].get("kernels_us", {}).items())[:KERNELS_KEPT]),
        **{key: found[key] for key in ("first_step", "power", "trial") if key in found},
    }


def _digest(bits: Sequence[str]) -> str:
    """A digest of the bits of all losses, for comparing runs of different sessions."""
    return hashlib.sha256(json.dumps(bits).encode()).hexdigest()[:DIGEST]


def merge(path: Path, found: Sequence[Row], sitting: str, machine: Row, args: dict[str, str]) -> None:
    """Update the file with these rows, one per line; failed runs do not replace measured ones. `machine` says where they ran."""
    old = json.loads(path.read_text()) if path.exists() else {"sittings": {}, "args": {}, "runs": []}
    measured = {run_of(row) for row in old["runs"] if "failed" not in row}
    new = {run_of(row): row for row in found if "failed" not in row or run_of(row) not in measured}
    runs = sorted([*(row for row in old["runs"] if run_of(row) not in new), *new.values()], key=lambda row: row["case"])
    merged = {**old, "sittings": {**old["sittings"], sitting: machine}, "args": {**old["args"], **args}, "runs": runs}
    path.write_text(json.dumps(merged, separators=(",", ":")).replace('{"case"', '\n{"case"') + "\n")


def run_of(row: Row) -> tuple[str, str, str]:
    """The run of a row: its case, plan and session."""
    return row["case"], row["plan"], row["sitting"]


def write_traces(out: Path, into: Path, pattern: str, simulated: bool) -> list[Path]:
    """Measured steps of a folder as gzipped Chrome traces, `CASE_PLAN.json.gz`, and `CASE_PLAN.simulated.json.gz` of the plans."""
    from testbed import trace

    into.mkdir(parents=True, exist_ok=True)
    written = []
    for run in sorted({path.name.rpartition("_")[0] for path in out.glob("traces/*_trace*.msgpack")}):
        if fnmatch.fnmatchcase(run, pattern):
            ranks = [trace.read_rank(path) for path in sorted(out.glob(f"traces/{run}_trace*.msgpack"))]
            written.append(_pack(into / f"{run}.json.gz", json.dumps(trace.chrome_trace(ranks), separators=(",", ":"))))
            case, _, plan = run.rpartition("_")
            if simulated and list((out / "plans" / case / plan).glob("*.ilp")):
                with tempfile.NamedTemporaryFile(suffix=".json") as file:
                    done = _interlace("timeline", os.fspath(out / "plans" / case / plan), "--target", "gpu", "-o", file.name)
                    if done.returncode:
                        raise SystemExit(f"{run}: no simulated trace: {done.stderr[-600:]}")
                    written.append(_pack(into / f"{run}.simulated.json.gz", Path(file.name).read_text()))
    return written


def _pack(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return path


# -- tables ----------------------------------------------------------------------------------------------------------


def step_table(runs: Sequence[Row]) -> str:
    """Step times of every case and session by plan, and the gain over Paddle's baseline of the same session; [1], [2] number the
    sessions."""
    found = {run_of(row): row for row in runs if "step_ms" in row and row["plan"] in PLANS}
    plans = [plan for plan in PLANS if any(plan == of for _, of, _ in found)]
    sittings = sorted({sitting for _, _, sitting in found})
    marks = {sitting: f" [{k}]" for k, sitting in enumerate(sittings, 1)} if len(sittings) > 1 else {}
    lines = [f"| step ms (min-max), gain over the baseline | {' | '.join(plans)} |", "| --- " * (len(plans) + 1) + "|"]
    for case, sitting in sorted({(case, sitting) for case, _, sitting in found}, key=lambda key: (key[0], sittings.index(key[1]))):
        cells = (_cell(found.get((case, plan, sitting)), found.get((case, "stock", sitting))) for plan in plans)
        lines.append(f"| {case}{marks.get(sitting, '')} | {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"\n{mark.strip()} {sitting}" for sitting, mark in marks.items())])


def _cell(row: Row | None, stock: Row | None) -> str:
    if row is None:
        return ""
    step = row["step_ms"]
    text = f"{step['median']:.1f} ({step['min']:.0f}-{step['max']:.0f})"
    if stock is None or row is stock:
        return text
    return f"{text} {100 * (stock['step_ms']['median'] / step['median'] - 1):+.1f} %"


def switch_table(runs: Sequence[Row]) -> str:
    """Plans with and without a switch of the testbed, for the same case and session."""
    found = {run_of(row): row for row in runs if "step_ms" in row}
    lines = [
        "| case | plan | step ms (min-max) | with | step ms (min-max) | time | losses and parameters the baseline's |",
        "| --- " * 7 + "|",
    ]
    for (case, plan, sitting), row in found.items():
        base = _without_switch(plan)
        usual = found.get((case, base, sitting))
        if usual is not None and plan != base:
            steps = [f"{each['median']:.1f} ({each['min']:.0f}-{each['max']:.0f})" for each in (usual["step_ms"], row["step_ms"])]
            change = 100 * (row["step_ms"]["median"] / usual["step_ms"]["median"] - 1)
            cells = [case, base, steps[0], plan.removeprefix(f"{base}-"), steps[1], f"{change:+.1f} %", f"{_bits(usual)}, {_bits(row)}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _bits(row: Row) -> str:
    told = {row.get(f"{what}_equal_stock") for what in ("losses", "parameters")}
    return "no stock beside it" if None in told else "no" if False in told else "yes"


def budget_table(runs: Sequence[Row]) -> str:
    """Plans with and without budgets, and the baseline of their session: steps and peaks of the fullest rank, measured and predicted.

    A budget limits tensors including what side streams keep (held); only tensors were measured. For the baseline only these are shown, as
    its jobs keep some tensors of which backward reads only the shape (`with_paddles_jobs`), which `interlace check` does not count.
    """
    found = {run_of(row): row for row in runs if "step_ms" in row}
    lines = [
        "| case | plan | budget GB | held, planned | tensors, planned | measured | step ms, planned | measured | the baseline's bits |",
        "| --- " * 9 + "|",
    ]
    for case, sitting in dict.fromkeys((case, sitting) for case, plan, sitting in found if plan.startswith(BUDGET)):
        budgets = sorted(
            (plan for of, plan, at in found if (of, at) == (case, sitting) and plan.startswith(BUDGET)),
            key=lambda plan: -float(plan.removeprefix(BUDGET)),
        )
        here = [found[case, plan, sitting] for plan in ("stock", "auto", *budgets) if (case, plan, sitting) in found]
        lines += [f"| {case} | {row['plan']} | {' | '.join(_budget_cells(row))} |" for row in here]
    return "\n".join(lines)


def _budget_cells(row: Row) -> list[str]:
    planned = row.get("simulated", {})
    held = [0] if row["plan"] == "stock" else planned.get("held_peak_bytes_by_rank", [0])
    sizes = [
        planned.get("budget_bytes", 0),
        max(held),
        max(planned.get(PEAKS, [0])),
        max(each["allocated"] + each["outside"] for each in row["peak_bytes_by_rank"]),
    ]
    steps = [f"{planned['step_ms']:.1f}" if "step_ms" in planned else "", f"{row['step_ms']['median']:.1f}"]
    return [*(f"{size / 1e9:.2f}" if size else "" for size in sizes), *steps, _bits(row)]


def accuracy_table(runs: Sequence[Row]) -> str:
    """Errors of simulated steps and peaks, and how many pairs of plans are ordered correctly."""
    groups: dict[str, list[Row]] = {}
    for row in runs:
        if is_compared(row):
            groups.setdefault(_group(row), []).append(row)
    lines = ["| | runs | step: median error, worst | tensors at the peak, in issue order: runs, median error, worst |", "| --- " * 4 + "|"]
    for name, rows_here in sorted(groups.items()):
        steps = [step_error(row) for row in rows_here]
        peaks = [peak_error(row) for row in rows_here if has_peaks(row)]
        lines.append(f"| {name} | {len(steps)} | {_errors(steps)} | {len(peaks)}: {_errors(peaks)} |")
    right, pairs = count_order([row for rows_here in groups.values() for row in rows_here])
    return "\n".join([*lines, "", f"{right} of {pairs} pairs of plans of a case, measured more than {CLEAR:.0%} apart, in the right order"])


def _errors(found: Sequence[float]) -> str:
    return f"{100 * statistics.median(map(abs, found)):.2f}, {100 * max(found, key=abs):+.2f} %" if found else ""


def _group(row: Row) -> str:
    """Parallelism and kind of plan; offload by how the host waited, which decides its cost; separately if the profile was the testbed's."""
    plan = "stock" if row["plan"].startswith("stock") else "offload" if "offload" in row["plan"] else "our plans"
    waits = f", {row['sitting'].rpartition(', ')[2]}" if plan == "offload" else ""
    planned = row["sitting"].rpartition(", ")[2]
    profile = f", {planned}" if planned.startswith("planned with") else ""
    return f"{'pp 2' if '-pp2' in row['case'] else 'mp'}, {plan}{waits}{profile}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.results", description="Collect and show what benchmarks.gpu.training measured."
    )
    parser.add_argument("folder", type=Path, nargs="?", help="the --out of a run of benchmarks.gpu.training")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the folder's runs, and what is simulated of them, into this file")
    parser.add_argument("--sitting", default="", metavar="TEXT", help="when and on what the folder was measured; needed with --into")
    parser.add_argument("--device", default="", metavar="NAME", help="profile to simulate --into with (default: that of each plan)")
    parser.add_argument("--traces", type=Path, metavar="INTO", help="write the folder's traces here")
    parser.add_argument("--runs", default="*", metavar="PATTERN", help="of which runs, such as 'gpt-*_mixed'")
    parser.add_argument("--simulated", action="store_true", help="and beside each what is simulated of its plan")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print tables of this file")
    parser.add_argument("--of", default="*", metavar="PATTERN", help="of which sittings, such as '*18:40*'")
    args = parser.parse_args(argv)
    if not (args.into or args.traces or args.tables):
        parser.error("nothing to do; give --into, --traces or --tables")
    if (args.into or args.traces) and not args.folder:
        parser.error("--into and --traces take their runs from a folder: name it")
    if args.tables and not args.into and not args.tables.is_file():
        parser.error(f"--tables {args.tables}: no such file")
    if args.of != "*" and not args.tables:
        parser.error("--of belongs to --tables FILE")
    if args.device and not args.into:
        parser.error("--device belongs to --into FILE")
    if (args.simulated or args.runs != "*") and not args.traces:
        parser.error("--runs and --simulated belong to --traces INTO")
    if args.into:
        if not args.sitting:
            parser.error('--into needs --sitting "DATE, GPUS": rows of several sittings lie in one file')
        cases = cases_of(args.folder)
        if not cases:
            parser.error(f"{args.folder}: no testbed_CASE.json of a case; expected the --out of a run of benchmarks.gpu.training")
        found = list(rows(cases, args.sitting, simulate(args.folder, args.device)))
        machine = {key: cases[0][key] for key in ("gpus", "paddle", "interlace", "python")}
        merge(args.into, found, args.sitting, machine, {case["case"]: " ".join(case["args"]) for case in cases})
        print(f"{args.into}: {len(found)} runs of {args.folder}")
    if args.traces:
        print(f"{args.traces}: {len(write_traces(args.folder, args.traces, args.runs, args.simulated))} traces")
    if args.tables:
        runs = [row for row in json.loads(args.tables.read_text())["runs"] if fnmatch.fnmatchcase(row["sitting"], args.of)]
        print("\n\n".join(show(runs) for show in (step_table, switch_table, budget_table, accuracy_table)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
