"""What `show --before-after` and `show --costs` tell: by rule, small, and nothing that changed left out."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import msgspec
import pytest

from interlace.cli import main
from interlace.cost_model.base import Row
from interlace.ir import Program, load, parse
from interlace.planning.plan import read_record, replay
from interlace.report.changes import MOST_LINES, changes, changes_text
from interlace.report.costs import by_kind, by_layer, op_lines, sums_text
from tests.report.pages import make_plans
from tests.strategies import World

TEXT = "program rank=0 world=1 mode=train\n" + "\n".join(
    f'#{k} %{k}:float32[4] = pd_op.{kind}() forward layer="blocks.{k % 2}.mlp"' for k, kind in enumerate(["a", "a", "b", "c", "c", "d"])
)
PLAIN = parse(TEXT)


def reordered(program: Program, order: str) -> Program:
    ops = {op.id: op for op in program.ops}
    return program.with_ops([ops[int(k)] for k in order])


def told(before: Program, after: Program) -> list[str]:
    return changes_text(changes(before, after))


def test_what_is_equal_has_no_lines() -> None:
    assert changes(PLAIN, PLAIN) == []


def test_what_moved_and_where_to_is_one_line_for_a_rule() -> None:
    assert told(PLAIN, reordered(PLAIN, "340125")) == [
        "program order:",
        "  > 2 c (blocks.*.mlp): 3 places earlier, now before a (blocks.*.mlp)",
    ]
    assert told(PLAIN, reordered(PLAIN, "134520")) == [
        "program order:",
        "  > 1 b (blocks.*.mlp): 2 places later, now before the end",
        "  > 1 a (blocks.*.mlp): 5 places later, now before the end",
    ]


def test_the_fewest_are_said_to_have_moved() -> None:
    for order in permutations("01234", 5):
        moved = sum(int(line.split()[1]) for line in told(PLAIN, reordered(PLAIN, "".join(order) + "5"))[1:])
        rising = max((sum(1 for _ in part) for part in _rising_parts(order)), default=0)
        assert moved == 5 - rising


def _rising_parts(order: tuple[str, ...]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for each in order:
        parts += [[*part, each] for part in parts if not part or part[-1] < each]
    return parts


def test_what_came_went_and_differs() -> None:
    ops = [msgspec.structs.replace(op, stream="side", priority=-1) if op.kind == "c" else op for op in PLAIN.ops if op.kind != "b"]
    new = msgspec.structs.replace(PLAIN.ops[0], id=9, name="pd_op.e_", layer="blocks.1.norm")
    assert told(PLAIN, PLAIN.with_ops([*ops, new])) == [
        "operations:",
        "  ~ 2 c (blocks.*.mlp): stream none -> side; priority 0 -> -1",
        "program order:",
        "  + 1 e (blocks.*.norm)",
        "  - 1 b (blocks.*.mlp)",
    ]
    other = [msgspec.structs.replace(op, attrs={"axis": 1}, no_buffer=(0,)) for op in PLAIN.ops[:1]] + list(PLAIN.ops[1:])
    assert told(PLAIN, PLAIN.with_ops(other)) == ["operations:", "  ~ 1 a (blocks.*.mlp): other no_buffer; axis none -> 1"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two stages, with everything on and a budget that the first try exceeds."""
    folder = tmp_path_factory.mktemp("changes")
    config = (
        "device: h200\nschedule_1f1b: {interleave: dx-first, only_gains: off, search: off}\n"
        "memory_budget: 1300\noffload_activations: {min_bytes: 1}\nthrottle_host: {run_ahead_bytes: 0}\n"
    )
    return make_plans(folder, World(pp=2, micro_batches=4, layers=6), config)


@pytest.mark.slow
def test_every_pass_is_told_and_the_last_one_gives_the_plan(plan: Path) -> None:
    """Also of a plan that was made again for its budget: what is replayed is the try that was kept."""
    records = {path.stem: read_record(path) for path in sorted(plan.glob("*.ilp"))}
    again = [rank for rank, record in records.items() if record.memory_limit < record.memory_budget]
    assert again, "no plan here was made again"
    before = load(plan / "captured" / f"{again[0]}.ilp")
    for name in records[again[0]].order:
        found = replay(plan / f"{again[0]}.ilp", name)
        assert found[0] == before
        same = msgspec.structs.replace(found[1], passes=found[0].passes) == found[0]
        assert (changes(*found) == []) == same, name
        before = found[1]
    assert before == load(plan / f"{again[0]}.ilp")


