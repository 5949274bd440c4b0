"""From a captured program to a plan, and its files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from interlace.config import Beyond, Config
from interlace.cost_model import CostModel, Costs, load_profile
from interlace.errors import PassError, PlanError
from interlace.files import read_file
from interlace.ir import Job, Program, load, save
from interlace.ir.dump import MOST_BYTES, SUFFIX, find_dumps, write_json
from interlace.ir.equivalent_ranks import seats
from interlace.passes import Pass, PassReport, Pipeline, find_pass
from interlace.passes.base import is_built_in
from interlace.planning.baseline import is_paddles_order
from interlace.planning.compare import Comparison, compare
from interlace.planning.finishing import planned_by_default, planned_within
from interlace.planning.limits import ROUNDED, budget_bytes
from interlace.planning.orders import captured_orders, require_one_order
from interlace.planning.outcome import MemoryLimit, Outcome
from interlace.planning.peers import Peers
from interlace.planning.pool_budget import within_pools
from interlace.planning.processes import dealt, world_of
from interlace.planning.search import Search
from interlace.planning.tasks import MemoryLimits, finish, finished_plan
from interlace.planning.tenth import gpu_peak, memory_limit
from interlace.planning.worker import Spec, Worker, digest_of, spec_of
from interlace.planning.world import Made, World, decide
from interlace.scheduler.hazards.pass_orders import Change

RECORD = 6
"""Version of the fields of `Record`; raised with every change of them. 6 has `Step.spare_ns`, 5 `pool_budget`, 4 `is_launched` and
`Outcome.refusal`, 3 `extra_bytes`, 2 remarks, 1 lines of text."""
READABLE = (3, 4, 5, RECORD)
"""Record versions that can be read; fields that a version lacks get their defaults."""


class _RecordHeader(msgspec.Struct, frozen=True):
    """The version of a record, decoded alone to give a clear error for an unknown one."""

    version: int = 1


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a plan was made, so that it can be made again: profile, options of each pass, their order, and what each did.

    Attributes:
        digest: Digest of the planned program.
        set_digest: Digest of the digests of all ranks that planned at the same time.
        captured_orders: The orders of communication calls before the first pass.
        outcome, memory_budget, memory_limit, extra_bytes, beside_baseline, is_launched, pool_budget: See `Plan`.
    """

    version: int
    profile: str
    options: dict[str, dict[str, Any]]
    order: tuple[str, ...]
    reports: tuple[PassReport, ...]
    digest: str = ""
    set_digest: str = ""
    outcome: Outcome | None = None
    memory_budget: int = 0
    memory_limit: int = 0
    extra_bytes: int = 0
    beside_baseline: bool = False
    captured_orders: tuple[Change, ...] = ()
    is_launched: bool = False
    pool_budget: int = 0

    def costs(self) -> CostModel:
        """The cost model with which the plan's step is simulated."""
        return costs_of(self.profile, self.is_launched)

    def passes(self, names: Sequence[str]) -> tuple[Pass, ...]:
        """The named passes with their options. Raises PlanError if a pass is not registered, or does not have these options."""
        try:
            return tuple(msgspec.convert(self.options[name], find_pass(name)) for name in names)
        except (KeyError, PassError, msgspec.ValidationError) as error:
            raise PlanError(
                f"its record holds no such options of a pass ({error}); plan again with this version, and register passes of "
                "your own first (--import MODULE)"
            ) from error


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one rank: its program with jobs, and the reasons for it.

    Attributes:
        captured: The program as Paddle built it.
        program: The program with its jobs.
        profile: Name of the device profile.
        why_off: Why Interlace left Paddle's plan as it is; empty if it planned.
        set_digest: Digest of the plans of all ranks that planned at the same time; equal on all of them, and on no others.
        loaded_from: The folder that it was read from; empty if it was made in this run.
        outcome: The simulated whole steps of Paddle's baseline and of this plan; None if other stages' plans are not known here, or a step
            would never end.
        compared: What was simulated for `outcome`; only on rank 0.
        memory_budget: Device bytes that no rank may exceed; 0 without a limit.
        memory_limit: `Context.memory_limit` of this rank; 0 for None. Also 0 if the plan made without a budget keeps it and is the fastest.
        extra_bytes: `Context.extra_bytes`.
        beside_baseline: Whether `memory_budget` is the peak of Paddle's baseline, because the user gave no budget.
        is_launched: Whether steps are captured and launched as a graph of the device, so that the host's time in a step is 0.
        pool_budget: Device bytes that allocator pools may take, if the user set a limit or the default one changed the plan; else 0.
    """

    captured: Program
    program: Program
    reports: tuple[PassReport, ...] = field(default=())
    profile: str = ""
    passes: tuple[Pass, ...] = ()
    why_off: str = ""
    set_digest: str = ""
    loaded_from: str = ""
    outcome: Outcome | None = None
    compared: Comparison | None = None
    memory_budget: int = 0
    memory_limit: int = 0
    extra_bytes: int = 0
    beside_baseline: bool = False
    is_launched: bool = False
    pool_budget: int = 0

    @property
    def asked_budget(self) -> int:
        """The user's memory budget in bytes; 0 if there is none."""
        return 0 if self.beside_baseline else self.memory_budget

    @classmethod
    def off(cls, why: str) -> Plan:
        """The plan of a model that Interlace leaves alone: no operations, no jobs, and the reason."""
        nothing = Program((), ())
        return cls(nothing, nothing, why_off=why)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Jobs in the order the executor runs them."""
        return self.program.jobs

    def dump(self, path: str | Path) -> list[Path]:
        """Write the planned program, the captured program, and the record to files below a folder; returns their paths."""
        if self.why_off:
            return []
        folder, name = Path(path), f"rank{self.program.rank}"
        record = folder / "captured" / f"{name}.json"
        write_json(record, self._record())
        return [save(self.program, folder / f"{name}{SUFFIX}"), save(self.captured, folder / "captured" / f"{name}{SUFFIX}"), record]

    def costs(self) -> CostModel:
        """The cost model with which its step is simulated."""
        return costs_of(self.profile, self.is_launched)

    def fingerprint(self) -> str:
        """Profile and options in one line; equal on ranks that plan alike."""
        return options_text(self.profile, self.passes)

    def is_paddles_order(self) -> bool:
        """Whether operations run unchanged and in Paddle's own order, so that comparing bits on CPU ranks would not test this plan."""
        return bool(self.jobs) and is_paddles_order(self.captured, self.program, CostModel(load_profile(self.profile)))

    def _record(self) -> Record:
        return Record(
            version=RECORD,
            options={each.name: msgspec.to_builtins(each) for each in self.passes},
            order=tuple(each.name for each in self.passes),
            digest=digest_of(self.program),
            captured_orders=captured_orders(self.captured),
            **{name: getattr(self, name) for name in RECORDED},
        )


