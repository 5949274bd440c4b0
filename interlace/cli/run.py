"""`interlace run`: train a script on several local ranks, and optionally compare every bit with unmodified Paddle."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from interlace.cli.dump import require_script
from interlace.cli.plans import add_budgets, budgets_of
from interlace.cli.progress import Alive
from interlace.temporary import hold
from interlace.units import ms, ranks_text
from interlace.user_passes import VARIABLE as IMPORT_VARIABLE
from interlace.user_passes import add_import, import_own

if TYPE_CHECKING:
    from interlace.errors import LaunchError
    from interlace.local.launch import LaunchResult
    from interlace.local.rank_report import Progress, RankReport, StepLoss

DEFAULT_TIMEOUT_S = 300.0
_SAME, _DIFFERENT, _USER_ERROR = 0, 1, 2
_SHOWN_STEPS = 20
NO_BASELINE = {
    "baseline failed": "the baseline failed, even in the forms that work around known faults of Paddle",
    "baseline unsteady": "the baseline does not reproduce its own bits, and no form that works around known faults of Paddle "
    "gives those of Interlace",
}
NOT_ASKED = (
    "no model requested it: call interlace.enable(strategy) before dist.to_static gets the strategy, and check that nothing turns "
    "Interlace off (enable: false, every pass off, a rule that does not hold on this machine, INTERLACE_DISABLE=1)"
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `run` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="train a script on several local ranks, on CPU processes if there is no GPU",
        usage="interlace run [-h] SCRIPT --world N [options] [-- arguments of SCRIPT]",
        description="Train SCRIPT on N local ranks.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a training script; runs as if started directly")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--config", metavar="FILE", help="configuration (YAML) or preset; replaces the script's own")
    parser.add_argument("--plan", metavar="DIR", help="run the plans in this folder (`interlace plan -o DIR`) instead of planning")
    parser.add_argument(
        "--decisions",
        metavar="DIR",
        help="plan this script with the decisions of the plans in this folder, which were made for a larger model with the same "
        "numbers of stages and micro-batches, even if they gain nothing here; --verify then compares them bit by bit",
    )
    add_budgets(parser, " or of the script")
    add_import(parser)
    parser.add_argument(
        "--target",
        metavar="T",
        help="where to run: cpu, gpu, or a module with your own device (default: GPUs if there are any, else CPU processes)",
    )
    parser.add_argument("--verify", action="store_true", help="also run unmodified Paddle and compare every bit")
    parser.add_argument("--json", metavar="FILE", help="write losses, the verdict, the plan and step times to FILE")
    parser.add_argument(
        "--log-dir", metavar="DIR", help="folder for logs of ranks (default: a temporary one, which is kept only after failures)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"seconds a rank waits for another before it gives up (default {DEFAULT_TIMEOUT_S:g})",
    )
    parser.set_defaults(script_args=[], loss_rank=None)
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 if results differ or the baseline has none to compare with, 2 if nothing was verified, and for user errors."""
    with _decisions(args):
        _check(args)
        with _logs(args):
            return _verify(args) if args.verify else _run_once(args)


@contextlib.contextmanager
def _decisions(args: argparse.Namespace) -> Iterator[None]:
    """Make a configuration from the decisions of `--decisions`, and use it as `--config`; it exists during the block."""
    if not args.decisions:
        yield
        return
    import yaml

    from interlace.errors import ConfigError
    from interlace.passes.schedule_1f1b import Schedule1F1B
    from interlace.planning.rows import forced

    other = next((f"{option} {given}" for option, given in (("--config", args.config), ("--plan", args.plan)) if given), "")
    if other:
        raise ConfigError(f"--decisions {args.decisions} together with {other}: both say what is planned; leave one of them out")
    options = forced(Path(args.decisions))
    stages = len(Schedule1F1B(schedule_file=options["schedule_1f1b"]["schedule_file"]).given_rows())
    if args.world % stages:
        raise ConfigError(
            f"--decisions {args.decisions}: its plans have {stages} stages, which do not divide --world {args.world}; expected a model "
            "with the same number of stages"
        )
    with tempfile.TemporaryDirectory(prefix="interlace-decisions-") as folder:
        args.config = os.path.join(folder, "decisions.yaml")
        Path(args.config).write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
        yield


def _check(args: argparse.Namespace) -> None:
    """Check the arguments before anything starts."""
    from interlace.cli.outputs import check_apart, check_folder
    from interlace.errors import ConfigError
    from interlace.installed import require_paddle
    from interlace.local.launch import require_target
    from interlace.outside import TARGET_VARIABLE

    require_script(args.script)
    if args.world < 1:
        raise ConfigError(f"--world {args.world}: expected a number of ranks, 1 or more")
    require_paddle()
    if args.timeout <= 0:
        raise ConfigError(f"--timeout {args.timeout:g}: expected seconds above 0")
    target = args.target or os.environ.get(TARGET_VARIABLE, "")
    if target:
        require_target(target)
    import_own(args.imports)
    _check_options(args)
    check_folder("--log-dir", args.log_dir or ".")
    check_apart({"--json": args.json}, [args.script, args.config, args.plan, args.decisions, *args.imports])


