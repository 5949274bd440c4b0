"""The order of passes: checked before anything runs, each pass verified and reported."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import networkx as nx

from interlace.cost_model import Costs
from interlace.errors import InterlaceError, PassError
from interlace.ir import Program, verify
from interlace.ir.remarks import Remark
from interlace.passes.base import REGISTRY, Context, Pass, is_built_in
from interlace.passes.kept import require_kept
from interlace.scheduler.hazards.pass_orders import Change


class PassReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one pass did: its remarks, operation counts and run time; in a finished plan also `orders`, the orders of communication calls
    that it changed, which ranks that communicate with each other compare."""

    name: str
    remarks: tuple[Remark, ...]
    ops_before: int
    ops_after: int
    run_ns: int
    orders: tuple[Change, ...] = ()

    @property
    def done(self) -> tuple[Remark, ...]:
        """All remarks except declined ones."""
        return tuple(each for each in self.remarks if each.kind != "declined")

    @property
    def declined(self) -> tuple[Remark, ...]:
        """Remarks on what was not done."""
        return tuple(each for each in self.remarks if each.kind == "declined")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes in the order they run. The result of a draft is only simulated, and so not verified."""

    passes: tuple[Pass, ...]
    is_draft: bool = False

    def check(self, program: Program) -> None:
        """Check every pass's needs against what comes before it. Raises PassError if a need is not met, or a pass comes before one that it
        must follow."""
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
        self, program: Program, cost: Costs, memory_limit: int | None = None, memo: dict[Any, Any] | None = None, extra_bytes: int = 0
    ) -> tuple[Program, list[PassReport]]:
        """Run all passes on one rank without knowing the others; the given program is untouched whatever happens. For the other arguments
        see `Context`. Raises PassError, or another InterlaceError, naming the pass, if a contract is broken, or a pass fails or returns a
        program that does not verify."""
        self.check(program)
        reports, memo = [], {} if memo is None else memo
        for each in self.passes:
            start = time.perf_counter_ns()
            context = Context(cost, memory_limit=memory_limit, extra_bytes=extra_bytes, memo=memo)
            with errors_named(each):
                context.facts = (each.facts(program, context),) if each.asks_ranks else ()
                made = applied(each, program, context)
                if not self.is_draft:
                    verify(made)
            reports.append(report_of(each, context, program, made, time.perf_counter_ns() - start))
            program = made
        return program, reports


@contextmanager
def errors_named(each: Pass) -> Iterator[None]:
    """Context in which errors name the pass that raised them; any other exception becomes a PassError."""
    try:
        yield
    except InterlaceError as error:
        error.args = (f"pass {each.name!r}: {error}", *error.args[1:])
        raise
    except Exception as error:
        raise PassError(f"pass {each.name!r} failed with {type(error).__name__}: {error}; the program is as it was") from error


def applied(each: Pass, program: Program, context: Context) -> Program:
    """Run a pass and add its name to `Program.passes`. Raises PassError if the result is no Program, or a user's pass changed what it must
    keep."""
    made = each.run(program, context)
    if not isinstance(made, Program):
        raise PassError(f"run() gave {type(made).__name__}, expected a Program")
    if not is_built_in(type(each)):
        require_kept(program, made)
    return msgspec.structs.replace(made, passes=(*program.passes, each.name))


def report_of(each: Pass, context: Context, before: Program, made: Program, run_ns: int) -> PassReport:
    remarks = tuple(one.of(each.name) for one in context.remarks)
    return PassReport(each.name, remarks, len(before.ops), len(made.ops), run_ns)


def built_in() -> tuple[type[Pass], ...]:
    """Interlace's own passes in the order that their `after` gives."""
    order: nx.DiGraph[str] = nx.DiGraph()
    for name, kind in REGISTRY.items():
        if is_built_in(kind):
            order.add_node(name)
            order.add_edges_from((other, name) for other in kind.after)
    return tuple(REGISTRY[name] for name in nx.lexicographical_topological_sort(order))


def ordered(passes: Sequence[Pass]) -> Pipeline:
    """Interlace's passes in their order, a user's own as early as `after` and `needs` allow. Raises PassError if these form a circle."""
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
