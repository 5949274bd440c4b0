"""Traces and splits of simulated steps."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from interlace.cli import main
from interlace.cost_model import GivenCosts
from interlace.ir import save
from interlace.report.split import rows, split_text
from interlace.report.timeline import chrome_trace, write_trace
from interlace.scheduler.simulate.simulator import Result, simulate
from tests.scheduler.plans import Shape, world

SHAPE = Shape(2, 2, 3, 2, ("mp", "send", "receive", "copies"), frozenset({0, 2}), norm=True, width=256)
COST = GivenCosts({"comm": 97, "p2p": 31, "gemm": 53, "copy": 41, "default": 7}, {("gemm", "comm"): (1.5, 2.0)}, 2, 5)

OVERVIEW = ("job", "micro-batch", "without computation")


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(world(SHAPE), COST)


def test_every_item_is_a_slice_of_its_stream(result: Result) -> None:
    """Slices of one thread never overlap; names are kind, layer and micro-batch."""
    events = chrome_trace(result)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["cat"] not in OVERVIEW]
    assert len(slices) == result.input.num_items
    assert "matmul layers.1.fc @2" in {e["name"] for e in slices}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in slices:
        threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(threads) == 4 * 5
    for spans in threads.values():
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(sorted(spans)))


def test_jobs_follow_each_other_on_the_host(result: Result) -> None:
    events = chrome_trace(result)["traceEvents"]
    jobs = [e for e in events if e["ph"] == "X" and e["cat"] == "job" and e["pid"] == 3]
    assert [e["name"] for e in jobs] == [job.name for job in world(SHAPE)[3].jobs]
    assert all(abs(a["ts"] + a["dur"] - b["ts"]) < 1e-6 for a, b in pairwise(jobs))


def test_arrows_lead_from_a_slice_to_a_later_one(result: Result) -> None:
    """Each collective's and copy's waiter on another stream, and each send's receive."""
    events = chrome_trace(result)["traceEvents"]
    tails = {e["id"]: e for e in events if e["ph"] == "s"}
    heads = {e["id"]: e for e in events if e["ph"] == "f"}
    assert tails.keys() == heads.keys()
    spans = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    targets = [spans[e["pid"], e["tid"], e["ts"]]["name"].split()[0] for e in heads.values()]
    # A send, the receive, the mean or the GEMM behind a collective, a reader behind a copy back.
    assert {"gelu", "recv_v2", "matmul"} <= set(targets)
    assert targets.count("recv_v2") >= 2 * 2 * 3
    assert all(tails[n]["ts"] <= heads[n]["ts"] or "recv" in spans[h["pid"], h["tid"], h["ts"]]["name"] for n, h in heads.items())


def test_time_without_computation_is_marked_by_its_part(result: Result) -> None:
    events = [e for e in chrome_trace(result)["traceEvents"] if e["ph"] == "X"]
    for rank in result.ranks:
        mine = [e for e in events if e["pid"] == rank.rank]
        for name, length in (("exposed communication", rank.exposed_comm_ns), ("bubble", rank.bubble_ns), ("host", rank.host_ns)):
            assert sum(e["dur"] for e in mine if e["cat"] == "without computation" and e["name"] == name) == pytest.approx(length / 1e3)
        batches = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in mine if e["cat"] == "micro-batch")
        assert {name for _, _, name in batches} == {"micro-batch A", "micro-batch B", "micro-batch C"}
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(batches))


