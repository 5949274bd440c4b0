"""From slots of a schedule to jobs of a program."""

from __future__ import annotations

import re

from interlace.ir import Graph, Job, Op, Program
from interlace.ir.kinds import is_boundary, is_receive, is_send
from interlace.ir.schedule import Part, baseline_row
from interlace.scheduler.interleave.planner import PartOps, chain_ops

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "R": "recv_forward",
    "S": "send_backward",
    "I": "backward_b",
    "W": "backward_w",
    "O": "optimizer",
}
"""Paddle's names of job types."""


class Parts:
    """The program's operations by slot kind and chunk, in program order.

    Args:
        program: The program.
        kinds: Kinds of slots in its schedule.
        early: Ids of weight gradients that belong to the input gradients' part (`inline_share`).
    """

    def __init__(self, program: Program, kinds: set[str], early: frozenset[int] = frozenset()) -> None:
        self.chunked = program.pipeline.num_chunks > 1
        self.kinds, self.early = kinds, early
        backward = [op for op in program.ops if op.role == "backward" and not is_boundary(op)]
        self.chain = chain_ops(Graph(program), backward) | early if "I" in kinds else set()
        chunks = range(program.pipeline.num_chunks)
        self.ops: dict[tuple[str, int], list[Op]] = {(kind, chunk): [] for chunk in chunks for kind in KIND_NAMES}
        for op in program.ops:
            if not is_boundary(op):
                self.ops[self._kind(op), 0 if op.role == "optimize" else op.chunk].append(op)

    def _kind(self, op: Op) -> str:
        if op.role == "optimize":
            return "O"
        if op.role == "forward":
            return "R" if "R" in self.kinds and is_receive(op) else "F"
        if "S" in self.kinds and is_send(op):
            return "S"
        return "B" if "I" not in self.kinds else "I" if op.id in self.chain else "W"

    def part(self, label: str, kind: str, chunk: int) -> PartOps:
        """A kind and chunk as a part of a job."""
        return PartOps(label, kind, self.ops[kind, chunk], self.early if kind == "I" else frozenset())

    def kind_name(self, part: Part) -> str:
        """Paddle's name of a job type."""
        return KIND_NAMES[part.kind] + (str(part.chunk) if self.chunked and part.kind != "O" else "")


def job_of(part: Part, parts: Parts) -> Job:
    """The job of one part of a slot."""
    kind = parts.kind_name(part)
    if part.kind == "O":
        return Job(kind, kind, 0, tuple((op.id, 0) for op in parts.ops["O", 0]))
    m = part.micro_batch
    return Job(f"{kind}_{m}", kind, m, tuple((op.id, m) for op in parts.ops[part.kind, part.chunk]))


def baseline_jobs(program: Program) -> tuple[Job, ...]:
    """The jobs of Paddle's own schedule for this rank, each in program order. Raises ConfigError as `baseline_row`."""
    slots = baseline_row(program.pipeline)
    parts = Parts(program, {part.kind for slot in slots for part in slot.parts})
    return tuple(job for slot in slots for part in slot.parts if (job := job_of(part, parts)).items)


def slot_text(name: str) -> str:
    """A job's name in the notation of schedules and reasons.

    >>> [slot_text(name) for name in ("forward_3", "forward1_3", "pair_0B_2F", "pair_0Bc1_2F", "optimizer")]
    ['3F', '3F.1', '0B+2F', '0B.1+2F', 'O']
    """
    if name.startswith("pair_"):
        return name.removeprefix("pair_").replace("_", "+").replace("c", ".")
    single = re.fullmatch(r"(?P<kind>[a-z_]+?)(?P<c>\d*)_(?P<m>\d+)", name)
    kinds = {long: short for short, long in KIND_NAMES.items()}
    if single and single["kind"] in kinds:
        return f"{single['m']}{kinds[single['kind']]}" + (f".{single['c']}" if single["c"] and int(single["c"]) else "")
    return kinds.get(name, name)
