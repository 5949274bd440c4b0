"""Which saved activations leave the device for a while, of which micro-batches, when they go and when they come back.

The planner decides and prints; `interlace.passes.offload_activations` applies what it decided. Times are op time: the sum of
what the items of the compute stream take on this rank. Work on other streams runs beside them and waits for other ranks come
on top: neither is counted, so that copies have more time than planned rather than less.
One copy engine serves each direction, for all chunks of the rank: copies of a direction follow one another.

Source: NVIDIA/Megatron-LM#1752 (modules by hand), DeepSpeed DeepCompile (a budget), both without a pipeline.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate, groupby

import msgspec
import numpy as np
import numpy.typing as npt

from interlace.cost_model import Costs
from interlace.errors import ConfigError, PlanError
from interlace.ir import Op, Program, Value, describe
from interlace.ir.kinds import is_boundary, stream_of
from interlace.ir.program import FLOAT_DTYPES
from interlace.scheduler.memory import in_order
from interlace.scheduler.saved import REASONS, Reason, Saved, Skipped, census

Item = tuple[int, int]
"""Operation id and micro-batch."""
Ints = npt.NDArray[np.int64]
Span = tuple[int, int, int]
"""First item, first item behind, bytes."""
COPY_OUT, COPY_BACK = "pd_op.memcpy_d2h", "pd_op.memcpy_h2d"
PINNED = {"dst_place_type": 1}
"""Attributes of both copies; lowering gives each place its own form."""
PATIENCE = 3
"""Placements for one budget that bring the excess no lower before the search gives up; two or three in all are the rule."""
SEARCH_ROUNDS = 8
"""Budgets tried on the way to the least feasible one: to a 256th of the range between a refused and a feasible one."""
FAR = 1 << 62


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user asks for. Without modules, fraction or budget nothing is moved.

    Attributes:
        modules: Names or globs over layer names (`mlp`, `layers.*.attn`): each matches a run of components of the dotted
            path of the operation that gives a value. Empty: all layers, where a fraction or a budget asks for copies.
        exclude_ops: What stays: patterns of operation names (`pd_op.softmax`) or of layers (`layers.0`).
        min_bytes: Smaller values stay.
        fraction: Share of the eligible bytes of a micro-batch to move; None: all of them, or what the budget needs.
        keep_bytes: Eligible bytes of a micro-batch that stay at least; one figure, or one for each stage.
        max_in_flight: Copies under way at once in each direction; 0: none at all, None: no limit.
        include_integers: Move integer and bool values too.
        memory_budget: Device bytes of this rank that the step may hold at any moment; moves the least that does it.
    """

    modules: tuple[str, ...] = ()
    exclude_ops: tuple[str, ...] = ()
    min_bytes: int = 1 << 20
    fraction: float | None = None
    keep_bytes: int | tuple[int, ...] = 0
    max_in_flight: int | None = None
    include_integers: bool = False
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.fraction is not None and self.memory_budget is not None:
            raise ConfigError(f"offload: fraction={self.fraction} and memory_budget={self.memory_budget} contradict each "
                              "other; give the share to move, or the bytes to stay under")  # fmt: skip
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise ConfigError(f"offload: fraction={self.fraction}, expected a number from 0 to 1")
        keep = (self.keep_bytes,) if isinstance(self.keep_bytes, int) else self.keep_bytes
        for name, given in (("min_bytes", self.min_bytes), ("keep_bytes", min(keep, default=0)),
                            ("max_in_flight", self.max_in_flight), ("memory_budget", self.memory_budget)):  # fmt: skip
            if given is not None and given < 0:
                raise ConfigError(f"offload: {name}={given}, expected 0 or more")

    @property
    def asks_for_nothing(self) -> str:
        """Why no copy is wanted at all; empty where some is."""
        if self.max_in_flight == 0:
            return "max_in_flight=0 allows no copies"
        if not self.modules and not self.fraction and not self.memory_budget:
            return "neither modules nor a fraction nor a memory_budget above 0 asks for copies"
        return "fraction=0 asks for no copies" if self.fraction == 0 else ""

    def keep_on(self, stage: int, num_stages: int) -> int:
        """Bytes that stay on a stage. Raises ConfigError where there is not one figure for each stage."""
        if isinstance(self.keep_bytes, int):
            return self.keep_bytes
        if len(self.keep_bytes) != num_stages:
            raise ConfigError(f"offload: keep_bytes has {len(self.keep_bytes)} figures {list(self.keep_bytes)}, "
                              f"expected one for each of the {num_stages} stages, or a single number")  # fmt: skip
        return self.keep_bytes[stage]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the decision rests on besides program and choice.

    Attributes:
        op_ns: Operation id -> duration.
        out_ns, back_ns: Bytes -> duration of a copy to and from the host; None without a measurement: copies back are then
            issued just in time, and marked.
        memory_budget: Device bytes this rank may hold, None without a limit.
    """

    op_ns: dict[int, int]
    out_ns: dict[int, int] | None = None
    back_ns: dict[int, int] | None = None
    memory_budget: int | None = None


def measure(program: Program, cost: Costs, memory_budget: int | None = None) -> Measured:
    """The figures of a cost model for a program: its operations, and copies of every size that could move."""
    values = {value.id: value for value in program.values}
    groups = {group.id: group for group in program.groups}
    op_ns = {op.id: cost.op_time(op, values, groups).dur_ns for op in program.ops}
    moved = {saved.size_bytes: values[saved.value] for saved in census(program).saved}
    return Measured(op_ns, _copy_times(moved, cost, COPY_OUT), _copy_times(moved, cost, COPY_BACK), memory_budget)


def _copy_times(moved: Mapping[int, Value], cost: Costs, name: str) -> dict[int, int] | None:
    found = {}
    for size_bytes, value in sorted(moved.items()):
        host = msgspec.structs.replace(value, id=value.id + 1, storage=value.id + 1, memory="pinned")
        pair = (value.id, host.id) if name == COPY_OUT else (host.id, value.id)
        op = Op(-1, name, pair[:1], pair[1:], "forward", attrs=dict(PINNED))
        estimate = cost.op_time(op, {value.id: value, host.id: host}, {})
        if estimate.how == "unknown":
            return None
        found[size_bytes] = estimate.dur_ns
    return found


def agree(measured: Sequence[Measured]) -> Measured:
    """One set of figures for ranks that must take the same decisions: the slowest times, the smallest budget.

    Copies count as measured only where every rank measured them.

    Raises:
        PlanError: The ranks time different operations or sizes.

    >>> agree([Measured({1: 5}, memory_budget=90), Measured({1: 7}, memory_budget=80)])
    Measured(op_ns={1: 7}, out_ns=None, back_ns=None, memory_budget=80)
    """
    budgets = [m.memory_budget for m in measured if m.memory_budget is not None]
    return Measured(
        _slowest([m.op_ns for m in measured], "operations") or {},
        _slowest([m.out_ns for m in measured], "sizes of copies out"),
        _slowest([m.back_ns for m in measured], "sizes of copies back"),
        min(budgets, default=None),
    )


def _slowest(tables: Sequence[Mapping[int, int] | None], what: str) -> dict[int, int] | None:
    known = [table for table in tables if table is not None]
    if len(known) < len(tables):
        return None
    different = sorted({key for table in known for other in known for key in table.keys() - other.keys()})
    if different:
        raise PlanError(f"ranks of one group time different {what}: {different[:8]} are not known to all; "
                        "merge only ranks that run the same program")  # fmt: skip
    return {key: max(table[key] for table in known) for key in sorted(known[0])}


class Trip(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One value of one micro-batch: out behind one item, back in front of another, in a later job.

    Attributes:
        ahead_ns: Op time between the start of the copy back and its first reader.
        late_ns: What the reader is estimated to wait for it.
        just_in_time: Nothing was measured, so that the copy back starts right before its reader.
    """

    micro_batch: int
    out_after: Item
    back_before: Item
    ahead_ns: int
    late_ns: int = 0
    just_in_time: bool = False


