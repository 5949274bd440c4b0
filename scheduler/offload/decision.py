"""The result of offload planning, and its text form."""

from __future__ import annotations

from collections import Counter

import msgspec

from interlace.ir import OpInstance, Program, describe
from interlace.scheduler.offload.saved_values import REASONS, Reason, Saved, Skipped
from interlace.units import ms, ranges, size


class Transfer(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One value of one micro-batch copied to the host after one op instance and back before another, in a later job.

    Attributes:
        out_after: The copy to the host is issued after this op instance.
        back_before: The copy back is issued before this op instance.
        ahead_ns: Computation time between the start of the copy back and its first reader.
        late_ns: Estimated time for which the reader waits for the copy back.
        just_in_time: Copy times are unknown, so the copy back is issued immediately before its reader.
    """

    micro_batch: int
    out_after: OpInstance
    back_before: OpInstance
    ahead_ns: int
    late_ns: int = 0
    just_in_time: bool = False


class Move(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A saved value and its transfers in the order of micro-batches."""

    saved: Saved
    transfers: tuple[Transfer, ...]


class Kept(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One micro-batch of an eligible value that is kept on the device, and the reason."""

    value: int
    micro_batch: int
    size_bytes: int
    reason: Reason


class OffloadPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decision for one rank.

    Attributes:
        moves: In the order of the operations that produce the values.
        skipped, kept: Values, and single micro-batches of eligible values, that are kept on the device.
        measured: Whether copy times were known.
        before_peak_bytes: Peak of live device bytes without copies.
        order_peak_bytes: The peak with copies, where each value is freed at the op instance after which its copy out is issued.
        peak_bytes: The peak with copies, where each value is freed when its copy out is estimated to end; budgets apply to it.
        pinned_peak_bytes: Peak of live pinned host bytes; a buffer is live from the start of the copy out to the first reader.
        out_bytes: Bytes that are copied to the host, and back, in a step.
        stall_ns: Estimated time for which readers wait for copies back in a step.
        notes: Further remarks for reports.
    """

    moves: tuple[Move, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    kept: tuple[Kept, ...] = ()
    measured: bool = True
    before_peak_bytes: int = 0
    order_peak_bytes: int = 0
    peak_bytes: int = 0
    pinned_peak_bytes: int = 0
    out_bytes: int = 0
    stall_ns: int = 0
    notes: tuple[str, ...] = ()

    def micro_batch_bytes(self) -> dict[int, int]:
        """Micro-batch -> bytes that are copied to the host and back; micro-batches without a transfer are missing."""
        found: Counter[int] = Counter()
        for move in self.moves:
            found.update({transfer.micro_batch: move.saved.size_bytes for transfer in move.transfers})
        return dict(sorted(found.items()))

    def summary(self) -> str:
        """The decision in one line."""
        if not self.moves:
            return f"moves nothing; live memory {size(self.before_peak_bytes)} at most"
        waits = f"readers wait {ms(self.stall_ns)}" if self.measured else "copies not measured: back just in time"
        peak = f"live memory {size(self.before_peak_bytes)} -> {size(self.peak_bytes)}, pinned {size(self.pinned_peak_bytes)}"
        count = f"{len(self.moves)} value(s) of {len(self.micro_batch_bytes())} micro-batch(es)"
        return f"moves {count}, {size(self.out_bytes)} out and back; {peak}; {waits}"

    def reasons(self) -> dict[Reason, tuple[int, int]]:
        """Reason -> number of values (or of micro-batches of eligible values) kept for it, and their known bytes."""
        found: dict[Reason, tuple[int, int]] = {}
        every: tuple[Skipped | Kept, ...] = (*self.skipped, *self.kept)
        for reason, size_bytes in ((each.reason, each.size_bytes) for each in every):
            count, total = found.get(reason, (0, 0))
            found[reason] = count + 1, total + max(0, size_bytes)
        return {reason: found[reason] for reason in REASONS if reason in found}

    def declined(self) -> list[str]:
        """What is kept on the device, one line for each reason."""
        single = {each.reason for each in self.kept}
        unit = {reason: "transfer(s)" if reason in single else "value(s)" for reason in REASONS}
        return [f"{count} {unit[reason]}, {size(total)}: {reason}: {REASONS[reason]}" for reason, (count, total) in self.reasons().items()]

    def explain(self, program: Program) -> list[str]:
        """The whole decision as text: one line for each moved value and one for each reason to keep others."""
        ops = {op.id: op for op in program.ops}
        moved = [f"{describe(ops[move.saved.producer])}: {show_move(move)}" for move in self.moves]
        return [self.summary(), *self.notes, *moved, *self.declined()]


def show_move(move: Move) -> str:
    """One move as text: value, bytes, micro-batches, and how much computation at least hides the copy back.

    >>> saved = Saved(7, 7, 2 << 20, 2 << 20, 3, (3,), (9,))
    >>> show_move(Move(saved, (Transfer(0, (3, 0), (9, 0), 3_200_000), Transfer(1, (3, 1), (9, 1), 3_300_000))))
    '%7 (2.0 MiB) of micro-batches 0-1; back 3.200 ms or more of computation ahead'
    """
    ahead_ns = min(transfer.ahead_ns for transfer in move.transfers)
    late = max(transfer.late_ns for transfer in move.transfers)
    if any(transfer.just_in_time for transfer in move.transfers):
        when = "just in time (copies were not measured)"
    else:
        when = f"{ms(ahead_ns)} or more of computation ahead"
        when += f", up to {ms(late)} late" if late else ""
    views = " ".join(f"%{each.value}" for each in move.saved.rebuilt)
    again = f", its view(s) {views} remade" if views else ""
    which = ranges(sorted(transfer.micro_batch for transfer in move.transfers))
    return f"%{move.saved.value} ({size(move.saved.size_bytes)}) of micro-batches {which}{again}; back {when}"
