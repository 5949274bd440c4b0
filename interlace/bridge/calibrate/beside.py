"""How much operations slow down what runs beside them, and the other way round: collectives, transfers, copies, and receives that wait.

A step puts one long message on a stream of its own and a row of equal operations on the compute stream, so that the message begins first
and ends last. The host notes when the operations have ended and when everything has. What is left of the message by then tells how far it
came meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import paddle
from tqdm import tqdm

from interlace.bridge.calibrate.factors import Factors, Round, Times, factors
from interlace.bridge.calibrate.messages import BACK, COLLECTIVES, DTYPE, Message, elements_of
from interlace.bridge.guard import Fault, agreed, attempt, fault_of
from interlace.bridge.probe.bench import Bench, Case, Inputs, Runner, fill
from interlace.cost_model.interference import RESULT, TRANSFER, WAIT
from interlace.cost_model.profile import Interference
from interlace.cost_model.work import Part
from interlace.grouping import grouped
from interlace.ir.program import DTYPE_BYTES
from interlace.passes.name_streams import NameStreams
from interlace.planning.peers import Peers

ops: Any = paddle._C_ops
COLLECTIVE_BYTES, COPY_BYTES, TRANSFER_BYTES, SLOW_BYTES = 1 << 30, 1 << 28, 1 << 26, 1 << 22
"""Bytes of a collective and of a copy, which take about 5 ms on GPUs of 2023, and of a transfer, which is as large as activations: the
number of multiprocessors that a transfer occupies, also while it waits, depends on its size. On a slow device (`Bench.is_fast`) all have
the last size."""
TRANSFERS = 16
"""Transfers in a row, which take as long as a collective."""
PRIORITY = NameStreams().priority
"""Priority of the streams of messages, as in plans; a kernel of higher priority need not wait for a whole kernel of many short blocks."""
LEAST_BYTES = 1 << 20
"""Other operations than products and attention that read and write less than this are not measured."""
PLACES, PLACE = (0.3, 0.5, 0.7), 0.7
"""Which products are measured, and which operation of each other kind: places in the list sorted by size. Beside a receive that waits, an
operation of each other kind at the first place is measured, too: short kernels with a block for each row are slowed more."""
SHARE = 0.3
"""The share of the message's time that the operations take alone."""
LEAD_S, MOST, SEVERAL, BLOCKED_S = 0.004, 100, 5, 0.002
"""Seconds of other work at the start of a step, in which the host issues the rest; the most operations; the number of operations that is
timed to find out how many are needed; and seconds that operations take whose delay is measured."""
PRODUCT = "gemm:any"
"""Category of the rows of all products."""
BLOCKED, BLOCKED_BYTES, BLOCKED_KERNELS = 3, 1 << 24, 5
"""Streams that wait for an event while the delay of kernels is measured, and which kernels these are: the shortest memory-bound ones that
read and write at least so many bytes. On an H100, kernels of 9 us begin 1.2 to 1.4 us later while two to four streams wait besides the
host's (benchmarks/results/gpu.md)."""
MOST_RESULTS = 24
"""The most products whose results differ in size that are measured beside a receive that waits."""
NUM_ROUNDS, NUM_QUICK = 7, 3
ALONE = "interlace_beside_nothing"
APART = "the operations ended after what ran beside them, or it made no progress"


Failed = dict[str, dict[str, None]]
"""Reasons, with the names of what could not be measured in order."""


class Beside(NamedTuple):
    """Rows of interference, the delay of each kernel's start while other streams wait (nanoseconds; 0: not known), and what could not be
    measured, with the reason."""

    rows: tuple[Interference, ...] = ()
    late_ns: int = 0
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """What runs beside operations.

    Attributes:
        beside, group_size: As in `Interference`.
        prepare: Adds to a program what must be there before the message begins, and returns it.
        add: Adds the message.
        is_late: Whether this rank sends late, while its peer is measured.
    """

    beside: str
    group_size: int
    prepare: Callable[[], Any]
    add: Callable[[Any], object]
    is_late: bool = False

    @property
    def stream(self) -> str:
        """Name of the stream; a stream of communication belongs to one group."""
        return f"interlace_beside_{self.beside.partition(':')[0]}_{self.group_size}"


class Load(NamedTuple):
    """An operation to measure: its category of interference, whether it is only measured beside a receive that waits, and for a row of its
    own the number of elements of its result, else 0."""

    op: str
    case: Case
    only_waits: bool = False
    elements: int = 0

    def is_measured_beside(self, side: Side) -> bool:
        """Whether this operation is measured beside that."""
        return side.beside == WAIT or not self.only_waits


