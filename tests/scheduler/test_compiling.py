"""What numba stores of one state of the sources is not run with another."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from interlace.compiling import compiled

OUTER = "import numba.extending, helping\nnumba.extending.register_jitable(helping.helper)\ndef outer(k):\n    return helping.helper(k)\n"


def run_with(folder: Path, number: int) -> int:
    """Compile in a new state of the helper's module, as a new process would."""
    (folder / "helping.py").write_text(f"def helper(k):\n    return k + {number}\n" + "#" * number)
    for name in ("helping", "calling"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    helping, calling = (importlib.import_module(name) for name in ("helping", "calling"))
    found: int = compiled(calling.outer, (helping,))(1)
    return found


def test_a_change_of_what_a_function_calls_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "calling.py").write_text(OUTER)
    assert [run_with(tmp_path, number) for number in (1, 20, 20)] == [2, 21, 21]
    assert list((tmp_path / "__pycache__").glob("calling.outer-*.nbi"))
