"""The page's data: what the simulator, the memory model and the passes say, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from interlace.cli import main
from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.profile import save_profile
from interlace.ir import load, parse, save
from interlace.ir.target import GPU
from interlace.planning.baseline import baseline_plan
from interlace.planning.curve import write_sweep
from interlace.planning.outcome import Step
from interlace.report.measured import COUNTED, WARM_UP
from interlace.report.outcome import WHOSE
from interlace.report.page.write import template
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import Result, simulate
from interlace.units import size
from tests.report.pages import SWEEP, columns, data_in, make_plans, make_recomputing
from tests.scheduler.plans import Shape
from tests.scheduler.plans import world as stuck_world
from tests.searches import few_forms
from tests.strategies import World, programs

CONFIG = """\
device: h200
schedule_1f1b: {interleave: dx-first, only_gains: off, search: off}
offload_activations: {fraction: 0.6, min_bytes: 1}
"""
COSTS = CostModel(load_profile("h200"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of two stages of two ranks, their page and its data."""
    folder = tmp_path_factory.mktemp("page")
    plan = make_plans(folder, World(pp=2, mp=2, micro_batches=4, layers=2), CONFIG)
    assert main(["report", str(plan), "-o", str(folder / "report.html"), "--json", str(folder / "report.json")]) == 0
    return folder


@pytest.fixture(scope="module")
def page(made: Path) -> dict[str, Any]:
    return data_in(made / "report.html")


def simulated(folder: Path) -> Result:
    programs = [baseline_plan(load(folder / f"rank{rank}.ilp"), COSTS) for rank in range(4)]
    return simulate(programs, COSTS, Options.of(GPU), target=GPU)


@pytest.fixture(scope="module")
def results(made: Path) -> list[Result]:
    return [simulated(made / "plan" / "captured"), simulated(made / "plan")]


def test_the_file_needs_nothing_else(made: Path) -> None:
    text = (made / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)|https?://|@import|url\(""", text)
    assert data_in(made / "report.html") == json.loads((made / "report.json").read_text(encoding="utf-8"))


def test_its_steps_are_those_of_the_simulator(page: dict[str, Any], results: list[Result]) -> None:
    for name, result in zip(("before", "plan"), results, strict=True):
        found = page["outcome"][name]
        assert found == json.loads(msgspec.json.encode(Step.of(result)))
        assert (found["step_ns"], found["peak_bytes"]) == (result.step_ns, max(rank.peak_bytes for rank in result.ranks))
        assert found["exposed_ns"] == sum(rank.exposed_comm_ns for rank in result.ranks) // 4
        assert found["bubble_ns"] == sum(rank.bubble_ns for rank in result.ranks) // 4
    assert [plan["name"] for plan in page["plans"]] == ["Paddle's baseline", "This plan"]
    assert page["rows"] == [{"stage": 0, "ranks": [0, 1]}, {"stage": 1, "ranks": [2, 3]}]
    for plan, result in zip(page["plans"], results, strict=True):
        for label, row in zip(page["rows"], plan["rows"], strict=True):
            rank = result.ranks[label["ranks"][0]]
            assert row["split"] == {name: getattr(rank, name) for name in row["split"]}
            assert (row["memory"]["peak_bytes"], row["memory"]["pinned_bytes"]) == (rank.peak_bytes, rank.pinned_bytes)
            assert max(row["memory"]["curve"][1::2]) == rank.peak_bytes
            assert sum(each["size_bytes"] for each in row["memory"]["holds"]) == rank.peak_bytes
            split = row["split"]
            assert split["compute_ns"] + split["exposed_comm_ns"] + split["bubble_ns"] + split["host_ns"] == result.step_ns


def test_the_clock_of_each_stage_is_the_simulators(page: dict[str, Any], results: list[Result]) -> None:
    for plan, result in zip(page["plans"], results, strict=True):
        for label, row in zip(page["rows"], plan["rows"], strict=True):
            at = label["ranks"][0]
            assert [row["clock"][0::2], row["clock"][1::2]] == [each.tolist() for each in result.mhz(at)]
            assert row["mean_mhz"] == round(result.mean_mhz(at))
            assert row["clock"][0] == 0


