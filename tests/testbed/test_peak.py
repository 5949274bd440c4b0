"""What offload saves: the peak that tensors hold, planned and measured, in an order without interleaving."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from interlace.ir import load
from interlace.local.launch import launch
from interlace.scheduler.memory.live import in_order
from tests.testbed.variant import need_ranks

pytestmark = pytest.mark.paddle
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ORDER = "device: h200\nschedule_1f1b: {interleave: off}\nsplit_backward: off\noverlap_column_backward: off\n"
WORDS = (
    "--pp",
    "2",
    "--layers",
    "4",
    "--hidden",
    "64",
    "--heads",
    "4",
    "--vocab",
    "32",
    "--seq-len",
    "64",
    "--batch-size",
    "8",
    "--micro-batches",
    "8",
    "--steps",
    "2",
    "--optimizer",
    "sgd",
    "--schedule",
    "1F1B",
)


def peaks(folder: Path, offload: str) -> list[tuple[int, int, dict[str, Any]]]:
    """Of each rank: planned peak, measured peak of tensors and parameters, and the other numbers of the last step."""
    need_ranks(2)
    folder.mkdir()
    (folder / "plan.yaml").write_text(f"{ORDER}offload_activations: {offload}\ndump: {folder / 'plan'}\n")
    env = {
        "INTERLACE_TARGET": "testbed",
        "INTERLACE_CONFIG": os.fspath(folder / "plan.yaml"),
        "GLOG_minloglevel": "2",
        "TESTBED_MEASURE": os.fspath(folder),
        "TESTBED_STEPS": "2",
    }
    launch(EXAMPLES / "gpt.py", WORDS, 2, env, None, folder / "logs", 60.0)
    found = []
    for rank in range(2):
        memory = json.loads((folder / f"rank{rank}.json").read_text())["steps"][0]["memory"]
        planned = in_order(load(folder / "plan" / f"rank{rank}.ilp")).peak()
        found.append((planned, memory["allocated_peak"] + memory["outside"], memory))
    return found


def test_the_peak_falls_by_what_was_planned(plugin: Path, tmp_path: Path) -> None:
    """Measured peaks."""
    plain, offloaded = peaks(tmp_path / "plain", "off"), peaks(tmp_path / "offload", "{fraction: 1.0, min_bytes: 1KB}")
    for (planned, measured, _), (planned_less, measured_less, memory) in zip(plain, offloaded, strict=True):
        assert measured == pytest.approx(planned, rel=0.01)
        assert measured_less == pytest.approx(planned_less, rel=0.01)
        assert measured - measured_less == pytest.approx(planned - planned_less, rel=0.01)
        assert memory["pinned_peak"] >= measured - measured_less > 0.2 * measured