RECORDED = (
    *("profile", "reports", "set_digest", "outcome", "memory_budget", "memory_limit"),
    *("extra_bytes", "beside_baseline", "is_launched", "pool_budget"),
)
"""Fields that a plan and its record share."""


def costs_of(profile: str, is_launched: bool) -> CostModel:
    """The cost model of a profile; with `is_launched` the host's times are 0."""
    return CostModel(load_profile(profile), is_launched=is_launched)


def options_text(profile: str, passes: Sequence[Pass]) -> str:
    """Profile and options in one line."""
    return msgspec.json.encode([profile, [[each.name, msgspec.to_builtins(each)] for each in passes]]).decode()


def digest_of_set(digests: Sequence[str]) -> str:
    """The digest of the plans of several ranks, from their digests in the order of ranks."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]


class Decided(msgspec.Struct, frozen=True):
    """What rank 0 decided for all ranks, which hold their finished plans already.

    Attributes:
        specs: The passes.
        memory_limits: `Context.memory_limit` of each rank.
        memory_budget, beside_baseline, set_digest, outcome, pool_budget: See `Plan`.
    """

    specs: tuple[Spec, ...]
    memory_limits: MemoryLimits
    memory_budget: int
    beside_baseline: bool
    set_digest: str
    outcome: Outcome | None
    pool_budget: int = 0


def make_plan(program: Program, config: Config, cost: Costs, profile: str, peers: Peers | None = None) -> Plan:
    """Plan a captured program; `peers` are the ranks of the run, which plan at the same time. The program is not changed. Raises
    InterlaceError if a pass cannot do what is asked."""
    worker, compared = worker_of(program, config, cost, profile, is_whole=peers is not None), list[Comparison | None]()

    def search(world: World) -> Decided:
        decided, found = decide_plans(world, config, profile)
        compared.append(found)
        return decided

    decided = decide(worker, peers, search, Decided)
    return taken(worker, decided, profile, worker.finished, next(iter(compared), None))


def make_plans(programs: Sequence[Program], config: Config, cost: Costs, profile: str, processes: int = 1) -> list[Plan]:
    """Plan captured programs; all ranks of a world together (some may stand for others), fewer each for itself. At most `processes` plan at
    once, copies of this one among which the stages are spread; the plans are the same. Raises InterlaceError where a pass cannot do what is
    asked."""
    places = seats(programs)
    if places is None:
        return [make_plan(program, config, cost, profile) for program in programs]
    stages = sorted({program.pipeline.stage for program in programs})
    where = [dealt(stages.index(program.pipeline.stage), max(1, processes)) for program in programs]
    workers = [worker_of(program, config, cost, profile) for program in programs]
    with world_of(workers, places, where) as world:
        decided, compared = decide_plans(world, config, profile)
        finished = world.map(finished_plan, ranks=[program.rank for program in programs])
    plans = ((worker, *finished[worker.seat]) for worker in workers)
    return [taken(worker, decided, profile, (plan.program, reports), None if worker.seat else compared) for worker, plan, reports in plans]


def worker_of(program: Program, config: Config, cost: Costs, profile: str, is_whole: bool = True) -> Worker:
    """A worker for a rank to be planned; `is_whole`: together with all others."""
    passes = config.pipeline().passes
    options = options_text(profile, (*passes, *config.means.values()))
    options += "" if config.pool_budget is None else f" pool_budget {config.pool_budget}"
    return Worker(program, cost, passes, options, config.memory_budget, is_whole)


def decide_plans(world: World, config: Config, profile: str) -> tuple[Decided, Comparison | None]:
    """Decide, and finish the plans on all ranks. Returns the decision, and what was simulated for its outcome."""
    asked, search, means = budget_bytes(world), Search(world, config.pipeline()), tuple(config.means.values())
    budget = asked
    if asked:
        made = planned_within(search, asked, means)
    elif config.capture == "on":
        made = search.unlimited()
    else:
        made = planned_by_default(search, means)
        budget = search.limit_of_baseline if any(made.memory_limits) else 0
    limit_bytes = asked or (0 if config.capture == "on" else search.limit_of_baseline)
    held_bytes = asked or (limit_bytes and limit_bytes + ROUNDED)
    within, pool_budget = within_pools(search, made, config.pool_budget, profile, held_bytes, means)
    if within is not made:
        made, budget = within, asked or ((limit_bytes or gpu_peak(world, within) or 0) if any(within.memory_limits) else 0)
    memory = _memory_limit(search, made, limit_bytes, config, pool_budget)
    specs = tuple(map(spec_of, made.passes.passes))
    digests = world.map(finish, specs, made.programs, made.steps, made.notes, budget)
    if config.check and not all(is_built_in(type(each)) for each in made.passes.passes):
        require_one_order(world)
    compared = compare(world, profile, memory, pool_budget)
    outcome = compared.outcome(world.cost) if compared else None
    return Decided(specs, made.memory_limits, budget, budget != asked, digest_of_set(digests), outcome, pool_budget), compared


def _memory_limit(search: Search, made: Made, limit_bytes: int, config: Config, pool_budget: int) -> MemoryLimit | None:
    """The memory limit of a plan, and where it comes from; None without one."""
    if not limit_bytes:
        return None
    beside: Literal["baseline", "beyond"] = "baseline" if config.memory_budget is None else "beyond"
    whose = "budget" if config.has_budget else beside
    return memory_limit(search.world, made, limit_bytes, whose, search.unlimited_tried, pool_budget)


def taken(
    worker: Worker, decided: Decided, profile: str, finished: tuple[Program, tuple[PassReport, ...]], compared: Comparison | None
) -> Plan:
    """This rank's plan as decided; `compared` is given only on rank 0."""
    (planned, reports), room = finished, decided.memory_limits[worker.seat] or 0
    passes, budget = tuple(map(worker.pass_of, decided.specs)), decided.memory_budget
    return Plan(
        worker.captured,
        planned,
        reports,
        profile,
        passes,
        set_digest=decided.set_digest,
        outcome=decided.outcome,
        compared=compared,
        memory_budget=budget,
        memory_limit=room,
        extra_bytes=worker.extra_bytes,
        beside_baseline=decided.beside_baseline,
        pool_budget=decided.pool_budget,
        is_launched=worker.cost.is_launched,
    )


