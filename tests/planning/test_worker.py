"""What a rank knows already is not made again, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.errors import PassError
from interlace.ir import Program
from interlace.passes import Pass, Pipeline
from interlace.passes.base import REGISTRY, Context, register
from interlace.planning.processes import world_of
from interlace.planning.worker import LIMITED, Worker
from interlace.planning.world import World
from interlace.scheduler.memory.live import order_peak
from interlace.scheduler.offload.measures import COPY_BACK
from tests.scheduler.updated import LAYERS, trained

COSTS = GivenCosts({"copy": 40, "default": 10})
OPTIONS = {"memory_budget": "1GB", "schedule_1f1b": {"interleave": "off"}, "offload_optimizer_state": {"min_bytes": 64}}


def test_what_is_moved_follows_the_limit() -> None:
    """The same passes on the same program with less and less room."""
    program = trained()
    kept = order_peak(Pipeline((make_config(OPTIONS).passes["schedule-1f1b"],)).run(program, COSTS)[0])

    def moved(world: World, limit: int) -> int:
        made = world.run(make_config(OPTIONS).pipeline(), (limit,))
        return sum(op.name == COPY_BACK for op in worker.programs[made.programs[0]].ops)

    worker = Worker(program, COSTS)
    with world_of([worker], [0]) as world:
        assert [moved(world, kept - k * 1024) for k in range(3)] == [0, 1, 2]
        assert moved(world, 1) == LAYERS


def test_passes_that_look_at_the_limit_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the others make it is not kept with which limit."""
    looking, read = list[Pass](), set[str]()

    class Noted(Context):
        """Says which pass asks for more than whether there is a limit."""

        def __getattribute__(self, name: str) -> object:
            if name == "memory_limit" and looking:
                read.add(looking[-1].decides)
            return super().__getattribute__(name)

    for kind in {type(each) for each in make_config(OPTIONS).pipeline().passes}:

        def run(self: Pass, program: object, context: Context, own: object = kind.run) -> object:
            looking.append(self)
            noted = Noted(**{name: getattr(context, name) for name in Context.__slots__})
            made = own(self, program, noted)  # type: ignore[operator]
            looking.pop()
            context.remarks[:] = noted.remarks
            return made

        monkeypatch.setattr(kind, "run", run)
    Pipeline(make_config(OPTIONS).pipeline().passes).run(trained(), COSTS, 1 << 20)
    assert read - {"schedule"} == set(LIMITED)  # a schedule asks only whether there is one


def test_a_schedule_without_a_limit_is_not_taken_for_one_within_a_limit() -> None:
    """A schedule may hold a little more where nothing limits it: ranks that saw it without a limit and ranks that did not agree."""
    worker = Worker(trained(), COSTS)
    pipeline = make_config(OPTIONS | {"schedule_1f1b": {"interleave": "mixed"}}).pipeline()
    with world_of([worker], [0]) as world:
        for limit in (None, 1 << 40, 1 << 41):
            world.run(pipeline, (limit,))
    assert [step.report.name for step in worker.steps].count("schedule-1f1b") == 2


def test_equal_parts_of_programs_are_shared() -> None:
    """Tables that follow from operations or jobs are made once, whichever passes made these."""
    worker, passes = Worker(trained(), COSTS), make_config(OPTIONS).passes
    split, schedule = passes["split-backward"], passes["schedule-1f1b"]
    with world_of([worker], [0]) as world:
        made = [world.run(Pipeline(each), (1 << 40,)) for each in ((split, schedule), (passes["narrow-gathers"], split, schedule))]
    one, other = (worker.programs[each.programs[0]] for each in made)
    assert one.passes != other.passes
    assert one.ops is other.ops
    assert one.jobs is other.jobs


def test_what_raised_is_not_taken_for_what_ran_after_it(own: type[Pass]) -> None:
    """A pass that refuses a program refuses it again."""
    worker, refuses, runs = Worker(trained(), COSTS), Pipeline((own(refuses=True),)), Pipeline((own(),))
    with world_of([worker], [0]) as world:
        for _ in range(2):
            with pytest.raises(PassError, match="refused"):
                world.run(refuses, (None,))
            world.run(runs, (None,))


@pytest.fixture
def own() -> Iterator[type[Pass]]:
    """A user's pass that refuses programs where it is asked to."""

    @register
    class Picky(Pass, frozen=True, kw_only=True):
        name = "picky"
        refuses: bool = False

        def run(self, program: Program, context: Context) -> Program:
            if self.refuses:
                raise PassError("refused")
            return program

    yield Picky
    del REGISTRY[Picky.name]
