"""The page of an answer in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.layout.page import page_html
from tests.layout.candidates import FAST, OVER, SLOW, answer
from tests.report.browser import CHROMIUM, WHY_NOT, ask

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)


def test_what_stands_in_it(tmp_path: Path) -> None:
    """A row for each simulated layout, the best first; a point for each plan; a line through the frontier; nothing on the console."""
    page = tmp_path / "choose.html"
    page.write_text(page_html(answer(SLOW, FAST, OVER)))
    console, found = ask(
        page,
        """return { rows: document.querySelectorAll("#known tr").length, best: document.querySelector("#known tr.best td").textContent,
        points: document.querySelectorAll("#frontier circle").length,
        way: document.querySelector("#frontier path").getAttribute("d").split("L").length,
        sentence: document.getElementById("sentence").textContent, over: document.querySelectorAll("td.over").length };""",
    )
    assert console == []
    assert found.pop("sentence").startswith("pp 2, mp 1, dp 2 with Paddle's own plan: 200.000 ms a step, 20,000 tokens a second, 8.00 GiB")
    assert found == {"rows": 4, "best": "pp 2, mp 1, dp 2", "points": 3, "way": 3, "over": 1}
