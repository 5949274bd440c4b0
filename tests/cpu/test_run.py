"""`interlace run` and what is under it: real training on CPU processes, failing ranks, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from interlace import cli
from interlace.errors import LaunchError
from interlace.local import launch as launch_module
from interlace.local import processes
from interlace.local import rank as rank_module
from interlace.local.launch import LaunchResult, launch
from interlace.local.rank_report import RankReport, StepLoss
from interlace.local.verdict import first_difference
from tests.forked import Servers

TINY = Path(__file__).with_name("tiny_gpt.py")
paddle_needed = pytest.mark.paddle


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: no run directory, no shared memory file, no process of ours."""
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    shared = set(os.listdir("/dev/shm"))
    yield
    assert [path.name for path in tmp_path.glob("interlace-*") if not path.name.startswith("interlace-logs-")] == []
    assert not list(tmp_path.rglob("*.sock"))
    assert set(os.listdir("/dev/shm")) <= shared
    assert ranks_running(tmp_path) == []


def ranks_running(tmp_path: Path) -> list[str]:
    """Processes that were started for a script or a run directory under `tmp_path`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except (OSError, PermissionError):
            continue
        if b"interlace.local.rank" in words and os.fsencode(tmp_path) in words:
            found.append(entry.name)
    return found


def train(tmp_path: Path, world: int, *args: str) -> LaunchResult:
    return launch(TINY, [*args, "--layers", "4", "--micro-batches", "4"], world, {}, None, tmp_path / "logs", 60.0)


def losses(result: LaunchResult, rank: int = -1, mode: str = "train") -> list[str]:
    return [loss.raw_hex for loss in result.reports[rank].losses if loss.mode == mode]


def values(result: LaunchResult, rank: int = -1, mode: str = "train") -> list[float]:
    return [value for loss in result.reports[rank].losses if loss.mode == mode for value in loss.values]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def command(*words: object) -> int:
    return cli.main(["run", *map(str, words)])


@pytest.fixture(scope="module")
def one_process(rank_servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> LaunchResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start", rank_servers.start)
        return train(tmp_path_factory.mktemp("one"), 1)


@paddle_needed
@pytest.mark.parametrize(
    ("world", "args"),
    [(2, ("--pp", "2", "--schedule", "1F1B")), (2, ("--pp", "2", "--vpp", "2", "--schedule", "VPP"))],
)
def test_pipeline_gives_the_bits_of_one_process(
    request: pytest.FixtureRequest, tmp_path: Path, one_process: LaunchResult, world: int, args: tuple[str, ...]
) -> None:
    """Ranks of the plain pipeline start as a user's do."""
    if "VPP" in args:
        request.getfixturevalue("forked")
    result = train(tmp_path, world, *args)
    assert losses(result) == losses(one_process)
    assert all(not raw for raw in losses(result, 0))  # the first stage has no loss
    merged = {name: digest for report in result.reports for name, digest in report.parameters.items()}
    assert merged == one_process.reports[0].parameters
    assert len(merged) == 50


@paddle_needed
def test_four_ranks_pipeline_and_tensor_parallel(forked: None, tmp_path: Path, one_process: LaunchResult) -> None:
    result = train(tmp_path, 4, "--pp", "2", "--mp", "2", "--schedule", "FThenB")
    assert losses(result, 2) == losses(result, 3)
    assert values(result) == pytest.approx(values(one_process), rel=1e-5)


@paddle_needed
def test_data_parallel_with_fused_sharding_and_evaluation(forked: None, tmp_path: Path) -> None:
    """Fused parameters live in one buffer: results of collectives must land in it.

    No clipping: Paddle's fused gradients have uninitialised padding between small tensors, which the norm would read.
    """
    args = ["--dp", "2", "--eval", "--no-clip"]
    plain = launch(TINY, args, 2, {}, None, tmp_path / "plain", 60.0)
    fused = launch(TINY, [*args, "--sharding"], 2, {}, None, tmp_path / "fused", 60.0)
    for rank in (0, 1):
        assert values(fused, rank) == pytest.approx(values(plain, rank), rel=1e-6)
        assert len(values(plain, rank, "eval")) == 1
    assert values(plain, 0) != values(plain, 1)


