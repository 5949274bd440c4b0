"""The examples in docstrings run, in the package and in the test helpers; Paddle's side has its own tests."""

from __future__ import annotations

import doctest
import importlib
import linecache

import pytest

from tests.modules import package_modules

HELPERS = ("docs.write_options", "tests.interpreter", "tests.strategies", "tests.closure")
MODULES = [name for name in package_modules() if not name.startswith("interlace.bridge")]


@pytest.mark.parametrize("name", [*MODULES, *HELPERS])
def test_examples_in_docstrings(name: str) -> None:
    linecache.clearcache()  # else the debugger that doctest prepares looks whether any of hundreds of files has changed
    failed, _ = doctest.testmod(importlib.import_module(name), verbose=False)
    assert failed == 0
