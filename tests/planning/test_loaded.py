"""Plans that are loaded: what was written comes back, and what was made for another run is refused on every rank alike."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlace.config import make_config
from interlace.cost_model import CostModel, GivenCosts, load_profile
from interlace.errors import ConfigError, LoadError
from interlace.ir import Program, load, save
from interlace.local.stages import stages_of
from interlace.planning import loaded as loading
from interlace.planning.loaded import load_plan, require_ranks
from interlace.planning.peers import Peers
from interlace.planning.plan import Plan, make_plans
from interlace.planning.worker import Worker
from interlace.report.plan import PlanReport
from interlace.scheduler.hazards import check
from tests.interpreter import assert_same
from tests.strategies import World, programs
from tests.together import in_threads

WORLD = World(pp=2, mp=2, micro_batches=4)
COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})


def written(folder: Path, given: Sequence[Program], form: str = "dx-first") -> list[Plan]:
    config = make_config({"schedule_1f1b": {"interleave": form, "only_gains": False, "search": False}})
    plans = make_plans(given, config, COSTS, "h200")
    for plan in plans:
        plan.dump(folder)
    return plans


def loaded(folder: Path, given: Sequence[Program]) -> list[Plan]:
    return in_threads(lambda program, peers: load_plan(folder, program, peers), given)


def refusals(folder: Path, given: Sequence[Program]) -> set[str]:
    """What each rank says; all of them refuse."""

    def refused(program: Program, peers: Peers) -> str:
        with pytest.raises(LoadError) as told:
            load_plan(folder, program, peers)
        return str(told.value)

    return set(in_threads(refused, given))


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    given = programs(WORLD)
    made, found = written(tmp_path, given), loaded(tmp_path, given)
    assert [plan.program for plan in found] == [plan.program for plan in made]
    assert [plan.fingerprint() for plan in found] == [plan.fingerprint() for plan in made]
    assert {plan.set_digest for plan in found} == {made[0].set_digest} != {""}
    assert f"loaded from {tmp_path}" in PlanReport(found[0]).explain()
    for plan in found:
        plan.dump(tmp_path / "again")
    assert loaded(tmp_path / "again", given)[1].program == made[1].program


def test_another_program_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    written(tmp_path, programs(WORLD))
    (told,) = refusals(tmp_path, programs(World(pp=2, mp=2, micro_batches=5)))
    assert "rank 0: " in told
    assert "made for another program: pipeline, num micro batches: found 5, expected 4" in told
    assert "dump and plan the script again" in told


def test_one_rank_with_another_program_stops_all(tmp_path: Path) -> None:
    given = programs(WORLD)
    written(tmp_path, given)
    given[2] = given[2].with_ops(given[2].ops[:-1])
    (told,) = refusals(tmp_path, given)
    assert told.startswith("rank 2: ")
    assert "number of operations" in told


def test_a_rank_that_the_folder_lacks_is_named(tmp_path: Path) -> None:
    given = programs(WORLD)
    written(tmp_path, given)
    (tmp_path / "rank2.ilp").unlink()
    (told,) = refusals(tmp_path, given)
    assert "rank 2: " in told
    assert "no plan of rank 2 (there: ranks 0-1, 3); expected a plan of every rank of the run" in told
    with pytest.raises(LoadError, match=r"no plan of ranks 2, 4-5 \(there: ranks 0-1, 3\)"):
        require_ranks(tmp_path, 6)


def of_stages(folder: Path, world: World = WORLD) -> list[Program]:
    """Plans of one rank of each stage; gives the programs of all ranks."""
    given = programs(world)
    firsts = [msgspec.structs.replace(given[ranks[0]], equivalent_ranks=tuple(ranks[1:])) for ranks in stages_of(given[0])]
    options = {"schedule_1f1b": {"search": False}, "offload_activations": {"fraction": 0.5, "min_bytes": 1}}
    for plan in make_plans(firsts, make_config(options), CostModel(load_profile("h200")), "h200"):
        plan.dump(folder)
    return given


def test_plans_of_stages_are_made_again_for_every_rank(tmp_path: Path) -> None:
    """Each rank has its own groups and its stage's jobs; what it dumps is loaded like any plan of all ranks."""
    given = of_stages(tmp_path)
    require_ranks(tmp_path, len(given))
    found = loaded(tmp_path, given)
    for plan, program in zip(found, given, strict=True):
        stage = load(tmp_path / f"rank{program.rank // 2 * 2}.ilp")
        assert plan.captured == program
        assert (plan.program.rank, plan.program.equivalent_ranks, plan.program.groups) == (program.rank, (), program.groups)
        assert (plan.program.jobs, plan.program.events) == (stage.jobs, stage.events)
        plan.dump(tmp_path / "again")
    assert check([plan.program for plan in found]) == []
    assert_same(given, [plan.program for plan in found])
    assert [plan.program for plan in loaded(tmp_path / "again", given)] == [plan.program for plan in found]


