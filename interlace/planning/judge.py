"""A plan is kept only where its whole step is simulated no slower than with the plainest form of its passes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.passes.base import Context, Pass
from interlace.passes.peers import Peers
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from interlace.units import ms

Run = tuple[Pipeline, Program, list[PassReport]]


def run_judged(pipeline: Pipeline, program: Program, cost: Costs, peers: Peers | None = None, reserve_bytes: int = 0) -> Run:
    """Run the passes; where one has fallbacks, the first form whose step is no slower than the plainest form's is kept.

    One rank of each stage shows its plan to the others and all simulate the whole step with these, so that they decide alike.
    Alone, a rank of a pipeline cannot judge a step, and what was asked for stays.

    Returns:
        The pipeline that was kept, the planned program, and the reports with the simulated times.

    Raises:
        PassError: As `Pipeline.run`.
    """
    pipeline.check(program)
    at = next((k for k, each in enumerate(pipeline.passes) if each.fallbacks()), None)
    if at is None:
        return (pipeline, *pipeline.run(program, cost, peers, reserve_bytes))
    before, first = Pipeline(pipeline.passes[:at]).run(program, cost, peers)

    def run(form: Pass, draft: bool = False) -> Run:
        behind = (form, *(each.draft() if draft else each for each in pipeline.passes[at + 1 :]))
        made, reports = Pipeline(behind).run(before, cost, peers, reserve_bytes)
        return Pipeline((*pipeline.passes[:at], *behind)), made, [*first, *reports]

    judged = pipeline.passes[at]
    if peers is None and program.pipeline.num_stages > 1:
        return noted(run(judged), judged.name, [], ["the whole step was not judged: the other stages' plans are not known here"])
    *milder, plainest = judged.fallbacks()
    asked, plain = run(judged), run(plainest, draft=True)
    if not any(Context(cost, peers=peers).gather("forms that differ", _orders(plain) != _orders(asked))):
        return asked
    limit_ns = step_ns(plain[1], cost, peers)
    declined: list[str] = []
    for form in (judged, *milder):
        found = asked if form is judged else run(form)
        took_ns = step_ns(found[1], cost, peers)
        if took_ns is None or limit_ns is None:
            why = "the whole step was not judged: the simulated ranks wait for each other in a circle; `interlace check` shows it"
            return noted(asked, judged.name, [], [why])
        against = f"{form.label()}: whole step simulated {ms(took_ns)}, with {plainest.label()} {ms(limit_ns)}"
        if took_ns <= limit_ns:
            return noted(found, judged.name, [against], declined)
        declined.append(f"{against}; it would be slower (only_gains: false keeps it)")
    return noted(run(plainest), judged.name, [], declined)


def _orders(run: Run) -> list[tuple[tuple[int, int], ...]]:
    return [job.items for job in run[1].jobs]


def noted(run: Run, name: str, changed: list[str], declined: list[str]) -> Run:
    """The same with lines for a pass's report."""
    pipeline, program, reports = run
    noted = [msgspec.structs.replace(each, changed=(*each.changed, *changed), declined=(*each.declined, *declined))
             if each.name == name else each for each in reports]  # fmt: skip
    return pipeline, program, noted


class Shown(msgspec.Struct, frozen=True):
    """What a rank shows of its plan: the first rank of each stage all of it (packed), the others where they stand."""

    rank: int
    stage: int
    plan: bytes = b""

    def program(self) -> Program:
        """The planned program."""
        return msgspec.msgpack.decode(zlib.decompress(self.plan), type=Program)


def step_ns(program: Program, cost: Costs, peers: Peers | None) -> int | None:
    """The simulated step of the whole pipeline, one rank standing for each stage; None where it would never end.

    Rank 0 simulates and tells the others: of a rank that stands for no stage only its place in the world is looked at.
    """
    context, stage = Context(cost, peers=peers), program.pipeline.stage
    if peers is None:
        return _simulated([program], cost, {})
    there = context.gather("stages", Shown(program.rank, stage))
    first = first_ranks(there)
    plan = zlib.compress(msgspec.msgpack.encode(program), 1) if first[stage] == program.rank else b""
    shown = context.gather("plans of stages", Shown(program.rank, stage, plan))
    found = Step()
    if program.rank == 0:
        programs = [each.program() for each in shown if each.plan]
        found = Step(_simulated(programs, cost, {each.rank: first[each.stage] for each in there}))
    return context.gather("the simulated step", found)[0].step_ns


def first_ranks(there: Sequence[Shown]) -> dict[int, int]:
    """Stage -> the rank that stands for it."""
    return {each.stage: each.rank for each in reversed(there)}


class Step(msgspec.Struct, frozen=True):
    """What rank 0 tells."""

    step_ns: int | None = None


def _simulated(programs: list[Program], cost: Costs, stands_for: dict[int, int]) -> int | None:
    options = Options(peers_ready=not stands_for, stands_for=stands_for)
    try:
        return max(rank.step_ns for rank in simulate(programs, cost, options, with_memory=False).ranks)
    except PlanError:
        return None