def _check_options(args: argparse.Namespace) -> None:
    """Check what `--config` and `--plan` request from the ranks. Raises ConfigError."""
    from interlace.config import make_config, require_jobs
    from interlace.outside import asked_outside
    from interlace.planning.loaded import require_ranks

    outside = asked_outside(_told(args))
    if outside is None:
        return
    strange: list[str] = []  # names of passes that the script may register; each rank checks them later
    config = make_config(outside.options, outside.source, outside.marks, strange=strange)
    if not strange:
        require_jobs(config)
    if config.plan:
        require_ranks(config.plan, args.world)


def _run_once(args: argparse.Namespace) -> int:
    result = train(args, _environment(args, baseline=False), "run")
    _write_json(args, {"verdict": None, "runs": {"run": _as_dict(result)}})
    print(_losses_text(result.reports))
    print(_times_text("run", result, args))
    print(_plan_text(result))
    return _SAME


def _verify(args: argparse.Namespace) -> int:
    from interlace.local.rank_report import counted
    from interlace.local.verdict import PLAN_ALONE, judge, training

    # decisions may not fit this model: run Interlace first, to fail early
    names = ("interlace", "baseline") if args.decisions else ("baseline", "interlace")
    tried = {name: _attempt(args, _environment(args, baseline=name == "baseline"), name) for name in names}
    baseline, planned = tried["baseline"], tried["interlace"]
    found = judge(baseline, planned, lambda name, env: train(args, {**_environment(args, baseline=name != PLAN_ALONE), **env}, name))
    mine, theirs = found.runs[found.of], found.runs.get(found.against)
    compared = sum(bool(loss.raw_hex) for report in theirs.reports for loss in report.losses) if theirs else 0
    idle = _why_idle(args, mine, compared) if found.verdict == "same" else ""
    args.failed = found.verdict != "same"
    verdict = "no plan" if idle else found.verdict
    _write_json(
        args,
        {
            "verdict": verdict,
            "difference": found.difference or None,
            "against": found.against,
            "paddle_faults": found.faults,
            "runs": {name: _as_dict(run) for name, run in found.runs.items()},
        },
    )
    if theirs:
        both = theirs.reports, mine.reports
        print(_table_text(*(map(training, both) if found.trains_only else both)))
    for name, run in found.runs.items():
        print(_times_text(name, run, args))
    for fault in found.faults:
        print(f"Paddle's fault, not a plan's: {fault}")
    if mine.reports[0].plan is not None:
        print(_told_text(mine.reports[0].plan))
    with_what = "" if found.against == "baseline" else f" with those of the run {found.against}; steps that it skipped are not compared"
    if idle:
        print(f"interlace run: nothing was verified: {idle}", file=sys.stderr)
    elif found.verdict == "same" and all(report.plan and report.plan.get("is_paddles_order") for report in mine.reports):
        print(
            f"NOTHING OF A PLAN WAS COMPARED: on every rank the plan is Paddle's baseline order of operations, so both runs did the same "
            f"({compared} losses, {counted(theirs.reports) if theirs else ''} are equal bit by bit{with_what}). To verify with this model "
            "what is planned for a larger one, add --decisions DIR with the folder of that model's plans "
            "(`interlace plan -o DIR`)"
        )
    elif found.verdict == "same":
        print(f"SAME: {compared} losses, {counted(theirs.reports) if theirs else ''} of {args.world} ranks are equal bit by bit{with_what}")
    elif found.verdict == "different":
        logs = " and ".join(run.log_dir for name, run in found.runs.items() if name in (found.against, "interlace"))
        print(f"DIFFERENT: {found.difference}; logs in {logs}")
    else:
        print(f"NOTHING TO COMPARE WITH: {NO_BASELINE[found.verdict]}; Interlace's run completed")
    return _USER_ERROR if idle else _SAME if found.verdict == "same" else _DIFFERENT


def _attempt(args: argparse.Namespace, env: dict[str, str], name: str) -> LaunchResult | LaunchError:
    """A run, or the error with which it failed. Raises ScriptError if the script is at fault."""
    from interlace.errors import LaunchError

    try:
        return train(args, env, name)
    except LaunchError as error:
        return error


