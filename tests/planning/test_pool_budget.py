"""Plans whose allocator pools fit the device: of programs that are planned, and told by hand."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from interlace.cli import main
from interlace.config import BUDGET, NO_LIMIT, POOL_BUDGET, Beyond, Config, MemoryBudget, load_config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import BudgetError, ConfigError, PlanError
from interlace.ir import save
from interlace.ir.dump import SUFFIX
from interlace.passes import OffloadOptimizerState, Pipeline, Schedule1F1B
from interlace.planning import limits, pool_budget
from interlace.planning.limits import ROOM
from interlace.planning.making import BASELINE_KEPT, FORM_TAKEN
from interlace.planning.plan import Plan, make_plans, read_record, worker_of
from interlace.planning.pool_budget import CLOSE, MOST_ASKED, ROUNDS, within_pools
from interlace.planning.rows import CONFIG, write_rows
from interlace.planning.search import Search
from interlace.planning.world import Draft, Made
from interlace.planning.world import World as Ranks
from interlace.report.outcome import outcome_sentence
from interlace.report.remarks import sentence
from interlace.units import size
from tests.strategies import World, programs

PROFILE = load_profile("h200")
SIX = programs(World(pp=2, mp=2, micro_batches=6, layers=3))
OPEN = Pipeline((Schedule1F1B(),))
MOVED = ("nothing", "offload", "states")
"""What further searches may move, in turn."""
NAMED = {"schedule_1f1b": {"interleave": "dx-first", "only_gains": False}}


def planned(memory_bytes: int | None = None, **options: Any) -> list[Plan]:
    """Plans for a device with this much memory."""
    profile = PROFILE if memory_bytes is None else msgspec.structs.replace(PROFILE, memory_bytes=memory_bytes)
    return make_plans(SIX, make_config(options), CostModel(profile), "h200")


def taken(plans: list[Plan]) -> tuple[int, int]:
    assert plans[0].outcome is not None
    return plans[0].outcome.taken_bytes()


def said(plans: list[Plan]) -> list[str]:
    return [sentence(each) for report in plans[0].reports for each in report.remarks if each.rule.startswith("pools-")]


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices here are too small for them."""
    monkeypatch.setattr(limits, "NOT_IN_POOLS", 0)


@pytest.fixture(scope="module")
def free() -> list[Plan]:
    """Plans for a device with memory to spare: their pools take more than the baseline's."""
    return planned()


def test_where_the_device_has_no_more_memory_pools_take_what_the_baselines_do(free: list[Plan]) -> None:
    most, own = taken(free)
    assert most > own
    assert not said(free)
    full = planned(memory_bytes=int(own / ROOM) + 1)
    assert taken(full) == (own, own)
    (why,) = said(full)
    assert re.search(rf"allocator pools take {size(own)} of {size(own)}; .* would take {size(most)}$", why), why
    assert full[0].outcome is not None
    assert free[0].outcome is not None
    assert full[0].outcome.change() <= 0
    assert free[0].outcome.plan.step_ns <= full[0].outcome.plan.step_ns


@pytest.mark.parametrize(
    ("memory", "options", "is_limited", "limit"),
    [
        (1.0, {}, True, 5504),
        (1.0, {POOL_BUDGET: "off"}, False, 0),
        (1.0, NAMED, False, 0),
        (100.0, {**NAMED, POOL_BUDGET: 1.0}, True, 5504),
        (100.0, {POOL_BUDGET: 1.0}, True, 5504),
        (100.0, {POOL_BUDGET: 5504}, True, 5504),
        (100.0, {POOL_BUDGET: 5760}, False, 5760),
        (100.0, {POOL_BUDGET: "+256B"}, False, 5760),
        (100.0, {POOL_BUDGET: "+255B"}, True, 5759),
        (100.0, {}, False, 0),
        (0.0, {}, False, 0),  # not known
        (0.96, {}, True, 5504),  # the baseline leaves less than a tenth free
    ],
)
def test_what_limits_pools(free: list[Plan], memory: float, options: dict[str, Any], is_limited: bool, limit: int) -> None:
    """`memory`: of the device, as a multiple of what it must have so that a tenth stays free beside the baseline."""
    own = taken(free)[1]
    plans = planned(int(memory * own / ROOM) + bool(memory), **options)
    assert ["would take" in each for each in said(plans)] == [True] * is_limited
    assert (taken(plans)[0] <= own) == is_limited
    assert {plan.pool_budget for plan in plans} == {limit}
    assert plans[0].outcome is not None
    assert (f"(limit {size(limit)})" in outcome_sentence(plans[0].outcome)) == bool(limit)