@pytest.mark.slow
def test_alike_jobs_are_told_once(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(plan / "rank0.ilp"), "--before-after", "schedule-1f1b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    jobs = load(plan / "rank0.ilp").jobs
    assert lines[0].endswith(f"jobs 0 -> {len(jobs)}")
    heads = [line for line in lines[1:] if not line.startswith(" ")]
    assert len(heads) < len(jobs)
    assert any("jobs alike):" in head for head in heads)
    assert len(lines) < 60


def test_a_long_list_is_cut_and_says_so() -> None:
    names = [f"k{k}" for k in range(MOST_LINES + 3)]
    ops = [msgspec.structs.replace(PLAIN.ops[0], id=k, name=f"pd_op.{name}") for k, name in enumerate(names)]
    assert told(PLAIN.with_ops(()), PLAIN.with_ops(ops))[-1] == "  ... 3 more"


ROWS = [
    Row(0, "matmul", "blocks.0.mlp", "", 1000, "exact", 0.1, "", 4),
    Row(1, "matmul", "blocks.1.mlp", "", 500, "proxy", 0.5, "", 4),
    Row(2, "add", "blocks.0.norm", "", 300, "interpolated", 0.2, "", 1),
    Row(3, "data", "", "", 0, "free", 0.0, ""),
]


def test_lines_of_operations_say_what_padded_sizes_would_save() -> None:
    slow, usual = (
        Row(op, "matmul", "head", "gemm", 300_000, "interpolated", 0.1, "", unaligned_ns=ns) for op, ns in ((1, 200_000), (2, 0))
    )
    found = op_lines([slow, usual])
    assert found[0].endswith(" interpolated, 0.2000 ms less with rows of multiples of 16 bytes")
    assert found[1].endswith(" interpolated")


def test_costs_are_summed_by_kind_and_by_layer_largest_first() -> None:
    kinds = by_kind(ROWS)
    found = [(each.name, each.ops, each.runs, each.dur_ns) for each in kinds]
    assert found == [("matmul", 2, 8, 6000), ("add", 1, 1, 300), ("data", 1, 1, 0)]
    assert (kinds[0].exact_ns, kinds[0].interpolated_ns, kinds[0].estimated_ns) == (4000, 0, 2000)
    assert [each.name for each in by_layer(ROWS)] == ["blocks.*.mlp", "blocks.*.norm", "no layer"]
    text = sums_text("kind", kinds, every=False)
    assert text[1].split() == ["matmul", "2", "8", "0.006000", "95.2%", "67%", "0%", "33%"]
    assert text[-2].split()[:3] == ["1", "more", "1"]
    assert text[-1].split() == ["sum", "4", "10", "0.006300", "100.0%", "63%", "5%", "32%"]
    assert [line.split()[0] for line in sums_text("kind", kinds, every=True)] == ["kind", "matmul", "add", "data", "sum"]


@pytest.mark.slow
def test_sums_are_those_of_the_table(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "costs.json"
    assert main(["show", str(plan / "rank0.ilp"), "--costs", "--json", str(found)]) == 0
    data = msgspec.json.decode(found.read_bytes(), type=Mapping[str, object])
    rows = data["ops"]
    assert isinstance(rows, list)
    whole = sum(row[4] * row[8] for row in rows)
    for name in ("by_kind", "by_layer"):
        sums = data[name]
        assert isinstance(sums, list)
        assert sum(each["dur_ns"] for each in sums) == whole > 0
        assert all(each["exact_ns"] + each["interpolated_ns"] + each["estimated_ns"] == each["dur_ns"] for each in sums)
        assert [each["dur_ns"] for each in sums] == sorted((each["dur_ns"] for each in sums), reverse=True)
    assert len(capsys.readouterr().out.splitlines()) < 50