def _why_idle(args: argparse.Namespace, planned: LaunchResult, compared: int) -> str:
    """Why equal runs prove nothing; empty if Interlace made a plan and losses were compared."""
    if any(report.plan is not None for report in planned.reports):
        return "" if compared else "no rank fetched a loss, so there is nothing to compare; train at least one step"
    given = args.plan or args.config
    asked = (
        f"{given} turns everything off, or the script does not train through dist.to_static"
        if given is not None
        else f"{NOT_ASKED}; or give a --config"
    )
    return f"Interlace made no plan on any rank, so unmodified Paddle ran twice; {asked}"


def _environment(args: argparse.Namespace, baseline: bool) -> dict[str, str]:
    """Environment variables for the ranks: where they run, and whether Interlace is disabled or which configuration it uses."""
    from interlace.outside import DISABLE_VARIABLE, with_connections

    told = {"INTERLACE_TARGET": args.target} if args.target else {}
    told |= {DISABLE_VARIABLE: "1"} if baseline else with_connections()
    if args.verify and "INTERLACE_TUNE" not in os.environ:
        told["INTERLACE_TUNE"] = "off"  # verify the plan itself, without falling back to Paddle's baseline
    told |= _told(args)
    if args.imports:
        told[IMPORT_VARIABLE] = os.pathsep.join(os.path.abspath(name) if name.endswith(".py") else name for name in args.imports)
    return told


def _told(args: argparse.Namespace) -> dict[str, str]:
    """Environment variables for `--config`, `--plan`, `--memory-budget` and `--pool-budget`."""
    from interlace.config import find_config
    from interlace.outside import BUDGET_VARIABLES, CONFIG_VARIABLE, PLAN_VARIABLE

    given = {CONFIG_VARIABLE: args.config and find_config(args.config), PLAN_VARIABLE: args.plan}
    told = {name: os.path.abspath(path) for name, path in given.items() if path is not None}
    return {**told, **{BUDGET_VARIABLES[name]: value for name, value in budgets_of(args).items()}}


def train(args: argparse.Namespace, env: dict[str, str], name: str) -> LaunchResult:
    """Run the script's ranks with this environment; the run's name appears on the screen and in the path of its logs. Raises LaunchError or
    ScriptError."""
    from interlace.local.launch import launch

    logs = Path(args.log_dir or args.temporary_logs) / name
    with _Display(name, args.world, args.loss_rank) as display:
        try:
            return launch(args.script, args.script_args, args.world, env, None, logs, args.timeout, display.show, display.say)
        finally:
            args.loss_rank = display.loss_rank  # so that both runs of a comparison show the same rank


@contextlib.contextmanager
def _logs(args: argparse.Namespace) -> Iterator[None]:
    """Make a temporary folder for logs if the user names none; it is removed at the end unless something failed."""
    args.failed = False
    made = None if args.log_dir else hold("interlace-logs-")
    args.temporary_logs = "" if made is None else str(made.path)
    try:
        yield
    except Exception:
        args.failed = True
        raise
    finally:
        if made is not None:
            made.keep() if args.failed else made.remove()


class _Display:
    """What is shown during a run: lines that the script prints, on stdout; steps and progress, on stderr.

    Lines are those of rank 0 and of one rank that has losses (a rank of the last stage): `loss_rank`, else the first that has one. Only the
    steps of that rank are shown, as with data parallelism several ranks have losses; on a terminal as a bar, otherwise as lines.
    """

    def __init__(self, name: str, world: int, loss_rank: int | None = None) -> None:
        self._name = name
        self._bar: Any = None
        self._steps: dict[str, int] = {}
        self.loss_rank = loss_rank
        self._waiting: list[tuple[int, str]] = []
        self._alive = Alive(name if name == "run" else f"run, {name}", f"building programs and plans of {world} rank(s)", self._note)

    def __enter__(self) -> _Display:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=self._name, unit="step", file=sys.stderr)
        self._alive.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._alive.__exit__()
        if self._bar is not None:
            self._bar.close()

    def say(self, rank: int, line: str) -> None:
        """Show a line that the script printed, if its rank is shown; lines of other ranks wait until the rank with losses is known."""
        if rank not in (0, self.loss_rank):
            if self.loss_rank is None:
                self._waiting.append((rank, line))
            return
        self._print(f"{self._name}{f' rank {rank}' if rank else ''} | {line}")

    def show(self, progress: Progress) -> None:
        """Show a step once, when the rank whose losses are shown has completed it."""
        if progress.loss is None or progress.step <= self._steps.get(progress.mode, 0) or self.loss_rank not in (None, progress.rank):
            return
        if self.loss_rank is None:
            self.loss_rank = progress.rank
            waiting, self._waiting = self._waiting, []
            for rank, line in waiting:
                self.say(rank, line)
        self._steps[progress.mode] = progress.step
        self._alive.now(f"no step completed since {progress.mode} step {progress.step}")
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(f"{progress.mode} loss {progress.loss:.6g}")
        else:
            self._note(f"{self._name}: {progress.mode} step {progress.step}: loss {progress.loss:.6g} ({ms(progress.dur_ns)})")

    def _print(self, line: str, file: TextIO | None = None) -> None:
        if self._bar is not None:
            self._bar.write(line, file=file)
        else:
            print(line, file=file, flush=True)

    def _note(self, line: str) -> None:
        self._print(line, sys.stderr)


