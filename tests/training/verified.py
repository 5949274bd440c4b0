"""Runs of the examples with a plan and without, and what their plans did."""

from __future__ import annotations

import functools
import importlib.resources
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import yaml

from interlace.cli import main
from tests.remarks import done_in, sentences
from tests.training.cases import EXAMPLES


@functools.cache
def slow_device() -> str:
    """A profile of a device on which a model this small takes longer than its host: an H200 with a fraction of its rates."""
    profile = msgspec.json.decode(Path(str(importlib.resources.files("interlace.configs") / "devices" / "h200.json")).read_bytes())
    for table in (profile["matrix_flops"], profile["vector_flops"]):
        for rate in table.values():
            rate["per_s"] *= 1e-6
    profile["memory_rate"]["per_s"] *= 1e-5
    path = Path(tempfile.mkdtemp()) / "slow.json"
    path.write_bytes(msgspec.json.encode({**profile, "device": "a slow H200", "ops": []}))
    return str(path)


def configured(options: dict[str, Any]) -> str:
    """A configuration as YAML that takes the schedule as it is asked for: models this small gain nothing on an H200."""
    kept = {"schedule_1f1b": {**options.get("schedule_1f1b", {}), "only_gains": False}}
    device = slow_device() if options.get("device") == "slow" else "h200"
    return yaml.safe_dump({**options, **kept, "device": device})


def verified(tmp_path: Path, world: int, model: str, arguments: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train an example with unmodified Paddle and with these options; the result file of a run whose bits are the same."""
    return same(tmp_path, world, EXAMPLES / f"{model}.py", arguments, configured(options))


def same(tmp_path: Path, world: int, script: Path, arguments: str, config_text: str) -> dict[str, Any]:
    """Train a script with unmodified Paddle and with a configuration; the result file of a run whose bits are the same."""
    config, result = tmp_path / "config.yaml", tmp_path / "result.json"
    config.write_text(config_text)
    files = ["--config", str(config), "--verify", "--json", str(result), "--log-dir", str(tmp_path / "logs")]
    assert main(["run", str(script), "--world", str(world), *files, "--", *arguments.split()]) == 0
    report: dict[str, Any] = msgspec.json.decode(result.read_bytes())
    assert report["verdict"] == "same"
    return report


def few_layers(words: str) -> str:
    """Arguments of a case with as few layers as it takes; more of them are more of the same."""
    chunks = math.prod(int(count) for count in re.findall(r"--v?pp (\d+)", words))
    return f"{words} --layers {max(2, chunks)}"


def passes_of(report: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each pass did, by rank."""
    return [rank["plan"]["passes"] for rank in report["runs"]["interlace"]["ranks"]]


def lines_of(passes: list[list[dict[str, Any]]], name: str) -> list[str]:
    """Lines of what a pass changed, over all ranks."""
    return [line for mine in passes for each in mine if each["name"] == name for line in sentences(done_in(each))]


def require_asked(passes: list[list[dict[str, Any]]], options: dict[str, Any]) -> None:
    """The plans of all ranks did what the case is about."""
    assert lines_of(passes, "split-backward")
    if isinstance(options.get("memory_budget"), float):
        assert any("computed again in backward: frees" in line for line in lines_of(passes, "choose-recompute"))
        assert any("on a GPU the plan holds" in line for line in lines_of(passes, "offload-activations"))
    elif "return_memory" in options:
        assert all(
            any("given back in the order of their own stream" in line for line in lines_of([mine], "return-memory")) for mine in passes
        )
    elif options.get("choose_recompute", {}).get("repeat_collectives"):
        again = [line for line in lines_of(passes, "choose-recompute") if "computed again in backward: frees" in line]
        assert any("all_gather" in line or "reduce_scatter" in line for line in again)
    elif "offload_optimizer_state" in options:
        assert all(
            any("of optimizer state in host memory" in line for line in lines_of([mine], "offload-optimizer-state")) for mine in passes
        )
    elif "offload_activations" in options:
        assert any("moves" in line for line in lines_of(passes, "offload-activations"))
