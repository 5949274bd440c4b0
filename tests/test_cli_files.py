"""Commands over files: which go together, and the names by which jobs and passes are asked for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from interlace.cli import main
from interlace.ir import save
from tests.strategies import World, plan

PAIRS = World(pp=2, mp=1, micro_batches=3, layers=2, pairs=True)


def stored(folder: Path, world: World) -> str:
    for program in plan(world):
        save(program, folder / f"rank{program.rank}.ilp")
    return str(folder)


def test_plans_and_dumps_are_not_checked_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = plan(PAIRS)
    save(first, tmp_path / "rank0.ilp")
    save(msgspec.structs.replace(second, jobs=(), events=()), tmp_path / "rank1.ilp")
    assert main(["check", str(tmp_path)]) == 2
    assert "rank(s) 0 have a schedule, rank(s) 1 have none; give plans or dumps, not both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (World(pp=2, mp=2, micro_batches=3, layers=2), "a different world (2 and 4)"),
        (World(pp=2, mp=1, micro_batches=4, layers=2), "a different number of micro-batches (3 and 4)"),
        (World(pp=2, mp=1, micro_batches=3, layers=4), "a different list of forward operations"),
    ],
)
def test_other_models_are_not_set_beside(other: World, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, beside = stored(tmp_path / "mine", PAIRS), stored(tmp_path / "other", other)
    assert main(["timeline", mine, "--beside", beside, "-o", str(tmp_path / "t.json")]) == 2
    assert told in capsys.readouterr().err


def test_the_same_model_is_set_beside(tmp_path: Path) -> None:
    mine = stored(tmp_path / "mine", PAIRS)
    beside = stored(tmp_path / "other", msgspec.structs.replace(PAIRS, pairs=False))
    assert main(["timeline", mine, "--beside", beside, "-o", str(tmp_path / "t.json")]) == 0
