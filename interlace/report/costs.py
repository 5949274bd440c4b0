"""The times of a step's operations, summed by kind and by layer, largest first, and how well they are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from interlace.cost_model.base import HOWS, Row
from interlace.grouping import grouped
from interlace.ir.kinds import layer_pattern
from interlace.units import ms_figure

EXACT, BETWEEN = ("exact", "given", "free"), ("interpolated",)
"""How a time is known (`Estimate.how`), for the columns `exact` and `interpolated`; all others are estimates."""
MOST_ROWS = 12
HEADS = ("ops", "times a step", "ms a step", "share", "exact", "interpolated", "estimated")


class CostSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operations of one kind or layer pattern (`name`).

    Attributes:
        ops, runs: Number of operations, and of their runs in a step.
        dur_ns: Total time of these runs; the other times are its parts by how they are known.
    """

    name: str
    ops: int
    runs: int
    dur_ns: int
    exact_ns: int
    interpolated_ns: int
    estimated_ns: int


def by_kind(rows: Sequence[Row]) -> list[CostSum]:
    """Sums by kind of operation, most time first."""
    return _sums(rows, lambda row: row.kind)


def by_layer(rows: Sequence[Row]) -> list[CostSum]:
    """Sums by layer pattern (`blocks.*.mlp`), most time first."""
    return _sums(rows, lambda row: layer_pattern(row.layer) or "no layer")


def _sums(rows: Sequence[Row], name: Callable[[Row], str]) -> list[CostSum]:
    sums = []
    for each, group in grouped((name(row), row) for row in rows).items():
        whole, exact, between = _time(group), _time(group, EXACT), _time(group, BETWEEN)
        sums.append(CostSum(each, len(group), sum(row.runs for row in group), whole, exact, between, whole - exact - between))
    return sorted(sums, key=lambda each: (-each.dur_ns, each.name))


def _time(rows: Sequence[Row], ways: Sequence[str] = HOWS) -> int:
    """Time of all runs in a step, in nanoseconds, that is known in one of these ways."""
    return sum(row.runs * row.dur_ns for row in rows if row.how in ways)


def sums_text(title: str, sums: Sequence[CostSum], every: bool) -> list[str]:
    """Lines of a table, the sum last; without `every`, small entries are summed up in one line."""
    shown = sums if every else [each for each in sums[:MOST_ROWS] if each.dur_ns]
    rest = [each for each in sums if each not in shown]
    total = sum(each.dur_ns for each in sums)
    lines = [(each.name, each) for each in shown]
    lines += [(f"{len(rest)} more", _together(rest))] if rest else []
    lines.append(("sum", _together(sums)))
    width = max(len(title), *(len(name) for name, _ in lines))
    widths = [max(9, len(head)) for head in HEADS]

    def line(name: str, cells: Sequence[str]) -> str:
        return f"{name:<{width}}" + "".join(f"  {cell:>{wide}}" for cell, wide in zip(cells, widths, strict=True))

    return [line(title, HEADS), *(line(name, _cells(each, total)) for name, each in lines)]


def _together(sums: Sequence[CostSum]) -> CostSum:
    return CostSum("", *(sum(getattr(each, field) for each in sums) for field in CostSum.__struct_fields__[1:]))


def _cells(each: CostSum, total_ns: int) -> list[str]:
    of_mine = [f"{part / each.dur_ns:.0%}" if each.dur_ns else "-" for part in (each.exact_ns, each.interpolated_ns, each.estimated_ns)]
    return [str(each.ops), str(each.runs), ms_figure(each.dur_ns), f"{each.dur_ns / total_ns:.1%}" if total_ns else "-", *of_mine]


def op_lines(rows: Sequence[Row]) -> list[str]:
    """A line for every operation, those that take most of the step first."""
    ranked = sorted(rows, key=lambda row: (-row.runs * row.dur_ns, row.op))
    return [
        f"#{row.op:<6} {row.kind:28} {row.layer:32} {row.category:24} {row.dur_ns / 1e6:10.4f} ms x {row.runs:<4} {row.how}{_padding(row)}"
        for row in ranked
    ]


def _padding(row: Row) -> str:
    """What padded sizes would save."""
    return f", {row.unaligned_ns / 1e6:.4f} ms less with rows of multiples of 16 bytes" if row.unaligned_ns else ""