def test_two_plans_stand_in_one_trace(result: Result) -> None:
    """Each rank of the other plan directly above the same rank, with arrows of its own."""
    alone = [e for e in chrome_trace(result)["traceEvents"] if e["name"] != "process_name"]
    both = chrome_trace(result, {"Paddle's baseline": result})["traceEvents"]
    order = {e["pid"]: e["args"]["sort_index"] for e in both if e["name"] == "process_sort_index"}
    names = {e["pid"]: e["args"]["name"] for e in both if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(order, key=order.__getitem__)][:3] == [
        "rank 0 (stage 0), Paddle's baseline",
        "rank 0 (stage 0), plan",
        "rank 1 (stage 0), Paddle's baseline",
    ]
    assert len(both) == 2 * (len(alone) + len(result.ranks))
    tails, heads = ([e["id"] for e in both if e["ph"] == phase] for phase in "sf")
    assert len(set(tails)) == len(tails)
    assert sorted(tails) == sorted(heads)
    assert alone == [e for e in both if e["pid"] < len(result.ranks) and e["name"] != "process_name"]


def test_counters_reach_the_peaks(result: Result) -> None:
    events = chrome_trace(result)["traceEvents"]
    for rank in result.ranks:
        for name, size in (("device memory", rank.peak_bytes), ("pinned memory", rank.pinned_bytes)):
            found = [e["args"]["MiB"] for e in events if e["ph"] == "C" and e["pid"] == rank.rank and e["name"] == name]
            assert max(found) <= round(size / 2**20, 3)
            assert max(found) > 0


def test_traces_are_json_and_the_same_each_time(result: Result, tmp_path: Path) -> None:
    write_trace(result, tmp_path / "a.json")
    write_trace(simulate(world(SHAPE), COST, engine="plain"), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text())["displayTimeUnit"] == "ms"


def test_splits_side_by_side(result: Result) -> None:
    serial = simulate(world(Shape(2, 2, 3, 2, ("", "send", "receive", ""), norm=True, width=256)), COST)
    text = split_text({"baseline": serial, "ours": result})
    assert text.splitlines()[0].split() == [
        "ranks",
        "plan",
        "step",
        "compute",
        "exposed",
        "bubble",
        "host",
        "hidden",
        "idle",
        "slowed",
        "peak",
        "MiB",
        "pinned",
    ]
    assert [line.split()[0] for line in text.splitlines() if line.split()[1:2] == ["ours"]] == ["0-3", "mean"]  # equal ranks on one row
    assert "ours against baseline:" in text
    assert set(rows(result)[0]) >= {
        "rank",
        "step_ns",
        "compute_ns",
        "exposed_comm_ns",
        "bubble_ns",
        "host_ns",
        "peak_bytes",
        "pinned_bytes",
    }


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plans, and dumps without jobs beside them; missing ranks are said; a circle is exit code 1, a missing file 2."""
    import msgspec

    plans, baseline, bare = tmp_path / "plan", tmp_path / "baseline", tmp_path / "bare"
    for program in world(SHAPE):
        save(program, plans / f"rank{program.rank}.ilp")
        save(program, baseline / f"rank{program.rank}.ilp")
    # Alone on its stage, a program without jobs runs in Paddle's order.
    save(msgspec.structs.replace(world(Shape(1, 1, 2, 1))[0], jobs=()), bare / "rank0.ilp")
    trace, table = tmp_path / "trace.json", tmp_path / "split.json"
    assert main(["timeline", str(bare), "-o", str(trace)]) == 0
    capsys.readouterr()
    assert main(["timeline", str(plans), "--beside", str(baseline), "-o", str(trace), "--json", str(table)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^plan against baseline: \S+ -> \S+ ms a step \(\+0\.0 %\)$", out, re.MULTILINE)
    assert len(json.loads(table.read_text())["ranks"]) == 4
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["timeline", str(plans / "rank0.ilp"), "--partial", "-o", str(trace)]) == 0
    assert "nothing is given of ranks 1-3 of 4" in capsys.readouterr().err
    for program in world(Shape(2, 1, 2, 1)):
        save(program, tmp_path / "circle" / f"rank{program.rank}.ilp")
    assert main(["timeline", str(tmp_path / "circle"), "-o", str(trace)]) == 1
    assert "wait in a circle" in capsys.readouterr().err
    assert main(["timeline", str(tmp_path / "nothing")]) == 2
