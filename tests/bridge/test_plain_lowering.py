"""Lowering without any pass gives Paddle's own jobs, and everything off gives Paddle's baseline untouched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.paddle
ROOT = Path(__file__).parents[2]
PIPELINES = {
    "1F1B": (0, 4, "--pp 2 --mp 2 --micro-batches 4 --layers 2"),
    "1F1B last stage": (2, 4, "--pp 2 --mp 2 --micro-batches 4 --layers 2"),
    "VPP": (1, 2, "--pp 2 --vpp 2 --micro-batches 4 --layers 4"),
    "FThenB": (1, 2, "--pp 2 --schedule FThenB --micro-batches 4 --layers 2"),
}


Built = Callable[[str, str], dict[str, Any]]
REPLICAS = {"replicas": (0, 4, "--dp 2 --mp 2 --sequence-parallel --gradient-accumulation 2 --layers 1")}
BUILDS = [*((name, how) for name in PIPELINES for how in ("baseline", "plain")), ("1F1B", "off"), ("1F1B", "flags"), ("replicas", "plain")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """What a rank of a pipeline built, and how; all of them are forks of one process that has imported Paddle."""
    folder = tmp_path_factory.mktemp("built")
    of_name = PIPELINES | REPLICAS
    asked = [(*of_name[name][:2], how, of_name[name][2].split()) for name, how in BUILDS]
    subprocess.run([sys.executable, "-m", "tests.bridge.build_rank", str(folder), json.dumps(asked)], cwd=ROOT, check=True)

    def found(name: str, how: str) -> dict[str, Any]:
        k = BUILDS.index((name, how))
        log = (folder / f"{k}.log").read_text()
        assert (folder / f"{k}.json").exists(), log[-2000:]
        result: dict[str, Any] = json.loads((folder / f"{k}.json").read_text())
        return {**result, "log": [line for line in log.splitlines() if ":interlace:" in line]}

    return found


@pytest.mark.parametrize("name", PIPELINES)
def test_jobs_and_operations_are_paddles_own(built: Built, name: str) -> None:
    """Plain lowering - the same operations, operands, attributes, streams and order in every job; F1 - the same jobs."""
    baseline, ours = (built(name, how) for how in ("baseline", "plain"))
    mine = [job for job in ours["jobs"] if not job[0].startswith("interlace_")]
    named = [
        (f"{kind}_{micro_batch}" if kind != "optimizer" else kind, kind) for kind, micro_batch in baseline["jobs"] if baseline["ops"][kind]
    ]
    assert [job for job, _ in mine] == [job for job, _ in named]
    for job, kind in named:
        assert ours["ops"][job] == baseline["ops"][kind], f"{job} differs from Paddle's {kind}"
    num_micro_batches = len({micro_batch for _, micro_batch in baseline["jobs"]})
    assert ours["planned_events"] >= baseline["records"] * num_micro_batches


def test_with_everything_off_the_plan_is_untouched(built: Built) -> None:
    """One line - byte for byte."""
    baseline, off = (built("1F1B", how) for how in ("baseline", "off"))
    assert off["jobs"] == baseline["jobs"]
    assert off["text"] == baseline["text"]


def test_flags_that_are_dead_in_paddle_work(built: Built) -> None:
    """Dead flags - set behind enable() or in the environment, they are in the plan, and the log says by which option of ours."""
    baseline, ours = (built("1F1B", how) for how in ("baseline", "flags"))
    assert ours["changed"]["overlap-column-backward"] > 0
    assert '"auto_parallel_mp' not in json.dumps(baseline["ops"])
    assert '"auto_parallel_mp' in json.dumps(ours["ops"])
    for name in ("FLAGS_mp_async_allreduce_in_backward", "mp_optimization.allreduce_matmul_grad_overlapping"):
        assert [line for line in ours["log"] if f"{name}" in line and "overlap_column_backward='on'" in line]


def test_passes_are_known_to_paddle(built: Built) -> None:
    """Plain programs: names appear as soon as both packages are imported."""
    assert built("1F1B", "off")["registered"] == [
        "interlace_offload_activations",
        "interlace_overlap_column_backward",
        "interlace_schedule_1f1b",
        "interlace_split_backward",
    ]


@pytest.mark.parametrize("name", ["1F1B", "1F1B last stage", "replicas"])
def test_tokens_of_a_step_are_those_of_all_replicas_and_micro_batches(built: Built, name: str) -> None:
    """8 sequences of 16 ids, on whatever rank; a stage that looks up none knows none."""
    assert built(name, "plain")["tokens"] == (0 if name == "1F1B last stage" else 8 * 16)
