"""Simulated steps as Chrome-trace JSON, which opens in Perfetto: ranks as processes, streams as threads.

Thread 0 of each rank is the host with its jobs, from the first op's issue to the last's. Arrows go from communication and
copies to the ops on other streams that wait for them, and from each send to its receive. Counters are device and pinned
memory. Two more threads give an overview: micro-batches (as letters, so that each has its own colour), and the time without
computation by its part of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from interlace.ir.dump import write_whole
from interlace.ir.kinds import is_comm, is_copy, is_receive, is_send
from interlace.scheduler.simulate.parts import parts_of
from interlace.scheduler.simulate.simulator import Result
from interlace.units import ranks_text

Event = dict[str, Any]
HOST = 0
"""Thread of the host; stream k of a rank is thread k + 1."""


def chrome_trace(result: Result, beside: Mapping[str, Result] | None = None) -> dict[str, Any]:
    """The trace as plain data; times are in microseconds, as the format requires.

    `beside` maps names to plans to compare with; each of their ranks is shown above the same rank of the result.
    """
    events = _events(result, "plan" if beside else "")
    shift = 1 + max(result.input.ranks)
    flows = 1 + max((event["id"] for event in events if "id" in event), default=-1)
    for name, other in (beside or {}).items():
        for event in _events(other, name):
            moved = {**event, "pid": event["pid"] + shift, **({"id": event["id"] + flows} if "id" in event else {})}
            if event["name"] == "process_sort_index":
                moved["args"] = {"sort_index": event["args"]["sort_index"] - 1}
            events.append(moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(result: Result, plan: str) -> list[Event]:
    events: list[Event] = []
    for at in range(len(result.input.ranks)):
        events += _names(result, at, plan) + _jobs(result, at) + _slices(result, at) + _overview(result, at) + _memory(result, at)
    return events + _arrows(result)


def write_trace(result: Result, path: str | Path, beside: Mapping[str, Result] | None = None) -> None:
    """Write the trace; equal results give equal bytes."""
    write_whole(Path(path), msgspec.json.encode(chrome_trace(result, beside), order="deterministic"))


def _names(result: Result, at: int, plan: str) -> list[Event]:
    sim = result.input
    rank, pipe = sim.ranks[at], sim.programs[at].pipeline
    streams = sim.stream_names[int(sim.first_stream[at]) : int(sim.first_stream[at + 1])]
    events = [
        _meta(rank, "process_name", name=f"{ranks_text(sim.programs[at].ranks)} (stage {pipe.stage}){', ' if plan else ''}{plan}"),
        _meta(rank, "process_sort_index", sort_index=2 * at + 1),
    ]
    for thread, name in enumerate(["host", *streams, "micro-batches", "without computation"]):
        events += [
            _meta(rank, "thread_name", thread, name=name),
            _meta(rank, "thread_sort_index", thread, sort_index=thread),
        ]
    return events


def _meta(rank: int, key: str, thread: int = HOST, **args: object) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": key, "args": args}


def _jobs(result: Result, at: int) -> list[Event]:
    """The host's jobs, each from the end of the one before."""
    sim, times = result.input, result.times
    jobs, stop = sim.job_first[at], int(sim.first[at + 1])
    events, before = [], 0
    for (name, first), behind in zip(jobs, [*(first for _, first in jobs[1:]), stop], strict=True):
        if behind > first:
            end, awaited = int(times.issue[behind - 1]), int(sim.awaits[behind - 1])
            end = max(end, int(times.end[awaited])) if awaited >= 0 else end
            events.append({**_span(sim.ranks[at], HOST, name, "job", before, end), "args": {"items": behind - first}})
            before = end
    return events


def _slices(result: Result, at: int) -> list[Event]:
    sim, times = result.input, result.times
    ops = {op.id: op for op in sim.programs[at].ops}
    mine = slice(int(sim.first[at]), int(sim.first[at + 1]))
    columns = (sim.op, sim.micro_batch, sim.stream, sim.dur, times.issue, times.ready, times.start, times.end)
    events = []
    for op_id, micro_batch, stream, dur, issue, ready, start, end in zip(*(c[mine].tolist() for c in columns), strict=True):
        op = ops[op_id]
        args = {"op": op_id, "micro_batch": micro_batch, "alone_us": dur / 1e3, "issued_us": issue / 1e3}
        args |= {"waited_for_mates_us": (start - ready) / 1e3} if start > ready else {}
        name = " ".join(part for part in (op.kind, op.layer, f"@{micro_batch}") if part)
        thread = stream - int(sim.first_stream[at]) + 1
        events.append(
            {**_span(sim.ranks[at], thread, name, "comm" if is_comm(op) else "copy" if is_copy(op) else op.role, start, end), "args": args}
        )
    return events


