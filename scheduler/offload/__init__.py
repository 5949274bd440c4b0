"""Planning of activation offload: which saved activations of which micro-batches are copied to the host, and when.

The planner decides; `interlace.passes.offload_activations` applies the decision. Times are computation time: the sum of the
durations of the op instances on this rank's compute stream. Waits for other streams and for other ranks are not counted, so
copies have at least the planned time. One copy engine serves each direction, for all chunks of the rank: copies of one direction
run one after another.

Source: NVIDIA/Megatron-LM#1752 (modules chosen by hand), DeepSpeed DeepCompile (a budget), both without a pipeline.
"""

from interlace.scheduler.offload.decision import Move, OffloadPlan
from interlace.scheduler.offload.measures import COPY_BACK, COPY_OUT, PINNED, Measured, agree, measure
from interlace.scheduler.offload.planner import plan_offload
from interlace.scheduler.offload.selection import Names, OffloadOptions, names_layer

__all__ = [
    "COPY_BACK",
    "COPY_OUT",
    "PINNED",
    "Measured",
    "Move",
    "Names",
    "OffloadOptions",
    "OffloadPlan",
    "agree",
    "measure",
    "names_layer",
    "plan_offload",
]
