"""One rank of each stage for all of it: planned, proved and timed as the whole world is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from interlace import installed
from interlace.cli import dump, main
from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.errors import ProgramError
from interlace.ir import Group, Pipeline, Program, load, parse, save, show, verify
from interlace.ir.difference import first_unlike
from interlace.ir.dump import find_dumps
from interlace.ir.equivalent_ranks import equivalence_key, missing_ranks, representatives, seats, with_given_partners
from interlace.ir.target import CPU
from interlace.local.stages import require_alike, stages_of
from interlace.planning.plan import make_plans
from interlace.scheduler.hazards import check
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from tests.strategies import World, plan, programs, worlds

pytestmark = pytest.mark.usefixtures("few_forms")

COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})


def firsts(every: Sequence[Program]) -> list[Program]:
    """What `dump --stages` makes of a world's programs."""
    return [msgspec.structs.replace(every[ranks[0]], equivalent_ranks=tuple(ranks[1:])) for ranks in stages_of(every[0])]


def steps(given_: Sequence[Program]) -> dict[int, int]:
    found = simulate(given_, COSTS, Options(representative=representatives(given_)), with_memory=False)
    return {rank.rank: rank.step_ns for rank in found.ranks}


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(worlds(max_pp=3, max_dp=2, max_micro_batches=3, max_layers=2, schedule="1F1B"))
def test_stages_are_planned_and_timed_as_their_whole_world(world: World) -> None:
    config = make_config({"schedule_1f1b": {"search": False}, "offload_activations": {"fraction": 0.5, "min_bytes": 1}})
    every = programs(world)
    whole = [each.program for each in make_plans(every, config, COSTS, "given")]
    some = [each.program for each in make_plans(firsts(every), config, COSTS, "given")]
    assert [msgspec.structs.replace(each, equivalent_ranks=()) for each in some] == [whole[each.rank] for each in some]
    assert [each.equivalent_ranks for each in some] == [each.equivalent_ranks for each in firsts(every)]
    assert check(some) == check(whole) == []
    assert steps(some).items() <= steps(whole).items()


