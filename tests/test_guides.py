"""What the documents show: every command line parses, every configuration loads, every link leads somewhere; examples run.
`tests/training/test_guides_run.py` does what the guides say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlace.cli import COMMANDS, parsed
from interlace.config import load_config
from interlace.passes.pipeline import built_in

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "examples" / "README.md", *ROOT.glob("docs/*.md")])
NEEDS_MORE = {"guide-pass", "guide-schedule", "guide-choose"}
"""Guides whose configuration names what is made there, or that show a file of another kind."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
    assert [parsed(words).command for words in commands(path)] == [words[0] for words in commands(path)]


def test_the_road_names_every_pass_in_its_order() -> None:
    named = re.findall(r"^ *\| `([a-z0-9-]+)` \|", (ROOT / "docs" / "how-it-works.md").read_text(), re.MULTILINE)
    assert named == [kind.name for kind in built_in()]


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md" and f"]({path.name})" not in index] == []


def test_the_glossary_defines_once_what_is_used() -> None:
    """Each term has one row and stands in another document."""
    glossary = ROOT / "docs" / "glossary.md"
    terms = [term for row in re.findall(r"^\| (?!term|---)([^|]+) \|", glossary.read_text(), re.MULTILINE) for term in row.split(", ")]
    used = "\n".join(path.read_text() for path in DOCUMENTS if path != glossary).lower()
    assert terms
    assert [term for term in set(terms) if terms.count(term) > 1] == []
    assert [term for term in terms if not re.search(rf"\b{re.escape(term.lower())}", used)] == []


def test_documents_hold_commands() -> None:
    """What finds commands in documents finds those of the guides, of the README and of the examples."""
    held = {path for path in DOCUMENTS if list(commands(path))}
    assert held >= {ROOT / "README.md", ROOT / "examples" / "README.md", *ROOT.glob("docs/guide-*.md")}


def test_configurations_in_documents_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stand alone; the others are loaded by their guide's commands."""
    monkeypatch.chdir(tmp_path)
    texts = [text for path in DOCUMENTS if path.stem not in NEEDS_MORE for text in blocks(path, "yaml")]
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
    baseline = new_pass.train(main_program, startup, [loss])
    main_program, startup, loss = new_pass.build()
    context = new_pass.plan(main_program, startup, loss)
    assert [report.name for report in context.get_attr("interlace_schedule_1f1b").plan.reports][-1] == "throttle-host"
    assert new_pass.train(main_program, startup, context.get_attr("fetch_list"), context.get_attr("plan")) == baseline


@pytest.mark.paddle
def test_checkpoint_example(tmp_path: Path) -> None:
    """examples/checkpoint.py: half the steps, a checkpoint, the other half under the other one; the losses of one run through."""
    pytest.importorskip("paddle")
    script = ROOT / "tests" / "training" / "checkpoint_script.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads(done.stdout.splitlines()[-1])
    assert len(losses["whole"]) == 2
    for name in ("baseline", "interlace"):
        assert losses[f"{name} first"] + losses[f"{name} first, then the other"] == losses["whole"]
