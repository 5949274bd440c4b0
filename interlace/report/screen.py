"""The screen that `interlace plan` prints: the step by stage with that of the baseline, then what passes did and declined, by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from interlace.ir.remarks import Remark
from interlace.passes.pipeline import PassReport
from interlace.planning.outcome import Outcome, StageStep
from interlace.report.outcome import imbalance
from interlace.report.remarks import sentence
from interlace.report.rules import Rule, rules
from interlace.units import Unit, ranges, ranks_text

COLUMNS = (("compute", "compute_ns"), ("exposed", "exposed_ns"), ("bubble", "bubble_ns"), ("host", "host_ns"), ("hidden", "hidden_ns"))
MOST_RULES = 4
"""Most rules shown for one pass, of those done and of those declined."""
MOST_LAYERS = 4


def step_table(outcome: Outcome) -> str:
    """The split of the step in ms, memory in a suitable unit, energy and clock if known, by stage; below each stage, the same for the plan
    compared with."""
    sides = [("", outcome.plan)] + ([(outcome.against, outcome.before)] if outcome.before else [])
    rows = [
        (f"stage {mine.stage}, {ranks_text(mine.ranks)}" if not name else f"  {name}", step.step_ns, mine)
        for place in range(len(outcome.plan.stages))
        for name, step in sides
        for mine in step.stages[place : place + 1]
    ]
    unit = Unit.of(size for _, _, each in rows for size in (each.peak_bytes, each.pinned_bytes))
    powered = any(each.joules for _, _, each in rows)
    heads = ["step ms", *(name for name, _ in COLUMNS), f"peak {unit.name}", "pinned", *(["J a rank", "MHz"] if powered else [])]
    width = max(len(label) for label, _, _ in rows)
    lines = [(" " * width, heads), *((f"{label:<{width}}", _cells(step_ns, each, unit, powered)) for label, step_ns, each in rows)]
    return "\n".join(label + "".join(f"{cell:>10}" for cell in cells) for label, cells in lines)


def imbalance_lines(outcome: Outcome | None) -> list[str]:
    """A line about the gain of an even split over the stages; none if the gain is small."""
    return list(filter(None, [imbalance(outcome.plan)])) if outcome else []


def _cells(step_ns: int, stage: StageStep, unit: Unit, powered: bool) -> list[str]:
    times = [step_ns, *(getattr(stage, field) for _, field in COLUMNS)]
    power = [f"{stage.joules:.1f}", f"{stage.mean_mhz}"] if powered else []
    return [*(f"{time / 1e6:.3f}" for time in times), unit.figure(stage.peak_bytes), unit.figure(stage.pinned_bytes), *power]


def rules_text(reports: Mapping[int, Sequence[PassReport]]) -> str:
    """What passes did and declined. `reports`: stage -> reports of one of its ranks."""
    done, declined = rules(reports, lambda report: report.done), rules(reports, lambda report: report.declined)
    told = {rule.name for rule in (*done, *declined)}
    idle = [name for name in dict.fromkeys(report.name for each in reports.values() for report in each) if name not in told]
    return "\n".join(["done:", *_listed(done, sorted(reports)), "declined:", *_listed(declined, sorted(reports)), *_idle_line(idle)])


def reports_text(reports: Sequence[PassReport], limit: int | None = None, names_rules: bool = False) -> list[str]:
    """A block for each pass of a rank that changed something; then a line for each that only declined, and one for all that had nothing to
    do. With `limit`, at most that many rules done, and as many declined, are shown per pass; with `names_rules`, each line ends with the
    name of its rule."""
    blocks = [line for report in reports if report.done for line in _report_lines(report, limit, names_rules)]
    left = [report for report in reports if report.declined and not report.done]
    lines = [f"  {report.name}: {'; '.join(_rule_lines(report, report.declined, limit, names_rules))}" for report in left]
    return [*blocks, *(["changed nothing:", *lines] if lines else []), *_idle_line([each.name for each in reports if not each.remarks])]


def places_text(reports: Sequence[PassReport]) -> list[str]:
    """Every remark of every pass, one per line."""
    signs = {True: "-", False: "+"}
    return [
        line
        for report in reports
        for line in (
            _head(report),
            *(f"  {signs[each.kind == 'declined']} {sentence(each)} [{each.rule}]" for each in (*report.done, *report.declined)),
        )
    ]


def _head(report: PassReport) -> str:
    """One line with how much a pass did."""
    done = f"{len(report.done)} changed, {len(report.declined)} declined" if report.remarks else "found nothing to do"
    return f"{report.name}: {done}, ops {report.ops_before} -> {report.ops_after}"


def _idle_line(names: Sequence[str]) -> list[str]:
    return [f"nothing to do for {', '.join(names)}"] if names else []


def _report_lines(report: PassReport, limit: int | None, names_rules: bool) -> list[str]:
    """What one pass did and declined, by rule, at most `limit` of each."""
    parts = (("+", report.done), ("-", report.declined))
    return [_head(report), *(f"  {sign} {line}" for sign, said in parts for line in _rule_lines(report, said, limit, names_rules))]


def _rule_lines(report: PassReport, said: Sequence[Remark], limit: int | None, names_rules: bool) -> list[str]:
    """Lines of one pass by rule, at most `limit`."""
    found = rules({0: [report]}, lambda _: said)
    more = [f"... {len(found) - limit} more"] if limit is not None and len(found) > limit else []
    return [*(_line(rule, [0]) + f" [{rule.rule}]" * names_rules for rule in found[:limit]), *more]


def _listed(found: Sequence[Rule], stages: Sequence[int]) -> list[str]:
    names = list(dict.fromkeys(rule.name for rule in found))
    lines = []
    for name in names:
        mine = [_line(rule, stages) for rule in found if rule.name == name]
        more = [f"... {len(mine) - MOST_RULES} more"] if len(mine) > MOST_RULES else []
        lines += [f"  {name if not k else '':<24}{line}" for k, line in enumerate([*mine[:MOST_RULES], *more])]
    return lines or ["  nothing"]


def _line(rule: Rule, stages: Sequence[int]) -> str:
    """One rule with its layers, the number of places, and its stages unless these are all."""
    layers = ", ".join(rule.layers[:MOST_LAYERS]) + (f", {len(rule.layers) - MOST_LAYERS} more" if len(rule.layers) > MOST_LAYERS else "")
    notes = [f"in {layers}"] if layers else []
    notes += [f"{rule.count} places"] if rule.count > len(rule.stages) else []
    notes += [f"stage{'s' * (len(rule.stages) > 1)} {ranges(rule.stages)}"] if rule.stages != list(stages) else []
    return rule.text + (f"  ({'; '.join(notes)})" if notes else "")