class Lab:
    """Builds and runs steps in which operations and a message run side by side.

    Args:
        bench: The device.
        num_runs: Number of rounds.
        everyone: The group of all ranks, which begin each step together; None if there is one rank.
        peers: Connection to the other ranks; None if there is one rank.
    """

    def __init__(self, bench: Bench, num_runs: int, everyone: Any = None, peers: Peers | None = None) -> None:
        self.bench, self.num_runs, self.everyone, self.peers = bench, num_runs, everyone, peers
        self._meet = self.bench.runner(self.add_barrier)

    def step(
        self,
        side: Side | None = None,
        inputs: Inputs | None = None,
        case: Case | None = None,
        count: int = 0,
        is_first: bool = False,
        is_alone: bool = False,
        blocked: int = 0,
    ) -> Runner:
        """A step with a message, if `side` is one, and `count` operations.

        Args:
            side, case, count: What runs side by side.
            inputs: Inputs of the operations.
            is_first: Whether the operations begin before the message.
            is_alone: Whether the message is left out, though not what it needs.
            blocked: Number of other streams that wait until the operations have ended.
        """

        def begin() -> None:
            prepared = side.prepare() if side else None
            self.bench.add_lead(LEAD_S)
            self.add_barrier()
            if side and side.is_late and not is_alone:
                self.bench.add_lead()
            begun = paddle.full([1], 1.0, DTYPE)
            stream = side.stream if side else ALONE
            # `scale` would also put a constant, which the host computes, on the stream
            placed = on_stream(stream, lambda: ops.square(begun))
            if side and not is_alone:
                on_stream(stream, lambda: side.add(prepared))
            if not is_first:
                ops.square(placed)

        def build() -> None:
            if case is None:
                begin()
            else:
                fill(case, count, begin)
            ended = paddle.full([1], 1.0, DTYPE)
            for k in range(blocked):
                on_stream(f"interlace_beside_blocked_{k}", lambda: ops.square(ended))
            self.bench.device.wait_for(self.bench.device.watch(ended))

        return self.bench.runner(build, inputs=inputs)

    def rounds(self, *steps: Runner) -> list[tuple[Times, ...]]:
        """Times of steps that run in turn. All ranks must run as many."""
        found, ended = list[tuple[Times, ...]](), list[float]()

        def once(run: Runner) -> Times:
            self._meet()
            all_s = run(1, lambda: ended.append(time.perf_counter()))
            return Times(all_s - (time.perf_counter() - ended[-1]), all_s)

        for _ in range(self.num_runs + 1):
            found.append(tuple(once(run) for run in steps))
        return found[1:]

    def each_s(self, case: Case, inputs: Inputs) -> float:
        """About how long one operation of many takes, in seconds."""
        none, several = (self.step(None, inputs, case, count) for count in (0, SEVERAL))
        rounds = self.rounds(none, several)
        return max(median(some.ops_s - begin.ops_s for begin, some in rounds) / SEVERAL, 1e-7)

    def add_barrier(self) -> None:
        """Add an operation to the program that ends when all ranks have reached it."""
        if self.everyone is not None:
            ops.all_reduce(paddle.full([1], 1.0, DTYPE), self.everyone.id, 0)


def lab_of(bench: Bench, quick: bool, groups: Mapping[int, Any], peers: Peers | None) -> Lab:
    """A lab for all ranks; arguments as those of `measured_beside`."""
    return Lab(bench, NUM_QUICK if quick else NUM_ROUNDS, groups[max(groups)] if groups else None, peers)


def on_stream(stream: str, add: Callable[[], Any]) -> Any:
    """Put the operations that `add` adds to the program on a stream; returns what it returns."""
    block = paddle.static.default_main_program().global_block()
    before = len(block.ops)
    made = add()
    for op in block.ops[before:]:
        op.set_execution_stream(stream)
        op.set_int_attr("stream_priority", PRIORITY)
    return made


