"""What layouts that differ in sharding and recomputation share, in programs that Paddle builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.cost_model import CostModel, load_profile
from interlace.layout.judge import programs_of, without_recomputation
from interlace.layout.store import Store
from interlace.local.building import Request
from interlace.planning.floor import Floors, floors_of

pytestmark = pytest.mark.paddle
ROOT = Path(__file__).parents[2]
MODEL = "--layers 2 --hidden 256 --heads 4 --seq-len 64 --batch-size 8 --amp O2 --master-grad --dp 2 --pp 2 --micro-batches 2"
COSTS = CostModel(load_profile("h100"))


def floors(folder: Path, example: str, sharding: int, recompute: str) -> Floors:
    words = (*MODEL.split(), "--sharding-stage", str(sharding), "--recompute", recompute)
    requests = [Request(str(ROOT / "examples" / example), words, rank, 4) for rank in (0, 2)]
    store = Store(folder, 1, print)
    assert not any(built.refused for each in requests for built in store.build([each], has_stages=True))
    return floors_of([without_recomputation(program, COSTS) for program in programs_of([store.path(each) for each in requests])], COSTS)


@pytest.mark.parametrize(("example", "stages"), [("gpt.py", (0, 3)), pytest.param("llama.py", (0, 1, 3), marks=pytest.mark.long)])
def test_layouts_that_differ_in_sharding_and_recomputation_share_a_bound(
    tmp_path: Path, forked_ranks: None, example: str, stages: tuple[int, ...]
) -> None:
    """One without recomputation bounds all; each counts less than its own bound."""
    found = {(sharding, again): floors(tmp_path, example, sharding, again) for sharding in stages for again in ("none", "full")}
    assert found[0, "none"].shared > 0
    for again in ("none", "full"):
        assert len({found[sharding, again].shared for sharding in stages}) == 1
    for key, each in found.items():
        assert found[0, "none"].shared <= each.shared < each.own, key
