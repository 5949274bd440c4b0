"""Imports go one way, and only the outer memory_limits know Paddle (design: Folders)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.modules import package_modules

ROOMS = ("ir", "cost_model", "scheduler", "passes", "planning", "cpu", "bridge", "local", "cli")
"""From the inside out: a room may import itself and memory_limits in front of it."""
KNOW_PADDLE = ("cpu", "bridge", "local")
LEAVES = {
    "interlace.errors",
    "interlace.files",
    "interlace.interrupts",
    "interlace.version",
    "interlace.configs",
    "interlace.units",
    "interlace.registration",
    "interlace.notice",
    "interlace.garbage",
    "interlace.temporary",
}
INNER = {
    "interlace.config": "planning",
    "interlace.outside": "planning",
    "interlace.user_passes": "planning",
    "interlace.report": "planning",
    "interlace.installed": "bridge",
    "interlace.__main__": "cli",
}
"""Modules outside of the memory_limits' folders -> the room they count as."""


def room(name: str) -> str | None:
    """Room of a module; None for leaves, which all may import, and for the public face, which imports late."""
    if name in LEAVES or name == "interlace":
        return None
    for prefix, where in INNER.items():
        if name == prefix or name.startswith(prefix + "."):
            return where
    return name.split(".")[1]


@cache
def imported(path: Path, top_level_only: bool = False) -> frozenset[str]:
    """Modules that a file imports, by full name; imports for type checking alone are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


@pytest.mark.parametrize("name", package_modules())
def test_only_the_outer_rooms_import_paddle(name: str) -> None:
    known = {module.partition(".")[0] for module in imported(package_modules()[name])}
    assert "paddle" not in known or room(name) in KNOW_PADDLE


@pytest.mark.parametrize("name", package_modules())
def test_nothing_imports_what_is_not_installed_with_it(name: str) -> None:
    """The testbed, the tests and the benchmarks know Interlace, and are no part of it."""
    known = {module.partition(".")[0] for module in imported(package_modules()[name])}
    assert not known & {"testbed", "tests", "benchmarks"}


@pytest.mark.parametrize("name", [name for name in package_modules() if room(name) in ROOMS])
def test_rooms_import_inwards(name: str) -> None:
    mine = ROOMS.index(room(name) or "")
    files = package_modules()
    others = {module for module in imported(files[name]) if module in files and room(module) in ROOMS}
    outward = {module for module in others if ROOMS.index(room(module) or "") > mine}
    assert not outward, f"{name} ({room(name)}) imports {sorted(outward)}"


@pytest.mark.parametrize("name", package_modules())
def test_every_module_is_in_a_room(name: str) -> None:
    """A module outside of the memory_limits would be held to nothing; one that all may import imports no room."""
    assert room(name) in (None, *ROOMS)
    if name in LEAVES:
        files = package_modules()
        assert {module for module in imported(files[name]) if module in files} <= LEAVES


def test_command_line_starts_without_heavy_modules() -> None:
    """Help is printed in well under 0.2 s, so commands import what they need when they run."""
    heavy = {"numpy", "paddle", "networkx", "numba", "msgspec", "yaml"}
    for name, path in package_modules().items():
        if name.startswith("interlace.cli"):
            found = {module.partition(".")[0] for module in imported(path, top_level_only=True)}
            assert not found & heavy, name