def measured_beside(
    bench: Bench,
    cases: Sequence[Case],
    quick: bool,
    groups: Mapping[int, Any] | None = None,
    rank: int = 0,
    peers: Peers | None = None,
) -> Beside:
    """Interference of operations with copies, and with collectives and transfers between ranks.

    Every rank must call this with the same cases. The first rank of a group of two gets the rows beside transfers and receives that wait.

    Args:
        bench: The device.
        cases: All operations, of which some are chosen.
        quick: Whether to measure less.
        groups: The groups of this rank by their number of ranks, all ranks' among them; None if there is one rank.
        rank: This rank.
        peers: Connection to the other ranks; None if there is one rank.

    Raises what Paddle raises if a message fails, or an operation beside one that ran alone on all ranks; the launcher must then end the
    other ranks. Raises PlanError if ranks measure different operations.
    """
    groups = groups or {}
    lab = lab_of(bench, quick, groups, peers)
    sides = [*_copies(lab), *(side for group in groups.values() for side in _collectives(lab, group, rank))]
    sides += _transfers(lab, groups[2], rank) if 2 in groups else []
    messages = [lab.step(side) for side in sides]
    lengths = [median(each.all_s - each.ops_s for (each,) in lab.rounds(message)) for message in messages]
    loads = list[Load]()
    for op, of_op in _by_op(cases):
        usual = _middle(of_op, quick)
        loads += [Load(op, case) for case in usual]
        loads += [Load(op, case, True) for case in _short(of_op) if op != PRODUCT and case not in usual]
    loads += [Load(PRODUCT, case, True, case.part.result_elements) for case in _of_results(cases)]
    found, failed = dict[tuple[int, str, int], list[Factors]](), Failed()
    late_ns = _late_ns(lab, cases, failed)
    if groups and 2 not in groups:
        failed["beside operations: an odd number of ranks has no groups of two"] = dict.fromkeys(["transfers and receives that wait"])
    wanted = [load for load in loads if any(load.is_measured_beside(side) for side in sides)]
    for load in tqdm(wanted, desc="beside", unit="op", leave=False, disable=None):
        case, known = load.case, _timed(lab, load.case, failed)
        if known is None:
            continue
        inputs, each_s = known
        for k, side in enumerate(sides):
            if not load.is_measured_beside(side):
                continue
            count = 0 if side.is_late else max(1, min(MOST, int(SHARE * lengths[k] / each_s)))
            steps = [messages[k], lab.step(side, inputs, case, count, is_alone=True), lab.step(side, inputs, case, count)]
            steps += [lab.step(side, inputs, case, 1, is_first=True)] if side.beside.startswith("comm:") else []
            rounds = [Round(*each) for each in lab.rounds(*steps)]
            if side.is_late:
                continue
            if measured := factors(rounds, each_s, waits=side.beside == WAIT):
                found.setdefault((k, load.op, load.elements), []).append(measured)
            else:
                failed.setdefault(f"beside {side.beside} of {side.group_size} ranks: {APART}", {})[load.op] = None
    rows = [_row(op, sides[k], each, elements) for (k, op, elements), each in sorted(found.items())]
    return Beside(tuple(rows), late_ns, tuple(f"{', '.join(names)} {why}" for why, names in failed.items()))


def _timed(lab: Lab, case: Case, failed: Failed) -> tuple[Inputs, float] | None:
    """Inputs of an operation and about how long it takes, in seconds; None, with the reason in `failed`, if it fails on a rank: the others
    would wait for that rank in each round."""

    def tried() -> Inputs:
        inputs = lab.bench.inputs(case)
        lab.bench.runner(lambda: fill(case, SEVERAL, lambda: lab.bench.add_lead(LEAD_S)), inputs=inputs)()
        return inputs

    name, (inputs, failure) = f"{case.part.kind} of {case.part.dtype}", attempt(tried)  # Paddle raises many classes
    verdict = agreed(lab.peers, f"whether {name} runs, {dict(case.part.dims)}", fault_of(failure) if failure else Fault())
    if verdict is None:
        return inputs, lab.each_s(case, inputs)
    failed.setdefault(f"beside others: {verdict.text(lab.everyone.nranks if lab.everyone else 1)}", {})[name] = None
    return None


def _late_ns(lab: Lab, cases: Sequence[Case], failed: Failed) -> int:
    """How much later kernels begin while `BLOCKED` streams wait: the median over short kernels, in nanoseconds; 0 if some are not later."""
    least, late_s = BLOCKED_BYTES if lab.bench.is_fast else LEAST_BYTES, list[float]()
    of_one = [case for case in cases if not case.part.flops and case.part.kind != "add_n"]  # sums of several tensors take several kernels
    long_enough = [case for case in of_one if case.part.size_bytes >= least]
    for case in sorted(long_enough, key=lambda case: case.part.size_bytes)[:BLOCKED_KERNELS]:
        if known := _timed(lab, case, failed):
            inputs, each_s = known
            count = max(1, min(MOST, int(BLOCKED_S / each_s)))
            rounds = lab.rounds(*(lab.step(None, inputs, case, count, blocked=blocked) for blocked in (0, BLOCKED)))
            late_s.append(median(then.ops_s - free.ops_s for free, then in rounds) / count)
    return round(median(late_s) * 1e9) if late_s and min(late_s) > 0 else 0


