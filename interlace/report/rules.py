"""What passes did and declined, by rule: remarks that differ only in figures, layers and operations are summarized as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from interlace.ir.kinds import layer_pattern
from interlace.ir.remarks import Kind, Number, Remark
from interlace.passes.pipeline import PassReport
from interlace.report.remarks import key_of, summary


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one pass did, or declined, in `count` places in all, on one rank of each of these stages.

    Attributes:
        name: Name of the pass.
        rule, kind: As in its remarks.
        text: One sentence for all of them.
        numbers: Their figures by name: least and greatest.
        layers: Their layers with `*` for numbers; empty if the remarks name none.
    """

    name: str
    rule: str
    kind: Kind
    text: str
    numbers: dict[str, tuple[Number, Number]]
    layers: list[str]
    count: int
    stages: list[int]


def rules(reports: Mapping[int, Sequence[PassReport]], of: Callable[[PassReport], Sequence[Remark]]) -> list[Rule]:
    """The remarks of passes by rule, in the order of the passes. `reports`: stage -> reports of one of its ranks; `of` selects remarks of a
    report."""
    found: dict[tuple[str, str, str], list[tuple[int, Remark]]] = {}
    order: dict[str, None] = {}
    for stage, each in sorted(reports.items()):
        for report in each:
            order.setdefault(report.name)
            for remark in of(report):
                found.setdefault((report.name, remark.rule, key_of(remark)), []).append((stage, remark))
    rows = [_rule(name, group) for (name, _, _), group in found.items()]
    return sorted(rows, key=lambda rule: list(order).index(rule.name))


def _rule(name: str, group: Sequence[tuple[int, Remark]]) -> Rule:
    remarks = [remark for _, remark in group]
    layers = {layer_pattern(each.place.layer) for each in remarks if each.place.layer}
    stages = {stage for stage, _ in group}
    return Rule(name, remarks[0].rule, remarks[0].kind, summary(remarks), _spans(remarks), sorted(layers), len(group), sorted(stages))


def _spans(remarks: Sequence[Remark]) -> dict[str, tuple[Number, Number]]:
    figures: dict[str, list[Number]] = {}
    for each in remarks:
        for name, number in each.numbers.items():
            figures.setdefault(name, []).extend(number if isinstance(number, tuple) else (number,))
    return {name: (min(each), max(each)) for name, each in figures.items() if each}
