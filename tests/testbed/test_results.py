"""Collecting what GPUs measured: rows, merging, tables, traces, the stretch beside receives. No Paddle, no device."""

from __future__ import annotations

import gzip
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import beside_energy, beside_transfers, by_kind, connections, nvml, predict, results, training, waits_at_once
from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.base import GivenCosts
from interlace.ir import parse
from testbed.device import Call, Interval, Issue, Trace
from testbed.trace import Planned, RankTrace, between_steps, host_around, read_rank, since, write_rank

MEMORY = {"allocated_peak": 90, "workspace_peak": 0, "outside_peak": 10, "allocated": 1}


def found(step_ms: float, bits: str = "aa") -> dict[str, Any]:
    """A run as `benchmarks.gpu.training` leaves it."""
    return {
        "gpus": [0],
        "step_ms": {"median": step_ms, "min": step_ms - 1, "max": step_ms + 1, "all": [step_ms] * 3},
        "memory": [MEMORY],
        "pinned_buffers_by_step": [[2, 2]],
        "losses": [3.0, 2.0],
        "loss_bits": [bits],
        "parameters": "p",
        "traced_step": [{"device_us": 5.0, "kernels_us": {"gemm": {"n": 1}}}],
    }


def store(out: Path, plans: dict[str, Any]) -> None:
    machine = {"gpus": "H200", "paddle": "3", "interlace": "0", "python": "3"}
    case = {"case": "gpt-mp2", "world": 2, "args": ["--mp", "2"], **machine, "plans": plans}
    (out / "testbed_gpt-mp2.json").write_text(json.dumps(case))
    (out / "testbed_host.json").write_text("{}")  # not a case


def simulated(step_ms: float) -> dict[str, Any]:
    return {"step_ms": step_ms, "in_order_peak_bytes_by_rank": [101]}


def test_rows_say_whether_bits_are_stocks(tmp_path: Path) -> None:
    store(tmp_path, {"stock": found(10.0), "mixed": found(8.0), "broken": found(8.0, "bb"), "gone": {"failed": "x" * 400}})
    rows = {row["plan"]: row for row in results.rows(results.cases_of(tmp_path), "today", {"gpt-mp2 mixed": simulated(9.0)})}
    assert [rows[plan].get("losses_equal_stock") for plan in ("stock", "mixed", "broken", "gone")] == [True, True, False, None]
    assert rows["mixed"]["simulated"]["step_ms"] == 9.0
    assert rows["mixed"]["bits"] == rows["stock"]["bits"] != rows["broken"]["bits"]  # to be compared with runs of other sittings
    assert rows["mixed"]["peak_bytes_by_rank"] == [{"allocated": 90, "workspace": 0, "outside": 10}]
    assert len(rows["gone"]["failed"]) == 260


def test_new_rows_take_the_place_of_their_sittings_old_ones(tmp_path: Path) -> None:
    path, folder = tmp_path / "layers.json", tmp_path / "run"
    folder.mkdir()
    runs: list[tuple[str, dict[str, Any]]] = [
        ("first", {"stock": found(10.0), "mixed": found(9.0)}),
        ("first", {"mixed": found(8.0)}),
        ("second", {"mixed": found(7.0)}),
    ]
    for sitting, plans in runs:
        store(folder, plans)
        assert results.main([str(folder), "--into", str(path), "--sitting", sitting]) == 0
    kept = json.loads(path.read_text())
    found_there = [(row["plan"], row["sitting"], row["step_ms"]["median"]) for row in kept["runs"]]
    assert found_there == [("stock", "first", 10.0), ("mixed", "first", 8.0), ("mixed", "second", 7.0)]
    assert [machine["paddle"] for machine in kept["sittings"].values()] == ["3", "3"]
    store(folder, {"stock": {"failed": "broken"}, "mixed": {"failed": "not started: no time was left"}, "dx-first": {"failed": "broken"}})
    assert results.main([str(folder), "--into", str(path), "--sitting", "first"]) == 0
    assert [(row["plan"], "failed" in row) for row in json.loads(path.read_text())["runs"]] == [
        ("stock", False),
        ("mixed", False),
        ("mixed", False),
        ("dx-first", True),
    ]
    with pytest.raises(SystemExit):
        results.main([str(folder), "--into", str(path)])  # which sitting?
    for words in (
        [],
        [str(folder)],
        [str(folder), "--into", str(path), "--sitting", "x", "--simulated"],
        ["--traces", str(path)],
        ["--tables", "nofile"],
        [str(folder), "--traces", str(path), "--of", "a"],
    ):
        with pytest.raises(SystemExit):
            results.main(words)


