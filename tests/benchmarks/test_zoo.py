"""Programs of the zoo are planned within their limit, and no named form that keeps it is faster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import zoo

from interlace.config import Config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import BudgetError
from interlace.ir import Program
from interlace.planning.budget import baseline_peak_bytes, peak_bytes
from interlace.planning.limits import SLACK
from interlace.planning.plan import make_plans

COST = CostModel(load_profile("h200"))
FORMS = ("off", *zoo.NAMED)
ROUNDING = 0.001
"""Part of a step by which a draft and a plan in full may differ."""


def planned(programs: list[Program], config: Config) -> tuple[int, int]:
    """Simulated step in ns, and what the fullest rank holds on a GPU: alone or in the step of all, whichever is more."""
    plans = make_plans(programs, config, COST, "h200")
    outcome = plans[0].outcome
    assert outcome is not None
    return outcome.plan.step_ns, max(outcome.plan.peak_bytes, *(peak_bytes(plan.program, COST) or 0 for plan in plans))


def within_budget(programs: list[Program], part: float) -> tuple[int, int] | BudgetError:
    """The same of the plan under a budget, or the refusal."""
    try:
        return planned(programs, make_config({"memory_budget": part}))
    except BudgetError as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "are_within", "part"),
    [
        ("convolutions, pp 2", True, 1.0),
        ("accumulation, dp 2, mp 2, sharding 1, clip", False, 0.9),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("convolutions, pp 2", True, 0.9),
                ("accumulation, dp 2, mp 2, sharding 1, clip", False, 1.0),
                ("stages of 6 and 2 layers", True, 1.0),
                ("stages of 6 and 2 layers", True, 0.9),
            )
        ),
    ],
)
def test_plans_keep_their_limit_and_no_form_that_keeps_it_is_faster(name: str, are_within: bool, part: float) -> None:
    """By default and under a part of what Paddle's baseline holds on a GPU: all of it, which is never refused, or nine tenths; where that
    is refused, no form keeps it."""
    programs = zoo.stored()[name]
    own = max(baseline_peak_bytes(each, COST) or 0 for each in programs)
    forms = {form: planned(programs, make_config(zoo.FORMS[form])) for form in FORMS}
    assert own
    step_ns, peak = planned(programs, make_config({}))
    assert peak <= SLACK * own, peak / own
    assert all(step_ns <= (1 + ROUNDING) * took for took, held in forms.values() if held <= SLACK * own)
    assert any(held <= own for _, held in forms.values()) == are_within, "a program that this is to be asked of"
    within = {form: took for form, (took, held) in forms.items() if held <= part * own}
    found = within_budget(programs, part)
    if isinstance(found, BudgetError):
        assert part < 1.0, found
        assert found.least_bytes > part * own
        assert not within, within
        return
    step_ns, peak = found
    assert peak <= part * own, peak / own
    assert all(step_ns <= (1 + ROUNDING) * took for took in within.values()), (step_ns, within)