def test_a_rank_that_is_unlike_its_stage_is_refused(tmp_path: Path) -> None:
    given = of_stages(tmp_path)
    given[3] = given[3].with_ops(given[3].ops[:-1])
    (told,) = refusals(tmp_path, given)
    assert told.startswith(f"rank 3: the plan in {tmp_path} was made for another program: number of operations")
    with pytest.raises(LoadError, match=r"no plan of ranks 4-5 \(there: ranks 0-3\)"):
        require_ranks(tmp_path, 6)


def test_a_rank_that_comes_to_another_plan_than_its_stage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = of_stages(tmp_path)
    decide = loading.decide

    def unlike(worker: Worker, *args: Any) -> tuple[int, ...]:
        numbers: tuple[int, ...] = decide(worker, *args)
        if worker.seat == 1:
            made = worker.programs[numbers[1]]
            worker.programs[numbers[1]] = msgspec.structs.replace(made, jobs=made.jobs[:-1])
        return numbers

    monkeypatch.setattr(loading, "decide", unlike)
    (told,) = refusals(tmp_path, given)
    assert told.startswith(f"rank 1: the plan of rank 0 in {tmp_path}, which stands for this one, comes out otherwise here: job ")
    assert "found no job, expected pair_" in told  # the last gradients and the optimizer
    assert told.endswith("plan the dumps of all ranks, without --stages")


def test_plans_of_different_sets_are_refused(tmp_path: Path) -> None:
    """All of rank 3's files are from another time: another form of the same program."""
    given = programs(WORLD)
    written(tmp_path / "one", given)
    written(tmp_path / "other", given, "mixed")
    for file in ("rank3.ilp", "captured/rank3.json", "captured/rank3.ilp"):
        shutil.copy(tmp_path / "other" / file, tmp_path / "one" / file)
    assert refusals(tmp_path / "one", given) == {
        f"{tmp_path / 'one'}: the plans of ranks 0 and 3 were not made together; expected those of one `interlace plan`"
    }


def test_ranks_that_were_planned_alone_are_refused(tmp_path: Path) -> None:
    given = programs(World(mp=2, micro_batches=4, schedule="accumulate"))
    for program in given:
        written(tmp_path, [program])
    (told,) = refusals(tmp_path, given)
    assert "ranks 0 and 1 were not made together" in told


def test_a_plan_that_was_changed_is_refused(tmp_path: Path) -> None:
    given = programs(WORLD)
    written(tmp_path, given)
    plan = load(tmp_path / "rank1.ilp")
    save(msgspec.structs.replace(plan, jobs=plan.jobs[::-1]), tmp_path / "rank1.ilp")
    (told,) = refusals(tmp_path, given)
    assert "rank 1: " in told
    assert "not the plan that its record" in told
    (tmp_path / "captured" / "rank1.json").unlink()
    (told,) = refusals(tmp_path, given)
    assert told.startswith("rank 1: ")
    assert "no plan with its record" in told


def test_what_a_plan_says_already_cannot_be_asked_for_beside_it(tmp_path: Path) -> None:
    assert make_config({"plan": str(tmp_path), "dump": "x", "check": "off"}).active
    assert not make_config({"plan": str(tmp_path), "enable": "off"}).active
    for more in ({"schedule_1f1b": "on"}, {"device": "h200"}, {"offload_activations": {"fraction": 1}}, {"a_pass_of_ones_own": "on"}):
        with pytest.raises(ConfigError, match=f"{next(iter(more))}: beside plan: .* would do nothing"):
            make_config({"plan": str(tmp_path), **more})
    with pytest.raises(ConfigError, match=r"plan: no folder /.*/absent; expected one with a plan of each rank"):
        make_config({"plan": "absent"})
