"""What a machine does not bear is turned off before the first plan, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from interlace.passes.schedule_1f1b import Schedule1F1B
from interlace.report.checks import EVERYTHING, MEMORY, OFFLOAD, OVERLAP, PRIORITIES, RETURN, THROTTLE, TIMES, Feature
from tests.first_contact import run


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("options", "features", "expected"),
    [
        ({}, [OVERLAP, OFFLOAD], {"name_streams": "off", "offload_activations": "off", "offload_optimizer_state": "off"}),
        ({"offload_activations": {"fraction": 0.5}}, [OFFLOAD], {"offload_activations": "off", "offload_optimizer_state": "off"}),
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

    assert without({"schedule_1f1b": Schedule1F1B()}, [OFFLOAD]) == {
        "schedule_1f1b": Schedule1F1B(),
        "offload_activations": "off",
        "offload_optimizer_state": "off",
    }


@pytest.mark.paddle
def test_a_flag_that_streams_do_not_bear_turns_off_what_rests_on_it(
    forked: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The losses are those of Paddle alone, and what the device does is found out once."""
    said, bits = run(tmp_path, capfd, FLAGS_check_nan_inf="1")
    (kept,) = (tmp_path / "cache").glob("examined-*.json")
    assert bits == run(tmp_path, capfd, INTERLACE_DISABLE="1")[1]
    kept.write_text('[{"rule": "copy out", "expected": "e", "found": "kept", "verdict": "fails", "rests": []}]')
    again, _ = run(tmp_path, capfd, FLAGS_check_nan_inf="1")
    for each in (said, again):
        (rule,) = (line for line in each if "'check_nan_inf' does not hold" in line)
        assert "expected False, found True" in rule
        (taken,) = (line for line in each if "what rests on them is" in line)
        assert "offload_activations: off" in taken
        assert "name_streams: off" in taken
    assert not any("'copy out'" in line for line in said)
    assert any("'copy out' does not hold: expected e, found kept" in line for line in again)
