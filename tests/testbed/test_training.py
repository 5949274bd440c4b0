"""The examples on asynchronous streams: Paddle's plan and Interlace's give the same bits, also under random delays."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from interlace.launch import LaunchResult, launch

pytestmark = pytest.mark.paddle
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--layers", "2", "--steps", "2", "--micro-batches", "4")
DELAYS = "seed=3,permille=30,max_us=2000"
ALL = "device: h200\nschedule_1f1b: {{interleave: {form}, only_gains: off}}\noffload_activations: {{fraction: 1.0, min_bytes: 1KB}}\n"


def train(tmp_path: Path, script: str, world: int, args: tuple[str, ...], form: str = "", **variables: str) -> LaunchResult:
    env = {"INTERLACE_PLACE": "testbed", "GLOG_minloglevel": "2", **variables}
    if form:
        (tmp_path / "plan.yaml").write_text(ALL.format(form=form))
        env["INTERLACE_CONFIG"] = os.fspath(tmp_path / "plan.yaml")
    else:
        env["INTERLACE_DISABLE"] = "1"
    return launch(EXAMPLES / f"{script}.py", [*SMALL, *args], world, env, None, tmp_path / "logs", 60.0)


def bits(result: LaunchResult) -> list[list[str]]:
    return [[loss.raw_hex for loss in report.losses] for report in result.reports]


def numbers(result: LaunchResult) -> list[float]:
    raw = b"".join(bytes.fromhex(loss.raw_hex) for loss in result.reports[-1].losses)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def digests(result: LaunchResult) -> list[dict[str, str]]:
    return [report.parameters for report in result.reports]


@pytest.fixture(scope="module")
def stock_pp2(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> LaunchResult:
    return train(tmp_path_factory.mktemp("stock"), "gpt", 2, ("--pp", "2"))


def test_stock_equals_the_cpu(stock_pp2: LaunchResult, tmp_path: Path) -> None:
    cpu = train(tmp_path, "gpt", 2, ("--pp", "2"), INTERLACE_PLACE="cpu")
    assert numbers(stock_pp2) == pytest.approx(numbers(cpu), rel=1e-5)


@pytest.mark.parametrize("form", ["mixed", "dx-first"])
def test_pipeline_with_offload_under_delays(stock_pp2: LaunchResult, tmp_path: Path, form: str) -> None:
    planned = train(tmp_path, "gpt", 2, ("--pp", "2"), form, TESTBED_DELAYS=DELAYS)
    assert bits(planned) == bits(stock_pp2)
    assert digests(planned) == digests(stock_pp2)


def test_tensor_parallel_with_column_overlap_under_delays(plugin: Path, tmp_path: Path) -> None:
    args = ("--mp", "2", "--schedule", "1F1B")
    stock = train(tmp_path, "gpt", 2, args)
    planned = train(tmp_path, "gpt", 2, args, "dx-first", TESTBED_DELAYS=DELAYS)
    assert bits(planned) == bits(stock)
    assert digests(planned) == digests(stock)


def test_bfloat16_with_offload(plugin: Path, tmp_path: Path) -> None:
    args = ("--pp", "2", "--amp", "O2", "--master-grad")
    assert bits(train(tmp_path, "gpt", 2, args, "mixed")) == bits(train(tmp_path, "gpt", 2, args))


def test_without_waits_the_poison_is_read(stock_pp2: LaunchResult, tmp_path: Path) -> None:
    broken = train(tmp_path, "gpt", 2, ("--pp", "2"), "mixed", TESTBED_SWITCHES="drop_waits=1")
    assert bits(broken) != bits(stock_pp2)
