"""Program rewrites. A pass is a frozen record of options with a contract; `Pipeline` orders, checks and runs them."""

from interlace.passes.allocate_on_compute import AllocateOnCompute
from interlace.passes.base import REGISTRY, Context, Pass, find_pass, register
from interlace.passes.choose_recompute import ChooseRecompute
from interlace.passes.delay_transfers import DelayTransfers
from interlace.passes.extend_lifetimes import ExtendLifetimes
from interlace.passes.insert_events import InsertEvents
from interlace.passes.name_streams import NameStreams
from interlace.passes.narrow_gathers import NarrowGathers
from interlace.passes.offload_activations import OffloadActivations
from interlace.passes.offload_optimizer_state import OffloadOptimizerState
from interlace.passes.overlap_column_backward import OverlapColumnBackward
from interlace.passes.pipeline import PassReport, Pipeline, ordered
from interlace.passes.reduce_in_place import ReduceInPlace
from interlace.passes.return_memory import ReturnMemory
from interlace.passes.schedule_1f1b import Schedule1F1B
from interlace.passes.split_backward import SplitBackward
from interlace.passes.throttle_host import ThrottleHost

__all__ = [
    "REGISTRY",
    "AllocateOnCompute",
    "ChooseRecompute",
    "Context",
    "DelayTransfers",
    "ExtendLifetimes",
    "InsertEvents",
    "NameStreams",
    "NarrowGathers",
    "OffloadActivations",
    "OffloadOptimizerState",
    "OverlapColumnBackward",
    "Pass",
    "PassReport",
    "Pipeline",
    "ReduceInPlace",
    "ReturnMemory",
    "Schedule1F1B",
    "SplitBackward",
    "ThrottleHost",
    "find_pass",
    "ordered",
    "register",
]
