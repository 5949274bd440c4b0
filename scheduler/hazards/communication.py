"""Communication of one rank: faults that do not depend on other ranks."""

from __future__ import annotations

from collections import defaultdict

from interlace.errors import PlanError
from interlace.ir import Op, Pipeline, Program
from interlace.ir.kinds import is_comm, is_p2p, stream_of
from interlace.ir.schedule import interleaved
from interlace.scheduler.hazards.finding import Finding, where

SHARES_NO_CONTEXT = frozenset({"send_v2", "recv_v2", "c_allreduce_sum"})
"""Kinds that look up their communicator by ring id at every call, so that several rings may share a stream."""
USES_COMPUTE_CONTEXT = frozenset({"p_send", "p_recv", "reduce"})
"""Kinds that, without a stream of their own, use the communicator stored in the context of the compute stream."""
VPP_CROSSES = (
    "Under VPP, Paddle's baseline order breaks this in two cases; training with the baseline then swaps messages of equal size "
    "without a word, and hangs or fails over others. A value goes straight from the first stage to the last (a mask, positions, an "
    "embedding that is also the head; of a value that is resharded from stage to stage Paddle makes such messages too): the gradient of "
    "what the last stage hands back to the first takes the same ring, and is received before what was sent earlier. Or there are 2 "
    "stages, and the number of micro-batches is odd. What is safe: schedule_mode 1F1B; the value computed on each stage from an input; "
    "the value handed on as a result of each stage's own layers; accumulate_steps as a multiple of the stages, and for a shared "
    "embedding equal to their number, of three or more"
)


def wrong_groups(program: Program) -> list[Finding]:
    """Findings for calls on a group that the program does not list or that lacks the rank, and for messages to the rank itself."""
    groups = {group.id: group.ranks for group in program.groups}
    found = []
    for op in program.ops:
        ranks = groups.get(op.group, ())
        if not is_comm(op):
            continue
        wrong = _wrong(op, program.rank, ranks) if op.group in groups else "which the program does not list"
        if wrong:
            at = where(program.rank, op, 0)
            found.append(
                Finding(
                    "wrong-group",
                    (program.rank,),
                    (at,),
                    f"{at}: group {op.group} of ranks {list(ranks)}, {wrong}",
                    "let a rank communicate with others of groups that it is in",
                )
            )
    return found


def _wrong(op: Op, rank: int, ranks: tuple[int, ...]) -> str:
    if rank not in ranks:
        return f"to which rank {rank} does not belong: it would wait for ever"
    peer = int(op.attrs.get("peer", -1)) if is_p2p(op) else 0
    if is_p2p(op) and not 0 <= peer < len(ranks):
        return f"which has no member number {peer}, the peer"
    return "in which its peer is the rank itself: no other rank sends or receives it" if is_p2p(op) and ranks[peer] == rank else ""


def require_straight(pipeline: Pipeline) -> None:
    """Raise PlanError for a pipeline in which Paddle's baseline order sends messages in one order and receives them in another.

    >>> require_straight(Pipeline(num_stages=2, num_micro_batches=6, num_chunks=2, schedule="VPP"))
    >>> require_straight(Pipeline(num_stages=2, num_micro_batches=5, num_chunks=2, schedule="VPP"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    interlace.errors.PlanError: pipeline of 2 stages, 2 chunks and 5 micro-batches: ...
    """
    stages, count, chunks = pipeline.num_stages, pipeline.num_micro_batches, pipeline.num_chunks
    if pipeline.schedule != "VPP" or _sent_and_received(stages, count, chunks):
        return
    raise PlanError(
        f"pipeline of {stages} stages, {chunks} chunks and {count} micro-batches: Paddle's own VPP order sends messages between the "
        "stages in one order and receives them in another; training with the baseline swaps those of equal size and says nothing; expected "
        f"accumulate_steps to be a multiple of the stages: set it to {count // stages * stages or stages} or "
        f"{-(-count // stages) * stages}, or use schedule_mode 1F1B"
    )


def _sent_and_received(stages: int, count: int, chunks: int) -> bool:
    """Whether Paddle's VPP order receives on each channel in the order in which it sends."""
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    last = stages * chunks - 1
    for stage in range(stages):
        for part in (part for slot in interleaved(stage, stages, count, chunks) for part in slot.parts):
            here = part.chunk * stages + stage
            to = {"F": here + 1, "S": here - 1}.get(part.kind, -1)
            came = {"R": here - 1, "B": here + 1}.get(part.kind, -1)
            if 0 <= to <= last:
                sent[stage, to % stages].append(("F" if to > here else "B", part.micro_batch, to))
            if 0 <= came <= last:
                received[came % stages, stage].append(("F" if came < here else "B", part.micro_batch, here))
    return sent == received


def shared_streams(program: Program) -> list[Finding]:
    """Findings for streams on which two rings would use one communicator."""
    first: dict[str, Op] = {}
    found: dict[str, Finding] = {}
    for op in program.ops:
        stream = stream_of(op)
        if not is_comm(op) or op.kind in SHARES_NO_CONTEXT or (not stream and op.kind not in USES_COMPUTE_CONTEXT):
            continue
        old = first.setdefault(stream, op)
        if old.group != op.group and stream not in found:
            rank = program.rank
            items = (where(rank, old, 0), where(rank, op, 0))
            message = f"groups {old.group} and {op.group} share a stream, which keeps the first one's communicator"
            found[stream] = Finding(
                "shared-stream",
                (rank,),
                items,
                f"rank {rank}: {message}: {items[0]}, {items[1]}",
                f"give group {op.group} a stream of its own",
            )
    return list(found.values())
