"""The order of passes: checked before anything runs, each pass verified and reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import BrokenBarrierError
from typing import Any

import msgspec
import networkx as nx

from interlace.cost_model import Costs
from interlace.errors import InterlaceError, PassError, PlanError
from interlace.ir import Program, verify
from interlace.passes.base import REGISTRY, Context, Pass, is_built_in
from interlace.passes.peers import Peers, gather, plans_of_stages, stand_ins
from interlace.scheduler.hazards.pass_orders import Change, changes, orders_of
from interlace.scheduler.whole_step.orders import Orders, simulation


class PassReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one pass did: lines of what changed and what was declined, operation counts, its run time, and the orders of calls that it
    changed, which partners compare (none in a draft)."""

    name: str
    changed: tuple[str, ...]
    declined: tuple[str, ...]
    ops_before: int
    ops_after: int
    run_ns: int
    orders: tuple[Change, ...] = ()

    def head(self) -> str:
        """How much it did, in one line."""
        return f"{self.name}: {len(self.changed)} changed, {len(self.declined)} declined, ops {self.ops_before} -> {self.ops_after}"

    def text(self) -> str:
        """The whole report, instance by instance."""
        return "\n".join([self.head(), *(f"  + {line}" for line in self.changed), *(f"  - {line}" for line in self.declined)])


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes in the order they run; what a draft of them gives is only simulated, and not verified."""

    passes: tuple[Pass, ...]
    is_draft: bool = False

    def check(self, program: Program) -> None:
        """Hold every pass's needs against what comes before it.

        Raises:
            PassError: A need is not met, or a pass comes before one that it must follow.
        """
        have = {tag for name in program.passes if name in REGISTRY for tag in REGISTRY[name].gives}
        ran = list(program.passes)
        names = [p.name for p in self.passes]
        for k, each in enumerate(self.passes):
            missing = sorted(each.needs - have)
            if missing:
                givers = sorted(name for name, kind in REGISTRY.items() if kind.gives & set(missing))
                raise PassError(
                    f"pass {each.name!r} needs {missing}, which nothing before it gives (ran: {ran}); "
                    f"put {' or '.join(map(repr, givers)) or 'a pass that gives it'} before it"
                )
            late = [name for name in each.after if name in names[k + 1 :]]
            if late:
                raise PassError(f"pass {each.name!r} must run after {late}; the order given is {names}")
            have |= each.gives
            ran.append(each.name)

    def run(
        self,
        program: Program,
        cost: Costs,
        peers: Peers | None = None,
        room_bytes: int | None = None,
        memo: dict[Any, Any] | None = None,
        rooms: tuple[int | None, ...] = (),
    ) -> tuple[Program, list[PassReport]]:
        """Run all passes; the given program is untouched whatever happens. Ranks talk between passes only: `peers` gather the facts
        that the next pass asks for. For the other arguments see `Context`.

        Args:
            rooms: `room_bytes` of every rank. Where given, what a pass makes is kept in `memo`, and the pass does not run again on the
                very same program with the same rooms; a pass that gathers facts runs again on all ranks where one does not know it.

        Raises:
            PassError: A contract is broken, or a pass fails or gives a program that does not verify; it names the pass.
        """
        self.check(program)
        reports, memo = [], {} if memo is None else memo
        for k, each in enumerate(self.passes):
            context = Context(cost, is_whole=peers is not None, room_bytes=room_bytes, memo=memo, later=self.passes[k + 1 :])
            seen = rooms if each.asks_ranks or not is_built_in(type(each)) else (room_bytes,)
            known = memo.setdefault(_key(each, program, seen), []) if rooms and not each.decides_for_all else []
            if rooms and each.asks_ranks and not all(gather(peers, f"{each.name}: known", bool(known))):
                known.clear()
            program, report = self._run_one(each, program, context, peers, known)
            reports.append(report)
        return program, reports

    def draft(self) -> Pipeline:
        """The same passes where a plan is only made to be simulated: `Pass.draft` of each; whole where others need what it gives."""
        drafts = [each.draft() for each in self.passes]
        needed = frozenset().union(*(draft.needs for draft in drafts if draft is not None))
        kept = (draft or each for each, draft in zip(self.passes, drafts, strict=True) if draft is not None or each.gives & needed)
        return Pipeline(tuple(kept), is_draft=True)

    @property
    def asks_ranks(self) -> bool:
        """Whether a pass has facts to gather, so that all ranks must run these passes together."""
        return any(each.asks_ranks for each in self.passes)

    def _run_one(
        self, each: Pass, program: Program, context: Context, peers: Peers | None, known: list[_Made]
    ) -> tuple[Program, PassReport]:
        """A pass and its report; `known` holds what it has made of this very program, if anything, and afterwards what it makes now."""
        start = time.perf_counter_ns()
        try:
            if not known:
                made = _marked(each, program, _applied(each, program, context, peers), context.memo)
                known.append(_Made(program, made, context.changed, context.declined))
            result, context.changed, context.declined = known[0].result, known[0].changed, known[0].declined
            if not self.is_draft:
                verify(result)
        except InterlaceError as error:
            error.args = (f"pass {each.name!r}: {error}", *error.args[1:])
            raise
        except BrokenBarrierError:
            raise
        except Exception as error:
            raise PassError(f"pass {each.name!r} failed with {type(error).__name__}: {error}; the program is as it was") from error
        if not context.changed and not context.declined:
            context.declined.append("found nothing to do")
        orders = () if self.is_draft else changes(orders_of(program), orders_of(result))
        report = PassReport(each.name, tuple(context.changed), tuple(context.declined), len(program.ops), len(result.ops),
                            time.perf_counter_ns() - start, orders)  # fmt: skip
        return result, report


@dataclass(frozen=True, slots=True)
class _Made:
    """What a pass made of a program, and what it said."""

    program: Program
    result: Program
    changed: list[str]
    declined: list[str]


def _key(each: Pass, program: Program, rooms: tuple[int | None, ...]) -> tuple[Any, ...]:
    """Equal for a pass with the same options on the very same program; with the same rooms, where it may look at them: at this rank's own,
    or at those of all ranks whose facts it gathers."""
    looks = each.follows_budget or each.looks_at_room or not is_built_in(type(each))
    return "made", id(program), type(each), msgspec.msgpack.encode(each), rooms if looks else ()


def _applied(each: Pass, program: Program, context: Context, peers: Peers | None) -> Program:
    """What a pass makes of a program, with the facts of all ranks."""
    mine = each.facts(program, context) if each.asks_ranks else None
    context.facts = gather(peers, each.name, mine) if mine is not None else ()
    if each.decides_for_all:
        context.facts = _decided(each, program, context, peers)
    result = each.run(program, context)
    if not isinstance(result, Program):
        raise PassError(f"run() gave {type(result).__name__}, expected a Program")
    return result


def _marked(each: Pass, program: Program, result: Program, memo: dict[Any, Any]) -> Program:
    """What a pass made of a program, with its name in it; where it made the same with other options that very object, so that later passes
    know it again."""
    _, known = memo.setdefault(("results", id(program), type(each)), (program, list[Program]()))
    marked = msgspec.structs.replace(result, passes=(*program.passes, each.name))
    same: Program | None = next((other for other in known if other == marked), None)
    if same is None:
        known.append(marked)
    return same or marked


def _decided(each: Pass, program: Program, context: Context, peers: Peers | None) -> tuple[Any, ...]:
    """What rank 0 decides for all, and this rank's part of it; nothing where there is one stage, or the others are not known, or the
    step cannot be simulated."""
    if program.pipeline.num_stages == 1 or peers is None:
        return ()
    stands_for = stand_ins(program, peers)
    shown = each.simulated(program, context) if stands_for[program.rank] == program.rank else program
    plans, found = plans_of_stages(shown, peers, stands_for), Orders()
    if plans:
        with suppress(PlanError):
            found = each.decide(plans, simulation(context.cost, stands_for))
    found = gather(peers, f"{each.name}: decided", found)[0]
    at = sorted(set(stands_for.values())).index(stands_for[program.rank])
    return (found, found.of_plans[at]) if found.of_plans else ()


def built_in() -> tuple[type[Pass], ...]:
    """Our passes in the order that their `after` gives."""
    order: nx.DiGraph[str] = nx.DiGraph()
    for name, kind in REGISTRY.items():
        if is_built_in(kind):
            order.add_node(name)
            order.add_edges_from((other, name) for other in kind.after)
    return tuple(REGISTRY[name] for name in nx.lexicographical_topological_sort(order))


def ordered(passes: Sequence[Pass]) -> Pipeline:
    """Ours in their order, and a user's own as early as their `after` and `needs` allow.

    Raises:
        PassError: The passes ask for a circle.
    """
    names = [kind.name for kind in built_in()]
    ours = sorted((each for each in passes if is_built_in(type(each))), key=lambda each: names.index(each.name))
    return Pipeline(tuple(_place(ours, [each for each in passes if not is_built_in(type(each))])))


def _place(ours: Sequence[Pass], own: Sequence[Pass]) -> list[Pass]:
    order: nx.DiGraph[int] = nx.DiGraph()
    every = [*ours, *own]
    order.add_nodes_from(range(len(every)))
    order.add_edges_from((k, k + 1) for k in range(len(ours) - 1))
    for k, each in enumerate(every):
        for n, other in enumerate(every):
            if n != k and (other.name in each.after or other.gives & each.needs):
                order.add_edge(n, k)
    try:
        ranks = list(nx.lexicographical_topological_sort(order, key=lambda k: (k < len(ours), k)))
    except nx.NetworkXUnfeasible as error:
        circle = " -> ".join(every[a].name for a, _ in nx.find_cycle(order))
        raise PassError(f"passes ask to run after each other in a circle: {circle}; change `after` or `needs`") from error
    return [every[k] for k in ranks]
