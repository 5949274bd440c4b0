"""Claims about runs that measured plans on their own training steps (`tune`)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from claiming import Row, claim, raw, table

KINDS = ("Paddle's baseline*", "Interlace's plan*", "the plan with *.interleave=mixed*", "the plan with *_bytes=*")
"""Patterns of plan names in the records of trials, one for each kind of plan."""
NAMES = ("baseline", "`auto`", "`mixed`", "a tenth more memory")
CLEAR = 0.02


CARDS = ("h100", "h200")


def _runs(cards: Sequence[str] = CARDS) -> list[Row]:
    return [{**row, "card": card.upper()} for card in cards for row in raw(f"{card}/testbed_tuned.json")["runs"] if "trial" in row]


def _results(row: Row) -> list[Row | None]:
    """The results of a trial by kind of plan; None for a kind of which no step counted."""
    found = [next((each for each in row["trial"]["results"] if fnmatchcase(each["name"], kind)), None) for kind in KINDS]
    return [each if each and each["steps"] else None for each in found]


def _gains(row: Row) -> dict[str, float]:
    """Plan name -> gain over the baseline of the same trial."""
    found = dict(zip(NAMES, _results(row), strict=True))
    baseline = found["baseline"]
    assert baseline is not None, row["case"]
    return {name: baseline["median_ns"] / each["median_ns"] - 1 for name, each in found.items() if each}


def _cell(each: Row | None) -> str:
    return f"{each['median_ns'] / 1e6:.1f} ({each['spread_ns'] / 1e6:.1f}), {each['steps']}" if each else ""


def _taken(row: Row) -> str:
    return next(name for name, kind in zip(NAMES, KINDS, strict=True) if fnmatchcase(row["trial"]["taken"]["name"], kind))


def _is_apart(row: Row) -> bool:
    """Whether another plan is faster than the chosen one by more than the spread of its steps."""
    found = [each for each in _results(row) if each]
    taken = next(each for each in found if each["name"] == row["trial"]["taken"]["name"])
    return any(taken["median_ns"] - each["median_ns"] > each["spread_ns"] for each in found)


@claim
def tuned() -> str:
    """Steps of every plan of each trial, and the plan that was chosen."""
    rows = []
    for row in _runs():
        cells = [_cell(each) for each in _results(row)]
        predicted = [f"{each['predicted_ns'] / 1e6:.1f}" for each in _results(row) if each]
        same = {True: "yes", False: "no", None: "no baseline"}[row.get("parameters_equal_stock")]
        gain = f"{100 * _gains(row)[_taken(row)]:+.1f} %"
        rows.append([row["card"], row["case"], *cells, ", ".join(predicted), _taken(row), gain, str(row["trial"]["steps"]), same])
    head = [
        "GPUs",
        "case",
        *(f"{name}: ms (spread), steps" for name in NAMES),
        "predicted ms",
        "chosen",
        "gain",
        "steps of the trial",
        "same bits",
    ]
    return table(head, rows)


@claim
def tuned_in_short() -> str:
    """Gains of the plans that trials chose, compared with the baseline, the default's plan and the fastest plan."""
    runs = _runs()
    over = [_gains(row)[_taken(row)] for row in runs]
    default = [_gains(row)[_taken(row)] - _gains(row)["`auto`"] for row in runs]
    behind = [max(_gains(row).values()) - _gains(row)[_taken(row)] for row in runs]
    best = sum(each == 0 for each in behind)
    apart = sum(_is_apart(row) for row in runs)
    clear = sum(each >= CLEAR for each in default)
    return (
        f"in {len(runs)} cases, the chosen plan gains {100 * min(over):.1f} to {100 * max(over):.1f} % over Paddle's baseline and "
        f"{100 * min(default):.1f} to {100 * max(default):.1f} points over the plan that the simulator alone chose ({clear} cases: "
        f"{100 * CLEAR:.0f} points or more); in {best} it has the lowest median of all plans that were tried, in the others it is at "
        f"most {100 * max(behind):.1f} points behind (in {apart} by more than the spread of the faster plan's steps)"
    )
