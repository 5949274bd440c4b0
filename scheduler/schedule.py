"""Pipeline schedules as small data: per stage a list of slots, printed and parsed as text.

    0 | 0F 1F 0B 2F 1B 2B O

A slot is `<micro-batch><kind>`: `F` forward, `B` backward, `R` the receives of a forward as a job of their own, `S` the sends of
a backward as a job of their own, `I` the input-gradient part of a backward, `W` its weight-gradient part, `O` the optimizer. A
chunk other than 0 stands behind a dot (`3F.1`), and `2B+5F` is one job that holds both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from interlace.errors import PlanError

_TOKEN = re.compile(r"(\d+)([FBRSIW])(?:\.(\d+))?")


class Slot(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One piece of work of one micro-batch; `other` is the forward that shares its job."""

    kind: str
    micro_batch: int = 0
    chunk: int = 0
    other: Slot | None = None

    def __str__(self) -> str:
        if self.kind == "O":
            return "O"
        text = f"{self.micro_batch}{self.kind}" + (f".{self.chunk}" if self.chunk else "")
        return f"{text}+{self.other}" if self.other else text


OPTIMIZER = Slot("O")
Schedule = Callable[[int, int, int, int], list[Slot]]
"""`(stage, num_stages, num_micro_batches, num_chunks)` -> slots in order."""


