"""The table of mutants fits the files it changes; `make mutants` runs it."""

from __future__ import annotations

import pytest

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.run import Report, Task, wrong
from tests.mutants.table import mutants, parse

ENTRY = "# a.py\n\nwhat is wrong\n- x = 1\n+ x = 2\n> tests/test_a.py::test_x\n"


@pytest.mark.parametrize("path", sorted({mutant.path for mutant in mutants()}))
def test_every_text_stands_once_in_its_file_and_every_test_is_there(path: str) -> None:
    """Where this fails after a change of a file: bring the entry up to date, or take it out if what it broke is gone."""
    mine = [mutant for mutant in mutants() if mutant.path == path]
    assert [told for mutant in mine if (told := wrong(mutant)) is not None] == []
    named = {test.partition("[")[0].partition("::")[::2] for mutant in mine for test in mutant.tests}
    assert [test for file, test in named if test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")] == []
    assert all((ROOT / file).is_file() for file, _ in named)


def test_no_mutant_stands_twice() -> None:
    keys = [(mutant.path, mutant.find, mutant.put) for mutant in mutants()]
    assert len(set(keys)) == len(keys)


def test_an_entry_is_read_as_it_stands() -> None:
    text = (
        "# scheduler/a.py\n\n// a remark\nfirst\n- if x:\n-     y\n+ pass\n> t.py::a\n> t.py::b\n"
        "\n# b.py\nsecond\n- z\n+\n= no one reads z\n"
    )
    assert parse(text, "here") == [
        Mutant("scheduler/a.py", "if x:\n    y", "pass", "first", ("t.py::a", "t.py::b")),
        Mutant("b.py", "z", "", "second", (), "no one reads z"),
    ]
    assert [mutant.module for mutant in parse(text, "here")] == ["interlace.scheduler.a", "interlace.b"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ENTRY.replace("+ x = 2\n", ""), r"here:3: expected `# file` somewhere above, then a description"),
        (ENTRY.replace("# a.py", ""), r"here:3: expected `# file` somewhere above"),
        (ENTRY.replace("what is wrong\n", ""), r"here:3: expected .* then a description"),
        (ENTRY.replace("+ x", "* x"), r"here:3: found '\* x = 2', expected a line that begins with one of - \+ > = and a space"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text, "here")


@pytest.mark.parametrize(
    ("find", "put", "tests", "told"),
    [
        ("no such text in it", "x", ("t",), "stands there 0 times, expected once"),
        ("import", "x", ("t",), r"stands there \d+ times, expected once"),
        ("ROOT = Path(__file__).parents[2]", "ROOT = Path(__file__).parents[2]", ("t",), "replaced by itself"),
        ("ROOT = Path(__file__).parents[2]", "ROOT = (", ("t",), "is no Python"),
        ("ROOT = Path(__file__).parents[2]", "ROOT = 1", (), "give tests that must fail, or say why none can"),
    ],
)
def test_a_mutant_that_cannot_be_planted_is_refused(find: str, put: str, tests: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Mutant("tests/mutants/mutant.py", find, put, "wrong", tests).source()


@pytest.mark.parametrize(
    ("code", "verdict", "column"),
    [
        (0, "alive", "alive"),
        (1, "killed", "killed"),
        (None, "killed", "killed"),
        (4, "its tests are not there", "error"),
        (2, "its tests cannot be loaded with it", "error"),
        (100, "its tests never load the file", "error"),
    ],
)
def test_only_a_failing_test_kills(code: int | None, verdict: str, column: str) -> None:
    mutant = parse(ENTRY, "here")[0]
    task, report = Task(mutant.tests, mutant, code=code), Report()
    assert task.verdict() == verdict
    report.add(mutant, verdict)
    assert report.counts["."][column] == 1
    assert bool(report.bad) == (column != "killed")
