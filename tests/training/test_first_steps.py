"""docs/first-steps.md as a newcomer follows it: its script, its commands, the lines it adds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from interlace.cli import main
from tests.test_guides import blocks, commands

pytestmark = pytest.mark.paddle
DOCUMENT = Path(__file__).parents[2] / "docs" / "first-steps.md"
BEFORE = "model = dist.to_static("


def test_first_steps(short_search: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The same commands at the script's default size; each prints what the document says."""
    monkeypatch.chdir(tmp_path)
    script, added = blocks(DOCUMENT, "python")
    Path("train.py").write_text(script)
    dump, plan, report, run = ([word for word in words if not word.isdigit() or word == "4"] for words in commands(DOCUMENT))
    for words in (dump, plan, report):
        assert main(words) == 0, words
    assert re.search(r"^Paddle's own plan takes .* ms a step, this plan .* ms", capfd.readouterr().out, re.MULTILINE)
    assert Path("report.html").read_text().startswith("<!doctype html>")
    Path("train.py").write_text(script.replace(BEFORE, added + BEFORE))
    assert main(run) == 0
    (promised,) = re.findall(r"`(SAME: 6 losses, 48 parameters), ... of 4 ranks are equal", DOCUMENT.read_text())
    assert promised in capfd.readouterr().out
