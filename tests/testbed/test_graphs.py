"""Training steps that are captured once and launched again: the same bits, and what is refused with which reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from interlace.cost_model import load_profile, save_profile
from interlace.errors import LaunchError
from interlace.local.launch import LaunchResult, launch
from testbed import device
from tests.testbed.trained import DELAYS, bits, digests
from tests.testbed.variant import need_ranks, switches
from tests.training.cases import EXAMPLES

pytestmark = pytest.mark.paddle
STEPS = 6
"""The first runs eagerly; five are launches of one captured step."""
PLAN = """
device: h200
schedule_1f1b: {interleave: mixed, only_gains: off}
offload_activations: {fraction: 1.0, min_bytes: 1KB}
"""
SMALL = "--layers 2 --micro-batches 4"
CASES = {
    "pp 2, clip, rate of a schedule": ("gpt", 2, f"{SMALL} --pp 2 --clip-grad 1.0 --lr-scheduler cosine"),
    "one rank": ("gpt", 1, f"{SMALL} --schedule 1F1B"),
    "mp 2 in bfloat16, master gradients": ("gpt", 2, f"{SMALL} --mp 2 --schedule 1F1B --amp O2 --master-grad --clip-grad 1.0"),
    "pp 2 of 2 chunks": ("gpt", 2, "--layers 4 --micro-batches 4 --pp 2 --vpp 2"),
    "dp 2, sharding": ("llama", 2, "--layers 2 --gradient-accumulation 4 --dp 2 --sharding-stage 1"),
    "mp 2, pp 2": ("gpt", 4, f"{SMALL} --pp 2 --mp 2 --clip-grad 1.0"),
}
SHORT = "pp 2, clip, rate of a schedule"


def trained(tmp_path: Path, script: str, world: int, words: str, config: str = "", **variables: str) -> LaunchResult:
    need_ranks(world)
    env = {"INTERLACE_TARGET": "testbed", "GLOG_minloglevel": "2", **variables}
    if config:
        (tmp_path / "plan.yaml").write_text(config)
        env["INTERLACE_CONFIG"] = os.fspath(tmp_path / "plan.yaml")
    else:
        env["INTERLACE_DISABLE"] = "1"
    return launch(EXAMPLES / f"{script}.py", words.split(), world, env, None, tmp_path / "logs", 60.0)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != SHORT)) for name in CASES])
def test_launched_steps_give_the_bits_of_eager_ones(plugin: Path, tmp_path: Path, name: str) -> None:
    """Equal results, steps as graphs: Paddle's baseline, the plan as it is issued, and the plan launched, under delays."""
    script, world, words = CASES[name]
    words = f"{words} --steps {STEPS}"
    baseline = trained(tmp_path, script, world, words, TESTBED_SWITCHES=switches("record=2"))  # a clip over stages reads freed memory else
    launched = trained(tmp_path, script, world, words, f"{PLAN}capture: on\n", TESTBED_DELAYS=DELAYS)
    assert len(set(bits(baseline)[-1])) == STEPS
    assert bits(launched) == bits(baseline)
    assert digests(launched) == digests(baseline)
    assert [report.plan and report.plan["launches"] for report in launched.reports] == [STEPS - 1] * world
    if name != SHORT:
        eager = trained(tmp_path, script, world, words, PLAN, TESTBED_DELAYS=DELAYS)
        assert (bits(eager), digests(eager)) == (bits(launched), digests(launched))
        assert [report.plan and report.plan["launches"] for report in eager.reports] == [0] * world


OPEN = f"{SMALL} --pp 2 --steps 4"


