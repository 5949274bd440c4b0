"""Calibration of a device behind the host: operations on streams, and copies to pinned memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.cost_model import CostModel, load_profile
from testbed.gpus import ROOT, python_path

pytestmark = pytest.mark.paddle

SOME = """
import sys
from interlace.cli.devices import paddle_on
with paddle_on("testbed") as target:
    from interlace.bridge.calibrate import measure
    from interlace.bridge.targets.choose import choose_device, use_place
    from interlace.cost_model import load_profile, save_profile
    use_place(target)
    every = measure.cases
    wanted = ("gemm", "attention_grad", "sgd", "copy", "cast")
    measure.cases = lambda fast, quick: list({kind: case for case in every(fast, quick) if (kind := case.part.kind) in wanted}.values())
    found = measure.calibrate(choose_device(), quick=True)
    save_profile(measure.completed(found.profile, load_profile("h200"), "h200"), sys.argv[1])
    print(found.failed)
"""


def test_a_device_behind_the_host_is_measured(plugin: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine.json"
    env = {**os.environ, "PYTHONPATH": python_path(), "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SOME, str(target)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cast float32: UnimplementedError" in done.stdout  # the testbed has no such type
    profile, base = load_profile(target), load_profile("h200")
    assert {sample.direction for sample in profile.copies} == {"d2h", "h2d"}
    assert all(sample.ranks == 1 for sample in profile.copies)
    assert profile.collectives == base.collectives
    own = [sample for sample in profile.ops if sample not in base.ops]
    assert {"gemm", "attention_grad", "sgd", "copy"} <= {sample.kind for sample in own}
    assert profile.power is None
    assert CostModel(profile).profile.matrix_flops["float32"].source == "measured"
