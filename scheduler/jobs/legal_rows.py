"""Legality of rows of slots: every part occurs once, the order keeps sums and messages, and no stage waits forever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from interlace.errors import PlanError
from interlace.ir.schedule import OPTIMIZER, Part, Slot


def stall(rows: Sequence[Sequence[Slot]], num_chunks: int = 1) -> str:
    """Text of the grid of stages, with `<-- here` at the blocked slots, if stages would wait for each other forever; empty if every stage
    can finish. A slot is assumed to need its inputs at its start and to have its outputs at its end.

    A slot of receives (`R`) waits for its messages, as on the CPU place. On places where streams continue past it, later slots could not
    use the messages earlier anyway. A pair counts as mixed: it needs the activation and the gradient at its start and has both outputs at
    its end.

    >>> from interlace.ir.schedule import joined
    >>> stall([joined(s, 2, 4, weight_delay=0, warmup=1) for s in range(2)]).count("<-- here")
    2
    >>> stall([joined(s, 2, 4, weight_delay=0, warmup=2 * (1 - s) + 1) for s in range(2)])
    ''
    """
    senders = ["S" if _parts(row, "S") else "B" for row in rows]
    at = reached([[links(slot, stage, senders, num_chunks) for slot in row] for stage, row in enumerate(rows)])
    if all(place == len(row) for place, row in zip(at, rows, strict=True)):
        return ""
    return "\n".join(_stalled_row(stage, row, at[stage]) for stage, row in enumerate(rows))


Output = tuple[int, str, int, int]
"""An output that other slots wait for: stage, kind, micro-batch, chunk. The output of a backward (`B`) is its input gradients."""
Links = tuple[list[Output], list[Output]]
"""The outputs that a slot needs, and its own outputs."""


def reached(rows: Sequence[Sequence[Links]]) -> list[int]:
    """Number of slots of each stage that can run before the stage waits forever; all if it does not. Rules as in `stall`."""
    done: set[Output] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while at[stage] < len(row) and done.issuperset(row[at[stage]][0]):
                done.update(row[at[stage]][1])
                at[stage] += 1
                moved = True
    return at


def links(slot: Slot, stage: int, senders: Sequence[str], chunks: int) -> Links:
    """The links of a slot of a stage. `senders` holds, for each stage, the kind of slot that sends a gradient: its backward (`B`), or a
    separate slot of sends (`S`)."""
    outputs = [(stage, "B" if part.kind == "I" else part.kind, part.micro_batch, part.chunk) for part in slot.parts]
    return _needs(slot, stage, senders, chunks), outputs


def _needs(slot: Slot, stage: int, senders: Sequence[str], chunks: int) -> list[Output]:
    """Outputs of other slots that a slot needs: of neighbouring stages, and of its own stage's forward and input gradients."""
    found = []
    for part in slot.parts:
        if part.kind in "WS":
            found.append((stage, "B", part.micro_batch, part.chunk))
        if part.kind not in "FRBI":
            continue
        kind = "F" if part.kind in "FR" else "B"
        step = -1 if kind == "F" else 1
        stage_from, chunk = stage + step, part.chunk
        if not 0 <= stage_from < len(senders):
            stage_from, chunk = stage_from % len(senders), chunk + step
        if 0 <= chunk < chunks:
            found.append((stage_from, kind if kind == "F" else senders[stage_from], part.micro_batch, chunk))
        if kind == "B":
            found.append((stage, "F", part.micro_batch, part.chunk))
    return found


def _stalled_row(stage: int, row: Sequence[Slot], at: int) -> str:
    words = [f"{slot} <-- here" if k == at else str(slot) for k, slot in enumerate(row)]
    return f"{stage} | " + " ".join(words)


def check_rows(rows: dict[int, list[Slot]], num_stages: int, num_micro_batches: int, num_chunks: int, where: str) -> None:
    """Check a schedule against the number of stages, micro-batches and chunks.

    Raises PlanError if a stage is missing or unknown; a part is missing, occurs twice or is unknown; backward is both whole and in parts; a
    slot has parts that need each other; micro-batches of a chunk are out of order; receives come after their forward; stages would wait
    for each other (shown as a grid); or messages are received in another order than sent.
    """
    if sorted(rows) != list(range(num_stages)):
        raise PlanError(f"{where}: has stages {sorted(rows)}, expected {list(range(num_stages))}")
    for stage, row in rows.items():
        place = f"{where}: stage {stage}"
        _check_parts(row, num_micro_batches, num_chunks, place)
        _check_slots(row, place)
        _check_order(row, place)
        _check_receives(row, place)
    ordered = [rows[stage] for stage in range(num_stages)]
    stuck = stall(ordered, num_chunks)
    if stuck:
        raise PlanError(f"{where}: stages wait for each other:\n{stuck}")
    _check_messages(ordered, num_chunks, where)


