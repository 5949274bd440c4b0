"""What a plan needs of a machine, and memory that Paddle's baseline leaves free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlace.cli import main
from interlace.config import Beyond, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import BudgetError
from interlace.ir import save
from interlace.planning import room
from interlace.planning.outcome import Pools
from interlace.planning.plan import Plan, make_plans, read_record
from interlace.planning.room import more_bytes, use_room
from interlace.report.checks import EVERYTHING, OFFLOAD, OVERLAP, Check, Examination
from interlace.report.needs import needs_of
from tests.strategies import World, programs

pytestmark = pytest.mark.usefixtures("few_forms")

TWO = programs(World(pp=2, micro_batches=4, layers=2, schedule="1F1B"))
COSTS = CostModel(load_profile("h200"))
RULES = (
    Check("jobs", "events order them", "they do", "holds", (EVERYTHING,)),
    Check("named streams", "side by side", "one after another", "fails", (OVERLAP, OFFLOAD)),
    Check("collectives", "side by side", "there is one rank", "not checked", (OVERLAP,)),
)


def test_rules_that_a_plan_needs_and_no_others() -> None:
    config = make_config({"schedule_1f1b": {"interleave": "mixed"}})
    plans = make_plans(TWO, config, COSTS, "h200")
    outcome = plans[0].outcome
    assert outcome is not None
    found = Examination("a GPU", "gpu", {}, RULES, "h200", 100 * outcome.plan.peak_bytes)
    rows = {each.rule: each for each in needs_of(plans, config, found)}
    assert (rows["every plan"].verdict, rows["every plan"].found) == ("holds", "1 of 1 rules hold")
    overlap = rows["overlap on named streams"]
    assert (overlap.verdict, overlap.found) == ("fails", "0 of 2 rules hold; fails: named streams; not checked: collectives")
    assert "name_streams: " in overlap.expected
    assert "offload" not in rows, "the plan moves nothing"
    assert rows["device memory"].verdict == "holds"
    for total_bytes, verdict in ((outcome.plan.peak_bytes, "fails"), (0, "holds")):  # the profile knows its own
        row = needs_of(plans, config, msgspec.structs.replace(found, memory_bytes=total_bytes))[-1]
        assert (row.rule, row.verdict) == ("device memory", verdict), row
    moving = make_config({"offload_activations": {"fraction": 0.5, "min_bytes": 0}, "schedule_1f1b": {"interleave": "mixed"}})
    assert "offload" in {each.rule for each in needs_of(make_plans(TWO, moving, COSTS, "h200"), moving, found)}


def faster(plans: list[Plan]) -> list[Plan]:
    """As if the step were shorter by half."""
    import dataclasses

    (outcome,) = {each.outcome for each in plans}
    assert outcome is not None
    quick = msgspec.structs.replace(outcome, plan=msgspec.structs.replace(outcome.plan, step_ns=outcome.plan.step_ns // 2))
    return [dataclasses.replace(each, outcome=quick) for each in plans]


def test_memory_that_the_device_has_is_used_where_tune_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_plans(TWO, make_config({}), COSTS, "h200")
    asked: list[object] = []

    def made(programs: object, config: object, *rest: object) -> list[Plan]:
        asked.append(config)
        return faster(plain)

    monkeypatch.setattr(room, "make_plans", made)
    for options, said in (
        ({"tune": "off"}, ""),
        ({"tune": "on", "memory_budget": "1GB"}, ""),
        ({"tune": "on", "memory_budget": "off"}, ""),
        ({"tune": "on", "schedule_1f1b": {"interleave": "mixed"}}, ""),
        ({}, "`tune: on` also plans with a tenth more"),
    ):
        assert use_room(TWO, make_config(options), COSTS, "h200", plain)[0] is plain
        assert said in use_room(TWO, make_config(options), COSTS, "h200", plain)[1]
    assert asked == []
    found, told = use_room(TWO, make_config({"tune": "on"}), COSTS, "h200", plain)
    assert found[0].outcome == faster(plain)[0].outcome
    assert "50.0% faster" in told
    (more,) = asked
    tenth = int(0.1 * plain[0].outcome.before.peak_bytes)  # type: ignore[union-attr]
    assert more == msgspec.structs.replace(make_config({"tune": "on"}), memory_budget=Beyond(tenth))
    assert f"memory_budget: +{tenth}B" in told
    use_room(TWO, make_config({"tune": "on", "memory_budget": "+1000B"}), COSTS, "h200", plain)
    assert asked[1].memory_budget == Beyond(tenth + 1000)  # type: ignore[attr-defined]
    full = CostModel(msgspec.structs.replace(COSTS.profile, memory_bytes=plain[0].outcome.before.peak_bytes))  # type: ignore[union-attr]
    found, told = use_room(TWO, make_config({"tune": "on"}), full, "h200", plain)
    assert found is plain
    assert "a plan that holds a tenth more would take more than" in told
    monkeypatch.setattr(room, "make_plans", lambda *_: with_pools(faster(plain), COSTS.profile.memory_bytes))
    found, told = use_room(TWO, make_config({"tune": "on"}), COSTS, "h200", plain)
    assert found is plain
    assert "more takes 139.801 GiB" in told

    def refused(*_: Any) -> list[Plan]:
        raise BudgetError("pools of 9")

    monkeypatch.setattr(room, "make_plans", refused)
    found, told = use_room(TWO, make_config({"tune": "on"}), COSTS, "h200", plain)
    assert found is plain
    assert told.endswith("more: pools of 9")


def with_pools(plans: list[Plan], size_bytes: int) -> list[Plan]:
    """As if their pools took so much, and those of the baseline three bytes."""
    import dataclasses

    outcome = msgspec.structs.replace(plans[0].outcome, pools=Pools(size_bytes, 3))
    return [dataclasses.replace(each, outcome=outcome) for each in plans]


def test_what_a_plan_takes_more_is_that_of_its_pools() -> None:
    """Where pools are not simulated, twice the difference of the peaks."""
    (plan, *_) = with_pools(make_plans(TWO, make_config({}), COSTS, "h200"), 10)
    outcome = plan.outcome
    assert outcome is not None
    assert outcome.before is not None
    assert more_bytes(outcome) == 7
    unknown = msgspec.structs.replace(outcome, pools=None)
    assert more_bytes(unknown) == 2 * (outcome.plan.peak_bytes - outcome.before.peak_bytes)
    assert more_bytes(msgspec.structs.replace(unknown, before=None)) == 0


@pytest.mark.slow
def test_the_command_says_what_it_does_with_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan that is taken is never slower, and its record has the memory that it may hold more."""
    for program in TWO:
        save(program, tmp_path / "dumps" / f"rank{program.rank}.ilp")
    (tmp_path / "on.yaml").write_text("tune: on\n")
    steps = []
    for name, words in (("auto", []), ("on", ["--config", str(tmp_path / "on.yaml")])):
        assert main(["plan", str(tmp_path / "dumps"), *words, "-o", str(tmp_path / name)]) == 0
        assert "NVIDIA H200 has 139.801 GiB, of which Paddle's baseline takes" in capsys.readouterr().out
        record = read_record(tmp_path / name / "rank0.ilp")
        assert record.outcome is not None
        steps.append((record.outcome.plan.step_ns, record.extra_bytes))
    (before, none), (after, more) = steps
    assert not none
    assert (after < before) == bool(more)
    assert after <= before
