"""Planning of offload for the scheduled program of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from interlace.errors import ConfigError, PlanError
from interlace.grouping import grouped
from interlace.ir import Graph, Program
from interlace.ir.arrays import Ints
from interlace.ir.copies import places_of
from interlace.ir.program import FLOAT_DTYPES
from interlace.ir.remarks import Place, Remark, remark
from interlace.scheduler.memory.live import order_curve
from interlace.scheduler.offload.copy_times import OpenTransfer, Placement, Span, Timeline, earlier, place_transfers, placed_alone
from interlace.scheduler.offload.decision import Kept, Move, OffloadPlan, Transfer
from interlace.scheduler.offload.fit_budget import Fit, spanned
from interlace.scheduler.offload.measures import Measured
from interlace.scheduler.offload.saved_values import Reason, Saved, Skipped, find_candidates
from interlace.scheduler.offload.selection import Names, OffloadOptions, names_layer, names_op, unknown_names

MOST_LOST_SAVING = 4
"""`prefetch_slack` may cost at most 1 / MOST_LOST_SAVING of the saved bytes."""
SLACK_PARTS = (1.0, 0.5, 0.25)
"""Shares of `prefetch_slack` that are tried in turn."""


def plan_offload(program: Program, measured: Measured, choice: OffloadOptions, everyone: Sequence[Names] | None = None) -> OffloadPlan:
    """Plan offload for the scheduled program of one rank; equal inputs give equal plans. Where a budget is not feasible as much as possible
    is moved, and a note says so. `everyone` has the names of layers and operations of all ranks; without them a pattern that matches
    nothing on one of several stages is only noted.

    Raises ConfigError, with the list of names there are, where a pattern matches nothing.
    """
    planner = Planner(program, measured, choice)
    planner.check_names(everyone)
    return planner.run()


class Planner:
    """Chooses candidates, places their transfers and collects why others are kept."""

    def __init__(self, program: Program, measured: Measured, choice: OffloadOptions) -> None:
        self.program, self.choice = program, choice
        self.times = measured
        self.measured = measured.out_ns is not None and measured.back_ns is not None
        self.line = Timeline.of(program, measured.op_ns)
        self.graph = Graph(program)
        self.live = order_curve(program)
        self.budget = measured.memory_limit
        self.notes: list[Remark] = []
        self.skipped: list[Skipped] = []
        self.kept: list[Kept] = []

    def run(self) -> OffloadPlan:
        """Decide; see `plan_offload`."""
        found = find_candidates(self.program)
        self.skipped += found.skipped
        keep = self.choice.keep_on(self.program.pipeline.stage, self.program.pipeline.num_stages)
        if nothing := self.choice.asks_for_nothing(self.budget):
            self.notes.append(nothing)
            self.skipped += [Skipped(each.value, each.size_bytes, "kept") for each in found.saved]
            return self._plan(Placement())
        transfers = self._transfers([saved for saved in found.saved if self._is_chosen(saved)])
        transfers = self._within(transfers, keep)
        placed = self._under_budget(transfers) if self.budget else self.place(transfers)
        return self._plan(self._with_slack(placed))

    def check_names(self, everyone: Sequence[Names] | None) -> None:
        """Raise ConfigError if a pattern of the options matches nothing; see `plan_offload`."""
        pipe = self.program.pipeline
        nowhere = unknown_names(self.choice, everyone or [Names.of(self.program)])
        if nowhere and (everyone is not None or pipe.num_stages == 1):
            raise ConfigError("\n".join(each.message() for each in nowhere))
        stage = Place(stage=pipe.stage)
        for each in nowhere:
            there = {"layers": each.layers, **({"operations": each.ops} if each.option == "exclude_ops" else {})}
            self.notes.append(
                remark("declined", "no-match-on-stage", stage, stages=pipe.num_stages, option=each.option, pattern=each.pattern, **there)
            )

    def _is_chosen(self, saved: Saved) -> bool:
        reason = self._not_chosen(saved)
        if reason:
            self.skipped.append(Skipped(saved.value, saved.size_bytes, reason))
        return reason is None

    def _not_chosen(self, saved: Saved) -> Reason | None:
        layer = self.graph.ops[saved.producer].layer
        makers = [self.graph.ops[self.graph.producer[v]] for part in self.graph.storages.of(saved.value) for v in part.values]
        if not self.choice.include_integers and self.graph.values[saved.value].dtype not in FLOAT_DTYPES:
            return "integer"
        if saved.size_bytes < max(1, self.choice.min_bytes):
            return "below-floor"
        if self.choice.modules and not any(names_layer(p, layer) for p in self.choice.modules):
            return "other-module"
        if any(names_op(p, op) for p in self.choice.exclude_ops for op in makers):
            return "opted-out"
        return None

    def _transfers(self, chosen: Iterable[Saved]) -> list[OpenTransfer]:
        every = [transfer for saved in chosen for transfer in self._of(saved)]
        fits, transfers = placed_alone(self.line, every, self.measured).fits.tolist(), []
        for transfer, finds_time in zip(every, fits, strict=True):
            reason = self._why_not(transfer, finds_time)
            if reason:
                self._keep_transfers([transfer], reason)
            else:
                transfers.append(transfer)
        return transfers

    def _of(self, saved: Saved) -> list[OpenTransfer]:
        """The transfers of a value, one of each micro-batch."""
        every = np.arange(self.program.pipeline.num_micro_batches)
        before, readers = (places_of(self.program, np.array([ops]).T, every) for ops in (saved.before, saved.readers))
        out_ns, back_ns = (self._copy_ns(table, saved.size_bytes) for table in (self.times.out_ns, self.times.back_ns))
        ends = zip(before.max(axis=0).tolist(), readers.min(axis=0).tolist(), strict=True)
        return [OpenTransfer(saved, m, source, reader, out_ns, back_ns) for m, (source, reader) in enumerate(ends)]

    def _copy_ns(self, table: Mapping[int, int] | None, size_bytes: int) -> int:
        if not self.measured or table is None:
            return 0
        if size_bytes not in table:
            raise PlanError(f"offload: no copy time for {size_bytes} bytes; times are given for {sorted(table)[:8]}")
        return table[size_bytes]

    def _why_not(self, transfer: OpenTransfer, finds_time: bool) -> Reason | None:
        """Why a transfer is impossible; without copy times, work of another micro-batch must lie between out and back."""
        line = self.line
        if transfer.source >= transfer.reader or line.job[transfer.source] == line.job[transfer.reader]:
            return "one-job"
        between = () if self.measured else line.items[transfer.source + 1 : transfer.reader]
        is_other = self.measured or any(m != transfer.micro_batch for _, m in between)
        return None if finds_time and is_other else "at-once"

    def _within(self, transfers: list[OpenTransfer], keep_bytes: int) -> list[OpenTransfer]:
        """The transfers within `fraction` and `keep_bytes`; values with the highest product of bytes and idle time come first."""
        by_value = grouped((transfer.saved.value, transfer) for transfer in transfers)
        eligible = sum(group[0].saved.size_bytes for group in by_value.values())
        share = eligible if self.choice.fraction is None else int(eligible * self.choice.fraction)
        room = min(share, eligible - keep_bytes)
        chosen: list[OpenTransfer] = []
        for group in sorted(by_value.values(), key=self._rank):
            size = group[0].saved.size_bytes
            if size <= room:
                room -= size
                chosen += group
            else:
                self._keep_transfers(group, "kept")
        return chosen

    def _rank(self, transfers: Sequence[OpenTransfer]) -> tuple[int, int, int]:
        idle = sum(self.line.at_ns[t.reader] - self.line.at_ns[t.source + 1] for t in transfers)
        return -idle * transfers[0].saved.freed_bytes, transfers[0].saved.producer, transfers[0].saved.value

    def place(self, transfers: Sequence[OpenTransfer]) -> Placement:
        """Place transfers within the copy bandwidth and `max_in_flight`."""
        return place_transfers(self.line, transfers, self.choice.max_in_flight, self.measured)

    def _with_slack(self, placed: Placement) -> Placement:
        """Issue copies back earlier by `prefetch_slack`, or by the part of it that keeps most savings and delays no reader."""
        before, after = int(self.curve().max(initial=0)), self.peak(placed)
        most = min(after + (before - after) // MOST_LOST_SAVING, self.budget or before)
        for part in SLACK_PARTS if self.measured and self.choice.max_in_flight is None else ():
            moved = earlier(self.line, placed, part * self.choice.prefetch_slack)
            if moved.stall_ns <= placed.stall_ns and self.peak(moved) <= most:
                return moved
        return placed

    def _under_budget(self, transfers: list[OpenTransfer]) -> Placement:
        assert self.budget is not None
        if self.curve().max(initial=0) <= self.budget:
            self.notes.append(remark("declined", "under-budget", budget_bytes=self.budget))
            self._keep_transfers(transfers, "kept")
            return Placement()
        found = Fit(self, transfers).run(self.budget)
        if found is None:
            found = Fit(self, transfers).most()
            self.notes.append(remark("declined", "everything-moved", peak_bytes=self.peak(found), budget_bytes=self.budget))
        tried = {transfer.key for transfer in found.tried()}
        self._keep_transfers([transfer for transfer in transfers if transfer.key not in tried], "kept")
        return found

    def peak(self, placed: Placement) -> int:
        """Peak of live device bytes under a placement."""
        return int(self.curve(placed.freed()).max(initial=0))

    def curve(self, extra: Iterable[Span] = ()) -> Ints:
        """Live device bytes at each op instance, with the spans added."""
        return self.live + spanned(extra, len(self.live))

    def _keep_transfers(self, transfers: Iterable[OpenTransfer], reason: Reason) -> None:
        self.kept += [Kept(t.saved.value, t.micro_batch, t.saved.size_bytes, reason) for t in transfers]

    def _plan(self, placed: Placement) -> OffloadPlan:
        for transfer, reason in placed.refused:
            self._keep_transfers([transfer], reason)
        by_value = grouped((transfer.saved.value, transfer) for transfer in placed.transfers)
        moves = [
            Move(group[0].saved, tuple(self._frozen(t) for t in sorted(group, key=lambda t: t.micro_batch))) for group in by_value.values()
        ]
        index = {op.id: k for k, op in enumerate(self.program.ops)}
        return OffloadPlan(
            moves=tuple(sorted(moves, key=lambda m: (index[m.saved.producer], m.saved.value))),
            skipped=tuple(self.skipped),
            kept=tuple(sorted(self.kept, key=lambda s: (s.value, s.micro_batch))),
            measured=self.measured,
            before_peak_bytes=int(self.curve().max(initial=0)),
            peak_bytes=self.peak(placed),
            pinned_peak_bytes=self._pinned_peak(placed),
            out_bytes=sum(t.saved.size_bytes for t in placed.transfers),
            stall_ns=placed.stall_ns if self.measured else 0,
            notes=tuple(self.notes),
        )

    def _frozen(self, transfer: OpenTransfer) -> Transfer:
        ahead = self.line.at_ns[transfer.reader] - self.line.at_ns[transfer.back]
        return Transfer(
            transfer.micro_batch,
            self.line.items[transfer.out],
            self.line.items[transfer.back],
            ahead,
            transfer.late_ns if self.measured else 0,
            not self.measured,
        )

    def _pinned_peak(self, placed: Placement) -> int:
        live = ((t.out, t.reader + 1, t.saved.size_bytes) for t in placed.transfers)
        return int(spanned(live, len(self.live)).max(initial=0))
