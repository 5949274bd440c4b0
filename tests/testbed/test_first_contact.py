"""What a machine does not bear is turned off before the first plan: on a device with a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_contact import run


@pytest.mark.paddle
@pytest.mark.long
def test_a_device_whose_streams_have_no_priorities_gets_none(plugin: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The process that examines it sees the device as the run does. (`tests/bridge/test_first_contact.py` has the same of a flag.)"""
    from testbed.gpus import python_path

    env = {"INTERLACE_TARGET": "testbed", "PYTHONPATH": python_path(), "TESTBED_SWITCHES": "priorities=0"}
    said, bits = run(tmp_path, capfd, **env)
    assert bits == run(tmp_path, capfd, **env, INTERLACE_DISABLE="1")[1]
    (rule,) = (line for line in said if "does not hold" in line)
    assert "'priorities of streams'" in rule
    (taken,) = (line for line in said if "what rests on them is" in line)
    assert taken.endswith("what rests on them is priority of communication; in force: name_streams: {priority: 0}")
