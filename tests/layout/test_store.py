"""What was built is kept by content, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from interlace.errors import LaunchError
from interlace.interrupts import as_interrupts
from interlace.layout.store import Store
from interlace.local import building
from interlace.local.building import Request
from tests.processes import wait_until

BUILDER = """
import hashlib, json, os, sys, time
rank, out, script = (sys.argv[sys.argv.index(name) + 1] for name in ("--rank", "--out", "--out"))
script = next(word for word in sys.argv if word.endswith(".py"))
if "refuse" in sys.argv:
    sys.exit("first line\\nno such layout")
if "kill" in sys.argv:
    os.kill(os.getpid(), 9)
if "crash" in sys.argv:
    os.kill(os.getpid(), 11)
for word in sys.argv:
    if word.endswith(".log"):
        open(word, "a").write("written")
if "slow" in sys.argv:
    open(script + ".started", "w").write("x")
    time.sleep(60)
sources = {script: hashlib.sha256(open(script, "rb").read()).hexdigest()[:32]}
def build(rank, path, text):
    open(path, "w").write(text)
    print(json.dumps({"rank": int(rank), "ops": 1, "seconds": 0.1, "peak_rss_bytes": 1, "sources": sources}))
for other in ("1", "2") if "--stages" in sys.argv else ():
    folder, name = os.path.split(out)
    build(other, os.path.join(folder, f"rank{other}-{name}"), open(script).read() + ("0" if "by-rank" in sys.argv else other))
build(rank, out, open(script).read() + rank)
"""


@pytest.fixture(autouse=True)
def builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "BUILDER", [sys.executable, "-c", BUILDER])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("one")
    return tmp_path / "train.py"


def store(folder: Path, said: list[str] | None = None) -> Store:
    return Store(folder / "kept", 2, (said if said is not None else []).append)


def test_what_is_built_is_not_built_again(script: Path, tmp_path: Path) -> None:
    requests = [Request(str(script), ("--pp", "2"), rank, 2) for rank in (0, 1, 0)]
    first, second = store(tmp_path), store(tmp_path)
    built = first.build(requests)
    assert (first.built, second.build(requests) == built, second.built) == (2, True, 0)
    script.write_text("two")
    assert [each.digest for each in second.build(requests)] != [each.digest for each in built]
    assert second.built == 2
    third = store(tmp_path)
    third.path(requests[0]).write_text("cut short")
    third.build(requests)
    assert third.built == 1


def test_a_file_that_its_arguments_name_may_be_written_by_the_script(script: Path, tmp_path: Path) -> None:
    kept, request = store(tmp_path / "kept"), Request(str(script), (str(tmp_path / "train.log"),), 0, 1)
    assert not kept.build([request])[0].refused
    assert (tmp_path / "train.log").is_file()
    assert kept.path(request).read_text() == "one0"
    assert kept.found(request)


def test_all_that_a_program_depends_on_makes_another(script: Path, tmp_path: Path) -> None:
    sizes = tmp_path / "sizes.json"
    sizes.write_text("1")
    one = Request(str(script), (str(sizes),), 0, 2)
    others = [
        Request(str(script), ("x",), 0, 2),
        Request(str(script), (str(sizes),), 1, 2),
        Request(str(script), (str(sizes),), 0, 4),
        Request(str(script), (str(sizes),), 0, 2, ("--materialize",)),
        Request(str(script), (str(sizes),), 0, 2, (), (("A", "1"),)),
    ]
    paths = {store(tmp_path).path(each) for each in (one, *others)}
    assert len(paths) == 6
    sizes.write_text("2")
    assert store(tmp_path).path(one) not in paths


def test_one_build_gives_the_programs_of_all_stages(script: Path, tmp_path: Path) -> None:
    """One of them is built by itself to compare, once for a script."""
    first, second = store(tmp_path), store(tmp_path)
    requests = [Request(str(script), (), rank, 3) for rank in range(3)]
    (built,) = first.build(requests[:1], has_stages=True)
    assert first.built == 3
    assert [second.path(each).read_text() for each in requests] == ["one0", "one1", "one2"]
    assert second.build(requests)[0] == built
    assert second.built == 0
    compared = list((tmp_path / "kept" / "found").iterdir())
    second.build([Request(str(script), ("x",), 0, 3)], has_stages=True)
    assert (second.built, list((tmp_path / "kept" / "found").iterdir())) == (3, compared)
    assert sorted(each.suffix for each in (tmp_path / "kept" / "programs").iterdir()) == [".gz"] * 6 + [".json"] * 6


def test_stages_are_built_apart_where_one_build_gives_others(script: Path, tmp_path: Path) -> None:
    """As where a script itself looks at its rank."""
    said: list[str] = []
    mine = store(tmp_path, said)
    requests = [Request(str(script), ("by-rank",), rank, 3) for rank in range(3)]
    mine.build(requests[:1], has_stages=True)
    assert (mine.built, mine.may_fork) == (1, False)
    assert "one build for all stages gives other programs than one for each" in said[-1]
    mine.build(requests)
    assert [mine.path(each).read_text() for each in requests] == ["one0", "one1", "one2"]
    again = store(tmp_path)
    again.build([Request(str(script), ("by-rank", "x"), 0, 3)], has_stages=True)
    assert (again.built, again.may_fork) == (1, False)
    assert not [each for each in (tmp_path / "kept" / "programs").iterdir() if each.name.startswith(("rank", "apart"))]


def test_a_refusal_is_kept_in_the_scripts_words(script: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (found,) = store(tmp_path, said).build([Request(str(script), ("refuse",), 0, 2)])
    assert (found.refused, said) == ("no such layout", ["refused: rank 0 of refuse"])
    again: list[str] = []
    assert store(tmp_path, again).build([Request(str(script), ("refuse",), 0, 2)]) == [found]
    assert again == []


def test_a_builder_that_crashes_refuses(script: Path, tmp_path: Path) -> None:
    """Paddle ends so on some layouts; the search goes on without them."""
    made = store(tmp_path).build([Request(str(script), (word,), 0, 2) for word in ("crash", "fine")])
    assert made[0].refused == f"rank 0 of {script} could not be built (ended by SIGSEGV)"
    assert not made[1].refused


def test_a_builder_that_is_killed_is_no_refusal(script: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="could not be built"):
        store(tmp_path).build([Request(str(script), ("kill",), 0, 2)])
    assert not list((tmp_path / "kept" / "programs").glob("*.json"))


def test_after_an_interrupt_it_goes_on_where_it_was(script: Path, tmp_path: Path) -> None:
    requests: list[Any] = [Request(str(script), (word,), 0, 2) for word in ("quick", "slow")]
    one = Store(tmp_path / "kept", 1, lambda said: None)
    started = Path(f"{script}.started")

    def stop() -> None:
        wait_until(started.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(KeyboardInterrupt), as_interrupts():
        one.build(requests)
    thread.join()
    again = store(tmp_path)
    again.build(requests[:1])
    assert (again.built, again.found(requests[1])) == (0, None)
