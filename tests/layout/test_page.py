"""The page of an answer in a real browser."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from interlace.layout.judge import Planned
from interlace.layout.page import page_html
from tests.layout.candidates import FAST, GIB, MS, OVER, SLOW, answer, drafted, layout, step
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


def test_a_layout_without_a_plan_of_paddles(tmp_path: Path) -> None:
    """Its reason stands in its row, and no figure of Paddle's; where nothing of ours is planned, among what was not simulated."""
    refused = drafted(2, 100 * MS, 4 * GIB)
    refused.draft = msgspec.structs.replace(refused.draft, refusal="no op role")
    ours = Planned(step(90 * MS, 4 * GIB), peak_bytes=4 * GIB)
    planned = dataclasses.replace(refused, layout=layout(4), draft=msgspec.structs.replace(refused.draft, tokens=4000), state="planned")
    planned.planned = ours
    page = tmp_path / "choose.html"
    page.write_text(page_html(answer(SLOW, refused, planned)))
    console, found = ask(
        page,
        """const cells = (row) => [...row.querySelectorAll("td")].map((cell) => cell.textContent);
        return { known: [...document.querySelectorAll("#known tr")].slice(1).map(cells),
        others: [...document.querySelectorAll("#others tr")].slice(1).map(cells),
        points: document.querySelectorAll("#frontier circle").length };""",
    )
    assert console == []
    (first, *_), ((other, _, why, *_),) = found["known"], found["others"]
    assert (first[0], first[1], first[6], first[-1]) == ("pp 4, mp 1, dp 1", "", "90.000", "no op role")
    assert (other, why, found["points"]) == ("pp 2, mp 1, dp 2", "no op role", 2)
