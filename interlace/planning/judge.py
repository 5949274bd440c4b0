"""A plan is kept only where its whole step is simulated no slower than with the plainest form of its passes."""

from __future__ import annotations

import zlib

import msgspec

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.passes.base import Pass
from interlace.passes.peers import Peers, gather
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from interlace.units import ms

Run = tuple[Pipeline, Program, list[PassReport]]


def run_judged(pipeline: Pipeline, program: Program, cost: Costs, peers: Peers | None = None, reserve_bytes: int = 0) -> Run:
    """Run the passes; where one has fallbacks, the first form whose step is no slower than the plainest form's is kept.

    One rank of each stage shows its plan; rank 0 simulates the whole step with these and tells the others, so that all decide alike.
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
        passes = (form, *(kept for each in pipeline.passes[at + 1 :] if (kept := each.draft() if draft else each) is not None))
        made, reports = Pipeline(passes).run(before, cost, peers, reserve_bytes)
        return Pipeline((*pipeline.passes[:at], *passes)), made, [*first, *reports]

    judged = pipeline.passes[at]
    if peers is None and program.pipeline.num_stages > 1:
        return noted(run(judged), judged.name, [], ["the whole step was not judged: the other stages' plans are not known here"])
    *milder, plainest = judged.fallbacks()
    asked, plain = run(judged), run(plainest, draft=True)
    if not any(gather(peers, "forms that differ", _orders(plain) != _orders(asked))):
        return asked
    stands_for = stand_ins(program, peers)
    limit_ns = step_ns(plain[1], cost, peers, stands_for)
    declined: list[str] = []
    for form in (judged, *milder):
        found = asked if form is judged else run(form)
        took_ns = step_ns(found[1], cost, peers, stands_for)
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
    told = [msgspec.structs.replace(each, changed=(*each.changed, *changed), declined=(*each.declined, *declined))
             if each.name == name else each for each in reports]  # fmt: skip
    return pipeline, program, told


def stand_ins(program: Program, peers: Peers | None) -> dict[int, int]:
    """Rank -> the rank that stands for all of its stage, the first there; nothing where nobody else plans at the same time."""
    if peers is None:
        return {}
    stages = gather(peers, "stages", program.pipeline.stage)
    return {rank: stages.index(stage) for rank, stage in enumerate(stages)}


def step_ns(program: Program, cost: Costs, peers: Peers | None, stands_for: dict[int, int]) -> int | None:
    """The simulated step of the whole pipeline; None where it would never end.

    Rank 0 simulates the plans of the ranks that stand for a stage (`stand_ins`) and tells the others; what another rank gives is not
    looked at.
    """
    if peers is None:
        return _simulated([program], cost, {})
    mine = zlib.compress(msgspec.msgpack.encode(program), 1) if stands_for[program.rank] == program.rank else b""
    shown = gather(peers, "plans of stages", mine)
    found = Step()
    if program.rank == 0:
        programs = [msgspec.msgpack.decode(zlib.decompress(shown[rank]), type=Program) for rank in sorted(set(stands_for.values()))]
        found = Step(_simulated(programs, cost, stands_for))
    return gather(peers, "the simulated step", found)[0].step_ns


class Step(msgspec.Struct, frozen=True):
    """What rank 0 tells."""

    step_ns: int | None = None


def _simulated(programs: list[Program], cost: Costs, stands_for: dict[int, int]) -> int | None:
    options = Options(peers_ready=not stands_for, stands_for=stands_for)
    try:
        return max(rank.step_ns for rank in simulate(programs, cost, options, with_memory=False).ranks)
    except PlanError:
        return None