@paddle_needed
def test_the_rank_that_failed_is_named_first(forked: None, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import paddle, paddle.distributed as dist
        dist.init_parallel_env()
        if dist.get_rank() == 1:
            raise ValueError("no data for rank 1")
        dist.all_reduce(paddle.ones([2]))
        """,
    )
    start_s = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(script, [], 3, {}, None, tmp_path / "logs", LIMIT_S)
    text = str(caught.value)
    assert text.startswith("rank 1 failed: ValueError: no data for rank 1\nlog of rank 1: ")
    assert "rank(s) 0, 2 only lost their peer and were ended" in text
    assert time.monotonic() - start_s < LIMIT_S, "ended before the others would have given up waiting"
    assert "raise ValueError" in (tmp_path / "logs" / "rank1.log").read_text()


@paddle_needed
def test_verify_command(forked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that trains differently when Interlace is on: found, named, exit code 1."""
    script = write(
        tmp_path,
        f"""
        import os, runpy, sys
        import paddle
        if os.environ.get("INTERLACE_DISABLE") != "1":
            seed = paddle.seed
            paddle.seed = lambda value: seed(value + 1)
        assert sys.argv[1:] == ["--steps", "2"] and __name__ == "__main__"
        runpy.run_path({os.fspath(TINY)!r}, run_name="__main__")
        """,
    )
    out = tmp_path / "out.json"
    words = ("--world", 1, "--verify", "--json", out, "--log-dir", tmp_path / "logs")
    assert command(script, *words, "--", "--steps", 2) == 1
    text = capsys.readouterr()
    assert "DIFFERENT: rank 0, train step 1: baseline " in text.out
    assert "<-- differs" in text.out
    assert "baseline: train step 2: loss" in text.err
    found = json.loads(out.read_bytes())
    assert found["verdict"] == "different"
    assert found["runs"]["baseline"]["median_step_ms"]["train"] > 0
    assert found["runs"]["interlace"]["ranks"][0]["plan"] is None


@pytest.mark.slow
def test_terminated_launcher_ends_its_ranks(tmp_path: Path) -> None:
    """SIGTERM, and SIGKILL too: ranks notice that their launcher is gone. No Paddle in the ranks: they only sleep.

    `wait_until` fails the test where a rank still runs `LIMIT_S` after its launcher ended; ranks would sleep ten times as long.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        script = write(tmp_path, "import time; time.sleep(600)")
        program = (
            "import sys; from interlace.local import launch;"
            "launch.cpu_command = lambda s, a: [sys.executable, '-c', 'import os, time;"
            " from interlace.local.rank import end_with_parent; end_with_parent(); time.sleep(600)', str(s)];"
            f"launch.launch({os.fspath(script)!r}, [], 2, {{}}, {os.fspath(tmp_path / f'run{number}')!r},"
            f" {os.fspath(tmp_path / 'logs')!r}, 5.0)"
        )
        launcher = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
        wait_until(lambda: len(ranks_running(tmp_path)) >= 3)
        launcher.send_signal(number)
        assert launcher.wait(LIMIT_S) != 0
        wait_until(lambda: ranks_running(tmp_path) == [])


LIMIT_S = 60.0
"""Far above what starting or ending a process takes on a busy machine; whether it happens at all is what is tested."""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.05)


USER_ERRORS: dict[str, tuple[list[object], str]] = {
    "script": (["absent.py", "--world", "2"], "absent.py: no such script; expected the path of a training script"),
    "world": ([TINY, "--world", "0"], "--world 0: expected a number of ranks"),
    "config": ([TINY, "--world", "1", "--config", "absent.yaml"], "absent.yaml: no such file"),
    "timeout": ([TINY, "--world", "1", "--timeout", "0"], "expected seconds above 0"),
    "json": ([TINY, "--world", "1", "--json", "/dev/null/x.json"], "--json '/dev/null/x.json': /dev/null is a file; expected a folder"),
    "logs": ([TINY, "--world", "1", "--log-dir", "/dev/null/logs"], "--log-dir '/dev/null/logs': /dev/null is a file"),
    "import": ([TINY, "--world", "1", "--import", "no_such_module"], "--import no_such_module: ModuleNotFoundError"),
}


@pytest.mark.paddle
@pytest.mark.parametrize("kind", USER_ERRORS)
def test_user_errors(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = USER_ERRORS[kind]
    assert command(*words) == 2
    assert expected in capsys.readouterr().err


def test_first_difference() -> None:
    def report(rank: int, *raw: str, **parameters: str) -> RankReport:
        steps = (StepLoss("train", i + 1, "float32", (), each, (float(i),)) for i, each in enumerate(raw))
        return RankReport(rank, 2, tuple(steps), parameters)

    same = (report(0, "aa", "bb", w="1"), report(1, "aa", "bb", w="2"))
    assert first_difference(same, same) is None
    later = (report(0, "aa", "xx", w="1"), report(1, "yy", "bb", w="2"))
    text = first_difference(same, later)
    assert text is not None
    assert text.startswith("rank 1, train step 1: baseline 0.0 (float32[], bits aa), interlace 0.0")
    parameters = (report(0, "aa", "bb", w="1"), report(1, "aa", "bb", w="3"))
    assert first_difference(same, parameters) == "rank 1, parameter w: sha256 baseline 2, interlace 3"
    state = tuple(RankReport(0, 2, same[0].losses, {"w": "1"}, state={"buffer": {"mean": digest}}) for digest in "56")
    text = first_difference((state[0], same[1]), (state[1], same[1]))
    assert text == "rank 0, buffer mean: sha256 baseline 5, interlace 6"
    text = first_difference((state[0], same[1]), same)
    assert text == "rank 0, buffer mean: sha256 baseline 5, interlace absent"
    shorter = (report(0, "aa", w="1"), same[1])
    assert first_difference(same, shorter) == "rank 0: baseline ran 2 steps, interlace 1"


def test_gpu_command_line() -> None:
    words = launch_module.gpu_command(Path("train.py"), ["--x", "1"], 8, Path("logs"))
    assert words[1:7] == ["-m", "paddle.distributed.launch", "--nproc_per_node", "8", "--log_dir", "logs"]
    assert Path(words[7]) == Path(rank_module.__file__)
    assert words[8:] == ["train.py", "--x", "1"]


def test_ranks_under_paddles_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs one process starts all ranks; their reports count, and the rank that failed is still named."""
    program = """
        import os, sys
        from interlace.local.rank_report import Failure, RankReport, write_report
        failing = int(sys.argv[1])
        for rank in range(3):
            failure = Failure("ValueError: no data") if rank == failing else None
            write_report(os.environ["INTERLACE_RUN_DIR"], RankReport(rank, 3, failure=failure))
        assert os.environ["INTERLACE_TARGET"] == "gpu"
        sys.exit(failing >= 0)
    """
    monkeypatch.setattr(launch_module, "has_gpu_paddle", lambda: True)
    monkeypatch.setattr(launch_module, "gpu_command", lambda script, args, *_: [sys.executable, "-c", textwrap.dedent(program), *args])
    assert [report.rank for report in launch("x", ["-1"], 3, {}, None, tmp_path, 5.0).reports] == [0, 1, 2]
    with pytest.raises(LaunchError, match=r"^rank 2 failed: ValueError: no data"):
        launch("x", ["2"], 3, {}, None, tmp_path, 5.0)


def test_command_and_launcher_do_not_import_paddle() -> None:
    code = "import sys, interlace.cli.run, interlace.local.launch; print('paddle' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