def _overview(result: Result, at: int) -> list[Event]:
    """The threads of the overview: computation by micro-batch, and the time without computation by its part of the step."""
    sim, times, rank = result.input, result.times, result.input.ranks[at]
    thread = int(sim.first_stream[at + 1] - sim.first_stream[at]) + 1
    first, last = int(sim.first[at]), int(sim.first[at + 1])
    mine = first + np.flatnonzero(~np.asarray(sim.side[first:last]) & (times.end[first:last] > times.start[first:last]))
    runs: list[list[int]] = []
    for item in mine[np.argsort(times.start[mine], kind="stable")].tolist():
        start, end, micro_batch = int(times.start[item]), int(times.end[item]), int(sim.micro_batch[item])
        if runs and runs[-1][2] == micro_batch and start <= runs[-1][1]:
            runs[-1][1] = max(end, runs[-1][1])
        elif not runs or end > runs[-1][1]:
            runs.append([max(start, runs[-1][1] if runs else 0), end, micro_batch])
    events = [_span(rank, thread, f"micro-batch {letters(number)}", "micro-batch", start, end) for start, end, number in runs]
    for part, spans in zip(("exposed communication", "host", "bubble"), parts_of(result, at), strict=True):
        events += [_span(rank, thread + 1, part, "without computation", low, high) for low, high in spans.tolist()]
    return events


def letters(number: int) -> str:
    """A micro-batch as letters, because Perfetto ignores digits of a slice's name when it chooses a colour.

    >>> [letters(number) for number in (0, 25, 26)]
    ['A', 'Z', 'AA']
    """
    return (letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _span(rank: int, thread: int, name: str, category: str, start: int, end: int) -> Event:
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
    }


def _memory(result: Result, at: int) -> list[Event]:
    if not result.memory:
        return []
    events = []
    for pool in ("device", "pinned"):
        moments, sizes = result.memory[at].curve("device" if pool == "device" else "pinned")
        last: dict[int, int] = dict(zip(moments.tolist(), sizes.tolist(), strict=True))
        if any(last.values()):
            events += [
                {
                    "ph": "C",
                    "pid": result.input.ranks[at],
                    "name": f"{pool} memory",
                    "ts": moment / 1e3,
                    "args": {"MiB": round(size / 2**20, 3)},
                }
                for moment, size in last.items()
            ]
    return events


def _arrows(result: Result) -> list[Event]:
    """Arrows from each communication or copy to the op instances that wait for it, and from each send to its receive."""
    sim = result.input
    pairs = [(before, item) for item in range(sim.num_items) for before in sim.needs(item) if sim.side[before]]
    for meet in range(len(sim.meet_size)):
        mates = sim.mates_at(meet)
        if len(mates) == 2 and is_send(sim.op_at(mates[0])) and is_receive(sim.op_at(mates[1])):
            pairs.append((mates[0], mates[1]))
    pairs += [(int(sim.follow[item]), item) for item in range(sim.num_items) if sim.follow[item] >= 0]
    events = []
    for number, (source, target) in enumerate(pairs):
        events += [_end(result, number, source, "s"), {**_end(result, number, target, "f"), "bp": "e"}]
    return events


def _end(result: Result, number: int, item: int, phase: str) -> Event:
    """One end of an arrow, which starts in the middle of a slice, so that viewers find the slice, and ends at the start of another."""
    sim, times = result.input, result.times
    at = sim.rank_index(item)
    start, end = int(times.start[item]), int(times.end[item])
    when = start / 1e3 if phase == "f" else (start + end) / 2e3
    thread = int(sim.stream[item] - sim.first_stream[at]) + 1
    return {"ph": phase, "pid": sim.ranks[at], "tid": thread, "id": number, "name": "waits for", "cat": "flow", "ts": when}
