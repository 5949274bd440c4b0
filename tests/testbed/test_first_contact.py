"""What a machine does not bear is turned off before the first plan, and the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from interlace.local.launch import launch
from interlace.passes.schedule_1f1b import Schedule1F1B
from interlace.report.checks import EVERYTHING, MEMORY, OFFLOAD, OVERLAP, PRIORITIES, RETURN, THROTTLE, TIMES, Feature

SCRIPT = Path(__file__).parents[2] / "examples" / "gpt.py"
WORDS = ["--pp", "2", "--micro-batches", "4", "--layers", "2", "--steps", "2"]
CONFIG = "schedule_1f1b: {interleave: mixed}\noffload_activations: {fraction: 0.5, min_bytes: 1KB}\nexamine: on\n"


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("options", "features", "expected"),
    [
        ({}, [OVERLAP, OFFLOAD], {"name_streams": "off", "offload_activations": "off"}),
        ({"offload_activations": {"fraction": 0.5}}, [OFFLOAD], {"offload_activations": "off"}),
        ({}, [PRIORITIES], {"name_streams": {"priority": 0}}),
        ({"name_streams": {"priority": 3}}, [PRIORITIES], {"name_streams": {"priority": 0}}),
        ({"name_streams": "off"}, [PRIORITIES], {"name_streams": "off"}),
        ({}, [THROTTLE, RETURN], {"throttle_host": "off", "return_memory": "off"}),
        ({}, [TIMES], {"tune": "on"}),
        ({"tune": "off"}, [TIMES], {"tune": "off"}),
        ({"memory_budget": "70GB"}, [MEMORY], {"memory_budget": "70GB"}),
        ({}, [EVERYTHING], {"enable": False}),
        ({"plan": "plans"}, [PRIORITIES, TIMES], {"plan": "plans"}),
        ({"plan": "plans"}, [OVERLAP], {"enable": False}),
    ],
)
def test_options_do_without_what_rests_on_rules_that_do_not_hold(
    options: dict[str, object], features: list[Feature], expected: dict[str, object]
) -> None:
    from interlace.bridge.first_contact import without

    given = json.loads(json.dumps(options))
    assert without(options, features) == expected
    assert options == given


@pytest.mark.paddle
def test_options_of_a_record_are_kept() -> None:
    from interlace.bridge.first_contact import without

    assert without({"schedule_1f1b": Schedule1F1B()}, [OFFLOAD]) == {"schedule_1f1b": Schedule1F1B(), "offload_activations": "off"}


def _run(folder: Path, capfd: pytest.CaptureFixture[str], config: str, **env: str) -> tuple[list[str], list[str]]:
    """What a run of two stages said of Interlace, and the bits of its losses."""
    path = folder / "examined.yaml"
    path.write_text(config)
    variables = {"INTERLACE_CACHE": os.fspath(folder / "cache"), "INTERLACE_CONFIG": os.fspath(path), "GLOG_minloglevel": "2", **env}
    capfd.readouterr()
    result = launch(SCRIPT, WORDS, 2, variables, None, folder / "logs", 60.0)
    return capfd.readouterr().err.splitlines(), [loss.raw_hex for report in result.reports for loss in report.losses]


@pytest.mark.paddle
def test_a_flag_that_streams_do_not_bear_turns_off_what_rests_on_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The losses are those of Paddle alone, and what the device does is found out once."""
    said, bits = _run(tmp_path, capfd, CONFIG, FLAGS_check_nan_inf="1")
    (kept,) = (tmp_path / "cache").glob("examined-*.json")
    assert bits == _run(tmp_path, capfd, CONFIG, INTERLACE_DISABLE="1")[1]
    kept.write_text('[{"rule": "copy out", "expected": "e", "found": "kept", "verdict": "fails", "rests": []}]')
    again, _ = _run(tmp_path, capfd, CONFIG, FLAGS_check_nan_inf="1")
    for each in (said, again):
        (rule,) = (line for line in each if "'check_nan_inf' does not hold" in line)
        assert "expected False, found True" in rule
        (taken,) = (line for line in each if "what rests on them is" in line)
        assert "offload_activations: off" in taken
        assert "name_streams: off" in taken
    assert not any("'copy out'" in line for line in said)
    assert any("'copy out' does not hold: expected e, found kept" in line for line in again)


@pytest.mark.paddle
def test_a_device_whose_streams_have_no_priorities_gets_none(plugin: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The process that examines it sees the device as the run does."""
    from testbed.gpus import python_path

    env = {"INTERLACE_TARGET": "testbed.target", "PYTHONPATH": python_path(), "TESTBED_SWITCHES": "priorities=0"}
    said, bits = _run(tmp_path, capfd, CONFIG, **env)
    assert bits == _run(tmp_path, capfd, CONFIG, **env, INTERLACE_DISABLE="1")[1]
    (rule,) = (line for line in said if "does not hold" in line)
    assert "'priorities of streams'" in rule
    (taken,) = (line for line in said if "what rests on them is" in line)
    assert taken.endswith("what rests on them is priority of communication; in force: name_streams: {priority: 0}")
