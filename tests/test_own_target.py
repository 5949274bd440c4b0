"""`--target MODULE`: a device that Interlace does not know, as the testbed is one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from interlace.cli import devices, main
from interlace.errors import ConfigError
from interlace.ir import parse, save
from interlace.local.own_target import find_own, search_folder

MODULE = """
from interlace.errors import ConfigError
from interlace.local.own_target import OwnTarget
from interlace.ir.target import Target

class Own(OwnTarget):
    rules = Target("own", serial=True)

    def require(self):
        raise ConfigError("own: no such device here")

    def install(self, rank, world, run_dir, timeout_s):
        raise AssertionError

TARGET = OTHER = Own()
NOTHING = 3
"""
FREED = """program rank=0 world=1 mode=train
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2] = pd_op.relu(%1) forward stream="side"
#3 %3:float32[2] = pd_op.gelu(%1) forward
#4 builtin.shadow_output(%3) forward {"output_name":"y"}
job one forward 0: 1-3@0"""
"""A value whose reader on a side stream is not the last one: unsafe where streams are real."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_device.py").write_text(MODULE)
    (tmp_path / "broken_device.py").write_text("import own_device.nothing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_target_is_found_by_its_module(own: Path) -> None:
    assert find_own("own_device") is find_own("own_device:OTHER")
    assert find_own("own_device").rules.name == "own"
    assert search_folder("own_device:OTHER") == str(own)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tpu", "No module named 'tpu'; expected cpu, gpu, or a module with a TARGET"),
        ("broken_device", "No module named 'own_device.nothing'; 'own_device' is not a package; expected cpu, gpu"),
        ("own_device:NOTHING", "own_device.NOTHING is 3; expected an interlace.local.own_target.OwnTarget"),
        ("sys", "sys.TARGET is None; expected an interlace.local.own_target.OwnTarget"),
    ],
)
def test_what_is_no_target_is_told(name: str, told: str, own: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        find_own(name)
    assert f"--target {name}: " in str(raised.value)
    assert told in str(raised.value)


def test_its_rules_are_checked(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(parse(FREED), own / "rank0.ilp")
    assert main(["check", "rank0.ilp", "--target", "gpu"]) == 1
    assert main(["check", "rank0.ilp", "--target", "own_device"]) == 0
    assert "rules of the own target" in capsys.readouterr().out
    assert main(["check", "rank0.ilp", "--target", "tpu"]) == 2
    assert "--target tpu: " in capsys.readouterr().err


@pytest.mark.paddle
def test_it_is_asked_whether_ranks_can_run_before_anything_starts(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "script.py").write_text("")
    assert main(["run", "script.py", "--world", "1", "--target", "own_device"]) == 2
    assert "own: no such device here" in capsys.readouterr().err


def test_ranks_share_a_folder_with_their_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with those of another container, whose launcher may have the same number, nor of a later launcher that gets this number."""
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:6170,127.0.0.1:6171")
    with devices._folder(2) as mine, devices._folder(2) as same:
        assert mine == same
        monkeypatch.setattr("platform.node", lambda: "another-container")
        with devices._folder(2) as other:
            assert other != mine
        monkeypatch.setattr(Path, "read_text", lambda path: f"1 (a (name)) S {' '.join('7' * 50)}")
        with devices._folder(2) as later:
            assert later not in (mine, other)
        assert mine.exists()
    assert not mine.exists()
    with devices._folder(1) as alone:
        assert alone not in (mine, other, later)


@pytest.mark.parametrize(
    ("number", "count", "told"),
    [
        ("0", "two", "PADDLE_TRAINERS_NUM=two: expected a whole number from 1 on, as launchers set it; unset it if there is no launcher"),
        ("0", "", "PADDLE_TRAINERS_NUM=: expected a whole number from 1 on"),
        ("0", "0", "PADDLE_TRAINERS_NUM=0: expected a whole number from 1 on"),
        ("1.5", "2", "PADDLE_TRAINER_ID=1.5: expected a whole number from 0 on"),
        ("2", "2", "PADDLE_TRAINER_ID=2: expected a number below PADDLE_TRAINERS_NUM, which is 2"),
    ],
)
@pytest.mark.parametrize("words", [["doctor"], ["calibrate", "-o", "x.json"]])
def test_numbers_that_no_launcher_sets_are_named(
    words: list[str], number: str, count: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", number)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", count)
    assert main(words) == 2
    assert told in capsys.readouterr().err
