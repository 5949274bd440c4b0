"""Lower bounds of time and memory for layouts that are not built, or of which only one stage is.

Time: all layouts divide the work of a *reference*, the same model and batch on one GPU, where nothing is computed twice; summed over ranks,
no layout has fewer products. (Layouts with replicas may have more: on every replica Paddle repeats operations that have no sharding rule
and so read whole tensors.)

Memory: a second reference is the model on as many ranks as any layout has replicas, whole on each except for what the script spreads over
replicas, such as experts; with fewer replicas a rank holds no less of that.

Both hold as long as the known placeholders only say how one model and one batch are split. Layouts that differ in other placeholders have
references of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from interlace.cost_model.base import tables_of
from interlace.cost_model.model import sample_size
from interlace.cost_model.profile import DeviceProfile
from interlace.cost_model.work import products_of
from interlace.ir import Program
from interlace.layout.space import Layout
from interlace.scheduler.memory.live import lifetimes

HALF = ("bfloat16", "float16")
"""Dtypes whose rates stand in for each other."""
FASTER = 1.25
"""Margin on the best rate: between and beyond samples, the cost model's curves may be faster than every sample. For 66,000 random products
and attentions by up to 1.02 times on H100 and H200, and 1.21 times with the few samples of the CPU."""


def best_rates(profile: DeviceProfile) -> dict[str, float]:
    """Dtype -> FLOP/s that no product exceeds according to the profile: from the fastest sample, or the peak rate if there is none."""
    found = {dtype: peak.per_s for dtype, peak in profile.matrix_flops.items()}
    for sample in profile.ops:
        if {"m", "seq_q"} & {*sample.dims}:
            found[sample.dtype] = max(found.get(sample.dtype, 0.0), sample_size(sample) * 1e9 / sample.dur_ns)
    half = max((found[dtype] for dtype in HALF if dtype in found), default=0.0)
    return {dtype: FASTER * max(rate, half if dtype in HALF else 0.0) for dtype, rate in found.items()}


@dataclass(frozen=True, slots=True)
class Reference:
    """The work and the memory that all layouts divide.

    Attributes:
        gpus: Number of GPUs over which layouts divide it.
        work_ns: Time of a step's products on one GPU at the best rates; 0 if not known.
        state_bytes: Memory that lives through the whole step on one rank of the memory reference (see the module); 0 if not known.
        activation_bytes: Activations of a step on one GPU with all micro-batches at once. Not a bound; first guesses use it.
    """

    gpus: int
    work_ns: float
    state_bytes: int
    activation_bytes: int = 0

    @classmethod
    def of(cls, gpus: int, serial: Program | None, replica: Program | None, profile: DeviceProfile, activation_bytes: int) -> Reference:
        """The reference from two programs without pipeline stages and without recomputation: `serial` on one GPU, `replica` on as many
        ranks as any layout has replicas; None if not known."""
        work = serial.pipeline.num_micro_batches * _products_ns(serial, best_rates(profile)) if serial else 0.0
        state = lifetimes(replica).base["device"] if replica else 0
        return cls(gpus, work, state, activation_bytes)

    def least_bytes(self, layout: Layout) -> int:
        """Least device bytes of the fullest rank: parameters and optimizer state are divided over pp x mp ranks, with sharding over all."""
        ways = layout.number("pp") * layout.number("mp")
        replicas = max(1, self.gpus // ways) if layout.number("sharding", 0) else 1
        return self.state_bytes // (ways * replicas)

    @property
    def least_ns(self) -> int:
        """Least time from one step to the next: that of equal shares of the work on all GPUs, none of which ever waits."""
        return int(self.work_ns / self.gpus)


def _products_ns(program: Program, rates: Mapping[str, float]) -> float:
    """Time, in nanoseconds, of one micro-batch's products at the best rates."""
    values, found = tables_of(program)[0], 0.0
    fastest = max(rates.values(), default=0.0)
    for op in program.ops:
        for part in products_of(op, values) if op.role != "optimize" else ():
            if fastest:
                found += part.flops * 1e9 / rates.get(part.dtype, fastest)
    return found
