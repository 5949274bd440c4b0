"""`--target MODULE`: a device of one's own that ranks of a local run train on. No Paddle here.

The module has a `TARGET` (or `MODULE:NAME` says another name), an `OwnTarget`. Interlace itself knows the CPU and GPUs.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.errors import ConfigError, InterlaceError
from interlace.ir.target import Target

if TYPE_CHECKING:
    from interlace.cpu.transport import Transport


class OwnTarget(ABC):
    """How ranks run on a device of one's own; `rules` say what it does by itself, and `interlace check --target MODULE` asks for them."""

    rules: Target

    @abstractmethod
    def require(self) -> None:
        """Find out, before anything starts, whether ranks can run here. Raises ConfigError, with what to do, where they cannot."""

    @abstractmethod
    def install(self, rank: int, world: int, run_dir: str, timeout_s: float) -> Transport:
        """Prepare the process of one rank, before Paddle is imported and the script runs; the caller closes the transport.

        `interlace.bridge.targets.register_device` says here how programs are built for the device.
        """


def find_own(name: str) -> OwnTarget:
    """Import the module of a target, found as a script in this folder would find it. Raises ConfigError where there is no such module, it
    fails, or has no target."""
    module, _, attribute = (name if ":" in name else f"{name}:TARGET").partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except InterlaceError:
        raise
    except Exception as error:
        raise ConfigError(f"--target {name}: {type(error).__name__}: {error}; expected cpu, gpu, or a module with a TARGET") from error
    if not isinstance(found, OwnTarget):
        raise ConfigError(f"--target {name}: {module}.{attribute} is {found!r}; expected an interlace.local.own_target.OwnTarget")
    return found


def search_folder(name: str) -> str:
    """The folder that must be on the search path for a target's module to be found."""
    top = importlib.import_module(name.partition(":")[0].partition(".")[0])
    file = next(iter(top.__path__)) if hasattr(top, "__path__") else top.__file__
    return os.fspath(Path(os.fspath(file or ".")).absolute().parent)
