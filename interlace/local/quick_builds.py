"""What Paddle does again and again while it builds a program, done once, or not at all where the program does not show it."""

from __future__ import annotations

import traceback
import types
from typing import Any


def patch() -> None:
    """In this process, before a script runs."""
    _record_no_stacks()
    _remember_what_is_converted()
    _find_startup_parameters()


def _record_no_stacks() -> None:
    """Paddle records the Python stack of every operation for errors of a run; a program that is only built never runs."""
    stack = traceback.extract_stack(limit=1)

    def extract_stack(f: Any = None, limit: int | None = None) -> Any:
        return stack if f is None and limit is None else extract(f, limit)

    extract, traceback.extract_stack = traceback.extract_stack, extract_stack


def _remember_what_is_converted() -> None:
    """For each call in a model Paddle compares the function with every function of every module that it never converts."""
    from paddle.jit.dy2static import convert_call_func

    is_unsupported, known = convert_call_func.is_unsupported, dict[Any, bool]()

    def is_unsupported_remembered(function: Any) -> bool:
        code = function.__code__ if isinstance(function, types.FunctionType) else None
        if code is None:
            return bool(is_unsupported(function))
        if code not in known:
            known[code] = bool(is_unsupported(function))
        return known[code]

    convert_call_func.is_unsupported = is_unsupported_remembered


def _find_startup_parameters() -> None:
    """For the master weight of each parameter Paddle goes through the whole start-up program. The function that does is inside another, of
    which only the code can be replaced."""
    from paddle.optimizer import optimizer

    outer = optimizer.Optimizer._create_master_weight
    inner = _get_param_from_startup.__code__
    optimizer._interlace_startup = StartupParameters()
    constants = [
        inner.replace(co_name=each.co_name) if isinstance(each, types.CodeType) and each.co_name == "get_param_from_startup" else each
        for each in outer.__code__.co_consts
    ]
    outer.__code__ = outer.__code__.replace(co_consts=tuple(constants))


class StartupParameters:
    """Where a start-up program sets parameters, by name; read again where a name is missing."""

    def __init__(self) -> None:
        self._program: Any = None
        self._found: dict[str, Any] = {}

    def find(self, program: Any, name: str) -> Any:
        """What the first `set_parameter` of that name sets; None without one."""
        if program is not self._program or name not in self._found:
            self._program, self._found = program, {}
            for op in program.global_block().ops:
                if op.name() == "builtin.set_parameter":
                    self._found.setdefault(op.attrs()["parameter_name"], op)
        return self._found[name].operand(0).source() if name in self._found else None


def _get_param_from_startup(startup, name):  # type: ignore[no-untyped-def]
    """Runs with the names of Paddle's module."""
    return _interlace_startup.find(startup, name)  # type: ignore[name-defined] # noqa: F821