class Move(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A saved value and its trips, by micro-batch."""

    saved: Saved
    trips: tuple[Trip, ...]


class Stay(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One micro-batch of an eligible value that stays, and why."""

    value: int
    micro_batch: int
    size_bytes: int
    reason: Reason


class OffloadPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decision for one rank.

    Attributes:
        moves: In the order of the operations that give the values.
        skipped, stayed: Values, and single micro-batches of eligible values, that stay.
        measured: Whether copy times were known.
        before_peak_bytes: Most device bytes held without copies.
        order_peak_bytes: With them, each value let go at the item of its copy out.
        peak_bytes: With them, each value let go when its copy out is estimated to end; budgets hold for this one.
        pinned_peak_bytes: Most host bytes held, from the start of a copy out to the first reader.
        out_bytes: Bytes that go out, and come back, in a step.
        stall_ns: What readers are estimated to wait in a step.
        notes: What else is to be said.
    """

    moves: tuple[Move, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    stayed: tuple[Stay, ...] = ()
    measured: bool = True
    before_peak_bytes: int = 0
    order_peak_bytes: int = 0
    peak_bytes: int = 0
    pinned_peak_bytes: int = 0
    out_bytes: int = 0
    stall_ns: int = 0
    notes: tuple[str, ...] = ()

    def micro_batch_bytes(self) -> dict[int, int]:
        """Bytes out, and back, of each micro-batch of which anything moves."""
        found: Counter[int] = Counter()
        for move in self.moves:
            found.update({trip.micro_batch: move.saved.size_bytes for trip in move.trips})
        return dict(sorted(found.items()))

    def summary(self) -> str:
        """The decision in one line."""
        if not self.moves:
            return f"moves nothing; peak {mib(self.before_peak_bytes)}"
        waits = f"readers wait {ms(self.stall_ns)}" if self.measured else "copies not measured: back just in time"
        peak = f"peak {mib(self.before_peak_bytes)} -> {mib(self.peak_bytes)}, pinned {mib(self.pinned_peak_bytes)}"
        count = f"{len(self.moves)} value(s) of {len(self.micro_batch_bytes())} micro-batch(es)"
        return f"moves {count}, {mib(self.out_bytes)} out and back; {peak}; {waits}"

    def reasons(self) -> dict[Reason, tuple[int, int]]:
        """Reason -> number of values (or of micro-batches of eligible ones) that stay for it, and their known bytes."""
        found: dict[Reason, tuple[int, int]] = {}
        stays = [(each.reason, each.size_bytes) for each in self.skipped]
        for reason, size_bytes in [*stays, *((each.reason, each.size_bytes) for each in self.stayed)]:
            count, size = found.get(reason, (0, 0))
            found[reason] = count + 1, size + max(0, size_bytes)
        return {reason: found[reason] for reason in REASONS if reason in found}

    def declined(self) -> list[str]:
        """What stays and why, one line a reason."""
        single = {stay.reason for stay in self.stayed}
        unit = {reason: "trip(s)" if reason in single else "value(s)" for reason in REASONS}
        return [f"{count} {unit[reason]}, {mib(size)}: {reason}: {REASONS[reason]}"
                for reason, (count, size) in self.reasons().items()]  # fmt: skip

    def explain(self, program: Program) -> list[str]:
        """The whole decision as text, one line a value and one a reason."""
        ops = {op.id: op for op in program.ops}
        moved = [f"{describe(ops[move.saved.producer])}: {show_move(move)}" for move in self.moves]
        return [self.summary(), *self.notes, *moved, *self.declined()]


def show_move(move: Move) -> str:
    """One move as text: value, bytes, micro-batches, how far ahead it comes back.

    >>> saved = Saved(7, 7, 2 << 20, 2 << 20, 3, (3,), (9,))
    >>> show_move(Move(saved, (Trip(0, (3, 0), (9, 0), 3_200_000), Trip(1, (3, 1), (9, 1), 3_300_000))))
    '%7 (2.0 MiB) of micro-batches 0-1; back 3.200-3.300 ms of op time ahead'
    """
    ahead = sorted(trip.ahead_ns for trip in move.trips)
    late = max(trip.late_ns for trip in move.trips)
    if any(trip.just_in_time for trip in move.trips):
        when = "just in time (copies were not measured)"
    else:
        when = f"{ahead[0] / 1e6:.3f}-{ahead[-1] / 1e6:.3f} ms of op time ahead"
        when += f", up to {ms(late)} late" if late else ""
    views = " ".join(f"%{each.value}" for each in move.saved.rebuilt)
    again = f", its view(s) {views} remade" if views else ""
    which = ranges(trip.micro_batch for trip in move.trips)
    return f"%{move.saved.value} ({mib(move.saved.size_bytes)}) of micro-batches {which}{again}; back {when}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def mib(size_bytes: int) -> str:
    """Bytes as text: `1.5 MiB`."""
    return f"{size_bytes / (1 << 20):.1f} MiB" if size_bytes >= 1 << 20 else f"{size_bytes} B"


def ms(dur_ns: int) -> str:
    """Nanoseconds as text: `3.200 ms`."""
    return f"{dur_ns / 1e6:.3f} ms"


# --------------------------------------------------------------------------------------------------------------- names


def names_layer(pattern: str, layer: str) -> bool:
    """Whether a name or glob fits a run of components of a dotted layer path.

    >>> names_layer("mlp", "gpt.layers.0.mlp.fc1"), names_layer("layers.*.attn", "gpt.layers.3.attn")
    (True, True)
    >>> names_layer("ml", "mlp")
    False
    """
    wanted, parts = pattern.split("."), layer.split(".") if layer else []
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(fnmatchcase(parts[k + n], want) for n, want in enumerate(wanted)) for k in starts)


def names_op(pattern: str, op: Op) -> bool:
    """Whether a pattern fits an operation: its name, its kind, or its layer."""
    return fnmatchcase(op.name, pattern) or fnmatchcase(op.kind, pattern) or names_layer(pattern, op.layer)


class Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the operations of a rank's forward are called."""

    layers: tuple[str, ...]
    ops: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> Names:
        """Of a program."""
        ops = [op for op in program.ops if op.role == "forward" and not is_boundary(op)]
        return cls(tuple(sorted({op.layer for op in ops})), tuple(sorted({op.name for op in ops})))


def unknown_names(choice: Choice, there: Sequence[Names]) -> list[str]:
    """Every name of the choice that fits nothing on any of the ranks, with the names there are, one message each."""
    layers = sorted({layer for names in there for layer in names.layers})
    ops = sorted({op for names in there for op in names.ops})
    short = sorted({".".join("*" if part.isdigit() else part for part in layer.split(".")) for layer in layers if layer})
    modules = [f"offload: modules: {p!r} fits no layer; there are {_list(short)}"
               for p in choice.modules if not any(names_layer(p, layer) for layer in layers)]  # fmt: skip
    every = [*(Op(-1, op, (), (), "forward") for op in ops), *(Op(-1, "", (), (), "forward", layer=layer) for layer in layers)]
    excluded = [f"offload: exclude_ops: {p!r} fits no operation and no layer; there are {_list(ops)}; layers: {_list(short)}"
                for p in choice.exclude_ops if not any(names_op(p, op) for op in every)]  # fmt: skip
    return modules + excluded


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:40]) + (f", ... ({len(names) - 40} more)" if len(names) > 40 else "") if names else "none"


