"""`--target MODULE`: a custom device on which the ranks of a local run train. No Paddle here.

The module has an `OwnTarget` with the name `TARGET`, or with the name in `MODULE:NAME`. Interlace itself knows the CPU and GPUs.
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
    """How ranks run on a custom device. `rules` describe the device and Paddle's executor on it, for commands such as
    `interlace check --target MODULE`."""

    rules: Target

    @abstractmethod
    def require(self) -> None:
        """Check, before anything starts, that ranks can run here. Raises ConfigError, with what to do, if they cannot."""

    @abstractmethod
    def install(self, rank: int, world: int, run_dir: str, timeout_s: float) -> Transport:
        """Prepare the process of one rank, before Paddle is imported and the script runs; the caller closes the transport.

        Call `interlace.bridge.targets.register_device` here to set how programs are built for the device.
        """


def find_own(name: str) -> OwnTarget:
    """Import the module of a target and return its target; the current folder is searched too. Raises ConfigError if there is no such
    module, its import fails, or it has no target."""
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
    """The folder that must be on Python's search path so that the module of a target is found."""
    top = importlib.import_module(name.partition(":")[0].partition(".")[0])
    file = next(iter(top.__path__)) if hasattr(top, "__path__") else top.__file__
    return os.fspath(Path(os.fspath(file or ".")).absolute().parent)
