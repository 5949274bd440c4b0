"""How commands end early: interrupted or with nobody to read on, they leave no process and no part of an output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interlace import interrupts
from interlace.cli import main
from interlace.cli.outputs import staged
from interlace.interrupts import as_interrupts, uninterrupted
from interlace.ir import dump as ir_dump
from interlace.ir import load, save
from interlace.ir.dump import SUFFIX
from interlace.local import building, launch
from tests.processes import alive, wait_until
from tests.strategies import World, programs

pytestmark = pytest.mark.usefixtures("few_forms")

NUM_RANKS = 4


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unscheduled programs of four stages; read only."""
    folder = tmp_path_factory.mktemp("ends") / "dumps"
    for program in programs(World(pp=NUM_RANKS, mp=1, micro_batches=4)):
        save(program, folder / f"rank{program.rank}.ilp")
    return folder


def signalled(number: int, after: int = 1) -> Callable[..., Any]:
    """In the place of a function: this process gets a signal at the call of that number."""
    calls: list[None] = []

    def kill(*args: Any, **more: Any) -> None:
        calls.append(None)
        if len(calls) == after:
            os.kill(os.getpid(), number)
            time.sleep(5)  # the handler runs before this ends

    return kill


def before(function: Callable[..., Any], happens: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **more: Any) -> Any:
        happens()
        return function(*args, **more)

    return both


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["plan", "timeline", "check", "show"])
def test_an_interrupted_command_leaves_nothing(
    dumps: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, command: str, number: int
) -> None:
    """While it reads its second file (show: its first), and where it writes, at the second file."""
    words = [command, str(dumps / "rank0.ilp")] if command == "show" else [command, str(dumps)]
    words += ["--json", str(tmp_path / "new" / "out.json")]
    words += ["-o", str(tmp_path / "out" / "x")] if command in ("plan", "timeline") else []
    handlers = [signal.getsignal(each) for each in interrupts.SIGNALS]
    for name in ("decode", *(["encode"] if command == "plan" else [])):
        with monkeypatch.context() as patch:
            patch.setattr(ir_dump, name, before(getattr(ir_dump, name), signalled(number, 1 if command == "show" else 2)))
            assert main(words) == 130
    said = capsys.readouterr()
    assert said.err.count(f"interlace {command}: interrupted") == 1 + (command == "plan")
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in interrupts.SIGNALS] == handlers