# ------------------------------------------------------------------------------------------------------------ placement


@dataclass(slots=True)
class Timeline:
    """The schedule by host order: place and job of each item, compute time before it (one entry more than items)."""

    items: list[Item]
    place: dict[Item, int]
    job: list[int]
    job_start: list[int]
    at_ns: list[int]

    @classmethod
    def of(cls, program: Program, op_ns: Mapping[int, int]) -> Timeline:
        """From a scheduled program and the duration of its operations."""
        beside = {op.id for op in program.ops if stream_of(op)}
        items = [item for job in program.jobs for item in job.items]
        job = [k for k, each in enumerate(program.jobs) for _ in each.items]
        starts = [0, *accumulate(len(each.items) for each in program.jobs)]
        at_ns = [0, *accumulate(0 if op_id in beside else op_ns.get(op_id, 0) for op_id, _ in items)]
        return cls(items, {item: k for k, item in enumerate(items)}, job, starts, at_ns)

    def first_from(self, time_ns: int) -> int:
        """The first item that starts at or after a time."""
        return bisect_left(self.at_ns, time_ns)

    def returns(self, out: int, done_ns: int, trip: _Trip) -> bool:
        """Whether what went out behind an item, by a time, can be back in a later job before its reader."""
        if out >= trip.reader or self.job[out] == self.job[trip.reader]:
            return False
        boundary = self.job_start[self.job[out] + 1]
        return max(done_ns, self.at_ns[boundary]) + trip.back_ns <= self.at_ns[trip.reader]


