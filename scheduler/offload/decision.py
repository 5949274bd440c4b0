"""A decision, and how it is printed."""

from __future__ import annotations

from collections import Counter

import msgspec

from interlace.ir import Program, describe
from interlace.scheduler.offload.saved_values import REASONS, Reason, Saved, Skipped
from interlace.units import ms, ms_figure, ranges, size

Item = tuple[int, int]
"""Operation id and micro-batch."""


class Trip(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One value of one micro-batch: out behind one item, back in front of another, in a later job.

    Attributes:
        ahead_ns: Op time between the start of the copy back and its first reader.
        late_ns: What the reader is estimated to wait for it.
        just_in_time: Nothing was measured, so that the copy back starts right before its reader.
    """

    micro_batch: int
    out_after: Item
    back_before: Item
    ahead_ns: int
    late_ns: int = 0
    just_in_time: bool = False


class Move(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A saved value and its trips, by micro-batch."""

    saved: Saved
    trips: tuple[Trip, ...]


class Stay(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One micro-batch of an eligible value that stays, and why."""

    value: int
    micro_batch: int
    size_bytes: int
    reason: Reason


class OffloadPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decision for one rank.

    Attributes:
        moves: In the order of the operations that give the values.
        skipped, stayed: Values, and single micro-batches of eligible values, that stay.
        measured: Whether copy times were known.
        before_peak_bytes: Most device bytes held without copies.
        order_peak_bytes: With them, each value let go at the item of its copy out.
        peak_bytes: With them, each value let go when its copy out is estimated to end; budgets hold for this one.
        pinned_peak_bytes: Most host bytes held, from the start of a copy out to the first reader.
        out_bytes: Bytes that go out, and come back, in a step.
        stall_ns: What readers are estimated to wait in a step.
        notes: What else is to be said.
    """

    moves: tuple[Move, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    stayed: tuple[Stay, ...] = ()
    measured: bool = True
    before_peak_bytes: int = 0
    order_peak_bytes: int = 0
    peak_bytes: int = 0
    pinned_peak_bytes: int = 0
    out_bytes: int = 0
    stall_ns: int = 0
    notes: tuple[str, ...] = ()

    def micro_batch_bytes(self) -> dict[int, int]:
        """Bytes out, and back, of each micro-batch of which anything moves."""
        found: Counter[int] = Counter()
        for move in self.moves:
            found.update({trip.micro_batch: move.saved.size_bytes for trip in move.trips})
        return dict(sorted(found.items()))

    def summary(self) -> str:
        """The decision in one line."""
        if not self.moves:
            return f"moves nothing; peak {size(self.before_peak_bytes)}"
        waits = f"readers wait {ms(self.stall_ns)}" if self.measured else "copies not measured: back just in time"
        peak = f"peak {size(self.before_peak_bytes)} -> {size(self.peak_bytes)}, pinned {size(self.pinned_peak_bytes)}"
        count = f"{len(self.moves)} value(s) of {len(self.micro_batch_bytes())} micro-batch(es)"
        return f"moves {count}, {size(self.out_bytes)} out and back; {peak}; {waits}"

    def reasons(self) -> dict[Reason, tuple[int, int]]:
        """Reason -> number of values (or of micro-batches of eligible ones) that stay for it, and their known bytes."""
        found: dict[Reason, tuple[int, int]] = {}
        stays = [(each.reason, each.size_bytes) for each in self.skipped]
        for reason, size_bytes in [*stays, *((each.reason, each.size_bytes) for each in self.stayed)]:
            count, total = found.get(reason, (0, 0))
            found[reason] = count + 1, total + max(0, size_bytes)
        return {reason: found[reason] for reason in REASONS if reason in found}

    def declined(self) -> list[str]:
        """What stays and why, one line a reason."""
        single = {stay.reason for stay in self.stayed}
        unit = {reason: "trip(s)" if reason in single else "value(s)" for reason in REASONS}
        return [f"{count} {unit[reason]}, {size(total)}: {reason}: {REASONS[reason]}"
                for reason, (count, total) in self.reasons().items()]  # fmt: skip

    def explain(self, program: Program) -> list[str]:
        """The whole decision as text, one line a value and one a reason."""
        ops = {op.id: op for op in program.ops}
        moved = [f"{describe(ops[move.saved.producer])}: {show_move(move)}" for move in self.moves]
        return [self.summary(), *self.notes, *moved, *self.declined()]


def show_move(move: Move) -> str:
    """One move as text: value, bytes, micro-batches, how far ahead it comes back.

    >>> saved = Saved(7, 7, 2 << 20, 2 << 20, 3, (3,), (9,))
    >>> show_move(Move(saved, (Trip(0, (3, 0), (9, 0), 3_200_000), Trip(1, (3, 1), (9, 1), 3_300_000))))
    '%7 (2.0 MiB) of micro-batches 0-1; back 3.200-3.300 ms of op time ahead'
    """
    ahead = sorted(trip.ahead_ns for trip in move.trips)
    late = max(trip.late_ns for trip in move.trips)
    if any(trip.just_in_time for trip in move.trips):
        when = "just in time (copies were not measured)"
    else:
        when = f"{ms_figure(ahead[0])}-{ms(ahead[-1])} of op time ahead"
        when += f", up to {ms(late)} late" if late else ""
    views = " ".join(f"%{each.value}" for each in move.saved.rebuilt)
    again = f", its view(s) {views} remade" if views else ""
    which = ranges(sorted(trip.micro_batch for trip in move.trips))
    return f"%{move.saved.value} ({size(move.saved.size_bytes)}) of micro-batches {which}{again}; back {when}"


