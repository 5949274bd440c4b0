"""The package as a whole: examples in docstrings run, imports go one way, names are Paddle's."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import interlace.cost_model
from interlace.cost_model import families
from interlace.ir import operators

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


FAMILIES = (
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


def test_no_kind_is_in_two_families():
    seen: dict[str, str] = {}
    for name in (*FAMILIES, "FREE", "COMM"):
        for kind in getattr(families, name):
            assert seen.setdefault(kind, name) == name, kind


def test_kinds_are_named_as_paddle_names_them():
    """All are operators of Paddle: its lists are compared with the wheel's by tests/operators."""
    known = operators.DRAWS | operators.ACTS | operators.CONTROLS | operators.COMPUTES
    assert {kind for name in (*FAMILIES, "VIEWS") for kind in getattr(families, name)} <= known
