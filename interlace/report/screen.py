"""What `interlace plan` prints: the step by stage beside Paddle's own, then what was done and declined, by rule; one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from interlace.passes.pipeline import PassReport
from interlace.report.outcome import Outcome, StageStep
from interlace.report.rules import Rule, rules
from interlace.units import ms_figure, ranges, ranks_text

COLUMNS = (("compute", "compute_ns"), ("exposed", "exposed_ns"), ("bubble", "bubble_ns"), ("host", "host_ns"), ("hidden", "hidden_ns"))
MOST_RULES = 4
"""Of one pass, done or declined."""
MOST_LAYERS = 4
NOTHING = ("found nothing to do",)
"""What a report declines where its pass has nothing to say (`Pipeline`)."""


def step_table(outcome: Outcome) -> str:
    """The split of the step in ms and memory in GiB, by stage; the plan compared with stands under each."""
    heads = ["step ms", *(name for name, _ in COLUMNS), "peak GiB", "pinned"]
    sides = [("", outcome.plan)] + ([(outcome.against, outcome.before)] if outcome.before else [])
    rows = [
        (f"stage {mine.stage}, {ranks_text(mine.ranks)}" if not name else f"  {name}", step.step_ns, mine)
        for place in range(len(outcome.plan.stages))
        for name, step in sides
        for mine in step.stages[place : place + 1]
    ]
    width = max(len(label) for label, _, _ in rows)
    lines = [(" " * width, heads), *((f"{label:<{width}}", _cells(step_ns, each)) for label, step_ns, each in rows)]
    return "\n".join(label + "".join(f"{cell:>10}" for cell in cells) for label, cells in lines)


def imbalance_lines(outcome: Outcome | None) -> list[str]:
    """What an even split over the stages would bring, where it would."""
    return list(filter(None, [outcome.plan.imbalance()])) if outcome else []


def _cells(step_ns: int, stage: StageStep) -> list[str]:
    times = [step_ns, *(getattr(stage, field) for _, field in COLUMNS)]
    return [*(ms_figure(time) for time in times), *(f"{size / 2**30:.3f}" for size in (stage.peak_bytes, stage.pinned_bytes))]


def rules_text(reports: Mapping[int, Sequence[PassReport]]) -> str:
    """What passes did and declined; `reports` of one rank of each stage, by stage."""
    said = {stage: [report for report in each if not _is_idle(report)] for stage, each in reports.items()}
    done, declined = rules(said, lambda report: report.changed), rules(said, lambda report: report.declined)
    told = {rule.name for rule in (*done, *declined)}
    idle = [name for name in dict.fromkeys(report.name for each in reports.values() for report in each) if name not in told]
    return "\n".join(["done:", *_listed(done, sorted(reports)), "declined:", *_listed(declined, sorted(reports)), *_idle_line(idle)])


def reports_text(reports: Sequence[PassReport], limit: int | None = None) -> list[str]:
    """A block for each pass that changed something; then a line for each that only declined, and one for all that had nothing to do."""
    blocks = [line for report in reports if report.changed for line in report_text(report, limit).splitlines()]
    left = [report for report in reports if not report.changed and not _is_idle(report)]
    lines = [f"  {report.name}: {'; '.join(_rule_lines(report.declined, limit))}" for report in left]
    return [*blocks, *(["changed nothing:", *lines] if lines else []), *_idle_line([each.name for each in reports if _is_idle(each)])]


def _is_idle(report: PassReport) -> bool:
    return not report.changed and report.declined in ((), NOTHING)


def _idle_line(names: Sequence[str]) -> list[str]:
    return [f"nothing to do for {', '.join(names)}"] if names else []


def report_text(report: PassReport, limit: int | None = None) -> str:
    """What one pass did and declined, by rule, at most `limit` of each sort."""
    parts = (("+", report.changed), ("-", report.declined))
    return "\n".join([report.head(), *(f"  {sign} {line}" for sign, said in parts for line in _rule_lines(said, limit))])


def _rule_lines(said: Sequence[str], limit: int | None) -> list[str]:
    """Lines of one pass by rule, at most `limit`."""
    found = rules({0: [PassReport("", tuple(said), (), 0, 0, 0)]}, lambda each: each.changed)
    more = [f"... {len(found) - limit} more"] if limit is not None and len(found) > limit else []
    return [*(_line(rule, [0]) for rule in found[:limit]), *more]


def _listed(found: Sequence[Rule], stages: Sequence[int]) -> list[str]:
    names = list(dict.fromkeys(rule.name for rule in found))
    lines = []
    for name in names:
        mine = [_line(rule, stages) for rule in found if rule.name == name]
        more = [f"... {len(mine) - MOST_RULES} more"] if len(mine) > MOST_RULES else []
        lines += [f"  {name if not k else '':<24}{line}" for k, line in enumerate([*mine[:MOST_RULES], *more])]
    return lines or ["  nothing"]


def _line(rule: Rule, stages: Sequence[int]) -> str:
    """One rule with its layers, how often, and where if not everywhere."""
    layers = ", ".join(rule.layers[:MOST_LAYERS]) + (f", {len(rule.layers) - MOST_LAYERS} more" if len(rule.layers) > MOST_LAYERS else "")
    notes = [f"in {layers}"] if layers else []
    notes += [f"{rule.count} places"] if rule.count > len(rule.stages) else []
    notes += [f"stage{'s' * (len(rule.stages) > 1)} {ranges(rule.stages)}"] if rule.stages != list(stages) else []
    return rule.text + (f"  ({'; '.join(notes)})" if notes else "")
