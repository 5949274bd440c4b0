"""Interlace: overlap and offload for PaddlePaddle's static auto-parallel.

    import interlace
    interlace.enable(strategy)                                   # before paddle.distributed.to_static
    model = dist.to_static(layer, loader, loss, optimizer, strategy)
    print(interlace.plan_of(model).explain())
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from interlace import registration
from interlace.version import VERSION as __version__

if TYPE_CHECKING:
    from interlace import passes as passes
    from interlace.plan import Plan

__all__ = ["__version__", "enable", "plan_of"]

registration.register()


def __getattr__(name: str) -> Any:
    """`interlace.passes` behind `import interlace` alone; it is imported when it is asked for, and Paddle is not."""
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
        **options: As in `interlace.config`: `device`, `dump`, `check`, or a pass in snake case with `"on"`, `"off"` or a dict.

    Raises:
        ConfigError: `strategy` is none of Paddle's auto-parallel, an option is unknown, of the wrong type, or contradicts another,
            or a file or profile is missing; nothing is changed then.
    """
    from interlace.bridge.hook import enable as enable_in_paddle

    enable_in_paddle(strategy, config, options)


def plan_of(model: Any, mode: str = "train") -> Plan:
    """The plan of a model that `paddle.distributed.to_static` gave.

    Raises:
        PlanError: Interlace is off for it, or it is not built in that mode yet.
    """
    from interlace.bridge.hook import plan_of as plan_in_paddle

    return plan_in_paddle(model, mode)
