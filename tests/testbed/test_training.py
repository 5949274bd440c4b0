"""The examples on asynchronous streams: Paddle's plan and Interlace's give the same bits, also under random delays."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from interlace.errors import LaunchError
from interlace.local.launch import LaunchResult, launch
from interlace.planning.making import BASELINE_KEPT, FORM_TAKEN
from testbed import device
from tests.remarks import done_in
from tests.testbed.trained import DELAYS, SMALL, bits, digests, train
from tests.testbed.variant import need_ranks, switches
from tests.training import zoo_cases
from tests.training.cases import EXAMPLES, LONG_ON_THE_TESTBED, ON_THE_TESTBED
from tests.training.verified import configured, few_layers, lines_of, require_asked

pytestmark = pytest.mark.paddle


def numbers(result: LaunchResult) -> list[float]:
    raw = b"".join(bytes.fromhex(loss.raw_hex) for loss in result.reports[-1].losses)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


@pytest.fixture(scope="module")
def baseline_pp2(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> LaunchResult:
    return train(tmp_path_factory.mktemp("baseline"), "gpt", 2, ("--pp", "2"))


def test_baseline_equals_the_cpu(baseline_pp2: LaunchResult, tmp_path: Path) -> None:
    cpu = train(tmp_path, "gpt", 2, ("--pp", "2"), INTERLACE_TARGET="cpu")
    assert numbers(baseline_pp2) == pytest.approx(numbers(cpu), rel=1e-5)


@pytest.mark.parametrize("form", ["mixed", pytest.param("dx-first", marks=pytest.mark.long)])
def test_pipeline_with_offload_under_delays(baseline_pp2: LaunchResult, tmp_path: Path, form: str) -> None:
    planned = train(tmp_path, "gpt", 2, ("--pp", "2"), form, TESTBED_DELAYS=DELAYS)
    assert bits(planned) == bits(baseline_pp2)
    assert digests(planned) == digests(baseline_pp2)


def test_copies_back_leave_memory_in_use_alone(baseline_pp2: LaunchResult, tmp_path: Path) -> None:
    """Computation is late, so that a copy back that did not wait for it would write into memory that earlier operations still use."""
    late = "seed=5,permille=300,max_us=2000,kinds=compute"
    planned = train(tmp_path, "gpt", 2, ("--pp", "2"), "dx-first", TESTBED_DELAYS=late)
    assert bits(planned) == bits(baseline_pp2)
    assert digests(planned) == digests(baseline_pp2)


MP2 = ("--mp", "2", "--schedule", "1F1B")


@pytest.fixture(scope="module")
def baseline_mp2(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> LaunchResult:
    folder = tmp_path_factory.mktemp("baseline")
    baseline = train(folder, "gpt", 2, MP2, TESTBED_REPORT=os.fspath(folder))
    assert not any(_streams(folder).values())
    return baseline


@pytest.mark.parametrize("obeyed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_tensor_parallel_with_column_overlap_under_delays(baseline_mp2: LaunchResult, tmp_path: Path, obeyed: bool) -> None:
    """Equal results, plain lowering. Collectives have the priority that the plan gives them; copies have none."""
    report = {"TESTBED_REPORT": os.fspath(tmp_path), "TESTBED_SWITCHES": switches(f"priorities={obeyed:d}")}
    planned = train(tmp_path, "gpt", 2, MP2, "dx-first", TESTBED_DELAYS=DELAYS, **report)
    assert bits(planned) == bits(baseline_mp2)
    assert digests(planned) == digests(baseline_mp2)
    streams = _streams(tmp_path)
    collectives = {name: priority for name, priority in streams.items() if name.startswith("auto_parallel_mp")}
    assert set(collectives.values()) == {-obeyed}
    assert {name for name, priority in streams.items() if priority} == (set(collectives) if obeyed else set())
    assert len(streams) > len(collectives)


def _streams(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "memory0.json").read_text())["streams"]
    return found


def test_bfloat16_with_offload_of_the_smallest_and_a_held_host(plugin: Path, tmp_path: Path) -> None:
    """Equal results, measured peaks. The host waits for a stream of its own; blocks that side streams hold do not pile up meanwhile."""
    args = ("--pp", "2", "--amp", "O2", "--master-grad", "--micro-batches", "8")
    options = {"schedule_1f1b": {"interleave": "dx-first"}, "offload_activations": {"fraction": 1.0, "min_bytes": 64}}
    slow = {"TESTBED_DELAYS": "seed=1,permille=500,max_us=1000,kinds=compute", "TESTBED_REPORT": os.fspath(tmp_path)}
    baseline, held = bits(train(tmp_path, "gpt", 2, args)), {}
    for hold in ("on", "off"):
        waits = {"syncs": "job-ends"} if hold == "on" else "off"
        (tmp_path / "hold.yaml").write_text(configured({**options, "throttle_host": waits}))
        env = {"INTERLACE_TARGET": "testbed", "GLOG_minloglevel": "2", "INTERLACE_CONFIG": os.fspath(tmp_path / "hold.yaml"), **slow}
        assert bits(launch(EXAMPLES / "gpt.py", [*SMALL, *args], 2, env, None, tmp_path / "logs", 60.0)) == baseline
        held[hold] = json.loads((tmp_path / "memory0.json").read_text())["reserved_peak"]
    assert held["on"] < 0.85 * held["off"]


def test_without_waits_the_poison_is_read(baseline_pp2: LaunchResult, tmp_path: Path) -> None:
    trap = device.variant() == "threads"
    broken = train(tmp_path, "gpt", 2, ("--pp", "2"), "mixed", TESTBED_SWITCHES=switches("drop_waits=1" + ",trap=1" * trap))
    assert bits(broken) != bits(baseline_pp2)
    if not trap:
        assert any(math.isnan(loss) for loss in numbers(broken))
        return
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("rank*.log"))
    assert re.search(r"testbed: poison: op \d+ \w+ on stream \d+ .* their memory: made for stream \d+, op \d+ ", logs)


# -- the road's training cases ---------------------------------------------------------------------------------------

DELAYED = {
    "pp4 zero bubble": "seed=1,permille=300,max_us=60000,kinds=copy",
    "pp4 mixed, offload": "seed=3,permille=300,max_us=60000,kinds=copy",
}
"""Delays under which a case once read poison; the others are delayed a little everywhere."""


def of_the_road(tmp_path: Path, name: str, options: dict[str, Any] | None, **variables: str) -> LaunchResult:
    """One of the road's cases with as few layers as it takes."""
    world, model, words = ON_THE_TESTBED[name][:3]
    need_ranks(world)
    env = {"INTERLACE_TARGET": "testbed", "GLOG_minloglevel": "2", **variables}
    if options is None:
        env["INTERLACE_DISABLE"] = "1"
    else:
        (tmp_path / "case.yaml").write_text(configured(options))
        env["INTERLACE_CONFIG"] = os.fspath(tmp_path / "case.yaml")
    args = [*few_layers(words).split(), "--steps", "2"]
    return launch(EXAMPLES / f"{model}.py", args, world, env, None, tmp_path / "logs", 60.0)


