"""An interpreter over small integers: what a program, or a plan of many ranks, computes.

Every tensor holds integers modulo a prime. Matmul, reshape, slice, transpose and the like are exact; `add` is commutative
but not associative, so that a sum taken in another order shows; every other kind is a mix of its name, attributes and
operands, so that a wrong operand shows. Storage is real: in-place results overwrite their operand, views see it, vectors
made by `builtin.combine` refer to their parts. In a plan a storage is gone after its last reader; reading what was never
written or is gone raises `Poisoned`.

>>> from interlace.ir import parse
>>> text = '''program rank=0 world=1 mode=train
... #0 %0:float32[2]"x" = pd_op.data() forward
... #1 %1:float32[2]~0 = pd_op.relu_(%0) forward inplace=0:0
... #2 builtin.shadow_output(%1) forward {"output_name":"y"}'''
>>> sorted(run(parse(text))[0].outputs)
['y@0']
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.ir import ABSENT, Group, Op, Program, Value, describe
from interlace.ir.effects import is_random
from interlace.ir.kinds import (
    BOUNDARY,
    COMBINE,
    DATA,
    PARAMETER,
    SPLIT,
    is_collective,
    is_copy,
    is_receive,
    is_send,
)

PRIME = 32749
"""Products of two residues fit 32 bits, and sums of 2**33 of them fit 64."""
Array = NDArray[np.int64]
Item = tuple[int, int]


class Poisoned(Exception):
    """An operation read a storage that nothing has written yet, or that is freed already."""


class Stuck(Exception):
    """Ranks wait for each other for ever, or their collectives do not match."""


@dataclass(slots=True, eq=False)
class Cell:
    """One storage; `data` is None before the first write and after the free."""

    data: Array | None = None


@dataclass(slots=True)
class Result:
    """What one rank's step gives: named outputs (`name@micro-batch`) and the persistable values at the end."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    state: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """A communication operation that waits for its partners; `answer` is what the operation gives."""

    op: Op
    data: list[Array]
    answer: list[Array] | None = None


# ---------------------------------------------------------------------------------------------------------------- kernels