def _check_parts(row: list[Slot], num_micro_batches: int, num_chunks: int, place: str) -> None:
    """Raise PlanError unless each part occurs once, and separate receives and sends exist for all micro-batches or none."""
    found = [(part.kind, part.micro_batch, part.chunk) for each in row for part in each.parts]
    given = {kind for kind, _, _ in found}
    kinds = ({"F", "I", "W"} if given & {"I", "W"} else {"F", "B"}) | given & {"R", "S"}
    wanted = {(k, m, c) for k in kinds for m in range(num_micro_batches) for c in range(num_chunks)} | {("O", 0, 0)}
    double = {item for item, count in Counter(found).items() if count > 1}
    planned = 1 + max((m for kind, m, _ in found if kind != "O"), default=-1)
    inside = all(kind in kinds and chunk < num_chunks for kind, _, chunk in found if kind != "O")
    if planned != num_micro_batches and inside and len(set(found)) == planned * len(kinds) * num_chunks + 1:  # each part, and O
        raise PlanError(
            f"{place}: is of {planned} micro-batch(es) a step, the model has {num_micro_batches}; expected as many: give the "
            "model as many, or plan it with as many as it has"
        )
    wrong = sorted(str(Part(*item)) for item in (wanted ^ set(found)) | double)
    if wrong or row[-1].parts[-1] != OPTIMIZER.parts[0]:
        raise PlanError(
            f"{place}: each of {sorted(kinds)} for {num_micro_batches} micro-batches and {num_chunks} chunk(s) must occur "
            f"once, and O last; missing, twice or unknown: {wrong[:12] or 'O is not last'}"
        )


def _check_slots(row: list[Slot], place: str) -> None:
    """Raise PlanError if parts of a slot need each other."""
    for each in row:
        needy = next((pair for pair in combinations(each.parts, 2) if _need_each_other(*pair)), None)
        if needy is not None:
            raise PlanError(
                f"{place}: slot {each} has {needy[0]} and {needy[1]}, which need each other or run alone; put them into slots "
                "of their own (for I and W of one micro-batch, write B)"
            )


def _check_order(row: list[Slot], place: str) -> None:
    """Raise PlanError unless each kind of part takes a chunk's micro-batches in order; sums over micro-batches, random draws and messages
    depend on that."""
    last: dict[tuple[str, int], Part] = {}
    for each in row:
        for part in each.parts:
            before = last.setdefault((part.kind, part.chunk), part)
            if part.micro_batch < before.micro_batch:
                raise PlanError(
                    f"{place}: {part} in slot {each} stands behind {before}; expected the micro-batches of a kind and chunk in "
                    "order, because sums and random draws would change"
                )
            last[part.kind, part.chunk] = part


def _check_receives(row: list[Slot], place: str) -> None:
    """Raise PlanError if separate receives come after their forward."""
    at = {part: k for k, each in enumerate(row) for part in each.parts}
    for part in _parts(row, "R"):
        forward = Part("F", part.micro_batch, part.chunk)
        if at[part] > at[forward]:
            raise PlanError(f"{place}: {part} stands behind {forward}; expected the receives (R) of a forward before it")


def _check_messages(rows: Sequence[Sequence[Slot]], num_chunks: int, where: str) -> None:
    """Raise PlanError unless a stage receives in the order in which its neighbour sends. Only the order of chunks can differ, as the
    micro-batches of each chunk are in order."""
    if num_chunks == 1:
        return
    for stage in range(len(rows)):
        for way, step in (("F", 1), ("B", -1)):
            target = (stage + step) % len(rows)
            shift = 0 if target == stage + step else step
            leaves = "F" if way == "F" else "S" if _parts(rows[stage], "S") else "BI"
            arrives = "BI" if way == "B" else "R" if _parts(rows[target], "R") else "F"
            sent = [(part.micro_batch, part.chunk + shift) for part in _parts(rows[stage], leaves) if 0 <= part.chunk + shift < num_chunks]
            received = [part for part in _parts(rows[target], arrives) if (part.micro_batch, part.chunk) in set(sent)]
            for want, part in zip(sent, received, strict=True):
                if want != (part.micro_batch, part.chunk):
                    raise PlanError(
                        f"{where}: stage {target}: {part} stands where {Part(part.kind, *want)} is expected, whose message "
                        f"comes first: messages arrive in the order in which stage {stage} sends them"
                    )


def _parts(row: Sequence[Slot], kinds: str) -> list[Part]:
    return [part for each in row for part in each.parts if part.kind in kinds]


def _need_each_other(part: Part, other: Part) -> bool:
    """Whether two parts cannot be mixed in one job: one needs the other, or one is a job of receives or sends.

    Parts of one micro-batch need each other, except weight gradients, which need only the input gradients of their own chunk. The
    optimizer needs all gradients, parameter by parameter, so a whole backward or weight gradients may run with it.
    """
    kinds = {part.kind, other.kind}
    if "O" in kinds:
        return not kinds <= set("BWO")
    if kinds & set("RS"):
        return True
    return part.micro_batch == other.micro_batch and ("F" in kinds or "W" not in kinds or part.chunk == other.chunk)