@pytest.mark.parametrize(
    ("total", "own", "most"), [(100, 0, 90), (100, 95, 95), (100, 96, 90), (10, 0, 8), (10, 9, 9), (3, 0, 1), (3, 3, 1)]
)
def test_a_small_device_keeps_more_than_a_tenth_free(total: int, own: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For libraries, but half of it at most; and if the baseline takes more than the rest, half of that stays free."""
    monkeypatch.setattr(limits, "NOT_IN_POOLS", 2)
    assert limits.default_pool_budget(total, own) == most


def test_a_budget_that_is_not_kept_is_refused_and_a_device_that_is_too_small_told() -> None:
    with pytest.raises(BudgetError, match=r"pool_budget .* \(4000 bytes\) cannot be kept: .* take at least 5504 bytes"):
        planned(None, **{POOL_BUDGET: 4000})
    plans = planned(memory_bytes=4000)
    assert said(plans) == ["allocator pools take 5.4 KiB; no plan was found in which they take 3.5 KiB or less"]
    assert taken(plans)[0] == 5504
    assert plans[0].pool_budget == 0


def test_pools_that_are_not_known_keep_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "pool_bytes", lambda *_: None)
    assert not said(planned(memory_bytes=1000))
    with pytest.raises(BudgetError, match="pool_budget 5000: what pools take is not known"):
        planned(None, **{POOL_BUDGET: 5000})


def test_where_memory_is_not_in_pools_nothing_limits_it() -> None:
    profile = msgspec.structs.replace(load_profile("cpu"), memory_bytes=1)
    plans = make_plans(SIX, make_config({POOL_BUDGET: 5000}), CostModel(profile), "cpu")
    assert not said(plans)


def test_the_files_of_a_plan_say_its_limit(tmp_path: Path) -> None:
    """The configuration that plans its rows again, and the record."""
    plans = planned(None, **{POOL_BUDGET: 1.0})
    for plan in plans:
        plan.dump(tmp_path)
    assert write_rows(plans, tmp_path, tmp_path)
    assert load_config(tmp_path / CONFIG).pool_budget == 5504
    assert {read_record(file).pool_budget for file in tmp_path.glob(f"*{SUFFIX}")} == {5504}


def test_what_was_taken_is_told(free: list[Plan]) -> None:
    """Paddle's baseline or a form, once."""
    for plans, rule in ((free, FORM_TAKEN), (planned(None, **{POOL_BUDGET: 1.0}), BASELINE_KEPT)):
        rules = [each.rule for report in plans[0].reports for each in report.done if each.rule in (FORM_TAKEN, BASELINE_KEPT)]
        assert rules[-1] == rule


def test_several_processes_find_the_same() -> None:
    one = planned(None, **{POOL_BUDGET: 1.0})
    other = make_plans(SIX, make_config({POOL_BUDGET: 1.0}), CostModel(PROFILE), "h200", 2)
    assert {plan.set_digest for plan in other} == {plan.set_digest for plan in one}
    assert [plan.pool_budget for plan in other] == [plan.pool_budget for plan in one]


def test_ranks_of_a_run_have_the_same_pool_budget() -> None:
    """The text of options that ranks compare before they plan has it."""
    texts = {
        worker_of(SIX[0], make_config(given), CostModel(PROFILE), "h200").options for given in ({}, {POOL_BUDGET: 1.0}, {POOL_BUDGET: 0.9})
    }
    assert len(texts) == 3


def test_a_share_needs_the_baselines_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_budget, "baseline_pools", lambda _: 0)
    with pytest.raises(BudgetError, match=r"pool_budget 0\.5 .* give bytes"):
        planned(None, **{POOL_BUDGET: 0.5})


