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
from interlace.local.building import Build, Request
from tests.processes import wait_until

BUILDER = """
import hashlib, json, os, sys, time
rank, out, script = (sys.argv[sys.argv.index(name) + 1] for name in ("--rank", "--out", "--out"))
script = next(word for word in sys.argv if word.endswith(".py"))
if "refuse" in sys.argv:
    sys.exit("first line\\nno such layout")
if "kill" in sys.argv:
    os.kill(os.getpid(), 9)
if "slow" in sys.argv:
    open(script + ".started", "w").write("x")
    time.sleep(60)
open(out, "w").write(open(script).read() + rank)
sources = {script: hashlib.sha256(open(script, "rb").read()).hexdigest()[:32]}
print(json.dumps({"rank": int(rank), "ops": 1, "seconds": 0.1, "peak_rss_bytes": 1, "sources": sources}))
"""


@pytest.fixture(autouse=True)
def builder(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Build.start.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Build,
        "start",
        classmethod(lambda kind, request, path, more=None: start(kind, request, path, [sys.executable, "-c", BUILDER], more)),
    )
    assert building.BUILDER[0] == sys.executable


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


def test_a_refusal_is_kept_in_the_scripts_words(script: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (found,) = store(tmp_path, said).build([Request(str(script), ("refuse",), 0, 2)])
    assert (found.refused, said) == ("no such layout", ["refused: rank 0 of refuse"])
    again: list[str] = []
    assert store(tmp_path, again).build([Request(str(script), ("refuse",), 0, 2)]) == [found]
    assert again == []


def test_a_builder_that_is_killed_is_no_refusal(script: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="could not be built"):
        store(tmp_path).build([Request(str(script), ("kill",), 0, 2)])
    assert not list((tmp_path / "kept" / "programs").glob("*.json"))


@pytest.mark.main_thread
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
