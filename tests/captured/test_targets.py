"""Plans of real programs are safe under the rules of every target: what Paddle's own CPU ranks, where all is serial, cannot show.

The programs are stored (`programs.tar.xz`); `python -m tests.captured.build` makes them anew.
"""

from __future__ import annotations

import pytest

from interlace.config import Config, load_config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import InterlaceError
from interlace.ir import Program
from interlace.ir.target import CPU, CUSTOM, GPU, Target
from interlace.planning.plan import make_plans
from interlace.scheduler.hazards import check
from interlace.scheduler.interleave import planner as interleave
from testbed.target import RULES
from tests.captured.build import CASES, MASKED, ranks
from tests.captured.stored import cases, programs_of

OFFLOAD = {"fraction": 1.0, "min_bytes": 64}
pytestmark = pytest.mark.slow
OTHERS = (CPU, CUSTOM, RULES)
ALL = (GPU, *OTHERS)
"""Plans of more than two ranks are proved on the GPU and on one of the others, in turn: the rules are the same for any world. So are all
plans where `--examples` asks for no more of them."""
CONFIGS: dict[str, Config] = {
    **{name: load_config(name) for name in ("baseline", "overlap", "demo")},
    "half offloaded": make_config({"memory_budget": "+1GB", "offload_activations": {"fraction": 0.5}}),
    "mixed": make_config({"memory_budget": "+1GB", "schedule_1f1b": {"interleave": "mixed"}, "offload_activations": OFFLOAD}),
    "zb-h1": make_config({"schedule_1f1b": {"interleave": "zb-h1"}, "offload_activations": OFFLOAD}),
}
ALSO = {MASKED: ("half offloaded",), "pp2 vpp2, offload": ("zb-h1",)}
"""Beside a case's own turn: sizes at which there is a half to move, and what is refused."""
REFUSED = {("zb-h1", "VPP"): "zb-h1 has no chunks; expected a 1F1B pipeline, found VPP"}
"""Configuration and the program's schedule -> why there is no plan."""

COVERED = ("overlap", "half offloaded")
"""Left out where many ranks are planned, for time: `demo` does the same with offload at these models' sizes."""
STALLS = {("baseline", "frozen batch norm, a skipped stage, 3 stages, 7 micro-batches of a row"): "deadlock"}
"""Configuration and case -> what is found where sends wait for their receivers: Paddle's 1F1B puts all p2p on one stream, and
with a connection that skips a stage the stages wait in a circle, unless the library buffers the messages."""


@pytest.fixture(autouse=True)
def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair's first order is as good for this as its best one, and takes a tenth of the time."""
    monkeypatch.setattr(interleave, "SEARCH_WORK", 0)


@pytest.fixture(autouse=True)
def _plans_are_proved() -> None:
    """Every plan here is proved by the test itself, on more targets; the drafts before it are not."""


def test_the_archive_is_of_these_cases() -> None:
    assert cases() == CASES, "the stored programs are of other cases; run `python -m tests.captured.build`"


def configurations(name: str, whole: bool) -> list[str]:
    """Those that a case is planned with: one of them, in turn, so that every one meets every kind of program, and those of which something
    else is known; all of them with more examples (`make test-long`)."""
    has_many = len(ranks(name)) > 2
    mine = [title for title in CONFIGS if not (has_many and title in COVERED)]
    alike = [each for each in CASES if (len(ranks(each)) > 2) == has_many]
    in_turn = mine[alike.index(name) % len(mine)]
    known = [title for title, case in STALLS if case == name]
    return mine if whole else [*dict.fromkeys([in_turn, *known, *ALSO.get(name, ())])]


@pytest.mark.parametrize("has_many", [False, True])
def test_every_configuration_has_its_turn(has_many: bool) -> None:
    turns = [title for name in CASES if (len(ranks(name)) > 2) == has_many for title in configurations(name, False)]
    left_out = COVERED if has_many else ()
    assert all((turns.count(title) >= 3) == (title not in left_out) for title in CONFIGS)


@pytest.mark.parametrize("name", CASES)
def test_plans_of_captured_programs_are_safe_everywhere(name: str, pytestconfig: pytest.Config) -> None:
    """No deadlock - no correct plan is refused, on programs that Paddle built."""
    programs = programs_of(name)
    schedule = programs[0].pipeline.schedule
    cost = CostModel(load_profile("h200"))
    whole = pytestconfig.getoption("--examples") > 1
    for place, title in enumerate(configurations(name, whole), list(CASES).index(name)):
        refused = ""
        try:
            plans = [plan.program for plan in make_plans(programs, CONFIGS[title], cost, "h200")]
        except InterlaceError as error:
            refused = str(error)
        assert bool(refused) == ((title, schedule) in REFUSED), f"{title}: {refused}"
        assert REFUSED.get((title, schedule), "") in refused, title
        targets = ALL if whole and len(programs) <= 2 else (GPU, OTHERS[place % len(OTHERS)])
        for target in targets if not refused else ():
            _check(plans, target, STALLS.get((title, name), "") if target is not CPU else "")


def _check(plans: list[Program], target: Target, known: str) -> None:
    findings = check(plans, target)
    assert {finding.kind for finding in findings} <= {known}, f"on {target.name}: {'; '.join(map(str, findings[:3]))}"
    assert bool(findings) == bool(known)