def f_then_b(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """All forwards, then all backwards.

    >>> show_row(0, f_then_b(0, 2, 2))
    '0 | 0F 1F 0B 1B O'
    """
    return [*(Slot("F", m) for m in range(num_micro_batches)), *(Slot("B", m) for m in range(num_micro_batches)), OPTIMIZER]


def accumulate(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """Forward and backward of each micro-batch in turn: gradient accumulation without a pipeline.

    >>> show_row(0, accumulate(0, 1, 2))
    '0 | 0F 0B 1F 1B O'
    """
    return [*(Slot(kind, m) for m in range(num_micro_batches) for kind in "FB"), OPTIMIZER]


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """Paddle's 1F1B: stage s holds num_stages - s micro-batches; receives and sends are jobs of their own.

    >>> show_row(1, one_f_one_b(1, 2, 2))
    '1 | 0R 0F 0B 1R 0S 1F 1B 1S O'
    """
    warmup = min(num_stages - stage, num_micro_batches)
    slots = [Slot(kind, m) for m in range(warmup) for kind in "RF"]
    for b in range(num_micro_batches):
        f = b + warmup
        steady = f < num_micro_batches
        slots += [Slot("B", b), Slot("R", f), Slot("S", b), Slot("F", f)] if steady else [Slot("B", b), Slot("S", b)]
    return [*slots, OPTIMIZER]


def paired(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1, *, warmup: int | None = None) -> list[Slot]:
    """1F1B whose steady backward-forward couples are one job each, at a given number of micro-batches in flight.

    >>> show_row(1, paired(1, 2, 3))
    '1 | 0F 0B+1F 1B+2F 2B O'
    """
    depth = min(num_stages - stage if warmup is None else warmup, num_micro_batches)
    slots = [Slot("F", m) for m in range(depth)]
    for b in range(num_micro_batches):
        f = b + depth
        slots.append(Slot("B", b, other=Slot("F", f)) if f < num_micro_batches else Slot("B", b))
    return [*slots, OPTIMIZER]


def zero_bubble(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """ZB-H1: weight gradients are put off until as many micro-batches are held as 1F1B's first stage holds, and fill the end.

    >>> show_row(1, zero_bubble(1, 2, 4))
    '1 | 0F 0I 1F 1I 0W 2F 2I 1W 3F 3I 2W 3W O'

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.2.
    """
    warmup = min(num_stages - stage, num_micro_batches)
    slots = [Slot("F", m) for m in range(warmup)]
    forward, weights = warmup, 0
    for b in range(num_micro_batches):
        slots.append(Slot("I", b))
        if forward - weights >= num_stages or forward == num_micro_batches:
            slots.append(Slot("W", weights))
            weights += 1
        if forward < num_micro_batches:
            slots.append(Slot("F", forward))
            forward += 1
    return [*slots, *(Slot("W", m) for m in range(weights, num_micro_batches)), OPTIMIZER]


def interleaved(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Slot]:
    """Paddle's VPP (interleaved 1F1B), receives and sends as jobs of their own.

    Source: the order of PaddlePaddle 3.3.1's VPP pass; a test holds it equal for many shapes.
    """
    total = num_micro_batches * num_chunks
    forwards, backwards = _virtual_order(num_stages, num_micro_batches, num_chunks)
    warmup = total if num_micro_batches == num_stages else min((num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages, total)
    warmup = min(total, warmup + 1)
    slots = [Slot(kind, m, c) for m, c in forwards[:warmup] for kind in "RF"]
    for step in range(total - warmup):
        (b, bc), (f, fc) = backwards[step], forwards[step + warmup]
        slots += [Slot("B", b, bc), Slot("R", f, fc), Slot("S", b, bc), Slot("F", f, fc)]
    slots += [Slot(kind, m, c) for m, c in backwards[total - warmup :] for kind in "BS"]
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
"""Paddle's own schedules by the name its strategy gives them."""


def pair_up(slots: list[Slot]) -> list[Slot]:
    """Join receives to their forward, sends to their backward, and each steady backward to the forward that follows it.

    >>> show_row(1, pair_up(one_f_one_b(1, 2, 3)))
    '1 | 0F 0B+1F 1B+2F 2B O'
    """
    whole = [slot for slot in slots if slot.kind not in "RS"]
    joined: list[Slot] = []
    for slot in whole:
        last = joined[-1] if joined else None
        if slot.kind == "F" and last is not None and last.kind == "B" and last.other is None:
            joined[-1] = msgspec.structs.replace(last, other=slot)
        else:
            joined.append(slot)
    return joined


def stall(rows: Sequence[Sequence[Slot]], num_chunks: int = 1) -> str:
    """Where stages that take a slot's inputs at its start and give its outputs at its end would wait for each other.

    A pair counts as mixed: it needs the activation and the gradient at its start and gives both at its end.

    Returns:
        Empty where every stage runs to its end, else the grid of stages with `<-- here` at the slots that never start.

    >>> stall([paired(s, 2, 4, warmup=1) for s in range(2)]).count("<-- here")
    2
    >>> stall([paired(s, 2, 4, warmup=2 * (1 - s) + 1) for s in range(2)])
    ''
    """
    done: set[tuple[int, str, int, int]] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while at[stage] < len(row) and all(need in done for need in _needs(row[at[stage]], stage, len(rows), num_chunks)):
                slot = row[at[stage]]
                done.update((stage, "B" if part.kind == "I" else part.kind, part.micro_batch, part.chunk)
                            for part in (slot, slot.other) if part is not None)  # fmt: skip
                at[stage] += 1
                moved = True
    if all(place == len(row) for place, row in zip(at, rows, strict=True)):
        return ""
    return "\n".join(_stalled_row(stage, row, at[stage]) for stage, row in enumerate(rows))


def _needs(slot: Slot, stage: int, stages: int, chunks: int) -> list[tuple[int, str, int, int]]:
    """Slots of other stages (and the forward of one's own) whose outputs a slot takes."""
    found = []
    for part in (slot, slot.other):
        if part is not None and part.kind == "W":
            found.append((stage, "B", part.micro_batch, part.chunk))
        if part is None or part.kind not in "FBI":
            continue
        kind = "F" if part.kind == "F" else "B"
        step = -1 if kind == "F" else 1
        stage_from, chunk = stage + step, part.chunk
        if not 0 <= stage_from < stages:
            stage_from, chunk = stage_from % stages, chunk + step
        if 0 <= chunk < chunks:
            found.append((stage_from, kind, part.micro_batch, chunk))
        elif kind == "B":
            found.append((stage, "F", part.micro_batch, part.chunk))
    return found


def _stalled_row(stage: int, row: Sequence[Slot], at: int) -> str:
    words = [f"{slot} <-- here" if k == at else str(slot) for k, slot in enumerate(row)]
    return f"{stage} | " + " ".join(words)


def check_rows(rows: dict[int, list[Slot]], num_stages: int, num_micro_batches: int, num_chunks: int, where: str) -> None:
    """Hold a schedule against a step's shape.

    Raises:
        PlanError: A stage is missing or too much, a piece of work is missing, twice or unknown, backward is both whole and in
            parts, or stages would wait for each other (shown as a grid).
    """
    if sorted(rows) != list(range(num_stages)):
        raise PlanError(f"{where}: has stages {sorted(rows)}, expected {list(range(num_stages))}")
    for stage, row in rows.items():
        parts = [part for slot in row for part in (slot, slot.other) if part is not None]
        kinds = {"F", "I", "W"} if any(part.kind in "IW" for part in parts) else {"F", "B"}
        wanted = {(k, m, c) for k in kinds for m in range(num_micro_batches) for c in range(num_chunks)} | {("O", 0, 0)}
        found = [(part.kind, part.micro_batch, part.chunk) for part in parts if part.kind not in "RS"]
        wrong = sorted({f"{Slot(*item)}" for item in wanted ^ set(found)} | {f"{Slot(*item)}" for item in found if found.count(item) > 1})
        if wrong or row[-1] != OPTIMIZER:
            raise PlanError(f"{where}: stage {stage}: each of {sorted(kinds)} for {num_micro_batches} micro-batches and "
                            f"{num_chunks} chunk(s) must stand once, and O last; "
                            f"missing, twice or unknown: {wrong[:12] or 'O is not last'}")  # fmt: skip
    stuck = stall([rows[stage] for stage in range(num_stages)], num_chunks)
    if stuck:
        raise PlanError(f"{where}: stages wait for each other:\n{stuck}")


def sent_before(row: Sequence[Slot], micro_batch: int) -> int:
    """Forwards that a stage ends before it takes a micro-batch's gradient: so many receives its successor must not hold back.

    >>> sent_before(one_f_one_b(0, 2, 4), 1)
    3
    """
    forwards = 0
    for slot in row:
        if slot.kind in "BI" and slot.micro_batch == micro_batch:
            return forwards
        forwards += sum(part is not None and part.kind == "F" for part in (slot, slot.other))
    return forwards


def show_row(stage: int, slots: list[Slot]) -> str:
    """One stage as text."""
    return f"{stage} | " + " ".join(map(str, slots))


def parse_rows(text: str, where: str = "schedule") -> dict[int, list[Slot]]:
    """Stages as text -> slots by stage; the inverse of `show_row`.

    >>> [str(slot) for slot in parse_rows("0 | 0F 0B+1F 1B O")[0]]
    ['0F', '0B+1F', '1B', 'O']

    Raises:
        PlanError: A token cannot be read, or a stage stands twice; with the line.
    """
    rows: dict[int, list[Slot]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        head, bar, rest = line.partition("|")
        if not bar or not head.strip().isdigit():
            raise PlanError(f"{where}:{number}: found {line!r}, expected `<stage> | 0F 1F 0B ...`")
        if int(head) in rows:
            raise PlanError(f"{where}:{number}: stage {int(head)} stands twice")
        rows[int(head)] = [_slot(token, f"{where}:{number}") for token in rest.split()]
    return rows


def _slot(token: str, where: str) -> Slot:
    if token == "O":
        return OPTIMIZER
    first, plus, second = token.partition("+")
    found = _TOKEN.fullmatch(first)
    if not found or (plus and not _TOKEN.fullmatch(second)):
        raise PlanError(f"{where}: found {token!r}, expected a slot such as 3F, 3B, 3F.1 or 2B+5F")
    other = _slot(second, where) if plus else None
    return Slot(found[2], int(found[1]), int(found[3] or 0), other)