def baseline_key(name: str) -> str:
    """Equal for cases that differ by what Interlace is asked for."""
    world, model, words = ON_THE_TESTBED[name][:3]
    return f"{world} {model} {few_layers(words)}"


@pytest.fixture(scope="module")
def stocks() -> dict[str, LaunchResult]:
    """Unmodified Paddle's runs by `baseline_key`; each is made by the first test that asks for it."""
    return {}


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Cases with the same run of unmodified Paddle stay together."""
    return [pytest.mark.xdist_group(baseline_key(name)), *[pytest.mark.long] * (name in LONG_ON_THE_TESTBED)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in ON_THE_TESTBED])
def test_a_case_of_the_road_under_delays(plugin: Path, tmp_path: Path, stocks: dict[str, LaunchResult], name: str) -> None:
    """Equal results, no races, first reader, many ranks."""
    options = ON_THE_TESTBED[name][3]
    baseline = stocks.get(baseline_key(name)) or of_the_road(tmp_path, name, None)
    stocks[baseline_key(name)] = baseline
    delays = DELAYED.get(name, f"seed={len(name)},permille=25,max_us=1500")
    planned = of_the_road(tmp_path, name, options, TESTBED_DELAYS=delays)
    assert bits(planned) == bits(baseline)
    assert digests(planned) == digests(baseline)
    passes = [rank.plan["passes"] for rank in planned.reports if rank.plan]
    require_asked(passes, options)
    if name.startswith("auto"):
        said = [each.rule for mine in passes for report in mine for each in done_in(report)]
        assert FORM_TAKEN in said
        assert BASELINE_KEPT not in said, "another form is faster here"
    if "pp2, experts" in name:  # Paddle gathers tokens on a mesh of dp and mp
        assert lines_of(passes, "narrow-gathers")
    if name == "auto, pp4":  # events inside jobs and between them hold transfers back
        assert any("posted when their peer is about to be ready" in line for line in lines_of(passes, "delay-transfers"))


ZOO = [name for name, (_, _, options) in zoo_cases.CASES.items() if "name_streams" not in options]
"""Without streams of ours the plan keeps Paddle's, and is refused: it sends gradients' norms that may be freed."""
LONG_IN_THE_ZOO = (
    "convolutions, 3 micro-batches, Momentum",
    "2 stages of 2 chunks, a table put on each stage before",
    "one stage, 3 micro-batches, Lamb",
)
"""Trained on CPU ranks by every `make test`, but for the last; the other cases have their offload, chunks and batch norm here."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG_IN_THE_ZOO)) for name in ZOO])
def test_models_unlike_a_transformer_under_delays(plugin: Path, tmp_path: Path, name: str) -> None:
    """Equal results, odd programs. Unmodified Paddle runs with every reader recorded: with the last one only it reads poison in one
    case."""
    world, words, options = zoo_cases.CASES[name]
    need_ranks(world)
    (tmp_path / "case.yaml").write_text(configured(options))
    baseline = {"INTERLACE_DISABLE": "1", "TESTBED_SWITCHES": switches("record=2")}
    ours = {"INTERLACE_CONFIG": os.fspath(tmp_path / "case.yaml"), "TESTBED_DELAYS": DELAYS}
    results = [
        launch(
            zoo_cases.SCRIPT,
            words.split(),
            world,
            {"INTERLACE_TARGET": "testbed", "GLOG_minloglevel": "2", **env},
            None,
            tmp_path / "logs",
            60.0,
        )
        for env in (baseline, ours)
    ]
    assert bits(results[0]) == bits(results[1])
    assert digests(results[0]) == digests(results[1])