def test_a_profile_without_power_gives_no_clocks(made: Path, tmp_path: Path) -> None:
    path = save_profile(msgspec.structs.replace(load_profile("h200"), power=None), tmp_path / "powerless.json")
    words = ["report", str(made / "plan"), "--device", str(path), "-o", str(tmp_path / "page.html")]
    assert main(words) == 0
    rows = [row for plan in data_in(tmp_path / "page.html")["plans"] for row in plan["rows"]]
    assert [(row["joules"], row["mean_mhz"], row["clock"]) for row in rows] == [(0.0, 0, [])] * 4


def test_every_operation_is_there_with_its_times(page: dict[str, Any], results: list[Result]) -> None:
    for plan, result in zip(page["plans"], results, strict=True):
        for label, row in zip(page["rows"], plan["rows"], strict=True):
            at = label["ranks"][0]
            mine = slice(int(result.input.first[at]), int(result.input.first[at + 1]))
            start, end = result.times.start[mine], result.times.end[mine]
            takes = end > start
            found = columns(row["ops"])
            assert pairs(*found[:2]) == pairs(start[takes], (end - start)[takes])
            ops = {op.id: op for op in result.input.programs[at].ops}
            issued = pairs(result.input.op[mine][takes], result.input.micro_batch[mine][takes])
            kinds = [(row["ops"]["table"][k][0], batch) for k, batch in pairs(*found[2:])]
            assert sorted(kinds) == sorted((ops[op].kind, batch) for op, batch in issued)


def pairs(one: Any, other: Any) -> list[tuple[int, int]]:
    return sorted(zip(one.tolist(), other.tolist(), strict=True))


def test_the_picture_covers_what_runs(page: dict[str, Any]) -> None:
    """Runs shown lie where operations of computation run, gaps where none does, and jobs are the plan's in order."""
    for plan in page["plans"]:
        for row in plan["rows"]:
            found = columns(row["ops"])
            side = np.array([entry[3] for entry in row["ops"]["table"]])[found[2]] >= page["kinds"].index("collective")
            compute = found[:2, ~side]
            runs, gaps = (np.array(row[name]).reshape(-1, 3) for name in ("compute", "gaps"))
            assert runs[0, 0] == compute[0].min()
            assert (runs[:, 0] + runs[:, 1]).max() == compute.sum(axis=0).max()
            for low, length, _ in gaps.tolist():
                assert not ((compute[0] < low + length) & (compute.sum(axis=0) > low)).any()
            for name, field in (("exposed", "exposed_comm_ns"), ("host", "host_ns"), ("bubble", "bubble_ns")):
                shown = sum(length for _, length, code in gaps.tolist() if page["kinds"][code] == name)
                assert row["split"][field] - len(compute.T) * 20 <= shown <= row["split"][field]
            starts = [start for _, start, _, _ in row["jobs"]]
            assert starts == sorted(starts)


def test_a_schedule_is_read_back_as_the_jobs(page: dict[str, Any]) -> None:
    from interlace.ir.schedule import parse_rows

    assert len(page["plans"]) == 2
    for plan in page["plans"]:
        rows = parse_rows("\n".join(plan["schedule"]))
        for label, row in zip(page["rows"], plan["rows"], strict=True):
            shown = [job[0] for job in row["jobs"]]
            assert shown == [text for text in map(str, rows[label["stage"]]) if text in shown]


def test_communication_is_hidden_exposed_or_in_a_bubble(page: dict[str, Any]) -> None:
    """Counted again from the packed operations, moment by moment of their starts and ends."""
    for plan in page["plans"]:
        counted: dict[str, list[int]] = {}
        for row in plan["rows"]:
            found = columns(row["ops"])
            kinds = [row["ops"]["table"][k] for k in found[2].tolist()]
            timed = list(zip(found[0].tolist(), found[1].tolist(), kinds, strict=True))
            computing = [(start, start + length) for start, length, kind in timed if kind[3] < page["kinds"].index("collective")]
            for start, length, kind in timed:
                if page["kinds"][kind[3]] in ("collective", "p2p"):
                    beside = sum(max(0, min(end, start + length) - max(begin, start)) for begin, end in computing)
                    mine = counted.setdefault(kind[0], [0, 0, 0])
                    counted[kind[0]] = [mine[0] + 1, mine[1] + length, mine[2] + beside]
        for kind, (count, time_ns, hidden_ns) in counted.items():
            rows = [row for row in plan["communication"] if row["kind"] == kind]
            assert sum(row["count"] for row in rows) == count / 2, "two rows stand for two ranks each"
            assert sum(row["time_ns"] for row in rows) == pytest.approx(time_ns / 2, abs=len(rows))
            assert sum(row["hidden_ns"] for row in rows) == pytest.approx(hidden_ns / 2, abs=len(rows))
        assert sum(row["exposed_ns"] for row in plan["communication"]) > 0
        assert plan["communication"]
        for row in plan["communication"]:
            assert row["hidden_ns"] + row["exposed_ns"] <= row["time_ns"] + 1
        shown = {row["kind"] for row in plan["communication"]}
        assert {"send_v2", "recv_v2"} <= shown