def replay(path: str | Path, name: str) -> tuple[Program, Program]:
    """A plan's program before and after one of its passes, made again from the files in the plan's folder. Raises PlanError if the file is
    not a plan that `Plan.dump` wrote, or the pass is not one of its passes."""
    path = Path(path)
    record = read_record(path)
    if name not in record.order:
        raise PlanError(f"{path}: pass {name!r} did not run; those that did: {', '.join(record.order)}")
    try:
        passes = record.passes(record.order[: record.order.index(name) + 1])
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    cost = record.costs()
    mine = load(path.parent / "captured" / f"{_stem(path)}{SUFFIX}")
    given = [load(file) for file in find_dumps([path.parent / "captured"])]
    places = seats(given)
    beyond = Beyond(record.extra_bytes)
    workers = [Worker(program, cost, passes, "", beyond, places is not None) for program in (given if places else [mine])]
    memory_limits = [read_record(path.with_name(f"rank{worker.captured.rank}{SUFFIX}")).memory_limit or None for worker in workers]
    with world_of(workers, places or [0]) as world:
        of_rank = tuple(memory_limits[place] for place in world.of_rank)
        before = world.run(Pipeline(passes[:-1]), of_rank)
        after = world.run(Pipeline(passes[-1:]), of_rank, before)
        at = workers[places[mine.rank] if places else 0]
        return at.programs[before.programs[at.seat]], at.programs[after.programs[at.seat]]


