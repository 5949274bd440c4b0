"""A measured step as Chrome-trace JSON, with the layout of the simulated one (`interlace timeline`), so that both can be compared.

Ranks are processes and streams are threads. Thread 0 is the host with its jobs, each from its first operation to its last. Slices
were measured by device events (CUDA) or by the host threads. Counters are device and pinned memory as the allocator recorded it.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from testbed.device import Issue, Trace

Event = dict[str, Any]
HOST = 0
AHEAD = 40  # how many operations of a program the executor may have left out between two issued ones
COMM = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"})
COPIES = frozenset({"copy_d2h", "copy_h2d", "memcpy_d2h", "memcpy_h2d"})


class Planned(NamedTuple):
    """An operation of a job in the plan."""

    job: int
    name: str
    stream: str
    role: str
    micro_batch: int | None
    label: str = ""


@dataclass(slots=True)
class RankTrace:
    """One rank's trace, with what is needed to name its parts."""

    rank: int
    trace: Trace
    jobs: list[str]
    planned: list[Planned]
    allocated: int
    pinned: int


def write_rank(path: Path, ranked: RankTrace) -> None:
    """Store a rank's trace."""
    path.write_bytes(msgspec.msgpack.encode(ranked))


def read_rank(path: Path) -> RankTrace:
    """Read a stored trace, which is plain data. Raises ValueError if the file is not one."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=RankTrace)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; expected the trace of a rank that testbed.measure wrote") from error


def since(trace: Trace, begin_us: float) -> Trace:
    """What the host issued from a time on, and the work of that. A launched step issues nothing; its work is taken by the time it began."""
    issues = [each for each in trace.issues if each.at_us >= begin_us]
    first = min((each.number for each in issues), default=0)
    calls = [each for each in trace.calls if each.at_us >= begin_us]
    return Trace(calls, [each for each in trace.intervals if (each.op >= first if issues else each.begin_us >= begin_us)], issues)


def between_steps(trace: Trace, begins_us: Sequence[float]) -> list[float]:
    """For each of these times, microseconds for which the busiest stream idled between the work issued before it and after it.

    Launched steps are left out.
    """
    busy = Counter[int]()
    for each in trace.intervals:
        busy[each.stream] += round(each.end_us - each.begin_us)
    busiest = max(busy, key=busy.__getitem__, default=0)
    work = [each for each in trace.intervals if each.stream == busiest]
    found = []
    for begin_us in begins_us:
        first = min((each.number for each in trace.issues if each.at_us >= begin_us), default=None)
        if first is not None:
            ended = max((each.end_us for each in work if each.op < first), default=0.0)
            begun = min((each.begin_us for each in work if each.op >= first), default=ended)
            found.append(round(max(0.0, begun - ended), 1))
    return found


def host_around(trace: Trace, steps_us: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """For each step, given by the times of its call and return: microseconds from the call to the first issued operation, and from the last
    one to the return, including what the host waits for there, such as losses. Launched steps are left out.
    """
    found = []
    for begin_us, end_us in steps_us:
        at_us = [each.at_us for each in trace.issues if begin_us <= each.at_us <= end_us]
        if at_us:
            found.append((round(at_us[0] - begin_us, 1), round(end_us - at_us[-1], 1)))
    return found


def align(planned: Sequence[Planned], issues: Sequence[Issue]) -> dict[int, Planned]:
    """Number of an issued operation -> the matching planned one. Both lists are in host order, and either may have additional operations.

    >>> ops = [Planned(0, name, "", "forward", 0) for name in ("matmul", "scale", "add")]
    >>> sorted(align(ops, [Issue(0.0, "matmul", 0, 5), Issue(1.0, "fetch", 0, 6), Issue(2.0, "add", 0, 7)]))
    [5, 7]
    """
    found: dict[int, Planned] = {}
    at = 0
    for issue in issues:
        window, name = range(at, min(at + AHEAD, len(planned))), snake(issue.name)
        hit = next((k for k in window if planned[k].name == name), None)
        if hit is not None:
            found[issue.number] = planned[hit]
            at = hit + 1
    return found


def snake(name: str) -> str:
    """`ReshapeGrad` -> `reshape_grad`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def stream_names(ranked: RankTrace, known: dict[int, Planned]) -> dict[int, str]:
    """Stream number -> the name that most of its operations have in the plan."""
    votes: dict[int, Counter[str]] = {}
    for issue in ranked.trace.issues:
        if issue.number in known:
            votes.setdefault(issue.stream, Counter())[known[issue.number].stream or "compute"] += 1
    names = {stream: count.most_common(1)[0][0] for stream, count in votes.items()}
    numbers = {each.stream for each in ranked.trace.intervals}
    return {number: names.get(number, f"stream {number}") for number in sorted(numbers)}