@pytest.fixture(scope="module")
def baseline_open(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> LaunchResult:
    return trained(tmp_path_factory.mktemp("baseline"), "gpt", 2, OPEN)


@pytest.mark.parametrize(("host_ns", "launches"), [(50_000, 3), (0, 0)], ids=["host-bound", "device-bound"])
def test_steps_are_captured_where_a_launch_is_simulated_as_shorter(
    plugin: Path, baseline_open: LaunchResult, tmp_path: Path, capfd: pytest.CaptureFixture[str], host_ns: int, launches: int
) -> None:
    """`capture: auto` compares both plans; the bits are the baseline's either way."""
    profile = load_profile("h200")
    host = msgspec.structs.replace(profile.host, op_ns=host_ns, job_ns=host_ns, between_steps_ns=host_ns)
    save_profile(msgspec.structs.replace(profile, host=host), tmp_path / "device.json")
    config = f"device: {tmp_path / 'device.json'}\nschedule_1f1b: {{interleave: mixed, only_gains: off}}\ncapture: auto\n"
    found = trained(tmp_path, "gpt", 2, OPEN, config, TESTBED_DELAYS=DELAYS)
    assert (bits(found), digests(found)) == (bits(baseline_open), digests(baseline_open))
    assert [report.plan and report.plan["launches"] for report in found.reports] == [launches] * 2
    assert f"capture: auto: steps are {'captured' if launches else 'issued'}: a launched step is simulated" in capfd.readouterr().err


def test_where_nothing_can_be_captured_steps_are_issued(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On CPU processes."""
    found = trained(tmp_path, "gpt", 1, f"{SMALL} --schedule 1F1B --steps 2", "capture: auto\n", INTERLACE_TARGET="cpu")
    assert [report.plan and report.plan["launches"] for report in found.reports] == [0]
    assert "capture: auto: steps are issued one operation at a time, as a CPU runs each" in capfd.readouterr().err


def test_random_numbers_leave_steps_issued(plugin: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What `capture: on` refuses is no reason to end a run that leaves it open."""
    found = trained(tmp_path, "gpt", 1, f"{SMALL} --schedule 1F1B --dropout 0.1 --steps 2", "device: h200\ncapture: auto\n")
    assert [report.plan and report.plan["launches"] for report in found.reports] == [0]
    assert "capture: auto: steps are issued: draw-in-graph" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "fault", "reason"),
    [
        ("--pp 2", "graph_fault=1", r"capture: on: .*stream \d+ is not forked from the origin"),
        ("--pp 2", "graph_fault=2", r"capture: on: stream \d+ is not joined"),
        ("--pp 2 --dropout 0.1", "", r"draw-in-graph: .* draws random numbers: each launch would repeat the first"),
    ],
    ids=["not forked", "not joined", "random numbers"],
)
def test_what_cannot_be_captured_is_refused(plugin: Path, tmp_path: Path, words: str, fault: str, reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        trained(tmp_path, "gpt", 2, f"{SMALL} {words} --steps 3", f"{PLAN}capture: on\n", TESTBED_SWITCHES=switches(fault))


SCRIPT = """
import gc, sys
from testbed import device
device.load()
import paddle
paddle.set_device("testbed:0")
x = paddle.full([1000], 1.0)
paddle.add(x, x)

def captured(work, failed=False):
    device.begin_capture()
    try:
        work()
    except Exception:
        failed = True
    try:
        return device.end_capture(failed)
    except device.TestbedError as error:
        return str(error)

kept = []
def work():
    kept.append(paddle.add(x, x))
first = captured(work)
paddle.assign(paddle.full([1000], 4.0), x)
device.launch(first)
print("launched", float(kept[0].sum()))
print("waits", captured(lambda: paddle.add(x, x).numpy()))
print("still there", float(x.sum()))
y = paddle.full([1000], 1.0)
second = captured(lambda: kept.append(paddle.add(y, y)))
del y
gc.collect()
try:
    device.launch(second)
except device.TestbedError as error:
    print("freed", error)
device.destroy_graph(second)
device.launch(first)
print("first", float(kept[0].sum()))
device.destroy_graph(first)
"""


@pytest.mark.skipif(device.variant() != "threads", reason="one process, host threads")
def test_the_device_refuses_what_cuda_refuses(plugin: Path) -> None:
    """A wait of the host inside, and memory that was freed between launches."""
    env = {**os.environ, "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(EXAMPLES.parent)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert lines[0] == "launched 8000.0", done.stderr[-2000:]
    assert lines[1].startswith("waits the host waits inside it: ")
    assert lines[2] == "still there 4000.0"
    assert lines[3].startswith("freed memory that it uses was freed")
    assert lines[4] == "first 8000.0"


RESULT = """
import sys, time
from testbed import device
device.load()
import paddle
paddle.set_device("testbed:0")
x, big = paddle.full([1000], 1.0), paddle.full([int(sys.argv[1])], 1.0)
paddle.add(big, big)
kept = []
device.begin_capture()
kept.append(paddle._C_ops.memcpy_d2h(paddle.add(x, x), device.RESULT))
for _ in range(40):
    kept.append(paddle.add(big, big))
graph = device.end_capture()
for value in (1.0, 4.0, 5.0):
    paddle.assign(paddle.full([1000], value), x)
    device.synchronize()
    start = time.perf_counter()
    device.launch(graph)
    device.await_results(graph)
    known = time.perf_counter() - start
    print(float(kept[0].numpy().sum()))
    device.synchronize()
    print(known / (time.perf_counter() - start))
device.destroy_graph(graph)
"""


def test_a_result_is_known_before_its_step_is_done(plugin: Path) -> None:
    """Of each launch anew, and early in it: most of the step is behind the copy to the host."""
    env = {**os.environ, "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(EXAMPLES.parent)}
    size = 1 << (22 if device.variant() == "threads" else 26)
    done = subprocess.run([sys.executable, "-c", RESULT, str(size)], env=env, capture_output=True, text=True, timeout=120, check=False)
    values, shares = done.stdout.splitlines()[::2], done.stdout.splitlines()[1::2]
    assert values == ["2000.0", "8000.0", "10000.0"], done.stderr[-2000:]
    assert all(float(share) < 0.8 for share in shares), shares


OTHER = """
import sys
sys.path.insert(0, {examples!r})
import paddle
import common, gpt

def other():
    program = paddle.static.Program()
    with paddle.pir_utils.IrGuard(), paddle.static.program_guard(program, paddle.static.Program()):
        made = paddle.add(paddle.full([4], 1.0), paddle.full([4], 2.0))
        return paddle.static.Executor(paddle.CustomPlace("testbed", 0)).run(program, fetch_list=[made])

for step, _ in enumerate(common.losses(*gpt.build(gpt.parse()))):
    if step == 3:
        assert other()[0].tolist() == [3.0] * 4
"""


def test_another_program_ends_a_graph_and_the_step_is_captured_anew(
    plugin: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One step runs eagerly, three are launches; after the other program again one runs eagerly, and two are launches."""
    script = tmp_path / "other.py"
    script.write_text(OTHER.format(examples=os.fspath(EXAMPLES)))
    words = f"{SMALL} --schedule 1F1B --steps 7"
    (tmp_path / "plan.yaml").write_text(f"{PLAN}capture: on\n")
    found = []
    for variables in ({"INTERLACE_DISABLE": "1"}, {"INTERLACE_CONFIG": os.fspath(tmp_path / "plan.yaml"), "TESTBED_DELAYS": DELAYS}):
        env = {"INTERLACE_TARGET": "testbed", "GLOG_minloglevel": "2", **variables}
        found.append(launch(script, words.split(), 1, env, None, tmp_path / "logs", 60.0))
    assert (bits(found[1]), digests(found[1])) == (bits(found[0]), digests(found[0]))
    assert found[1].reports[0].plan is not None
    assert found[1].reports[0].plan["launches"] == 5
    assert "captured step: another program ran; the next step runs eagerly" in capfd.readouterr().err