def test_outputs_are_put_in_place_whole(tmp_path: Path, monkeypatch: Any) -> None:
    """A signal in the middle of it interrupts behind it; before it nothing is there; an old folder keeps its other files."""
    folder = tmp_path / "a" / "b"
    with pytest.raises(KeyboardInterrupt), as_interrupts(), staged(folder) as into:  # noqa: PT012
        (into / "one").write_text("1")
        os.kill(os.getpid(), signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), as_interrupts(), staged(folder) as into:  # noqa: PT012
        for name in ("one", "two"):
            (into / name).write_text(name)
        patch.setattr(os, "replace", before(os.replace, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    (folder / "three").mkdir()
    with pytest.raises(Exception, match="three: is a folder; expected a file, or no such name"), staged(folder) as into:  # noqa: PT012
        (into / "one").write_text("new")
        (into / "three").write_text("new")
    assert (folder / "one").read_text() == "one"


def test_only_the_first_signal_counts_and_ignored_ones_stay_ignored() -> None:
    with pytest.raises(KeyboardInterrupt), as_interrupts():  # noqa: PT012
        try:
            with uninterrupted(), uninterrupted():
                os.kill(os.getpid(), signal.SIGHUP)
            pytest.fail("the signal was lost")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # while cleaning up
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with as_interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, old)


BUILDER = """
import os, sys, time
from interlace.local.rank import end_with_parent
end_with_parent()
rank, out = sys.argv[sys.argv.index("--rank") + 1], sys.argv[sys.argv.index("--out") + 1]
open(os.environ["STARTED"] + rank, "w").write(str(os.getpid()))
if rank == "0":
    open(out, "w").write("x")
    print('{"rank": 0, "ops": 1, "seconds": 0.1, "peak_rss_bytes": 1}')
else:
    open(out + ".part", "w").write("x")
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text("")
    return tmp_path / "script.py"


@pytest.mark.slow
def test_an_interrupted_dump_ends_its_processes(script: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """One rank is done, the other still builds."""
    monkeypatch.setattr(building, "BUILDER", [sys.executable, "-c", BUILDER])
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    first, second, made = tmp_path / "started0", tmp_path / "started1", tmp_path / "dumps"

    def stop() -> None:
        wait_until(lambda: all(file.exists() and file.read_text() for file in (first, second)))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert main(["dump", str(script), "--world", "2", "-o", str(made), "--json", str(tmp_path / "x.json")]) == 130
    thread.join()
    assert "interlace dump: interrupted" in capsys.readouterr().err
    assert not alive(second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py", "started0", "started1"]


@pytest.mark.paddle
def test_a_script_that_ends_its_process_or_prints_at_its_end(script: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """One builder ends without a program or a word, another says something behind its line."""
    monkeypatch.setattr(building, "BUILDER", [sys.executable, "-c", "import os; os._exit(0)"])
    assert main(["dump", str(script), "--world", "1", "-o", str(tmp_path / "dumps")]) == 2
    assert "script.py: rank 0 ended by itself before its program was built" in capsys.readouterr().err
    assert not (tmp_path / "dumps").exists()
    monkeypatch.setattr(building, "BUILDER", [sys.executable, "-c", BUILDER + "print('bye')"])
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    assert main(["dump", str(script), "--world", "1", "-o", str(tmp_path / "dumps")]) == 0
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["rank0" + SUFFIX]


@pytest.mark.paddle
def test_a_killed_dump_leaves_no_process(script: Path, tmp_path: Path) -> None:
    """SIGKILL: the children notice that nobody waits for them; fails in `wait_until` where one lives on."""
    imports = "import sys; from interlace.cli import main; from interlace.local import building"
    code = f"{imports}; building.BUILDER = [sys.executable, '-c', {BUILDER!r}]; sys.exit(main())"
    words = ["dump", str(script), "--world", "2", "-o", str(tmp_path / "dumps")]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], env={**os.environ, "STARTED": str(tmp_path / "started")}, stdout=subprocess.DEVNULL
    )
    second = tmp_path / "started1"
    wait_until(lambda: second.exists() and second.read_text() != "")
    process.kill()
    process.wait()
    wait_until(lambda: not alive(second))


@pytest.mark.paddle
def test_an_interrupted_run_leaves_no_logs(script: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(launch, "read_report", signalled(signal.SIGHUP))
    monkeypatch.setattr(launch, "cpu_command", lambda *args: [sys.executable, "-c", ""])
    assert main(["run", str(script), "--world", "1", "--json", str(tmp_path / "x.json")]) == 130
    assert "interlace run: interrupted" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["script.py", "temporary"]


def test_a_program_that_is_interrupted_waits_for_no_thread(dumps: Path, tmp_path: Path) -> None:
    """From outside, as a shell sees it: code 130, one line, at once, though other processes plan too."""
    code = (
        "import sys, time, interlace.planning.plan; from interlace.cli import main\n"
        f"interlace.planning.plan.Search = lambda *args: open({str(tmp_path / 'planning')!r}, 'w').close() or time.sleep(60)\n"
        "sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "plan", str(dumps), "-o", str(tmp_path / "plan")], stderr=subprocess.PIPE, text=True
    )
    wait_until((tmp_path / "planning").exists)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[1] == "interlace plan: interrupted; all processes that it started were ended\n"
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["planning"]


def test_a_reader_that_leaves_early_gets_whole_files_and_a_code(dumps: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """`interlace plan D -o out | head -0`: all ranks' plans, code 141."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["plan", str(dumps), "-o", str(tmp_path / "plan"), "--json", str(tmp_path / "plan.json")]) == 141
        monkeypatch.undo()
    assert all(line.endswith(" so far") for line in capsys.readouterr().err.splitlines())  # signs of life, on a busy machine
    assert (tmp_path / "plan.json").is_file()
    assert all(load(tmp_path / "plan" / f"rank{rank}.ilp").jobs for rank in range(NUM_RANKS))


def test_a_full_disk_behind_the_output_is_told(dumps: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "interlace", "show", str(dumps / "rank0.ilp")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "interlace show: standard output: No space left on device; expected a path that can be read or written"
    ]
