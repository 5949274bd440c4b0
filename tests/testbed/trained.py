"""Runs of the examples on the testbed."""

from __future__ import annotations

import os
from pathlib import Path

from interlace.local.launch import LaunchResult, launch
from tests.testbed.variant import need_ranks
from tests.training.cases import EXAMPLES

DELAYS = "seed=3,permille=30,max_us=2000"
SMALL = ("--layers", "2", "--steps", "2", "--micro-batches", "4")
ALL = "device: h200\nschedule_1f1b: {{interleave: {form}, only_gains: off}}\noffload_activations: {{fraction: 1.0, min_bytes: 1KB}}\n"


def train(tmp_path: Path, script: str, world: int, args: tuple[str, ...], form: str = "", **variables: str) -> LaunchResult:
    need_ranks(world)
    env = {"INTERLACE_TARGET": "testbed", "GLOG_minloglevel": "2", **variables}
    if form:
        (tmp_path / "plan.yaml").write_text(ALL.format(form=form))
        env["INTERLACE_CONFIG"] = os.fspath(tmp_path / "plan.yaml")
    else:
        env["INTERLACE_DISABLE"] = "1"
    return launch(EXAMPLES / f"{script}.py", [*SMALL, *args], world, env, None, tmp_path / "logs", 60.0)


def bits(result: LaunchResult) -> list[list[str]]:
    """Every loss of every rank."""
    return [[loss.raw_hex for loss in report.losses] for report in result.reports]


def digests(result: LaunchResult) -> list[dict[str, str]]:
    """Every parameter of every rank."""
    return [report.parameters for report in result.reports]
