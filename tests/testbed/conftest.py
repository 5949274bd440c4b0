"""The plugin is built once; the scenes run once, in one process; each test looks at one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.fspath(ROOT))


@pytest.fixture(autouse=True, scope="module")
def _forked(forked_ranks: None) -> None:
    """Ranks of every test here."""


@pytest.fixture(scope="session")
def plugin() -> Path:
    """The thread version, or what `TESTBED_VARIANT` names."""
    pytest.importorskip("paddle")
    from tests.testbed import variant

    return variant.prepare()


@pytest.fixture(scope="session")
def scenes(plugin: Path) -> dict[str, Any]:
    """What every scene found."""
    from testbed.gpus import python_path

    env = {**os.environ, "PYTHONPATH": python_path(), "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("scenes.py")
    done = subprocess.run([sys.executable, os.fspath(script)], env=env, capture_output=True, text=True, timeout=180, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULTS "))
    return found
