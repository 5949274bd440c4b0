"""Pipeline schedules: a list of slots for each stage, which can be printed and parsed.

    0 | 0F 1F 0B 2F 1B 2B O

A part is `<micro-batch><kind>`: `F` forward, `B` backward, `R` the receives of a forward, `S` the sends of a backward, `I` the
input-gradient part of a backward, `W` its weight-gradient part, `O` the optimizer. A chunk other than 0 follows a dot (`3F.1`).
A slot is one job: a single part, or several whose operations are mixed (`3I+5F+1W`: input gradients of micro-batch 3, forward of 5 and
weight gradients of 1). The last slot may also contain the optimizer (`3B+O`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from interlace.errors import ConfigError, PlanError
from interlace.ir.program import Pipeline

_TOKEN = re.compile(r"([0-9]{1,9})([FBRSIW])(?:\.([0-9]{1,9}))?")
_STAGE = re.compile(r"\s*[0-9]{1,9}\s*")


class Part(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, order=True):
    """One kind of work of one micro-batch and chunk."""

    kind: str
    micro_batch: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        if self.kind == "O":
            return "O"
        return f"{self.micro_batch}{self.kind}" + (f".{self.chunk}" if self.chunk else "")


class Slot(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The parts of one job, in the order in which they would run one after another."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


def slot(kind: str, micro_batch: int = 0, chunk: int = 0) -> Slot:
    """A slot of one part."""
    return Slot((Part(kind, micro_batch, chunk),))


OPTIMIZER = slot("O")
Schedule = Callable[[int, int, int, int], list[Slot]]
"""`(stage, num_stages, num_micro_batches, num_chunks)` -> slots in order."""


def in_flight(stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Number of micro-batches in flight on a stage in 1F1B.

    >>> [in_flight(stage, 4, 3) for stage in range(4)]
    [3, 3, 2, 1]
    """
    return min(num_stages - stage, num_micro_batches)


