"""Program rewrites. A pass is a frozen record of options with a contract; `Pipeline` orders, checks and runs them."""

from interlace.passes.assign_streams import AssignStreams
from interlace.passes.base import REGISTRY, Context, Pass, find_pass, register
from interlace.passes.offload_activations import OffloadActivations
from interlace.passes.overlap_column_backward import OverlapColumnBackward
from interlace.passes.pipeline import PassReport, Pipeline, default_passes
from interlace.passes.schedule_1f1b import Schedule1F1B
from interlace.passes.split_backward import SplitBackward

__all__ = [
    "REGISTRY",
    "AssignStreams",
    "Context",
    "OffloadActivations",
    "OverlapColumnBackward",
    "Pass",
    "PassReport",
    "Pipeline",
    "Schedule1F1B",
    "SplitBackward",
    "default_passes",
    "find_pass",
    "register",
]