def test_the_table_and_check_say_the_same_of_each_site(made: Path, page: dict[str, Any], tmp_path: Path) -> None:
    """And nothing else says how much of a communication is hidden: what a pass says comes before the plan is done."""
    assert main(["check", str(made / "plan"), "--json", str(tmp_path / "check.json")]) == 0
    ranks = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))["ranks"]
    sums: dict[tuple[str, str, int], list[float]] = {}
    for rank in ranks:
        for row in rank["communication"]:
            mine = sums.setdefault((row["kind"], row["layer"], row["num_ranks"]), [0, 0, 0, 0])
            for k, name in enumerate(("count", "time_ns", "hidden_ns", "exposed_ns")):
                mine[k] += row[name] / len(ranks)
    shown = {
        (row["kind"], row["layer"], row["num_ranks"]): [row["count"], row["time_ns"], row["hidden_ns"], row["exposed_ns"]]
        for row in page["plans"][1]["communication"]
    }
    assert sums.keys() == shown.keys()
    for key, mine in sums.items():
        assert mine == pytest.approx(shown[key], abs=1), key
    for rank in ranks:
        assert max((row["exposed_ns"] for row in rank["communication"]), default=0) <= rank["exposed_comm_ns"]
    said = [rule["text"] for rule in (*page["done"], *page["declined"])]
    assert not [text for text in said if re.search(r"hidden|exposed|done beside|saves \d", text)]


def test_offload_is_told_with_bytes_and_slack(page: dict[str, Any], results: list[Result]) -> None:
    assert page["plans"][0]["offload"] == []
    moved = page["plans"][1]["offload"]
    assert moved
    copies = 0
    for program in results[1].input.programs:
        pinned = {value.id for value in program.values if value.memory == "pinned"}
        out = {op.id for op in program.ops if op.kind == "memcpy_d2h" or (op.kind == "memcpy" and set(op.results) & pinned)}
        copies += sum(op in out for job in program.jobs for op, _ in job.items)
    assert sum(row["count"] for row in moved) * 4 == copies
    assert all(row["away_ns"] >= 0 and row["slack_ns"] >= 0 for row in moved)


def test_rules_not_instances(page: dict[str, Any]) -> None:
    texts = [(rule["name"], rule["text"]) for rule in page["done"]]
    assert len(texts) == len(set(texts))
    assert {"split-backward", "schedule-1f1b", "offload-activations", "insert-events"} <= {name for name, _ in texts}
    assert any(rule["count"] > 1 for rule in page["done"])
    assert not any(re.search(r"#\d|%\d", text) for _, text in texts)


def test_what_is_compared_can_be_named(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(made / "plan"), "--beside", str(made / "plan"), "-o", str(out)]) == 0
    found = data_in(out)
    assert [plan["name"] for plan in found["plans"]] == ["the plan in plan/", "This plan"]
    assert found["sentence"].startswith("The plan in plan/ takes ")
    assert found["outcome"]["before"] == found["outcome"]["plan"]
    assert main(["report", str(made / "plan" / "captured"), "-o", str(out)]) == 0
    assert [plan["name"] for plan in data_in(out)["plans"]] == ["Paddle's baseline"]
    assert data_in(out)["sentence"].startswith("Paddle's baseline takes ")
    assert "these are dumps" in capsys.readouterr().err
    assert main(["report", str(made / "plan"), "--beside", str(made / "plan" / "rank0.ilp"), "--partial", "-o", str(out)]) == 2
    assert "plans of the same ranks" in capsys.readouterr().err