# -- pinned memory and faults ----------------------------------------------------------------------------------------


def test_no_new_pinned_memory_after_the_first_step(plugin: Path, tmp_path: Path) -> None:
    """Pinned memory."""
    args = ("--pp", "2", "--steps", "4")
    train(tmp_path, "gpt", 2, args, "dx-first", TESTBED_MEASURE=os.fspath(tmp_path), TESTBED_STEPS="4")
    for rank in range(2):
        steps = [step["memory"] for step in json.loads((tmp_path / f"rank{rank}.json").read_text())["steps"]]
        assert len({step["pinned_buffers"] for step in steps}) == 1
        if rank == 0:  # the last stage has nothing worth moving
            assert steps[0]["pinned_buffers"] > 0


def test_refused_pinned_memory_ends_all_ranks(plugin: Path, tmp_path: Path) -> None:
    """Faults of ranks."""
    with pytest.raises(LaunchError, match="bytes of pinned host memory were refused"):
        train(tmp_path, "gpt", 2, ("--pp", "2"), "dx-first", TESTBED_SWITCHES=switches("refuse_pinned_after=0"))


def test_a_rank_that_dies_ends_the_others(plugin: Path, tmp_path: Path) -> None:
    """Faults of ranks: it is named, soon, and `launch` leaves no process."""
    need_ranks(2)
    script = tmp_path / "dies.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {os.fspath(EXAMPLES)!r})\nimport common, gpt\n"
        "for step, _ in enumerate(common.losses(*gpt.build(gpt.parse()))):\n"
        "    if os.environ['PADDLE_TRAINER_ID'] == '1':\n        os._exit(9)\n"
    )
    env = {"INTERLACE_TARGET": "testbed", "GLOG_minloglevel": "2", "INTERLACE_DISABLE": "1"}
    start_s = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1"):
        launch(script, [*SMALL, "--pp", "2", "--steps", "3"], 2, env, None, tmp_path / "logs", 60.0)
    assert time.monotonic() - start_s < 50.0
