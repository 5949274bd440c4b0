"""`interlace doctor` on the CPU, and its checks of versions, internals and flags."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import msgspec
import numpy as np
import paddle
import pytest

from interlace.bridge.doctor import internals, times, versions
from interlace.bridge.doctor.behaviour import Behaviour
from interlace.bridge.doctor.examine import examine
from interlace.bridge.meeting import Meeting
from interlace.bridge.probe.lab import Lab
from interlace.bridge.targets.cpu import CpuDevice
from interlace.bridge.targets.custom import CustomDevice
from interlace.bridge.targets.gpu import GpuDevice
from interlace.cli import main
from interlace.cost_model import load_profile
from interlace.cpu.install import rank_environment
from interlace.outside import CONNECTIONS_VARIABLE
from interlace.report.checks import OFFLOAD, OVERLAP, Check, Examination, consequences, table
from tests.modules import package_modules

pytestmark = pytest.mark.paddle
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
ROOTS = ("interlace.bridge", "interlace.cpu", "interlace.local")
PUBLIC = {
    "paddle",
    "paddle.amp",
    "paddle.base",
    "paddle.device",
    "paddle.device.cuda",
    "paddle.distributed",
    "paddle.distributed.fleet",
    "paddle.nn",
    "paddle.static",
}
"""Folders of Paddle whose names without an underscore it documents."""
OF_A_BUILD = {
    "paddle.base.core.default_cuda_generator",
    "paddle.base.core.default_custom_device_generator",
    "paddle.cuda.mem_get_info",
}
"""What only builds for such devices have; used there only."""
OURS = {
    "paddle.distributed.auto_parallel.static.process_group._interlace_table",
    "paddle.optimizer.optimizer._interlace_startup",
}


def used_names() -> Iterator[str]:
    """Every name of Paddle that our modules import, or reach by dots from one that they import."""
    for name, path in package_modules().items():
        if not name.startswith(ROOTS) or name.startswith("interlace.bridge.doctor"):
            continue
        tree, known = ast.parse(path.read_text(encoding="utf-8")), {"paddle": "paddle"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "paddle":
                known.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        yield from known.values()
        for node in ast.walk(tree):
            words = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
            if words[0] in known and all(word.isidentifier() for word in words):
                yield ".".join([known[words[0]], *words[1:]])


def is_public(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return name not in sys.modules and owner in PUBLIC and (not last.startswith("_") or last.endswith("__"))


def test_every_internal_that_is_used_is_looked_for() -> None:
    """By itself, or as the owner of what is looked for."""
    known = {f"{each.owner}.{name.partition('/')[0]}" for each in internals.KNOWN for name in each.names.split()}
    owners = {owner for name in known for owner in _prefixes(name)}
    missing = {name for name in used_names() if not _prefixes(name, True) & known and name not in owners and not is_public(name)}
    left = {name for name in missing if not any(is_public(each) for each in _prefixes(name))}
    assert {name for name in left if name not in sys.modules} == OF_A_BUILD | OURS


def _prefixes(name: str, with_itself: bool = False) -> set[str]:
    words = name.split(".")
    return {".".join(words[:k]) for k in range(1, len(words) + with_itself)}


def test_internals_are_there() -> None:
    assert [each for each in internals.check_internals() if each.verdict != "holds"] == []


def test_an_internal_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (
        internals.Internals("copies", "paddle._C_ops", "memcpy memcpy_elsewhere", (OFFLOAD,)),
        internals.Internals("streams", "paddle.no_such_module", "anything", (OVERLAP,)),
        internals.Internals("hooks", "paddle.distributed.auto_parallel.static.engine.Engine", "_parallel_pir/3", (OVERLAP,)),
    )
    monkeypatch.setattr(internals, "KNOWN", gone)
    first, second, third = internals.check_internals()
    assert (first.verdict, first.found, first.rests) == ("fails", "no paddle._C_ops.memcpy_elsewhere", (OFFLOAD,))
    assert (second.verdict, second.found) == ("fails", "paddle.no_such_module: module 'paddle' has no attribute 'no_such_module'")
    assert third.found.endswith("Engine._parallel_pir takes (self, mode), expected 3 parameters")


def test_a_version_that_nobody_tested_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    device, profile = CpuDevice(paddle.CPUPlace()), load_profile("h200")
    assert versions.check_versions(device, profile)[0].verdict == "holds"
    monkeypatch.setattr(paddle, "__version__", "3.4.0")
    row = versions.check_versions(device, profile)[0]
    assert (row.verdict, row.expected) == ("not checked", "3.3.0 or 3.3.1")
    assert row.found.startswith("3.4.0, which nobody has tested")


def test_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, profile = GpuDevice(SimpleNamespace()), load_profile("h200")
    monkeypatch.setattr(versions, "DRIVER", tmp_path / "version")
    assert versions.check_versions(device, profile)[1].found == "Linux does not tell which it is"
    for version, verdict in (("580.159.04", "holds"), ("590.1", "not checked")):
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\nGCC\n")
        assert versions.check_versions(device, profile)[1].verdict == verdict


def test_flags() -> None:
    device = CpuDevice(paddle.CPUPlace())
    before = {row.rule: row.verdict for row in versions.check_flags(device)}
    paddle.set_flags({"FLAGS_benchmark": True})
    try:
        after = {row.rule: row for row in versions.check_flags(device)}
    finally:
        paddle.set_flags({"FLAGS_benchmark": False})
    assert "fails" not in before.values()
    assert after["benchmark"].verdict == "fails"
    assert after["benchmark"].found == "True: the host waits after each operation"
    assert [rule for rule, row in after.items() if row.verdict == "fails"] == ["benchmark"]


def test_flags_of_gpus() -> None:
    device = GpuDevice(SimpleNamespace())
    rows = {row.rule: row for row in versions.check_flags(device, {"CUDA_LAUNCH_BLOCKING": "1"})}
    assert rows["CUDA_LAUNCH_BLOCKING"].verdict == "fails"
    assert rows["allocator_strategy"].verdict == "holds"


@pytest.mark.parametrize(
    ("asked", "verdict", "found"),
    [
        ("", "holds", "8, as it is not set; 32 give shorter gaps between kernels"),
        ("32", "holds", "32"),
        ("1", "fails", "1: work of one stream waits for that of others"),
        ("33", "fails", "'33': no number from 1 to 32"),
        ("many", "fails", "'many': no number from 1 to 32"),
    ],
)
def test_connections_to_a_gpu(asked: str, verdict: str, found: str) -> None:
    rows = {row.rule: row for row in versions.check_flags(GpuDevice(SimpleNamespace()), {CONNECTIONS_VARIABLE: asked})}
    assert (rows[CONNECTIONS_VARIABLE].verdict, rows[CONNECTIONS_VARIABLE].found) == (verdict, found)


def test_connections_mean_nothing_without_a_gpu() -> None:
    rows = {row.rule: row for row in versions.check_flags(CpuDevice(paddle.CPUPlace()), {CONNECTIONS_VARIABLE: "1"})}
    assert rows[CONNECTIONS_VARIABLE].verdict == "not checked"


@pytest.mark.parametrize(
    ("each_ns", "rel_error", "verdict"),
    [
        ([100.0, 105.0, 110.0], 0.05, "holds"),
        ([40.0, 71.0, 300.0], 0.05, "holds"),
        ([40.0, 129.0, 300.0], 0.05, "holds"),
        ([129.0, 250.0, 300.0], 0.05, "not checked"),
        ([40.0, 50.0, 100.0], 0.05, "not checked"),
        ([40.0, 45.0, 300.0], 0.05, "not checked"),
        ([160.0, 165.0, 170.0], 0.05, "fails"),
        ([40.0, 45.0, 50.0], 0.05, "fails"),
        ([160.0, 165.0, 170.0], 0.4, "holds"),
        ([160.0, 165.0, 170.0], 0.6, "not checked"),
    ],
)
def test_times(each_ns: list[float], rel_error: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert times._held("gemm", 100.0, each_ns, rel_error).verdict == verdict


def test_times_that_are_lost_in_the_length_of_steps_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert times._held("gemm", 100.0, [-20.0, 100.0], 0.05).verdict == "not checked"


def test_times_beside_others_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 1e6, 1e6))
    assert times._held("gemm", 100.0, [160.0, 300.0], 0.05).verdict == "not checked"
    assert times._held("gemm", 100.0, [160.0, 165.0], 0.05).verdict == "fails"


def test_what_fails_names_what_to_do_without() -> None:
    rows = (
        Check("copy out", "the host goes on", "it waits", "fails", (OFFLOAD,)),
        Check("named streams", "side by side", "one after another", "fails", (OVERLAP, OFFLOAD)),
        Check("collectives", "run beside computation", "one rank", "not checked", (OVERLAP,)),
    )
    found = Examination("a GPU", "gpu", {}, rows)
    assert consequences(found) == [
        "offload rests on: copy out; named streams. Without it: `offload_activations: off, offload_optimizer_state: off`",
        "overlap on named streams rests on: named streams. Without it: `name_streams: off`",
    ]
    assert "3 rules: 0 hold, 2 fail, 1 not checked" in table(found)


def test_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that needs streams is checked there, and each says why."""
    monkeypatch.setattr(times, "KINDS", ("add",))
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 1e6, 1e6))
    main(["doctor", "--target", "cpu", "--device", "h200", "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    found = {each["rule"]: each for each in json.loads((tmp_path / "found.json").read_text())["checks"]}
    assert found["copies out and back"]["verdict"] == "holds"
    for rule in ("named streams", "order across jobs", "copy out", "pinned memory", "waits of the host"):
        assert (found[rule]["verdict"], found[rule]["found"]) == ("not checked", "operations run one after another here: no streams")
    assert found["collectives"]["verdict"] == "not checked"
    assert all(each["found"] for each in found.values())
    assert "rules of the cpu target" in printed


def test_what_the_plan_of_a_script_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that streams do not bear turns off what rests on it by name; and the device is too small."""
    (tmp_path / "mine.yaml").write_text(
        "schedule_1f1b: {interleave: mixed, only_gains: off}\noffload_activations: {fraction: 0.5, min_bytes: 1KB}\n"
    )
    monkeypatch.setattr(CpuDevice, "available_bytes", lambda _: 1000)
    files = ["--config", str(tmp_path / "mine.yaml"), "--json", str(tmp_path / "found")]
    machine = ["--target", "cpu", "--device", "h200", "--no-times"]
    script = ["doctor", str(GPT), "--world", "1", *machine, *files, "--", "--layers", "1", "--gradient-accumulation", "2"]
    paddle.set_flags({"FLAGS_check_nan_inf": True})
    try:
        assert main(script) == 1
    finally:
        paddle.set_flags({"FLAGS_check_nan_inf": False})
    printed = capsys.readouterr().out
    found = msgspec.json.decode((tmp_path / "found").read_bytes(), type=Examination)
    needs = {each.rule: each for each in found.needs}
    assert (needs["offload"].verdict, needs["device memory"].verdict) == ("fails", "fails"), printed
    assert "check_nan_inf" in needs["offload"].found
    assert needs["every plan"].verdict == "not checked"
    assert needs["device memory"].found.endswith("more than 500 B, the default `pool_budget`")
    (turned,) = (line for line in printed.splitlines() if line.startswith(f"what a run of {GPT} turns off: "))
    assert "offload_activations: off" in turned
    assert "name_streams: off" in turned


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "2"], "--world: needs SCRIPT, which is missing"),
        (["--", "--layers", "2"], "arguments after --: needs SCRIPT, which is missing"),
        (["train.py", "--world", "2"], "train.py: no such script; expected the path of a training script"),
        ([str(GPT)], f"{GPT}: the number of ranks is missing; add --world N"),
        ([str(GPT), "--world", "-1"], "--world -1: expected at least one rank"),
        ([str(GPT), "--world", "2", "--config", "nothing"], "nothing"),
    ],
)
def test_questions_about_scripts_that_cannot_be_answered(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


def test_targets_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", "gpu"]) == 2
    assert "--target gpu: this Paddle sees no such device; it sees cpu" in capsys.readouterr().err
    assert main(["doctor", "--target", "cpu", "--device", "nothing"]) == 2
    assert "no device profile 'nothing'" in capsys.readouterr().err


def test_a_paddle_without_an_internal_ends_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot even be imported is a row beside the internal that is missing, and no traceback."""
    monkeypatch.delattr("paddle.base.executor._ExecutorCache")
    for name in [name for name in sys.modules if name in ("interlace.bridge.guard", "interlace.bridge.doctor.behaviour")]:
        monkeypatch.delitem(sys.modules, name)
    found = examine()
    assert {each.rule for each in found.failed} == {"several plans in a run", "small programs"}


class Store:
    """Paddle's, for ranks in threads."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def add(self, key: str, more: int) -> int:
        with self.lock:
            self.counts[key] += more
            return self.counts[key]


def together(why_not: list[str | None]) -> list[str]:
    """What ranks hear that come to their meeting, or say why they do not; None says nothing."""
    store = Store()
    ranks = [Meeting(rank, len(why_not), lambda: store, wait_s=1.0) for rank in range(len(why_not))]
    with ThreadPoolExecutor() as pool:
        coming = [pool.submit(rank.come, why) for rank, why in zip(ranks, why_not, strict=True) if why is not None]
        return [each.result(timeout=30.0) for each in coming]


def test_ranks_meet_before_what_needs_all_of_them() -> None:
    assert together(["", "", ""]) == ["", "", ""]
    assert together(["", "no such profile", ""]) == ["rank 1 failed before: no such profile", "", "rank 1 failed before: no such profile"]
    assert together(["no device", "", ""])[1:] == ["rank 0 failed before: no device"] * 2
    assert together(["", "", None]) == ["rank 2 said nothing for 1 s"] * 2


def test_ranks_whose_first_one_is_not_there_do_not_wait_for_it() -> None:
    assert Meeting(1, 2, lambda: time.sleep(60.0), wait_s=0.2).come().endswith("is not there: nothing for 0.2 s")
    assert Meeting(1, 2, lambda: 1 // 0).come().endswith("is not there: integer division or modulo by zero")


def test_a_rank_that_fails_says_so_and_the_others_leave_collectives_out(tmp_path: Path) -> None:
    """With Paddle's own store, as where Paddle's launcher starts the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = []
    for rank, profile in enumerate(("h200", "nothing")):
        env = {**os.environ, **rank_environment(rank, 2), "PADDLE_MASTER": master}
        words = ["doctor", "--target", "cpu", "--no-times", "--device", profile, "--json", str(tmp_path / "found.json")]
        ranks.append(subprocess.Popen([sys.executable, "-m", "interlace", *words], env=env, text=True, stdout=PIPE, stderr=PIPE))
    (first, _), (_, second) = (rank.communicate(timeout=200.0) for rank in ranks)
    assert "no device profile 'nothing'" in second
    found = {each["rule"]: each for each in json.loads((tmp_path / "found.json").read_text())["checks"]}
    assert found["collectives"]["verdict"] == "not checked"
    assert found["collectives"]["found"].startswith("rank 1 failed before: no device profile 'nothing'"), first
    assert [rank.returncode for rank in ranks] == [0, 2]


def test_a_device_on_which_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Behaviour(CustomDevice(paddle.CPUPlace()))
    monkeypatch.setattr(Lab, "prepare", lambda lab: 1 // 0)
    first, *others = rows.checks()
    assert (first.rule, first.verdict, first.found) == ("small programs", "fails", "ZeroDivisionError: integer division or modulo by zero")
    assert {(each.verdict, each.found) for each in others} == {("not checked", "no small program could be run")}


@pytest.mark.parametrize(
    ("hidden", "wrong_with", "verdict"), [(0, False, "holds"), (29, False, "holds"), (30, False, "not checked"), (30, True, "fails")]
)
def test_a_missing_wait_may_be_hidden_in_many_steps(hidden: int, wrong_with: bool, verdict: str) -> None:
    """On a busy machine: `hidden` steps without events are right all the same. A wrong one with events fails at once."""

    class Step:
        fill, runs = 2.0, 0

        def __init__(self, events: bool) -> None:
            self.right = 0 if events and wrong_with else 99 if events else hidden

        def run(self) -> SimpleNamespace:
            self.runs += 1
            return SimpleNamespace(outputs={"out": np.full((2, 2), self.fill if self.runs <= self.right else 0.0)})

    checked = Behaviour(CustomDevice(paddle.CPUPlace()), side_by_side=True)
    checked.lab = SimpleNamespace(step=lambda jobs, events: Step(events))  # type: ignore[assignment]
    assert checked.across()[0] == verdict
