"""Makes our passes known to Paddle's `new_pass` as soon as both packages are imported, in whichever order.

Entries of Paddle's registry are called to make a pass; ours import Interlace's bridge only then, so that `import interlace`
stays light and never imports Paddle by itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REGISTRY_MODULE = "paddle.distributed.passes.pass_base"
PREFIX = "interlace_"
STANDALONE = ("split_backward", "overlap_column_backward", "schedule_1f1b", "offload_activations")
"""Passes that make sense on a plain Paddle program: two rewrite it, the others give a plan."""


def register() -> None:
    """Enter our passes now if Paddle is there, else when it comes."""
    known = sys.modules.get(REGISTRY_MODULE)
    if known is not None:
        enter(known)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def enter(module: ModuleType) -> None:
    """Write our passes into the registry of Paddle's `pass_base` module."""
    for name in STANDALONE:
        module.PassBase._REGISTERED_PASSES[PREFIX + name] = _maker(name)


def _maker(name: str) -> Callable[[], Any]:
    def make() -> Any:
        return importlib.import_module("interlace.bridge.paddle_passes").make(name)

    return make


class _Watch(MetaPathFinder):
    """Waits for Paddle's registry to be imported, enters our passes, and leaves."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Entering(spec.loader)
        return spec


class _Entering(Loader):
    """Loads a module as its own loader does, then enters our passes."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        enter(module)
