"""Runs of two stages that look at their machine first, for tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from interlace.local.launch import launch

SCRIPT = Path(__file__).parents[1] / "examples" / "gpt.py"
WORDS = ["--pp", "2", "--micro-batches", "4", "--layers", "2", "--steps", "2"]
CONFIG = "schedule_1f1b: {interleave: mixed, search: false}\noffload_activations: {fraction: 0.5, min_bytes: 1KB}\nexamine: on\n"


def run(folder: Path, capfd: pytest.CaptureFixture[str], **env: str) -> tuple[list[str], list[str]]:
    """What a run of two stages said of Interlace, and the bits of its losses."""
    path = folder / "examined.yaml"
    path.write_text(CONFIG)
    variables = {"INTERLACE_CACHE": os.fspath(folder / "cache"), "INTERLACE_CONFIG": os.fspath(path), "GLOG_minloglevel": "2", **env}
    capfd.readouterr()
    result = launch(SCRIPT, WORDS, 2, variables, None, folder / "logs", 60.0)
    return capfd.readouterr().err.splitlines(), [loss.raw_hex for report in result.reports for loss in report.losses]
