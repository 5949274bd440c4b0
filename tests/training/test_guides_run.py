"""Every guide as a newcomer follows it, with the script of the first steps: its files are written down as they stand, its commands run in
their order, each without an error."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from interlace.cli import main
from interlace.config import load_config
from interlace.cost_model import load_profile
from interlace.ir import load
from interlace.planning.plan import read_record
from interlace.planning.rows import rows_of, rows_text

pytestmark = [pytest.mark.paddle, pytest.mark.usefixtures("few_forms")]
ROOT = Path(__file__).parents[2]
FIRST = ROOT / "docs" / "first-steps.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"^`([\w-]+\.(?:py|rows|yaml))`", re.MULTILINE)
SHORTER = {
    "-- 4096 16384": "-- 64 16",
    "--preset gpt3-6.7b --layers 4": "--layers 2",
    "--micro-batches 8 --seq-len 2048": "--micro-batches 4 --seq-len 32",
    "--sweep": "--sweep --points 2",
    "--gpus 4 --memory 70GB --device h100 --layers": "--gpus 2 --memory 70GB --device h100 --layers",
    "--layouts 8": "--layouts 2 --finalists 1",
    "-- --layers 4 --batch-size 16": "-- --layers 2 --batch-size 8",
    "--batch-size 16": "--batch-size 8",
    "--attention flash --amp O2 --master-grad ": "",
}
"""Sizes of models and curves in commands, which would take minutes, and those that are taken here."""
SIZE, SMALLER = "LAYERS, MICRO_BATCHES, STEPS = 4, 8, 3", "LAYERS, MICRO_BATCHES, STEPS = 2, 4, 3"
"""The script's model, where no document shows what comes of its size."""
NOT_RUN = {
    "pip install": "would install packages",
    "INTERLACE_CONFIG=overlap python -m interlace.launch": "needs GPUs; tests/cpu/test_launcher.py runs it on CPU ranks",
    "python -m paddle.distributed.launch": "needs GPUs; tests/testbed/test_calibrate.py measures two devices together",
    "interlace calibrate": "measures this machine for a minute; tests/cost_model/test_calibrate.py runs it",
}
"""Beginnings of commands that are not run here, and why."""
NO_COMMANDS = {
    "docs/guide-memory.md": "the table that --sweep printed",
    "docs/guide-choose.md": "the screen that its first command printed",
}
"""Documents with a fenced block without a language, and what it is."""
OWN = ("model = dist.to_static(", "model.train()")
"""Lines that the script has already; what a document shows before and after them is added there."""


class Block(NamedTuple):
    """A fenced block, and the paragraph before it."""

    before: str
    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [Block(text[: found.start()].rpartition("\n\n")[2], *found.groups()) for found in BLOCK.finditer(text)]


def lines(document: Path) -> Iterator[str]:
    """Of all blocks of commands."""
    for block in blocks(document):
        if block.language == "sh":
            yield from (line for line in block.text.splitlines() if line.strip())


GUIDES = [FIRST, *sorted((ROOT / "docs").glob("guide-*.md")), ROOT / "docs" / "commands.md", ROOT / "README.md"]
SCRIPT = blocks(FIRST)[0].text


