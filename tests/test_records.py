"""Records of passes, the checker and the models of memory keep the rules of the house, and what packages offer is listed."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

PACKAGES = ("interlace.passes", "interlace.scheduler.hazards", "interlace.scheduler.memory")
FILLED = {
    *("Context", "Proof", "Waits", "Access", "FlatPlan", "Fault", "Trace", "Words"),
    *("Lifetimes", "Lives", "Profile", "Placed"),
}
"""Working state that several modules see, filled step by step; all else that they see is frozen."""
WITHOUT_NAMES = {"CallQuery", "CallAnswer", "Stray", "Change", "Call", "Calls", "Skeleton"}
"""What ranks send each other in numbers: their fields go without names."""


def modules() -> list[ModuleType]:
    found = [importlib.import_module(name) for name in PACKAGES]
    return [importlib.import_module(f"{each.__name__}.{inner.name}") for each in found for inner in pkgutil.iter_modules(each.__path__)]


def classes() -> list[type]:
    return [each for module in modules() for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]


def test_structs_are_frozen_and_take_no_unknown_field() -> None:
    structs = [each for each in classes() if issubclass(each, msgspec.Struct)]
    assert len(structs) > 20
    for each in structs:
        config = each.__struct_config__
        assert config.frozen, each
        assert config.forbid_unknown_fields, each
    assert {each.__name__ for each in structs if each.__struct_config__.array_like} == WITHOUT_NAMES


def test_dataclasses_have_slots_and_are_frozen_but_for_working_state() -> None:
    found = [each for each in classes() if dataclasses.is_dataclass(each)]
    assert len(found) > 20
    for each in found:
        assert "__slots__" in vars(each), each
        if not each.__name__.startswith("_"):
            assert each.__dataclass_params__.frozen == (each.__name__ not in FILLED), each  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PACKAGES[:2])
def test_what_a_package_imports_from_its_modules_is_what_it_offers(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__file__
    imports = [each for each in ast.parse(Path(package.__file__).read_text()).body if isinstance(each, ast.ImportFrom)]
    assert sorted(package.__all__) == sorted(alias.name for each in imports for alias in each.names)
