"""Checks how the device and Paddle's executor treat streams, events, memory and copies, with a small step for each rule.

A step shows that events order jobs only if it gives wrong results without them; otherwise correct results prove nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import paddle

from interlace.bridge.guard import attempt, fault_of
from interlace.bridge.meeting import Meeting, make_groups, meeting_of_run
from interlace.bridge.probe.lab import SMALL, STREAMS, Lab, Seen, Step, keep, on
from interlace.bridge.targets import Device
from interlace.report.checks import (
    DEVICE,
    EVERYTHING,
    MEMORY,
    OFFLOAD,
    OVERLAP,
    PRIORITIES,
    RETURN,
    THROTTLE,
    TIMES,
    Check,
    Feature,
    Verdict,
    nothing_runs,
)

A, B, C, D = STREAMS
LOW, HIGH, RING = "interlace_check_low", "interlace_check_high", "interlace_check_ring"
TRIES = 3
MOST_TRIES = 30
"""Most steps that are run to see a missing wait: on a busy machine the host may issue the reader so late that its result is right."""
AT_ONCE = 0.5
"""The host, or an operation, did not wait for slow work if it took at most this share of the work's time."""
WAITED = 0.8
"""It did wait if it took at least this share."""
AHEAD = 0.8
"""One of two equal pieces of work is ahead if it ends within this share of the other's time."""
LEAD, MOST_RACES = 6, 40
"""Such races are repeated until the number of those won and lost differs by LEAD, because other work on the machine may delay either side,
and at most MOST_RACES times."""
NUM_BLOCKS = 64
NO_PROGRAM = "no small program could be run"
MARK = 7.0


