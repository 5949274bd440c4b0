"""Forms of passes are judged by the simulated step: a form is kept only if it is no slower than the simplest of its pass, and where a
pass has alternatives the fastest is taken, of those that keep the memory budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.passes.base import Pass
from interlace.passes.peers import Peers, gather, plans_of_stages, stand_ins
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.planning.budget import bytes_over
from interlace.scheduler.whole_step.orders import simulation, with_orders
from interlace.units import ms

Run = tuple[Pipeline, Program, list[PassReport]]


def run_judged(
    pipeline: Pipeline, program: Program, cost: Costs, peers: Peers | None = None, room_bytes: int | None = None, budget: int = 0
) -> Run:
    """Run the passes; if one has fallbacks, keep its first form whose step is no slower than with the last fallback, the simplest.
    Of a pass with alternatives (where the host waits) the form with the fastest step is kept, under a budget of those that keep it;
    where none does, the one that exceeds it least.

    One rank of each stage sends its plan to rank 0, which simulates the whole step and sends the result to all, so that all ranks
    decide alike. A rank that plans without the other stages cannot simulate the step and keeps the form that was asked for.

    Returns:
        The pipeline that was kept, the planned program, and the reports with the simulated times.

    Raises:
        PassError: As `Pipeline.run`.
    """
    pipeline.check(program)
    at = next((k for k, each in enumerate(pipeline.passes) if each.fallbacks()), None)
    alone = peers is None and program.pipeline.num_stages > 1
    stands_for = stand_ins(program, peers)

    def with_alternatives(first: Run, passes: tuple[Pass, ...]) -> Run:
        """The passes from here on; of a pass that has alternatives, the form with which the simulated step is fastest."""
        cut = next((k for k, each in enumerate(passes) if each.alternatives()), len(passes)) if not alone else len(passes)
        if cut == len(passes):
            return _then(first, passes, cost, peers, room_bytes)
        common = next((k for k, each in enumerate(passes[:cut]) if each.decides_for_all), cut)  # which looks at what comes after it
        asked, rest = passes[cut], passes[cut + 1 :]
        found = _then(first, passes[:common], cost, peers, room_bytes)
        forms = {form.label(): _then(found, (*passes[common:cut], form, *rest), cost, peers, room_bytes)
                 for form in (asked, *asked.alternatives())}  # fmt: skip
        took = {label: step_ns(form[1], cost, peers, stands_for) for label, form in forms.items()}
        over = {label: max(bytes_over(form[1], budget, cost, peers)) if budget else 0 for label, form in forms.items()}
        ends = [label for label, each in took.items() if each is not None]
        best = min(ends, key=lambda label: (over[label], took[label] or 0), default=asked.label())
        lines = [f"{best}: whole step simulated {ms(took[best] or 0)}, with {label} {ms(took[label] or 0)}"
                 f"{', more memory than it may hold' if over[label] else ''}" for label in ends if label != best]  # fmt: skip
        return noted(forms[best], asked.name, lines, [])

    if at is None:
        return with_alternatives((Pipeline(()), program, []), pipeline.passes)
    first = _then((Pipeline(()), program, []), pipeline.passes[:at], cost, peers, room_bytes)

    def run(form: Pass, draft: bool = False) -> Run:
        later = pipeline.passes[at + 1 :]
        if draft:
            return _then(first, (form, *Pipeline(later).draft().passes), cost, peers, room_bytes)
        return with_alternatives(first, (form, *later))

    judged = pipeline.passes[at]
    if alone:
        return noted(run(judged), judged.name, [], ["the whole step was not simulated: the other stages' plans are not known here"])
    *simpler, simplest = judged.fallbacks()
    asked, plain = run(judged), run(simplest, draft=True)
    if not any(gather(peers, "forms that differ", _orders(plain) != _orders(asked))):
        return asked
    limit_ns = step_ns(plain[1], cost, peers, stands_for, pipeline.passes)
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


def _then(before: Run, passes: tuple[Pass, ...], cost: Costs, peers: Peers | None, room_bytes: int | None) -> Run:
    """These passes after those that ran before."""
    pipeline, program, reports = before
    made, more = Pipeline(passes).run(program, cost, peers, room_bytes)
    return Pipeline((*pipeline.passes, *passes)), made, [*reports, *more]


def _orders(run: Run) -> list[tuple[tuple[int, int], ...]]:
    return [job.items for job in run[1].jobs]


def noted(run: Run, name: str, changed: list[str], declined: list[str]) -> Run:
    """The same run with lines added to the report of one pass."""
    pipeline, program, reports = run
    lines = [msgspec.structs.replace(each, changed=(*each.changed, *changed), declined=(*each.declined, *declined))
             if each.name == name else each for each in reports]  # fmt: skip
    return pipeline, program, lines


def step_ns(program: Program, cost: Costs, peers: Peers | None, stands_for: dict[int, int], passes: Sequence[Pass] = ()) -> int | None:
    """Simulated time of a step of the whole pipeline; None if it would never end.

    Rank 0 simulates the plans of one rank of each stage (`stand_ins`) and sends the result to the others; the plans of other ranks are
    ignored. Of `passes` those that decide for all (`Pass.decides_for_all`), which the program was drafted without, are counted in.
    """
    plans = plans_of_stages(program, peers, stands_for)
    found = Step(_simulated(plans, cost, stands_for, [each for each in passes if each.decides_for_all])) if plans else Step()
    return gather(peers, "the simulated step", found)[0].step_ns


class Step(msgspec.Struct, frozen=True):
    """The result that rank 0 sends."""

    step_ns: int | None = None


def _simulated(programs: Sequence[Program], cost: Costs, stands_for: dict[int, int], deciding: Sequence[Pass]) -> int | None:
    run = simulation(cost, stands_for)
    try:
        if not deciding:
            return run(programs).step_ns
        for each in deciding:
            orders = each.decide(programs, run)
            programs = [with_orders(program, mine) for program, mine in zip(programs, orders.of_plans, strict=True)]
        return orders.step_ns
    except PlanError:
        return None
