"""One memory budget over recomputation, offload and schedule: who gives how much memory back.

Each stage holds more than its budget by some bytes when everything is kept. Recomputation gives part of them back, cheapest byte first;
offload, which is planned on the schedule, the rest. The simulated step of the whole pipeline decides how much is recomputed: all that is
needed, half, nothing, and then between the best of these; the schedule is chosen afterwards within the same budget
(`interlace/planning/whole_step.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import msgspec

from interlace.cost_model import Costs
from interlace.errors import BudgetError
from interlace.ir import Program
from interlace.passes.base import Pass
from interlace.passes.drop_recompute import DropRecompute, recomputation
from interlace.passes.offload_activations import OffloadActivations
from interlace.passes.peers import Peers, gather, stand_ins
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.passes.schedule_1f1b import Schedule1F1B
from interlace.planning.budget import peak_bytes, say_budget
from interlace.planning.judge import Run, step_ns
from interlace.planning.whole_step import Room, run_passes
from interlace.scheduler.jobs import stock_jobs
from interlace.scheduler.memory.live import in_order, lifetimes
from interlace.units import ms, size

ROUNDS = 4
"""Plans of one form that are made at most; each keeps free the bytes by which the one before exceeded the budget on a GPU."""
SHRINKS = 0.75
"""A share is given up where a plan with less room exceeds the budget by more than this part of what the one before did."""
MOST_HOLDERS = 4
"""Kinds of memory that a refusal names."""
EVERYTHING = 1 << 30
"""More groups than any program has."""
CHEAP = 0.01
"""Recomputation that takes less than this part of the step is not compared with offload."""
ALL, HALF, NONE = 1.0, 0.5, 0.0
"""Shares of the bytes over the budget that recomputation gives back; offload gives the rest."""


def run_within(budget: int, asked: Pipeline, program: Program, cost: Costs, peers: Peers | None = None) -> tuple[Run, int]:
    """Run the passes within a memory budget.

    What holds more on a GPU than its operations in their order is made again with so much less room, in the same schedule; then in Paddle's
    own order with recomputation alone before anything is moved; last comes what holds least.

    Returns:
        The run, and the bytes that its passes might use for the order of operations.

    Raises:
        BudgetError: No plan keeps the budget; with the least feasible one, and what holds it.
        PassError: As `Pipeline.run`.
    """
    choice = MemoryChoice(asked, program, cost, peers)
    base = lifetimes(program).base["device"]
    hopeless = any(gather(peers, "what lasts", base > budget))
    for form in () if hopeless else (choice.decide, choice.plain):
        made, room = form(budget)
        for number in range(ROUNDS):
            run = run_passes(made, program, cost, peers, Room(room, budget)) if number == 0 else choice.made(made, room)
            over = choice.bytes_over(run, budget)
            if not over:
                return choice.told_in(run, budget), room
            room = max(1, min(room, _order_peak(run[1])) - over)
            made = choice.again(run[0], room)
    run = choice.made(choice.tightest(), 1)
    choice.require_within(run, budget)
    return choice.told_in(run, budget), 1


class Holds(msgspec.Struct, frozen=True):
    """What a rank holds on a GPU by what holds least, None where that is not known, and of what most of it is."""

    stage: int
    peak_bytes: int | None
    what: str = ""


class Count(msgspec.Struct, frozen=True):
    """What a rank says: how many groups its stage recomputes at least."""

    stage: int
    groups: int


@dataclass(slots=True)
class Judged:
    """A share, simulated: the passes and the bytes they might use on this rank, the step (None: it never ends), and by how many bytes
    the worst rank exceeds the budget."""

    share: float
    passes: tuple[Pass, ...]
    room_bytes: int
    step_ns: int | None
    over_bytes: int


@dataclass(slots=True)
class MemoryChoice:
    """The decision for one rank, taken alike on all.

    Attributes:
        asked: The passes as configured.
        program: As captured.
        cost, peers: As `make_plan`.
        stands_for: Rank -> the rank that is simulated in its place.
        share: What was decided: the share of the bytes over the budget that recomputation gives back.
        taken, not_taken: What was compared, in words.
        memo: What was found out about the program.
        next_room: What passes may use where what was judged last exceeds the budget.
    """

    asked: Pipeline
    program: Program
    cost: Costs
    peers: Peers | None
    stands_for: dict[int, int] = field(default_factory=dict)
    share: float = ALL
    taken: str = ""
    not_taken: list[str] = field(default_factory=list)
    memo: dict[Any, Any] = field(default_factory=dict)
    next_room: int = 0

    def __post_init__(self) -> None:
        self.stands_for = stand_ins(self.program, self.peers)

    @property
    def is_open(self) -> bool:
        """Whether there is something to decide: a pass that recomputes, and whose user did not say how much."""
        return any(isinstance(each, DropRecompute) and each.recomputed is None for each in self.asked.passes)

    def decide(self, budget: int) -> tuple[Pipeline, int]:
        """The passes with as much recomputation as the simulated step likes best, and the bytes that they may use on this rank for the
        order of operations."""
        if not self.is_open:
            return self.asked, budget
        judged = [self._judge(ALL, budget)]
        offloads = any(isinstance(each, OffloadActivations) for each in self.asked.passes)
        if offloads and any(gather(self.peers, "recomputation costs", self._costs(judged[0]))):
            judged += [self._judge(share, budget) for share in (HALF, NONE)]
            nearest = self._best(judged).share
            judged += [self._judge(share, budget) for share in ((ALL + HALF) / 2, (HALF + NONE) / 2) if abs(share - nearest) < HALF]
        best = self._best(judged)
        self.share = best.share
        self.taken = f"recomputation gives back {best.share:.0%} of the bytes over the budget, offload the rest: {_outcome(best)}"
        self.not_taken = [f"{each.share:.0%} of the bytes over the budget by recomputation: {_outcome(each)}"
                          for each in judged if each is not best]  # fmt: skip
        return Pipeline(best.passes), best.room_bytes

    def plain(self, budget: int) -> tuple[Pipeline, int]:
        """The passes in Paddle's own order, recomputing as much as the budget asks for."""
        self.share, self.taken, self.not_taken = ALL, "", []
        return self._in_paddles_order(self.again(self.asked, budget)), budget

    def again(self, made: Pipeline, room_bytes: int) -> Pipeline:
        """Passes that were decided, with the recomputation that less room asks for."""
        return _recomputing(made, self._at(self.share, room_bytes)) if self.is_open else made

    def tightest(self) -> Pipeline:
        """The passes with everything recomputed that can be, in Paddle's own order: with offload of all that can move it holds least."""
        return self._in_paddles_order(_recomputing(self.asked, EVERYTHING) if self.is_open else self.asked)

    @staticmethod
    def _in_paddles_order(made: Pipeline) -> Pipeline:
        return Pipeline(tuple(each.stock() if isinstance(each, Schedule1F1B) and each.is_open() else each for each in made.passes))

    def made(self, made: Pipeline, room_bytes: int) -> Run:
        """A run of passes whose forms are decided."""
        return (made, *made.run(self.program, self.cost, self.peers, room_bytes, self.memo))

    def bytes_over(self, run: Run, budget: int) -> int:
        """By how much this rank exceeds the budget on a GPU; 1 where only others do, 0 where none is known to."""
        peak = peak_bytes(run[1], self.cost) if run[1].jobs else None
        over = max(0, peak - budget) if peak is not None else 0
        others = gather(self.peers, "bytes over the budget", over)
        return over or int(any(others))

    def require_within(self, run: Run, budget: int) -> None:
        """Raises BudgetError, on all ranks alike, where a rank holds more than the budget by what holds least."""
        live = in_order(run[1]).at_peak()[:MOST_HOLDERS] if run[1].jobs else []
        what = ", ".join(f"{' '.join(filter(None, (each.layer, each.kind)))} {size(each.size_bytes)}" for each in live)
        said = gather(self.peers, "what holds least", Holds(self.program.pipeline.stage, peak_bytes(run[1], self.cost), what))
        rank, most = max(enumerate(said), key=lambda item: item[1].peak_bytes or 0)
        if most.peak_bytes is not None and most.peak_bytes > budget:
            where = f"rank {rank if self.peers else self.program.rank}, stage {most.stage}"
            raise BudgetError(f"memory_budget {size(budget)} ({budget} bytes) cannot be kept; the least feasible one is {most.peak_bytes} "
                              f"bytes ({size(most.peak_bytes)}), which {where} holds with everything recomputed and moved to the host that "
                              f"can be: {most.what}", most.peak_bytes)  # fmt: skip

    def told_in(self, run: Run, budget: int) -> Run:
        """The run with the budget, and what was compared for it, in its reports."""
        pipeline, program, reports = run
        reports = [self._told_first(report) if report.name == DropRecompute.name else report for report in reports]
        return pipeline, program, say_budget(program, pipeline.passes, reports, budget, peak_bytes(program, self.cost))

    def _told_first(self, report: PassReport) -> PassReport:
        """The report of what is recomputed, with the shares that were compared before what was done value by value."""
        head, rest = report.changed[:1], report.changed[1:]
        taken = (self.taken,) if self.taken and head else ()
        return msgspec.structs.replace(report, changed=(*head, *taken, *rest), declined=(*self.not_taken, *report.declined))

    def _at(self, share: float, room_bytes: int) -> tuple[int, ...]:
        """How many groups each stage recomputes at a share: of several ranks of a stage the one with the least room decides."""
        stands = self.stands_for.get(self.program.rank, self.program.rank) != self.program.rank
        mine = Count(self.program.pipeline.stage, 0 if stands else self._count(share, room_bytes))
        said = gather(self.peers, "recomputed groups", mine)
        return tuple(max((each.groups for each in said if each.stage == stage), default=0)
                     for stage in range(self.program.pipeline.num_stages))  # fmt: skip

    def _count(self, share: float, room_bytes: int) -> int:
        """The fewest groups that give this share back, cheapest byte first, by the peak of Paddle's own schedule."""
        found = recomputation(self.program, self.cost, self.memo, adds=True)
        most = self._peak(0)
        limit = most - int(share * max(0, most - room_bytes))
        return bisect_left(range(len(found.groups)), True, key=lambda count: self._peak(count) <= limit)

    def _peak(self, count: int) -> int:
        """Live device bytes at the peak of Paddle's own schedule with so many groups recomputed."""
        if ("peak", count) not in self.memo:
            found = recomputation(self.program, self.cost, self.memo, adds=True)
            made = found.without(found.groups[count:])
            self.memo["peak", count] = in_order(msgspec.structs.replace(made, jobs=stock_jobs(made))).peak()
        peak: int = self.memo["peak", count]
        return peak

    def _costs(self, judged: Judged) -> bool:
        """Whether recomputation takes so long on this rank's stage, or exceeds the budget, that something else may be faster."""
        found = recomputation(self.program, self.cost, self.memo, adds=True)
        counts = next(each.recomputed for each in judged.passes if isinstance(each, DropRecompute))
        assert isinstance(counts, tuple)
        took = sum(found.op_ns[op_id] for op_id in found.needed(found.groups[counts[self.program.pipeline.stage] :]))
        return bool(judged.over_bytes) or took * self.program.pipeline.num_micro_batches > CHEAP * (judged.step_ns or 0)

    def _judge(self, share: float, budget: int) -> Judged:
        """A share, with so much less room as what side streams hold on a GPU."""
        room, last = budget, 0
        for _ in range(ROUNDS):
            judged = self._judge_at(share, budget, room)
            if not judged.over_bytes or (last and judged.over_bytes > last * SHRINKS):
                break
            last, room = judged.over_bytes, self.next_room
        return judged

    def _judge_at(self, share: float, budget: int, room_bytes: int) -> Judged:
        """By a draft of the step: with each pair's input gradients first where the whole step is to decide on the schedule, and with the
        first alternative of every other pass that has any (a host that waits at the ends of jobs)."""
        passes = _recomputing(self.asked, self._at(share, room_bytes)).passes
        made = Pipeline(tuple(map(_form, passes))).draft().run(self.program, self.cost, self.peers, room_bytes, self.memo)[0]
        order = _order_peak(made)
        mine = max(0, max(order, peak_bytes(made, self.cost) or 0) - budget)
        self.next_room = max(1, min(room_bytes, order) - mine)
        over = max(gather(self.peers, "bytes over the budget", mine))
        return Judged(share, passes, room_bytes, step_ns(made, self.cost, self.peers, self.stands_for), over)

    @staticmethod
    def _best(judged: list[Judged]) -> Judged:
        """What exceeds the budget least, of these the fastest; of equals the first."""
        return min(judged, key=lambda each: (each.over_bytes, each.step_ns is None, each.step_ns or 0))


def _recomputing(made: Pipeline, groups: int | tuple[int, ...]) -> Pipeline:
    """The passes with so many groups recomputed, on every stage or by stage."""
    return Pipeline(tuple(msgspec.structs.replace(each, recomputed=groups) if isinstance(each, DropRecompute) else each
                          for each in made.passes))  # fmt: skip


def _form(each: Pass) -> Pass:
    if isinstance(each, Schedule1F1B):
        return msgspec.structs.replace(each, interleave="dx-first") if each.is_open() else each
    return next(iter(each.alternatives()), each)


def _order_peak(made: Program) -> int:
    """Live device bytes at the peak if operations run one after the other."""
    return in_order(made).peak() if made.jobs else 0


def _outcome(judged: Judged) -> str:
    if judged.over_bytes:
        return "offload cannot"
    return "stages wait for each other" if judged.step_ns is None else f"step simulated {ms(judged.step_ns)}"
