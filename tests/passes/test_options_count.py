"""An option that is ignored is noticed: each gives another plan than its default, and the edge of a budget is its edge."""

from __future__ import annotations

from typing import Any

import pytest

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.ir import Program
from interlace.ir.kinds import is_comm
from interlace.ir.target import CPU
from interlace.passes import NameStreams, Pass, Pipeline, Schedule1F1B, SplitBackward
from tests.default_passes import DEFAULT
from tests.passes.fixture_files import FILES, given_of, outcome
from tests.strategies import World, programs

LONG_COMM = GivenCosts({"comm": 5_000, "gemm": 50, "copy": 5, "default": 10}, {("gemm", "comm"): (1.1, 1.1)})
PLAIN = programs(World(pp=2, mp=2, micro_batches=4, layers=3))[0]


def planned(*passes: Pass, extra_bytes: int = 0) -> Program:
    return Pipeline(passes).run(PLAIN, LONG_COMM, extra_bytes=extra_bytes)[0]


def test_what_runs_by_default_and_in_which_order() -> None:
    """Offload runs where it is asked for; docs/how-it-works.md has the same list."""
    assert [each.name for each in make_config({}).pipeline().passes] == DEFAULT


@pytest.mark.parametrize("priority", [-3, 0])
def test_priority(priority: int) -> None:
    made = planned(Schedule1F1B(interleave="off"), NameStreams(priority=priority))
    found = {op.priority for op in made.ops if is_comm(op) and op.stream}
    assert found == {priority}


def test_borrow() -> None:
    """The stored case in which an all_gather has no weight gradient of its own."""
    given = given_of(next(path for path in FILES if path.stem == "s2_sequence_parallel_all_gather").read_text())
    lent, kept = (
        outcome(given.replace("overlap-column-backward", f'overlap-column-backward {{"borrow": {borrow}}}', 1), "x")
        for borrow in ("true", "false")
    )
    assert "borrowed from other layers" in lent
    assert "borrowed from other layers" not in kept


def test_memory_beyond_the_baseline() -> None:
    """More memory for a pair, another order in it."""
    passes = SplitBackward(), Schedule1F1B(interleave="mixed", only_gains=False)
    assert planned(*passes).jobs != planned(*passes, extra_bytes=1 << 40).jobs


@pytest.mark.paddle
@pytest.mark.parametrize("check", [True, False])
def test_check_off(check: bool, monkeypatch: Any) -> None:
    """A plan is proved where check is on, and only there."""
    from types import SimpleNamespace

    from interlace.bridge import paddle_passes
    from interlace.config import make_config

    proved: list[Any] = []
    monkeypatch.setattr(paddle_passes, "require_safe", lambda *args: proved.append(args))
    one: Any = paddle_passes.SplitBackwardPass()
    one._keep(SimpleNamespace(program=PLAIN), PLAIN, make_config({"check": check}), SimpleNamespace(target=CPU))
    assert len(proved) == check