@pytest.fixture(scope="module")
def dumps(forked_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first command of the first steps leaves of a smaller model; read only."""
    folder = tmp_path_factory.mktemp("guides")
    (folder / "train.py").write_text(smaller(SCRIPT))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(words(next(lines(FIRST)))) == 0
    return folder / "dumps"


@pytest.fixture
def whole(forked_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the script as it stands, as the current one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def here(dumps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the script of a smaller model, its dumps, and our examples, as the current one."""
    (tmp_path / "train.py").write_text(smaller(SCRIPT))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(dumps, tmp_path / "dumps")
    monkeypatch.chdir(tmp_path)


def smaller(script: str) -> str:
    assert SIZE in script
    return script.replace(SIZE, SMALLER)


def words(line: str) -> list[str]:
    for long, short in SHORTER.items():
        line = line.replace(long, short)
    return shlex.split(line, comments=True)[1:]


def follow(document: Path, said: Callable[[], str]) -> dict[str, str]:
    """Do what a document says; gives what each command printed."""
    printed: dict[str, str] = {}
    for block in blocks(document):
        names = NAME.findall(block.before)
        if block.language == "python" and names:
            Path(names[-1]).write_text(block.text.replace(SIZE, SMALLER))
        elif block.language == "python":
            add_to_script(block.text)
        elif block.language == "yaml":
            Path("my.yaml").write_text(block.text)
        elif block.language in ("rows", "json"):
            Path("my.rows" if block.language == "rows" else "my-device.json").write_text(block.text)
        elif block.language == "sh":
            for line in block.text.splitlines():
                if line.startswith("interlace ") and not line.startswith(tuple(NOT_RUN)):
                    assert main(words(line)) == 0, line
                    printed[line] = said()
                elif line.startswith("cp "):
                    shutil.copyfile(*shlex.split(line)[1:])
                else:
                    assert line.startswith(tuple(NOT_RUN)) or not line.strip(), f"{document}: {line}: not run, and not told why"
        else:
            assert str(document.relative_to(ROOT)) in NO_COMMANDS, f"{document}: a block without a language: {block.text}"
    return printed


def add_to_script(text: str) -> None:
    """Put lines into the script where the document shows them: around those that it has already, else before them."""
    script = Path("train.py").read_text()
    added: dict[str, list[str]] = {"": []}
    at = ""
    for line in text.splitlines():
        own = next((each for each in OWN if line.startswith(each)), None)
        at = own or at
        added.setdefault(at, []).extend([line] if own is None else [])
    first = next(line for line in script.splitlines(keepends=True) if line.startswith(OWN[0]))
    script = script.replace(first, "\n".join(added.pop("")) + "\n" + first)
    for own, more in added.items():
        line = next(each for each in script.splitlines(keepends=True) if each.startswith(own))
        script = script.replace(line, line + "".join(f"{each}\n" for each in more))
    Path("train.py").write_text(script)


def test_what_is_shortened_or_left_out_is_there() -> None:
    """An entry that no document has any more would hide the next one."""
    every = [line for document in GUIDES for line in lines(document)]
    assert [long for long in SHORTER if not any(long in line for line in every)] == []
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in every)] == []
    assert {str(document.relative_to(ROOT)) for document in GUIDES for block in blocks(document) if not block.language} == set(NO_COMMANDS)