@dataclass(slots=True, eq=False)
class _Trip:
    """A trip while it is placed: out goes behind item `out`, memory is free from item `free` on, back goes before `back`."""

    saved: Saved
    micro_batch: int
    source: int
    reader: int
    out_ns: int
    back_ns: int
    not_before: int = 0
    out: int = 0
    free: int = 0
    back: int = 0
    done_ns: int = 0
    late_ns: int = 0


@dataclass(slots=True)
class _Placement:
    trips: list[_Trip] = field(default_factory=list)
    refused: list[tuple[_Trip, Reason]] = field(default_factory=list)
    stall_ns: int = 0

    def freed(self, timed: bool = True) -> list[Span]:
        """Where each trip has left the device, with minus its bytes."""
        spans = ((t.free if timed else t.out + 1, t.back, -t.saved.freed_bytes) for t in self.trips)
        return [span for span in spans if span[0] < span[1]]


def _place(line: Timeline, trips: Sequence[_Trip], cap: int | None, measured: bool) -> _Placement:
    """Give trips their items: out as soon as forward has read the value, back as late as hides the copy.

    Steps: 1 copies out queue in the order of their sources; 2 going back in time, each copy back ends before its reader and
    before the next one starts; a trip that finds no time in either queue is refused; 3 the queue of copies back is run, and
    what comes late, because memory held it back, is noted.
    """
    placed = _Placement()
    _copy_out(line, sorted(trips, key=_key(lambda t: t.source)), cap, placed)
    _copy_back(line, sorted(placed.trips, key=_key(lambda t: t.reader), reverse=True), cap, measured, placed)
    _run_back(line, sorted(placed.trips, key=_key(lambda t: t.back, lambda t: t.reader)), cap, placed)
    placed.trips.sort(key=_key(lambda t: t.source))
    return placed


def _key(*first: Callable[[_Trip], int]) -> Callable[[_Trip], tuple[int, ...]]:
    return lambda trip: (*(get(trip) for get in first), trip.saved.producer, trip.saved.value, trip.micro_batch)


