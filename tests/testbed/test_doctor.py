"""`interlace doctor` on the testbed: each rule holds as it is, and fails with the switch that plays the other behaviour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.examined import LATE, SWITCHES

pytestmark = pytest.mark.paddle
ONE, PAGEABLE = "one_stream=1", "pageable=1"
"""Switches with a process of their own: for the first, as streams are made once, and for the command."""
FAILS = {
    "drop_waits=1": {"order inside a job", "order across jobs", "copies out and back"},
    "priorities=0": {"priorities of streams"},
    "nosync=0": {"the host at the end of a job"},
    "sync_waits=0": {"waits of the host"},
    "d2h_blocks=1": {"copy out"},
    PAGEABLE: {"copy out", "pinned memory"},
    "pinned_kept=0": {"pinned buffers that are kept"},
    "record=0": {"a block whose last reader is on another stream"},
    "hold=0": {"a block whose last reader is on another stream"},
    "record=2": {"a block whose last reader is on its own stream"},
    "free_at_end=1": {"a block freed while the device is behind"},
}
RESTS = {
    "named streams": ["overlap on named streams", "offload"],
    "copy out": ["offload"],
    "waits of the host": ["waits of the host", "predicted memory"],
}


def _environment() -> dict[str, str]:
    from testbed.gpus import python_path

    return {**os.environ, "PYTHONPATH": python_path(), "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1"}


def _examined(*names: str, switches: str = "") -> dict[str, Any]:
    env = _environment()
    if switches:
        env["TESTBED_SWITCHES"] = switches
    script = Path(__file__).with_name("examined.py")
    done = subprocess.run([sys.executable, os.fspath(script), *names], env=env, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULTS "))
    return found


@pytest.fixture(scope="module")
def examined(plugin: Path) -> dict[str, Any]:
    return _examined(*(name for name in SWITCHES if name != ONE))


def test_all_rules_hold_as_it_is(examined: dict[str, Any]) -> None:
    left = {rule: (verdict, found) for rule, (verdict, found, _) in examined["as it is"].items() if verdict != "holds"}
    assert left == {"collectives": ("not checked", "there is one rank: nothing to communicate with")}
    assert {rule: examined["as it is"][rule][2] for rule in RESTS} == RESTS


@pytest.mark.parametrize("switch", [each for each in FAILS if each != PAGEABLE])
def test_the_other_behaviour_fails_its_rules(examined: dict[str, Any], switch: str) -> None:
    found = examined[switch]
    assert {rule for rule, (verdict, _, _) in found.items() if verdict == "fails"} == FAILS[switch], found


def test_every_rule_has_a_switch_that_fails_it(examined: dict[str, Any]) -> None:
    assert set().union(*FAILS.values()) | {"named streams", "collectives"} == set(examined["as it is"])


def test_one_stream_for_all(plugin: Path) -> None:
    """Then nothing can be early, and no order can be checked: that is said, and is no pass."""
    found = _examined(ONE, switches=ONE)[ONE]
    assert found.pop("named streams")[0] == "fails"
    assert {(verdict, text) for verdict, text, _ in found.values()} == {
        ("not checked", "streams do not run side by side here, so that nothing is early")
    }


@pytest.mark.parametrize(("switches", "verdict"), [("", "holds"), (ONE, "fails")])
def test_collectives_beside_computation(plugin: Path, tmp_path: Path, switches: str, verdict: str) -> None:
    from tests.testbed.variant import need_ranks

    need_ranks(2)
    env = {**_environment(), **({"TESTBED_SWITCHES": switches} if switches else {})}
    script = os.fspath(Path(__file__).with_name("examined.py"))
    words = [[sys.executable, script, str(rank), "2", os.fspath(tmp_path)] for rank in range(2)]
    ranks = [subprocess.Popen(each, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for each in words]
    try:
        said = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = [json.loads(line.removeprefix("RESULTS ")) for out, _ in said for line in out.splitlines() if line.startswith("RESULTS ")]
    assert [each[0] for each in found] == [verdict] * 2, (found, said[0][1][-2000:])


def test_times_that_are_off_fail(plugin: Path) -> None:
    """Looked at again where other work on the machine hides how long they take."""
    for _ in range(4):
        found = _examined(LATE)[LATE]
        if not any("other work decides their length" in text for _, text, _ in found.values()):
            break
    assert found.pop("device of the profile sure")[0] == "not checked"
    verdicts = {rule.partition(" ")[0]: verdict for rule, (verdict, _, _) in found.items()}
    assert verdicts == {"add": "fails", "softmax": "fails", "copy": "not checked"}, found


def test_the_command(plugin: Path, tmp_path: Path) -> None:
    """A rule that fails names what rests on it and the line that does without; the exit code is 1."""
    env = {**_environment(), "TESTBED_SWITCHES": PAGEABLE}
    words = [sys.executable, "-m", "interlace", "doctor", "--target", "testbed", "--json", os.fspath(tmp_path / "found.json")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("offload rests on: "))
    assert "copy out; pinned memory" in line
    assert line.endswith("Without it: `offload_activations: off, offload_optimizer_state: off`")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["target"] == "testbed"
    assert FAILS[PAGEABLE] <= {each["rule"] for each in found["checks"] if each["verdict"] == "fails"}
