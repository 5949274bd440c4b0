"""The result of offload planning, and its remarks for reports."""

from __future__ import annotations

import msgspec

from interlace.grouping import grouped
from interlace.ir import Op, OpInstance, Program
from interlace.ir.remarks import Fact, Place, Remark, remark
from interlace.scheduler.offload.saved_values import REASONS, Reason, Saved, Skipped


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
    peak_bytes: int = 0
    pinned_peak_bytes: int = 0
    out_bytes: int = 0
    stall_ns: int = 0
    notes: tuple[Remark, ...] = ()

    def reasons(self) -> dict[Reason, tuple[int, int]]:
        """Reason -> number of values (or of micro-batches of eligible values) kept for it, and their known bytes."""
        every: tuple[Skipped | Kept, ...] = (*self.skipped, *self.kept)
        found = grouped((each.reason, max(0, each.size_bytes)) for each in every)
        return {reason: (len(found[reason]), sum(found[reason])) for reason in REASONS if reason in found}

    def remarks(self, program: Program) -> list[Remark]:
        """The whole decision: a remark for each moved value, one for all, and one for each reason to keep others."""
        ops = {op.id: op for op in program.ops}
        moved = [move_remark(move, ops[move.saved.producer]) for move in self.moves]
        return [*moved, self._summary(), *self.notes, *self._kept()]

    def _summary(self) -> Remark:
        if not self.moves:
            return remark("declined", "nothing-moved", before_peak_bytes=self.before_peak_bytes)
        how: dict[str, Fact] = {"stall_ns": self.stall_ns} if self.measured else {"copies": "not measured"}
        return remark(
            "applied",
            "values-moved",
            values=len(self.moves),
            micro_batches=len({transfer.micro_batch for move in self.moves for transfer in move.transfers}),
            out_bytes=self.out_bytes,
            before_peak_bytes=self.before_peak_bytes,
            peak_bytes=self.peak_bytes,
            pinned_peak_bytes=self.pinned_peak_bytes,
            **how,
        )

    def _kept(self) -> list[Remark]:
        single = {each.reason for each in self.kept}
        return [
            remark("declined", "kept-on-device", reason=reason, size_bytes=total, **{"transfers" if reason in single else "values": count})
            for reason, (count, total) in self.reasons().items()
        ]


def move_remark(move: Move, producer: Op) -> Remark:
    """One move: value, bytes, micro-batches, and how much computation at least hides the copy back."""
    facts: dict[str, Fact] = {"micro_batches": sorted(transfer.micro_batch for transfer in move.transfers)}
    if any(transfer.just_in_time for transfer in move.transfers):
        facts["copies"] = "not measured"
    else:
        late_ns = max(transfer.late_ns for transfer in move.transfers)
        facts |= {"ahead_ns": min(transfer.ahead_ns for transfer in move.transfers), **({"late_ns": late_ns} if late_ns else {})}
    if move.saved.rebuilt:
        facts["view_ids"] = [each.value for each in move.saved.rebuilt]
    return remark("applied", "value-moved", Place.of(producer, move.saved.value), size_bytes=move.saved.size_bytes, **facts)
