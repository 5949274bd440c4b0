"""Missing orders, one of each class of the checker, planted into real plans: refused by the checker, and wrong when they run.

Each fault comes as two worlds, one safe and one without a single order. What the checker says of the broken one names the work that
may come too late; that work is delayed. The safe one must then give the baseline's bits and the broken one must not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from interlace.ir import Program, load
from interlace.ir.target import Target
from interlace.local.launch import LaunchResult, launch
from interlace.scheduler.hazards import Finding, check
from interlace.user_passes import VARIABLE as IMPORT_VARIABLE
from testbed import shrink
from testbed.delays import Site, show_sites
from tests.testbed.faults import FAULTS, Fault
from tests.testbed.tasks import NUM_STEPS, VARIABLE, Done, Front, Task
from tests.testbed.trained import ALL
from tests.testbed.variant import need_ranks, switches
from tests.training.cases import EXAMPLES

pytestmark = pytest.mark.paddle
ROOT = Path(__file__).resolve().parents[2]
BASES = {"pp2": ("mixed", ("--pp", "2", "--clip-grad", "1")), "mp2": ("dx-first", ("--mp", "2", "--schedule", "1F1B"))}
SIZE = ("--layers", "2", "--micro-batches", "4", "--steps", str(NUM_STEPS + 1))
DELAY_US = 200_000
TURNS = {"copy": 6000, "collective": 20000, "compute": 2000}
"""Kind of work -> by how many microseconds each piece of that kind is delayed, once in some runs (`runs`)."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault in a base's plans: the safe world, the broken one, what the checker says of both, and what came out of training."""

    fault: Fault
    safe: list[Program]
    broken: list[Program]
    safe_findings: list[Finding]
    findings: list[Finding]

    def fronts(self) -> tuple[Front, ...]:
        """A delay in front of what the checker says may come too late."""
        late = next(finding for finding in self.findings if finding.kind != "event-order").items[0]
        return (Front(late.rank, (late.op, late.micro_batch), DELAY_US),) if self.fault.delayed else ()


@dataclass(frozen=True, slots=True)
class Ran:
    """Unmodified Paddle's run of a base, the planted faults, and by task what each rank found."""

    baseline: list[Done]
    planted: dict[str, Planted]
    done: dict[str, list[Done]]


