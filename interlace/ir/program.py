"""The program of one rank, independent of Paddle: immutable, printable, parseable, storable.

Operations and values refer to each other by id. An operation has the id of the captured operation that it stands for (`origin`),
or -1 if it is new, so that lowering can rebuild Paddle programs from the captured one. A program without jobs is what Paddle built;
a program with jobs is a schedule of it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec

Role = Literal["forward", "backward", "optimize"]
Memory = Literal["device", "host", "pinned"]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
"""Number of an operation, a value or a storage. This bound and those below limit what files may contain: tables are as long as the largest
number."""
IdOrNone = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 24)]
Ring = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
Dim = Annotated[int, msgspec.Meta(ge=-1, le=1 << 48)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 17)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 17)]
Position = Annotated[int, msgspec.Meta(ge=0, lt=1 << 17)]
Small = Annotated[int, msgspec.Meta(ge=-(1 << 15), lt=1 << 15)]
OpInstance = tuple[Id, Position]
"""One execution of an operation in a step: operation id, micro-batch."""
ABSENT = -1
"""Operand id of an optional operand that is not given."""

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
FLOAT_DTYPES = frozenset({"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"})


class TensorType(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Shape (a dimension of -1 is unknown until run time) and dtype of one tensor."""

    shape: tuple[Dim, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor; -1 if a dimension or the dtype is unknown."""
        width = DTYPE_BYTES.get(self.dtype, -1)
        if width < 0:
            return -1
        total = width
        for dim in self.shape:
            if dim < 0:
                return -1
            total *= dim
        return total


class Value(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A result of an operation.

    Attributes:
        id: Unique in the program.
        shape, dtype: As in `TensorType`. A vector of tensors has dtype `"vector"`, an output that an operation leaves out
            `"null"`, a stack of control flow, or one end of it, `"stack"`.
        storage: Values with the same storage share memory (views, in-place results); by default the value's own id.
        name: Name in Paddle's scope of a parameter, an input or a named output; otherwise empty.
        persistable: Lives across steps (parameters, optimizer state, gradient-merge buffers).
        elements: Types of a vector's tensors.
    """

    id: Id
    shape: tuple[Dim, ...]
    dtype: str
    storage: Id
    name: str = ""
    persistable: bool = False
    memory: Memory = "device"
    elements: tuple[TensorType, ...] = ()

    @property
    def type(self) -> TensorType:
        """Shape and dtype."""
        return TensorType(self.shape, self.dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor, or of all tensors of a vector; 0 for a null output; -1 if unknown."""
        if self.dtype == "vector":
            sizes = [element.size_bytes for element in self.elements]
            return -1 if any(size < 0 for size in sizes) else sum(sizes)
        if self.dtype == "null":
            return 0
        return self.type.size_bytes


class Op(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One operation.

    Attributes:
        id: Unique in the program; keeps its meaning through all passes.
        name: Paddle's name, such as `"pd_op.matmul_grad"`.
        operands, results: Value ids; an absent optional operand is `ABSENT`.
        chunk: Model chunk under virtual pipeline stages, otherwise 0.
        attrs: Attributes as plain data (dtypes and Paddle's places as text).
        layer: Dotted module path, such as `"layers.3.mlp.fc1"`; empty if unknown.
        group: Id of the communication group (Paddle's ring) for collectives and p2p, else -1.
        stream: Name of the stream it runs on; empty is the compute stream.
        priority: Stream priority, 0 is normal, lower runs first.
        origin: Id of the captured operation that it stands for, -1 for a new one.
        no_buffer: Positions of operands of which only the shape is read.
        inplace: `(result, operand)` positions that share memory because the operation writes in place.
        views: `(result, operand)` positions that share memory because the result is a view.
        num_blocks: Number of nested blocks (control flow). An operation with blocks is moved as a whole and never split.
    """

    id: Id
    name: str
    operands: tuple[IdOrNone, ...]
    results: tuple[Id, ...]
    role: Role
    chunk: Small = 0
    attrs: dict[str, Any] = {}
    layer: str = ""
    group: Ring = -1
    stream: str = ""
    priority: Small = 0
    origin: IdOrNone = -1
    no_buffer: tuple[Position, ...] = ()
    inplace: tuple[tuple[Position, Position], ...] = ()
    views: tuple[tuple[Position, Position], ...] = ()
    num_blocks: Position = 0

    @property
    def reads(self) -> list[int]:
        """Ids of the operands whose contents it reads, each once: all except absent ones and those of which it reads only the shape."""
        if not self.no_buffer:
            found = dict.fromkeys(self.operands)
            found.pop(ABSENT, None)
            return list(found)
        return list(dict.fromkeys(v for k, v in enumerate(self.operands) if v != ABSENT and k not in self.no_buffer))

    @property
    def kind(self) -> str:
        """Name without dialect and in-place mark: `pd_op.add_` is `add`."""
        return kind_of(self.name)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """Name of an operation without dialect and in-place mark."""
    return name.rpartition(".")[2].rstrip("_")


class Group(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A communication group: Paddle's ring id and the global ranks, in the ring's order."""

    id: Ring
    ranks: tuple[Rank, ...]


class Job(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A list of op instances that the executor runs as one program.

    Attributes:
        name: Unique in the plan; letters, digits and `_` only (Paddle's profiler reads no others).
        kind: `forward`, `backward`, `pair`, `optimizer`, ..., under VPP followed by the chunk (`forward1`).
        micro_batch: The micro-batch that it is named after (for a pair, that of its backward).
        items: The op instances in issue order.
        host_waits: Pairs of op instances: after issuing the first the host waits for the second, a computation that was issued
            before it, or the first itself. They keep the host from running ahead of the device, which would allocate memory too
            early (docs/gpu-place.md, rule 4).
    """

    name: str
    kind: str
    micro_batch: Small
    items: tuple[OpInstance, ...]
    host_waits: tuple[tuple[OpInstance, OpInstance], ...] = ()


class Event(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """An event between streams, also of several jobs: recorded after one op instance, waited for before others."""

    name: str
    record: OpInstance
    waits: tuple[OpInstance, ...]


class Pipeline(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Pipeline stage and number of micro-batches of the step that a program belongs to.

    `schedule` is Paddle's name (`1F1B`, `FThenB`, `VPP`), `accumulate` for gradient accumulation without a pipeline, or
    `none` for a program that runs once per step.
    """

    stage: Rank = 0
    num_stages: Count = 1
    num_micro_batches: Count = 1
    num_chunks: Count = 1
    schedule: str = "none"

    @property
    def alternates(self) -> bool:
        """Whether forward and backward of different micro-batches can alternate in the schedule."""
        return self.schedule not in ("FThenB", "none")


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, weakref=True):
    """One rank's program.

    Attributes:
        rank, world: Rank of the process that it was built for, and the number of processes.
        mode: `train`, `eval` or `predict`.
        passes: Names of the passes applied, in order.
        jobs, events: The schedule; empty before a schedule pass.
        refusals: Why Paddle's own schedule refuses the program, although plans of Interlace can run it; empty if it does not.
        paddle: Version of Paddle that built it.
        equivalent_ranks: Higher ranks that this program represents: theirs differ only in attributes and in the ranks of
            groups (`equivalent_ranks.py`).
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    groups: tuple[Group, ...] = ()
    pipeline: Pipeline = Pipeline()
    rank: Rank = 0
    world: Count = 1
    mode: str = "train"
    passes: tuple[str, ...] = ()
    jobs: tuple[Job, ...] = ()
    events: tuple[Event, ...] = ()
    refusals: tuple[str, ...] = msgspec.field(default=(), name="notes")
    paddle: str = ""
    equivalent_ranks: tuple[Rank, ...] = msgspec.field(default=(), name="alike")

    def with_ops(self, ops: list[Op] | tuple[Op, ...], values: list[Value] | tuple[Value, ...] | None = None) -> Program:
        """The same program with other operations, and other values if given."""
        return msgspec.structs.replace(self, ops=tuple(ops), values=self.values if values is None else tuple(values))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose program this is: its own, and those that it represents."""
        return (self.rank, *self.equivalent_ranks)
