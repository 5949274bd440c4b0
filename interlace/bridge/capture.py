"""Paddle's dense program of one rank -> `Program`. Paddle's program is only read, never changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import paddle

from interlace.bridge.attributes import attributes
from interlace.bridge.blocks import Pairs, blocks_of, inplace_pairs, inside
from interlace.bridge.layers import LayerNames, name_layers
from interlace.cpu.ops import type_name
from interlace.errors import ProgramError
from interlace.ir import ABSENT, Group, Op, Pipeline, Program, TensorType, Value, describe, operators
from interlace.ir.kinds import INSIDE, KEYWORD, SHARE_VAR, STACK_CREATE, is_known_comm, ring_of
from interlace.ir.operators import names
from interlace.ir.program import Role

ROLES: dict[int, Role] = {0: "forward", 1: "backward", 2: "optimize"}
ORDER = {"forward": 0, "backward": 1, "optimize": 2}
DROPPED_ATTRS = names("""
    op_callstack op_role chunk_id struct_name stop_gradient persistable is_persistable execution_stream stream_priority
    scheduling_priority sym_shape_str
""")
"""Attributes that are left out: `Op` has a field for them, or they do not matter for planning."""
FUSED, FUSED_PART, SLICE = "fused@-", "shard@", "slice@"
"""Name prefixes in sharding with tensor fusion: the buffer `fused@-<a>-<b>` contains parameters a and b, `shard@fused@-<a>-<b>` is the part
of it that this rank updates, `slice@<a>` the elements of a in that part (auto_parallel/sharding.py). Only the start-up program makes them
views."""
ATTENTION = frozenset({"pd_op.flash_attn", "pd_op.flash_attn_unpadded", "pd_op.flash_attn_qkvpacked"})
ATTENTION_MATRIX = 1
"""Index of their result `softmax`, rows times columns of every head, which is only allocated with `return_softmax`."""
STACK_TYPES = frozenset({"cf.stack", "cf.inlet", "cf.outlet"})
BATCH_NORM, BATCH_NORM_GRAD = "pd_op.batch_norm_", "pd_op.batch_norm_grad"
RUNNING_STATS = {BATCH_NORM: (1, 2), BATCH_NORM_GRAD: (3, 4)}
"""Operand positions of the running mean and variance. In a training step, backward uses the micro-batch's own statistics and does not
access these; with global statistics, forward does not write them (phi/kernels/{cpu,gpu}/batch_norm{,_grad}_kernel)."""


@dataclass(slots=True)
class Captured:
    """A captured program and the way back to Paddle's.

    Attributes:
        program: The captured program; operation ids are indices in `source_ops`, followed by ids of block arguments.
        source: The Paddle program that it was captured from, kept alive.
        source_ops: The operations of `source`.
        value_ids: Paddle's identity of a value -> value id.
    """

    program: Program
    source: Any
    source_ops: list[Any]
    value_ids: dict[str, int]


def capture(source: Any, pipeline: Pipeline | None = None, *, mode: str = "train", layers: LayerNames | None = None) -> Captured:
    """Take a snapshot of a dense PIR program (`paddle.pir.Program`) after partition and reshard, with one rank's own operations and shapes.
    `layers` names the modules of parameters, for `Op.layer`; without it, layers are named after Paddle's class paths.

    Raises ProgramError, with the operation, if one reads a result of a later part of the step (for example forward of backward).
    """
    return _Capture(source, pipeline or Pipeline(), mode, layers or LayerNames()).run()


class _Capture:
    def __init__(self, source: Any, pipeline: Pipeline, mode: str, layers: LayerNames) -> None:
        self.source, self.pipeline, self.mode, self.layers = source, pipeline, mode, layers
        self.block = source.global_block()
        self.source_ops = list(self.block.ops)
        self.values: list[Value] = []
        self.value_ids: dict[str, int] = {}
        self.storage: dict[int, int] = {}
        self.stand_for = _shared_variables(self.source_ops)
        self.fused: dict[str, int] = {}

    def run(self) -> Captured:
        raw = [op.op_role for op in self.source_ops]
        roles = complete_roles(raw)
        chunks = self._chunks(roles)
        keywords = self._keywords(len(self.source_ops))
        ops = [self._op(k, op, roles[k], chunks[k]) for k, op in enumerate(self.source_ops)]
        paths = [attributes(op).get("struct_name", "") for op in self.source_ops]
        self._check_roles(ops)
        ops = name_layers([*keywords, *ops], self.values, [""] * len(keywords) + paths, self.layers)
        groups = _groups({op.group for op in ops if op.group >= 0})
        env = paddle.distributed.ParallelEnv()
        program = Program(
            tuple(ops),
            tuple(self.values),
            groups,
            self.pipeline,
            env.rank,
            env.world_size,
            self.mode,
            refusals=_refusals(self.pipeline, self.source_ops, raw),
            paddle=paddle.__version__,
        )
        return Captured(program, self.source, self.source_ops, self.value_ids)

    def _keywords(self, first: int) -> list[Op]:
        made = []
        for k, (name, value) in enumerate(sorted(self.block.kwargs().items())):
            made.append(Op(first + k, KEYWORD, (), (self._value(value, name).id,), "forward", origin=first + k))
        buffers = {value.name: value.storage for value in self.values if value.name.startswith(FUSED)}
        known = self._lasting_names() if buffers else set()
        self.fused = {name: place for buffer, place in buffers.items() for name in (buffer, *fused_parameters(buffer, known))}
        self.values = [msgspec.structs.replace(value, storage=self._shared_with(value.name, value.storage)) for value in self.values]
        self.storage = {value.id: value.storage for value in self.values}
        return made

    def _shared_with(self, name: str, own: int) -> int:
        """The storage of the fused buffer that contains a parameter, or a part of one; else `own`."""
        plain = name.removeprefix(FUSED_PART).removeprefix(SLICE)
        return self.fused.get(plain, own) if plain else own

    def _lasting_names(self) -> set[str]:
        """Names of persistent variables in the program; a parameter of which only slices are used has their names."""
        given = (v for op in self.source_ops for v in op.results() if not paddle.pir.is_fake_value(v) and v.persistable and v.has_name)
        return {v.name.removeprefix(SLICE) for v in given} | {value.name.removeprefix(SLICE) for value in self.values}

    def _op(self, op_id: int, source: Any, role: Role, chunk: int) -> Op:
        name = source.name()
        given = operand_sources(source)
        blocks = blocks_of(source)
        nested = inside(source, given, op_id) if blocks else None
        operands = tuple(ABSENT if paddle.pir.is_fake_value(v) else self._known(v, op_id, name) for v in given)
        inplace, views = _shared(source, operands) if nested is None else (nested.written, nested.shared)
        shared = {} if nested else {result: self.storage[operands[operand]] for result, operand in (*inplace, *views)}
        if name == STACK_CREATE:
            shared = dict.fromkeys(range(1, len(source.results())), len(self.values))
        unmade = _unmade(source)
        results = tuple(self._value(v, storage=shared.get(k), made=k != unmade).id for k, v in enumerate(source.results()))
        raw = attributes(source)
        attrs = {key: plain(value) for key, value in raw.items() if key not in DROPPED_ATTRS}
        if nested is not None and nested.acting:
            attrs[INSIDE] = list(nested.acting)
        unread = _unread(source)
        no_buffer = tuple(
            k for k, v in enumerate(source.operands_source()) if operands[k] != ABSENT and (k in unread or source.is_no_need_buffer(v))
        )
        made = Op(
            op_id,
            name,
            operands,
            results,
            role,
            chunk,
            attrs,
            "",
            -1,
            raw.get("execution_stream", ""),
            raw.get("stream_priority", 0),
            op_id,
            no_buffer,
            inplace,
            views,
            len(blocks),
        )
        return with_group(made)

    def _known(self, source: Any, op_id: int, name: str) -> int:
        key = source.id
        if key not in self.value_ids:
            raise ProgramError(
                f"op #{op_id} {name} reads a value that no operation of the main block gives; "
                "it cannot be captured (expected a program of one block after Dist2Dense)"
            )
        return self.value_ids[key]

    def _value(self, source: Any, keyword: str = "", storage: int | None = None, made: bool = True) -> Value:
        number = len(self.values)
        shape, dtype, elements = _type(source) if made else ((), "null", ())
        name = keyword or (source.name if dtype not in ("null", "vector", "stack") and source.has_name else "")
        if storage is None:
            target = self.value_ids.get(self.stand_for.get(source.id, ""))
            storage = self._shared_with(name, number) if target is None else self.storage[target]
        value = Value(number, shape, dtype, storage, name, dtype != "null" and bool(source.persistable), "device", elements)
        self.values.append(value)
        self.storage[number] = value.storage
        if dtype != "null" or not paddle.pir.is_fake_value(source):
            self.value_ids[source.id] = number
        return value

    def _chunks(self, roles: list[Role]) -> list[int]:
        if self.pipeline.num_chunks <= 1:
            return [0] * len(self.source_ops)
        return complete_chunks(self.source_ops, [op.chunk_id for op in self.source_ops], roles)

    def _check_roles(self, ops: list[Op]) -> None:
        producer = {value: op for op in ops for value in op.results}
        for op in ops:
            for value in op.operands:
                made = producer.get(value)
                if made is not None and ORDER[made.role] > ORDER[op.role]:
                    raise ProgramError(
                        f"op #{op.id} {op.name} of {op.role} reads what op #{made.id} {made.name} of {made.role} gives; "
                        "operations must read only from their own or an earlier part of the step"
                    )


def fused_parameters(buffer: str, known: Collection[str]) -> list[str]:
    """The parameters in a fused buffer, parsed from its name: names joined by hyphens, which may contain hyphens themselves.

    A word that is part of no known name counts as a parameter that this program does not use; the parse with the fewest such words is
    returned. O(words x words of the longest known name). Raises ProgramError if several parses are equally good.
    """
    words = buffer.removeprefix(FUSED).split("-")
    longest = 1 + max((name.count("-") for name in known), default=0)
    best: list[tuple[int, list[list[str]]]] = [(0, [[]])]
    for end in range(1, len(words) + 1):
        found: list[tuple[int, list[str]]] = []
        for start in range(max(0, end - longest), end):
            piece = "-".join(words[start:end])
            if piece in known or end - start == 1:
                unknown, readings = best[start]
                found += [(unknown + (piece not in known), [*reading, piece]) for reading in readings]
        fewest = min(unknown for unknown, _ in found)
        best.append((fewest, [reading for unknown, reading in found if unknown == fewest][:2]))
    _, readings = best[-1]
    if len(readings) > 1:
        raise ProgramError(
            f"fused buffer {buffer!r} may contain {readings[0]} or {readings[1]}; expected names of parameters that "
            "can be told apart, give them names without hyphens"
        )
    return readings[0]


def operand_sources(source: Any) -> list[Any]:
    """An operation's operands, followed by the outer values that its nested blocks read."""
    operands = list(source.operands_source())
    if not blocks_of(source):
        return operands
    known = {v.id for v in operands if not paddle.pir.is_fake_value(v)}
    return operands + [v for v in paddle.base.libpaddle.pir.get_used_external_value(source) if v.id not in known]


