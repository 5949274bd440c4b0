"""A script that measures plans on its own steps, and what it said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from interlace.local.launch import LaunchResult, launch

SCRIPT = Path(__file__).with_name("tuned_script.py")
OURS, FORM, MEMORY = "Interlace's plan", "the plan with schedule_1f1b.interleave=mixed", "the plan with schedule_1f1b.extra_live_bytes="
PP2, STEPS = "--pp 2 --micro-batches 4 --layers 2", "--steps 30"
LAYOUTS = {"pp2": (2, PP2), "mp2": (2, "--mp 2 --layers 1 --gradient-accumulation 2"), "mp2, one micro-batch": (2, "--mp 2 --layers 1")}


class Run:
    """A run and what it said."""

    def __init__(self, folder: Path, layout: str, play: dict[str, Any], words: str = STEPS, **env: str) -> None:
        world, arguments = LAYOUTS[layout]
        self.said: list[str] = []
        variables = {"TUNED_PLAY": json.dumps(play), "INTERLACE_CACHE": str(folder / "cache"), "GLOG_minloglevel": "2", **env}
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
