"""The rules of the IR; every program is checked against them after each pass."""

from __future__ import annotations

import re
from collections import Counter

from interlace.errors import ProgramError
from interlace.grouping import grouped
from interlace.ir.copies import fills_memory, index_of_items, may_be_omitted, only_takes_memory
from interlace.ir.kinds import is_boundary, is_known_comm, is_p2p, ring_of
from interlace.ir.per_ops import once_per_items, once_per_ops
from interlace.ir.program import ABSENT, Group, Op, OpInstance, Program
from interlace.ir.storage import collect_items, feed_items
from interlace.ir.waits import computes

JOB_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
EVENT_NAME = re.compile(r"\S+")


def verify(program: Program) -> None:
    """Check a program; cost O(ops + operands + job items). Raises ProgramError with the broken rules (the first 20), each with the
    operation that breaks it."""
    faults = [
        *_ranks(program),
        *_values(program),
        *_dataflow(program),
        *_aliases(program),
        *_memory(program),
        *_communications(program),
        *_jobs(program),
        *_events(program),
    ]
    if faults:
        more = f"\n  ... and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ProgramError(f"rank {program.rank}: {len(faults)} rule(s) broken:\n  " + "\n  ".join(faults[:20]) + more)


MOST_ITEMS = 1 << 22
"""Limit of operations times micro-batches of a program: 4,000 operations with 1,024 micro-batches are within it."""
MOST_TENSOR_BYTES = 1 << 60
"""Limit of a tensor's size; below it, sums of sizes stay exact in 64 bits."""
ATTRIBUTES: dict[str, tuple[type, ...]] = {
    "peer": (int,),
    "ring_id": (int,),
    "nranks": (int,),
    "dst_place_type": (int,),
    "dropout": (int, float, type(None)),
    **dict.fromkeys(("transpose_x", "transpose_y", "trans_x", "trans_y", "causal", "is_causal_masking"), (bool,)),
}
"""Attributes that Interlace reads -> the types that they may have."""


def require_bounds(program: Program) -> None:
    """Check the size of a program from a file, and the types of the attributes that Interlace reads; cost O(ops + values). Raises
    ProgramError if it exceeds a limit, or an attribute has a type that its reader does not expect."""
    batches = program.pipeline.num_micro_batches
    if max(len(program.ops), program.pipeline.num_chunks) * batches > MOST_ITEMS:
        raise ProgramError(
            f"{len(program.ops)} operations in {program.pipeline.num_chunks} chunk(s) of {batches} micro-batches; "
            f"expected {MOST_ITEMS} op instances to schedule, or fewer"
        )
    sizes = ((value.size_bytes, value.id) for value in program.values)
    large = next((each for each in sizes if each[0] > MOST_TENSOR_BYTES), None)
    if large is not None:
        raise ProgramError(f"value %{large[1]} has {large[0]} bytes; expected {MOST_TENSOR_BYTES} or fewer")
    for op in program.ops:
        for name, given in op.attrs.items():
            if not _fits(given):
                raise ProgramError(f"{describe(op)}: attribute {name} has a whole number of more than 64 bits")
            if name in ATTRIBUTES and type(given) not in ATTRIBUTES[name]:
                kinds = " or ".join(kind.__name__ for kind in ATTRIBUTES[name])
                raise ProgramError(f"{describe(op)}: attribute {name} is {str(given)[:40]!r}; expected {kinds}")


def _fits(given: object) -> bool:
    """Whether the whole numbers in an attribute fit into 64 bits."""
    if isinstance(given, int):
        return -(1 << 63) <= given < 1 << 63
    parts = given.values() if isinstance(given, dict) else given if isinstance(given, list) else ()
    return all(_fits(part) for part in parts)


def describe(op: Op) -> str:
    """How messages name an operation: `#12 pd_op.matmul (layers.0.fc1)`."""
    return f"#{op.id} {op.name}" + (f" ({op.layer})" if op.layer else "")


