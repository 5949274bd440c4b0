"""Imports go one way, those inside functions and for type checking too; only the outer layers know Paddle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

from interlace.passes import REGISTRY
from interlace.passes.base import is_built_in
from tests.modules import package_modules

LAYERS = {
    "ir": "the immutable program, its text, graph and differences; schedule notation, target rules, rings, equivalence of ranks",
    "cost_model": "times of operations, collectives and copies",
    "simulation": "the engine that runs plans in a model of the executor, and the models of its memory",
    "proof": "what makes a plan unsafe, found without trusting what planned it",
    "scheduler": "what orders and chooses: jobs and their inside, recomputation, offload, the coarse model of a step",
    "passes": "a rewrite of a program for each file, with its contract",
    "planning": "the search over whole steps: it decides; the finished plan as data: compared, stored, read again, for several budgets",
    "report": "what simulated steps, decisions and remarks tell: sentences, tables, pages",
    "cpu": "Paddle's CPU wheel taught to run several ranks",
    "bridge": "Paddle's programs in, jobs of its executor out",
    "local": "ranks as processes of this machine",
    "layout": "a search over layouts, of which each is a set of programs that are built, bounded, simulated and planned",
    "cli": "the console command",
}
"""From the inside out, each with its purpose: a layer may import itself and layers in front of it."""
KNOW_PADDLE = ("cpu", "bridge", "local")
LEAVES = {
    "interlace.errors",
    "interlace.files",
    "interlace.interrupts",
    "interlace.version",
    "interlace.compiling",
    "interlace.configs",
    "interlace.units",
    "interlace.registration",
    "interlace.notice",
    "interlace.garbage",
    "interlace.grouping",
    "interlace.temporary",
}
"""What all may import."""
WHERE = {
    "interlace.scheduler.simulate": "simulation",
    "interlace.scheduler.memory": "simulation",
    "interlace.scheduler.hazards": "proof",
    "interlace.config": "planning",
    "interlace.outside": "planning",
    "interlace.user_passes": "planning",
    "interlace.installed": "bridge",
    "interlace.launch": "local",
    "interlace.__main__": "cli",
}
"""Modules and folders whose layer is not their folder's name."""


def layer(name: str) -> str | None:
    """Layer of a module; None for leaves, which all may import, and for the public face, which imports late."""
    if name in LEAVES or name == "interlace":
        return None
    for prefix, where in WHERE.items():
        if name == prefix or name.startswith(prefix + "."):
            return where
    return name.split(".")[1]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path, top_level_only: bool = False) -> frozenset[str]:
    """Modules that a file imports, by full name."""
    tree = _tree(path)
    found = set()
    for node in tree.body if top_level_only else _statements(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in a node, without their expressions, which are most of a tree."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, field, ())
        for each in inner if isinstance(inner, list) else ():
            yield each
            yield from _statements(each)


def _calls(path: Path, *names: str) -> Iterator[ast.Call]:
    """Calls of functions with these names, or of methods."""
    text = path.read_text(encoding="utf-8")
    if any(name in text for name in names):
        for node in ast.walk(_tree(path)):
            called = node.func if isinstance(node, ast.Call) else None
            if getattr(called, "attr", getattr(called, "id", None)) in names:
                assert isinstance(node, ast.Call)
                yield node


def test_only_the_outer_rooms_import_paddle() -> None:
    assert {name for name in package_modules() if "paddle" in packages(name) and layer(name) not in KNOW_PADDLE} == set()


def test_nothing_imports_what_is_not_installed_with_it() -> None:
    """The testbed, the tests and the benchmarks know Interlace, and are no part of it."""
    assert {name for name in package_modules() if packages(name) & {"testbed", "tests", "benchmarks"}} == set()


def packages(name: str) -> set[str]:
    """What a module imports, by the first word."""
    return {module.partition(".")[0] for module in imported(package_modules()[name])}


def test_layers_import_inwards() -> None:
    order, files, outward = list(LAYERS), package_modules(), []
    layers = {name: where for name in files if (where := layer(name)) in LAYERS}
    for name, mine in layers.items():
        others = {module: layers[module] for module in imported(files[name]) if module in layers}
        outward += [f"{name} ({mine}) -> {each} ({where})" for each, where in others.items() if order.index(where) > order.index(mine)]
    assert sorted(outward) == []


def test_folders_import_one_way() -> None:
    """Inside a layer, too: of two folders at most one knows the other, by whatever way."""
    files, links = package_modules(), nx.DiGraph()
    folders = {name: name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in files.items()}
    deep = {name: folder for name, folder in folders.items() if folder.count(".") > 1}
    for name, folder in deep.items():
        links.add_edges_from((folder, deep[each]) for each in imported(files[name]) & deep.keys() if deep[each] != folder)
    assert [sorted(circle) for circle in nx.strongly_connected_components(links) if len(circle) > 1] == []


def test_no_pass_knows_another() -> None:
    """Passes share helpers and the contract; what one must know of another goes through what it gives and needs."""
    files = package_modules()
    passes = {kind.__module__ for kind in REGISTRY.values() if is_built_in(kind)}
    assert [f"{name} -> {each}" for name in sorted(passes) for each in sorted(imported(files[name]) & (passes - {name}))] == []


def test_no_pass_is_asked_for_its_class_outside_of_the_passes() -> None:
    """Planning works by what a pass declares that it decides (`Pass.decides`)."""
    kinds = {kind.__name__ for kind in REGISTRY.values() if is_built_in(kind)}
    found = []
    for name, path in package_modules().items():
        if layer(name) != "passes":
            for node in _calls(path, "isinstance"):
                asked = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                found += [f"{name}:{node.lineno}: {each}" for each in sorted(asked & kinds)]
    assert found == []


def test_every_module_is_in_a_layer() -> None:
    """A module outside of them would be held to nothing; one that all may import imports no layer."""
    files = package_modules()
    assert {name: layer(name) for name in files if layer(name) not in (None, *LAYERS)} == {}
    assert {name: beyond for name in LEAVES if (beyond := (imported(files[name]) & files.keys()) - LEAVES)} == {}


def test_the_scheduler_has_no_loose_files() -> None:
    files = [path for name, path in package_modules().items() if name.startswith("interlace.scheduler.") and name.count(".") == 2]
    assert [path.name for path in files if path.name != "__init__.py"] == []


def test_command_line_starts_without_heavy_modules() -> None:
    """Help is printed in well under 0.2 s, so commands import what they need when they run."""
    heavy = {"numpy", "paddle", "networkx", "numba", "msgspec", "yaml"}
    for name, path in package_modules().items():
        if name.startswith("interlace.cli"):
            found = {module.partition(".")[0] for module in imported(path, top_level_only=True)}
            assert not found & heavy, name


TESTS = sorted(Path(__file__).parent.rglob("*.py"))


def test_no_test_imports_another() -> None:
    """What several of them use is in a module of its own."""
    folder = Path(__file__).parents[1]
    names = {path.relative_to(folder).with_suffix("").as_posix().replace("/", "."): path for path in TESTS}
    assert [
        f"{name} -> {other}" for name, path in names.items() for other in imported(path) if other.rpartition(".")[2].startswith("test_")
    ] == []


def test_no_test_replaces_what_is_private_to_a_module_of_ours() -> None:
    """It would have to change with each change behind the module's face."""
    found = []
    for path in TESTS:
        for node in _calls(path, "setattr", "delattr"):
            words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            parts = [part for word in words for part in word.split(".") if not word.startswith("paddle.")]
            found += [f"{path.name}:{node.lineno}: {part}" for part in parts if part.startswith("_") and not part.startswith("__")]
    assert found == []
