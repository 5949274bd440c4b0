"""The package as a whole: examples in docstrings run, imports go one way, names are Paddle's."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import interlace.cost_model
from interlace.cost_model import families

FOLDER = Path(interlace.cost_model.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(f"interlace.cost_model.{name}")).failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    allowed = ("interlace.ir", "interlace.errors", "interlace.files", "interlace.cost_model")
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        found = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names] if isinstance(node, ast.Import) else []
        assert all(not module.startswith("interlace") or module.startswith(allowed) for module in found), (name, found)


def test_no_kind_is_in_two_families():
    names = (
        "GEMMS",
        "ATTENTIONS",
        "ELEMENTWISE",
        "MOVES",
        "PICKS",
        "TRANSPOSES",
        "NORMS",
        "SOFTMAXES",
        "REDUCTIONS",
        "OPTIMIZERS",
    )
    seen: dict[str, str] = {}
    for name in (*names, "FREE", "COMM"):
        for kind in getattr(families, name):
            assert seen.setdefault(kind, name) == name, kind


@pytest.mark.paddle
def test_kinds_are_named_as_paddle_names_them():
    import paddle

    known = {name.rstrip("_") for name in dir(paddle._C_ops)}
    names = ("GEMMS", "ELEMENTWISE", "PICKS", "TRANSPOSES", "NORMS", "SOFTMAXES", "REDUCTIONS", "OPTIMIZERS")
    unknown = {kind for name in names for kind in getattr(families, name)} - known
    assert not unknown