def test_a_step_that_never_ends_has_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program in stuck_world(Shape(2, 1, 2, 1)):
        save(program, tmp_path / "circle" / f"rank{program.rank}.ilp")
    assert main(["report", str(tmp_path / "circle"), "-o", str(tmp_path / "page.html")]) == 1
    assert "interlace report: " in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_one_sentence_everywhere(made: Path, page: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan`, its record, the command `report` and the page say the same."""
    record = json.loads((made / "plan" / "captured" / "rank0.json").read_text(encoding="utf-8"))
    assert record["outcome"] == page["outcome"]
    capsys.readouterr()
    words = ["plan", str(made / "dumps"), "--config", str(made / "config.yaml"), "-o", str(tmp_path), "--json", str(tmp_path / "j")]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == page["sentence"]
    assert {rank["sentence"] for rank in json.loads((tmp_path / "j").read_text(encoding="utf-8"))["ranks"]} == {page["sentence"]}
    assert page["sentence"].startswith("Paddle's baseline takes ")


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "limit"), [("+1KB", "beyond"), ("0.95", "budget"), ("off", "")])
def test_the_limit_of_memory_is_told_everywhere(budget: str, limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record, the page, what the machine reads and the sentence say which limit held, and what is known of others."""
    plan = make_plans(tmp_path, World(pp=2, micro_batches=4, layers=2), f"memory_budget: {budget}\n")
    assert main(["report", str(plan), "-o", str(tmp_path / "page.html"), "--json", str(tmp_path / "j")]) == 0
    page, record = data_in(tmp_path / "page.html"), json.loads((plan / "captured" / "rank0.json").read_text(encoding="utf-8"))
    memory = page["outcome"]["memory"]
    assert page == json.loads((tmp_path / "j").read_text(encoding="utf-8"))
    assert record["outcome"]["memory"] == memory
    assert page["limit"] == (WHOSE[limit] if limit else "")
    told = f"Its memory limit is {size(memory['limit_bytes'])}, {page['limit']}; it holds {size(memory['peak_bytes'])} " if limit else ""
    assert told in page["sentence"]
    assert ("memory limit" in page["sentence"]) == bool(limit)
    capsys.readouterr()
    assert main(["report", str(plan), "--device", "h100", "-o", str(tmp_path / "other.html")]) == 0
    assert data_in(tmp_path / "other.html")["outcome"]["memory"] is None, "figures of one profile are told beside those of another"


SHAPE_READ_LATER = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate
#0 %0:float32[64] = pd_op.full() forward
#1 %1:float32[64] = pd_op.exp(%0) forward
#2 %2:vector<float32[64]> = builtin.combine(%1) forward
#3 %3:float32[64] = pd_op.concat(%2) forward
#4 %4:float32[256] = pd_op.full() backward
#5 %5:vector<float32[64]> = pd_op.concat_grad(%2, %4) backward no_buffer=0
"""


def test_the_baseline_has_one_peak_everywhere(tmp_path: Path) -> None:
    """Where Paddle's own jobs keep a tensor of which backward reads the shape alone, which a plan's jobs do not."""
    (tmp_path / "dumps").mkdir()
    save(parse(SHAPE_READ_LATER), tmp_path / "dumps" / "rank0.ilp")
    assert main(["plan", str(tmp_path / "dumps"), "--device", "h200", "-o", str(tmp_path / "plan"), "--json", str(tmp_path / "j")]) == 0
    found = {}
    for name, words in {"plan": ["plan"], "beside": ["plan", "--beside", str(tmp_path / "dumps")], "alone": ["dumps"]}.items():
        assert (
            main(["report", str(tmp_path / words[0]), *words[1:], "-o", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")]) == 0
        )
        shown = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
        found[name] = shown["plans"][0]["rows"][0]["memory"]["peak_bytes"]
    (told,) = json.loads((tmp_path / "j").read_text(encoding="utf-8"))["ranks"]
    assert set(found.values()) == {told["outcome"]["before"]["peak_bytes"]}
    assert told["outcome"]["before"]["peak_bytes"] > told["outcome"]["plan"]["peak_bytes"]


def test_a_plan_writes_its_own_page(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`plan_of(model).report(...)`: rank 0 knows one rank of each stage, and its page has the same figures."""
    from interlace.config import load_config
    from interlace.errors import PlanError
    from interlace.planning.loaded import read_plan
    from interlace.planning.plan import Plan, make_plan, make_plans
    from interlace.report.plan import PlanReport

    programs = [load(made / "dumps" / f"rank{rank}.ilp") for rank in range(4)]
    config = load_config(str(made / "config.yaml"))
    plans = [PlanReport(plan) for plan in make_plans(programs, config, COSTS, "h200")]
    assert [plan.report(tmp_path / "page.html") for plan in plans] == [tmp_path / "page.html", None, None, None]
    mine, whole = data_in(tmp_path / "page.html"), data_in(made / "report.html")
    assert mine == whole
    assert plans[0].explain().splitlines()[-1] == whole["sentence"]
    plans[0].measured.took_ns += [7_000_000] * (WARM_UP + COUNTED)
    plans[0].report(tmp_path / "measured.html")
    assert "; measured 7.000 ms, mean of 5 steps): " in data_in(tmp_path / "measured.html")["sentence"]
    assert plans[0].explain().splitlines()[-1] == data_in(tmp_path / "measured.html")["sentence"]
    loaded = PlanReport(read_plan(made / "plan", 0))
    loaded.report(tmp_path / "loaded.html")
    assert data_in(tmp_path / "loaded.html") == whole
    assert loaded.sentence() == whole["sentence"]
    alone = PlanReport(make_plan(programs[0], config, COSTS, "h200"))
    assert alone.explain().splitlines()[-1].startswith("Not compared with Paddle's baseline")
    with pytest.raises(PlanError, match="no page of rank 0 alone"):
        alone.report(tmp_path / "none.html")
    assert PlanReport(Plan.off("for a test")).report(tmp_path / "none.html") is None
    assert "Interlace is off (for a test), there is no plan to show" in capfd.readouterr().err
    assert not (tmp_path / "none.html").exists()


def test_one_rank_of_each_stage_gives_the_same_page(made: Path, page: dict[str, Any], tmp_path: Path) -> None:
    for rank, alike in ((0, (1,)), (2, (3,))):
        program = load(made / "dumps" / f"rank{rank}.ilp")
        save(msgspec.structs.replace(program, equivalent_ranks=alike), tmp_path / "dumps" / f"rank{rank}.ilp")
    assert main(["plan", str(tmp_path / "dumps"), "--config", str(made / "config.yaml"), "-o", str(tmp_path / "plan")]) == 0
    assert main(["report", str(tmp_path / "plan"), "-o", str(tmp_path / "page.html")]) == 0
    assert data_in(tmp_path / "page.html") == page


@pytest.mark.parametrize(
    "world",
    [
        World(),
        World(mp=2, micro_batches=3),
        pytest.param(World(pp=4, micro_batches=2), marks=pytest.mark.slow),
        World(pp=2, dp=2, schedule="FThenB"),
    ],
)
@pytest.mark.parametrize("preset", ["overlap", "demo", "baseline"])
def test_worlds_of_all_shapes_have_a_page(world: World, preset: str, tmp_path: Path) -> None:
    """Also where there is no pipeline, nothing to overlap, or fewer micro-batches than stages."""
    for program in programs(world):
        save(program, tmp_path / "dumps" / f"rank{program.rank}.ilp")
    with few_forms():
        assert main(["plan", str(tmp_path / "dumps"), "--config", preset, "-o", str(tmp_path / "plan")]) == 0
    assert main(["report", str(tmp_path / "plan"), "-o", str(tmp_path / "page.html")]) == 0
    found = data_in(tmp_path / "page.html")
    assert sorted(rank for label in found["rows"] for rank in label["ranks"]) == list(range(world.pp * world.mp * world.dp))
    if preset == "baseline":
        assert found["outcome"]["plan"] == found["outcome"]["before"]


def test_the_guide_has_the_sections_of_the_page() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide-page.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| ([^|]+?) \|", guide, re.M)[3:]
    assert told == re.findall(r"<h2>(.*?)</h2>", template())


def test_the_template_has_one_place_for_data() -> None:
    assert template().count("/*DATA*/") == 1


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that recomputes, with a curve of budgets beside it."""
    folder = tmp_path_factory.mktemp("recompute")
    make_recomputing(folder)
    write_sweep(SWEEP, folder / "plan")
    return folder


def test_what_backward_repeats_is_told_with_bytes_and_when(repeated: Path) -> None:
    """Marked operations and the sum between them that has no mark, of three micro-batches; bytes of what gradients read of them."""
    assert main(["report", str(repeated / "plan"), "-o", str(repeated / "page.html")]) == 0
    found = data_in(repeated / "page.html")["plans"][-1]
    program = load(repeated / "plan" / "rank0.ilp")
    copies = {op.id for op in program.ops if "bwd_recompute_id" in op.attrs or (op.kind == "c_allreduce_sum" and op.role == "backward")}
    sizes = {value.id: value.size_bytes for value in program.values}
    read = {v for op in program.ops if op.id not in copies for v in op.reads}
    expected: dict[tuple[str, str], list[int]] = {}
    for op in program.ops:
        if op.id in copies:
            row = expected.setdefault((op.kind, op.layer), [0, 0])
            row[0] += 3
            row[1] += 3 * sum(sizes[v] for v in op.results if v in read)
    assert len(expected) > 1
    assert {(row["kind"], row["layer"]): [row["count"], row["size_bytes"]] for row in found["recomputed"]} == expected
    ops = columns(found["rows"][0]["ops"])
    table = found["rows"][0]["ops"]["table"]
    for row in found["recomputed"]:
        assert row["time_ns"] > 0
        when = row["tightest"]
        assert (when is None) == (row["size_bytes"] == 0)
        if when is not None:
            assert max(0, when["read_ns"] - when["back_ns"]) == row["slack_ns"]
            mine = [k for k in range(ops.shape[1]) if (ops[0][k], ops[0][k] + ops[1][k]) == (when["left_ns"], when["back_ns"])]
            assert [table[ops[2][k]][:2] for k in mine] == [[row["kind"], row["layer"]]]
    assert data_in(repeated / "page.html")["sweep"] == json.loads((repeated / "plan" / "sweep.json").read_text(encoding="utf-8"))


def test_the_tightest_return_is_the_one_with_the_least_slack(page: dict[str, Any]) -> None:
    moved = page["plans"][1]["offload"]
    for row in moved:
        when = row["tightest"]
        assert row["slack_ns"] == max(0, when["read_ns"] - when["back_ns"])
        assert when["left_ns"] < when["back_ns"]
        assert when["stage"] in row["stages"]


def test_the_peak_is_where_the_curve_is_highest(page: dict[str, Any]) -> None:
    for plan in page["plans"]:
        for row in plan["rows"]:
            memory, step_ns = row["memory"], page["outcome"]["before" if plan["name"] != "This plan" else "plan"]["step_ns"]
            moments, sizes = memory["curve"][0::2], memory["curve"][1::2]
            at = max(k for k, moment in enumerate(moments) if moment <= memory["peak_at_ns"])
            assert sizes[at] == memory["peak_bytes"]
            assert 0 <= memory["peak_at_ns"] <= step_ns


def test_a_broken_curve_is_refused(repeated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan"
    shutil.copytree(repeated / "plan", plan)
    (plan / "sweep.json").write_text('{"points": 1}', encoding="utf-8")
    assert main(["report", str(plan), "-o", str(tmp_path / "page.html")]) == 2
    assert "sweep.json: not what `interlace plan --sweep` wrote" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("node") is None, reason="no node (Debian: apt-get install nodejs)")
def test_the_page_writes_sizes_as_texts_do() -> None:
    sizes = [0, 1, 1023, 1024, 16384, (1 << 20) - 1, 1 << 20, 3 << 19, (1 << 30) - 1, 5_153_325_072, -512, -3 << 19]
    sizes += [3328, 3456, -3328, 1_310_720 + (1 << 15)]  # ties
    functions = [
        *re.findall(r"^const fixed = .*?^};$", template(), re.M | re.S),
        *re.findall(r"^const (?:gib|size) = .*?;$", template(), re.M | re.S),
    ]
    assert len(functions) == 3
    script = "\n".join([*functions, f"console.log(JSON.stringify({sizes}.map(size)))"])
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(said) == [size(each) for each in sizes]
