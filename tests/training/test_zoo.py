"""Models unlike a transformer train with unmodified Paddle's bits: losses, parameters, buffers and optimizer state of every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from interlace.cli import main
from tests.training.verified import passes_of, require_asked, same
from tests.training.zoo_cases import CASES, OFFLOAD, PLAIN, RECOMPUTED, SCRIPT

pytestmark = pytest.mark.paddle


LONG = (
    "batch norm, a branch, dropout, stages of 1 and 2 layers, 5 micro-batches",
    "frozen batch norm, a skipped stage, 3 stages, 7 micro-batches of a row",
    "3 stages of 2 chunks, a table handed on",
    "one stage, 3 micro-batches, Lamb",
)
"""Trained on the testbed by every `make test`, but for the last, of which `tests/captured` proves plans: Paddle's Lamb takes seconds to
start."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES])
def test_same_bits_as_baseline(name: str, tmp_path: Path) -> None:
    """Plain lowering (its second half), P3, F2, M2."""
    train(*CASES[name], tmp_path)


def test_pooling_that_draws_is_not_computed_again(tmp_path: Path) -> None:
    """Though all else is that can be: other numbers would be drawn."""
    train(1, "conv,fractional --micro-batches 3 --optimizer Momentum", RECOMPUTED, tmp_path)


@pytest.mark.parametrize(
    ("script", "world", "arguments"),
    [("parallelized.py", 4, ""), ("encoder_decoder.py", 2, "--pp 2 --layers 2 --micro-batches 4 --clip-grad 1")],
)
def test_models_that_are_placed_otherwise(script: str, world: int, arguments: str, tmp_path: Path) -> None:
    """By `dist.parallelize`, in a script that does not know Interlace; and a decoder that reads the other stage's result in each block."""
    forced = {"memory_budget": "+1GB", "schedule_1f1b": {"interleave": "mixed", "only_gains": False}, **OFFLOAD}
    train(world, arguments, forced, tmp_path, SCRIPT.with_name(script))


def train(world: int, arguments: str, options: dict[str, Any], tmp_path: Path, script: Path = SCRIPT) -> None:
    """Train as baseline does and with a plan, and compare every bit."""
    report = same(tmp_path, world, script, arguments, yaml.safe_dump({"device": "h200", **options}))
    buffered = {"norm", "frozen", "conv", "placed"} & set(arguments.partition(" ")[0].split(","))
    ranks = report["runs"]["interlace"]["ranks"]
    assert options is PLAIN or not all(rank["plan"]["is_paddles_order"] for rank in ranks)
    assert any(rank["state"]["buffer"] for rank in ranks) == bool(buffered)
    assert all(rank["plan"] and rank["parameters"] and rank["state"]["gradient buffer"] for rank in ranks)
    assert all(rank["state"]["optimizer state"] for rank in ranks)
    if "offload_optimizer_state" in options:
        require_asked(passes_of(report), options)


def test_a_table_for_all_stages_under_vpp_is_refused_with_what_is_safe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Paddle's baseline order is at fault: training with the baseline ends there too, at the message in which the ranks differ."""
    words, config = ["table", "--pp", "3", "--vpp", "2", "--schedule", "VPP", "--micro-batches", "6"], tmp_path / "plain.yaml"
    config.write_text(yaml.safe_dump({"device": "h200", **PLAIN}))
    asked = ["run", str(SCRIPT), "--world", "3", "--config", str(config), "--log-dir", str(tmp_path / "logs")]
    assert main([*asked, "--", *words]) == 1
    told = capfd.readouterr().err
    assert "p2p-mismatch: group " in told
    assert "of ranks [0, 2], 0 to 2: message 4 differs: rank 0 #" in told
    assert "the value handed on as a result of each stage's own layers" in told
