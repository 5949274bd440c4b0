"""Bounds of layouts that are not built, or of which one stage is: nothing that a script runs in such a layout takes less.

All layouts split what the *reference* does, the same model and batch on one GPU, where nothing is done twice: in sum over ranks no layout
has fewer products. (Layouts over replicas may have more: Paddle computes on every replica what an operation without a rule of its own reads
whole.) What ranks hold is compared with the model on as many ranks as a layout has replicas at most, whole on each but for what a script
spreads over replicas, such as experts: over fewer replicas a rank holds no less of it. Both hold as long as placeholders say how one model
and one batch are split; layouts that differ in others have references of their own.
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
"""Types that answer for each other."""
FASTER = 1.25
"""Between and beyond samples the cost model's curves may be faster than each of them: of 66,000 random products and attentions, up to 1.02
times on H100 and H200, 1.21 times with the few samples of the CPU."""


def best_rates(profile: DeviceProfile) -> dict[str, float]:
    """FLOP/s, by dtype, that no product of the profile exceeds: of the fastest sample, and of the rate where there is none."""
    found = {dtype: peak.per_s for dtype, peak in profile.matrix_flops.items()}
    for sample in profile.ops:
        if {"m", "seq_q"} & {*sample.dims}:
            found[sample.dtype] = max(found.get(sample.dtype, 0.0), sample_size(sample) * 1e9 / sample.dur_ns)
    half = max((found[dtype] for dtype in HALF if dtype in found), default=0.0)
    return {dtype: FASTER * max(rate, half if dtype in HALF else 0.0) for dtype, rate in found.items()}


@dataclass(frozen=True, slots=True)
class Reference:
    """What all layouts split.

    Attributes:
        gpus: Over which it is split.
        forward_ns, backward_ns: Products of a step on one GPU at the best rates; 0 where they are not known.
        state_bytes: What lives through the step on a rank of the model on as many ranks as there are replicas at most; 0 where it is not
            known.
        activation_bytes: Of a step on one GPU, with all micro-batches at once: no bound, but what a first guess goes by.
    """

    gpus: int
    forward_ns: float
    backward_ns: float
    state_bytes: int
    activation_bytes: int = 0

    @classmethod
    def of(cls, gpus: int, serial: Program | None, replica: Program | None, profile: DeviceProfile, activation_bytes: int) -> Reference:
        """Of programs without pipeline stages and without recomputation: on one GPU, and on as many ranks as there are replicas at most."""
        took = _products_ns(serial, best_rates(profile)) if serial else {"forward": 0.0, "backward": 0.0}
        count = serial.pipeline.num_micro_batches if serial else 0
        state = lifetimes(replica).base["device"] if replica else 0
        return cls(gpus, count * took["forward"], count * took["backward"], state, activation_bytes)

    def least_bytes(self, layout: Layout) -> int:
        """Device bytes of the fullest rank: parameters and what the optimizer keeps of them lie on pp x mp ranks, with sharding on all."""
        ways = layout.number("pp") * layout.number("mp")
        replicas = max(1, self.gpus // ways) if layout.number("sharding", 0) else 1
        return self.state_bytes // (ways * replicas)

    def least_ns(self, layout: Layout) -> int:
        """Of a step: each stage computes its share of all micro-batches behind the forward of the first through the stages before it.

        Stages may share the layers as they like. With x the share of a stage, X that of the stages before it, f the forward and b all
        computation of one micro-batch, and m of them, the step takes f X + m b x or more; what is least for all stages together
        follows from equal times: f / (1 - (1 - f / (m b)) ** pp). Model chunks may divide a stage unequally: with them f counts nothing.
        """
        whole = (self.forward_ns + self.backward_ns) / self.gpus
        stages, batches = layout.number("pp"), layout.number("m", 0)
        if stages == 1 or not batches or layout.number("vpp") > 1 or not whole:
            return int(whole)
        first = self.forward_ns / self.gpus * stages / batches
        whole_batch = whole * stages / batches
        return int(first / (1 - (1 - first / (batches * whole_batch)) ** stages))


def _products_ns(program: Program, rates: Mapping[str, float]) -> dict[str, float]:
    """Time of one micro-batch's products at the best rates, by role."""
    values, found = tables_of(program)[0], {"forward": 0.0, "backward": 0.0, "optimize": 0.0}
    fastest = max(rates.values(), default=0.0)
    for op in program.ops:
        for part in products_of(op, values):
            if fastest:
                found[op.role] += part.flops * 1e9 / rates.get(part.dtype, fastest)
    return found
