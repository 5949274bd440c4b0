"""What is told of a search: order, recommendation, what decides, frontier, and what was not built."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from interlace.errors import ConfigError
from interlace.layout.judge import Draft, Planned
from interlace.layout.page import page_html
from interlace.layout.screen import screen_text
from interlace.layout.search import Candidate
from interlace.layout.space import Layout
from interlace.planning.outcome import StageStep, Step
from tests.layout.candidates import FAST, GIB, MS, OVER, SLOW, answer, drafted, step


def test_the_fastest_that_fits_is_recommended() -> None:
    found = answer(SLOW, FAST, OVER)
    assert [row.values["pp"] for row in found.rows] == [2, 1, 4]
    assert found.tokens == 4000
    assert found.rows[0].paddles is not None
    assert found.rows[0].paddles.tokens_per_s == 20_000.0
    assert [(each.layout, each.peak_bytes // GIB) for each in found.frontier] == [
        ("pp 1, mp 1, dp 4", 4),
        ("pp 2, mp 1, dp 2", 8),
        ("pp 4, mp 1, dp 1", 12),
    ]
    text = screen_text(found)
    assert "recommended: pp 2, mp 1, dp 2, Paddle's plan\n  train.py --pp 2" in text
    assert "12.00*" in text
    assert "50.0% ahead of pp 1, mp 1, dp 4, more than the expected error of 5%" in found.decides
    assert "computation of the slowest stage 100.000 ms shorter; exposed communication 20.000 ms longer" in found.decides


def test_what_is_within_the_error_is_to_be_measured() -> None:
    near = drafted(1, 203 * MS, 4 * GIB)
    assert "within the expected error of 5%: measure both" in answer(near, FAST).decides


def test_a_plan_of_ours_makes_a_layout_fit() -> None:
    planned = dataclasses.replace(OVER, state="planned", planned=Planned(step(150 * MS, 9 * GIB), peak_bytes=9 * GIB), folder="kept/plan")
    found = answer(SLOW, FAST, planned)
    assert found.rows[0].values["pp"] == 4
    assert "recommended: pp 4, mp 1, dp 1, Interlace" in (text := screen_text(found))
    assert "schedule.yaml that makes them again: kept/plan" in text


def test_a_layout_that_paddle_refuses_has_no_plan_of_paddles() -> None:
    """It is not recommended and on no frontier, though its step was simulated; a plan of ours is. What is not planned is told with the
    reason."""
    refused = drafted(2, 100 * MS, 4 * GIB)
    refused.draft = msgspec.structs.replace(refused.draft, refusal="no op role")
    planned = dataclasses.replace(refused, state="planned", planned=Planned(step(90 * MS, 4 * GIB), peak_bytes=4 * GIB), folder="kept/plan")
    assert refused.best_ns(10 * GIB) == math.inf
    assert planned.best_ns(10 * GIB) == 90 * MS
    found = answer(SLOW, refused)
    assert [(row.values["pp"], row.paddles is None, row.refusal) for row in found.rows] == [(1, False, ""), (2, True, "no op role")]
    assert [each.layout for each in found.frontier] == ["pp 1, mp 1, dp 4"]
    text = screen_text(found)
    assert "recommended: pp 1, mp 1, dp 4, Paddle's plan" in text
    assert "100.000" not in text
    assert "without a plan of Paddle's: 1 such as pp 2, mp 1, dp 2: no op role\n  1 of them are not planned" in text
    found = answer(SLOW, planned)
    assert (found.rows[0].values["pp"], found.rows[0].paddles, found.rows[0].state) == (2, None, "planned")
    text = screen_text(found)
    assert "recommended: pp 2, mp 1, dp 2, Interlace" in text
    assert "100.000" not in text
    assert "without a plan of Paddle's: 1 such as pp 2, mp 1, dp 2: no op role" in text
    assert "are not planned" not in text


def test_nothing_fits() -> None:
    text = screen_text(answer(OVER))
    assert "no layout that was built keeps the memory" in text
    assert "recommended" not in text


def test_what_was_not_built_is_told() -> None:
    waiting = Candidate(Layout((("pp", 8),)), least_ns=150 * MS)
    excluded = [Candidate(Layout((("pp", k),)), "excluded", f"holds {k}.5 GiB or more on some rank") for k in (16, 32)]
    refused = Candidate(Layout((("pp", 3),)), "refused", "--layers 4 must be a multiple of 3")
    found = answer(FAST, waiting, *excluded, refused)
    assert (found.gap, found.counts["waiting"], found.counts["excluded"]) == (0.25, 1, 2)
    text = screen_text(found)
    assert "excluded by a bound: 2 such as pp 16: holds 16.5 GiB or more on some rank" in text
    assert "refused: 1 such as pp 3: --layers 4 must be a multiple of 3" in text
    assert "not built: 1 less promising; one of them may take up to 25% less, as far as bounds tell" in text
    too_large = Candidate(Layout((("pp", 8),)), least_ns=1, least_bytes=11 * GIB)
    assert answer(FAST, too_large).gap == 0.0


def test_where_another_split_of_the_layers_would_help() -> None:
    """Stages of 190 and 90 ms: with 140 ms on each, a step of 210 ms would take 160 ms, less than that of the recommended layout."""
    stages = tuple(StageStep(k, (k,), ns * MS, 0, 0, 0, 0, 4 * GIB, 0) for k, ns in enumerate((190, 90)))
    uneven = drafted(4, 1, 1)
    uneven.draft = Draft(Step(210 * MS, 0, 0, 4 * GIB, stages), peak_bytes=4 * GIB, tokens=4000)
    found = answer(SLOW, FAST, uneven)
    row = next(row for row in found.rows if row.values["pp"] == 4)
    assert row.even_ns == 160 * MS
    assert [each.even_ns for each in found.rows if each is not row] == [0, 0]
    text = screen_text(found)
    assert "another split of the layers over the stages would help:\n  pp 4, mp 1, dp 1: Stages are unbalanced: stage 0 computes" in text
    assert "a step would take 160.000 ms (-23.8 %); less than the recommended layout" in text
    assert "stage 0 computes 190.000 ms" in page_html(found)
    assert "another split" not in screen_text(answer(SLOW, FAST))


def test_layouts_of_other_batches_are_not_compared() -> None:
    other = drafted(1, 200 * MS, GIB)
    other.draft = msgspec.structs.replace(other.draft, tokens=999)
    with pytest.raises(ConfigError, match=r"layouts train different batches: pp 1, mp 1, dp 4 reads 3996 tokens a step, pp 2, .* 4000"):
        answer(other, FAST)
    assert answer(other, FAST, tokens=7).tokens == 7


def test_the_page_holds_any_text() -> None:
    hostile = Candidate(Layout((("pp", 3),)), "refused", "</script><b>")
    text = page_html(answer(FAST, hostile))
    assert "</script><b>" not in text
    assert text == page_html(answer(FAST, hostile))