def _ranks(program: Program) -> list[str]:
    world = range(program.world)
    faults = [] if program.rank in world else [f"rank {program.rank} is outside of the world of {program.world}"]
    for group in program.groups:
        outside = [rank for rank in group.ranks if rank not in world]
        if outside:
            faults.append(f"group {group.id} has rank(s) {', '.join(map(str, outside))}, outside of the world of {program.world}")
    wrong = [rank for rank in program.equivalent_ranks if not program.rank < rank < program.world]
    if wrong or len(set(program.equivalent_ranks)) < len(program.equivalent_ranks):
        faults.append(f"rank {program.rank} stands for {list(program.equivalent_ranks)[:4]}...; expected higher ranks, each once")
    pipe = program.pipeline
    if not 0 <= pipe.stage < pipe.num_stages:
        faults.append(f"stage {pipe.stage} is outside of a pipeline of {pipe.num_stages}")
    return faults


@once_per_ops
def _values(program: Program) -> list[str]:
    faults, seen = [], set()
    given = {value for op in program.ops for value in op.results}
    for value in program.values:
        if value.id not in given:
            faults.append(f"value %{value.id} is declared, but no op gives it")
        if value.id in seen:
            faults.append(f"value %{value.id} is declared twice; value ids are unique")
        seen.add(value.id)
        if value.dtype == "vector" and not value.elements:
            faults.append(f"value %{value.id} is a vector without element types")
        if value.shape and value.dtype in ("vector", "null"):
            faults.append(f"value %{value.id} of dtype {value.dtype} has shape {list(value.shape)}; only tensors have one")
    return faults


@once_per_ops
def _dataflow(program: Program) -> list[str]:
    declared = {value.id for value in program.values}
    faults: list[str] = []
    defined: set[int] = set()
    ids: set[int] = set()
    for op in program.ops:
        if op.id in ids:
            faults.append(f"{describe(op)}: op id {op.id} is used twice; op ids are unique")
        ids.add(op.id)
        for value in op.operands:
            if value != ABSENT and value not in defined:
                known = "is given only later" if value in declared else "is not declared"
                faults.append(f"{describe(op)} reads %{value}, which {known}; operands must be given by an earlier op")
        for value in op.results:
            if value in defined:
                faults.append(f"{describe(op)} gives %{value}, which an earlier op gives already")
            if value not in declared:
                faults.append(f"{describe(op)} gives %{value}, which is not declared")
            defined.add(value)
    return faults


@once_per_ops
def _aliases(program: Program) -> list[str]:
    storage = {value.id: value.storage for value in program.values}
    faults = []
    for op in program.ops:
        for result, operand in (*op.inplace, *op.views):
            if not (0 <= result < len(op.results) and 0 <= operand < len(op.operands)):
                faults.append(f"{describe(op)}: alias {result}:{operand} is out of range")
            elif not op.num_blocks and storage.get(op.results[result]) != storage.get(op.operands[operand]):
                faults.append(f"{describe(op)}: result {result} aliases operand {operand} but has another storage")
        if any(not 0 <= k < len(op.operands) for k in op.no_buffer):
            faults.append(f"{describe(op)}: no_buffer {op.no_buffer} is out of range")
    return faults


_taken = once_per_ops(lambda program: {value: op for op in program.ops if only_takes_memory(op) for value in op.results})
"""The operations that only take memory, which a copy or a collective fills, by the value that is this memory."""


@once_per_ops
def _memory(program: Program) -> list[str]:
    """Memory that is only taken must be filled by exactly one copy or collective, and read by nothing else: it has no contents before."""
    taken = _taken(program)
    reads = grouped((value, (op, k)) for op in program.ops if taken for k, value in enumerate(op.operands) if value in taken)
    faults = []
    for value, op in taken.items():
        wrong = [reader for reader, k in reads.get(value, []) if k != 1 or not fills_memory(reader)]
        told = f"memory of {describe(op)} that only a copy or a collective may fill"
        faults += [f"{describe(reader)} reads %{value}, {told}" for reader in wrong]
        if not wrong and (count := len(reads.get(value, []))) != 1:
            fill = f"{count} operations fill" if count else "nothing fills"
            faults.append(f"{describe(op)} takes memory that {fill}; expected one copy or collective")
    return faults


