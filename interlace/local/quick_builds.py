"""Patches that make builds faster: what Paddle does again and again while it builds a program is done once, or left out if it does not
affect the program."""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Iterator
from typing import Any


def patch() -> None:
    """Apply all patches to this process; call it before a script runs."""
    _record_no_stacks()
    _remember_what_is_converted()
    _convert_methods_once()
    _find_known_meshes()
    _find_startup_parameters()


def _record_no_stacks() -> None:
    """Record the same Python stack for all operations: Paddle records stacks for errors at run time, and a program that is only built never
    runs."""
    stack = traceback.extract_stack(limit=1)

    def extract_stack(f: Any = None, limit: int | None = None) -> Any:
        return stack if f is None and limit is None else extract(f, limit)

    extract, traceback.extract_stack = traceback.extract_stack, extract_stack


def _remember_what_is_converted() -> None:
    """Remember which functions Paddle converts: for each call in a model, it compares the function with every function of every module that
    it never converts."""
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


def _convert_methods_once() -> None:
    """Convert a method once for all layers: Paddle caches conversions by function object, but a method is a new object at each look-up.

    Converted code sees names of its module and closure as they were when it was converted, so it is reused only while these are the same.
    """
    from paddle.jit.dy2static.program_translator import FunctionCache

    convert, known = FunctionCache.convert_with_cache, dict[Any, tuple[dict[str, Any], Any]]()

    def convert_with_cache(self: Any, function: Any) -> Any:
        if not isinstance(function, types.MethodType):
            return convert(self, function)
        own, reads = function.__func__, _outside(function)
        before, converted = known.get(own, ({}, None))
        if converted is None or before.keys() != reads.keys() or any(before[name] is not value for name, value in reads.items()):
            converted = convert(self, function)
            known[own] = reads, converted
        return converted

    FunctionCache.convert_with_cache = convert_with_cache


def _outside(function: Any) -> dict[str, Any]:
    """Name -> value of what the code of a function may read from its module and its closure."""
    plain = inspect.unwrap(function)
    names = {name for code in _codes(plain.__code__) for name in (*code.co_names, *code.co_freevars)}
    cells = dict(zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True))
    filled = {name: cell.cell_contents for name, cell in cells.items() if _is_filled(cell)}
    return {name: value for name, value in {**plain.__globals__, **filled}.items() if name in names}


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _find_known_meshes() -> None:
    """Find known meshes in a table: Paddle compares each new mesh with all known ones, one by one."""
    from paddle.distributed.auto_parallel.static.dist_context import DistributedContext

    add = DistributedContext.add_process_mesh

    def add_process_mesh(self: Any, mesh: Any) -> None:
        remembered = self.__dict__.setdefault("_interlace_meshes", KnownMeshes())
        if not remembered.has(self.process_meshes, mesh):
            add(self, mesh)

    DistributedContext.add_process_mesh = add_process_mesh


class KnownMeshes:
    """The meshes in a list, by shape and ranks; updated if the list has grown or is another one."""

    def __init__(self) -> None:
        self._meshes: list[Any] = []
        self._keys: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._read = 0

    def has(self, meshes: list[Any], mesh: Any) -> bool:
        """Whether an equal mesh is in the list."""
        if meshes is not self._meshes or len(meshes) < self._read:
            self._meshes, self._read = meshes, 0
            self._keys = set()
        self._keys.update(map(self._key, meshes[self._read :]))
        self._read = len(meshes)
        return self._key(mesh) in self._keys

    @staticmethod
    def _key(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(mesh.shape), tuple(mesh.process_ids)


def _find_startup_parameters() -> None:
    """Find parameters of the start-up program in a table: Paddle searches the whole program for the master weight of each parameter. The
    function that searches is nested in another one, so the code of the outer function is replaced."""
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
    """The operations of a start-up program that set parameters, by name; read again if a name is missing."""

    def __init__(self) -> None:
        self._program: Any = None
        self._found: dict[str, Any] = {}

    def find(self, program: Any, name: str) -> Any:
        """The value that the first `set_parameter` of this name sets; None without one."""
        if program is not self._program or name not in self._found:
            self._program, self._found = program, {}
            for op in program.global_block().ops:
                if op.name() == "builtin.set_parameter":
                    self._found.setdefault(op.attrs()["parameter_name"], op)
        return self._found[name].operand(0).source() if name in self._found else None


def _get_param_from_startup(startup, name):  # type: ignore[no-untyped-def]
    """Code for Paddle's nested function; runs with the global names of Paddle's module."""
    return _interlace_startup.find(startup, name)  # type: ignore[name-defined] # noqa: F821
