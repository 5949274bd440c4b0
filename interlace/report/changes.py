"""What a pass changed: operations that it added, removed, changed or moved, summed by name; job by job if there are jobs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from interlace.ir import Op, Program
from interlace.ir.kinds import layer_pattern
from interlace.scheduler.jobs.parts import slot_text

Item = tuple[int, int]
"""An op instance: operation and micro-batch."""
MOST_LINES = 12
MOST_NAMES = 6
MOST_LETTERS = 40
PROGRAM = "program order"


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What changed in one place, or in the same way in several. `where` has slots of a schedule, for jobs, or the name of a part of the
    program."""

    where: list[str]
    lines: list[str]


def changes(before: Program, after: Program) -> list[Change]:
    """All differences between a program before a pass and after it, with jobs that changed in the same way together; empty if there are
    none."""
    old, new = ({op.id: op for op in program.ops} for program in (before, after))
    found = [Change(["operations"], _fields(old, new))]
    if after.jobs:
        found += _jobs(before, after, old | new)
    else:
        found.append(Change([PROGRAM], _order([(op, 0) for op in old], [(op, 0) for op in new], old | new)))
    found.append(Change(["events between jobs"], _counts(len(before.events), len(after.events))))
    return [each for each in found if each.lines]


def changes_text(found: Sequence[Change]) -> list[str]:
    """The changes as lines, at most `MOST_LINES` per place."""
    lines = []
    for each in found:
        more = f"  ... {len(each.lines) - MOST_LINES} more" if len(each.lines) > MOST_LINES else ""
        lines += [f"{_where(each.where)}:", *(f"  {line}" for line in each.lines[:MOST_LINES]), *filter(None, [more])]
    return lines