def test_both_budgets_are_kept() -> None:
    plans = planned(None, **{BUDGET: 1.1, POOL_BUDGET: 1.0})
    outcome = plans[0].outcome
    assert outcome is not None
    assert outcome.memory is not None
    assert outcome.memory.peak_bytes <= outcome.memory.limit_bytes
    assert outcome.taken_bytes()[0] <= outcome.taken_bytes()[1]
    assert said(plans), "without a pool budget they take more"
    assert plans[0].memory_budget == outcome.memory.limit_bytes


def test_a_wrong_value_names_its_option() -> None:
    with pytest.raises(ConfigError, match="pool_budget: found 'much'"):
        make_config({POOL_BUDGET: "much"})
    with pytest.raises(ConfigError, match="beside plan: x, pool_budget would do nothing"):
        make_config({"plan": "x", POOL_BUDGET: 0.9})
    with pytest.raises(ConfigError, match="pool_budget: beside capture: on: what pools take in a captured step is not simulated"):
        make_config({"capture": "on", POOL_BUDGET: 0.9})
    assert make_config({"capture": "on", POOL_BUDGET: "off"}).pool_budget == NO_LIMIT


def test_a_file_may_allow_so_much_more(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("pool_budget: +8GB\n")
    assert load_config(tmp_path / "mine.yaml").pool_budget == Beyond(8 * 10**9)


def test_a_command_sets_it_over_that_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the plans of a sweep, too."""
    for program in SIX:
        save(program, tmp_path / "dumps" / f"rank{program.rank}{SUFFIX}")
    (tmp_path / "mine.yaml").write_text("pool_budget: 5760B\n")
    words = ["plan", str(tmp_path / "dumps"), "--config", str(tmp_path / "mine.yaml"), "-o", str(tmp_path / "plan")]
    for more, budget in ((["--pool-budget", "100%"], 5504), ([], 5760)):
        assert main([*words, *more]) == 0
        assert {read_record(file).pool_budget for file in (tmp_path / "plan").glob(f"*{SUFFIX}")} == {budget}
    swept = list[MemoryBudget]()

    def sweep(programs: object, config: Config, *_: object) -> None:
        swept.append(config.pool_budget)
        raise PlanError("enough")

    monkeypatch.setattr("interlace.planning.sweep.sweep", sweep)
    assert main([*words, "--sweep", "--pool-budget", "100%"]) == 2
    assert swept == [1.0]


# -- told by hand


def made(number: int) -> Made:
    return Made(OPEN, (number,), ((),), (None,))


class Told:
    """A world with one rank, in which program k takes `figures[k]`: nanoseconds, bytes of tensors, and bytes of pools. 0 is the plan, 1
    Paddle's baseline; `whole` maps a draft to its full plan; `runs` are complete runs that the search found."""

    def __init__(self, figures: dict[int, tuple[int | None, int, int | None]], drafts: dict[int, int]) -> None:
        self.figures, self.cost, self.asked, self.fails, self.least = figures, CostModel(PROFILE), list[int](), set[int](), 1
        self.whole, self.runs = {*drafts.values()}, list[int]()
        self.drafts = [Draft(made(draft), (), Pipeline((Schedule1F1B(weight_delay=whole),))) for draft, whole in drafts.items()]
        self.drafts.append(Draft(made(0), (), None))  # known in part only

    def known(self, *_: object, **__: object) -> list[int]:
        return [80]

    def step_ns(self, run: Made, *_: object) -> int | None:
        return self.figures[run.programs[0]][0]

    def bytes_over(self, run: Made, limit: int) -> list[int]:
        return [max(0, self.figures[run.programs[0]][1] - limit)]

    bytes_over_in_step = bytes_over

    def gpu_peaks(self, run: Made) -> list[int]:
        return [self.figures[run.programs[0]][1]]

    def pool_bytes(self, run: Made) -> int | None:
        self.asked.append(run.programs[0])
        return self.figures[run.programs[0]][2]

    def run(self, passes: Pipeline, limits: tuple[int | None, ...]) -> Made:
        (form,) = passes.passes
        assert isinstance(form, Schedule1F1B)
        assert isinstance(form.weight_delay, int)
        if form.weight_delay in self.fails:
            raise PlanError("offload cannot")
        return Made(passes, (form.weight_delay,), ((),), limits)


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Budgets of further searches, each with what may be moved; `found` says what they find."""
    tried = list[tuple[str, int]]()

    def fitting(search: Search, budget: int) -> Made | None:
        moving = {each.decides for each in search.asked.passes} & {"offload", "states"}
        tried.append((max(moving, default="nothing"), budget))
        return made(search.world.found[budget]) if budget in search.world.found else None  # type: ignore[attr-defined]

    monkeypatch.setattr(Search, "fitting", fitting)
    monkeypatch.setattr(pool_budget, "least_memory", lambda make: made(make.world.least))
    monkeypatch.setattr(Search, "__init__", start)
    return tried


def start(search: Search, world: Any, asked: Pipeline) -> None:
    search.world, search.asked, search.runs = world, asked, [made(number) for number in world.runs]
    search.make = SimpleNamespace(beaten=None, beaten_by=lambda step_ns: step_ns, world=world)  # type: ignore[assignment]
    search.__dict__["baseline"] = made(1)


def chosen(world: Told, most: int, limit: int = 0, found: dict[int, int] | None = None, asked: Pipeline = OPEN) -> int:
    world.found = found or {}  # type: ignore[attr-defined]
    means = tuple(make_config({}).means.values())
    taken = within_pools(Search(world, asked), made(0), most, "h200", limit, means)  # type: ignore[arg-type]
    assert taken.budget == most
    rules = [each.rule for each in taken.run.notes]
    assert rules.count(FORM_TAKEN) == (taken.run.programs[0] in world.whole)
    assert rules.count(BASELINE_KEPT) == (taken.run.programs[0] == 1)
    return taken.run.programs[0]


def test_the_fastest_draft_whose_full_plan_fits_is_taken(budgets: list[tuple[str, int]]) -> None:
    """Not one that holds too much, or whose full plan does not fit; nothing is asked of one that is slower than a plan that fits."""
    figures: dict[int, tuple[int | None, int, int | None]] = {
        0: (1000, 90, 120),
        1: (1010, 80, 100),
        2: (1001, 101, 50),
        3: (1002, 90, 100),
        4: (1003, 90, 101),
        5: (1004, 90, 100),
        6: (1020, 90, 90),
        7: (1005, 90, None),
        13: (1002, 90, 101),
        15: (1004, 90, 99),
        16: (1020, 90, 90),
    }
    drafts = {6: 16, 5: 15, 4: 4, 3: 13, 2: 2, 7: 7}
    world = Told(figures, drafts)
    assert chosen(world, 100, limit=100) == 15
    assert not {2, 7, 6, 16} & {*world.asked}
    assert chosen(Told({**figures, 15: (1004, 101, 99)}, {6: 16, 5: 15}), 100, limit=100) == 1
    world = Told(figures, {6: 16})
    assert chosen(world, 100, limit=100) == 1
    assert 6 not in world.asked, "slower than the baseline"
    assert chosen(world, 120) == 0
    assert budgets == []


@pytest.mark.parametrize(("took", "taken"), [(1006, 8), (1004, 15), (None, 8)])
def test_full_plans_are_compared_by_their_own_steps(took: int | None, taken: int, budgets: list[tuple[str, int]]) -> None:
    """The draft 5 takes 1003, its full plan `took`; the draft 8 and its full plan take 1005."""
    figures: dict[int, tuple[int | None, int, int | None]] = {
        0: (1000, 90, 120),
        1: (1010, 80, 100),
        5: (1003, 90, 100),
        15: (took, 90, 100),
        8: (1005, 90, 100),
    }
    assert chosen(Told(figures, {5: 15, 8: 8}), 100) == taken
    assert budgets == []


def test_a_draft_that_cannot_be_planned_in_full_is_left_out(budgets: list[tuple[str, int]]) -> None:
    figures: dict[int, tuple[int | None, int, int | None]] = {
        0: (1000, 90, 120),
        1: (1010, 80, 100),
        5: (1003, 90, 100),
        8: (1005, 90, 100),
    }
    world = Told(figures, {5: 15, 8: 8})
    world.fails = {15}
    assert chosen(world, 100) == 8
    assert budgets == []


def test_runs_that_the_search_found_are_looked_at_too(budgets: list[tuple[str, int]]) -> None:
    """A run may have smaller pools than the one that was taken, though it takes a little longer."""
    figures: dict[int, tuple[int | None, int, int | None]] = {
        0: (1000, 90, 120),
        1: (1010, 80, 100),
        2: (1001, 90, 101),
        3: (1002, 101, 100),
        4: (1004, 90, 100),
        5: (1003, 90, 100),
    }
    world = Told(figures, {})
    world.runs = [0, 2, 3, 4, 5]
    assert chosen(world, 100, limit=100) == 5
    assert budgets == []


def test_drafts_are_asked_up_to_a_number(budgets: list[tuple[str, int]]) -> None:
    slow = {k: (1000 + k, 10, 200) for k in range(2, 2 + MOST_ASKED)}
    figures: dict[int, tuple[int | None, int, int | None]] = {0: (1000, 90, 120), 1: (2000, 80, 100), **slow, 99: (1500, 10, 100)}
    assert chosen(Told(figures, {k: k for k in (*slow, 99)}), 100) == 1
    del figures[2 + MOST_ASKED - 1]
    assert chosen(Told(figures, {k: k for k in figures if k > 1}), 100) == 99


@pytest.mark.parametrize("slower", [0, 1])
def test_searches_with_less_memory_are_made_where_no_draft_is_nearly_as_fast(slower: int, budgets: list[tuple[str, int]]) -> None:
    """Each with less by what the one before took too much; without moving anything, then activations and, if only the baseline fits, state.
    The fastest of all that fits is taken."""
    close = int(CLOSE * 1000) + slower
    figures: dict[int, tuple[int | None, int, int | None]] = {
        0: (1000, 90, 120),
        1: (2000, 80, 100),
        2: (close, 90, 100),
        3: (1001, 89, 105),
        4: (1002, 84, 100),
        5: (1001, 83, 130),
        6: (1001, 50, 101),
    }
    found = {90: 3, 85: 4}
    assert chosen(Told(figures, {2: 2}), 100, 90, found) == (4 if slower else 2)
    assert budgets == [("nothing", 90), ("nothing", 85)] * slower
    budgets.clear()
    assert chosen(Told({**figures, 2: (close, 90, 101)}, {2: 2}), 100, 90, {90: 5, 60: 6, 59: 6}) == 1
    assert budgets == [(moved, budget) for moved in MOVED for budget in (90, 60, 59)]
    assert ROUNDS == 3


def test_once_a_run_fits_larger_budgets_are_tried(budgets: list[tuple[str, int]]) -> None:
    """Between its budget and the last that was too large, unless its step is close already; the fastest that fits is taken."""
    figures: dict[int, tuple[int | None, int, int | None]] = {
        0: (1000, 90, 120),
        1: (2000, 80, 100),
        3: (1001, 89, 130),
        4: (1500, 60, 80),
        5: (1400, 75, 100),
        6: (1300, 75, 101),
    }
    assert chosen(Told(figures, {}), 100, 90, {90: 3, 60: 4, 72: 5}) == 5
    assert budgets == [(moved, budget) for moved in ("nothing", "offload") for budget in (90, 60, 72)]
    budgets.clear()
    assert chosen(Told(figures, {}), 100, 90, {90: 3, 60: 4, 72: 6}) == 4
    assert budgets == [(moved, budget) for moved in ("nothing", "offload") for budget in (90, 60, 72)]
    budgets.clear()
    assert chosen(Told({**figures, 4: (1010, 60, 80)}, {}), 100, 90, {90: 3, 60: 4}) == 4
    assert budgets == [("nothing", 90), ("nothing", 60)]
    budgets.clear()
    assert chosen(Told(figures, {}), 100, 90, {90: 4}) == 4
    assert budgets == [("nothing", 90), ("offload", 90)]


def test_no_budget_below_nothing_is_searched(budgets: list[tuple[str, int]]) -> None:
    figures: dict[int, tuple[int | None, int, int | None]] = {0: (1000, 90, 120), 1: (2000, 80, 100), 3: (1001, 89, 190)}
    assert chosen(Told(figures, {}), 100, 90, {90: 3}) == 1
    assert budgets == [(moved, 90) for moved in MOVED]


def test_what_the_user_moves_is_moved_in_further_searches_too(budgets: list[tuple[str, int]]) -> None:
    """And nothing else."""
    figures: dict[int, tuple[int | None, int, int | None]] = {0: (1000, 90, 120), 1: (2000, 80, 100), 3: (1001, 89, 105)}
    moving = Pipeline((*OPEN.passes, OffloadOptimizerState(fraction=0.5)))
    assert chosen(Told(figures, {}), 100, 0, {90: 3}, moving) == 1
    assert budgets == [("states", 90), ("states", 85)]


@pytest.mark.parametrize(("limit", "first"), [(0, 90), (95, 90), (85, 85)])
def test_further_searches_keep_the_memory_limit(limit: int, first: int, budgets: list[tuple[str, int]]) -> None:
    figures: dict[int, tuple[int | None, int, int | None]] = {0: (1000, 90, 120), 1: (2000, 80, 100)}
    assert chosen(Told(figures, {}), 100, limit) == 1
    assert budgets == [(moved, first) for moved in MOVED]


def test_what_needs_the_least_memory_is_the_last_resort(budgets: list[tuple[str, int]]) -> None:
    """Where neither the baseline nor any search fits; and what is named if that does not fit either."""
    figures: dict[int, tuple[int | None, int, int | None]] = {0: (1000, 90, 120), 1: (1100, 80, 110), 9: (3000, 20, 70)}
    world = Told(figures, {})
    world.least = 9
    assert chosen(world, 75) == 9
    assert budgets == [(moved, 90) for moved in MOVED]
    world = Told(figures, {})
    world.least = 9
    with pytest.raises(BudgetError, match=r"take at least 70 bytes"):
        chosen(world, 69)


def test_searches_that_find_nothing_faster_than_the_baseline_are_made_with_state_too(budgets: list[tuple[str, int]]) -> None:
    figures: dict[int, tuple[int | None, int, int | None]] = {0: (1000, 90, 120), 1: (1100, 80, 110), 3: (1200, 80, 70), 4: (1090, 70, 70)}
    assert chosen(Told({**figures, 3: (1099, 80, 70)}, {}), 75, 0, {90: 3}) == 3
    assert budgets == [("nothing", 90), ("offload", 90)]
    budgets.clear()
    assert chosen(Told(figures, {}), 75, 0, {90: 3}) == 3
    assert budgets == [(moved, 90) for moved in MOVED]
