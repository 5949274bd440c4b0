"""The examples in docstrings run, in the package and in the test helpers."""

from __future__ import annotations

import doctest
import importlib
import linecache

import pytest

from tests.modules import package_modules

HELPERS = ("docs.write_options", "tests.interpreter", "tests.strategies", "tests.closure")
IMPORT_PADDLE = ("interlace.bridge", "interlace.cpu.dynamic", "interlace.cpu.eager_reshard", "interlace.cpu.ops")
MODULES = [pytest.param(name, marks=[pytest.mark.paddle] * name.startswith(IMPORT_PADDLE)) for name in package_modules()]


@pytest.mark.parametrize("name", [*MODULES, *HELPERS])
def test_examples_in_docstrings(name: str) -> None:
    linecache.clearcache()  # else the debugger that doctest prepares looks whether any of hundreds of files has changed
    failed, _ = doctest.testmod(importlib.import_module(name), verbose=False)
    assert failed == 0