def test_tables_compare_within_a_sitting(tmp_path: Path) -> None:
    measured = (("stock", "a", 10.0, 11.0), ("mixed", "a", 8.0, 8.0), ("dx-first", "b", 9.0, 1.0))
    rows = [
        {
            "case": "c",
            "plan": plan,
            "sitting": sitting,
            "step_ms": {"median": ms, "min": ms, "max": ms},
            "peak_bytes_by_rank": [{"allocated": 90, "outside": 10, "workspace": 0}],
            "simulated": simulated(guess),
        }
        for plan, sitting, ms, guess in measured
    ]
    table = results.step_table(rows)
    assert "| c [1] | 10.0 (10-10) |  | 8.0 (8-8) +25.0 % |" in table
    assert "| c [2] |  | 9.0 (9-9) |  |" in table  # of another sitting: no gain is said
    assert table.endswith("[1] a\n\n[2] b")
    accuracy = results.accuracy_table(rows)
    assert "| mp, stock | 1 | 10.00, +10.00 % | 1: 1.00, +1.00 % |" in accuracy
    assert accuracy.endswith("1 of 1 pairs of plans of a case, measured more than 1% apart, in the right order")


def test_budgets_stand_beside_stock_with_the_fullest_ranks_peaks() -> None:
    planned = {"stock": (11.0, 4e9, 0), "budget-0.75": (12.0, 3e9, 3.2e9), "budget-0.9": (11.5, 3.5e9, 3.8e9)}
    rows = [
        {
            "case": "c",
            "plan": plan,
            "sitting": "a",
            "step_ms": {"median": ms - 1},
            "losses_equal_stock": True,
            "parameters_equal_stock": True,
            "peak_bytes_by_rank": [{"allocated": 1e9, "outside": 0}, {"allocated": peak - 1e7, "outside": 5e6}],
            "simulated": {
                "step_ms": ms,
                "held_peak_bytes_by_rank": [peak + 1e8, 1],
                "in_order_peak_bytes_by_rank": [1, peak],
                **({"budget_bytes": budget} if budget else {}),
            },
        }
        for plan, (ms, peak, budget) in planned.items()
    ]
    rows.append({**rows[0], "case": "without budgets"})
    assert results.budget_table(rows).splitlines()[2:] == [
        "| c | stock |  |  | 4.00 | 4.00 | 11.0 | 10.0 | yes |",
        "| c | budget-0.9 | 3.80 | 3.60 | 3.50 | 3.50 | 11.5 | 10.5 | yes |",
        "| c | budget-0.75 | 3.20 | 3.10 | 3.00 | 3.00 | 12.0 | 11.0 | yes |",
    ]


def test_every_case_with_budgets_is_run_with_them() -> None:
    cases = {case.name: case for case in training.cases(2)}
    for name, shares in training.BUDGETS.items():
        plans = {plan.name: plan for plan in cases[name].plans}
        assert {"stock", "auto"} < set(plans)
        for share in shares:
            assert f"memory_budget: {share}\n" in str(plans[f"budget-{share:g}"].config)
    assert cases["gpt-4-layers-s2048-mp1-b4"].args.count("--layers") == 2  # the last one counts
    assert cases["gpt-4-layers-s2048-mp1-b4"].args[-2:] == ("--layers", "4")


