"""The memory of small plans, block by block. `pytest --update-golden` rewrites what is expected.

A file starts with `//` lines that say what it shows, then `target:` (a target's name, or rules as JSON); then the plan, behind
`=== program`; then, behind `=== memory`, what `blocks_text` tells.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from interlace.ir import Program, parse
from interlace.ir.copies import items_of
from interlace.ir.kinds import stream_of
from interlace.ir.target import CPU, CUSTOM, GPU, IDEAL, Target
from interlace.scheduler.host_waits.throttle import jobs_with_side_work, sync_at_job_ends, sync_at_outputs, with_host_syncs
from interlace.scheduler.memory.live import (
    END,
    Lives,
    Profile,
    in_order,
    lifetimes,
    needed_at_once,
    order_peak,
    over_time,
    saved_bytes,
)
from interlace.scheduler.memory.pools import pool_bytes
from tests.golden import require_text

FILES = sorted((Path(__file__).parent / "memory").glob("*.txt"))
TARGETS = {target.name: target for target in (CPU, CUSTOM, GPU, IDEAL)}


def times_of(program: Program) -> tuple[np.ndarray, ...]:
    """Issue, start, end and stream of each op instance: one is issued a nanosecond, computation starts 2 later and takes 3, what is on
    another stream starts 4 later and takes 9."""
    ops, items = {op.id: op for op in program.ops}, items_of(program)
    names = list(dict.fromkeys(["", *(stream_of(op) for op in program.ops)]))
    stream = np.array([names.index(stream_of(ops[op_id])) for op_id in items[:, 0].tolist()], np.int64)
    issue = np.arange(len(items), dtype=np.int64)
    start = issue + np.where(stream > 0, 4, 2)
    return issue, start, start + np.where(stream > 0, 9, 3), stream


def lives_text(lives: Lives) -> list[str]:
    """A line for each block."""
    rows = zip(*(column.tolist() for column in lives.columns()), strict=True)
    return [
        f"  {producer}@{m} {size} B{' pinned' if pinned else f' of {stream}' if stream else ''}: "
        f"{alloc}.{alloc_tie} to {'the end' if free == END else free}.{free_tie}"
        for alloc, free, alloc_tie, free_tie, size, pinned, producer, m, stream, _ in sorted(rows, key=lambda row: (row[6], row[7], row))
    ]


def profile_text(profile: Profile) -> list[str]:
    """Peaks and what is there at them, then the blocks."""
    lines = []
    for pool in ("device", "pinned", "all"):
        there = ", ".join(f"{each.count} {each.layer or '-'} {each.kind} {each.size_bytes}" for each in profile.at_peak(pool))
        lines.append(f"  {pool}: {profile.persistable_bytes(pool)} always, at most {profile.peak(pool)} ({there})")
    moments, live = profile.curve("device")
    lines.append(f"  over time: {' '.join(f'{at}:{size}' for at, size in zip(moments.tolist(), live.tolist(), strict=True))}")
    lines.append(f"  pools: {' '.join(f'{stream}:{taken}' for stream, taken in pool_bytes(profile).items())}")
    lines += [f"  unknown: {profile.unknown}"] if profile.unknown else []
    return [*lines, *lives_text(profile.lives)]


def blocks_text(program: Program, target: Target) -> str:
    """What a plan needs one after the other and at given times, and where its host may wait."""
    table = lifetimes(program)
    issue, start, end, stream = times_of(program)
    behind = over_time(program, issue, start, end, stream, target, step=int(end.max(initial=0)) - 8)
    assert behind.carried is not None
    lines = [
        f"order peak {order_peak(program)}, needed at once {needed_at_once(program)}, saved {saved_bytes(program)}, base {table.base}",
        "one after the other:",
        *profile_text(in_order(program, target=target)),
        f"  along: {' '.join(map(str, in_order(program, target=target).lives.pool('device').along(len(issue)).tolist()))}",
        "at given times:",
        *profile_text(over_time(program, issue, start, end, stream, target)),
        "behind another step, which begins 8 ns before this one has ended:",
        *profile_text(behind),
        "of it in the next step:",
        *lives_text(behind.carried),
        f"side work: {' '.join(jobs_with_side_work(program))}",
    ]
    every = [job.name for job in program.jobs]
    for name, waits in (("outputs", sync_at_outputs(program)), ("job ends", sync_at_job_ends(program, every[1:]))):
        lines.append(f"the host waits at {name}:")
        made = with_host_syncs(program, waits)
        lines += [f"  {job.name}: {job.host_waits}" for job in made.jobs if job.host_waits]
    return "\n".join(lines) + "\n"


def target_of(said: str) -> Target:
    """By name, or by its rules."""
    return TARGETS[said] if said in TARGETS else msgspec.json.decode(said, type=Target)


def told(given: str) -> str:
    """The last part of a file whose first parts these are."""
    said = re.search(r"^target: (.*)$", given, re.MULTILINE)
    assert said
    return blocks_text(parse(given.partition("=== program\n")[2]), target_of(said[1]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_memory_of_a_plan(path: Path, update_golden: bool) -> None:
    text = path.read_text()
    given = text.partition("=== memory\n")[0]
    now = f"{given}=== memory\n{told(given)}"
    require_text(path, now, update_golden)


def test_files_are_there() -> None:
    assert len(FILES) > 5