def _copy_out(line: Timeline, trips: Iterable[_Trip], cap: int | None, placed: _Placement) -> None:
    ends: list[int] = []
    for trip in trips:
        ready = line.at_ns[trip.source + 1]
        issue = max(ready, ends[-cap]) if cap and len(ends) >= cap else ready
        out = trip.source if issue == ready else max(trip.source, line.first_from(issue) - 1)
        done = max(issue, ends[-1] if ends else 0) + trip.out_ns
        if not line.returns(out, done, trip):
            placed.refused.append((trip, "capped" if issue > ready else "congested"))
            continue
        trip.out, trip.done_ns = out, done
        trip.free = max(out + 1, line.first_from(done)) if trip.out_ns else out + 1
        ends.append(done)
        placed.trips.append(trip)


def _copy_back(line: Timeline, trips: Iterable[_Trip], cap: int | None, measured: bool, placed: _Placement) -> None:
    starts, issues = [line.at_ns[-1]], [line.at_ns[-1]] * (cap or 0)
    kept: list[_Trip] = []
    for trip in trips:
        start = min(line.at_ns[trip.reader], starts[-1], *issues[-cap:][:1] if cap else ()) - trip.back_ns
        wanted = bisect_right(line.at_ns, start) - 1 if measured else trip.reader
        earliest = max(line.job_start[line.job[trip.out] + 1], trip.free, trip.not_before)
        trip.back = min(max(wanted, earliest), trip.reader)
        if (start < trip.done_ns and not trip.not_before) or trip.back <= trip.free:
            placed.refused.append((trip, "congested"))
            continue
        kept.append(trip)
        starts.append(start)
        issues.append(line.at_ns[trip.back])
    placed.trips = kept


def _run_back(line: Timeline, trips: Iterable[_Trip], cap: int | None, placed: _Placement) -> None:
    ends: list[int] = []
    for trip in trips:
        slip = placed.stall_ns
        if cap and len(ends) >= cap and ends[-cap] > line.at_ns[trip.back] + slip:
            trip.back = min(trip.reader, line.first_from(ends[-cap] - slip))
        start = max(line.at_ns[trip.back] + slip, trip.done_ns, ends[-1] if ends else 0)
        ends.append(start + trip.back_ns)
        trip.late_ns = max(0, ends[-1] - line.at_ns[trip.reader] - slip)
        placed.stall_ns += trip.late_ns


# -------------------------------------------------------------------------------------------------------------- choice


def plan_offload(program: Program, measured: Measured, choice: Choice, everyone: Sequence[Names] | None = None) -> OffloadPlan:
    """Decide for one rank's scheduled program; equal inputs give equal plans.

    Args:
        program, measured, choice: What is decided on.
        everyone: The names of all ranks; without them a name that fits nothing on one stage of several is only noted.

    Raises:
        ConfigError: A name fits nothing; the message lists the names there are.
        PlanError: The budget cannot hold; the message gives the least that can.
    """
    planner = _Planner(program, measured, choice)
    planner.check_names(everyone)
    return planner.run()