def test_cases_and_plans_are_chosen_by_pattern_in_the_order_given() -> None:
    chosen = training._chosen(training.cases(2), "llama-4-*-b4:stock+budget-*,gpt-s2048-mp1-pp2:zb-h1,gpt-s2048-mp1-pp2:stock")
    assert [(case.name, [plan.name for plan in case.plans]) for case in chosen] == [
        ("llama-4-layers-s2048-mp1-b4", ["stock", "budget-0.7", "budget-0.6", "budget-0.5"]),
        ("gpt-s2048-mp1-pp2", ["zb-h1"]),
        ("gpt-s2048-mp1-pp2", ["stock"]),
    ]


@pytest.mark.parametrize(
    ("only", "told"),
    [
        ("gpt-s2O48-mp1-pp2", r"no case 'gpt-s2O48-mp1-pp2'; there are \['"),
        ("gpt-s2048-mp1-pp2:stock+budgets-*", r"no plan 'budgets-\*' in \['gpt-s2048-mp1-pp2'\]; there are \['stock', "),
    ],
)
def test_a_case_or_plan_that_is_not_there_is_told(only: str, told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        training._chosen(training.cases(2), only)


def test_a_case_without_any_of_the_plans_is_left_out() -> None:
    cases = [case for case in training.cases(2) if case.name.startswith("gpt-")]
    with_budgets = {case.name for case in cases if any(plan.name.startswith("budget-") for plan in case.plans)}
    assert set() < with_budgets < {case.name for case in cases}
    assert {case.name for case in training._chosen(training.cases(2), "gpt-*:budget-*")} == with_budgets


@pytest.mark.slow
def test_plans_are_made_with_the_device_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every plan's configuration, once; Paddle's baseline has none."""
    written: list[str] = []

    def run(words: list[str], **given: object) -> subprocess.CompletedProcess[str]:
        if "--config" in words:
            written.append(Path(words[words.index("--config") + 1]).read_text())
        return subprocess.CompletedProcess(words, 1, "", "not run")

    monkeypatch.setattr(training.subprocess, "run", run)
    ours = 0
    for case in training.cases(4):
        bench = training.Bench(tmp_path, "threads", "h100", 1, 1, 0.0)
        bench.gate = tmp_path
        for plan in case.plans:
            bench._run_plan(case, plan, [0])
            ours += plan.config is not None
    assert len(written) == ours > 100
    assert all(text.startswith("device: h100\n") and text.count("device:") == 1 for text in written)
    assert all(text.splitlines()[-1].startswith(f"dump: {tmp_path}") for text in written)


@pytest.mark.paddle
def test_a_run_with_other_bits_than_stocks_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = training.Bench(tmp_path, "threads", "h200", 1, 1, 0.0)
    case = training.Case("c", "gpt", 1, (), ())
    for plan, bits, parameters in (
        ("early", "aa", "p"),
        ("stock", "aa", "p"),
        ("same", "aa", "p"),
        ("losses", "bb", "p"),
        ("weights", "aa", "q"),
    ):
        ran = {**found(8.0, bits), "parameters": parameters, "memory": [{**MEMORY, "reserved_peak": 9}], "wall_s": 1.0}
        bench._keep(case, training.Plan(plan, None), ran)
    bench._keep(case, training.Plan("gone", None), {"failed": "broken"})
    said = [line.rpartition("1.0 s")[2] for line in capsys.readouterr().out.splitlines()]
    assert said[:5] == ["", "", ", the baseline's bits", ", OTHER BITS THAN STOCK'S", ", OTHER BITS THAN STOCK'S"]
    assert said[5] == "c gone: FAILED: broken"


def test_a_plan_with_a_switch_stands_beside_itself_and_is_not_simulated(tmp_path: Path) -> None:
    store(tmp_path, {"stock": found(10.0), "mixed": found(8.0), "mixed-no-priorities": found(9.0, "bb"), "dx-first-no-slab": found(9.0)})
    for plan in ("mixed", "mixed-no-priorities"):
        (tmp_path / "plans" / "gpt-mp2" / plan).mkdir(parents=True)
        (tmp_path / "plans" / "gpt-mp2" / plan / "rank0.ilp").touch()
    assert [path.name for path in results.plan_folders(tmp_path)] == ["mixed"]
    rows = list(results.rows(results.cases_of(tmp_path), "today", {}))
    lines = results.switch_table(rows).splitlines()
    assert lines[2:] == ["| gpt-mp2 | mixed | 8.0 (7-9) | no-priorities | 9.0 (8-10) | +12.5 % | yes, no |"]  # dx-first did not run without


PROGRAM = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
group 1 = 0,1
#0 %0:bfloat16[64,64] = pd_op.recv_v2() forward group=1 {"peer":1}
#1 %1:bfloat16[64,64] = pd_op.matmul(%0, %0) forward
#2 %2:bfloat16[64,64] = pd_op.add(%1, %1) forward
"""


def ranked() -> RankTrace:
    """Six micro-batches of a product of 100 us and an addition of 50. Beside a receive that waits two products take half longer, beside
    two receives that move data for 50 us one takes 110, and one addition that lies beside for 30 us takes 60."""
    planned, issues, intervals = [], [], []

    def ran(name: str, stream: int, begin: float, took: float, op: int, batch: int) -> None:
        number = len(issues) + 1
        planned.append(Planned(0, name, "pp_recv" if stream else "", "forward", batch, f"micro-batch {batch}, op #{op} pd_op.{name}"))
        issues.append(Issue(begin, name, stream, number))
        intervals.append(Interval(begin, begin + took, "broadcast" if stream else "gemm" if op == 1 else "add", stream, number))

    for batch in range(6):
        begin = 1000.0 * batch
        ran("matmul", 0, begin, {2: 150.0, 3: 150.0, 4: 110.0}.get(batch, 100.0), 1, batch)
        ran("add", 0, begin + 200.0, 60.0 if batch == 5 else 50.0, 2, batch)
        if batch == 2:
            ran("recv_v2", 1, 1900.0, 2000.0, 0, batch)
        elif batch > 3:
            ran("recv_v2", 1, begin + (20.0 if batch == 4 else 230.0), 50.0, 0, batch)
    return RankTrace(0, Trace([Call(0.0, "allocate", 0, "0x1", 8)], intervals, issues), ["job"], planned, 0, 0)


def test_stretch_beside_a_receive_that_waits_and_beside_one_that_moves_data() -> None:
    """50 us of the product of 110 us lie beside data for which it would need 40; 30 of the addition's 60 for 20."""
    found = beside_transfers.summary([(parse(PROGRAM), ranked())], GivenCosts({"default": 50_000}))
    assert {kernel: row["stretch"] for kernel, row in found["wait"].items()} == {"add": 1.0, "gemm": 1.5, "gemm of 4096": 1.5}
    assert {kernel: row["stretch"] for kernel, row in found["p2p"].items()} == {"add": 1.5, "gemm": 1.25}


def test_stretch_beside_one_transfer_that_waits_and_beside_two(tmp_path: Path) -> None:
    """A product of 100 us takes 150 beside one receive, and 160 and 180 beside two; what runs beside a shorter transfer is left out."""
    planned, issues, intervals = [], [], []

    def ran(name: str, stream: int, begin: float, took: float, batch: int) -> None:
        number = len(issues) + 1
        planned.append(Planned(batch, name, "pp_recv" if stream else "", "forward", batch))
        issues.append(Issue(begin, name, stream, number))
        intervals.append(Interval(begin, begin + took, "broadcast" if stream else "gemm", stream, number))

    for batch, (took, waits) in enumerate(((120.0, 0), (100.0, 0), (150.0, 1), (160.0, 2), (180.0, 2))):
        begin = 1000.0 * batch
        ran("matmul", 0, begin, took, batch)
        for stream in range(1, waits + 1):
            ran("recv_v2", stream, begin - 100.0, 500.0, batch)
    ran("recv_v2", 1, 0.0, 90.0, 0)
    kept = RankTrace(0, Trace([], intervals, issues), ["forward"] * 5, planned, 0, 0)
    rows = [{"waiting": 1, "apart_us": 100.0, "stretch": 1.5, "n": 1}, {"waiting": 2, "apart_us": 100.0, "stretch": 1.7, "n": 2}]
    assert waits_at_once.stretched(kept) == rows
    (tmp_path / "traces").mkdir()
    with pytest.raises(SystemExit):
        waits_at_once.main([str(tmp_path), "-o", str(tmp_path / "waits.json")])


def test_a_step_begins_where_the_last_rank_returned_from_the_one_before() -> None:
    """The first step and the first that is traced begin with the device idle."""
    ends = [(1.0, 2.0), (2.5, 4.0), (4.2, 6.5), (9.0, 9.5), (10.0, 10.5)]
    ranks = [[{"begin_s": k + 0.1 * rank, "end_s": each[rank], "traced": k > 2} for k, each in enumerate(ends)] for rank in range(2)]
    assert training._spans(ranks) == [(0.0, 2.0), (2.0, 4.0), (4.0, 6.5), (3.0, 9.5), (9.5, 10.5)]


def test_computation_stands_still_from_one_steps_last_kernel_to_the_nexts_first() -> None:
    """Two operations a step, which the host issues ahead of the device; a copy on another stream goes on meanwhile."""
    issues = [Issue(1000.0 * step + k, "matmul", 0, 2 * step + k) for step in range(3) for k in range(2)]
    work = [(100, 500, 0), (500, 950, 1), (1200, 1600, 2), (1600, 2100, 3), (2100, 2500, 4), (2500, 2900, 5)]
    intervals = [*(Interval(float(begin), float(end), "gemm", 0, op) for begin, end, op in work), Interval(900.0, 1500.0, "copy_d2h", 1, 1)]
    found = Trace([Call(2001.0, "free", 0, "0x1", 4)], intervals, issues)
    assert between_steps(found, [1000.0, 2000.0]) == [250.0, 0.0]
    last = since(found, 2000.0)
    assert ([each.op for each in last.intervals], [each.number for each in last.issues], len(last.calls)) == ([4, 5], [4, 5], 1)
    launched = Trace([], intervals, [])
    assert between_steps(launched, [1000.0]) == []
    assert [each.op for each in since(launched, 2100.0).intervals] == [4, 5]


def test_time_of_the_host_before_and_behind_what_it_issues() -> None:
    issues = [Issue(at_us, "matmul", 0, number) for number, at_us in enumerate((150.0, 300.0, 1200.5, 1900.0))]
    steps_us = [(100.0, 420.0), (1000.0, 2000.0), (2500.0, 2600.0)]
    assert host_around(Trace([], [], issues), steps_us) == [(50.0, 120.0), (200.5, 100.0)]


def test_times_by_kind_are_measured_predicted_and_as_the_fastest_of_each_size(tmp_path: Path) -> None:
    """Six products of 100 to 150 us, six additions of 50 to 60, 50 predicted for each; receives are on another stream."""
    found = by_kind.by_kind(parse(PROGRAM), ranked(), GivenCosts({"default": 50_000}))
    assert found == {"gemm bfloat16": by_kind.Took(6, 710.0, 600.0, 300.0), "add bfloat16": by_kind.Took(6, 310.0, 300.0, 300.0)}
    assert list(found) == ["gemm bfloat16", "add bfloat16"]
    stray = ranked()
    stray.trace.intervals.append(Interval(0.0, 7.0, "cast", 0, 999))
    assert by_kind.by_kind(parse(PROGRAM), stray, GivenCosts({"default": 50_000}))["other"] == by_kind.Took(0, 7.0, 0.0, 0.0)
    with pytest.raises(SystemExit):
        by_kind.main([str(tmp_path), "--device", "h100", "-o", str(tmp_path / "kinds.json")])  # no traces there


def test_times_by_kind_at_the_clock_of_the_run() -> None:
    """Products follow the clock, additions hardly do; without a power limit nothing does."""
    costs = CostModel(load_profile("h200"))
    own, slow = (by_kind.by_kind(parse(PROGRAM), ranked(), costs, mhz) for mhz in (1980.0, 1485.0))
    assert own["add bfloat16"].at_clock_us == pytest.approx(own["add bfloat16"].predicted_us, rel=1e-3)
    unlimited = by_kind.by_kind(parse(PROGRAM), ranked(), GivenCosts({"default": 50_000}), 1485.0)
    assert unlimited["gemm bfloat16"].at_clock_us == unlimited["gemm bfloat16"].predicted_us
    longer = {kind: slow[kind].at_clock_us / own[kind].at_clock_us for kind in own}
    assert 1.15 < longer["gemm bfloat16"] < 1.34
    assert 1.0 <= longer["add bfloat16"] < 1.1


def test_runs_with_another_number_of_connections_stand_beside_the_others(tmp_path: Path) -> None:
    """One row for each run that left a trace; a second sitting leaves the rows of the first."""
    file = tmp_path / "connections.json"
    with pytest.raises(SystemExit):
        connections.main([str(tmp_path), "--sitting", "first, 1 H200", "-o", str(file)])
    store(tmp_path, {"stock": found(9.0), "auto": found(7.0), "auto-8-connections": found(8.0), "mixed": {"failed": "no"}})
    (tmp_path / "traces").mkdir()
    for plan in ("stock", "auto", "auto-8-connections", "mixed"):
        write_rank(tmp_path / "traces" / f"gpt-mp2_{plan}_trace0.msgpack", ranked())
    for sitting in ("first, 1 H200", "second, 1 H200", "second, 1 H200"):
        assert connections.main([str(tmp_path), "--sitting", sitting, "-o", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    shown = [(row["sitting"][:1], row["plan"], row["connections"], row["step_ms"][0]) for row in rows]
    assert shown == [(each, *run) for each in "fs" for run in (("stock", 8, 9.0), ("auto", 32, 7.0), ("auto", 8, 8.0))]


def test_traces_are_written_one_a_run(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    for run in ("a_stock", "a_mixed"):
        write_rank(tmp_path / "traces" / f"{run}_trace0.msgpack", ranked())
    written = results.write_traces(tmp_path, tmp_path / "into", "*_mixed", simulated=True)
    assert [path.name for path in written] == ["a_mixed.json.gz"]
    assert json.loads(gzip.decompress(written[0].read_bytes()))["traceEvents"]


def test_a_trace_is_data_and_nothing_else(tmp_path: Path) -> None:
    """What is stored comes back; a file of anything else is refused, and not run."""
    write_rank(tmp_path / "trace0.msgpack", ranked())
    assert read_rank(tmp_path / "trace0.msgpack") == ranked()
    for data in (b"cos\nsystem\n(S'exit 1'\ntR.", b"", b"\x93\x01"):
        (tmp_path / "trace0.msgpack").write_bytes(data)
        with pytest.raises(ValueError, match=r"trace0\.msgpack: .*; expected the trace of a rank"):
            read_rank(tmp_path / "trace0.msgpack")


class FakeNvml:
    """A GPU that draws 500 W at 1,700 MHz, and whose counter of energy moves every 10 ms."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVMLError = 1, 0, RuntimeError

    def nvmlInit(self) -> None:
        self.begin = time.perf_counter()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        return int((time.perf_counter() - self.begin) * 100) * 5000

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> list[Any]:
        return [SimpleNamespace(value=SimpleNamespace(uiVal=500_000)) for _ in fields]

    def nvmlDeviceGetClockInfo(self, gpu: int, clock: int) -> int:
        return 1700

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return 60

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> int:
        return nvml.POWER_CAPPED


def test_the_sampler_reads_power_while_steps_run() -> None:
    sampler = nvml.Sampler("GPU-0", FakeNvml())
    begin = time.perf_counter()
    time.sleep(0.3)
    sampler.stop()
    end = time.perf_counter()
    told = nvml.of_steps(sampler, [(begin, begin + 0.1), (begin + 0.1, end)])
    assert told["watts"] == pytest.approx(500, rel=0.1)
    assert told["joules_a_step"] == pytest.approx(told["watts"] * (end - begin) / 2, rel=0.01)
    assert (told["mhz"], told["mhz_min"], told["celsius"], told["capped"], told["steps"]) == (1700, 1700, 60, 1.0, 2)


def readings(changes: list[tuple[float, int]], clocks: list[tuple[float, int]]) -> nvml.Sampler:
    """A sampler that has read this: millijoules, and MHz at 400 W, by time."""
    sampler = nvml.Sampler("GPU-0", FakeNvml())
    sampler.stop()
    sampler.energy, sampler.rows = changes, [(at, 400.0, mhz, 50, 0) for at, mhz in clocks]
    return sampler


def test_energy_of_steps_is_what_was_drawn_in_them_alone() -> None:
    drawn = readings([(k / 10, 60_000 * k if k < 10 else 600_000 + 6_000 * (k - 10)) for k in range(20)], [(0.2, 1980), (0.6, 1500)])
    told = nvml.of_steps(drawn, [(0.0, 0.45), (0.5, 0.95)])
    assert (told["watts"], told["joules_a_step"], told["mhz"], told["mhz_min"]) == (600.0, 285.0, 1740.0, 1500)
    few = nvml.of_steps(readings([(0.1, 5)], [(0.2, 1800)]), [(0.0, 0.5)])
    assert (few["watts"], few["energy_s"], few["joules_a_step"]) == (400.0, 0.0, 200.0)  # from the readings
    assert "no reading" in nvml.of_steps(readings([], []), [(0.0, 0.5)])["failed"]


def stored_run(folder: Path, seconds: Sequence[float], reserved: Sequence[int]) -> None:
    """Files of two ranks whose steps take so long; after each the second rank's pools hold so much, the first one's always the same."""
    ends = [sum(seconds[: k + 1]) for k in range(len(seconds))]
    for rank in range(2):
        steps = [
            {
                "begin_s": end - took,
                "end_s": end,
                "traced": end == ends[-1],
                "memory": {"pinned_buffers": 0, "pinned": 0, "reserved": held if rank else 1},
            }
            for took, end, held in zip(seconds, ends, reserved, strict=True)
        ]
        (folder / f"rank{rank}.json").write_text(json.dumps({"steps": steps, "trace": {}}))
    ranks = [{"losses": [{"raw_hex": "aa", "values": [1.0]}], "parameters": {}}] * 2
    (folder / "run.json").write_text(json.dumps({"runs": {"run": {"ranks": ranks}}}))


def test_power_of_a_run_is_of_the_steps_that_count(tmp_path: Path) -> None:
    """Two steps to warm up, one that is traced: neither counts for the step, and neither for power."""
    stored_run(tmp_path, [1.0] * 5, [7] * 5)
    energy = [(float(k), [0, 900_000, 1_800_000, 1_900_000, 2_000_000, 2_900_000][k]) for k in range(6)]
    samplers = [readings(energy, [(k + 0.5, mhz) for k, mhz in enumerate((100, 100, 1700, 1800, 100))]) for _ in range(2)]
    power = training._found(tmp_path, samplers)["power"]
    assert [(each["watts"], each["mhz"], each["mhz_min"], each["steps"]) for each in power] == [(100.0, 1750.0, 1700, 2)] * 2
    assert "power" not in training._found(tmp_path)


def test_no_step_counts_until_pools_of_memory_have_settled(tmp_path: Path) -> None:
    """Steps of 1, 2, ... s, the last one traced; allocators take memory from the device in the first eleven, and once more late."""
    seconds = [k + 1.0 for k in range(20)]
    stored_run(tmp_path, seconds, [*range(11), *[10] * 7, 11, 11])
    found = training._found(tmp_path)
    assert (found["first_step"], found["step_ms"]["median"]) == (16, 18e3)
    stored_run(tmp_path, seconds, range(20))
    assert training._found(tmp_path)["first_step"] == training.WARM_OF_LONG  # they never settle


def test_power_is_collected(tmp_path: Path) -> None:
    power = [{"watts": 500.0, "joules_a_step": 5.0}]
    store(tmp_path, {"stock": found(10.0) | {"power": power}, "mixed": found(9.0)})
    rows = {row["plan"]: row for row in results.rows(results.cases_of(tmp_path), "today", {})}
    assert rows["stock"]["power"] == power
    assert "power" not in rows["mixed"]


def test_predictions_of_other_cases_and_devices_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(case: training.Case, device: str, out: Path) -> dict[str, Any]:
        return {plan.name: {"step_ms": 9.0, "limited": {"step_ms": 9.5}} for plan in case.plans}

    monkeypatch.setattr(predict, "predict", given)
    path = tmp_path / "made" / "predictions.json"
    for only, device in (("gpt-s2048-mp2:stock+mixed", "h100"), ("gpt-s2048-mp2:stock", "h200"), ("gpt-s2048-mp2:stock", "h200")):
        assert predict.main(["--only", only, "--device", device, "--out", str(path)]) == 0
    kept = json.loads(path.read_text())["predictions"]
    assert [(row["device"], row["plan"], row["step_ms"]) for row in kept] == [
        ("h100", "stock", 9.0),
        ("h100", "mixed", 9.0),
        ("h200", "stock", 9.0),
    ]


def test_steps_of_the_command_line_are_those_of_every_case() -> None:
    for case in training.chosen_cases(2, "*-13b-*,*-dp2-*", steps=30):
        assert [case.args[k + 1] for k, word in enumerate(case.args) if word == "--steps"] == ["30"]
        assert case.world == 2


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    def given(device: str, plan: str, step: float) -> dict[str, Any]:
        limited = {"step_ms": step + 1, "mhz": [1700], "joules": [7.0]}
        return {"device": device, "case": "gpt-mp2", "plan": plan, "step_ms": step, "limited": limited, results.PEAKS: [2 * 10**9]}

    store(
        tmp_path,
        {plan: found(step) | {"power": [{"mhz": 1650.0, "joules_a_step": 6.0}]} for plan, step in (("stock", 11.0), ("mixed", 10.0))},
    )
    rows = list(results.rows(results.cases_of(tmp_path), "today", {}))
    measured = {"sittings": {"today": {"gpus": "NVIDIA H200"}}, "runs": rows}
    lines = predict.table([given(*each) for each in (("h100", "mixed", 5.0), ("h200", "stock", 12.0), ("h200", "mixed", 10.0))], measured)
    assert [line.split(" | ")[3:] for line in lines.splitlines()[2:]] == [
        ["11.0, 12.0, 13.0", "", "1650, 1700", "6, 7", "0.00, 2.00 |"],
        ["10.0, 10.0, 11.0", "+10.0, +20.0, +18.2", "1650, 1700", "6, 7", "0.00, 2.00 |"],
    ]


def test_what_communication_adds_is_found_from_energy_and_held_against_what_was_left_out() -> None:
    """Three plans whose energy falls as 100 W say, one of them seen twice, and one as 160 W say: each is predicted from the others."""
    steep = beside_energy.Change(measured=-0.03, without=-0.05, per_watt=0.0002)
    runs = {(case, "auto"): [steep] for case in ("a", "b")}
    runs["c", "auto"] = [steep._replace(measured=-0.02), steep._replace(measured=-0.04)]
    runs["d", "auto"] = [steep._replace(measured=-0.018)]
    found = beside_energy.summary(runs)
    assert found["watts"] == 115.0
    assert [(row["num_runs"], row["others_w"], row["predicted"]) for row in found["configurations"]] == [
        (1, 120.0, -0.026),
        (1, 120.0, -0.026),
        (2, 120.0, -0.026),
        (1, 100.0, -0.03),
    ]