def seeded(text: str, size: int) -> Array:
    """`size` residues that depend on `text` only."""
    start = zlib.crc32(text.encode())
    places = np.arange(1, size + 1, dtype=np.int64)
    return (start % PRIME * places + start // PRIME % PRIME + places * places % 8191) % PRIME


def add(left: Array, right: Array) -> Array:
    """A sum that keeps no associative law: `(a + b) + c != a + (b + c)`."""
    product = left * right % PRIME
    return np.asarray((left + right + 7 * product * product) % PRIME)


def _fold(parts: Sequence[Array]) -> Array:
    total = parts[0]
    for part in parts[1:]:
        total = add(total, part)
    return total


def _swap(x: Array, transpose: Any) -> Array:
    return np.swapaxes(x, -1, -2) if transpose and x.ndim > 1 else x


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    while x.ndim > len(shape):
        x = x.sum(axis=0)
    for dim, size in enumerate(shape):
        if size == 1 and x.shape[dim] != 1:
            x = x.sum(axis=dim, keepdims=True)
    return x % PRIME


def _matmul(op: Op, x: list[Array]) -> list[Array]:
    return [_swap(x[0], op.attrs.get("transpose_x")) @ _swap(x[1], op.attrs.get("transpose_y")) % PRIME]


def _matmul_grad(op: Op, x: list[Array]) -> list[Array]:
    a, b, d = x[:3]
    tx, ty = op.attrs.get("transpose_x"), op.attrs.get("transpose_y")
    da = d @ _swap(_swap(b, ty), True)
    db = np.swapaxes(_swap(a, tx), -1, -2) @ d
    return [_sum_to(_swap(da, tx), a.shape), _sum_to(_swap(db, ty), b.shape)]


def _unary(op: Op, x: list[Array]) -> list[Array]:
    salt = zlib.crc32(op.kind.encode()) % PRIME
    return [(x[0] * x[0] * 3 % PRIME * x[0] + salt * x[0] + salt) % PRIME]


def _constant(op: Op, x: list[Array]) -> list[Array]:
    value = op.attrs.get("value", 0)
    return [np.atleast_1d(np.asarray(value, dtype=np.float64).astype(np.int64))]


def _slice(op: Op, x: list[Array]) -> list[Array]:
    index = [slice(None)] * x[0].ndim
    starts = x[1].ravel() if len(x) > 1 else op.attrs["starts"]
    ends = x[2].ravel() if len(x) > 2 else op.attrs["ends"]
    for axis, start, end in zip(op.attrs.get("axes", [0]), starts, ends, strict=True):
        index[axis] = slice(int(start), int(end))
    return [x[0][tuple(index)]]


def _axis(op: Op, x: list[Array], place: int) -> int:
    return int(x[place].ravel()[0]) if len(x) > place else int(op.attrs.get("axis", 0))


def _identity(op: Op, x: list[Array]) -> list[Array]:
    return [x[0]]


Kernel = Callable[[Op, list[Array]], list[Array]]
KERNELS: dict[str, Kernel] = {
    "matmul": _matmul,
    "matmul_grad": _matmul_grad,
    "add": lambda op, x: [add(x[0], x[1])],
    "add_n": lambda op, x: [_fold(x)],
    "subtract": lambda op, x: [(x[0] - x[1]) % PRIME],
    "multiply": lambda op, x: [x[0] * x[1] % PRIME],
    "transpose": lambda op, x: [np.transpose(x[0], op.attrs.get("perm"))],
    "slice": _slice,
    "full": _constant,
    "full_int_array": _constant,
    "zeros_like": lambda op, x: [np.zeros_like(x[0])],
    **dict.fromkeys(("relu", "gelu", "silu", "tanh", "exp", "sigmoid", "square"), _unary),
    **dict.fromkeys(
        (
            "assign",
            "share_data",
            "cast",
            "memcpy",
            "memcpy_d2h",
            "memcpy_h2d",
            "reshape",
            "flatten",
            "squeeze",
            "unsqueeze",
            "c_identity",
            "nop",
            "depend",
        ),
        _identity,
    ),
}


def _generic(op: Op, x: list[Array], size: int, which: int, salt: str) -> Array:
    """Any other kind: every element depends on every element of every operand, on the attributes and on `salt`."""
    attrs = json.dumps(op.attrs, sort_keys=True, default=str)
    total = zlib.crc32(f"{op.kind}|{which}|{attrs}|{salt}".encode()) % PRIME
    for place, part in enumerate(x):
        flat = part.ravel()
        weights = np.arange(1, flat.size + 1, dtype=np.int64) % PRIME
        total = (total + (2 * place + 3) * int((flat % PRIME * weights % PRIME).sum())) % PRIME
    places = np.arange(1, size + 1, dtype=np.int64)
    return (total * places + places * places) % PRIME


def _size(value: Value) -> int:
    return math.prod(_dims(value.shape))


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape with unknown dimensions taken as 2."""
    return tuple(2 if dim < 0 else dim for dim in shape)


# --------------------------------------------------------------------------------------------------------- communication


def collective(calls: Sequence[Call]) -> None:
    """Answer one collective; `calls` in the order of the group's ranks."""
    first = calls[0].op
    kind, count = first.kind, len(calls)
    parts = [call.data[0] for call in calls]
    for place, call in enumerate(calls):
        if kind in ("all_gather", "c_allgather", "c_concat"):
            call.answer = [np.concatenate(parts, axis=-1 if kind == "c_concat" else 0)]
        elif kind in ("reduce_scatter", "c_reducescatter"):
            call.answer = [np.split(_fold(parts), count)[place]]
        elif kind == "all_to_all":
            call.answer = [np.concatenate([np.split(part, count)[place] for part in parts])]
        elif kind in ("broadcast", "c_broadcast"):
            call.answer = [parts[int(first.attrs.get("root", 0))]]
        elif kind in ("reduce", "c_reduce_sum"):
            call.answer = [_fold(parts) if place == int(first.attrs.get("root_id", first.attrs.get("root", 0))) else parts[place]]
        elif kind == "barrier":
            call.answer = [parts[place]]
        else:
            call.answer = [_fold(parts)]


class Network:
    """Collectives meet in the order of their group; sends are buffered and received in order per group and direction."""

    def __init__(self) -> None:
        self.meeting: dict[tuple[int, ...], dict[int, Call]] = defaultdict(dict)
        self.mail: dict[tuple[int, int, int], deque[Array]] = defaultdict(deque)

    def post(self, rank: int, group: Group, call: Call) -> None:
        """Hand in a call; answers those that are complete now."""
        if is_send(call.op):
            self.mail[group.id, rank, group.ranks[call.op.attrs["peer"]]].append(call.data[0].copy())
            call.answer = []
        elif is_collective(call.op):
            meeting = self.meeting[(group.id, *group.ranks)]
            meeting[rank] = call
            if len(meeting) == len(group.ranks):
                if len({c.op.kind for c in meeting.values()}) > 1 or len({c.data[0].shape for c in meeting.values()}) > 1:
                    raise Stuck(f"group {group.id}: " + ", ".join(f"rank {r} calls {describe(c.op)}" for r, c in meeting.items()))
                collective([meeting[r] for r in group.ranks])
                del self.meeting[(group.id, *group.ranks)]

    def poll(self, rank: int, group: Group, call: Call) -> bool:
        """Whether the call has its answer."""
        if call.answer is None and is_receive(call.op):
            box = self.mail[group.id, group.ranks[call.op.attrs["peer"]], rank]
            if box:
                call.answer = [box.popleft()]
        return call.answer is not None


# ------------------------------------------------------------------------------------------------------------------- ranks


class Rank:
    """The memory of one rank and the execution of its items."""

    def __init__(self, program: Program, salt: str = "") -> None:
        self.program = program
        self.salt = salt
        self.ops = {op.id: op for op in program.ops}
        self.values = {value.id: value for value in program.values}
        self.producer = {value: op for op in program.ops for value in op.results}
        self.groups = {group.id: group for group in program.groups}
        self.cells: dict[tuple[int, int], Cell] = {}
        self.parts: dict[tuple[int, int], list[Cell]] = {}
        self.draws = 0
        self.persistable = {value.storage for value in program.values if value.persistable}
        self.items = items_of(program)
        present = set(self.items)
        self.skipped = {
            (op.id, m)
            for op in program.ops
            if is_copy(op) and program.jobs
            for m in range(program.pipeline.num_micro_batches)
            if (op.id, m) not in present
        }

    def root(self, value: Value, micro_batch: int) -> tuple[Value, int]:
        """The value whose storage a value lives in: of views, in-place results and omitted copies that of their operand.

        With it a micro-batch, or -1 where all micro-batches share the storage.
        """
        producer = self.producer.get(value.id)
        if producer is not None and (producer.id, micro_batch) in self.skipped:
            return self.root(self.values[producer.operands[0]], micro_batch)
        for result, operand in (*producer.inplace, *producer.views) if producer is not None else ():
            if producer is not None and producer.results[result] == value.id:
                return self.root(self.values[producer.operands[operand]], micro_batch)
        return value, -1 if value.storage in self.persistable else micro_batch

    def slot(self, value: Value, micro_batch: int) -> tuple[int, int]:
        """Key of a value's storage for a micro-batch."""
        root, instance = self.root(value, micro_batch)
        return root.storage, instance

    def roots_of(self, value_id: int, micro_batch: int) -> list[tuple[int, int]]:
        """For each cell of a value, the value whose contents it holds."""
        value, producer = self.values[value_id], self.producer.get(value_id)
        if producer is not None and producer.name == COMBINE:
            return [root for part in producer.operands for root in self.roots_of(part, micro_batch)]
        if producer is not None and producer.name == SPLIT:
            return [self.roots_of(producer.operands[0], micro_batch)[producer.results.index(value_id)]]
        root, instance = self.root(value, micro_batch)
        if root is not value:
            return self.roots_of(root.id, micro_batch)
        return [(root.id, instance)] * (len(value.elements) if value.dtype == "vector" else 1)

    def content_operands(self, op: Op) -> list[int]:
        """Operands whose contents an operation reads."""
        return [v for k, v in enumerate(op.operands) if v != ABSENT and k not in op.no_buffer]

    def cells_of(self, value_id: int, micro_batch: int) -> list[Cell]:
        """The storages that hold a value: one, or one for each part of a vector."""
        value = self.values[value_id]
        producer = self.producer.get(value_id)
        if producer is not None and producer.name == COMBINE:
            return [cell for part in producer.operands for cell in self.cells_of(part, micro_batch)]
        if producer is not None and producer.name == SPLIT:
            return [self.cells_of(producer.operands[0], micro_batch)[producer.results.index(value_id)]]
        root, _ = self.root(value, micro_batch)
        if root is not value:
            return self.cells_of(root.id, micro_batch)
        if value.dtype == "vector":
            return self.parts.setdefault((value_id, micro_batch), [Cell() for _ in value.elements])
        slot = self.slot(value, micro_batch)
        if slot not in self.cells:
            self.cells[slot] = Cell()
            self._boundary(value, producer, micro_batch)
        return [self.cells[slot]]

    def _boundary(self, value: Value, producer: Op | None, micro_batch: int) -> None:
        """Contents of parameters and inputs, made at their first use."""
        root = producer
        if value.storage != value.id and value.storage in self.values:
            root = self.producer.get(value.storage, producer)
        if root is None or root.name not in BOUNDARY or not root.results:
            return
        held = self.values[root.results[0]]
        name = held.name or f"%{held.id}"
        text = f"{name}|{self.salt}" if held.persistable or root.name == PARAMETER else f"{name}@{micro_batch}|{self.salt}"
        self.cells[self.slot(held, micro_batch)] = Cell(seeded(text, _size(held)))

    def read(self, op: Op, value_id: int, micro_batch: int) -> list[Array]:
        """A value's tensors, shaped."""
        value = self.values[value_id]
        shapes = [element.shape for element in value.elements] if value.dtype == "vector" else [value.shape]
        arrays = []
        for cell, shape in zip(self.cells_of(value_id, micro_batch), shapes, strict=True):
            if cell.data is None:
                raise Poisoned(
                    f"rank {self.program.rank}: {describe(op)} of micro-batch {micro_batch} reads %{value_id}, "
                    "which is not written yet or freed already"
                )
            arrays.append(cell.data.reshape(_dims(shape)))
        return arrays

    def arguments(self, op: Op, micro_batch: int) -> list[Array]:
        """Tensors that the operation reads: vectors spread out, operands of which only the shape is read left out."""
        return [array for value_id in self.content_operands(op) for array in self.read(op, value_id, micro_batch)]

    def compute(self, op: Op, x: list[Array]) -> list[Array | None]:
        """What the operation gives, one array a tensor; None where a view keeps its operand's contents."""
        kernel = KERNELS.get(op.kind)
        salt = ""
        if is_random(op):
            salt, self.draws = str(self.draws), self.draws + 1
        sizes = [
            (element.shape if element else value.shape)
            for value in (self.values[r] for r in op.results)
            for element in (value.elements or (None,))
        ]
        if op.kind == "split_with_num" or op.kind == "split":
            return list(np.split(x[0], len(sizes), axis=_axis(op, x, 1)))
        if op.kind == "concat":
            return [
                np.concatenate(
                    x[:-1] if "axis" not in op.attrs else x, axis=_axis(op, [x[-1]], 0) if "axis" not in op.attrs else int(op.attrs["axis"])
                )
            ]
        given = kernel(op, x) if kernel else []
        made: list[Array | None] = []
        for which, shape in enumerate(sizes):
            size = math.prod(_dims(shape))
            if which < len(given):
                made.append(np.resize(given[which], _dims(shape)) if given[which].size != size else given[which])
            else:
                made.append(_generic(op, x, size, which, salt))
        return made

    def write(self, op: Op, arrays: Sequence[Array | None], micro_batch: int) -> None:
        """Store an operation's results; views write nothing."""
        viewed = {result for result, _ in op.views}
        rest = iter(arrays)
        for place, value_id in enumerate(op.results):
            for cell in self.cells_of(value_id, micro_batch):
                array = next(rest)
                if place not in viewed and array is not None:
                    cell.data = np.array(array, dtype=np.int64).ravel()

    def step(self, op: Op, micro_batch: int) -> Iterator[Call]:
        """Run one operation; communication is yielded as a call and answered before it goes on."""
        if op.name in BOUNDARY or op.name in (COMBINE, SPLIT) or (op.id, micro_batch) in self.skipped:
            return
        x = self.arguments(op, micro_batch)
        if op.group in self.groups and (is_send(op) or is_receive(op) or is_collective(op)):
            call = Call(op, x)
            yield call
            answer = call.answer or []
            extra = self.compute(op, x)[len(answer) :] if len(op.results) > len(answer) else []
            self.write(op, [*answer, *extra], micro_batch)
        else:
            self.write(op, self.compute(op, x), micro_batch)

    def outputs(self) -> Result:
        """Named outputs of all micro-batches and all persistable values by name."""
        result = Result()
        for op in self.program.ops:
            if op.name not in (PARAMETER, DATA) and op.name in BOUNDARY and op.operands:
                name = op.attrs.get("output_name") or op.attrs.get("parameter_name") or f"#{op.id}"
                for m in range(self.program.pipeline.num_micro_batches):
                    result.outputs[f"{name}@{m}"] = self.read(op, op.operands[0], m)[0].ravel().tolist()
        for value in self.program.values:
            cell = self.cells.get((value.storage, -1))
            if value.persistable and value.name and cell is not None and cell.data is not None:
                result.state[value.name] = cell.data.tolist()
        return result


def items_of(program: Program) -> list[Item]:
    """All items in host order; without jobs one micro-batch after the other and the optimizer once at the end."""
    if program.jobs:
        return [item for job in program.jobs for item in job.items]
    body = [op.id for op in program.ops if op.role != "optimize"]
    once = [op.id for op in program.ops if op.role == "optimize"]
    return [(op, m) for m in range(program.pipeline.num_micro_batches) for op in body] + [(op, 0) for op in once]


def frees(rank: Rank) -> dict[Item, list[Cell]]:
    """Storages that nothing reads after an item of the plan; outputs and persistable values stay."""
    kept: set[int] = set()
    for op in rank.program.ops:
        if op.name in BOUNDARY:
            for m in range(rank.program.pipeline.num_micro_batches):
                kept.update(id(cell) for value in (*op.operands, *op.results) for cell in rank.cells_of(value, m))
    last: dict[int, tuple[Item, Cell]] = {}
    for op_id, m in rank.items:
        op = rank.ops[op_id]
        used = rank.content_operands(op) + list(op.results)
        for value in used if op.name not in (COMBINE, SPLIT) else ():
            if rank.values[value].storage not in rank.persistable:
                for cell in rank.cells_of(value, m):
                    last[id(cell)] = ((op_id, m), cell)
    gone: dict[Item, list[Cell]] = defaultdict(list)
    for key, (item, cell) in last.items():
        if key not in kept:
            gone[item].append(cell)
    return gone


def _serial(rank: Rank, order: Sequence[Item]) -> Iterator[Call]:
    """Run a rank's items in one order, freeing as soon as nothing later reads."""
    gone = frees(rank) if rank.program.jobs else {}
    for op_id, m in order:
        yield from rank.step(rank.ops[op_id], m)
        for cell in gone.get((op_id, m), ()):
            cell.data = None


def run(programs: Program | Sequence[Program], *, orders: Sequence[Sequence[Item]] | None = None, seed: int = 0) -> list[Result]:
    """Run one step of all ranks.

    Programs with jobs run as planned, others one micro-batch after the other. Ranks take turns in an order drawn from
    `seed`. Sends are buffered. `orders` gives each rank another order of its items.

    Raises:
        Poisoned: A read of what is not written yet, or freed already.
        Stuck: Ranks wait for each other for ever, or call different collectives.
    """
    given = [programs] if isinstance(programs, Program) else list(programs)
    ranks = [Rank(program, salt=str(program.rank)) for program in given]
    network, rng = Network(), random.Random(seed)
    threads = [_serial(rank, orders[k] if orders else rank.items) for k, rank in enumerate(ranks)]
    waiting: dict[int, Call | None] = dict.fromkeys(range(len(ranks)))
    while waiting:
        moved = False
        for k in rng.sample(sorted(waiting), len(waiting)):
            moved |= _turn(ranks[k], threads[k], waiting, k, network)
        if not moved:
            raise Stuck("; ".join(f"rank {ranks[k].program.rank} waits in {describe(call.op)}" for k, call in waiting.items() if call))
    return [rank.outputs() for rank in ranks]


def _turn(rank: Rank, thread: Iterator[Call], waiting: dict[int, Call | None], k: int, network: Network) -> bool:
    """Let one rank run until it has to wait; whether it moved at all."""
    moved = False
    while True:
        call = waiting[k]
        if call is not None and not network.poll(rank.program.rank, rank.groups[call.op.group], call):
            return moved
        moved = True
        waiting[k] = next(thread, None)
        call = waiting[k]
        if call is None:
            del waiting[k]
            return True
        network.post(rank.program.rank, rank.groups[call.op.group], call)


def assert_same(before: Program | Sequence[Program], after: Program | Sequence[Program], seed: int = 0) -> None:
    """Both give the same outputs and leave the same parameters and state, on every rank, to the last bit."""
    for rank, (left, right) in enumerate(zip(run(before), run(after, seed=seed), strict=True)):
        for part in ("outputs", "state"):
            a, b = getattr(left, part), getattr(right, part)
            missing = sorted(set(a) - set(b))
            assert not missing, f"rank {rank}: {part} {missing} are gone"
            wrong = [name for name in a if a[name] != b[name]]
            assert not wrong, f"rank {rank}: {part} {wrong} differ"
