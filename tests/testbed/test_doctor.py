"""`interlace doctor` on the testbed: each rule holds as it is, and fails with the switch that plays the other behaviour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interlace.local.launch import launch
from tests.testbed.examined import LATE, OWN, SWITCHES

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
    OWN: {"a block that was taken for a copy back"},
}
BY_CHANCE = {"priorities=0", "drop_waits=1"}
RESTS = {
    "named streams": ["overlap on named streams", "offload"],
    "copy out": ["offload"],
    "waits of the host": ["waits of the host", "predicted memory"],
}


def _examined(folder: Path, *names: str, world: int = 1, switches: str = "") -> list[dict[str, Any]]:
    """What each rank found."""
    env = {"INTERLACE_TARGET": "testbed", "INTERLACE_DISABLE": "1", "GLOG_minloglevel": "2", "TESTBED_SWITCHES": switches}
    launch(Path(__file__).with_name("examined.py"), names, world, env, None, folder, 200.0)
    logs = [(folder / f"rank{rank}.log").read_text() for rank in range(world)]
    return [json.loads(line.removeprefix("RESULTS ")) for log in logs for line in log.splitlines() if line.startswith("RESULTS ")]


@pytest.fixture(scope="module")
def examined(plugin: Path, forked_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _examined(tmp_path_factory.mktemp("examined"), LATE, OWN, *(name for name in SWITCHES if name != ONE))[0]


def test_all_rules_hold_as_it_is(examined: dict[str, Any]) -> None:
    left = {rule: (verdict, found) for rule, (verdict, found, _) in examined["as it is"].items() if verdict != "holds"}
    assert left == {"collectives": ("not checked", "there is one rank: nothing to communicate with")}
    assert {rule: examined["as it is"][rule][2] for rule in RESTS} == RESTS


@pytest.mark.parametrize("switch", [each for each in FAILS if each != PAGEABLE])
def test_the_other_behaviour_fails_its_rules(examined: dict[str, Any], tmp_path: Path, switch: str) -> None:
    """Looked at again where chance hides a behaviour, as it may on a busy machine: a stream without priority that won, or a reader that the
    host issued so late that nothing was missing."""
    found = examined[switch]
    for _ in range(3 * (switch in BY_CHANCE)):
        if all(found[rule][0] == "fails" for rule in FAILS[switch]):
            break
        found = _examined(tmp_path, switch)[0][switch]
    assert {rule for rule, (verdict, _, _) in found.items() if verdict == "fails"} == FAILS[switch], found


def test_every_rule_has_a_switch_that_fails_it(examined: dict[str, Any]) -> None:
    assert set().union(*FAILS.values()) | {"named streams", "collectives"} == set(examined["as it is"])


def test_one_stream_for_all(plugin: Path, tmp_path: Path) -> None:
    """Then nothing can be early, and no order can be checked: that is said, and is no pass."""
    found = _examined(tmp_path, ONE, switches=ONE)[0][ONE]
    assert found.pop("named streams")[0] == "fails"
    assert {(verdict, text) for verdict, text, _ in found.values()} == {
        ("not checked", "streams do not run side by side here, so that nothing is early")
    }


@pytest.mark.parametrize(("switches", "verdict"), [("", "holds"), (ONE, "fails")])
def test_collectives_beside_computation(plugin: Path, tmp_path: Path, switches: str, verdict: str) -> None:
    from tests.testbed.variant import need_ranks

    need_ranks(2)
    found = _examined(tmp_path, world=2, switches=switches)
    assert [each["collectives"][0] for each in found] == [verdict] * 2, found


def test_times_that_are_off_fail(examined: dict[str, Any], tmp_path: Path) -> None:
    """Looked at again where other work on the machine hides how long they take."""
    found = examined[LATE]
    for _ in range(3):
        if all(verdict == "fails" for rule, (verdict, _, _) in found.items() if rule.startswith(("add", "softmax"))):
            break
        found = _examined(tmp_path, LATE)[0][LATE]
    assert found.pop("device of the profile sure")[0] == "not checked"
    verdicts = {rule.partition(" ")[0]: verdict for rule, (verdict, _, _) in found.items()}
    assert verdicts == {"add": "fails", "softmax": "fails", "copy": "not checked"}, found


def test_the_command(plugin: Path, tmp_path: Path) -> None:
    """A rule that fails names what rests on it and the line that does without; the exit code is 1."""
    from testbed.gpus import python_path

    env = {**os.environ, "PYTHONPATH": python_path(), "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1", "TESTBED_SWITCHES": PAGEABLE}
    words = [sys.executable, "-m", "interlace", "doctor", "--target", "testbed", "--no-times", "--json", os.fspath(tmp_path / "found.json")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("offload rests on: "))
    assert "copy out; pinned memory" in line
    assert line.endswith("Without it: `offload_activations: off, offload_optimizer_state: off`")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["target"] == "testbed"
    assert FAILS[PAGEABLE] <= {each["rule"] for each in found["checks"] if each["verdict"] == "fails"}
