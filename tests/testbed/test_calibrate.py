"""Calibration of devices behind the host: operations on streams, copies to pinned memory, what two exchange."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.profile import CommSample
from testbed.gpus import ROOT, python_path

pytestmark = pytest.mark.paddle
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

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
    from interlace.bridge.calibrate.exchanges import Exchanges
    found = measure.calibrate(measure.bench_of(choose_device(), quick=True), Exchanges(why_not="one device was measured"), quick=True)
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


TOGETHER = """
import sys
from testbed.target import TARGET
rank, folder = int(sys.argv[1]), sys.argv[2]
TARGET.install(rank, 2, folder, 60.0)
import msgspec
from interlace.bridge.calibrate import exchanges
from interlace.bridge.calibrate.bench import Bench, paddle_settings
from interlace.bridge.targets.choose import choose_device, use_place
use_place("custom")
exchanges.SIZES = (1 << 12, 1 << 16)
exchanges.NUM_RUNS = 3
with paddle_settings():
    found = exchanges.measured_exchanges(Bench(choose_device(), 0.02, 3), exchanges.Ranks(rank, 2), quick=False)
with open(f"{folder}/found{rank}.json", "wb") as file:
    file.write(msgspec.json.encode([found.collectives, found.p2p]))
"""


def test_two_devices_measure_their_collectives_and_transfers_together(plugin: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": python_path(), "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", TOGETHER]
    ranks = [
        subprocess.Popen([*words, str(rank), str(tmp_path)], env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=200.0) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for rank in range(2):
        collectives, transfers = msgspec.json.decode((tmp_path / f"found{rank}.json").read_bytes(), type=list[list[CommSample]])
        kinds = {(each.kind, each.group_size, each.size_bytes) for each in collectives}
        assert kinds == {(kind, 2, size) for kind in KINDS for size in (1 << 12, 1 << 16)}
        assert {(each.kind, each.group_size, each.size_bytes) for each in transfers} == {
            ("send_recv", 2, 1 << 12),
            ("send_recv", 2, 1 << 16),
        }
        assert all(each.dur_ns > 1000 for each in (*collectives, *transfers))  # threads meet in microseconds at least


def test_groups_are_those_of_consecutive_ranks(plugin: Path) -> None:
    from interlace.bridge.calibrate.exchanges import Ranks

    assert [Ranks(0, world).sizes() for world in (2, 3, 6, 8)] == [[2], [3], [2, 6], [2, 4, 8]]