@pytest.fixture(scope="module")
def pp2(plugin: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Ran:
    """All faults of a pipeline, in one run of its ranks."""
    return _train("pp2", tmp_path_factory.mktemp("pp2"), runs(pytestconfig))


@pytest.fixture(scope="module")
def mp2(plugin: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Ran:
    """The same of two tensor-parallel ranks."""
    return _train("mp2", tmp_path_factory.mktemp("mp2"), runs(pytestconfig))


def runs(config: pytest.Config) -> int:
    """In how many runs all pieces of a kind of work are delayed together; more, with fewer pieces in each, in `make test-long`."""
    return 4 if config.getoption("--long") else 2


def _train(base: str, folder: Path, num_runs: int) -> Ran:
    from testbed.target import RULES

    need_ranks(2)
    form, args = BASES[base]
    config, baseline = folder / "plan.yaml", folder / "baseline"
    config.write_text(ALL.format(form=form) + f"dump: {folder / 'plan'}\n")
    baseline.mkdir()
    (baseline / "tasks.json").write_bytes(msgspec.json.encode([Task("baseline")]))
    _launch(
        baseline, args, INTERLACE_DISABLE="1", TESTBED_SWITCHES=switches("record=2")
    )  # clipping over stages is unsafe in the baseline's plan
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_launch, folder, args, INTERLACE_CONFIG=os.fspath(config))
        plans: list[Program] = []
        planted: dict[str, Planted] = {}
        try:
            plans = _plans(folder / "plan", running)
            planted = _plant(base, plans, RULES)
        finally:
            tasks = _tasks(folder, planted, plans, num_runs)
            (folder / "part").write_bytes(msgspec.json.encode(tasks))
            (folder / "part").rename(folder / "tasks.json")
        running.result()
    return Ran(_done(baseline)["baseline"], planted, _done(folder))


def _launch(folder: Path, args: Sequence[str], **variables: str) -> LaunchResult:
    path = os.pathsep.join([os.fspath(ROOT), os.fspath(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    env = {"INTERLACE_TARGET": "testbed", "GLOG_minloglevel": "2", VARIABLE: os.fspath(folder), "PYTHONPATH": path, **variables}
    return launch(Path(__file__).with_name("planted.py"), [*SIZE, *args], 2, env, None, folder / "logs", 60.0)


def _done(folder: Path) -> dict[str, list[Done]]:
    ranks = [msgspec.json.decode((folder / f"done{rank}.json").read_bytes(), type=list[Done]) for rank in range(2)]
    return {found[0].name: list(found) for found in zip(*ranks, strict=True)}


def _plans(folder: Path, running: Future[LaunchResult]) -> list[Program]:
    """What the ranks planned, as soon as both have."""
    files = [folder / f"rank{rank}.ilp" for rank in range(2)]
    while not all(file.exists() for file in files):
        if running.done():
            running.result()
        time.sleep(0.02)
    return [load(file) for file in files]


def _plant(base: str, plans: list[Program], target: Target) -> dict[str, Planted]:
    found = {}
    for name, fault in FAULTS.items():
        if fault.base == base:
            safe, broken = fault.plant(plans, lambda world: check(world, target))
            found[name] = Planted(fault, safe, broken, check(safe, target), check(broken, target))
    return found


def _tasks(folder: Path, planted: dict[str, Planted], plans: list[Program], num_runs: int) -> list[Task]:
    """The plan itself first, under delays in turn, then each fault's two worlds; equal ones follow each other, as ranks build them once."""
    turns = [(kind, k, num_runs, us) for kind, us in TURNS.items() for k in range(num_runs)]
    tasks = [Task(f"{turn[0]} {turn[1]}", turns=turn) for turn in turns] if planted else []
    stored: list[tuple[list[Program], str]] = [(plans, "")]
    for name, each in planted.items():
        for which, world in (("safe", each.safe), ("broken", each.broken)):
            place = next((place for known, place in stored if known == world), None)
            if place is None:
                place = os.fspath(folder / name.replace(" ", "_") / which)
                _store(world, Path(place))
                stored.append((world, place))
            tasks.append(Task(f"{name}, {which}", place, each.fronts(), each.fault.switches, each.fault.fetch))
    places = [place for _, place in stored]
    return sorted(tasks, key=lambda task: places.index(task.plans))


def _store(world: Sequence[Program], folder: Path) -> None:
    folder.mkdir(parents=True)
    for program in world:
        (folder / f"rank{program.rank}").write_bytes(msgspec.msgpack.encode(program))


def is_same(done: Sequence[Done], baseline: Sequence[Done]) -> bool:
    """Whether losses, where they were fetched, and all that lasts are the same, bit by bit."""
    return all(_is_rank_same(found, other) for found, other in zip(done, baseline, strict=True))


def _is_rank_same(found: Done, baseline: Done) -> bool:
    fetched = all(loss in ("", other) for loss, other in zip(found.losses, baseline.losses, strict=False))
    return fetched and not found.error and baseline.lasting.items() <= found.lasting.items()


@pytest.mark.parametrize("name", FAULTS)
def test_a_missing_order_is_refused_and_gives_wrong_numbers(request: pytest.FixtureRequest, name: str) -> None:
    """No races, no deadlock."""
    ran: Ran = request.getfixturevalue(FAULTS[name].base)
    planted, safe, broken = ran.planted[name], ran.done[f"{name}, safe"], ran.done[f"{name}, broken"]
    assert planted.safe_findings == []
    assert planted.fault.kind in {finding.kind for finding in planted.findings}
    assert is_same(safe, ran.baseline), "the safe plan under the same delay"
    if planted.fault.kind == "read-before-write":
        assert all("should exist" in each.error for each in broken), "Paddle's executor itself refuses"
        return
    assert not is_same(broken, ran.baseline)
    assert sum(len(each.taken) for each in broken) == len(planted.fronts())


@pytest.mark.parametrize("kind", TURNS)
@pytest.mark.parametrize("base", BASES)
def test_every_piece_of_work_delayed_in_turn(request: pytest.FixtureRequest, base: str, kind: str) -> None:
    """No races."""
    ran: Ran = request.getfixturevalue(base)
    delayed = [ran.done[f"{kind} {k}"] for k in range(runs(request.config))]
    assert all(len(found.taken) > 3 for done in delayed for found in done)
    assert all(is_same(done, ran.baseline) for done in delayed)


@pytest.mark.long
def test_delays_shrink_to_the_one_that_shows_the_fault(pp2: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No races: over all ranks, through the command. (`test_switches.py` shrinks delays in one process.)

    The receive that nobody waits for is delayed by far more than a busy machine takes to come to its reader, the other by less.
    """
    planted = pp2.planted["a receive without its wait"]
    _store(planted.broken, tmp_path / "plans")
    config, script, plant = tmp_path / "plan.yaml", os.fspath(EXAMPLES / "gpt.py"), os.fspath(Path(__file__).with_name("plant.py"))
    config.write_text(ALL.format(form=f"{BASES['pp2'][0]}, search: off") + f"check: off\nplant: {{folder: {tmp_path / 'plans'}}}\n")
    model = [*SIZE[:-2], *BASES["pp2"][1], "--steps", "2"]  # on a GPU the first step's launches load kernels, and wait
    env = {"INTERLACE_TARGET": "testbed", "INTERLACE_CONFIG": os.fspath(config), IMPORT_VARIABLE: plant}
    sites = _sites_around(shrink.Case(script, model, 2, env, 60.0), planted.fronts()[0], tmp_path)
    assert len({site.rank for site in sites}) == 2
    words = ["--world", "2", "--config", os.fspath(config), "--import", plant, "--delays", f"sites={show_sites(sites)}"]
    assert shrink.main([script, *words, "--", *model]) == 0
    *found, again = capsys.readouterr().out.splitlines()
    assert len(found) == 1, "on a busy machine the receive may come too late without its delay"
    assert all("_v2" in line for line in found)  # the send, or the receive, that comes too late
    assert "TESTBED_DELAYS=" in again


def _sites_around(case: shrink.Case, late: Front, folder: Path) -> list[Site]:
    """A long delay in front of what comes too late in the last step, and a short one at the other rank's end."""
    case.run("seed=1,permille=1000,max_us=1,kinds=collective", folder)
    sites = case.taken(folder)
    named = f"micro-batch {late.item[1]}, op #{late.item[0]}"
    own = [site for site in sites if site.rank == late.rank]
    target = max((site for site in own if named in case.labels[str(site)]), key=lambda site: site.ordinal)
    other = next(site for site in reversed(sites) if site.rank != late.rank)
    return [target._replace(us=1_000_000), other._replace(us=20_000)]
