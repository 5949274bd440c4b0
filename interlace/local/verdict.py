"""Bitwise comparison of a run with Interlace and runs of unmodified Paddle (the baseline).

Unmodified Paddle has known faults. If the two runs differ, or the baseline fails, the baseline runs again: unchanged, then with workarounds
for these faults. The verdict is DIFFERENT only if all of these runs differ from Interlace's, and the baseline repeats its bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec

from interlace.errors import LaunchError
from interlace.local.launch import LaunchResult
from interlace.local.rank_report import STEPS_VARIABLE, RankReport, StepLoss, first_state_difference, write_report
from interlace.temporary import temporary_folder

Run = Callable[[str, Mapping[str, str]], LaunchResult]
"""Runs the script again, given a name for the run and additional environment variables: with unmodified Paddle, or with Interlace if the
name is `PLAN_ALONE`. Raises LaunchError if a rank fails."""
PLAN_ALONE = "interlace-training-only"
EVALUATED = (
    "Paddle's own programs of evaluation or prediction change running statistics; the baseline could not be run with them, so "
    "these are compared between runs that only train"
)
"""Reported if only evaluation or prediction makes the runs differ."""


class Fault(NamedTuple):
    """A fault of unmodified Paddle, and how to run without it.

    Attributes:
        name: Name of the run without it.
        told: Description of the fault.
        env: Environment variables that avoid it.
        trains_only: Whether leaving out evaluation and prediction avoids it.
    """

    name: str
    told: str
    env: Mapping[str, str] = {}
    trains_only: bool = False


FAULTS = (
    Fault(
        "baseline-training-only",
        "Paddle's engine keeps one plan for all modes: after a step of evaluation or prediction it "
        "trains with the wrong one (with gradient accumulation an evaluation trains once more; pipelines die)",
        trains_only=True,
    ),
    Fault(
        "baseline-no-inplace",
        "Paddle's in-place pass overwrites values that are still read (GPT with one sequence a step)",
        {"FLAGS_pir_apply_inplace_pass": "0"},
    ),
)


@dataclass(slots=True)
class Verdict:
    """The result of all runs.

    Attributes:
        verdict: `same`, `different`, or `baseline failed` or `baseline unsteady` if no baseline can be compared with.
        runs: The runs by name: `interlace`, and those of the baseline that completed.
        against: Name of the baseline's run that was compared with.
        of: Name of Interlace's run that was compared: one that only trains if evaluation changes running statistics.
        difference: The first difference between the two; empty if all bits are the same.
        trains_only: Whether the baseline's run left out evaluation and prediction.
        faults: Faults of unmodified Paddle in this script, as far as these runs show them.
    """

    verdict: str
    runs: dict[str, LaunchResult]
    against: str = "baseline"
    difference: str = ""
    trains_only: bool = False
    faults: list[str] = field(default_factory=list)
    of: str = "interlace"


def judge(baseline: LaunchResult | LaunchError, planned: LaunchResult | LaunchError, run: Run) -> Verdict:
    """Compare two runs of a script, and run the baseline again if they differ. Raises LaunchError if Interlace's run failed; the error says
    whether the baseline failed too, and whether runs that only train fail."""
    if isinstance(planned, LaunchError):
        raise LaunchError(_why_it_failed(baseline, planned, run))
    runs = {"interlace": planned}
    if isinstance(baseline, LaunchResult):
        runs["baseline"] = baseline
        difference = first_difference(baseline.reports, planned.reports)
        if difference is None:
            return Verdict("same", runs)
        verdict = _again(baseline, planned, Verdict("different", runs, difference=difference), run)
    else:
        verdict = Verdict("baseline failed", runs, difference=str(baseline), faults=[f"unmodified Paddle's run failed: {_head(baseline)}"])
    return verdict if verdict.verdict == "same" else _without_faults(planned, verdict, run)


def _why_it_failed(baseline: LaunchResult | LaunchError, planned: LaunchError, run: Run) -> str:
    """What is known about Interlace's failed run. If a run reached evaluation or prediction, further runs that only train show whether
    the training plan is at fault."""
    if isinstance(baseline, LaunchResult):
        said, both, given = "Interlace's run failed, unmodified Paddle's did not", f": {planned}", baseline.reports
        if planned.modes <= {"train"}:
            return said + both
    else:
        said, both, given = "both runs failed, unmodified Paddle's too", f"\nbaseline: {baseline}\ninterlace: {planned}", ()
        if planned.modes | baseline.modes <= {"train"}:
            return f"{said}, so no plan is to blame{both}"
    with temporary_folder() as steps:
        for report in given:
            write_report(steps, report)
        env = {STEPS_VARIABLE: os.fspath(steps)}
        theirs = _try(run, FAULTS[0].name, env)
        mine = None if theirs is None else _try(run, PLAN_ALONE, env)
    if theirs is None:
        found = "unmodified Paddle's run that only trains fails as well, so that there is nothing to judge a plan by"
    elif mine is None:
        found = "of runs that only train, without evaluation and prediction, Interlace's fails and the baseline's does not"
    elif difference := first_difference(training(theirs.reports), training(mine.reports)):
        found = f"runs that only train, without evaluation and prediction, come to their end and differ: {difference}"
    else:
        found = "runs that only train come to their end, equal bit by bit, so evaluation or prediction is to blame and no plan of training"
    return f"{said}; {found}{both}"


def _head(error: LaunchError) -> str:
    return str(error).partition("\n")[0]


def _again(baseline: LaunchResult, planned: LaunchResult, verdict: Verdict, run: Run) -> Verdict:
    """Run the unchanged baseline again to see whether it repeats its own bits; the verdict is unchanged if it does."""
    again = _try(run, "baseline-again", {})
    if again is None:
        return verdict
    verdict.runs["baseline-again"] = again
    moved = first_difference(baseline.reports, again.reports)
    if moved is None:
        return verdict
    same = first_difference(again.reports, planned.reports) is None
    return Verdict(
        "same" if same else "baseline unsteady",
        verdict.runs,
        "baseline-again",
        "" if same else verdict.difference,
        faults=[f"unmodified Paddle does not repeat its own bits: {moved.replace('interlace', 'again')}"],
    )


def _without_faults(planned: LaunchResult, verdict: Verdict, run: Run) -> Verdict:
    """Run the baseline with workarounds for known faults, one more each time, until it has the bits of Interlace's run."""
    env: dict[str, str] = {}
    trains_only, told = False, list(verdict.faults)
    with temporary_folder() as steps:
        for fault in FAULTS:
            if fault.trains_only and all(loss.mode == "train" for report in planned.reports for loss in report.losses):
                continue
            if fault.trains_only:
                for report in planned.reports:
                    write_report(steps, report)
                env[STEPS_VARIABLE], trains_only = os.fspath(steps), True
            env.update(fault.env)
            told.append(fault.told)
            result = _try(run, fault.name, env)
            if result is None:
                continue
            verdict.runs[fault.name] = result
            mine, theirs = (training(reports) if trains_only else reports for reports in (planned.reports, result.reports))
            difference = first_difference(theirs, mine)
            if difference is None:
                return Verdict("same", verdict.runs, fault.name, "", trains_only, told)
            if trains_only and _differ_in_buffers_alone(theirs, mine):
                alone = verdict.runs.get(PLAN_ALONE) or _try(run, PLAN_ALONE, {STEPS_VARIABLE: env[STEPS_VARIABLE]})
                if alone is not None:
                    verdict.runs[PLAN_ALONE] = alone
                    difference = first_difference(theirs, training(alone.reports))
                    if difference is None:
                        return Verdict("same", verdict.runs, fault.name, "", trains_only, [*told, EVALUATED], PLAN_ALONE)
            if verdict.verdict == "baseline failed":
                verdict = Verdict("different", verdict.runs, fault.name, difference, trains_only, list(verdict.faults))
    return verdict


