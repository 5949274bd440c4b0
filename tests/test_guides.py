"""What the documents show runs: guides' files and commands on dumps without Paddle; every command line of every document parses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlace.cli import COMMANDS, _parse, main
from interlace.config import load_config
from interlace.cost_model import load_profile
from interlace.ir import save
from interlace.passes.pipeline import built_in
from interlace.planning.plan import read_record
from tests.strategies import World, programs

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "examples" / "README.md", *ROOT.glob("docs/*.md")])
GUIDES = {"guide-pass": "my_pass.py", "guide-schedule": "my.rows", "guide-device-profile": "my-device.json"}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OFFLINE = ("plan", "show", "check", "timeline")


def blocks(path: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(path.read_text()) if language in languages]


def commands(path: Path) -> Iterator[list[str]]:
    """Words of every `interlace ...` line in fenced blocks, and of commands in backquotes that name what they work on."""
    fenced = [line for text in re.findall(r"^```\w*\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL) for line in text.splitlines()]
    quoted = re.findall(r"`(interlace \w+ [^-`][^`]*)`", path.read_text())
    for line in [re.sub(r"^([A-Z_]+=\S+ )+", "", line) for line in [*fenced, *quoted]]:
        if line.startswith("interlace ") and not any(mark in line for mark in ("...", "[", "SCRIPT")):
            words = shlex.split(line, comments=True)
            yield from [words[1:]] if words[1] in COMMANDS else []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_commands_in_documents_parse(path: Path) -> None:
    """A word that the command line does not know ends the test with `SystemExit`."""
    assert [_parse(words).command for words in commands(path)] == [words[0] for words in commands(path)]


def test_the_road_names_every_pass_in_its_order() -> None:
    named = re.findall(r"^ *\| `([a-z0-9-]+)` \|", (ROOT / "docs" / "how-it-works.md").read_text(), re.MULTILINE)
    assert named == [kind.name for kind in built_in()]


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md" and f"]({path.name})" not in index] == []


def test_the_glossary_has_ten_words() -> None:
    assert len(re.findall(r"^\| (?!word|---)", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)) == 10


def test_documents_hold_commands() -> None:
    """What finds commands in documents finds those of the guides, of the README and of the examples."""
    held = {path for path in DOCUMENTS if list(commands(path))}
    assert held >= {ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs" / f"{guide}.md" for guide in GUIDES)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with dumps of two stages in it, as the current one."""
    for program in programs(World(pp=2, mp=2, micro_batches=4)):
        save(program, tmp_path / "dumps" / f"rank{program.rank}.ilp")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("guide", GUIDES)
def test_guide_runs(guide: str, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The guide's file and configuration are written down as they stand; its offline commands run in their order, without an error."""
    document = ROOT / "docs" / f"{guide}.md"
    (text,) = blocks(document, "python", "rows", "json")
    (world / GUIDES[guide]).write_text(text)
    for text in blocks(document, "yaml"):
        (world / "my.yaml").write_text(text)
    said = []
    for words in commands(document):
        if words[0] in OFFLINE:
            assert main(words) == 0, words
            said.append(capsys.readouterr().out)
    assert len(said) >= 2
    if guide == "guide-pass":
        assert "priority -1 -> 1" in said[1]
        assert re.search(r"^  ~ \d+ .*: priority -1 -> 1$", said[2], re.MULTILINE)
    if guide == "guide-schedule":
        assert "7 jobs: 0F 1F 0B+2F 1B+3F 2B 3B O" in said[2]
    if guide == "guide-device-profile":
        assert "profile my-device.json" in said[0]
        assert load_profile("my-device.json").device == json.loads((world / GUIDES[guide]).read_text())["device"]


@pytest.mark.slow
def test_choosing_a_memory_budget_runs(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of the guide in their order; the sweep prints the columns that the guide shows, and a plan has its budget."""
    document = ROOT / "docs" / "guide-memory.md"
    said = []
    for words in commands(document):
        assert main(words) == 0, words
        said.append(capsys.readouterr().out)
    (shown,) = re.findall(r"^ budget GiB .*$", document.read_text(), re.MULTILINE)
    assert shown in said[0].splitlines()
    assert "Step time against memory" in (world / "report.html").read_text()
    assert read_record(world / "mine" / "rank0.ilp").memory_budget == 70 * 10**9


def test_configurations_in_documents_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the README and of options; a guide's own are loaded by its commands."""
    monkeypatch.chdir(tmp_path)
    texts = [text for path in DOCUMENTS if path.stem not in GUIDES for text in blocks(path, "yaml")]
    assert texts
    for text in texts:
        (tmp_path / "my.yaml").write_text(text)
        load_config("my.yaml")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.paddle
def test_new_pass_example() -> None:
    """examples/new_pass.py: the plan of a plain program trains to the program's own bits."""
    paddle = pytest.importorskip("paddle")
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import new_pass
    finally:
        sys.path.pop(0)
    paddle.enable_static()
    main_program, startup, loss = new_pass.build()
    stock = new_pass.train(main_program, startup, [loss])
    main_program, startup, loss = new_pass.build()
    context = new_pass.plan(main_program, startup, loss)
    assert [report.name for report in context.get_attr("interlace_schedule_1f1b").reports][-1] == "throttle-host"
    assert new_pass.train(main_program, startup, context.get_attr("fetch_list"), context.get_attr("plan")) == stock


@pytest.mark.paddle
def test_checkpoint_example(tmp_path: Path) -> None:
    """examples/checkpoint.py: half the steps, a checkpoint, the other half under the other one; the losses of one run through."""
    pytest.importorskip("paddle")
    script = ROOT / "tests" / "training" / "checkpoint_script.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads(done.stdout.splitlines()[-1])
    assert len(losses["whole"]) == 2
    for name in ("stock", "interlace"):
        assert losses[f"{name} first"] + losses[f"{name} first, then the other"] == losses["whole"]