_of_rings = once_per_ops(lambda program: [op for op in program.ops if op.group >= 0 or ring_of(op) >= 0])
"""Operations that have a group, or must have one because they have a ring."""


def _communications(program: Program) -> list[str]:
    groups = {group.id: group for group in program.groups}
    return [fault for op in _of_rings(program) for fault in _communication(op, groups)]


def _communication(op: Op, groups: dict[int, Group]) -> list[str]:
    ring, peer = ring_of(op), op.attrs.get("peer", -1)
    if op.group < 0:
        lost = f"{describe(op)} has ring {ring} but no group; an operation with a ring communicates: dump the program again"
        return [lost] if ring >= 0 else []
    if not is_known_comm(op):
        return [f"{describe(op)} has group {op.group}, and it is not known how operations of this kind communicate"]
    if op.group not in groups:
        return [f"{describe(op)} uses group {op.group}, which the program does not list"]
    outside = is_p2p(op) and not 0 <= peer < len(groups[op.group].ranks)
    return [f"{describe(op)}: peer {peer} is not in group {op.group} {list(groups[op.group].ranks)}"] if outside else []


def _jobs(program: Program) -> list[str]:
    if not program.jobs:
        return []
    ops, is_right = {op.id: op for op in program.ops}, _runs_what_it_should(program)
    faults = [*_names_of_jobs(program), *([] if is_right else _wrong_items(program, ops))]
    return faults or [*_waits(program, ops), *([] if is_right else _missing(program, ops))]


def _names_of_jobs(program: Program) -> list[str]:
    faults: list[str] = []
    names: set[str] = set()
    for job in program.jobs:
        for word in (job.name, job.kind):
            if not JOB_NAME.fullmatch(word):
                faults.append(f"job {word!r}: a name or kind is letters, digits and _ and starts with a letter")
        if job.name in names:
            faults.append(f"job {job.name!r} occurs twice; job names are unique")
        names.add(job.name)
    return faults


@once_per_items
def _runs_what_it_should(program: Program) -> bool:
    """Whether the jobs run each operation once for each micro-batch, or once per step, and copies at most that often."""
    count = program.pipeline.num_micro_batches
    runs = {op.id: 0 if is_boundary(op) else 1 if op.role == "optimize" else count for op in program.ops}
    items = [item for job in program.jobs for item in job.items]
    if len(set(items)) < len(items) or not all(0 <= micro_batch < runs.get(op_id, 0) for op_id, micro_batch in items):
        return False
    done = Counter(op_id for op_id, _ in items)
    return not _without_their_memory(program) and all(done[op.id] == runs[op.id] for op in program.ops if not may_be_omitted(op))


def _wrong_items(program: Program, ops: dict[int, Op]) -> list[str]:
    faults: list[str] = []
    done: set[OpInstance] = set()
    count = program.pipeline.num_micro_batches
    for job in program.jobs:
        for item in job.items:
            op_id, micro_batch = item
            if op_id not in ops:
                faults.append(f"job {job.name}: op #{op_id} is not in the program")
            elif not 0 <= micro_batch < count:
                faults.append(f"job {job.name}: micro-batch {micro_batch} of {describe(ops[op_id])}, there are {count}")
            elif ops[op_id].role == "optimize" and micro_batch:
                faults.append(
                    f"job {job.name}: {describe(ops[op_id])} of the optimizer for micro-batch {micro_batch}; it runs once a step, for 0"
                )
            elif is_boundary(ops[op_id]):
                faults.append(f"job {job.name}: {describe(ops[op_id])} names an input or output; jobs contain none of those")
            elif item in done:
                faults.append(f"job {job.name}: {describe(ops[op_id])} runs a second time for micro-batch {micro_batch}")
            done.add(item)
    return faults