def has_record(path: str | Path) -> bool:
    """Whether a file has a record in the folder `captured` beside it, where `Plan.dump` puts a plan's."""
    return _record_of(Path(path)).is_file()


def read_record(path: str | Path) -> Record:
    """Read the record of a plan file. Raises PlanError if the file is not a plan that `Plan.dump` wrote, or an incompatible version wrote
    it."""
    path = Path(path)
    try:
        data = read_file(_record_of(path), MOST_BYTES, "the record of a plan", PlanError)
        version = msgspec.json.decode(data, type=_RecordHeader).version
        record = msgspec.json.decode(data, type=Record) if version in READABLE else None
    except (PlanError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if path.is_file() and not load(path).jobs:
            raise PlanError(f"{path}: a captured program, not a plan; `interlace plan` makes one; of a plan it lies a folder up") from error
        raise PlanError(
            f"{path}: no plan with its record in {path.parent / 'captured'} ({error}); expected a file that a plan wrote"
        ) from error
    if record is None:
        raise PlanError(
            f"{_record_of(path)}: layout {version} of a plan's record, this version of Interlace reads {', '.join(map(str, READABLE))}; "
            "plan again with this version"
        )
    return record


def _record_of(path: Path) -> Path:
    return path.parent / "captured" / f"{_stem(path)}.json"


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]