def chrome_trace(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """The trace as plain data; times in microseconds since the first record of any rank."""
    start = min((issue.at_us for each in ranks for issue in each.trace.issues[:1]), default=0.0)
    events = [event for each in ranks for event in _rank_events(each, start)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(ranks: Sequence[RankTrace], path: Path) -> None:
    path.write_text(json.dumps(chrome_trace(ranks), separators=(",", ":")))


def _rank_events(ranked: RankTrace, start: float) -> list[Event]:
    known = align(ranked.planned, ranked.trace.issues)
    names = stream_names(ranked, known)
    threads = {stream: k + 1 for k, stream in enumerate(sorted(names, key=lambda each: (names[each] != "compute", each)))}
    events = [
        _meta(ranked.rank, "process_name", name=f"rank {ranked.rank} (measured)"),
        _meta(ranked.rank, "process_sort_index", sort_index=ranked.rank),
    ]
    for thread, name in enumerate(["host", *(names[stream] for stream in threads)]):
        events += [_meta(ranked.rank, "thread_name", thread, name=name), _meta(ranked.rank, "thread_sort_index", thread, sort_index=thread)]
    return [*events, *_jobs(ranked, known, start), *_slices(ranked, known, threads, start), *_memory(ranked, start)]


def _meta(rank: int, key: str, thread: int = HOST, **args: object) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": key, "args": args}


def _span(rank: int, thread: int, name: str, category: str, begin: float, end: float) -> Event:
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": category, "ts": round(begin, 3), "dur": round(end - begin, 3)}


def _jobs(ranked: RankTrace, known: dict[int, Planned], start: float) -> Iterable[Event]:
    spans: dict[int, list[float]] = {}
    for issue in ranked.trace.issues:
        if issue.number in known:
            spans.setdefault(known[issue.number].job, []).append(issue.at_us)
    for job, moments in spans.items():
        event = _span(ranked.rank, HOST, ranked.jobs[job], "job", moments[0] - start, moments[-1] - start)
        yield {**event, "args": {"items": len(moments)}}


def _slices(ranked: RankTrace, known: dict[int, Planned], threads: dict[int, int], start: float) -> Iterable[Event]:
    issued = {issue.number: issue for issue in ranked.trace.issues}
    for each in ranked.trace.intervals:
        planned, issue = known.get(each.op), issued.get(each.op)
        kind = f"pd_op.{planned.name}" if planned else each.name
        batch = f"@{planned.micro_batch}" if planned and planned.micro_batch is not None else ""
        category = "comm" if each.name in COMM else "copy" if each.name in COPIES else planned.role if planned else "other"
        event = _span(
            ranked.rank, threads[each.stream], " ".join(filter(None, [kind, batch])), category, each.begin_us - start, each.end_us - start
        )
        yield {**event, "args": {"kernel": each.name, "op": each.op, **({"issued_us": round(issue.at_us - start, 3)} if issue else {})}}


def _memory(ranked: RankTrace, start: float) -> Iterable[Event]:
    held = {"device": ranked.allocated, "pinned": ranked.pinned}
    steps = {"allocate": ("device", 1), "free": ("device", -1), "pinned_allocate": ("pinned", 1), "pinned_free": ("pinned", -1)}
    for call in ranked.trace.calls:
        if call.what in steps:
            pool, sign = steps[call.what]
            held[pool] += sign * call.size
            yield {
                "ph": "C",
                "pid": ranked.rank,
                "name": f"{pool} memory",
                "ts": round(call.at_us - start, 3),
                "args": {"MiB": round(held[pool] / 2**20, 3)},
            }


# -- figures of a trace -----------------------------------------------------------------------------------------------


def summary(ranked: RankTrace) -> dict[str, Any]:
    """Where the step's time went: length, busy time by stream and kernel, host time per operation and per job.

    `idle_us` corresponds to the simulator's *idle*. `comm_alone_us` is communication while no computation runs, including kernels that wait
    for their peers: what the simulator reports as *exposed* (without copies) and as *bubble*, which a trace cannot tell apart.
    """
    known = align(ranked.planned, ranked.trace.issues)
    names = stream_names(ranked, known)
    work = sorted(ranked.trace.intervals)
    if not work:
        return {}
    length = max(each.end_us for each in work) - work[0].begin_us
    busy: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for each in work:
        busy[names[each.stream]] = busy.get(names[each.stream], 0.0) + each.end_us - each.begin_us
        kernels.setdefault(each.name, []).append(each.end_us - each.begin_us)
    compute = {stream for stream, name in names.items() if name == "compute"}
    comm = [each for each in work if each.name in COMM]
    beside = [each for each in work if each.stream in compute and each.name not in COMM]
    top = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:24]
    return {
        "device_us": round(length, 1),
        "busy_us": {name: round(value, 1) for name, value in busy.items()},
        "comm_alone_us": round(_outside(comm, beside), 1),
        "idle_us": round(length - _covered(work), 1),
        "kernels_us": {name: _times(each) for name, each in top},
        "ops_issued": len(ranked.trace.issues),
        "ops_aligned": len(known),
        "host_us": _host(ranked, known),
        "host_until_us": _until(ranked),
    }


def _times(found: Sequence[float]) -> dict[str, float]:
    return {"n": len(found), "total": round(sum(found), 1), "median": round(statistics.median(found), 2)}


def _covered(work: Sequence[Any]) -> float:
    """Length of the union of intervals, which are sorted by their begin."""
    total, until = 0.0, float("-inf")
    for each in work:
        total += max(0.0, each.end_us - max(each.begin_us, until))
        until = max(until, each.end_us)
    return total


def _outside(some: Sequence[Any], cover: Sequence[Any]) -> float:
    """Length of the union of `some` outside all intervals of `cover`."""
    return _covered(sorted([*some, *cover])) - _covered(cover)


def _until(ranked: RankTrace) -> dict[str, dict[str, float]]:
    """Host time before each kind of call: before `op` that of the executor, on its way to a kernel, before `op_end` that of the kernel."""
    calls = sorted([(call.at_us, call.what) for call in ranked.trace.calls] + [(issue.at_us, "op") for issue in ranked.trace.issues])
    found: dict[str, list[float]] = {}
    for (before, _), (now, what) in itertools.pairwise(calls):
        found.setdefault(what, []).append(now - before)
    return {what: _times(each) for what, each in sorted(found.items(), key=lambda item: -sum(item[1]))}


def _host(ranked: RankTrace, known: dict[int, Planned]) -> dict[str, float]:
    """Median host time from one operation to the next, within a job and between jobs; also the host time of the step."""
    inside: list[float] = []
    between: list[float] = []
    issues = [issue for issue in ranked.trace.issues if issue.number in known]
    for before, issue in itertools.pairwise(issues):
        same = known[before.number].job == known[issue.number].job
        (inside if same else between).append(issue.at_us - before.at_us)
    found = {"step": issues[-1].at_us - issues[0].at_us} if issues else {}
    if inside:
        found["an_op_median"] = statistics.median(inside)
    if between:
        found["between_jobs_median"] = statistics.median(between)
    return {name: round(value, 2) for name, value in found.items()}