def _refusals(pipeline: Pipeline, ops: list[Any], roles: list[int]) -> tuple[str, ...]:
    """Why Paddle's own schedule refuses a program: its VPP requires a role on every operation, while its other schedules fill in missing
    ones."""
    without = [op.name() for op, role in zip(ops, roles, strict=True) if role not in ROLES]
    if pipeline.schedule != "VPP" or not without:
        return ()
    casts = " (casts of master gradients have none)" if without[0] == "pd_op.cast" else ""
    return (f"Paddle's VPP refuses {len(without)} operations without a role, such as {without[0]}{casts}; 1F1B completes roles",)


def complete_roles(raw: list[int]) -> list[Role]:
    """Give each operation without a role (-1) that of the next operation with one, or, at the end, of the last.

    >>> complete_roles([0, -1, 1, -1])
    ['forward', 'backward', 'backward', 'backward']
    """
    filled, right = list(raw), -1
    for k in range(len(raw) - 1, -1, -1):
        right = raw[k] if raw[k] != -1 else right
        filled[k] = right
    left = 0
    for k, role in enumerate(filled):
        left = role if role != -1 else left
        filled[k] = left
    return [ROLES.get(role, "forward") for role in filled]


def complete_chunks(ops: list[Any], chunks: list[int], roles: list[Role]) -> list[int]:
    """Give operations without a chunk (-1) the one of a neighbour in the data flow with the same role."""
    index = {op.id(): k for k, op in enumerate(ops)}
    filled = list(chunks)
    for _ in range(3):
        for order in (range(len(ops) - 1, -1, -1), range(len(ops))):
            for k in order:
                if filled[k] < 0 and roles[k] != "optimize":
                    filled[k] = next((filled[n] for n in _neighbours(ops[k], index) if roles[n] == roles[k] and filled[n] >= 0), -1)
    return [max(chunk, 0) for chunk in filled]


