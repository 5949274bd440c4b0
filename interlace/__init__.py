"""Interlace: overlap and offload for PaddlePaddle's static auto-parallel.

import interlace
interlace.enable(strategy)                                   # before paddle.distributed.to_static
model = dist.to_static(layer, loader, loss, optimizer, strategy)
print(interlace.plan_of(model).explain())
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from interlace import registration
from interlace.version import VERSION as __version__

if TYPE_CHECKING:
    from interlace import passes as passes
    from interlace.report.plan import PlanReport

__all__ = ["__version__", "enable", "plan_of"]

registration.register()


def __getattr__(name: str) -> Any:
    """Make `interlace.passes` available after `import interlace` alone: imported at first use, and without Paddle."""
    if name == "passes":
        return importlib.import_module("interlace.passes")
    raise AttributeError(f"module 'interlace' has no attribute {name!r}")


def enable(strategy: Any, config: str | PathLike[str] | Mapping[str, Any] | None = None, /, **options: Any) -> None:
    """Let Interlace plan what Paddle builds with this strategy.

    A second call goes on top of the first one and of flags set in between: what it does not name stays.

    Args:
        strategy: `paddle.distributed.Strategy`; afterwards `strategy.interlace` holds the flags, which may be changed until the
            model is built.
        config: A YAML file, the name of a preset, or a dict; keywords go on top of it.
        **options: As in `interlace.config`: `device`, `dump`, `check`, `plan`, or a pass in snake case with `"on"`, `"off"` or a dict.

    Raises:
        ConfigError: `strategy` is none of Paddle's auto-parallel, an option is unknown, of the wrong type, or contradicts another,
            a file or profile is missing, or Paddle is not installed; nothing is changed then.

    A Paddle that nobody has tested is used where what plans need of it is there, as a line on standard error says; where it is not, the
    model is left to Paddle, unless `force_paddle` is on.
    """
    from interlace.bridge.flags import flags_on
    from interlace.installed import require_paddle, stands_back

    require_paddle()
    flags = flags_on(getattr(strategy, "interlace", None), config, options)
    if stands_back(flags.force_paddle):
        strategy.interlace = flags
        return
    from interlace.bridge.hook import enable as enable_in_paddle

    enable_in_paddle(strategy, flags)


def plan_of(model: Any, mode: str = "train") -> PlanReport:
    """The plan of a model that `paddle.distributed.to_static` gave.

    Raises:
        PlanError: Interlace is off for it, or it is not built in that mode yet.
    """
    from interlace.installed import require_paddle, unusable_paddle
    from interlace.report.checks import EVERYTHING

    require_paddle()
    if "interlace.bridge.hook" not in sys.modules and (why := unusable_paddle(EVERYTHING)):
        from interlace.planning.plan import Plan
        from interlace.report.plan import PlanReport

        return PlanReport(Plan.off(why))
    from interlace.bridge.hook import plan_of as plan_in_paddle

    return plan_in_paddle(model, mode)
