"""The search: exclude layouts by bounds, build the most promising, simulate Paddle's own plan, and plan the best few in full.

Rounds have a fixed size, independent of the number of processes, so that equal commands give equal answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from interlace.cost_model import CostModel, load_profile
from interlace.errors import ConfigError, InterlaceError
from interlace.ir import Program
from interlace.ir.target import target_of, with_paddles_jobs
from interlace.layout.floors import Reference
from interlace.layout.judge import Asked, Draft, Judging, Planned, without_recomputation
from interlace.layout.promise import Promise, Seen, guess, guess_held, guess_state, recomputes_nothing
from interlace.layout.space import KNOWN, Layout, Number, Template
from interlace.layout.store import Store
from interlace.local.building import Request
from interlace.local.processes import run_all
from interlace.local.stages import stages_of
from interlace.planning.baseline import baseline_plan
from interlace.planning.budget import peak_bytes
from interlace.planning.floor import occupied
from interlace.planning.rows import CONFIG
from interlace.scheduler.memory.live import lifetimes, needed_at_once
from interlace.units import ms, size

ROUND = 4
"""Number of layouts that are built before the next are chosen."""
REFERENCES = 3
"""Most attempts to build the memory reference (see `floors.py`)."""
T = TypeVar("T")
ATTEMPTS = 2
"""Most layouts that are tried for each one to be planned, in case no plan of theirs keeps the memory limit."""
FULL = ("1F1B", "VPP")
"""Schedules that Paddle builds with fewer micro-batches than stages, but refuses to run."""
State = Literal["waiting", "excluded", "refused", "drafted", "planned"]


@dataclass(slots=True)
class Candidate:
    """A layout and what is known of it.

    Attributes:
        state: How far the search got with it.
        why: Why it was excluded or refused, or cannot be simulated.
        least_ns, least_bytes: Lower bounds of the step and of the peak; 0 if not known.
        draft, planned: Judged by Paddle's own plan, and by one of Interlace; None if not yet.
        programs: Program files, one for each stage, once all are built.
        folder: Folder of the plans.
    """

    layout: Layout
    state: State = "waiting"
    why: str = ""
    least_ns: int = 0
    least_bytes: int = 0
    draft: Draft | None = None
    planned: Planned | None = None
    programs: tuple[str, ...] = ()
    folder: str = ""

    @property
    def refusal(self) -> str:
        """Why Paddle cannot run its own plan, although one of Interlace may run; empty if it can."""
        return self.draft.refusal if self.draft else ""

    def fits(self, memory: int) -> bool:
        """Whether Paddle's own plan was simulated and keeps `memory`, even if Paddle refuses to run it."""
        return self.draft is not None and self.draft.step is not None and self.draft.peak_bytes <= memory

    def best_ns(self, memory: int) -> float:
        """The shortest step, in nanoseconds, of a plan that can run and keeps `memory`; infinite if none is known."""
        steps = [self.planned.step.step_ns] if self.planned and self.planned.step else []
        if self.fits(memory) and self.draft and self.draft.step and not self.refusal:
            steps.append(self.draft.step.step_ns)
        return min(steps, default=inf)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a search.

    Attributes:
        memory: Device bytes that each rank may hold.
        layouts: Most layouts to build; 0: build nothing, and report what the store has.
        finalists: Number of layouts to plan in full; 0: compare only Paddle's own plans.
        jobs: Number of processes that run at the same time.
    """

    memory: int
    layouts: int
    finalists: int
    jobs: int


@dataclass(slots=True)
class Search:
    """A search among layouts.

    Attributes:
        template, gpus: The command of the script, and the number of ranks.
        options: Options of the builder.
        profile: The device profile, by name or path.
        config: Configuration file of plans; empty for the defaults.
        has_bounds: Whether layouts are excluded by bounds.
        references: Values of unknown placeholders (`_model`) -> the reference of all layouts with these.
        shared: What layouts have in common (`_alike`) -> lower bound of their steps, in nanoseconds.
    """

    template: Template
    gpus: int
    options: tuple[str, ...]
    profile: str
    config: str
    limits: Limits
    store: Store
    say: Callable[[str], None]
    has_bounds: bool = True
    references: dict[tuple[object, ...], Reference] = field(default_factory=dict)
    shared: dict[tuple[object, ...], int] = field(default_factory=dict)
    costs: CostModel = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        found = load_profile(self.profile)
        self.costs = CostModel(found)
        self.digest = hashlib.sha256(msgspec.json.encode(found)).hexdigest()[:24]

    def run(self, layouts: Sequence[Layout]) -> list[Candidate]:
        """Search, and return what is known of each layout, in the order of `layouts`. Raises ConfigError if none could be built."""
        found = [Candidate(layout) for layout in layouts]
        if self.has_bounds and any(name in KNOWN for name, _ in layouts[0].values):
            self._refer(found)
        if not self.limits.layouts:
            self._draft(self._kept(found), found)
        while picked := self._picked(found):
            self._draft(picked, found)
        if self.limits.layouts and not any(each.state == "drafted" for each in found):
            raise ConfigError(_none_built(found))
        self._plan(found)
        self._exclude(found)
        return found

    def request(self, layout: Layout, rank: int) -> Request:
        """The request to build one rank of a layout."""
        arguments, environment = self.template.filled(layout)
        return Request(self.template.script, arguments, rank, self.gpus, self.options, environment)

    # --------------------------------------------------------------------------------------------------------------- bounds

    def _refer(self, found: Sequence[Candidate]) -> None:
        """Build the references, and derive the bounds of all layouts from them."""
        for key in dict.fromkeys(_model(each.layout) for each in found):
            mine = sorted((each.layout for each in found if _model(each.layout) == key), key=_split)
            most = max(map(self._replicas, mine))
            alone = [replace(self.request(_alone(mine[0], 1), 0), world=1)]
            copies = dict.fromkeys(_alone(layout, most) for layout in mine if self._replicas(layout) == most)
            replicas = [replace(self.request(layout, 0), world=most) for layout in [*copies][:REFERENCES]]
            if not self.limits.layouts:
                alone, replicas = (list(filter(self.store.found, each)) for each in (alone, replicas))
            self.store.build([*alone, *replicas[:1]])  # both at the same time
            serial, replica = self._bare(alone), self._bare(replicas)
            held = self._activations(serial) if serial else 0
            self.references[key] = Reference.of(self.gpus, serial, replica, self.costs.profile, held)
        for each in found:
            reference = self.references.get(_model(each.layout))
            if reference:
                each.least_bytes = max(each.least_bytes, reference.least_bytes(each.layout))
                each.least_ns = max(each.least_ns, reference.least_ns)

    def _replicas(self, layout: Layout) -> int:
        return max(1, self.gpus // (layout.number("pp") * layout.number("mp")))

    def _bare(self, requests: Sequence[Request]) -> Program | None:
        """The first program that can be built, without recomputation; None if all are refused, or it has pipeline stages."""
        for request in requests:
            if not self.store.build([request])[0].refused:
                bare = without_recomputation(self.store.program(request), self.costs)
                return bare if bare.pipeline.num_stages == 1 else None
        return None

    def _activations(self, serial: Program) -> int:
        """Bytes that a step on one GPU would hold for all micro-batches at once, besides parameters and optimizer state."""
        baseline, target = baseline_plan(serial, self.costs), with_paddles_jobs(target_of(self.profile))
        peak = peak_bytes(baseline, self.costs, target) or 0
        return max(0, peak - lifetimes(serial).base["device"]) * serial.pipeline.num_micro_batches

    def _exclude(self, found: Sequence[Candidate]) -> None:
        """Exclude waiting layouts that cannot keep the memory limit, or cannot be faster than a known plan that does."""
        if not self.has_bounds:
            return
        memory, best_ns = self.limits.memory, min((each.best_ns(self.limits.memory) for each in found), default=inf)
        for each in found:
            if each.state != "waiting":
                continue
            each.least_ns = max(each.least_ns, *(self.shared.get(key, 0) for key in _alike(each.layout)))
            if each.least_bytes > memory:
                each.state, each.why = "excluded", f"holds {size(each.least_bytes)} or more on some rank"
            elif each.least_ns >= best_ns:
                each.state, each.why = "excluded", f"takes {ms(each.least_ns)} or more, another takes {ms(best_ns)}"

    # ---------------------------------------------------------------------------------------------------------------- rounds

    def _picked(self, found: Sequence[Candidate]) -> list[Candidate]:
        """The most promising layouts, to be built next."""
        self._exclude(found)
        left = self.limits.layouts - sum(each.state == "drafted" for each in found)
        waiting = [each for each in found if each.state == "waiting"]
        seen = [
            Seen(each.layout, each.draft.step.step_ns / self._guess(each.layout), self._held(each.layout, each.draft.peak_bytes))
            for each in found
            if each.draft and each.draft.step
        ]
        promise = Promise(seen)

        def rank(each: Candidate) -> tuple[bool, float, Layout]:
            held = promise.peak(each.layout) * self._guess_held(each.layout)
            over = held + self._state(each.layout) > self.limits.memory
            return over, round(promise.step(each.layout) * self._guess(each.layout), 3), _sortable(each.layout)

        return _spread(sorted(waiting, key=rank), min(left, ROUND))

    def _kept(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Layouts that the store knows to be refused, or whose programs it has."""
        kept = list[Candidate]()
        for each in found:
            request = self.request(each.layout, 0)
            known = self.store.found(request)
            if known and (known.refused or all(map(self.store.found, self._stages(each, self.store.program(request))))):
                kept.append(each)
        return kept

    def _state(self, layout: Layout) -> float:
        """Bytes of parameters, gradients and optimizer state of a rank, derived from the reference rather than learned; 0 without one."""
        reference = self.references.get(_model(layout))
        return guess_state(layout, self.gpus, reference.state_bytes) if reference else 0.0

    def _held(self, layout: Layout, peak_bytes: int) -> float:
        """The peak of a layout without its state, divided by the first guess."""
        return max(1.0, peak_bytes - self._state(layout)) / self._guess_held(layout)

    def _guess_held(self, layout: Layout) -> float:
        reference = self.references.get(_model(layout))
        return max(1.0, guess_held(layout, self.gpus, reference.activation_bytes if reference else 0.0))

    def _guess(self, layout: Layout) -> float:
        reference = self.references.get(_model(layout))
        work = reference.work_ns / self.gpus if reference else 0.0
        return max(1.0, guess(layout, work or 1e9))

    def _draft(self, picked: Sequence[Candidate], found: Sequence[Candidate]) -> None:
        """Build the first stage of each layout, then the other stages if no bound excludes it, and simulate Paddle's own plan."""
        for each, built in zip(picked, self.store.build([self.request(each.layout, 0) for each in picked], has_stages=True), strict=True):
            if built.refused:
                each.state, each.why = "refused", built.refused
        firsts = {each.layout: self.store.program(self.request(each.layout, 0)) for each in picked if each.state == "waiting"}
        going = [each for each in picked if each.state == "waiting" and not self._is_bounded(each, firsts[each.layout], found)]
        requests = {each.layout: self._stages(each, firsts[each.layout]) for each in going}
        built_all = self.store.build([request for each in requests.values() for request in each])
        refusals = dict(zip([request for each in requests.values() for request in each], built_all, strict=True))
        for each in going:
            refused = next((refusals[request].refused for request in requests[each.layout] if refusals[request].refused), "")
            if refused:
                each.state, each.why = "refused", refused
            elif requests[each.layout]:
                each.programs = tuple(str(self.store.path(request)) for request in requests[each.layout])
        self._judge([each for each in going if each.programs])

    def _stages(self, each: Candidate, first: Program) -> list[Request]:
        """The requests for one rank of each stage. If ranks of a stage differ, or Paddle would not run the layout, the layout is refused
        and there are none."""
        pipe = first.pipeline
        if pipe.schedule in FULL and pipe.num_micro_batches < pipe.num_stages:
            each.state = "refused"
            wanted = f"Paddle runs {pipe.schedule} of {pipe.num_stages} stages with as many micro-batches or more"
            each.why = f"{wanted}, here are {pipe.num_micro_batches}"
            return []
        try:
            stages = stages_of(first)
        except InterlaceError as error:
            each.state, each.why = "refused", str(error)
            return []
        return [self.request(each.layout, ranks[0]) for ranks in stages]

    def _is_bounded(self, each: Candidate, first: Program, found: Sequence[Candidate]) -> bool:
        """Whether the bounds of the first stage exclude the layout, so that the other stages need not be built."""
        if self.has_bounds:
            bare = without_recomputation(first, self.costs)
            each.least_bytes = max(each.least_bytes, needed_at_once(bare))
            floors = occupied(bare, self.costs)
            each.least_ns = max(each.least_ns, floors.own)
            self._share(each.layout, floors.shared)
        self._exclude(found)
        return each.state == "excluded"

    def _judge(self, going: Sequence[Candidate]) -> None:
        asked = {k: Asked(each.programs, self.profile) for k, each in enumerate(going)}
        paths = {k: self._path("draft", each) for k, each in asked.items()}
        missing = [k for k, path in paths.items() if self._known(path, Draft) is None]
        for number, judging in run_all([_judging(asked[k], paths[k]) for k in missing], self.limits.jobs):
            judging.require_done()
            self.say(f"simulated: {going[missing[number]].layout}")
        for k, each in enumerate(going):
            each.draft = self._known(paths[k], Draft)
            if each.draft is None or each.draft.step is None:
                each.state, each.why = "refused", each.draft.why if each.draft else "its draft cannot be read"
                continue
            each.state = "drafted"
            if self.has_bounds:
                each.least_ns = max(each.least_ns, each.draft.bound_ns)
                each.least_bytes = max(each.least_bytes, each.draft.least_bytes)
                self._share(each.layout, each.draft.shared_ns)

    def _share(self, layout: Layout, least_ns: int) -> None:
        """Record a lower bound for the layouts that have `_alike` in common with this one; if it recomputes nothing, for any
        recomputation."""
        own, without = _alike(layout)
        key = without if recomputes_nothing(layout) else own
        self.shared[key] = max(self.shared.get(key, 0), least_ns)

    # ----------------------------------------------------------------------------------------------------------------- plans

    def _plan(self, found: Sequence[Candidate]) -> None:
        """Plan the best few in full: the fastest by Paddle's own plan, and the fastest of those that only our plan could make fit."""
        memory, left = self.limits.memory, self.limits.finalists
        if not left:
            return
        drafted = sorted((each for each in found if each.state == "drafted"), key=_by_step)
        fit = [each for each in drafted if each.fits(memory)]
        over = [each for each in drafted if not each.fits(memory) and each.least_bytes <= memory]
        few = over if not fit else [each for each in over[:1] if _by_step(each) < _by_step(fit[0])]
        for each in [*fit[: max(1, left - len(few))], *few][: ATTEMPTS * left]:
            best_ns = min(other.best_ns(memory) for other in found)
            if self.has_bounds and each.least_ns > best_ns:
                each.why = f"takes {ms(each.least_ns)} or more, another takes {ms(best_ns)}"
                continue
            self._plan_one(each)
            left -= each.state == "planned"
            if not left:
                break

    def _plan_one(self, each: Candidate) -> None:
        asked = Asked(each.programs, self.profile, self.limits.memory, self.config, "", self.limits.jobs)
        path = self._path("plan", asked)
        each.folder = str(path.with_suffix(""))
        if self._known(path, Planned) is None or not (Path(each.folder) / CONFIG).is_file():
            asked = msgspec.structs.replace(asked, folder=each.folder)
            for _, judging in run_all([_judging(asked, path)], 1):
                judging.require_done()
            self.say(f"planned: {each.layout}")
        each.planned = self._known(path, Planned)
        if each.planned and each.planned.step:
            each.state = "planned"
        elif each.planned:
            each.why = each.planned.why

    def _path(self, name: str, asked: Asked) -> Path:
        """The file for a result, named by the contents of programs, profile and configuration rather than their names."""
        programs = [hashlib.sha256(Path(each).read_bytes()).hexdigest() for each in asked.programs]
        config = Path(asked.config).read_text() if Path(asked.config).is_file() else asked.config
        return self.store.finding_path(name, [programs, self.digest, Path(self.profile).stem, asked.memory_budget, config])

    @staticmethod
    def _known(path: Path, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError):
            return None


