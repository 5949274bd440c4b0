"""Program rewrites. A pass is a frozen record of options with a contract; `Pipeline` orders, checks and runs them."""

from interlace.passes.base import REGISTRY, Context, Pass, find_pass, register
from interlace.passes.pipeline import Pipeline, PassReport, default_passes
from interlace.passes.schedule_1f1b import Schedule1F1B

__all__ = ["REGISTRY", "Context", "Pass", "PassReport", "Pipeline", "Schedule1F1B", "default_passes", "find_pass", "register"]