def test_ranks_of_a_stage_are_alike_and_those_of_two_are_not() -> None:
    every = programs(World(pp=2, mp=2, dp=2, micro_batches=2))
    assert {first_unlike(one, other) for one in every[:4] for other in every[:4]} == {""}
    require_alike(every[4], every[7])
    with pytest.raises(ProgramError, match="ranks 3-4 of stage 0 are not equivalent: pipeline, stage: found 1, expected 0"):
        require_alike(every[3], every[4])
    other = every[3].with_ops(every[3].ops[:-1])
    with pytest.raises(ProgramError, match=r"ranks 0, 3 of stage 0 are not equivalent: number of operations: .*; dump all ranks"):
        require_alike(every[0], other)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks that `interlace dump` built; each has the program of a small world at once, in which rank 3 has a layer more."""
    ranks: list[int] = []
    every = programs(World(pp=4, mp=2, micro_batches=2))
    every[3] = programs(World(pp=4, mp=2, micro_batches=2, layers=2))[3]

    def build(args: Any, wanted: Sequence[int], folder: Path, alive: Any, *count: int, **total: Any) -> Iterator[dict[str, Any]]:
        for rank in reversed(wanted):
            ranks.append(rank)
            save(every[rank], folder / f"rank{rank}.ilp")
            yield {"rank": rank}

    monkeypatch.setattr(dump, "build_ranks", build)
    monkeypatch.setattr(installed, "require_paddle", lambda: None)
    return ranks


def test_a_dump_of_stages_builds_as_many_ranks(built: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", __file__, "--world", "8", "--stages", "-o", str(tmp_path)]) == 0
    assert sorted(built) == [0, 2, 4, 6]
    assert [(each.rank, each.equivalent_ranks) for each in map(load, find_dumps([tmp_path]))] == [
        (0, (1,)),
        (2, (3,)),
        (4, (5,)),
        (6, (7,)),
    ]
    assert "4 programs in " in (told := capsys.readouterr().out)
    assert "one for each stage of 2 ranks; whether the ranks of a stage are equivalent was not checked (--compare does)" in told


def test_ranks_of_a_stage_that_differ_are_told(built: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", __file__, "--world", "8", "--stages", "--compare", "-o", str(tmp_path / "out")]) == 2
    assert "ranks 2-3 of stage 1 are not equivalent: w1: found " in capsys.readouterr().err
    assert sorted(built) == list(range(8))
    assert not (tmp_path / "out").exists()


def test_commands_take_stages_for_the_whole_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program in firsts(programs(World(pp=2, mp=2, dp=2, micro_batches=4))):
        save(program, tmp_path / "dumps" / f"rank{program.rank}.ilp")
    folder = str(tmp_path / "plan")
    assert main(["plan", str(tmp_path / "dumps"), "-o", folder]) == 0
    assert "ranks 0-7 of 8, 2 of 2 stages" in capsys.readouterr().out
    assert main(["check", folder]) == 0
    assert "8 of 8 ranks" in capsys.readouterr().out
    assert main(["timeline", folder, "-o", str(tmp_path / "trace.json")]) == 0
    told = capsys.readouterr()
    assert "  4-7  plan " in told.out
    assert "taken to be ready" not in told.err
    assert main(["report", folder, "-o", str(tmp_path / "report.html")]) == 0
    assert main(["show", str(tmp_path / "plan" / "rank4.ilp"), "--before-after", "schedule_1f1b"]) == 0


def test_what_stages_do_to_each_other_is_still_found() -> None:
    """The last stage sends its gradients in another order than the first takes them: wrong with one rank a stage as with all."""
    every = plan(World(pp=2, mp=2, dp=2, micro_batches=3, schedule="FThenB"))
    backwards = [k for k, job in enumerate(every[4].jobs) if job.kind == "backward"]
    for rank in range(4, 8):
        jobs = list(every[rank].jobs)
        jobs[backwards[0]], jobs[backwards[1]] = jobs[backwards[1]], jobs[backwards[0]]
        every[rank] = msgspec.structs.replace(every[rank], jobs=tuple(jobs))
    assert {each.kind for each in check(firsts(every))} == {each.kind for each in check(every)} != set()


def test_a_partner_that_is_not_given_is_replaced_by_its_representative() -> None:
    def program(rank: int, stage: int, *groups: Group) -> Program:
        return Program((), (), groups, Pipeline(stage, 2), rank, 8, equivalent_ranks=tuple(range(rank + 1, rank + 4)))

    crossing, within, both = Group(1, (0, 6)), Group(2, (0, 1)), Group(3, (0, 1, 4, 5))
    first, last = with_given_partners([program(0, 0, crossing, within, both), program(4, 1, Group(9, (2, 4)))])
    assert [group.ranks for group in first.groups] == [(0, 4), (0, 1), (0, 1, 4, 5)]
    assert [group.ranks for group in last.groups] == [(0, 4)]


def test_whose_ranks_are_given() -> None:
    every = programs(World(pp=2, mp=2, micro_batches=2))
    some = firsts(every)
    assert (representatives(some), missing_ranks(some), seats(some)) == ({1: 0, 3: 2}, [], [0, 0, 1, 1])
    assert (missing_ranks(some[:1]), seats(some[:1]), seats(every)) == ([2, 3], None, [0, 1, 2, 3])
    with pytest.raises(ProgramError, match="rank 1 is given twice, in the dumps of ranks 0 and 1"):
        seats([*some, every[1]])


def test_a_program_that_stands_for_others_is_stored_whole() -> None:
    some = firsts(programs(World(pp=2, mp=2, micro_batches=2)))[1]
    assert parse(show(some)) == some
    for alike in ((3, 3), (2,), (1,), (4,)):
        with pytest.raises(ProgramError, match="rank 2 stands for"):
            verify(msgspec.structs.replace(some, equivalent_ranks=alike))


def test_stages_that_nobody_tells_are_refused() -> None:
    one = programs(World(pp=2, micro_batches=2))[0]
    with pytest.raises(ProgramError, match="5 ranks do not divide into 2 stages"):
        stages_of(msgspec.structs.replace(one, world=5))
    with pytest.raises(ProgramError, match=r"#\d+ pd_op.send_v2 to or from a rank of its own stage 0 of 1.*pipeline.enable"):
        stages_of(msgspec.structs.replace(one, pipeline=Pipeline()))


def test_ranks_of_a_stage_that_do_other_things_are_simulated_each() -> None:
    """A mesh of stages without a pipeline schedule: all ranks are of one stage as Paddle counts, and send to each other."""
    accumulated = Pipeline(num_micro_batches=2, schedule="accumulate")
    world = World(pp=3, mp=2, micro_batches=2, schedule="FThenB", streams=True)
    every = [msgspec.structs.replace(each, pipeline=accumulated) for each in programs(world)]
    assert len({equivalence_key(each) for each in every}) == len(every)
    plans = make_plans(every, make_config({}), COSTS, "given")
    assert check([each.program for each in plans], CPU) == []
    assert "baseline-kept" in [each.rule for report in plans[0].reports for each in report.remarks]
    uneven = programs(World(pp=2, mp=2, micro_batches=2))
    uneven[1] = uneven[1].with_ops([msgspec.structs.replace(op, layer=f"{op.layer}.other") for op in uneven[1].ops])
    assert [equivalence_key(each) == equivalence_key(uneven[0]) for each in uneven] == [True, False, False, False]
    assert equivalence_key(uneven[2]) == equivalence_key(uneven[3])