def _neighbours(op: Any, index: dict[int, int]) -> Iterable[int]:
    for result in op.results():
        if not paddle.pir.is_fake_value(result):
            yield from (index[user.id()] for user in result.all_used_ops() if user.id() in index)
    for source in op.operands_source():
        producer = None if paddle.pir.is_fake_value(source) else source.get_defining_op()
        if producer is not None and producer.id() in index:
            yield index[producer.id()]


def _shared(source: Any, operands: Sequence[int]) -> tuple[Pairs, Pairs]:
    """Pairs of results and operands: results written in place of an operand, as Paddle declares, and other results in an operand's
    memory."""
    inplace = inplace_pairs(source)
    key = operators.key(source.name())
    views = (*operators.VIEWS.get(key, ()), *operators.WRITES.get(key, ()), *_unwritten(source, inplace))
    given = [tuple(pair for pair in pairs if operands[pair[1]] != ABSENT) for pairs in (inplace, views)]
    return given[0], tuple(pair for pair in given[1] if pair in inplace or pair[0] not in dict(inplace))


def _shared_variables(ops: list[Any]) -> dict[str, str]:
    """Value -> the first operand of the `share_var` that takes it, whose variable the executor uses for it."""
    shares = [op.operands_source() for op in ops if op.name() == SHARE_VAR]
    return {other.id: first.id for first, *others in shares for other in others}


