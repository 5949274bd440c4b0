"""Which saved activations leave the device for a while, of which micro-batches, when they go and when they come back.

The planner decides and prints; `interlace.passes.offload_activations` applies what it decided. Times are op time: the sum of
what the items of the compute stream take on this rank. Work on other streams runs beside them and waits for other ranks come
on top: neither is counted, so that copies have more time than planned rather than less.
One copy engine serves each direction, for all chunks of the rank: copies of a direction follow one another.

Source: NVIDIA/Megatron-LM#1752 (modules by hand), DeepSpeed DeepCompile (a budget), both without a pipeline.
"""

from interlace.scheduler.offload.decision import Item, Move, OffloadPlan, Stay, Trip, show_move
from interlace.scheduler.offload.measures import COPY_BACK, COPY_OUT, PINNED, Measured, agree, measure
from interlace.scheduler.offload.planner import plan_offload
from interlace.scheduler.offload.selection import Choice, Names, names_layer, names_op, unknown_names

__all__ = [
    "COPY_BACK",
    "COPY_OUT",
    "PINNED",
    "Choice",
    "Item",
    "Measured",
    "Move",
    "Names",
    "OffloadPlan",
    "Stay",
    "Trip",
    "agree",
    "measure",
    "names_layer",
    "names_op",
    "plan_offload",
    "show_move",
    "unknown_names",
]