class _Planner:
    def __init__(self, program: Program, measured: Measured, choice: Choice) -> None:
        self.program, self.choice = program, choice
        self.times = measured
        self.measured = measured.out_ns is not None and measured.back_ns is not None
        self.ops = {op.id: op for op in program.ops}
        self.values = {value.id: value for value in program.values}
        self.line = Timeline.of(program, measured.op_ns)
        self.makers: dict[int, list[Op]] = {}
        for op in program.ops:
            for value in op.results:
                self.makers.setdefault(self.values[value].storage, []).append(op)
        self.change, self.base_bytes = _order_memory(program, len(self.line.items))
        self.budget = min((b for b in (choice.memory_budget, measured.memory_budget) if b), default=None)
        self.notes: list[str] = []
        self.skipped: list[Skipped] = []
        self.stayed: list[Stay] = []

    def run(self) -> OffloadPlan:
        found = census(self.program)
        self.skipped += found.skipped
        keep = self.choice.keep_on(self.program.pipeline.stage, self.program.pipeline.num_stages)
        if self.choice.asks_for_nothing:
            self.notes.append(self.choice.asks_for_nothing)
            self._keep(found.saved)
            return self._plan(_Placement())
        trips = self._trips([saved for saved in found.saved if self._is_chosen(saved)])
        trips = self._within(trips, keep)
        if self.choice.memory_budget:
            return self._plan(self._under_budget(trips))
        return self._plan(self.place(trips))

    def check_names(self, everyone: Sequence[Names] | None) -> None:
        pipe = self.program.pipeline
        nowhere = unknown_names(self.choice, everyone or [Names.of(self.program)])
        if nowhere and (everyone is not None or pipe.num_stages == 1):
            raise ConfigError("\n".join(nowhere))
        self.notes += [f"{line}; this is stage {pipe.stage} of {pipe.num_stages}, it may be another's" for line in nowhere]

    def _is_chosen(self, saved: Saved) -> bool:
        reason = self._not_chosen(saved)
        if reason:
            self.skipped.append(Skipped(saved.value, saved.size_bytes, reason))
        return reason is None

    def _not_chosen(self, saved: Saved) -> Reason | None:
        layer = self.ops[saved.producer].layer
        makers = self.makers[saved.storage]
        if not self.choice.include_integers and self.values[saved.value].dtype not in FLOAT_DTYPES:
            return "integer"
        if saved.size_bytes < max(1, self.choice.min_bytes):
            return "below-floor"
        if self.choice.modules and not any(names_layer(p, layer) for p in self.choice.modules):
            return "other-module"
        if any(names_op(p, op) for p in self.choice.exclude_ops for op in makers):
            return "opted-out"
        return None

    def _trips(self, chosen: Iterable[Saved]) -> list[_Trip]:
        trips = []
        for saved in chosen:
            for micro_batch in range(self.program.pipeline.num_micro_batches):
                trip = self._trip(saved, micro_batch)
                reason = self._why_not(trip)
                if reason is None and not self.place([trip]).trips:
                    reason = "at-once"
                if reason:
                    self._stay([trip], reason)
                else:
                    trips.append(trip)
        return trips

    def _trip(self, saved: Saved, micro_batch: int) -> _Trip:
        place = self.line.place
        source = max(place[op, micro_batch] for op in saved.before)
        reader = min(place[op, micro_batch] for op in saved.readers)
        return _Trip(saved, micro_batch, source, reader, self._copy_ns(self.times.out_ns, saved.size_bytes),
                     self._copy_ns(self.times.back_ns, saved.size_bytes))  # fmt: skip

    def _copy_ns(self, table: Mapping[int, int] | None, size_bytes: int) -> int:
        if not self.measured or table is None:
            return 0
        if size_bytes not in table:
            raise PlanError(f"offload: no copy time for {size_bytes} bytes; times are given for {sorted(table)[:8]}")
        return table[size_bytes]

    # Without copy times: work of another micro-batch must lie between, or the return would follow at once.
    def _why_not(self, trip: _Trip) -> Reason | None:
        line = self.line
        if trip.source >= trip.reader or line.job[trip.source] == line.job[trip.reader]:
            return "one-job"
        if self.measured:
            return None if line.returns(trip.source, line.at_ns[trip.source + 1] + trip.out_ns, trip) else "at-once"
        between = line.items[trip.source + 1 : trip.reader]
        return None if any(m != trip.micro_batch for _, m in between) else "at-once"

    def _within(self, trips: list[_Trip], keep_bytes: int) -> list[_Trip]:
        """Drop what the fraction and the bytes to keep leave on the device: values of least bytes x idle time first."""
        by_value: dict[int, list[_Trip]] = {}
        for trip in trips:
            by_value.setdefault(trip.saved.value, []).append(trip)
        eligible = sum(group[0].saved.size_bytes for group in by_value.values())
        share = eligible if self.choice.fraction is None else int(eligible * self.choice.fraction)
        room = min(share, eligible - keep_bytes)
        taken: list[_Trip] = []
        for group in sorted(by_value.values(), key=self._rank):
            size = group[0].saved.size_bytes
            if size <= room:
                room -= size
                taken += group
            else:
                self._stay(group, "kept")
        return taken

    def _rank(self, trips: Sequence[_Trip]) -> tuple[int, int, int]:
        idle = sum(self.line.at_ns[t.reader] - self.line.at_ns[t.source + 1] for t in trips)
        return -idle * trips[0].saved.freed_bytes, trips[0].saved.producer, trips[0].saved.value

    def place(self, trips: Sequence[_Trip]) -> _Placement:
        """Items for trips, as bandwidth and cap allow."""
        return _place(self.line, trips, self.choice.max_in_flight, self.measured)

    def _under_budget(self, trips: list[_Trip]) -> _Placement:
        assert self.budget is not None
        if self.curve().max(initial=0) <= self.budget:
            self.notes.append(f"the peak is under the budget of {mib(self.budget)} as it is")
            self._stay(trips, "kept")
            return _Placement()
        found = _Fit(self, trips).run(self.budget)
        if found is None:
            least = _Fit(self, trips).least(self.budget)
            where = f"rank {self.program.rank}, stage {self.program.pipeline.stage}"
            raise PlanError(f"{where}: offload cannot hold a budget of {self.budget} bytes ({mib(self.budget)}); the least "
                            f"feasible one is {least} bytes ({mib(least)}). {self._advice()}")  # fmt: skip
        tried = {id(trip) for trip in found.trips} | {id(trip) for trip, _ in found.refused}
        self._stay([trip for trip in trips if id(trip) not in tried], "kept")
        return found

    def _advice(self) -> str:
        chosen = ("below-floor", "other-module", "opted-out", "integer")
        counts = Counter([*(s.reason for s in self.skipped if s.reason in chosen), *(s.reason for s in self.stayed)])
        held = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
        return "Raise the budget, or let more move" + (f" (staying by choice or place: {held})" if held else "")

    def peak(self, placed: _Placement) -> int:
        """Most bytes held under a placement."""
        return int(self.curve(placed.freed()).max(initial=0))

    def curve(self, extra: Iterable[Span] = ()) -> Ints:
        """Device bytes held at each item."""
        return self.base_bytes + _curve(self.change, extra)

    def _stay(self, trips: Iterable[_Trip], reason: Reason) -> None:
        self.stayed += [Stay(t.saved.value, t.micro_batch, t.saved.size_bytes, reason) for t in trips]

    def _keep(self, saved: Iterable[Saved]) -> None:
        self.skipped += [Skipped(each.value, each.size_bytes, "kept") for each in saved]

    def _plan(self, placed: _Placement) -> OffloadPlan:
        for trip, reason in placed.refused:
            self._stay([trip], reason)
        by_value: dict[int, list[_Trip]] = {}
        for trip in placed.trips:
            by_value.setdefault(trip.saved.value, []).append(trip)
        moves = [Move(group[0].saved, tuple(self._frozen(t) for t in sorted(group, key=lambda t: t.micro_batch)))
                 for group in by_value.values()]  # fmt: skip
        place = {op.id: k for k, op in enumerate(self.program.ops)}
        return OffloadPlan(
            moves=tuple(sorted(moves, key=lambda m: (place[m.saved.producer], m.saved.value))),
            skipped=tuple(self.skipped),
            stayed=tuple(sorted(self.stayed, key=lambda s: (s.value, s.micro_batch))),
            measured=self.measured,
            before_peak_bytes=int(self.curve().max(initial=0)),
            order_peak_bytes=int(self.curve(placed.freed(timed=False)).max(initial=0)),
            peak_bytes=self.peak(placed),
            pinned_peak_bytes=self._pinned_peak(placed),
            out_bytes=sum(t.saved.size_bytes for t in placed.trips),
            stall_ns=placed.stall_ns if self.measured else 0,
            notes=tuple(self.notes),
        )

    def _frozen(self, trip: _Trip) -> Trip:
        ahead = self.line.at_ns[trip.reader] - self.line.at_ns[trip.back]
        return Trip(trip.micro_batch, self.line.items[trip.out], self.line.items[trip.back], ahead,
                    trip.late_ns if self.measured else 0, not self.measured)  # fmt: skip

    def _pinned_peak(self, placed: _Placement) -> int:
        held = ((t.out, t.reader + 1, t.saved.size_bytes) for t in placed.trips)
        return int(_curve(np.zeros_like(self.change), held).max(initial=0))


