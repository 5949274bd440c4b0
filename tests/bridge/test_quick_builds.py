"""What is done once while Paddle builds a program changes nothing in it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from interlace.local.quick_builds import KnownMeshes, _outside

ROOT = Path(__file__).parents[2]
BUILD = """
import os, sys
import paddle
from interlace.local import build_rank, quick_builds
folder, example, *words = sys.argv[1:]
for how in ("quick", "slow"):
    if os.fork() == 0:
        if how == "slow":
            quick_builds.patch = lambda: None
        out = os.path.join(folder, how)
        os._exit(build_rank.main(["--rank", "0", "--world", "4", "--out", out, example, *words]))
    if os.wait()[1]:
        sys.exit(how)
"""
"""Each in a fork of a process that has imported Paddle."""
WORDS = "--layers 2 --dp 2 --pp 2 --micro-batches 2 --amp O2 --master-grad --recompute full"


@dataclass
class Mesh:
    shape: list[int]
    process_ids: list[int]


def test_meshes_are_found_by_shape_and_ranks_in_a_list_that_grows_or_is_another() -> None:
    known, meshes = KnownMeshes(), [Mesh([2], [0, 1])]
    assert known.has(meshes, Mesh([2], [0, 1]))
    assert not known.has(meshes, Mesh([2], [1, 0]))
    assert not known.has(meshes, Mesh([1, 2], [0, 1]))
    meshes.append(Mesh([1, 2], [0, 1]))
    assert known.has(meshes, Mesh([1, 2], [0, 1]))
    meshes.clear()
    assert not known.has(meshes, Mesh([2], [0, 1]))
    assert not known.has([Mesh([1], [3])], Mesh([1, 2], [0, 1]))


COUNT = 1


class Layer:
    def forward(self) -> int:
        return COUNT + sum(each + COUNT for each in range(2))


def test_what_a_method_reads_of_its_module_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _outside(Layer().forward)
    assert before["COUNT"] == 1
    monkeypatch.setitem(globals(), "COUNT", 1000)
    assert _outside(Layer().forward)["COUNT"] == 1000
    assert "pytest" not in before


@pytest.mark.paddle
@pytest.mark.parametrize("example", [pytest.param("gpt", marks=pytest.mark.long), "moe"])
def test_programs_are_the_same_bytes(example: str, tmp_path: Path) -> None:
    words = [f"examples/{example}.py", *WORDS.split()]
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path), *words], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "quick").read_bytes() == (tmp_path / "slow").read_bytes()