def _where(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    return f"{shown} ({len(names)} jobs alike)" if len(names) > 1 else shown


def _jobs(before: Program, after: Program, ops: Mapping[int, Op]) -> list[Change]:
    """Changes of each job from what it was before or, for a new job, from the order of the program before, micro-batch by micro-batch; and
    jobs that were removed."""
    known = {job.name: job for job in before.jobs}
    place = {op.id: k for k, op in enumerate(before.ops)}
    alike: dict[tuple[str, ...], list[str]] = {}
    for job in after.jobs:
        if job.name in known:
            lines = _order(known[job.name].items, job.items, ops)
            lines += _counts(len(known[job.name].host_waits), len(job.host_waits), "host waits ")
        else:
            lines = _made(job.items, place, ops)
        alike.setdefault(tuple(lines), []).append(slot_text(job.name))
    gone = [slot_text(name) for name in known if name not in {job.name for job in after.jobs}]
    return [*(Change(names, list(lines)) for lines, names in alike.items()), Change(gone, ["- the job"] if gone else [])]


def _made(items: Sequence[Item], place: Mapping[int, int], ops: Mapping[int, Op]) -> list[str]:
    """Lines for a new job: what it consists of, and which operations have another order than in the program."""
    batches = list(dict.fromkeys(batch for _, batch in items))
    switches = sum(a != b for (_, a), (_, b) in pairwise(items))
    mixed = f" of {len(batches)} micro-batches, {switches} changes from one to the other" if len(batches) > 1 else ""
    lines = [f"+ a job of {len(items)} operations{mixed}"]
    for batch in batches:
        mine = [item for item in items if item[1] == batch]
        lines += _order(sorted(mine, key=lambda item: place.get(item[0], len(place))), mine, ops)
    return list(dict.fromkeys(lines))


def _order(old: Sequence[Item], new: Sequence[Item], ops: Mapping[int, Op]) -> list[str]:
    """Lines for op instances that were added or removed and, of those in both orders, for those that moved."""
    there, here = {item: k for k, item in enumerate(old)}, set(new)
    lines = [f"+ {text}" for text in _summed(ops[op] for op, _ in (item for item in new if item not in there))]
    lines += [f"- {text}" for text in _summed(ops[op] for op, _ in (item for item in old if item not in here))]
    kept = [item for item in new if item in there]
    was = {item: k for k, item in enumerate(item for item in old if item in here)}
    stays = _longest_rising([was[item] for item in kept])
    moved: dict[tuple[str, str, str], list[int]] = {}
    after = "the end"
    for k in range(len(kept) - 1, -1, -1):
        name = _name(ops[kept[k][0]])
        if k in stays:
            after = name
        else:
            by = k - was[kept[k]]
            moved.setdefault((name, "later" if by > 0 else "earlier", after), []).append(abs(by))
    return lines + _moves(moved)


def _moves(moved: dict[tuple[str, str, str], list[int]]) -> list[str]:
    """Lines for operations that moved; if there are more than `MOST_LINES`, without the operation that each now precedes."""
    told = [f"> {len(by)} {name}: {_span(by)} {way}, now before {after}" for (name, way, after), by in reversed(moved.items())]
    if len(told) <= MOST_LINES:
        return told
    summed: dict[tuple[str, str], list[int]] = {}
    for (name, way, _), by in moved.items():
        summed.setdefault((name, way), []).extend(by)
    ranked = sorted(summed.items(), key=lambda each: (-len(each[1]), each[0]))
    return [f"> {len(by)} {name}: {_span(by)} {way}" for (name, way), by in ranked]


def _span(by: Sequence[int]) -> str:
    low, high = min(by), max(by)
    return f"{low} to {high} places" if low < high else f"{low} place{'s' * (low != 1)}"


def _longest_rising(numbers: Sequence[int]) -> set[int]:
    """Positions of a longest increasing subsequence, so that as few operations as possible count as moved. O(n log n).

    >>> sorted(_longest_rising([3, 0, 1, 4, 2]))
    [1, 2, 4]
    """
    ends, before = list[int](), list[int]()
    values: list[int] = []
    for k, number in enumerate(numbers):
        at = bisect_left(values, number)
        before.append(ends[at - 1] if at else -1)
        ends[at : at + 1], values[at : at + 1] = [k], [number]
    found, k = set[int](), ends[-1] if ends else -1
    while k >= 0:
        found.add(k)
        k = before[k]
    return found


def _summed(ops: Iterable[Op]) -> list[str]:
    """Operations by name, as `12 matmul (blocks.*.mlp)`, most frequent first."""
    count = Counter(map(_name, ops))
    return [f"{number} {name}" for name, number in sorted(count.items(), key=lambda each: (-each[1], each[0]))]


def _fields(old: Mapping[int, Op], new: Mapping[int, Op]) -> list[str]:
    """Lines for operations that are in both programs and differ, by name and by what differs."""
    both = (op_id for op_id in old.keys() & new.keys() if old[op_id] != new[op_id])
    count = Counter((_name(new[op_id]), "; ".join(_differing(old[op_id], new[op_id]))) for op_id in both)
    return [f"~ {number} {name}: {text}" for (name, text), number in sorted(count.items(), key=lambda each: (-each[1], each[0]))]


def _differing(old: Op, new: Op) -> list[str]:
    names = [name for name in Op.__struct_fields__ if getattr(old, name) != getattr(new, name)]
    told = [name for name in names if name in ("name", "role", "stream", "priority", "layer")]
    lines = [_one(name, getattr(old, name), getattr(new, name)) for name in told]
    lines += [f"other {name}" for name in names if name in ("operands", "results", "group", "no_buffer", "inplace", "views")]
    if "attrs" in names:
        lines += [
            _one(key, old.attrs.get(key), new.attrs.get(key))
            for key in sorted(old.attrs.keys() | new.attrs.keys())
            if old.attrs.get(key) != new.attrs.get(key)
        ]
    return lines or [f"other {name}" for name in names]


def _one(name: str, old: Any, new: Any) -> str:
    return f"{name} {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = "none" if value in (None, "") else str(value)
    return text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS] + "..."


def _counts(old: int, new: int, what: str = "") -> list[str]:
    return [f"{what}{old} -> {new}"] if old != new else []


def _name(op: Op) -> str:
    return f"{op.kind} ({layer_pattern(op.layer)})" if op.layer else op.kind