def test_first_steps(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Each command prints what the document says; the commands of step 1 see the script as it was, that of step 2 with its two lines.
    Parameters are as many for each layer."""
    shutil.rmtree("dumps")
    printed = follow(FIRST, lambda: capfd.readouterr().out)
    assert [line.split()[1] for line in printed] == ["dump", "plan", "report", "run"]
    _, plan, _, verified = printed.values()
    assert re.search(r"^Paddle's baseline takes .* ms a step, this plan .* ms", plan, re.MULTILINE)
    assert Path("report.html").read_text().startswith("<!doctype html>")
    ((losses, parameters),) = re.findall(r"`SAME: (\d+) losses, (\d+) parameters, ... of 4 ranks are equal", FIRST.read_text())
    layers, fewer = (int(re.findall(r"= (\d+),", size)[0]) for size in (SIZE, SMALLER))
    assert f"SAME: {losses} losses, {int(parameters) * fewer // layers} parameters" in verified
    assert "import interlace\n" in Path("train.py").read_text()


@pytest.mark.long
def test_readme(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    """The lines that it adds explain the plan and write its page in the run. (The first steps have the same commands.)"""
    document = ROOT / "README.md"
    printed = list(follow(document, lambda: capfd.readouterr().out).values())
    assert "SAME: 6 losses" in printed[0]
    assert "interlace | rank" in printed[0]
    assert Path("report.html").is_file()
    assert len(list(Path("dumps").glob("*.ilp"))) == 4


def test_commands(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Plans made once are those that a run loads; the configuration loads; the example gives the figures of both plans."""
    shutil.rmtree("dumps")
    printed = follow(ROOT / "docs" / "commands.md", lambda: capfd.readouterr().out)
    (loaded,) = (text for line, text in printed.items() if line.startswith("interlace run"))
    assert "plan of rank 0: " in loaded
    assert re.search(r"^plan against baseline: \S+ -> \S+ ms a step", list(printed.values())[-1], re.MULTILINE)
    assert load_config("my.yaml").dump == "plans/"


def test_choosing_a_memory_budget(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    """The sweep prints the columns that the guide shows, and a plan has its budget, which is that of the configuration."""
    document = ROOT / "docs" / "guide-memory.md"
    printed = list(follow(document, lambda: capfd.readouterr().out).values())
    (shown,) = re.findall(r"^ budget GiB .*$", document.read_text(), re.MULTILINE)
    heads = [re.sub(r"\b[KMG]iB\b", "GiB", line) for line in printed[0].splitlines()]  # the unit fits the sizes
    assert shown in heads
    assert "Step time against memory" in Path("report.html").read_text()
    assert read_record("mine/rank0.ilp").memory_budget == load_config("my.yaml").memory_budget == 70 * 10**9


def test_choosing_a_layout(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Both commands recommend a layout with its command line; the page is there."""
    first, listed = follow(ROOT / "docs" / "guide-choose.md", lambda: capfd.readouterr().out).values()
    assert re.search(r"^recommended: pp \d, mp \d, dp \d, m \d", first, re.MULTILINE)
    assert re.search(r"^  examples/gpt.py --layers 2 .*--pp \d", first, re.MULTILINE)
    assert listed.count("2 layouts: 2 simulated, of these 2 planned in full") == 1
    assert Path("layouts/choose.html").read_text().startswith("<!doctype html>")


def test_the_page(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "dumps", "--config", "baseline", "-o", "plan"]) == 0
    follow(ROOT / "docs" / "guide-page.md", lambda: capfd.readouterr().out)
    assert Path("report.html").read_text().startswith("<!doctype html>")


def test_a_pass_of_ones_own(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    """It does something in this model; the command that trains with it, which stands in the text, gives the same bits."""
    document = ROOT / "docs" / "guide-pass.md"
    _, why, difference, _ = follow(document, lambda: capfd.readouterr().out).values()
    assert "priority changed: before -1, after 1" in why
    assert re.search(r"^  ~ \d+ .*: priority -1 -> 1$", difference, re.MULTILINE)
    (trains,) = re.findall(r"`(interlace run .* --verify)`", document.read_text())
    assert main(words(trains)) == 0
    assert "SAME: 6 losses" in capfd.readouterr().out
    _, test = (block.text for block in blocks(document) if block.language == "python")
    ran = subprocess.run(
        [sys.executable, "-c", test], env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_a_schedule_file(whole: None, capfd: pytest.CaptureFixture[str]) -> None:
    """The file of the guide is a schedule of this script, as are the rows that are copied in its place."""
    assert main(words(next(lines(FIRST)))) == 0
    document = ROOT / "docs" / "guide-schedule.md"
    _, shown, _, checked, compared = follow(document, lambda: capfd.readouterr().out).values()
    assert rows() == shown == Path("my.rows").read_text()
    assert "safe: no race" in checked
    assert "mine against plan: " in compared
    (text,) = (block.text for block in blocks(document) if block.language == "rows")
    Path("my.rows").write_text(text)
    assert main(["plan", "dumps", "--config", "my.yaml", "-o", "asis"]) == 0
    assert rows("asis") == text
    assert main(["check", "asis"]) == 0


def rows(folder: str = "mine") -> str:
    return rows_text(rows_of([load(path) for path in Path(folder).glob("*.ilp")]))


def test_a_device_profile(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    printed = list(follow(ROOT / "docs" / "guide-device-profile.md", lambda: capfd.readouterr().out).values())
    assert "profile my-device.json" in printed[0]
    assert load_profile("my-device.json").device == "My GPU"


def test_every_guide_is_followed() -> None:
    """A new guide needs a test here."""
    tested = {
        "first-steps.md",
        "README.md",
        "commands.md",
        "guide-memory.md",
        "guide-choose.md",
        "guide-page.md",
        "guide-pass.md",
        "guide-schedule.md",
        "guide-device-profile.md",
    }
    assert {document.name for document in GUIDES} == tested


def test_one_time_for_compiling_kernels() -> None:
    """All documents, and what is printed, say the same of it."""
    said: dict[str, Any] = {}
    for path in [
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        ROOT / "examples" / "README.md",
        ROOT / "interlace" / "cpu" / "kernels" / "build.py",
    ]:
        text = " ".join(path.read_text().split())
        for sentence in re.findall(r"[^.;]*\b(?:compil\w+|compiler)\b[^.]*", text):
            for time in re.findall(r"\b(\d+) ?s(?:econds)?\b(?! so far)|(half a minute|a minute)", sentence):
                said.setdefault("".join(time), []).append(path.name)
    assert set(said) == {"15"}, said
