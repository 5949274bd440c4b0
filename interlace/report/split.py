"""The split of a step's time, as text and as rows for machines; `scheduler/simulate/simulator.py` defines the parts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from interlace.grouping import grouped
from interlace.scheduler.simulate.simulator import RankTime, Result
from interlace.units import Unit, ranges

COLUMNS = (
    ("compute", "compute_ns"),
    ("exposed", "exposed_comm_ns"),
    ("bubble", "bubble_ns"),
    ("host", "host_ns"),
    ("hidden", "hidden_comm_ns"),
    ("idle", "idle_ns"),
    ("slowed", "slowed_ns"),
)
_LEGEND = """\
ms a step: step = compute + exposed + bubble + host
exposed  communication or copies run, no compute does, and the next compute op waits for them
bubble   waits for other ranks, except where the step before can still finish meanwhile
host     waits for the host to issue
hidden   communication or copies that run beside compute
idle     nothing runs on the device (part of bubble and host)
slowed   the part of compute that is due to what runs beside it"""


def rows(result: Result) -> list[dict[str, int]]:
    """One record per rank: `rank, step_ns, compute_ns, exposed_comm_ns, ..., peak_bytes, pinned_bytes`."""
    return [{name: getattr(rank, name) for name in RankTime.__slots__} for rank in result.ranks]


def merged(lines: Mapping[int, Hashable]) -> list[tuple[str, int]]:
    """Ranks with equal lines, as `(label, first rank)`.

    >>> merged({0: "a", 1: "a", 2: "b", 3: "a"})
    [('0-1, 3', 0), ('2', 2)]
    """
    return [(ranges(ranks), ranks[0]) for ranks in grouped((lines[rank], rank) for rank in sorted(lines)).values()]


def split_text(results: Mapping[str, Result]) -> str:
    """A table of the splits of one or more plans, with equal ranks on one row, then the mean, and the change from the first plan to the
    last."""
    names = list(results)
    width = max((len(name) for name in ("plan", *names)), default=0)
    found = {
        name: {number: rank for rank, program in zip(result.ranks, result.input.programs, strict=True) for number in program.ranks}
        for name, result in results.items()
    }
    unit = Unit.of(size for table in found.values() for rank in table.values() for size in (rank.peak_bytes, rank.pinned_bytes))

    def shown(label: str, rank: int) -> list[str]:
        return [_line(label, name, width, [found[name][rank]], unit) for name in names if rank in found[name]]

    every = sorted({rank for table in found.values() for rank in table})
    labels = merged({rank: tuple(shown("", rank)) for rank in every})
    wide = max(5, *(len(label) for label, _ in labels))
    head = f"{'ranks':>{wide}}  {'plan':<{width}}  {'step':>9}" + "".join(f"  {label:>8}" for label, _ in COLUMNS)
    lines = [head + f"  {f'peak {unit.name}':>8}  {'pinned':>8}"]
    for label, rank in labels:
        lines += shown(label.rjust(wide), rank)
    if any(len(table) > 1 for table in found.values()):
        lines += [_line("mean".rjust(wide), name, width, list(found[name].values()), unit) for name in names]
    return "\n".join([*lines, "", _LEGEND, *_change(results)])


def _line(label: str, name: str, width: int, ranks: list[RankTime], unit: Unit) -> str:
    times = [sum(getattr(rank, column) for rank in ranks) / len(ranks) / 1e6 for _, column in COLUMNS]
    step = sum(rank.step_ns for rank in ranks) / len(ranks) / 1e6
    memory = [sum(rank.peak_bytes for rank in ranks), sum(rank.pinned_bytes for rank in ranks)]
    return (
        f"{label:>5}  {name:<{width}}  {step:9.3f}"
        + "".join(f"  {time:8.3f}" for time in times)
        + "".join(f"  {unit.figure(size / len(ranks)):>8}" for size in memory)
    )


def _change(results: Mapping[str, Result]) -> list[str]:
    """Percentage by which the last plan's step is longer than the first one's; negative for a gain.

    >>> from types import SimpleNamespace
    >>> _change({"baseline": SimpleNamespace(step_ns=5_000_000), "plan": SimpleNamespace(step_ns=4_000_000)})[1]
    'plan against baseline: 5.000 -> 4.000 ms a step (-20.0 %)'
    """
    names = list(results)
    if len(names) < 2:
        return []
    first, last = results[names[0]].step_ns, results[names[-1]].step_ns
    change = 100 * (last / first - 1) if first else 0.0
    return ["", f"{names[-1]} against {names[0]}: {first / 1e6:.3f} -> {last / 1e6:.3f} ms a step ({change:+.1f} %)"]
