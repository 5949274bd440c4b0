"""One record of a target: what the simulator, the checker and the commands make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.cost_model import GivenCosts
from interlace.ir import parse
from interlace.ir.target import CPU, CUSTOM, GPU, IDEAL, TARGETS, Target
from interlace.planning.plan import Plan
from interlace.scheduler.simulate.arrays import Options, blocks_host
from interlace.scheduler.simulate.simulator import Result, simulate
from tests.scheduler.plans import Shape, world

BOTH = """program rank=0 world=1 mode=train
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.exp(%0) forward
#2 %2:float32[4] = pd_op.gelu(%0) forward stream="side"
#3 %3:float32[4] = pd_op.tanh(%1) forward
#4 %4:float32[4] = pd_op.relu(%3) forward
job one forward 0: 1-3@0
job two forward 0: 4@0"""
COST = GivenCosts({"exp": 100, "gelu": 1000, "tanh": 100, "relu": 10}, host_ns=1)


def times(target: Target) -> tuple[Result, dict[str, tuple[int, int]]]:
    result = simulate([parse(BOTH)], COST, Options.of(target, share=False), target=target)
    kinds = {op.id: op.kind for op in parse(BOTH).ops}
    at = result.times
    return result, {kinds[int(op)]: (int(at.issue[k]), int(at.start[k])) for k, op in enumerate(result.input.op)}


def test_the_simulators_options_are_those_of_the_target() -> None:
    assert Options.of(GPU) == Options()
    assert Options.of(IDEAL) == Options(blocking=frozenset())
    assert Options.of(CUSTOM) == Options(blocking=frozenset(), host_waits=False, job_end_waits=True)
    cpu = Options.of(CPU, peers_ready=True)
    assert (cpu.p2p, cpu.host_waits, cpu.peers_ready) == ("buffered", False, True)
    exp = parse(BOTH).ops[1]
    assert cpu.blocks(exp)
    assert not blocks_host(exp)


def test_a_serial_target_runs_one_operation_after_the_other() -> None:
    _, ideal = times(IDEAL)
    assert ideal["tanh"][1] < 1000
    _, cpu = times(CPU)
    assert [start for _, start in cpu.values()] == [1, 102, 1103, 1204]


def test_the_host_of_a_custom_device_waits_for_compute_at_the_end_of_a_job() -> None:
    """Not for the copy on a side stream, which is longer."""
    assert times(GPU)[1]["relu"][0] == 4
    _, custom = times(CUSTOM)
    assert custom["relu"] == (custom["tanh"][1] + 100 + 1,) * 2
    assert custom["relu"][0] < 1000


def test_a_captured_copy_blocks_the_host_where_the_target_says_so() -> None:
    """`memcpy_d2h` to pinned memory: on a GPU it blocks if Paddle built it; one of ours is lowered as another operation."""
    text = """program rank=0 world=1 mode=train
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4]^pinned = pd_op.memcpy_d2h(%0) forward stream="out" {}{{"dst_place_type":1}}
#2 %2:float32[4] = pd_op.exp(%0) forward
job one forward 0: 1-2@0"""
    costs = GivenCosts({"memcpy_d2h": 1000, "exp": 100}, host_ns=1)

    def issued(origin: str, target: Target) -> list[int]:
        issue: list[int] = simulate([parse(text.format(origin))], costs, Options.of(target), target=target).times.issue.tolist()
        return issue

    assert issued("origin=1 ", GPU) == [1, 1002]
    assert issued("", GPU) == issued("origin=1 ", CUSTOM) == [1, 2]


def test_every_engine_waits_at_the_end_of_a_job() -> None:
    plans = world(Shape(1, 2, 3, 2, norm=True))
    steps = [simulate(plans, COST_ALL, Options.of(CUSTOM), target=CUSTOM, engine=engine).step_ns for engine in ("plain", "fast")]  # type: ignore[arg-type]
    assert steps[0] == steps[1] > simulate(plans, COST_ALL, Options.of(GPU)).step_ns


COST_ALL = GivenCosts({"comm": 50, "default": 40}, host_ns=5)


def stored(folder: Path, profile: str) -> str:
    for program in world(Shape(2, 1, 3, 2, ("", "send", "receive", ""), norm=True)):
        Plan(program, program, profile=profile).dump(folder)
    return str(folder)


def figures(command: str, folder: str, into: Path, *words: str) -> dict[str, Any]:
    more = ["-o", str(into / "trace.json")] if command == "timeline" else []
    assert main([command, folder, *words, *more, "--json", str(into / "found.json")]) in (0, 1)
    found: dict[str, Any] = json.loads((into / "found.json").read_text())
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_check_and_timeline_simulate_the_same_step(target: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "plan", "h200")
    checked, shown = (figures(command, folder, tmp_path, "--target", target) for command in ("check", "timeline"))
    assert checked["target"] == shown["target"] == target
    names = ("rank", "step_ns", "exposed_comm_ns", "bubble_ns", "host_ns", "peak_bytes", "pinned_bytes")
    assert [[rank[name] for name in names] for rank in checked["ranks"]] == [[rank[name] for name in names] for rank in shown["ranks"]]
    assert checked["ranks"]


@pytest.mark.parametrize("command", ["check", "timeline"])
def test_a_plan_is_simulated_with_the_profile_it_was_made_with(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path / "plan", "cpu")
    found = figures(command, folder, tmp_path)
    assert (found["device"], found["target"]) == ("cpu", "cpu")
    assert "simulated with the profile cpu (the plan's own), rules of the cpu target" in capsys.readouterr().out
    found = figures(command, folder, tmp_path, "--device", "h200")
    assert (found["device"], found["target"]) == ("h200", "gpu")
    assert "simulated with the profile h200 (--device), rules of the gpu target" in capsys.readouterr().out
    figures(command, str(tmp_path / "plan" / "captured"), tmp_path)
    assert "simulated with the profile h200 (the default, as no plan names one)" in capsys.readouterr().out


def test_a_profile_that_is_gone_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", stored(tmp_path / "plan", "gone.json")]) == 2
    said = capsys.readouterr().err
    assert "gone.json" in said
    assert "(the plan was made with it; choose another with --device)" in said


def test_plans_of_two_profiles_need_the_users_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [stored(tmp_path / name, name) for name in ("cpu", "h200")]
    words = [str(Path(path) / f"rank{rank}.ilp") for rank, path in enumerate(paths)]
    assert main(["check", *words]) == 2
    said = capsys.readouterr().err
    assert f"{words[0]} with cpu, {words[1]} with h200; choose one with --device" in said
    assert main(["check", *words, "--device", "h200"]) == 0
