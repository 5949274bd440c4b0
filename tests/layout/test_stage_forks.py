"""One build gives, byte for byte, the programs that builds of single ranks give."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.layout.store import Store
from interlace.local.building import Request

pytestmark = pytest.mark.paddle
ROOT = Path(__file__).parents[2]
SMALL = "--layers 4 --hidden 64 --heads 4 --seq-len 32"
CASES = {
    "gpt": "--pp 2 --mp 2 --dp 2 --micro-batches 4 --vpp 2 --sharding-stage 1 --batch-size 16",
    "llama": "--pp 4 --mp 2 --dp 1 --micro-batches 4 --batch-size 8 --recompute full --sequence-parallel",
    "moe": "--layers 2 --pp 2 --mp 2 --dp 2 --micro-batches 2 --batch-size 8",
}


@pytest.mark.parametrize("model", ["gpt", *(pytest.param(model, marks=pytest.mark.long) for model in ("moe", "llama"))])
def test_forks_are_as_built(forked_ranks: None, tmp_path: Path, model: str) -> None:
    words = tuple(f"{SMALL} {CASES[model]}".split())
    stages = int(words[words.index("--pp") + 1])
    requests = [Request(str(ROOT / "examples" / f"{model}.py"), words, rank, 8) for rank in range(0, 8, 8 // stages)]
    together, apart = (Store(tmp_path / name, 2, print) for name in ("together", "apart"))
    together.build(requests[:1], has_stages=True)
    assert (together.built, together.may_fork) == (stages, True)
    apart.build(requests)
    assert [together.path(each).read_bytes() for each in requests] == [apart.path(each).read_bytes() for each in requests]