def _mean(loss: StepLoss) -> str:
    return f"{sum(loss.values) / len(loss.values):.9g}" if loss.values else "not finite" if loss.raw_hex else "-"


def _losses_text(reports: tuple[RankReport, ...]) -> str:
    """The losses of the last steps; ranks with equal losses share their lines, and ranks without losses are named in one line."""
    found = {
        report.rank: tuple(f"{x.mode:<7}  {x.step:>4}  {_mean(x)}" for x in report.losses if x.raw_hex)[-_SHOWN_STEPS:]
        for report in reports
    }
    return _by_rank("mode     step  loss", found)


def _table_text(baseline: tuple[RankReport, ...], planned: tuple[RankReport, ...]) -> str:
    """Losses of both runs side by side: all that differ, and the last steps of each rank; ranks with equal lines share them."""
    found = {one.rank: tuple(_rows(one, other)) for one, other in zip(baseline, planned, strict=True)}
    return _by_rank(f"mode     step  {'baseline':<14}  {'interlace':<14}", found)


def _rows(baseline: RankReport, planned: RankReport) -> Iterator[str]:
    pairs = [(a, b) for a, b in zip(baseline.losses, planned.losses, strict=False) if a.raw_hex or b.raw_hex]
    for position, (a, b) in enumerate(pairs):
        same = a.raw_hex == b.raw_hex
        if not same or position >= len(pairs) - _SHOWN_STEPS:
            mark = "" if same else "  <-- differs"
            yield f"{a.mode:<7}  {a.step:>4}  {_mean(a):<14}  {_mean(b):<14}{mark}"


def _by_rank(head: str, found: dict[int, tuple[str, ...]]) -> str:
    from interlace.report.split import merged

    labels = merged({rank: rows for rank, rows in found.items() if rows})
    width = max((len(label) for label, _ in labels), default=0)
    lines = [f"{label:>{max(width, 5)}}  {row}" for label, rank in labels for row in found[rank]]
    silent = [rank for rank, rows in found.items() if not rows]
    none = [f"{ranks_text(silent)}: no losses (only the last pipeline stage has them)"] if silent and lines else []
    return "\n".join([f"{'ranks':>{max(width, 5)}}  {head}", *lines, *none])


def _median_step_ms(result: LaunchResult) -> dict[str, float]:
    """Median step time of the slowest rank in ms, by mode; the first step is left out if there are more."""
    modes = sorted({loss.mode for report in result.reports for loss in report.losses})
    medians = {}
    for mode in modes:
        per_rank = [[x.dur_ns for x in report.losses if x.mode == mode] for report in result.reports]
        warm = [durations[1:] or durations for durations in per_rank if durations]
        medians[mode] = max(statistics.median(durations) for durations in warm) / 1e6
    return medians


def _times_text(name: str, result: LaunchResult, args: argparse.Namespace) -> str:
    medians = ", ".join(f"{mode} {median_ms:.1f} ms" for mode, median_ms in _median_step_ms(result).items())
    return f"{name}: median step {medians or 'none'}; {result.wall_s:.1f} s in total{f'; logs in {result.log_dir}' if args.log_dir else ''}"


def _plan_text(result: LaunchResult) -> str:
    """What the passes did on the first rank, and what its plan gains."""
    plan = result.reports[0].plan
    if plan is None:
        return f"plan: none; {NOT_ASKED}"
    counts = {each["name"]: sum(remark["kind"] != "declined" for remark in each["remarks"]) for each in plan["passes"]}
    done = ", ".join(f"{name} {count} changed" for name, count in counts.items())
    return (
        f"plan of rank 0: {done or 'no pass ran'}; for reasons: print(interlace.plan_of(model).explain()) in the script, or "
        f"dump: FOLDER in the configuration and `interlace show FOLDER/rank0.ilp --why`\n{_told_text(plan)}"
    )


def _told_text(plan: dict[str, Any]) -> str:
    """What the plan gains, and which plan a trial on the device chose."""
    return "\n".join([plan["sentence"], *plan["trial"][:1]])


def _as_dict(result: LaunchResult) -> dict[str, Any]:
    import msgspec

    ranks = msgspec.to_builtins(result.reports)
    return {"median_step_ms": _median_step_ms(result), "wall_s": result.wall_s, "ranks": ranks}


def _write_json(args: argparse.Namespace, content: dict[str, Any]) -> None:
    from interlace.cli.outputs import write_json

    write_json(args.json, {"script": args.script, "world": args.world, "config": args.config, "plan": args.plan, **content})
