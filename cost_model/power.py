"""The power that operations draw, from the samples in `Power` of a device profile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from interlace.cost_model.base import Draw
from interlace.cost_model.profile import Power, PowerSample
from interlace.cost_model.work import Part
from interlace.grouping import grouped

IDLE_KERNEL = "shortest"
"""The sample of a kernel that does nothing."""
STANDS_FOR = {"gemm": "gemm", "attention": "attention", "comm": "all_reduce", "p2p": "send"}
"""Family of a part -> the kind whose samples are used for its kinds without samples. For all other families it is `MEMORY`."""
MEMORY = "add"


class PowerSamples:
    """Power and clock share as functions of size, by kind."""

    def __init__(self, power: Power) -> None:
        self._highest_mhz = power.highest_mhz
        self._of_kind = grouped((sample.kind, sample) for sample in sorted(power.samples, key=lambda each: (each.kind, each.size)))

    def of(self, part: Part) -> Draw:
        """What a part draws, from samples of its kind, else of the kind without `_mixed` or `_grad`, else of `STANDS_FOR`.

        Interpolated over the logarithm of the size, constant beyond the samples. A kernel (not communication or a copy) smaller than all
        samples draws less, down to the draw of a kernel that does nothing (`IDLE_KERNEL`).
        """
        kinds = (part.kind, part.kind.removesuffix("_mixed"), part.kind.removesuffix("_grad"), STANDS_FOR.get(part.family, MEMORY))
        samples = next((self._of_kind[kind] for kind in kinds if kind in self._of_kind), [])
        if not samples:
            return Draw(0, 0.0)
        if part.family not in ("comm", "p2p", "copy"):
            samples = [*self._of_kind.get(IDLE_KERNEL, ()), *samples]
        size = part.flops or part.size_bytes
        watts, share = (_between(samples, size, [getattr(each, name) for each in samples]) for name in ("watts", "clock_share"))
        own_mhz = _between(samples, size, [each.own_mhz or self._highest_mhz for each in samples])
        return Draw(round(watts * 1000), share, round(own_mhz))


def _between(samples: Sequence[PowerSample], size: int, values: Sequence[float]) -> float:
    sizes = np.log([max(1, sample.size) for sample in samples])
    return float(np.interp(np.log(max(1, size)), sizes, values))
