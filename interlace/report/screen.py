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


def step_table(outcome: Outcome) -> str:
    """The split of the step in ms and memory in GiB, by stage; the plan compared with stands under each."""
    heads = ["step ms", *(name for name, _ in COLUMNS), "peak GiB", "pinned"]
    sides = [("", outcome.plan)] + ([(outcome.against, outcome.before)] if outcome.before else [])
    rows = [(f"stage {mine.stage}, {ranks_text(mine.ranks)}" if not name else f"  {name}", step.step_ns, mine)
            for place in range(len(outcome.plan.stages)) for name, step in sides for mine in step.stages[place : place + 1]]  # fmt: skip
    width = max(len(label) for label, _, _ in rows)
    lines = [(" " * width, heads), *((f"{label:<{width}}", _cells(step_ns, each)) for label, step_ns, each in rows)]
    return "\n".join(label + "".join(f"{cell:>10}" for cell in cells) for label, cells in lines)


def _cells(step_ns: int, stage: StageStep) -> list[str]:
    times = [step_ns, *(getattr(stage, field) for _, field in COLUMNS)]
    return [*(ms_figure(time) for time in times), *(f"{size / 2**30:.3f}" for size in (stage.peak_bytes, stage.pinned_bytes))]


def rules_text(reports: Mapping[int, Sequence[PassReport]]) -> str:
    """What passes did and declined; `reports` of one rank of each stage, by stage."""
    done, declined = rules(reports, lambda report: report.changed), rules(reports, lambda report: report.declined)
    return "\n".join(["done:", *_listed(done, sorted(reports)), "declined:", *_listed(declined, sorted(reports))])


def report_text(report: PassReport, limit: int | None = None) -> str:
    """What one pass did and declined, by rule, at most `limit` of each sort."""
    parts = (("+", rules({0: [report]}, lambda each: each.changed)), ("-", rules({0: [report]}, lambda each: each.declined)))
    lines = [report.head()]
    for sign, found in parts:
        lines += [f"  {sign} {_line(rule, [0])}" for rule in found[:limit]]
        lines += [f"  {sign} ... {len(found) - limit} more"] if limit is not None and len(found) > limit else []
    return "\n".join(lines)


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
