"""Which layouts are likely to be fast: learned from those that were simulated. It orders the search and excludes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from interlace.layout.space import Layout, Number

RIDGE = 0.1
"""Weight that keeps effects of values near nothing where few layouts tell of them."""
RECOMPUTED, HELD = 4 / 3, 0.2
"""A step in which all of forward is computed twice, where a backward takes two forwards; what is held of activations then."""
WHOLE = 0.3
"""Of activations: norms and residuals, which ranks of a layer do not share (10 of 34 bytes a token and hidden value)."""
SHARDED = {1: 12 / 18, 2: 16 / 18, 3: 1.0}
"""Of the bytes a parameter has with master weights and gradients in float32, by sharding stage: what replicas share."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A simulated layout: its step, and its peak without the state that is known to lie on each rank, each over a first guess."""

    layout: Layout
    step: float
    peak: float


class Promise:
    """Predicts steps and peaks as a product of a factor for each value of each name.

    Of a value that was not seen the factor is the most promising of its name: so every value is tried before it is judged.
    """

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._step = _Factors([each.layout for each in seen], [log(each.step) for each in seen])
        self._peak = _Factors([each.layout for each in seen], [log(each.peak) for each in seen])

    def step(self, layout: Layout) -> float:
        """A step, as the guess that `seen` was divided by says."""
        return exp(self._step.of(layout))

    def peak(self, layout: Layout) -> float:
        """What the fullest rank holds beside its state by Paddle's own plan, as the guess that `seen` was divided by says."""
        return exp(self._peak.of(layout))


def guess(layout: Layout, work_ns: float) -> float:
    """A step of equal stages that compute `work_ns`, with a bubble as long as the fill of the pipeline."""
    stages, batches = layout.number("pp"), layout.number("m", 0) or layout.number("pp")
    again = 1.0 if recomputes_nothing(layout) else RECOMPUTED
    return work_ns * again * (1 + (stages - 1) / (batches * layout.number("vpp")))


def guess_held(layout: Layout, gpus: int, activation_bytes: float) -> float:
    """Activations of the first stage, which holds one micro-batch for each stage at most, of those of a whole step on one GPU."""
    stages, batches, ways = layout.number("pp"), layout.number("m", 0) or layout.number("pp"), layout.number("mp")
    kept = (1.0 if recomputes_nothing(layout) else HELD) * (WHOLE + (1 - WHOLE) / ways)
    return activation_bytes * kept * min(stages, batches) * ways / (batches * gpus)


def guess_state(layout: Layout, gpus: int, state_bytes: float) -> float:
    """Parameters, gradients and what the optimizer keeps of a rank, of those of the whole model."""
    ways = layout.number("pp") * layout.number("mp")
    part, replicas = SHARDED.get(layout.number("sharding", 0), 0.0), max(1, gpus // ways)
    return state_bytes / ways * (1 - part + part / replicas)


def recomputes_nothing(layout: Layout) -> bool:
    """Whether the script asks for no recomputation."""
    return layout.get("recompute") in (None, "none", "off", 0)


class _Factors:
    """The logarithm of a figure as a mean and an effect of each value: least squares with a penalty on effects."""

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
        """The logarithm for a layout."""
        return self._mean + sum(self._effect(item) for item in layout.values)

    def _effect(self, item: tuple[str, Number]) -> float:
        if item in self._effects:
            return self._effects[item]
        return min((effect for (name, _), effect in self._effects.items() if name == item[0]), default=0.0)