def mixed_depth(stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Number of micro-batches in flight on a stage with which mixed pairs of neighbouring stages do not wait for each other."""
    return min(2 * (num_stages - 1 - stage) + 1, num_micro_batches)


def f_then_b(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """All forwards, then all backwards.

    >>> show_row(0, f_then_b(0, 2, 2))
    '0 | 0F 1F 0B 1B O'
    """
    return [*(slot("F", m) for m in range(num_micro_batches)), *(slot("B", m) for m in range(num_micro_batches)), OPTIMIZER]


def accumulate(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """Forward and backward of each micro-batch in turn: gradient accumulation without a pipeline.

    >>> show_row(0, accumulate(0, 1, 2))
    '0 | 0F 0B 1F 1B O'
    """
    return [*(slot(kind, m) for m in range(num_micro_batches) for kind in "FB"), OPTIMIZER]


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """Paddle's 1F1B: stage s has num_stages - s micro-batches in flight; receives and sends are jobs of their own.

    >>> show_row(1, one_f_one_b(1, 2, 2))
    '1 | 0R 0F 0B 1R 0S 1F 1B 1S O'
    """
    warmup = in_flight(stage, num_stages, num_micro_batches)
    slots = [slot(kind, m) for m in range(warmup) for kind in "RF"]
    for b in range(num_micro_batches):
        f = b + warmup
        steady = f < num_micro_batches
        slots += [slot("B", b), slot("R", f), slot("S", b), slot("F", f)] if steady else [slot("B", b), slot("S", b)]
    return [*slots, OPTIMIZER]


def paired(stage: int, num_stages: int, num_micro_batches: int, warmup: int | None = None) -> list[Slot]:
    """1F1B in which each job has a backward and the next forward, with `warmup` micro-batches in flight.

    >>> show_row(1, paired(1, 2, 4)), show_row(1, paired(1, 2, 4, warmup=2))
    ('1 | 0F 0B+1F 1B+2F 2B+3F 3B O', '1 | 0F 1F 0B+2F 1B+3F 2B 3B O')
    """
    depth = in_flight(stage, num_stages, num_micro_batches) if warmup is None else min(warmup, num_micro_batches)
    forwards = {b: (Part("F", b + depth),) for b in range(num_micro_batches - depth)}
    pairs = (Slot((Part("B", b), *forwards.get(b, ()))) for b in range(num_micro_batches))
    return [*(slot("F", m) for m in range(depth)), *pairs, OPTIMIZER]


def zero_bubble(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """ZB-H1: weight gradients are postponed until as many micro-batches are in flight as on 1F1B's first stage, and fill the end.

    >>> show_row(1, zero_bubble(1, 2, 4))
    '1 | 0F 0I 1F 1I 0W 2F 2I 1W 3F 3I 2W 3W O'

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.2.
    """
    warmup = in_flight(stage, num_stages, num_micro_batches)
    slots = [slot("F", m) for m in range(warmup)]
    forward, weights = warmup, 0
    for b in range(num_micro_batches):
        slots.append(slot("I", b))
        if forward - weights >= num_stages or forward == num_micro_batches:
            slots.append(slot("W", weights))
            weights += 1
        if forward < num_micro_batches:
            slots.append(slot("F", forward))
            forward += 1
    return [*slots, *(slot("W", m) for m in range(weights, num_micro_batches)), OPTIMIZER]


def interleaved(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """Paddle's VPP (interleaved 1F1B), receives and sends as jobs of their own.

    Source: the order of PaddlePaddle 3.3.1's VPP pass; a test compares them for many shapes.
    """
    total = num_micro_batches * num_chunks
    forwards, backwards = _virtual_order(num_stages, num_micro_batches, num_chunks)
    warmup = total if num_micro_batches == num_stages else min((num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages, total)
    warmup = min(total, warmup + 1)
    slots = [slot(kind, m, c) for m, c in forwards[:warmup] for kind in "RF"]
    for step in range(total - warmup):
        (b, bc), (f, fc) = backwards[step], forwards[step + warmup]
        slots += [slot("B", b, bc), slot("R", f, fc), slot("S", b, bc), slot("F", f, fc)]
    slots += [slot(kind, m, c) for m, c in backwards[total - warmup :] for kind in "BS"]
    return [*slots, OPTIMIZER]


def _virtual_order(stages: int, micro_batches: int, chunks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """`(micro-batch, chunk)` of every forward and every backward step."""
    rounds, rest = divmod(micro_batches, stages)
    count = [[0] * chunks, [0] * chunks]
    order: list[list[tuple[int, int]]] = [[], []]
    for step in range(micro_batches * chunks):
        within = step % (stages * chunks)
        # Paddle compares with <=, so the first step of a ragged last round still counts in full rounds
        chunk = within // stages if step <= rounds * stages * chunks else within // rest
        for way, which in enumerate((chunk, chunks - 1 - chunk)):
            order[way].append((count[way][which], which))
            count[way][which] += 1
    return order[0], order[1]


SCHEDULES: dict[str, Schedule] = {"FThenB": f_then_b, "1F1B": one_f_one_b, "VPP": interleaved, "accumulate": accumulate, "none": accumulate}
"""Paddle's own schedules by their names in its strategy."""


def find_schedule(name: str) -> Schedule:
    """The schedule with this name. Raises ConfigError, with the known names, if there is none."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r} is not known; there are {sorted(SCHEDULES)}")
    return SCHEDULES[name]


def baseline_row(pipe: Pipeline) -> list[Slot]:
    """The slots of Paddle's own schedule on a program's stage. Raises ConfigError as `find_schedule`."""
    return find_schedule(pipe.schedule)(pipe.stage, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks)


def pair_up(slots: list[Slot]) -> list[Slot]:
    """Join receives to their forward, sends to their backward, and each steady backward to the forward that follows it.

    >>> show_row(1, pair_up(one_f_one_b(1, 2, 3)))
    '1 | 0F 0B+1F 1B+2F 2B O'
    """
    joined: list[Slot] = []
    for part in (part for each in slots for part in each.parts if part.kind not in "RS"):
        if part.kind == "F" and joined and [last.kind for last in joined[-1].parts] == ["B"]:
            joined[-1] = Slot((*joined[-1].parts, part))
        else:
            joined.append(Slot((part,)))
    return joined


def trailing(slots: list[Slot], weight_delay: int, weight_delay_at_end: int | None = None) -> list[Slot]:
    """The same schedule with the weight gradients of each backward computed `weight_delay` backwards later, in the same order; the
    remaining ones follow before the optimizer. From the last forward on, the delay is `weight_delay_at_end` if given.

    Weight gradients of an earlier backward do not depend on the other work of their job, so they can run during its first collectives; the
    last ones fill the end of the pipeline.

    >>> show_row(1, trailing(paired(1, 2, 4), 1)), show_row(1, trailing(paired(1, 2, 4), 1, weight_delay_at_end=2))
    ('1 | 0F 0I+1F 1I+2F+0W 2I+3F+1W 3I+2W 3W O', '1 | 0F 0I+1F 1I+2F+0W 2I+3F 3I+1W 2W 3W O')
    """
    made: list[Slot] = []
    waiting: list[Part] = []
    end, at_end = last_forward(slots), weight_delay if weight_delay_at_end is None else weight_delay_at_end
    for k, each in enumerate(slots if weight_delay else []):
        parts = [msgspec.structs.replace(part, kind="I") if part.kind == "B" else part for part in each.parts]
        waiting += [msgspec.structs.replace(part, kind="W") for part in parts if part.kind == "I"]
        if any(part.kind == "I" for part in parts) and len(waiting) > (weight_delay if k < end else at_end):
            parts.append(waiting.pop(0))
        made += [Slot((part,)) for part in waiting] if each == OPTIMIZER else []
        made.append(Slot(tuple(parts)))
    return made or slots


def joined(
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    *,
    weight_delay: int,
    warmup: int | None = None,
    weight_delay_at_end: int | None = None,
) -> list[Slot]:
    """Slots with each steady backward and the next forward in one job, and with delayed weight gradients; with or without chunks. `warmup`
    has no effect with chunks.

    >>> show_row(1, joined(1, 2, 2, 2, weight_delay=3))
    '1 | 0F 1F 0F.1 1F.1 0I.1 1I.1 0I 1I+0W.1 1W.1 0W 1W O'
    """
    chunks = num_chunks > 1 and pair_up(interleaved(stage, num_stages, num_micro_batches, num_chunks))
    return trailing(chunks or paired(stage, num_stages, num_micro_batches, warmup), weight_delay, weight_delay_at_end)


def with_optimizer(slots: list[Slot]) -> list[Slot]:
    """The same schedule with the optimizer in the job of the last gradients, so that gradients that are complete are reduced while the
    others are computed. Unchanged if that job has several parts.

    >>> show_row(1, with_optimizer(joined(1, 2, 3, weight_delay=0)))
    '1 | 0F 0B+1F 1B+2F 2B+O'
    """
    last = slots[-2].parts if len(slots) > 1 else ()
    if len(last) != 1 or last[0].kind not in "BW" or slots[-1] != OPTIMIZER:
        return slots
    return [*slots[:-2], Slot((*last, *OPTIMIZER.parts))]


def last_forward(row: Sequence[Slot]) -> int:
    """Index of the last slot with a forward, after which the pipeline drains; `len(row)` if there is none.

    >>> last_forward(paired(1, 2, 3)), last_forward(paired(0, 2, 2)), last_forward([OPTIMIZER])
    (2, 1, 1)
    """
    return next((k for k in reversed(range(len(row))) if any(part.kind == "F" for part in row[k].parts)), len(row))


def sent_before(row: Sequence[Slot], micro_batch: int) -> int:
    """Number of forwards that a stage completes before the backward of a micro-batch; the next stage must receive as many activations
    before it sends that micro-batch's gradient.

    >>> sent_before(one_f_one_b(0, 2, 4), 1)
    3
    """
    forwards = 0
    for each in row:
        if any(part.kind in "BI" and part.micro_batch == micro_batch for part in each.parts):
            return forwards
        forwards += sum(part.kind == "F" for part in each.parts)
    return forwards


def show_row(stage: int, slots: list[Slot]) -> str:
    """One stage as text."""
    return f"{stage} | " + " ".join(map(str, slots))


def parse_rows(text: str, where: str = "schedule") -> dict[int, list[Slot]]:
    """Slots by stage, from text; the inverse of `show_row`. Raises PlanError, with the line, if a token cannot be read, or a stage occurs
    twice.

    >>> [str(slot) for slot in parse_rows("0 | 0F 0B+1F 1B O")[0]]
    ['0F', '0B+1F', '1B', 'O']
    """
    rows: dict[int, list[Slot]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        head, bar, rest = line.partition("|")
        if not bar or not _STAGE.fullmatch(head):
            raise PlanError(f"{where}:{number}: found {line[:80]!r}, expected `<stage> | 0F 1F 0B ...`")
        if int(head) in rows:
            raise PlanError(f"{where}:{number}: stage {int(head)} occurs twice")
        rows[int(head)] = [_slot(token, f"{where}:{number}") for token in rest.split()]
    return rows


def _slot(token: str, where: str) -> Slot:
    if token == "O":
        return OPTIMIZER
    words = token.removesuffix("+O").split("+")
    found = [_TOKEN.fullmatch(word) for word in words]
    if not all(found):
        raise PlanError(f"{where}: found {token[:40]!r}, expected a slot such as 3F, 3B, 3F.1, 2B+5F, 3I+5F+1W or 3B+O")
    parts = tuple(Part(part[2], int(part[1]), int(part[3] or 0)) for part in found if part)
    return Slot((*parts, *OPTIMIZER.parts) if token.endswith("+O") else parts)
