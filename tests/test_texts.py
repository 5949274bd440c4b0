"""What texts name is there: files, links, passes and options; decisions have one form. No Paddle, no device."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from interlace.passes.base import option_name
from interlace.passes.pipeline import built_in

ROOT = Path(__file__).parents[1]
FOLDERS = ("passes", "cost_model", "scheduler", "interlace", "benchmarks", "configs", "docs", "examples", "testbed", "tests")
OUTSIDE = frozenset(
    {
        "auto_parallel/static/utils.py",
        "paddle/distributed/passes/pass_utils.py",
        "process_mesh.py",
        "static/process_group.py",
        "train.py",
        "my_pass.py",
    }
)
"""Files of Paddle's and of the reader's own."""
GONE = frozenset({"assign-streams", "split-large-ops", "eliminate-redundant-copies"})
"""Passes that decisions tell of: one that became four, and two that are not built."""
FORM = ("## Context", "## Decision", "## Consequences", "## Rejected")
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def listed(*endings: str) -> list[Path]:
    """Files of the repository with these endings; without what was built there, and what links lead to."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        for where, folders, names in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "build" and not name.startswith((".", "__"))]
            found += [Path(where) / name for name in names]
    return sorted(path for path in found if path.name.endswith(endings))


def texts() -> Iterator[tuple[Path, str]]:
    """Documents, and sources of the product with their docstrings, comments and errors; tests make up names."""
    for path in listed(".md", ".py"):
        if path.suffix == ".md" or path.relative_to(ROOT).parts[0] != "tests":
            yield path, path.read_text()


@pytest.fixture(scope="module")
def files() -> frozenset[str]:
    """Every file by its path and by each end of it."""
    paths = (path.relative_to(ROOT).parts for path in listed(""))
    return frozenset("/".join(parts[k:]) for parts in paths for k in range(len(parts)))


def test_files_that_texts_name_are_there(files: frozenset[str]) -> None:
    """`x.py` in backticks, and any path that begins with a folder of ours."""
    ours = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:py|md|json|txt|xz|html)\b")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts()
        for name in {*re.findall(r"`([\w./-]+\.py)`", text), *ours.findall(text)} - OUTSIDE
        if name not in files and not (ROOT / name).is_file()
    ]
    assert missing == []


def test_options_that_texts_name_are_there() -> None:
    """`pass.option`, and `pass: {option: ...}`; what the pass's module holds is no option."""
    known = {}
    for kind in built_in():
        name = option_name(kind.name)
        known[name] = {*kind.__struct_fields__, *vars(import_module(f"interlace.passes.{name}"))}
    named = re.compile(rf"\b({'|'.join(known)})(?:\.(?!py\b|md\b)([a-z_]\w*)\b(?!/)|: \{{([a-z_]\w*):)")
    unknown = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts()
        for match in named.finditer(text)
        if (match[2] or match[3]) not in known[match[1]]
    ]
    assert unknown == []


def test_passes_that_texts_name_are_there() -> None:
    """Words in backticks or quotes, with hyphens or underscores, that begin and go on as a pass's name does, or name one that is gone."""
    there = {kind.name for kind in built_in()}
    verbs = {name.partition("-")[0] for name in (*there, *GONE)} - {"name", "schedule"}
    word = re.compile(rf"`((?:{'|'.join(sorted(verbs))})-[a-z0-9]*[a-z](?:-[a-z0-9]*[a-z])*)`")
    gone = re.compile("|".join(f"{name}|{option_name(name)}" for name in sorted(GONE)))
    unknown = []
    for path, text in texts():
        where = str(path.relative_to(ROOT))
        unknown += [f"{where}: {name}" for name in word.findall(text) if name not in there | GONE]
        if not where.startswith("docs/decisions/"):
            unknown += [f"{where}: {match[0]}" for match in gone.finditer(text)]
    assert unknown == []


@pytest.mark.parametrize("path", listed(".md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """To a file, and to a heading in it where they name one."""
    for target, heading in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", path.read_text()):
        found = path.parent / target if target else path
        assert found.exists(), target
        if heading:
            assert heading in anchors(found), f"{target}#{heading}"


def anchors(path: Path) -> list[str]:
    """What headings are called in links."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name)
def test_decisions_have_one_form_and_one_page(path: Path) -> None:
    """Number, status and date, four headings; 40 lines, none of them so long that they hold more than 40."""
    text = path.read_text()
    assert text.startswith(f"# {path.name[:3]}: ")
    assert re.search(r"^Status: [a-z].*\. Date: \d{4}-\d{2}-\d{2}", text, re.MULTILINE)
    heads = [next((head for head in FORM if line.startswith(head)), line) for line in re.findall(r"^## .*$", text, re.MULTILINE)]
    assert list(dict.fromkeys(heads)) == list(FORM)
    assert len(text.splitlines()) <= 40
    assert len(text) <= 40 * 140
