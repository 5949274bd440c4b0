"""A world of ranks that is planned by one of them: rank 0 runs the search and asks the ranks for what only they can do (`World.map`);
the others serve until they get the decision."""

from __future__ import annotations

import builtins
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

import msgspec

from interlace import errors
from interlace.errors import BudgetError, InterlaceError, PlanError
from interlace.ir import Program
from interlace.ir.remarks import Remark
from interlace.ir.target import GPU
from interlace.passes.base import Pass
from interlace.passes.pipeline import Pipeline, errors_named
from interlace.planning.peers import Peers, decoded, gather, require_same_options
from interlace.planning.tasks import (
    TASKS,
    MemoryLimits,
    Passes,
    Plans,
    Programs,
    Ran,
    Simulated,
    peak_in_order,
    peak_on_gpu,
    program_equivalence_key,
    rank_facts,
    run_passes,
    show_plan,
    show_simulated,
    simulated_step,
    simulated_steps,
)
from interlace.planning.variants import decided_for_all
from interlace.planning.worker import Decision, RankFacts, Sent, Spec, Worker, packed, spec_of, unpacked
from interlace.scheduler.memory.pools import reserved_bytes
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import Result, simulate
from interlace.scheduler.whole_step.orders import Orders, simulation

T = TypeVar("T")
PLANS_KEPT = 16
"""Number of other processes' plans that are kept for later simulations, which often differ on only one stage."""


class Fault(msgspec.Struct, frozen=True):
    """An error encoded for another process: the name of its class, its text, and where it was raised."""

    kind: str
    text: str
    least_bytes: int = 0
    trace: str = ""

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Encode an error."""
        return cls(type(error).__name__, str(error), getattr(error, "least_bytes", 0), "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        """Decode to an error of the same class and text; if the class is unknown here, to one of another class that names it."""
        if self.kind == BudgetError.__name__:
            return BudgetError(self.text, self.least_bytes)
        kind = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        with suppress(TypeError):  # a class whose constructor does not take one text
            if isinstance(kind, type) and issubclass(kind, Exception):
                return self._told(kind(self.text))
        return self._told(PlanError(f"{self.kind}: {self.text}"))

    def _told(self, error: Exception) -> Exception:
        if not isinstance(error, InterlaceError) or type(error).__name__ != self.kind:
            error.__cause__ = RuntimeError(f"in the process that raised it:\n{self.trace}")
        return error


class Order(msgspec.Struct, frozen=True):
    """A message of rank 0 to the others: a task for some of them, or without a task the end, with a decision or an error."""

    task: str = ""
    given: bytes = b""
    asked: tuple[int, ...] = ()
    fault: Fault | None = None


class Answer(msgspec.Struct, frozen=True):
    given: bytes = b""
    fault: Fault | None = None


class Link(Protocol):
    """Connection to the workers of other processes, which are identified by their places."""

    @property
    def helpers(self) -> Sequence[int]:
        """Places, one of each process, to which plans of other ranks may be sent; none where that takes longer than it saves."""
        ...

    def ask(self, *orders: Order) -> None:
        """Let them do something, each process one of these orders at most."""
        ...

    def answers(self) -> dict[int, Answer]:
        """What those answer that were asked."""
        ...


class LinkError(PlanError):
    """The other ranks cannot be reached, or one of them is gone, so that they cannot be told of an error."""


@contextmanager
def only_if_possible() -> Iterator[None]:
    """Context that ignores that a plan cannot be made, where another one is there already."""
    try:
        yield
    except LinkError:
        raise
    except InterlaceError:
        return


def answered(worker: Worker, order: Order) -> Answer:
    """A rank's answer to an order from another process."""
    try:
        task = TASKS[order.task]
        _, *kinds, _ = get_type_hints(task).values()
        given: Any = tuple.__class_getitem__(tuple(kinds))
        return Answer(packed(task(worker, *unpacked(order.given, given))))
    except Exception as error:
        return Answer(fault=Fault.of(error))


