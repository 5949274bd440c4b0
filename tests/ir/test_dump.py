"""Dump files: whole or absent, equal from run to run, and clear about what they are not."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlace.cli.outputs import check_file
from interlace.errors import ConfigError, OutputError, ProgramError
from interlace.ir import Program, load, save
from interlace.ir.dump import SCHEMA, decode, encode, find_dumps, write_whole
from tests.ir.odd_programs import odd_programs
from tests.strategies import World, plan, worlds

ONE = World(pp=2, mp=2, micro_batches=3, layers=2, streams=True, pairs=True, offload=True, seed=5)


@settings(max_examples=25, deadline=None)
@given(worlds())
def test_decode_is_the_inverse_of_encode(world: Any) -> None:
    """Text and dumps."""
    for program in plan(world):
        assert decode(encode(program)) == program


@settings(max_examples=150, deadline=None)
@given(odd_programs())
def test_every_field_survives(program: Program) -> None:
    """Text and dumps, odd programs."""
    assert decode(encode(program)) == program


@pytest.mark.parametrize("name", ["rank0.ilp", "rank0.ilp.gz", "deep/er/rank0.ilp"])
def test_load_is_the_inverse_of_save(tmp_path: Path, name: str) -> None:
    """Text and dumps."""
    program = plan(ONE)[0]
    assert load(save(program, tmp_path / name)) == program
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [Path(name).name]


def test_dumps_are_byte_identical_from_run_to_run(tmp_path: Path) -> None:
    """Text and dumps. Other processes with other hash seeds write the same bytes, compressed ones too."""
    script = (
        "import hashlib, sys; from tests.strategies import *; from interlace.ir import save\n"
        "one = World(pp=2, mp=2, micro_batches=3, layers=2, streams=True, pairs=True, offload=True, seed=5)\n"
        "path = save(plan(one)[0], sys.argv[1]); print(hashlib.sha256(path.read_bytes()).hexdigest())"
    )
    mine = hashlib.sha256(save(plan(ONE)[0], tmp_path / "mine.ilp.gz").read_bytes()).hexdigest()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", script, str(tmp_path / f"{seed}.ilp.gz")]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."}
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=Path(__file__).parents[2])
        assert found.stdout.strip() == mine


def test_another_schema_is_refused(tmp_path: Path) -> None:
    """Text and dumps."""
    path = tmp_path / "new.ilp"
    path.write_bytes(encode(plan(ONE)[0]).replace(f'"interlace_schema":{SCHEMA}'.encode(), b'"interlace_schema":99'))
    told = rf"new\.ilp: dump schema 99 \(Interlace .*\), this version reads schemas 1, 2 and {SCHEMA}; make"
    with pytest.raises(ProgramError, match=told):
        load(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 0.999), zipped=st.booleans())
def test_a_dump_cut_short_is_refused(tmp_path: Path, cut: float, zipped: bool) -> None:
    """Text and dumps."""
    data = encode(plan(World())[0])
    data = gzip.compress(data, mtime=0) if zipped else data
    path = tmp_path / "cut.ilp"
    path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(ProgramError, match=r"cut\.ilp: "):
        load(path)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80))
def test_bytes_that_are_no_dump_are_refused(data: bytes) -> None:
    """Text and dumps."""
    with pytest.raises(ProgramError, match=r"here\.ilp"):
        decode(data, "here.ilp")


@pytest.mark.parametrize("change", [{"rank": "one"}, {"ops": [[0, "pd_op.relu", [], [], "sideways"]]}, {"colour": 3}])
def test_a_dump_of_other_fields_is_refused(change: dict[str, Any]) -> None:
    """Text and dumps."""
    raw = msgspec.json.decode(encode(plan(World())[0]))
    raw["program"].update(change)
    with pytest.raises(ProgramError, match="here: not a whole Interlace dump"):
        decode(msgspec.json.encode(raw), "here")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Text and dumps."""
    for path in (tmp_path / "none.ilp", tmp_path):
        with pytest.raises(ProgramError, match=f"{path.name}: cannot be read"):
            load(path)


@pytest.mark.parametrize("step", ["write", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: Any, step: str, error: BaseException) -> None:
    """Interrupts. The old file stays as it was, and no part of the new one is left."""
    path = tmp_path / "rank0.ilp"
    path.write_bytes(b"old")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(os, "fdopen" if step == "write" else "replace", fail)
    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
        write_whole(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["rank0.ilp"]
    assert path.read_bytes() == b"old"


def test_no_file_takes_the_place_of_what_is_none(tmp_path: Path) -> None:
    """A pipe, a socket or a device stays what it is, and so does what /dev/stdout leads to."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    (tmp_path / "null").symlink_to("/dev/null")
    kinds = {"pipe": "a pipe", "stdout": "an open file of a process", "null": "a device"}
    for name, kind in kinds.items():
        with pytest.raises(OutputError, match=f"is {kind}, which no file may replace"):
            write_whole(tmp_path / name, b"new")
        with pytest.raises(ConfigError, match=f"--json .*: is {kind}; expected the name of a file"):
            check_file("--json", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kinds)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    assert os.path.islink(tmp_path / "null")


def test_a_program_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """Interrupts."""
    program = plan(World())[0]
    spoilt = program.with_ops([msgspec.structs.replace(program.ops[0], attrs={"x": object()}), *program.ops[1:]])
    with pytest.raises(TypeError):
        save(spoilt, tmp_path / "rank0.ilp")
    assert list(tmp_path.iterdir()) == []


def test_dumps_of_a_folder_come_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    """Offline."""
    for rank in (10, 9, 0):
        save(plan(World())[0], tmp_path / f"rank{rank}.ilp")
    assert [path.name for path in find_dumps([tmp_path])] == ["rank0.ilp", "rank9.ilp", "rank10.ilp"]
    with pytest.raises(ProgramError, match=r"has 3 dumps, expected one; choose one of rank0\.ilp, rank9\.ilp, rank10\.ilp"):
        find_dumps([tmp_path], one=True)
    with pytest.raises(ProgramError, match=r"nowhere: no such file or folder; expected a file, or a folder of files, that"):
        find_dumps([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProgramError, match=r"empty: a folder without \*\.ilp files; expected"):
        find_dumps([tmp_path / "empty"])
