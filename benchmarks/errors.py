"""Comparison of predictions with measurements: pure functions over `(name, predicted, measured)`, in any unit of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple


class Case(NamedTuple):
    """Something that was predicted and measured, both in the same unit and > 0."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error, signed: 0.1 for a prediction that is 10 % too slow."""
        return self.predicted / self.measured - 1


class Summary(NamedTuple):
    """Errors of a set of cases as fractions; `order` is the share of pairs whose order was predicted correctly."""

    num_cases: int
    median_abs: float
    p90_abs: float
    worst: Case | None
    bias: float
    order: float


def summarize(cases: Sequence[Case], same: float = 0.0) -> Summary:
    """Errors and order; pairs measured within `same` of each other (a fraction) do not count for the order.

    >>> summarize([Case("a", 110, 100), Case("b", 200, 200)]).median_abs.__round__(3)
    0.05
    """
    if not cases:
        return Summary(0, 0.0, 0.0, None, 0.0, 1.0)
    errors = sorted(abs(case.error) for case in cases)
    worst = max(cases, key=lambda case: (abs(case.error), case.name))
    bias = median(case.error for case in cases)
    p90 = errors[min(len(errors) - 1, (9 * len(errors)) // 10)]
    return Summary(len(cases), median(errors), p90, worst, bias, order_share(cases, same))


def order_share(cases: Sequence[Case], same: float = 0.0) -> float:
    """Share of pairs that the prediction puts in the measured order; 1 if no pair is distinguishable. O(cases^2).

    >>> order_share([Case("a", 1, 1), Case("b", 3, 2), Case("c", 2, 3)]).__round__(3)
    0.667
    """
    pairs = [(a, b) for a, b in combinations(cases, 2) if apart(a, b, same)]
    kept = sum((a.predicted - b.predicted) * (a.measured - b.measured) > 0 for a, b in pairs)
    return kept / len(pairs) if pairs else 1.0


def inversions(cases: Sequence[Case], same: float = 0.0) -> list[tuple[str, str]]:
    """Pairs of names `(predicted to be faster, measured to be faster)` that the prediction puts in the wrong order."""
    found = []
    for a, b in combinations(cases, 2):
        if apart(a, b, same) and (a.predicted - b.predicted) * (a.measured - b.measured) <= 0:
            slower, faster = (a, b) if a.measured > b.measured else (b, a)
            found.append((slower.name, faster.name))
    return found


def apart(a: Case, b: Case, same: float) -> bool:
    """Whether two cases were measured further apart than `same` (a fraction of the smaller)."""
    low, high = sorted((a.measured, b.measured))
    return high > low * (1 + same)


def show(cases: Iterable[Case], unit: str = "", digits: int = 3) -> str:
    """A table of cases and a line of totals."""
    cases = list(cases)
    width = max([len(case.name) for case in cases], default=4)
    lines = [f"{'case':{width}s} {'predicted':>12s} {'measured':>12s} {'error':>8s}  {unit}".rstrip()]
    lines += [f"{c.name:{width}s} {c.predicted:12.{digits}f} {c.measured:12.{digits}f} {c.error:+8.1%}" for c in cases]
    return "\n".join([*lines, headline(summarize(cases))])


def headline(summary: Summary) -> str:
    """One line: median, 90th percentile, worst, bias, order."""
    if summary.worst is None:
        return "no cases"
    return (
        f"{summary.num_cases} cases: median error {summary.median_abs:.1%}, 90 % below {summary.p90_abs:.1%}, "
        f"worst {summary.worst.error:+.1%} ({summary.worst.name}), bias {summary.bias:+.1%}, "
        f"order right in {summary.order:.1%} of pairs"
    )
