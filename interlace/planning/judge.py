"""Fallbacks: a form of a pass is kept only if the simulated step is no slower than with the simplest form of the pass."""

from __future__ import annotations

import zlib
from functools import lru_cache

import msgspec

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Op, Program, Value
from interlace.ir.per_ops import KEPT, once_per_ops
from interlace.ir.stand_ins import likeness
from interlace.passes.base import Pass
from interlace.passes.peers import Peers, gather
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from interlace.units import ms

Run = tuple[Pipeline, Program, list[PassReport]]


def run_judged(pipeline: Pipeline, program: Program, cost: Costs, peers: Peers | None = None, room_bytes: int | None = None) -> Run:
    """Run the passes; if one has fallbacks, keep its first form whose step is no slower than with the last fallback, the simplest.

    One rank of each stage sends its plan to rank 0, which simulates the whole step and sends the result to all, so that all ranks
    decide alike. A rank that plans without the other stages cannot simulate the step and keeps the form that was asked for.

    Returns:
        The pipeline that was kept, the planned program, and the reports with the simulated times.

    Raises:
        PassError: As `Pipeline.run`.
    """
    pipeline.check(program)
    at = next((k for k, each in enumerate(pipeline.passes) if each.fallbacks()), None)
    if at is None:
        return (pipeline, *pipeline.run(program, cost, peers, room_bytes))
    before, first = Pipeline(pipeline.passes[:at]).run(program, cost, peers, room_bytes)

    def run(form: Pass, draft: bool = False) -> Run:
        later = Pipeline(pipeline.passes[at + 1 :])
        passes = (form, *(later.draft() if draft else later).passes)
        made, reports = Pipeline(passes).run(before, cost, peers, room_bytes)
        return Pipeline((*pipeline.passes[:at], *passes)), made, [*first, *reports]

    judged = pipeline.passes[at]
    if peers is None and program.pipeline.num_stages > 1:
        return noted(run(judged), judged.name, [], ["the whole step was not simulated: the other stages' plans are not known here"])
    *simpler, simplest = judged.fallbacks()
    asked, plain = run(judged), run(simplest, draft=True)
    if not any(gather(peers, "forms that differ", _orders(plain) != _orders(asked))):
        return asked
    stands_for = stand_ins(program, peers)
    limit_ns = step_ns(plain[1], cost, peers, stands_for)
    declined: list[str] = []
    for form in (judged, *simpler):
        found = asked if form is judged else run(form)
        took_ns = step_ns(found[1], cost, peers, stands_for)
        if took_ns is None or limit_ns is None:
            why = "the whole step was not simulated: the ranks would wait for each other in a cycle; `interlace check` shows it"
            return noted(asked, judged.name, [], [why])
        against = f"{form.label()}: whole step simulated {ms(took_ns)}, with {simplest.label()} {ms(limit_ns)}"
        if took_ns <= limit_ns:
            return noted(found, judged.name, [against], declined)
        declined.append(f"{against}; it would be slower (only_gains: false keeps it)")
    return noted(run(simplest), judged.name, [], declined)


def _orders(run: Run) -> list[tuple[tuple[int, int], ...]]:
    return [job.items for job in run[1].jobs]


def noted(run: Run, name: str, changed: list[str], declined: list[str]) -> Run:
    """The same run with lines added to the report of one pass."""
    pipeline, program, reports = run
    lines = [msgspec.structs.replace(each, changed=(*each.changed, *changed), declined=(*each.declined, *declined))
             if each.name == name else each for each in reports]  # fmt: skip
    return pipeline, program, lines


def stand_ins(program: Program, peers: Peers | None) -> dict[int, int]:
    """Rank -> the first rank that is like it, which is simulated in its place: one of each stage, where all ranks of a stage are alike.
    Empty if no other rank plans at the same time.
    """
    if peers is None:
        return {}
    kinds = gather(peers, "stages", likeness(program))
    return {rank: kinds.index(kind) for rank, kind in enumerate(kinds)}


def step_ns(program: Program, cost: Costs, peers: Peers | None, stands_for: dict[int, int]) -> int | None:
    """Simulated time of a step of the whole pipeline; None if it would never end.

    Rank 0 simulates the plans of one rank of each stage (`stand_ins`) and sends the result to the others; the plans of other ranks are
    ignored.
    """
    if peers is None:
        return _simulated([program], cost, {})
    plans = gather(peers, "plans of stages", _shown(program) if stands_for[program.rank] == program.rank else Shown())
    found = Step()
    if program.rank == 0:
        found = Step(_simulated([_seen(plans[rank]) for rank in sorted(set(stands_for.values()))], cost, stands_for))
    return gather(peers, "the simulated step", found)[0].step_ns


class Shown(msgspec.Struct, frozen=True):
    """A plan as a rank shows it: operations and values apart, which are the same in many plans."""

    ops: bytes = b""
    rest: bytes = b""


_packed = once_per_ops(lambda program: zlib.compress(msgspec.msgpack.encode((program.ops, program.values)), 1))


@lru_cache(maxsize=KEPT)
def _unpacked(packed: bytes) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
    return msgspec.msgpack.decode(zlib.decompress(packed), type=tuple[tuple[Op, ...], tuple[Value, ...]])


def _shown(program: Program) -> Shown:
    return Shown(_packed(program), zlib.compress(msgspec.msgpack.encode(program.with_ops((), ())), 1))


def _seen(shown: Shown) -> Program:
    """The plan that was shown; plans of the same operations and values hold the same tuples of them."""
    return msgspec.msgpack.decode(zlib.decompress(shown.rest), type=Program).with_ops(*_unpacked(shown.ops))


class Step(msgspec.Struct, frozen=True):
    """The result that rank 0 sends."""

    step_ns: int | None = None


def _simulated(programs: list[Program], cost: Costs, stands_for: dict[int, int]) -> int | None:
    options = Options(peers_ready=not stands_for, stands_for=stands_for)
    try:
        return max(rank.step_ns for rank in simulate(programs, cost, options, with_memory=False).ranks)
    except PlanError:
        return None