def _judging(asked: Asked, path: Path) -> Callable[[], Judging]:
    return lambda: Judging.start(asked, path)


def _by_step(each: Candidate) -> tuple[float, Layout]:
    return each.draft.step.step_ns if each.draft and each.draft.step else inf, _sortable(each.layout)


def _spread(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first `count` layouts in turns: the best of each shape (pp and mp), then the second best, and so on, because layouts of one shape
    say little about others."""
    turns, taken = list[tuple[int, int]](), dict[tuple[object, object], int]()
    for k, each in enumerate(ranked):
        shape = each.layout.get("pp"), each.layout.get("mp")
        turns.append((taken.get(shape, 0), k))
        taken[shape] = turns[-1][0] + 1
    return [ranked[k] for _, k in sorted(turns)[: max(0, count)]]


def _sortable(layout: Layout) -> Layout:
    """The layout with its values as text of equal length, so that numbers and words can be compared."""
    return Layout(tuple((name, f"{value:>12}") for name, value in layout.values))


def _model(layout: Layout) -> tuple[object, ...]:
    """The values of placeholders whose meaning is unknown; layouts that differ in them may train different models."""
    return tuple(item for item in layout.values if item[0] not in KNOWN)


def _alike(layout: Layout) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Two keys of layouts with a common bound: all values but sharding, which only affects parameters and their state; and these without
    recomputation."""
    own = tuple(item for item in layout.values if item[0] != "sharding")
    return own, tuple((name, "" if name == "recompute" else value) for name, value in own)


def _alone(layout: Layout, replicas: int) -> Layout:
    """The layout with the whole model on each of `replicas` GPUs."""
    one: dict[str, Number] = {"pp": 1, "mp": 1, "dp": replicas, "vpp": 1, "sharding": 0}
    return Layout(tuple((name, one.get(name, value)) for name, value in layout.values))


def _split(layout: Layout) -> tuple[int, int, bool, int, Layout]:
    """Sort key: layouts that split the model least come first."""
    again = not recomputes_nothing(layout)
    return layout.number("pp") * layout.number("mp"), layout.number("sharding", 0), again, layout.number("m"), _sortable(layout)


def _none_built(found: Iterable[Candidate]) -> str:
    reasons = list(dict.fromkeys(f"{each.layout}: {each.why}" for each in found if each.why))
    more = f"\nand {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return (
        "no layout can be simulated:\n"
        + "\n".join(reasons[:5])
        + more
        + "\nexpected at least one that the script accepts and the memory holds"
    )