def _unread(source: Any) -> tuple[int, ...]:
    """Operands that Paddle declares as read but the kernel does not read."""
    if source.name() != BATCH_NORM_GRAD:
        return ()
    attrs = source.attrs()
    return () if attrs["is_test"] or attrs["use_global_stats"] else RUNNING_STATS[BATCH_NORM_GRAD]


def _unwritten(source: Any, inplace: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """In-place pairs whose result the kernel does not write, so that it is effectively a view."""
    if source.name() != BATCH_NORM:
        return ()
    attrs = source.attrs()
    fixed = attrs["use_global_stats"] or (attrs["is_test"] and not attrs["trainable_statistics"])
    return tuple(pair for pair in inplace if fixed and pair[1] in RUNNING_STATS[BATCH_NORM])


def _unmade(source: Any) -> int | None:
    """Index of a result that has a type but is never allocated: the attention matrix, unless it is requested; None if there is none."""
    asked = source.name() not in ATTENTION or source.attrs().get("return_softmax", True)
    return None if asked or not source.result(ATTENTION_MATRIX).use_empty() else ATTENTION_MATRIX


def _type(source: Any) -> tuple[tuple[int, ...], str, tuple[TensorType, ...]]:
    if paddle.pir.is_fake_value(source) or "NULL" in str(source.type()):
        return (), "null", ()
    if str(source.type()) in STACK_TYPES:
        return (), "stack", ()
    if source.is_combine():
        return (), "vector", tuple(_tensor_type(t) for t in source.type().as_vec_type().as_list())
    try:
        return tuple(int(dim) for dim in source.shape), type_name(source.dtype), ()
    except ValueError as error:
        producer = source.get_defining_op()
        layer = attributes(producer).get("struct_name", "")
        raise ProgramError(
            f"op {producer.name()}{f' of layer {layer}' if layer else ''} gives a value of type {source.type()}; expected tensors, vectors "
            "of tensors, or stacks of control flow; do without that operation, or set enable: false to train with Paddle's baseline"
        ) from error


def _tensor_type(kind: Any) -> TensorType:
    return TensorType(tuple(int(dim) for dim in kind.shape), type_name(kind.dtype))


def plain(value: Any) -> Any:
    """An attribute as plain data: dtypes become their names; infinities, places and everything else become text."""
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, paddle.base.core.DataType):
        return type_name(value)
    return str(value)


def with_group(op: Op) -> Op:
    """The operation, with its group set to the ring in its attributes. Raises ProgramError if Interlace does not know how operations of
    this kind communicate."""
    group = ring_of(op)
    if group >= 0 and not is_known_comm(op):
        raise ProgramError(
            f"op {describe(op)} communicates over ring {group}, and Interlace does not know how operations of this kind do; "
            "build the model without it, or set enable: false to train with Paddle's baseline"
        )
    return msgspec.structs.replace(op, group=group) if group >= 0 else op


def _groups(ids: set[int]) -> tuple[Group, ...]:
    """The groups with these ids, and all others of the same ranks, because groups are identified by their order
    (`interlace/ir/rings.py`)."""
    from paddle.distributed.auto_parallel.static.process_group import get_all_process_groups

    known = {int(group.id): tuple(int(rank) for rank in group.ranks) for group in get_all_process_groups()}
    unknown = sorted(ids - known.keys())
    if unknown:
        raise ProgramError(f"communication group {unknown[0]} is used by an operation but Paddle knows no ranks for it")
    used = {known[ring] for ring in ids}
    return tuple(Group(ring, ranks) for ring, ranks in sorted(known.items()) if ring in ids or (ring and ranks in used))