def _waits(program: Program, ops: dict[int, Op]) -> list[str]:
    values = {value.id: value for value in program.values}
    faults = []
    for job in program.jobs:
        index = {item: k for k, item in enumerate(job.items)} if job.host_waits else {}
        for after, awaited in job.host_waits:
            if after not in index or awaited not in index:
                faults.append(f"job {job.name}: after {after} the host waits for {awaited}; both must be in the job")
            elif index[awaited] > index[after]:
                faults.append(f"job {job.name}: after {after} the host waits for {awaited}, which it issues only later")
            elif not computes(ops[awaited[0]], values):
                faults.append(f"job {job.name}: the host waits for {describe(ops[awaited[0]])}, which computes nothing on the device")
        if len({after for after, _ in job.host_waits}) < len(job.host_waits):
            faults.append(f"job {job.name}: the host waits twice after one op instance")
    return faults


# If no job runs a copy for a micro-batch, the copy is the identity there: its readers read what it would have copied.
def _missing(program: Program, ops: dict[int, Op]) -> list[str]:
    count, done = program.pipeline.num_micro_batches, {item for job in program.jobs for item in job.items}
    inner = [op_id for op_id, op in ops.items() if not (is_boundary(op) or may_be_omitted(op))]
    wanted = {(op_id, m) for op_id in inner for m in range(1 if ops[op_id].role == "optimize" else count)}
    faults = [f"{describe(ops[op_id])} is in no job for micro-batch {m}" for op_id, m in sorted(wanted - done)]
    for memory, copy, m in _without_their_memory(program):
        faults.append(
            f"micro-batch {m}: no job runs both {describe(memory)} and, after it, {describe(copy)}, which writes into that memory; "
            "put both into one job, or neither"
        )
    return faults


def _without_their_memory(program: Program) -> list[tuple[Op, Op, int]]:
    """Operations that take memory, those that fill it, and micro-batches for which no job runs both, the former first."""
    pairs = _taken_and_filled(program)
    job_of = {item: (k, at) for k, job in enumerate(program.jobs) for at, item in enumerate(job.items)} if pairs else {}
    wrong = []
    for memory, copy in pairs:
        for m in range(program.pipeline.num_micro_batches):
            taken, copied = job_of.get((memory.id, m)), job_of.get((copy.id, m))
            if taken != copied and (taken is None or copied is None or taken[0] != copied[0] or taken[1] > copied[1]):
                wrong.append((memory, copy, m))
    return wrong


@once_per_ops
def _taken_and_filled(program: Program) -> list[tuple[Op, Op]]:
    """Each operation that only takes memory, with the one that fills it."""
    taken = _taken(program)
    return [(taken[op.operands[1]], op) for op in program.ops if fills_memory(op) and op.operands[1] in taken]


def _events(program: Program) -> list[str]:
    if not program.events:
        return []
    # storages can only be looked up if all operands are defined
    fed, collected = feed_items(program), [] if _dataflow(program) else collect_items(program)
    inside = index_of_items(program)
    outside = {item: k - len(fed) for k, item in enumerate(fed)} | {item: len(inside) + k for k, item in enumerate(collected)}
    index = {item: inside.get(item, outside.get(item)) for event in program.events for item in (event.record, *event.waits)}
    faults: list[str] = []
    names: set[str] = set()
    recorders: dict[OpInstance, str] = {}
    for event in program.events:
        if event.name in names:
            faults.append(f"event {event.name!r} is recorded twice; a name has one recorder")
        names.add(event.name)
        if not EVENT_NAME.fullmatch(event.name) or event.name == "default":
            faults.append(f"event {event.name!r}: a name has no blanks and is not 'default', which is the executor's own")
        if event.record in recorders:
            faults.append(
                f"events {recorders[event.record]!r} and {event.name!r} are both recorded after {event.record}; an op instance records one"
            )
        recorders[event.record] = event.name
        recorded = index[event.record]
        if recorded is None:
            faults.append(f"event {event.name!r} is recorded after {event.record}, which no job runs")
            continue
        if event.record in fed and event.record != fed[-1]:
            faults.append(
                f"event {event.name!r} is recorded after {event.record}, which cuts the batch; expected {fed[-1]}, the last that does"
            )
        for item in event.waits:
            waits = index[item]
            if waits is None:
                faults.append(f"event {event.name!r} is waited for by {item}, which no job runs")
            elif waits <= recorded:
                faults.append(f"event {event.name!r}: {item} waits before {event.record} is issued")
    return faults
