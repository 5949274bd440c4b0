"""A script that measures plans on its own steps, and what it said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from interlace.local.launch import LaunchResult, launch
from tests.searches import FEW_FORMS

SCRIPT = Path(__file__).with_name("tuned_script.py")
OURS, FORM, MEMORY = "Interlace's plan", "the plan with schedule_1f1b.interleave=mixed", "the plan with memory_budget=+"
PP2, STEPS = "--pp 2 --micro-batches 4 --layers 2", "--steps 30"
LAYOUTS = {"pp2": (2, PP2), "mp2": (2, "--mp 2 --layers 1 --gradient-accumulation 2"), "mp2, one micro-batch": (2, "--mp 2 --layers 1")}

MESHES = {
    "one rank": (1, "--layers 1 --gradient-accumulation 2"),
    "dp2 over fused buffers": (2, "--dp 2 --layers 2 --sharding-stage 1 --sharding-fusion --gradient-accumulation 2"),
    "pp2 FThenB": (2, "--pp 2 --micro-batches 4 --layers 2 --schedule FThenB"),
    "pp2 vpp2": (2, "--pp 2 --vpp 2 --micro-batches 4"),
    "pp4": (4, "--pp 4 --micro-batches 8"),
    "pp2 mp2": (4, f"{PP2} --mp 2"),
    "pp2 mp2, sequence parallel": (4, f"{PP2} --mp 2 --sequence-parallel"),
    "pp2 vpp2 mp2": (4, "--pp 2 --vpp 2 --mp 2 --micro-batches 4"),
    "dp2 pp2, sharding 2": (4, f"{PP2} --dp 2 --sharding-stage 2"),
    "dp2 mp2, sharding 1": (4, "--dp 2 --mp 2 --layers 1 --sharding-stage 1 --gradient-accumulation 2"),
    "dp2 mp2, sharding 3": (4, "--dp 2 --mp 2 --layers 1 --sharding-stage 3 --gradient-accumulation 2"),
}
"""Those of `test_training.py` besides."""


class Run:
    """A run and what it said."""

    def __init__(self, folder: Path, layout: str, play: dict[str, Any], words: str = STEPS, **env: str) -> None:
        world, arguments = {**LAYOUTS, **MESHES}[layout]
        self.said: list[str] = []
        own = {"TUNED_PLAY": json.dumps(play), "INTERLACE_CACHE": str(folder / "cache"), FEW_FORMS: "1"}
        variables = {**own, "GLOG_minloglevel": "2", **env}
        logs, args = folder / "logs", [*arguments.split(), *words.split()]
        self.result: LaunchResult = launch(SCRIPT, args, world, variables, None, logs, 60.0, None, lambda rank, line: self.hear(rank, line))

    def hear(self, rank: int, line: str) -> None:
        """A line that the script printed."""
        if rank == 0:
            self.said.append(line.removeprefix("EXPLAINED "))

    def bits(self) -> list[object]:
        """Of the training losses and of all that lasts."""
        losses = [[(loss.raw_hex, loss.shape) for loss in report.losses if loss.mode == "train"] for report in self.result.reports]
        return [losses, [report.parameters for report in self.result.reports], [report.state for report in self.result.reports]]

    def trial(self) -> list[str]:
        """What it said of the trial."""
        start = next((k for k, line in enumerate(self.said) if line.startswith("plans ")), len(self.said))
        return self.said[start:]
