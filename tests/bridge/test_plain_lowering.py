"""Lowering without any pass gives Paddle's own jobs, and everything off gives Paddle's own plan untouched."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.paddle
SCRIPT = Path(__file__).with_name("build_rank.py")
PIPELINES = {
    "1F1B": (0, 4, "--pp 2 --mp 2 --micro-batches 4"),
    "1F1B last stage": (2, 4, "--pp 2 --mp 2 --micro-batches 4"),
    "VPP": (1, 2, "--pp 2 --vpp 2 --micro-batches 4"),
    "FThenB": (1, 2, "--pp 2 --schedule FThenB --micro-batches 4"),
}


@cache
def built(rank: int, world: int, how: str, arguments: str) -> dict[str, Any]:
    """What one process built."""
    command = [sys.executable, str(SCRIPT), str(rank), str(world), how, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    result["log"] = [line for line in done.stderr.splitlines() if ":interlace:" in line]
    return result


@pytest.mark.parametrize("name", PIPELINES)
def test_jobs_and_operations_are_paddles_own(name: str) -> None:
    """Plain lowering - the same operations, operands, attributes, streams and order in every job; F1 - the same jobs."""
    rank, world, arguments = PIPELINES[name]
    stock, ours = (built(rank, world, how, arguments) for how in ("stock", "plain"))
    mine = [job for job in ours["jobs"] if not job[0].startswith("interlace_")]
    named = [(f"{kind}_{micro_batch}" if kind != "optimizer" else kind, kind) for kind, micro_batch in stock["jobs"] if stock["ops"][kind]]
    assert [job for job, _ in mine] == [job for job, _ in named]
    for job, kind in named:
        assert ours["ops"][job] == stock["ops"][kind], f"{job} differs from Paddle's {kind}"
    num_micro_batches = len({micro_batch for _, micro_batch in stock["jobs"]})
    assert ours["planned_events"] >= stock["records"] * num_micro_batches


def test_with_everything_off_the_plan_is_untouched() -> None:
    """One line - byte for byte."""
    rank, world, arguments = PIPELINES["1F1B"]
    stock, off = (built(rank, world, how, arguments) for how in ("stock", "off"))
    assert off["jobs"] == stock["jobs"]
    assert off["text"] == stock["text"]


def test_flags_that_are_dead_in_paddle_work() -> None:
    """Dead flags - set behind enable() or in the environment, they are in the plan, and the log says by which option of ours."""
    rank, world, arguments = PIPELINES["1F1B"]
    stock, ours = (built(rank, world, how, arguments) for how in ("stock", "flags"))
    assert ours["changed"]["overlap-column-backward"] > 0
    assert '"auto_parallel_mp' not in json.dumps(stock["ops"])
    assert '"auto_parallel_mp' in json.dumps(ours["ops"])
    for name in ("FLAGS_mp_async_allreduce_in_backward", "mp_optimization.allreduce_matmul_grad_overlapping"):
        assert [line for line in ours["log"] if f"{name}" in line and "overlap_column_backward='on'" in line]


def test_passes_are_known_to_paddle() -> None:
    """Plain programs: names appear as soon as both packages are imported."""
    rank, world, arguments = PIPELINES["1F1B"]
    assert built(rank, world, "off", arguments)["registered"] == [
        "interlace_offload_activations", "interlace_overlap_column_backward", "interlace_schedule_1f1b",
        "interlace_split_backward"]  # fmt: skip