@dataclass(frozen=True, slots=True)
class Made:
    """What passes made of the programs of a world (a *run* of the search).

    Attributes:
        passes: The passes that ran; for a draft, the full passes.
        programs: For each rank, the number of the resulting program.
        steps: For each rank, the numbers of the passes' steps.
        memory_limits: `Context.memory_limit` of each rank.
        notes: Remarks on what was decided.
    """

    passes: Pipeline
    programs: Programs
    steps: tuple[tuple[int, ...], ...]
    memory_limits: MemoryLimits
    notes: tuple[Remark, ...] = ()

    def noted(self, *remarks: Remark) -> Made:
        """The same, with further remarks for the reports of passes."""
        return replace(self, notes=(*self.notes, *remarks))


class Draft(NamedTuple):
    """A draft of a plan.

    Attributes:
        later: The full passes after the schedule, of which only those that delay transfers matter (`World.step_ns`).
        whole: All passes of the full plan; None if it is known only in part.
    """

    made: Made
    later: tuple[Pass, ...] = ()
    whole: Pipeline | None = None


_StepKey = tuple[Programs, tuple[Spec, ...]]
"""Numbers of programs, of one rank of each stage, and the passes that delay transfers."""


class World:
    """The ranks that are planned together.

    Args:
        workers: The workers of this process, by place.
        of_rank: For each rank, the place of the worker that answers for it.
        link: Connection to the other places, if there are any.
        facts: What each rank tells about itself; if not given, ranks are asked.

    Attributes:
        representative: Rank -> the first equivalent rank, which is simulated in its place; empty if a rank plans alone.
        captured: The captured program of one rank; all have the same pipeline shape.
        start: The captured programs, before any pass.
        drafts: Drafts that searches judged by step and memory.
    """

    def __init__(
        self, workers: Mapping[int, Worker], of_rank: Sequence[int], link: Link | None = None, facts: Sequence[RankFacts] = ()
    ) -> None:
        self.workers, self.of_rank, self.link = workers, tuple(of_rank), link
        one = workers[min(workers)]
        self.captured, self.cost, self.is_whole = one.captured, one.cost, one.is_whole
        self.all = range(len(self.of_rank))
        self.start = Made(Pipeline(()), (0,) * len(self.all), ((),) * len(self.all), self.memory_limits(None))
        self._answers: dict[Any, list[Any]] = {}
        self._made: dict[Any, tuple[Programs, tuple[tuple[int, ...], ...]]] = {}
        self._steps: dict[_StepKey, Simulated] = {}
        self._step_peaks: dict[Programs, dict[int, int]] = {}
        self._pools: dict[Programs, int | None] = {}
        self.drafts: list[Draft] = []
        self._plans: OrderedDict[tuple[int, int], Program] = OrderedDict()
        self.facts: Sequence[RankFacts] = facts or self.map(rank_facts)
        self.representative = _representatives([each.equivalence_key for each in self.facts]) if self.is_whole else {}

    @classmethod
    def alone(cls, worker: Worker) -> World:
        """The world of a rank that plans without knowing the others."""
        return cls({0: worker}, (0,))

    @property
    def firsts(self) -> tuple[int, ...]:
        """One rank of each class of equivalent ranks, of which a stage has one or more."""
        return tuple(sorted(set(self.representative.values()))) or (0,)

    def memory_limits(self, memory_limit: int | None) -> MemoryLimits:
        """The same limit for every rank."""
        return (memory_limit,) * len(self.all)

    # ------------------------------------------------------------------------------------------------------------- asking

    def known(self, task: Callable[..., Any], *given: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """As `map`, with results cached, so that ranks are not asked again."""
        key = (task, given, ranks := tuple(self.all if ranks is None else ranks))
        if key not in self._answers:
            self._answers[key] = self.map(task, *given, ranks=ranks)
        return self._answers[key]

    def map(self, task: Callable[..., Any], *given: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """Have ranks do one of `tasks.TASKS` with these arguments; returns the results by rank, None for ranks that are not among `ranks`
        (without it all are asked).

        Raises LinkError if a rank is gone, else the error of the first rank that failed, with its number unless it is rank 0.
        """
        ranks = tuple(self.all if ranks is None else ranks)
        asked = tuple(dict.fromkeys(self.of_rank[rank] for rank in ranks))
        if self.link is not None:
            self.link.ask(Order(task.__name__, packed(given), asked))
        found, failed = dict[int, Any](), dict[int, Exception]()
        for place in (place for place in asked if place in self.workers and not failed):
            try:
                found[place] = task(self.workers[place], *given)
            except Exception as error:
                failed[place] = error
        for place, answer in (self.link.answers() if self.link is not None else {}).items():
            if answer.fault is not None:
                failed[place] = answer.fault.error()
            else:
                found[place] = _given(task, answer)
        for rank in ranks:
            if (fault := failed.get(self.of_rank[rank])) is not None:
                if rank and isinstance(fault, InterlaceError):
                    fault.args = (f"rank {rank}: {fault}", *fault.args[1:])
                raise fault
        asked_ranks = set(ranks)
        return [found[place] if rank in asked_ranks else None for rank, place in enumerate(self.of_rank)]

    # ----------------------------------------------------------------------------------------------------- running passes

    def run(self, pipeline: Pipeline, memory_limits: MemoryLimits, after: Made | None = None, ranks: Sequence[int] | None = None) -> Made:
        """Run passes, or drafts of them, on `ranks` (default: all); other ranks then have no program. They start from the programs of
        `after`, or else from the captured ones. Known results are not made again. Raises PassError as `Pipeline.run`.
        """
        start = after or self.start
        ranks = tuple(self.all if ranks is None else ranks)
        key = (tuple(map(spec_of, pipeline.passes)), pipeline.is_draft, memory_limits, start.programs, ranks)
        if key not in self._made:
            self._made[key] = self._run(pipeline, memory_limits, start.programs, ranks)
        programs, steps = self._made[key]
        whole = tuple((*before, *now) for before, now in zip(start.steps, steps, strict=True))
        return Made(Pipeline((*start.passes.passes, *pipeline.passes)), programs, whole, memory_limits, start.notes)

    def _run(
        self, pipeline: Pipeline, memory_limits: MemoryLimits, programs: Programs, ranks: Sequence[int]
    ) -> tuple[Programs, tuple[tuple[int, ...], ...]]:
        passes, specs = pipeline.passes, tuple(map(spec_of, pipeline.passes))
        steps: list[tuple[int, ...]] = [()] * len(self.all)
        told = Decision()
        stops = [k for k, each in enumerate(passes) if each.asks_ranks or (each.decides == "transfers" and self._decides)]
        for first, last in pairwise([0, *stops, len(passes)]):
            decides = last < len(passes) and passes[last].decides == "transfers" and self._decides
            facts = last < len(passes) and not decides
            some = Passes(specs, first, last, memory_limits, pipeline.is_draft)
            ran: list[Ran | None] = self.map(run_passes, some, programs, told, facts, ranks=ranks)
            programs = tuple(-1 if each is None else each.program for each in ran)
            steps = [(*before, *each.steps) if each else before for before, each in zip(steps, ran, strict=True)]
            if facts:
                told = Decision(tuple(each.facts if each else b"" for each in ran))
            elif decides:
                told = self._decided(passes[last], programs, msgspec.structs.replace(some, first=last))
        return programs, tuple(steps)

    @property
    def _decides(self) -> bool:
        """Whether there are transfers to decide on for all ranks: only if all ranks plan together, in several stages."""
        return self.is_whole and self.captured.pipeline.num_stages > 1

    def _decided(self, each: Pass, programs: Programs, passes: Passes) -> Decision:
        """What `each`, the first of `passes`, decides for all ranks, from one plan of each stage; nothing if the step cannot be
        simulated."""
        representative, found = _representatives(self.map(program_equivalence_key, programs)), Orders()
        firsts = sorted(set(representative.values()))
        shown = self.map(show_simulated, programs, passes, ranks=firsts)
        with suppress(PlanError), errors_named(each):
            found = decided_for_all(each, [shown[rank].program for rank in firsts], simulation(self.cost, representative))
        return Decision(orders=found, plan_of=tuple(firsts.index(representative[rank]) for rank in self.all))

    # --------------------------------------------------------------------------------------------------------- evaluating

    def plans(self, made: Made) -> list[Program]:
        """The plan of one rank of each stage, in the order of ranks."""
        numbers = {rank: made.programs[rank] for rank in self.firsts}
        missing = [rank for rank, number in numbers.items() if (rank, number) not in self._plans]
        found = self.map(show_plan, made.programs, ranks=missing) if missing else []
        plans = {rank: found[rank].program if rank in missing else self._plans[rank, numbers[rank]] for rank in self.firsts}
        for rank in self.firsts:
            if self.of_rank[rank] not in self.workers:
                self._plans[rank, numbers[rank]] = plans[rank]
                self._plans.move_to_end((rank, numbers[rank]))
        while len(self._plans) > max(PLANS_KEPT, len(self.firsts)):
            self._plans.popitem(last=False)
        return list(plans.values())

    def step_ns(self, made: Made, passes: Sequence[Pass] = ()) -> int | None:
        """Simulated step of the whole pipeline, in nanoseconds; None if it would never end. Passes in `passes` that delay transfers are
        taken into account, if the plan was drafted without them."""
        found = self._step(made, passes)
        return found[0] if found else None

    def step_ns_unheld(self, made: Made) -> int | None:
        """As `step_ns`, for a host that never waits for the device, whatever memory that takes."""
        with suppress(PlanError):
            return simulation(self.cost, self.representative, host_waits=False)(self.plans(made)).step_ns
        return None

    def joules(self, made: Made, passes: Sequence[Pass] = ()) -> float:
        """Energy of the step of `step_ns`, summed over one rank of each class; 0 if not known."""
        found = self._step(made, passes)
        return found[1] if found else 0.0

    def _step(self, made: Made, passes: Sequence[Pass]) -> Simulated:
        key, delaying = self._step_key(made, passes)
        if key not in self._steps:
            self._steps[key] = simulated_step(self.plans(made), delaying, self.cost, self.representative)
        return self._steps[key]

    def _step_key(self, made: Made, passes: Sequence[Pass]) -> tuple[_StepKey, list[Pass]]:
        delaying = [each for each in passes if each.decides == "transfers"]
        return (tuple(made.programs[rank] for rank in self.firsts), tuple(map(spec_of, delaying))), delaying

    @property
    def has_helpers(self) -> bool:
        """Whether several steps can be simulated at once."""
        return self.link is not None and bool(self.link.helpers)

    def simulate(self, drafts: Iterable[Draft]) -> None:
        """Find the steps of some drafts, in several processes at once, which `step_ns` and `joules` then know."""
        new = {key: draft for draft in drafts if (key := self._step_key(draft.made, draft.later)[0]) not in self._steps}
        link = self.link
        if link is None or not link.helpers or len(new) < 2:
            return
        every = [(key, Plans(tuple(map(Sent, self.plans(draft.made))), key[1])) for key, draft in new.items()]
        mine, *theirs = (every[k :: 1 + len(link.helpers)] for k in range(1 + len(link.helpers)))
        shares = {place: share for place, share in zip(link.helpers, theirs, strict=True) if share}
        given = {place: packed((tuple(plans for _, plans in share), self.representative)) for place, share in shares.items()}
        link.ask(*(Order(simulated_steps.__name__, each, (place,)) for place, each in given.items()))
        try:
            found = simulated_steps(self.workers[min(self.workers)], tuple(plans for _, plans in mine), self.representative)
        finally:
            answers = link.answers()  # nobody else may find them
        self._steps |= zip((key for key, _ in mine), found, strict=True)
        for place, answer in answers.items():
            if (fault := answer.fault) is not None:
                raise fault.error()
            self._steps |= zip((key for key, _ in shares[place]), _given(simulated_steps, answer), strict=True)

    def order_peaks(self, made: Made, by_paddle: bool = False) -> list[int]:
        """Peak device bytes of each rank if operations run one after the other; 0 for a rank without jobs.

        `by_paddle`: whether Paddle's own jobs run rather than those of our lowering.
        """
        return [each or 0 for each in self.known(peak_in_order, made.programs, by_paddle, ranks=self._with_programs(made))]

    def gpu_peaks(self, made: Made, by_paddle: bool = False) -> list[int | None]:
        """Peak device bytes of each rank on a GPU, however fast its host; None if not known. `by_paddle` as in `order_peaks`."""
        return self.known(peak_on_gpu, made.programs, by_paddle, ranks=self._with_programs(made))

    def bytes_over(self, made: Made, budget: int) -> list[int]:
        """Bytes by which each rank exceeds a budget on a GPU; 0 if it does not, or that is not known."""
        return [max(0, peak - budget) if peak is not None else 0 for peak in self.gpu_peaks(made)]

    def bytes_over_in_step(self, made: Made, budget: int) -> list[int]:
        """Bytes by which each rank exceeds the budget on a GPU, simulated alone or in the step of all ranks, where memory that a send reads
        is held longer if the receiver is late."""
        alone, programs = self.bytes_over(made, budget), tuple(made.programs[rank] for rank in self.firsts)
        if programs not in self._step_peaks:
            self._step_peaks[programs] = self._peaks_in_step(made)
        peaks = self._step_peaks[programs]
        return [max(over, peaks.get(self.representative.get(rank, rank), 0) - budget) for rank, over in enumerate(alone)]

    def pool_bytes(self, made: Made) -> int | None:
        """Device bytes that parameters and allocator pools take on the fullest rank, on a GPU; None if the step cannot be simulated."""
        programs = tuple(made.programs[rank] for rank in self.firsts)
        if programs not in self._pools:
            found = self._in_step(made)
            self._pools[programs] = reserved_bytes(found.memory, GPU) if found is not None else None
        return self._pools[programs]

    def _peaks_in_step(self, made: Made) -> dict[int, int]:
        """Device bytes of one rank of each stage at its peak on a GPU in the step of all; nothing where that cannot be simulated."""
        found = self._in_step(made) if self.representative else None
        return {rank: profile.peak() for rank, profile in zip(found.input.ranks, found.memory, strict=True)} if found is not None else {}

    def _in_step(self, made: Made) -> Result | None:
        """The simulated step of all ranks on a GPU, with memory; None if it cannot be simulated."""
        with suppress(PlanError):
            options = Options.of(GPU, peers_ready=not self.representative, representative=self.representative)
            return simulate(self.plans(made), self.cost, options, target=GPU)
        return None

    def _with_programs(self, made: Made) -> tuple[int, ...]:
        return tuple(rank for rank, number in enumerate(made.programs) if number >= 0)


def _given(task: Callable[..., Any], answer: Answer) -> Any:
    return unpacked(answer.given, get_type_hints(task)["return"])


def _representatives(kinds: Sequence[bytes]) -> dict[int, int]:
    """Rank -> the first rank with an equal key."""
    first = dict[bytes, int]()
    return {rank: first.setdefault(kind, rank) for rank, kind in enumerate(kinds)}


# --------------------------------------------------------------------------------------------------------- the ranks of a run


class _Ranks:
    """The other ranks of a run, each serving in a process of its own."""

    ASK, ANSWER = "what is asked", "what is answered"
    helpers: Sequence[int] = ()

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def ask(self, *orders: Order) -> None:
        """See `Link`."""
        (self.order,) = orders
        self._gathered(self.ASK, self.order)

    def answers(self) -> dict[int, Answer]:
        """See `Link`."""
        said = self._gathered(self.ANSWER, Answer())
        return {rank: decoded(said[rank], Answer) for rank in self.order.asked if rank}

    def _gathered(self, topic: str, mine: Any) -> list[bytes]:
        try:
            return self.peers.gather(topic, msgspec.msgpack.encode(mine))
        except Exception as error:
            raise LinkError(str(error)) from error


def decide(worker: Worker, peers: Peers | None, search: Callable[[World], T], kind: Any) -> T:
    """Run `search` on rank 0 and return its result, of type `kind`, on every rank; the other ranks, which must call this at the same time,
    serve meanwhile. A rank without peers decides alone. Raises on all ranks what `search`, or a task of any rank, raised."""
    if peers is None:
        return search(World.alone(worker))
    facts = gather(peers, "ranks", worker.facts())
    require_same_options(peers, worker.seat, worker.options, [each.options for each in facts])
    if worker.seat:
        return decoded(_serve(worker, peers), kind)  # type: ignore[no-any-return]
    link = _Ranks(peers)
    try:
        decision = search(World({0: worker}, range(worker.captured.world), link, facts))
    except LinkError:
        raise
    except Exception as error:
        link.ask(Order(fault=Fault.of(error)))
        raise
    link.ask(Order(given=msgspec.msgpack.encode(decision)))
    return decision


def _serve(worker: Worker, peers: Peers) -> bytes:
    """Do what rank 0 asks for until it has decided; returns the decision, encoded."""
    while True:
        order: Order = decoded(peers.gather(_Ranks.ASK, msgspec.msgpack.encode(Order()))[0], Order)
        if order.fault is not None:
            raise order.fault.error()
        if not order.task:
            return order.given
        answer = answered(worker, order) if worker.seat in order.asked else Answer()
        peers.gather(_Ranks.ANSWER, msgspec.msgpack.encode(answer))
