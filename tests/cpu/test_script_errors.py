"""What `interlace run` says of a script that cannot run: once, without a traceback where the script says it all, with its exit code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from interlace.bridge.mesh import require_world
from interlace.cli import main
from interlace.errors import ConfigError
from interlace.ir import Program, save
from interlace.local import launch as launch_module
from interlace.local.rank import failure_of

SCRIPTS = {
    "argparse": ("import argparse; argparse.ArgumentParser(prog='mine').parse_args()", 2, "mine: error: unrecognized arguments: --bogus"),
    "message": ("raise SystemExit('pp x mp = 4, but 2 processes are running')", 2, "the script ended: pp x mp = 4"),
    "configuration": ("import interlace.config as c; c.make_config({'fracton': 1})", 2, "unknown option 'fracton'"),
    "syntax": ("print(", 2, "SyntaxError: '(' was never closed"),
    "exception": ("raise ValueError('boom')", 1, "ranks 0, 1 failed: ValueError: boom"),
}


@pytest.mark.paddle
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_that_fails(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one kind start as a user's do, with all that Paddle's import says."""
    if kind != "argparse":
        request.getfixturevalue("forked")
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    monkeypatch.setattr(launch_module, "ORIGIN_GRACE_S", 20.0)  # both ranks end by themselves
    text, code, expected = SCRIPTS[kind]
    script = tmp_path / "script.py"
    script.write_text(text + "\n")
    assert main(["run", str(script), "--world", "2", "--", "--bogus"]) == code
    said = capfd.readouterr().err
    assert said.count(expected) == 1 if code == 2 else said.startswith(f"interlace run: {expected}")
    assert ("Traceback" in said) == (code == 1)
    assert "ccache" not in said


@pytest.mark.paddle
def test_prints_of_the_first_rank_are_shown_and_logs_go(
    forked: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    script = tmp_path / "script.py"
    script.write_text("import os; print('I am', os.environ['PADDLE_TRAINER_ID'])\n")
    assert main(["run", str(script), "--world", "2"]) == 0
    assert "run | I am 0\n" in capfd.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_exit_codes_of_scripts() -> None:
    assert failure_of(SystemExit(2), "x.py").users
    assert not failure_of(SystemExit(1), "x.py").users
    assert failure_of(SystemExit(1), "x.py").text == "the script ended with exit code 1"
    assert not failure_of(SyntaxError("of another file", ("other.py", 1, 1, "")), "x.py").users


@pytest.mark.paddle
def test_targets_are_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_module, "has_gpu_paddle", lambda: False)
    monkeypatch.setenv("TESTBED_BUILD", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text("")
    for target, told in (("gpu", "use --target cpu"), ("testbed", "build it with `make testbed`")):
        assert main(["run", str(script), "--world", "2", "--target", target]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.paddle
def test_outputs_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, blocked = tmp_path / "script.py", tmp_path / "file"
    script.write_text("")
    blocked.write_text("")
    assert main(["run", str(script), "--world", "1", "--log-dir", str(blocked / "logs")]) == 2
    assert "is a file; expected a folder there" in capsys.readouterr().err


def test_paths_that_fail_late_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders of /proc take no files, whatever their permissions say."""
    dump = save(Program((), ()), tmp_path / "rank0.ilp")
    assert main(["plan", str(dump), "-o", "/proc/plans"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.paddle
@pytest.mark.parametrize("kind", ["argparse", pytest.param("exception", marks=pytest.mark.long)])
def test_a_dump_of_a_script_that_fails_ends_as_a_run_does(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, code, expected = SCRIPTS[kind]
    script = tmp_path / "script.py"
    script.write_text(text + "\n")
    assert main(["dump", str(script), "--world", "1", "-o", str(tmp_path / "out"), "--", "--bogus"]) == code
    said = capfd.readouterr().err
    assert expected.rpartition("failed: ")[2] in said
    assert "ccache" not in said


@pytest.mark.parametrize(
    ("named", "world", "told"),
    [
        (
            {0, 1, 2},
            2,
            "2 processes run; the meshes also name rank(s) 2; expected each process in a mesh and each rank of a mesh running: "
            "start 3 with --world 3",
        ),
        (set(range(4)), 8, "8 processes run; no mesh names rank(s) 4-7"),
        ({2, 3}, 4, "4 processes run; no mesh names rank(s) 0-1; expected each process in a mesh: change the mesh, or number its ranks"),
        ({1, 2}, 2, "2 processes run; the meshes also name rank(s) 2; no mesh names rank(s) 0"),
    ],
)
def test_meshes_that_are_not_the_world(named: set[int], world: int, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        require_world(named, world)
    assert told in str(raised.value)
    for same in (set(range(world)), set[int]()):
        require_world(same, world)


OTHER_WORLD = """
import paddle, paddle.distributed as dist, interlace
mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["dp"])
layer = paddle.nn.Linear(4, 4)
layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Replicate()])
layer.bias = dist.shard_tensor(layer.bias, mesh, [dist.Replicate()])
sgd = dist.shard_optimizer(paddle.optimizer.SGD(parameters=layer.parameters()))
data = paddle.io.DataLoader([(paddle.ones([4]).numpy(), paddle.ones([4]).numpy())] * 8, batch_size=4)
strategy = dist.Strategy()
interlace.enable(strategy)
dist.to_static(layer, dist.shard_dataloader(data, mesh, shard_dims="dp"), paddle.nn.MSELoss(), sgd, strategy).train()
"""


@pytest.mark.paddle
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("door", [["dump", "--rank", "6", "--world", "8"], ["run", "--world", "6"], ["run", "--world", "2"]])
def test_every_door_compares_the_meshes_with_the_world(door: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before anything is built, in the same words; an empty program and an index error came of it once."""
    script = tmp_path / "script.py"
    script.write_text(OTHER_WORLD)
    where = ["-o", str(tmp_path / "out")] if door[0] == "dump" else ["--log-dir", str(tmp_path / "logs")]
    assert main([door[0], str(script), *door[1:], *where]) == 2
    said = capfd.readouterr().err
    assert "the script's meshes and the processes that run differ: " in said
    assert "start 4 with --world 4, or change the mesh" in said