def _order_memory(program: Program, num_items: int) -> tuple[Ints, int]:
    """By how much the device bytes held change at each item, `[num_items + 1]`, and what is held throughout."""
    profile = in_order(program)
    lives, change = profile.lives, np.zeros(num_items + 1, np.int64)
    mine = ~lives.pinned
    np.add.at(change, np.minimum(lives.taken[mine], num_items), lives.size[mine])
    np.add.at(change, np.minimum(lives.given[mine], num_items), -lives.size[mine])
    return change, profile.base["device"]


def _curve(change: Ints, extra: Iterable[Span]) -> Ints:
    """Sums from left to right of changes and spans, `[num_items]`."""
    change = change.copy()
    for start, stop, size in extra:
        change[start] += size
        change[stop] -= size
    return np.cumsum(change)[:-1]


_Windows = tuple[Ints, Ints, Ints]
_Step = Callable[[Ints, _Windows, list[bool]], bool]


class _Fit:
    """Search for the least to move under a budget.

    Steps: 1 place what is taken and look where memory is over the budget; 2 at each such moment take the trip that covers
    most of the excess for its bytes; 3 where none is left, let returns come later; 4 drop trips that are not needed after
    all; 5 if that fails, the same with later returns tried before more trips; 6 the last resort is everything out and back
    just in time.
    """

    def __init__(self, planner: _Planner, trips: Sequence[_Trip]) -> None:
        self.planner = planner
        self.trips = sorted(trips, key=_key(lambda t: -t.saved.freed_bytes))
        self.early, self.late = self._windows(False), self._windows(True)

    def run(self, budget: int) -> _Placement | None:
        """A placement that holds the budget, None without one."""
        if self._bound() > budget:
            return None
        found = self._search(budget, self.early, (self._cover, self._delay))
        found = found or self._search(budget, self.late, (self._delay, self._cover))
        last = found or self._last_resort()
        return last if self.planner.peak(last) <= budget else None

    def _search(self, budget: int, windows: _Windows, steps: Sequence[_Step]) -> _Placement | None:
        self._hold(False)
        taken = [False] * len(self.trips)
        least, patience = FAR, PATIENCE
        while patience:
            placed = self._place(taken)
            over = self._over(placed, budget)
            excess = int(over.clip(min=0).sum())
            if not excess:
                return self._pruned(taken, placed, over, budget)
            least, patience = (excess, PATIENCE) if excess < least else (least, patience - 1)
            if not any(step(over, windows, taken) for step in steps):
                break
        return None

    def least(self, refused: int) -> int:
        """The least budget found to hold; `refused` does not."""
        low, high = max(refused, self._bound() - 1), self.planner.peak(self._last_resort())
        for _ in range(SEARCH_ROUNDS):
            if high - low <= 1:
                break
            middle = (low + high) // 2
            found = self.run(middle)
            low, high = (low, self.planner.peak(found)) if found is not None else (middle, high)
        return high

    def _bound(self) -> int:
        """A peak that no placement is below: everything out as if alone, back just in time."""
        free = zip(self.trips, self.late[0].tolist(), strict=True)
        spans = ((start, trip.reader, -trip.saved.freed_bytes) for trip, start in free if start < trip.reader)
        return int(self.planner.curve(spans).max(initial=0))

    def _last_resort(self) -> _Placement:
        self._hold(True)
        return self.planner.place(self.trips)

    def _hold(self, late: bool) -> None:
        for trip in self.trips:
            trip.not_before = trip.reader if late else 0

    def _place(self, taken: Sequence[bool]) -> _Placement:
        return self.planner.place([trip for trip, wanted in zip(self.trips, taken, strict=True) if wanted])

    def _over(self, placed: _Placement, budget: int) -> Ints:
        return self.planner.curve(placed.freed()) - budget

    # What each trip would free if it were the only one: first place, end, bytes.
    def _windows(self, late: bool) -> _Windows:
        self._hold(late)
        for trip in self.trips:
            self.planner.place([trip])
        return (np.array([t.free for t in self.trips], np.int64), np.array([t.back for t in self.trips], np.int64),
                np.array([t.saved.freed_bytes for t in self.trips], np.int64))  # fmt: skip

    def _cover(self, over: Ints, windows: _Windows, taken: list[bool]) -> bool:
        free, back, size = windows
        open_, any_taken = ~np.array(taken, bool), False
        count = np.concatenate([[0], np.cumsum(over > 0)])
        excess, at = over.copy(), _next_over(over, 0)
        while at < len(excess):
            fits = np.flatnonzero(open_ & (free <= at) & (at < back))
            if len(fits):
                useful = (count[back[fits]] - count[at]) * np.minimum(size[fits], excess[at]) / size[fits]
                best = int(fits[int(np.argmax(useful))])
                taken[best], open_[best], any_taken = True, False, True
                excess[free[best] : back[best]] -= size[best]
            at = _next_over(excess, at if len(fits) else _next_start(free[open_], at))
        return any_taken

    def _delay(self, over: Ints, windows: _Windows, taken: list[bool]) -> bool:
        early = [trip for trip, wanted in zip(self.trips, taken, strict=True) if wanted and trip.back < trip.reader]
        early.sort(key=_key(lambda t: -t.reader))
        back = np.array([max(trip.back, trip.not_before) for trip in early], np.int64)
        reader = np.array([trip.reader for trip in early], np.int64)
        excess, at = over.copy(), _next_over(over, 0)
        delayed = False
        while at < len(excess):
            fits = np.flatnonzero((back <= at) & (at < reader))
            if len(fits):
                first, end = int(fits[0]), at + int(np.argmax(np.append(excess[at:] <= 0, True)))
                early[first].not_before = back[first] = min(end, early[first].reader)
                excess[at : back[first]] -= early[first].saved.freed_bytes
                delayed = True
            at = _next_over(excess, at if len(fits) else _next_start(back, at))
        return delayed

    def _pruned(self, taken: list[bool], placed: _Placement, over: Ints, budget: int) -> _Placement:
        fewer = list(taken)
        room = -over
        for k, trip in enumerate(self.trips):
            if fewer[k] and trip.free < trip.back and room[trip.free : trip.back].min() >= trip.saved.freed_bytes:
                fewer[k] = False
                room[trip.free : trip.back] -= trip.saved.freed_bytes
        if fewer != taken:
            smaller = self._place(fewer)
            if self._over(smaller, budget).max(initial=0) <= 0:
                return smaller
        return self._place(taken)


def _next_over(excess: Ints, at: int) -> int:
    """The first place from `at` on that is above 0, else the end."""
    at = min(at, len(excess))
    return at + int(np.argmax(np.append(excess[at:] > 0, True)))


def _next_start(starts: Ints, at: int) -> int:
    """The least start behind `at`; far away where there is none."""
    return int(starts[starts > at].min(initial=FAR))
