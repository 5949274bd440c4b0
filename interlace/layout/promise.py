"""Predicts which layouts are likely to be fast from those simulated so far. It only orders the search, and excludes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from interlace.layout.space import Layout, Number

RIDGE = 0.1
"""Penalty of the least-squares fit; it keeps the effect of a value near 0 while few layouts with that value are known."""
RECOMPUTED, HELD = 4 / 3, 0.2
"""First guesses for full recomputation: factor on the step (a backward takes as long as two forwards), and share of activations held."""
WHOLE = 0.3
"""Share of activations that tensor parallelism does not divide: norms and residuals (10 of 34 bytes per token and hidden value)."""
SHARDED = {1: 12 / 18, 2: 16 / 18, 3: 1.0}
"""Sharding stage -> share of a parameter's bytes, with master weights and gradients in float32, that is divided over the replicas."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A simulated layout: its step, and its peak without the known state of a rank, each divided by a first guess."""

    layout: Layout
    step: float
    peak: float


class Promise:
    """Predicts steps and peaks, relative to first guesses, as a product with one factor for each value of each name.

    A value that was not seen yet gets the most promising factor of its name, so that it will be tried before it is judged.
    """

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._step = _Factors([each.layout for each in seen], [log(each.step) for each in seen])
        self._peak = _Factors([each.layout for each in seen], [log(each.peak) for each in seen])

    def step(self, layout: Layout) -> float:
        """The predicted step, divided by the first guess (`guess`)."""
        return exp(self._step.of(layout))

    def peak(self, layout: Layout) -> float:
        """The predicted peak of the fullest rank with Paddle's own plan, without state, divided by the first guess (`guess_held`)."""
        return exp(self._peak.of(layout))


def guess(layout: Layout, work_ns: float) -> float:
    """First guess of the step: equal stages that each compute `work_ns`, and the bubble of 1F1B."""
    stages, batches = layout.number("pp"), layout.number("m", 0) or layout.number("pp")
    again = 1.0 if recomputes_nothing(layout) else RECOMPUTED
    return work_ns * again * (1 + (stages - 1) / (batches * layout.number("vpp")))


def guess_held(layout: Layout, gpus: int, activation_bytes: float) -> float:
    """First guess of the activation bytes of a rank of the first stage, which holds at most one micro-batch for each stage.
    `activation_bytes` are those of a whole step on one GPU."""
    stages, batches, ways = layout.number("pp"), layout.number("m", 0) or layout.number("pp"), layout.number("mp")
    kept = (1.0 if recomputes_nothing(layout) else HELD) * (WHOLE + (1 - WHOLE) / ways)
    return activation_bytes * kept * min(stages, batches) * ways / (batches * gpus)


def guess_state(layout: Layout, gpus: int, state_bytes: float) -> float:
    """First guess of the bytes of parameters, gradients and optimizer state on a rank; `state_bytes` are those of the whole model."""
    ways = layout.number("pp") * layout.number("mp")
    part, replicas = SHARDED.get(layout.number("sharding", 0), 0.0), max(1, gpus // ways)
    return state_bytes / ways * (1 - part + part / replicas)


def recomputes_nothing(layout: Layout) -> bool:
    """Whether the script asks for no recomputation."""
    return layout.get("recompute") in (None, "none", "off", 0)


class _Factors:
    """The logarithm of a figure as a mean plus an effect of each value, by least squares with a penalty on the effects (ridge
    regression)."""

    def __init__(self, layouts: Sequence[Layout], figures: Sequence[float]) -> None:
        self.known = sorted({item for layout in layouts for item in layout.values}, key=str)
        at = {item: k for k, item in enumerate(self.known)}
        self._mean = sum(figures) / len(figures) if figures else 0.0
        self._effects: dict[tuple[str, Number], float] = {}
        if figures:
            table = np.zeros((len(layouts), len(at)))
            for row, layout in enumerate(layouts):
                table[row, [at[item] for item in layout.values]] = 1.0
            off = np.asarray(figures) - self._mean
            found = np.linalg.solve(table.T @ table + RIDGE * np.eye(len(at)), table.T @ off)
            self._effects = {item: round(float(found[k]), 9) for item, k in at.items()}

    def of(self, layout: Layout) -> float:
        """The predicted logarithm for a layout."""
        return self._mean + sum(self._effect(item) for item in layout.values)

    def _effect(self, item: tuple[str, Number]) -> float:
        if item in self._effects:
            return self._effects[item]
        return min((effect for (name, _), effect in self._effects.items() if name == item[0]), default=0.0)
