"""Files that are JSON of the right layout, or nearly, and no sound program: refused by name, never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from interlace.cli import main
from interlace.errors import ProgramError
from interlace.ir import Program, load
from interlace.ir.dump import encode
from tests.strategies import World, plan

GOOD = plan(World(pp=2, mp=2))[0]


def outside_operand(program: Program) -> Program:
    op = program.ops[-1]
    return program.with_ops((*program.ops[:-1], msgspec.structs.replace(op, operands=(99999,))))


BROKEN: dict[str, tuple[Callable[[Program], bytes], str]] = {
    "flipped byte": (lambda p: encode(p)[:40] + b"\x90" + encode(p)[41:], "not a whole Interlace dump"),
    "missing value": (lambda p: encode(outside_operand(p)), "reads %99999, which is not declared"),
    "rank": (lambda p: encode(msgspec.structs.replace(p, rank=77)), "rank 77 is outside of the world of 4"),
    "world": (lambda p: encode(msgspec.structs.replace(p, world=2)), "outside of the world of 2"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_unsound_files_are_refused(kind: str, tmp_path: Path) -> None:
    make, text = BROKEN[kind]
    path = tmp_path / "rank0.ilp"
    path.write_bytes(make(GOOD))
    with pytest.raises(ProgramError, match=rf"(?s)rank0\.ilp: .*{text}"):
        load(path)


@pytest.mark.parametrize("command", ["show", "check", "plan", "timeline"])
def test_commands_end_with_the_users_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank0.ilp"
    path.write_bytes(BROKEN["flipped byte"][0](GOOD))
    assert main([command, str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"interlace {command}: {path}: not a whole")