@dataclass(slots=True)
class Behaviour:
    """Checks of one device.

    Attributes:
        meeting: The meeting of all ranks before the check that needs them.
        runs: Whether small programs run at all.
        side_by_side: Whether streams run concurrently; otherwise nothing can run too early, so that order cannot be checked.
    """

    device: Device
    meeting: Meeting = field(default_factory=meeting_of_run)
    lab: Lab = field(init=False)
    side_by_side: bool = False
    runs: bool = True

    def __post_init__(self) -> None:
        self.lab = Lab(self.device)

    def checks(self, only: Collection[str] = ()) -> list[Check]:
        """The checks of all rules, or only of some, in an order in which later checks can use the results of earlier ones."""
        if not self.device.target.serial and not self.lab.slow_s:
            _, failure = attempt(self.lab.prepare)
            if failure is not None:
                self.runs = False
                self.meeting.come(f"{NO_PROGRAM}: {fault_of(failure).text[:200]}")
                rest = (Check(each.name, each.expected(self.device), NO_PROGRAM, "not checked", each.rests, DEVICE) for each in RULES)
                return [nothing_runs(fault_of(failure).text[:200]), *rest]
        return [self._made(each) for each in RULES if not only or each.name in only]

    def _made(self, rule: Rule) -> Check:
        target = self.device.target
        expected = rule.expected(self.device)
        verdict: Verdict
        missing = self.meeting.come() if rule.needs_all else ""
        if missing:
            verdict, found = "not checked", missing
        elif target.serial and not rule.on_serial:
            verdict, found = "not checked", "operations run one after another here: no streams"
        else:
            try:
                verdict, found = rule.look(self)
            except Exception as error:
                verdict, found = "fails", fault_of(error).text[:200]
        return Check(rule.name, expected, found, verdict, rule.rests, DEVICE)

    # ------------------------------------------------------------------------------------------------------------- streams

    def streams(self) -> tuple[Verdict, str]:
        """Whether streams run concurrently: slow work on one stream, then a small operation and its copy out on another. First with slow
        work on the compute stream."""

        def quick(x: Any, one: Any) -> None:
            on(paddle._C_ops.memcpy_d2h(_same(x, A), 0), B)

        for stream in ("", C):  # with slow computation, the host may wait at the end of the job
            step = self.lab.step([self._slow(stream), quick])
            seen = min((step.run() for _ in range(TRIES)), key=lambda each: each.came_s.get(0, each.done_s) / each.done_s)
            came_s = seen.came_s.get(0, seen.done_s)
            self.side_by_side = came_s <= AT_ONCE * seen.done_s
            if self.side_by_side:
                break
        other = "another stream's work" if stream else "computation"
        return _by(self.side_by_side), f"a stream's work, issued behind {_ms(seen.done_s)} of {other}, was there after {_ms(came_s)}"

    def inside(self) -> tuple[Verdict, str]:
        """Whether the compute stream waits for a slow stream whose result it reads in the same job."""
        if not self.side_by_side:
            return NOTHING_EARLY

        def build(x: Any, one: Any) -> None:
            keep(_same(self.lab.slow(x, one, A), ""), "out")

        return _right(self.lab.step([build]), 1.0)

    def across(self) -> tuple[Verdict, str]:
        """Whether an event makes the compute stream wait for a slow stream whose result it reads in a later job."""
        if not self.side_by_side:
            return NOTHING_EARLY
        return self._ordered(self._handed_over)

    def _handed_over(self, events: bool) -> Step:
        made: list[Any] = []

        def give(x: Any, one: Any) -> None:
            made.append(self.lab.slow(x, one, A))

        def read(x: Any, one: Any) -> None:
            keep(_same(made[0], ""), "out")

        return self.lab.step([give, read], events=events)

    def _ordered(self, build: Callable[[bool], Step]) -> tuple[Verdict, str]:
        """The verdict on a step built with and without events: results must be right with events, and wrong without, or events prove
        nothing."""
        with_events = _right(build(True), 1.0)
        if with_events[0] == "fails":
            return with_events
        without = _right(build(False), 1.0, MOST_TRIES)
        if without[0] == "holds":
            return "not checked", "right with events and without: something else ordered it"
        return "holds", "right with events, wrong without"

    def priorities(self) -> tuple[Verdict, str]:
        """Whether priorities count: two streams have equal slow work after slow computation; that with the higher priority is issued
        last."""
        if not self.device.passes_priorities:
            return "not checked", "Paddle passes no priority on to custom devices"

        own: list[list[Any]] = []

        def slow(stream: str, priority: int) -> Any:
            x, one = own.pop()
            for _ in range(self.lab.slow.count):
                x = on(paddle._C_ops.matmul(x, one, False, False), stream)
                if priority:
                    x.get_defining_op().set_int_attr("stream_priority", priority)
            return x

        def first(x: Any, one: Any) -> None:
            """Slow work after which both begin, however late the host issues the second."""
            x = self.lab.slow(x, one)
            on(paddle._C_ops.memcpy_d2h(_same(x, ""), 0), A)
            own.extend([_same(x, ""), _same(one, "")] for _ in range(2))  # the last reader of a block waits for all others

        def low(x: Any, one: Any) -> None:
            on(paddle._C_ops.memcpy_d2h(slow(LOW, 0), 0), B)

        def high(x: Any, one: Any) -> None:
            on(paddle._C_ops.memcpy_d2h(slow(HIGH, -1), 0), D)

        step = self.lab.step([first, low, high])
        low_s, high_s = list[float](), list[float]()
        won = 0
        while abs(2 * won - len(low_s)) < LEAD and len(low_s) < MOST_RACES:
            came_s = step.run().came_s
            if len(came_s) < 3:
                return "not checked", "copies out told nothing of their time"
            low_s.append(came_s[1] - came_s[0])
            high_s.append(came_s[2] - came_s[0])
            won += high_s[-1] <= AHEAD * low_s[-1]
        times = f"in the median it ended after {_ms(median(high_s))}, the low one after {_ms(median(low_s))}"
        found = f"the high one was well ahead in {won} of {len(low_s)} runs; {times}"
        if abs(2 * won - len(low_s)) < LEAD:
            return "not checked", f"{found}: others use this machine"
        return _by(2 * won > len(low_s)), found

    def collectives(self) -> tuple[Verdict, str]:
        """Whether an all_reduce of all ranks runs beside slow computation issued before it; every rank runs the same number of steps."""
        world = paddle.distributed.ParallelEnv().world_size
        if world < 2:
            return "not checked", "there is one rank: nothing to communicate with"
        (group,) = make_groups([range(world)])

        def reduce(x: Any, one: Any) -> None:
            total = on(paddle._C_ops.all_reduce(on(_corner(x), A), group.id, 0), RING)
            on(paddle._C_ops.memcpy_d2h(total, 0), B)

        meet, step = self.lab.step([reduce]), self.lab.step([self._slow(""), reduce])
        seen = []
        for _ in range(4 * TRIES):  # other work on the machine may delay a rank
            meet.run()  # ranks start together
            seen.append(step.run())
        total = float(step.buffers()[0][-1])
        if total != world * step.fill:
            return "fails", f"the sum over {world} ranks was {total}, expected {world * step.fill}"
        best = min(seen, key=lambda each: each.came_s.get(0, each.done_s) / each.done_s)
        came_s = best.came_s.get(0, best.done_s)
        found = f"the sum over {world} ranks, issued behind {_ms(best.done_s)} of computation, was there after {_ms(came_s)}"
        return _by(came_s <= AT_ONCE * best.done_s), found

    # ---------------------------------------------------------------------------------------------------------------- host

    def host(self) -> tuple[Verdict, str]:
        """Whether the host finishes issuing a job of slow computation long before the device finishes it."""
        step = self.lab.step([self._slow("")])
        seen = _least_busy(step)
        ahead = seen.issued_s <= AT_ONCE * seen.done_s
        return _by(ahead != self.device.target.job_end_waits), _busy(seen)

    def host_waits(self) -> tuple[Verdict, str]:
        """Whether the host waits for slow computation when told to."""
        if not self.device.target.host_runs_ahead:
            return "not checked", "the host waits anyway on this target"
        step = self.lab.step([self._slow("")], waits=[("pd_op.matmul", "pd_op.matmul")])
        seen = _least_busy(step)
        return _by(seen.issued_s >= WAITED * seen.done_s), _busy(seen)

    # -------------------------------------------------------------------------------------------------------------- copies

    def copy_out(self) -> tuple[Verdict, str]:
        """Whether the host finishes issuing a copy out, after slow work, long before the device finishes it."""

        def build(x: Any, one: Any) -> None:
            on(paddle._C_ops.memcpy_d2h(self.lab.slow(x, one, A), 0), B)

        seen = _least_busy(self.lab.step([build]))
        return _by(seen.issued_s <= AT_ONCE * seen.done_s), _busy(seen)

    def pinned(self) -> tuple[Verdict, str]:
        """Whether copies use pinned memory: while a copy in is queued after slow work, the host changes the buffer, and the change only
        arrives if the memory is pinned."""
        made: list[Any] = []

        def out(x: Any, one: Any) -> None:
            made.append(on(paddle._C_ops.memcpy_d2h(_same(x, A), 0), B))

        def back(x: Any, one: Any) -> None:
            self.lab.slow(x, one, C)
            value = on(paddle._C_ops.memcpy_h2d(made[0], 1), C)
            on(paddle._C_ops.memcpy_d2h(value, 0), D)

        def change(buffer: np.ndarray) -> None:
            time.sleep(self.lab.slow_s / 20)  # the copy out may not have ended yet
            buffer[-SMALL:] = MARK

        step = self.lab.step([out, back])
        found = ""
        for _ in range(TRIES):
            seen = step.run({0: change})
            arrived = float(step.buffers()[1][-1])
            if arrived == MARK and seen.issued_s <= AT_ONCE * seen.done_s:
                return "holds", "a change that the host made before the copy's turn arrived"
            if arrived == MARK:
                found = f"the host waits for a copy in: {_busy(seen)}"
            elif arrived == step.fill:
                found = "a copy in took what was there when it was issued, as from pageable memory"
            else:
                found = f"a copy in gave {arrived}, expected {MARK}"
        return "fails", found

    def pinned_kept(self) -> tuple[Verdict, str]:
        """Whether a buffer that no job collects stays the same one in each step."""

        def build(x: Any, one: Any) -> None:
            on(paddle._C_ops.memcpy_d2h(_same(x, A), 0), B)

        step = self.lab.step([build])
        found = set()
        for _ in range(TRIES):
            step.run()
            found.add(tuple(step.addresses()))
        return _by(len(found) == 1), f"{len(found)} buffer{'s' if len(found) > 1 else ''} in {TRIES} steps"

    def round_trip(self) -> tuple[Verdict, str]:
        """Whether a slow value survives being copied out in one job and back in another, with only events to order the copies."""
        made: list[Any] = []
        slow = self.lab.slow if not self.device.target.serial else lambda x, one, stream: _same(x, stream)

        def out(x: Any, one: Any) -> None:
            made[:] = [on(paddle._C_ops.memcpy_d2h(slow(x, one, A), 0), B)]

        def back(x: Any, one: Any) -> None:
            keep(_same(on(paddle._C_ops.memcpy_h2d(made[0], 1), C), ""), "out")

        size = 0 if not self.device.target.serial else SMALL
        return _right(self.lab.step([out, back], size, watched=False), 1.0)

    # -------------------------------------------------------------------------------------------------------------- memory

    def kept_for_last(self) -> tuple[Verdict, str]:
        """Whether a block is kept for its last reader, which is late on another stream, while operations issued next take blocks of that
        size."""
        if not self.side_by_side:
            return NOTHING_EARLY
        return _right(self._freed(is_last=True), 3.0)

    def not_kept_for_others(self) -> tuple[Verdict, str]:
        """As `kept_for_last`, but the compute stream reads the block once more, early, and so is its last reader in issue order."""
        if not self.side_by_side:
            return NOTHING_EARLY
        verdict, found = _right(self._freed(is_last=False), 3.0)
        if self.device.target.free == "issue":
            early = verdict == "fails"
            return _by(early), "the block was given again meanwhile" if early else "the block was kept"
        return verdict, found

    def _freed(self, is_last: bool) -> Step:
        """A step in which a slow stream reads a block late, while results on the compute stream take blocks. The slow stream is the block's
        last reader if `is_last`.

        In a plan an event would make a last reader on the compute stream wait for the slow stream, as the executor would within one job.
        """

        made: list[Any] = []

        def give(x: Any, one: Any) -> None:
            made.append(paddle._C_ops.scale(_corner(x), 3.0, 0.0, True))

        def read(x: Any, one: Any) -> None:
            self.lab.slow(x, one, A)
            keep(_same(made[0], A), "out")

        def others(x: Any, one: Any) -> None:
            if not is_last:
                _same(made[0], "")
            small = _corner(x)
            blocks = [paddle._C_ops.scale(small, 10.0 + k, 0.0, True) for k in range(NUM_BLOCKS)]
            _sum(blocks)

        return self.lab.step([give, read, others], events=is_last)

    def given_at_issue(self) -> tuple[Verdict, str]:
        """How much memory the host takes when it issues, after slow work, a chain of operations whose results are each read only by the
        next."""
        if self.device.target.free != "issue":
            return "not checked", "memory is collected by events on this target"

        def step(parts: int) -> Step:
            def chain(x: Any, one: Any) -> None:
                value = paddle._C_ops.concat([self.lab.slow(x, one)] * parts, 0)
                for _ in range(NUM_BLOCKS):
                    value = paddle._C_ops.scale(value, 1.0, 0.0, True)

            return self.lab.step([chain])

        return self._grows(step, NUM_BLOCKS // 2, f"{NUM_BLOCKS + self.lab.slow.count} results")

    def fills(self) -> tuple[Verdict, str]:
        """How much memory the device takes for blocks of computation, and then for copies back into as many blocks, which a plan takes from
        what computation has freed."""

        def step(parts: int) -> Step:
            host: list[Any] = []

            def out(x: Any, one: Any) -> None:
                large = paddle._C_ops.concat([x] * parts, 0)
                host[:] = [on(paddle._C_ops.memcpy_d2h(_sum([_same(large, "") for _ in range(NUM_BLOCKS)]), 0), A)]

            def back(x: Any, one: Any) -> None:
                _sum([on(paddle._C_ops.memcpy_h2d(host[0], 1), B) for _ in range(NUM_BLOCKS)])

            return self.lab.step([out, back], watched=False, filled=True)

        return self._grows(step, 1.5 * NUM_BLOCKS, f"{NUM_BLOCKS} of computation and {NUM_BLOCKS} copies back")

    def _grows(self, made: Callable[[int], Step], most: float, of: str) -> tuple[Verdict, str]:
        """Whether a step takes at most so many blocks of memory from the device. `made` builds it, with blocks of so many matrices; `of`
        says what they are for."""
        self.device.release_memory()
        before, block = self.device.reserved_bytes(), 4 * self.lab.slow.size**2
        parts = 1 + 2 * before // (NUM_BLOCKS * block)  # together twice what may be free in chunks that are partly in use
        block *= parts
        step = made(parts)
        reserved = self.device.reserved_bytes()
        if not reserved:
            return "not checked", "Paddle does not tell how much memory this device has reserved"
        step.run()
        grew = max(reserved, self.device.reserved_bytes()) - before
        return _by(grew <= most * block), f"{grew / block:.0f} blocks more for {of}"

    def _slow(self, stream: str) -> Callable[[Any, Any], None]:
        def build(x: Any, one: Any) -> None:
            self.lab.slow(x, one, stream)

        return build


NOTHING_EARLY: tuple[Verdict, str] = ("not checked", "streams do not run side by side here, so that nothing is early")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of docs/gpu-place.md.

    Attributes:
        look: The check.
        expected: What the rule says for a device, as text.
        rests: Features that depend on it.
        on_serial: Whether it also applies to devices without streams.
        needs_all: Whether all ranks must check it together.
    """

    name: str
    look: Callable[[Behaviour], tuple[Verdict, str]]
    expected: Callable[[Device], str]
    rests: tuple[Feature, ...]
    on_serial: bool = False
    needs_all: bool = False


def _says(text: str) -> Callable[[Device], str]:
    return lambda device: text


RULES = (
    Rule("named streams", Behaviour.streams, _says("run beside computation"), (OVERLAP, OFFLOAD)),
    Rule("order inside a job", Behaviour.inside, _says("the executor orders streams by what they read"), (EVERYTHING,)),
    Rule("order across jobs", Behaviour.across, _says("events order streams, and nothing else does"), (EVERYTHING,)),
    Rule("priorities of streams", Behaviour.priorities, _says("work of higher priority goes first"), (PRIORITIES,)),
    Rule("collectives", Behaviour.collectives, _says("run beside computation"), (OVERLAP,), needs_all=True),
    Rule(
        "the host at the end of a job",
        Behaviour.host,
        lambda device: "waits for computation" if device.target.job_end_waits else "goes on",
        (TIMES, MEMORY),
    ),
    Rule("waits of the host", Behaviour.host_waits, _says("where the plan says so it waits"), (THROTTLE, MEMORY)),
    Rule("copy out", Behaviour.copy_out, _says("the host goes on"), (OFFLOAD,)),
    Rule("pinned memory", Behaviour.pinned, _says("copies read it when it is their turn"), (OFFLOAD,)),
    Rule("pinned buffers that are kept", Behaviour.pinned_kept, _says("one and the same in each step"), (OFFLOAD,)),
    Rule("copies out and back", Behaviour.round_trip, _says("give the same value, ordered by events"), (OFFLOAD,), on_serial=True),
    Rule(
        "a block whose last reader is on another stream",
        Behaviour.kept_for_last,
        _says("is kept until that reader is done"),
        (OVERLAP, OFFLOAD),
    ),
    Rule(
        "a block whose last reader is on its own stream",
        Behaviour.not_kept_for_others,
        lambda device: (
            "is given again though another stream still reads it" if device.target.free == "issue" else "is kept until all readers are done"
        ),
        (MEMORY,),
    ),
    Rule(
        "a block freed while the device is behind", Behaviour.given_at_issue, _says("is given again in the host's order"), (RETURN, MEMORY)
    ),
    Rule("a block that was taken for a copy back", Behaviour.fills, _says("is what it writes into"), (MEMORY,)),
)


def _same(value: Any, stream: str) -> Any:
    """The same values in new memory."""
    return on(paddle._C_ops.scale(value, 1.0, 0.0, True), stream)


def _sum(blocks: Sequence[Any]) -> Any:
    """The sum of blocks that are all in use when it begins."""
    total = blocks[-1]
    for each in blocks[-2::-1]:
        total = paddle._C_ops.add(total, each)
    return total


def _corner(x: Any) -> Any:
    return paddle._C_ops.slice(x, [0, 1], [0, 0], [SMALL, SMALL], [1, 1], [])


def _by(holds: bool) -> Verdict:
    return "holds" if holds else "fails"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _busy(seen: Seen) -> str:
    return f"the host was busy for {_ms(seen.issued_s)} of {_ms(seen.done_s)}"


def _least_busy(step: Step) -> Seen:
    """The run, of several, in which the host was done first, because other work on the machine may delay it."""
    return min((step.run() for _ in range(TRIES)), key=lambda each: each.issued_s / each.done_s)


def _right(step: Step, factor: float, tries: int = TRIES) -> tuple[Verdict, str]:
    """Whether in each of several runs the output is the input multiplied by `factor`."""
    for number in range(1, tries + 1):
        out = step.run().outputs["out"]
        if not np.array_equal(out, np.full_like(out, factor * step.fill)):
            bad = out[out != factor * step.fill]
            return "fails", f"step {number} gave {bad.flat[0]} in {bad.size} of {out.size} places, expected {factor * step.fill}"
    return "holds", f"right in {tries} of {tries} steps"