def _by_op(cases: Sequence[Case]) -> list[tuple[str, list[Case]]]:
    """Cases that are not tiny by their category of interference, ascending by size."""
    large = [case for case in cases if case.part.flops or case.part.size_bytes >= LEAST_BYTES]
    ordered = sorted(large, key=lambda case: case.part.flops or case.part.size_bytes)
    return sorted(grouped((_category(case.part), case) for case in ordered).items())


def _category(part: Part) -> str:
    if part.family in ("gemm", "attention"):
        return PRODUCT if part.family == "gemm" else part.kind
    return f"memory:{part.kind.removesuffix('_mixed')}"


def _middle(cases: Sequence[Case], quick: bool) -> list[Case]:
    """Some of the cases of a category, which are sorted by size; neither the smallest nor the largest."""
    places = PLACES if cases[0].part.family == "gemm" and not quick else (PLACE,)
    return [cases[at] for at in dict.fromkeys(int(place * len(cases)) for place in places)]


def _short(cases: Sequence[Case]) -> Sequence[Case]:
    """The case at the first place among those that take long enough to be measured beside a receive that waits."""
    known = [case for case in cases if case.part.flops or case.part.size_bytes >= BLOCKED_BYTES]
    return known[int(PLACES[0] * len(known)) :][:1]


def _of_results(cases: Sequence[Case]) -> list[Case]:
    """Products with results of different sizes."""
    found = {case.part.result_elements: case for case in cases if case.part.kind == "gemm"}
    ordered = [found[elements] for elements in sorted(found)]
    return ordered[:: max(1, math.ceil(len(ordered) / MOST_RESULTS))]


def _row(op: str, side: Side, found: Sequence[Factors], elements: int) -> Interference:
    on_op = [each.op for each in found]
    on_side = [each.beside for each in found]
    known = [each.holds for each in found if each.holds is not None]
    return Interference(
        op,
        side.beside,
        side.group_size,
        round(median(on_op), 3),
        round(median(on_side), 3),
        (round(min(on_op), 3), round(max(on_op), 3)),
        (round(min(on_side), 3), round(max(on_side), 3)),
        num_files=len(found),
        dims={RESULT: elements} if elements else {},
        holds=sum(known) > len(known) / 2,
    )


def _copies(lab: Lab) -> Iterator[Side]:
    """Copies in both directions; all ranks copy at once."""
    device, number = lab.bench.device, lab.everyone.nranks if lab.everyone is not None else 1
    elements = _bytes(lab, COPY_BYTES) // DTYPE_BYTES[DTYPE]
    out = Side("copy:d2h", number, partial(paddle.full, [elements], 0.5, DTYPE), device.copy_out)
    yield out
    yield Side("copy:h2d", number, lambda: on_stream(out.stream, lambda: out.add(out.prepare())), device.copy_in)


def _collectives(lab: Lab, group: Any, rank: int) -> Iterator[Side]:
    for message in COLLECTIVES:
        elements = elements_of(_bytes(lab, COLLECTIVE_BYTES), group.nranks) // (group.nranks if message.gets_whole else 1)
        yield Side(f"comm:{message.kind}", group.nranks, partial(paddle.full, [elements], 0.5, DTYPE), _adder(message, group, rank))


def _transfers(lab: Lab, group: Any, rank: int) -> list[Side]:
    """Transfers to the first rank of a group of two: several in a row, and one for which the peer is late."""
    prepare = partial(paddle.full, [_bytes(lab, TRANSFER_BYTES) // DTYPE_BYTES[DTYPE]], 0.5, DTYPE)
    once = _adder(BACK, group, rank)

    def several(x: Any) -> None:
        for _ in range(TRANSFERS):
            once(x)

    return [Side(TRANSFER, 2, prepare, several), Side(WAIT, 2, prepare, once, is_late=group.ranks.index(rank) == 1)]


def _adder(message: Message, group: Any, rank: int) -> Callable[[Any], object]:
    return lambda x: message.add(x, group.id, group.nranks, group.ranks.index(rank))


def _bytes(lab: Lab, size_bytes: int) -> int:
    return size_bytes if lab.bench.is_fast else SLOW_BYTES