def _differ_in_buffers_alone(baseline: Sequence[RankReport], planned: Sequence[RankReport]) -> bool:
    """Whether losses, parameters and all other state are equal bit by bit, and running statistics and other buffers are not."""
    plain = (
        [
            msgspec.structs.replace(report, state={kind: names for kind, names in report.state.items() if kind != "buffer"})
            for report in reports
        ]
        for reports in (baseline, planned)
    )
    return first_difference(baseline, planned) is not None and first_difference(*plain) is None


def _try(run: Run, name: str, env: Mapping[str, str]) -> LaunchResult | None:
    try:
        return run(name, env)
    except LaunchError:
        return None


def training(reports: Sequence[RankReport]) -> tuple[RankReport, ...]:
    """The reports without losses of modes other than training."""
    return tuple(
        msgspec.structs.replace(report, losses=tuple(loss for loss in report.losses if loss.mode == "train")) for report in reports
    )


def first_difference(baseline: Sequence[RankReport], planned: Sequence[RankReport]) -> str | None:
    """The first loss or, if all losses are equal, parameter or other state whose bits differ between two runs; None if all are the same."""
    pairs = list(zip(baseline, planned, strict=True))
    differing = [found for one, other in pairs if (found := _first_loss(one, other)) is not None]
    if differing:
        return min(differing)[1]
    return next((text for one, other in pairs if (text := first_state_difference(one, other))), None)


_BITS = attrgetter("mode", "step", "dtype", "shape", "raw_hex")


def _first_loss(baseline: RankReport, planned: RankReport) -> tuple[int, str] | None:
    """Position in the run and description of a rank's first differing loss."""
    for position, (one, other) in enumerate(zip(baseline.losses, planned.losses, strict=False)):
        if _BITS(one) != _BITS(other):
            where = f"rank {baseline.rank}, {one.mode} step {one.step}"
            return position, f"{where}: baseline {_exact(one)}, interlace {_exact(other)}"
    if len(baseline.losses) != len(planned.losses):
        position = min(len(baseline.losses), len(planned.losses))
        return position, f"rank {baseline.rank}: baseline ran {len(baseline.losses)} steps, interlace {len(planned.losses)}"
    return None


def _exact(loss: StepLoss) -> str:
    if not loss.raw_hex:
        return "no loss"
    shown = ", ".join(f"{value!r}" for value in loss.values[:4])
    more = ", ..." if len(loss.values) > 4 else ""
    return f"{shown or 'not finite'}{more} ({loss.dtype}{list(loss.shape)}, bits {loss.raw_hex[:32]})"
