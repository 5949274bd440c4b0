"""`schedule-1f1b` as a user sees it: which options go together, what a form falls back to and is called, which rows its jobs follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.errors import ConfigError, InterlaceError
from interlace.ir import Job, Program, parse, show
from interlace.ir.effects import is_random
from interlace.ir.schedule import SCHEDULES, Slot, joined, parse_rows, with_optimizer, zero_bubble
from interlace.passes import Schedule1F1B
from interlace.passes.base import Context, Pass
from interlace.planning.variants import baseline, draft, fallbacks
from interlace.planning.variants import label as label_of
from interlace.scheduler.jobs.parts import KIND_NAMES
from tests.remarks import declined, rules_of
from tests.scheduler.sides import Sides, side_program
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10})
STAGES = programs(World(pp=2, micro_batches=3))
CHUNKS = programs(World(pp=2, micro_batches=2, chunks=2, schedule="VPP"))
DRAWS = [side_program(Sides(stage=stage, stages=2, micro_batches=4, recompute=True, draws=True), stage) for stage in range(2)]
NO_LESS = "expected no less than weight_delay on any stage, and 0 where weight_delay is 0"
FORMS = ("auto", "off", "dx-first", "mixed", "zb-h1", ("mixed", "dx-first"))


def ran(program: Program, memory_limit: int | None = None, extra_bytes: int = 0, **options: Any) -> tuple[Program, Context]:
    context = Context(COSTS, memory_limit=memory_limit, extra_bytes=extra_bytes)
    return Schedule1F1B(search=False, **options).run(program, context), context


def row_of(context: Context) -> str:
    """The slots, or parts of them, that a pass says it made jobs of."""
    (cut,) = [each for each in context.remarks if each.rule == "jobs-cut"]
    return " ".join(cut.names["slots"]) + (" ..." if cut.numbers.get("more") else "")


def text(words: Sequence[object]) -> str:
    return " ".join(map(str, words[:12])) + (" ..." if len(words) > 12 else "")


def with_jobs(slots: Sequence[Slot], made: Program) -> list[str]:
    """The slots of a row that the program has a job for, by the names of its jobs; each job belongs to one."""
    names = [_slot_of(job) for job in made.jobs]
    found = [str(each) for each in slots if str(each) in names]
    assert sorted(found) == sorted(names)
    return found


def _slot_of(job: Job) -> str:
    if job.kind == "pair":
        return job.name.removeprefix("pair_").replace("_", "+")
    kind = next(kind for kind, name in KIND_NAMES.items() if name == job.kind)
    return "O" if kind == "O" else f"{job.micro_batch}{kind}"


# ------------------------------------------------------------------------------------------------------- what goes together


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("option", "given_", "shown"),
    [
        ("weight_delay", 2, "2"),
        ("weight_delay", (1, 0), "[1, 0]"),
        ("weight_delay_at_end", 0, "0"),
        ("weight_delay_at_end", (0, 3), "[0, 3]"),
        ("depth", (1, 2), "[1, 2]"),
        ("send_latency_weight_at_end", 0.5, "0.5"),
        ("send_latency_weight_at_end", (0.0, 2.5), "[0, 2.5]"),
    ],
)
def test_options_that_a_form_does_not_have_are_refused_where_they_stand(form: Any, option: str, given_: Any, shown: str) -> None:
    told = Schedule1F1B(interleave=form, **{option: given_}).mistake()
    if option == "send_latency_weight_at_end":
        why = {"auto": "which chooses its own", "off": "which keeps the order of operations"}.get(form)
        advice = "write dx-first, mixed or zb-h1, or leave it out"
        expected = f"found {shown} beside interleave: {form}, {why}; {advice}" if why else None
    else:
        why = {"auto": "auto, which chooses its own", "off": "off", "zb-h1": "zb-h1"}.get(form)
        advice = f"it goes with interleave dx-first or mixed; write one of them, or leave {option} out"
        expected = f"found {shown} beside interleave: {why}; {advice}" if why else None
    assert told == (expected and (option, expected))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_given_is_no_mistake(form: Any) -> None:
    assert Schedule1F1B(interleave=form).mistake() is None
    assert Schedule1F1B(interleave=form, weight_delay=0, depth=(), send_latency_weight=0.0, inline_share=0.0).mistake() is None


def test_a_schedule_file_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("0 | 0F 0B O\n")
    (tmp_path / "wrong.txt").write_text("0 | 0F 0X O\n")
    (tmp_path / "empty.txt").write_text("\n")
    file = str(tmp_path / "my.txt")
    for form in ("off", "zb-h1"):
        assert Schedule1F1B(interleave=form, schedule_file=file).mistake() == (  # type: ignore[arg-type]
            "interleave",
            f"schedule_file gives every job, so interleave={form} would do nothing; leave one of the two "
            "out (dx-first and mixed say how jobs of several parts are ordered)",
        )
    for options in ({}, {"interleave": "mixed"}, {"interleave": "dx-first"}, {"send_latency_weight_at_end": 1.0}):
        assert Schedule1F1B(schedule_file=file, **options).mistake() is None  # type: ignore[arg-type]
    wrong, empty, none = (str(tmp_path / name) for name in ("wrong.txt", "empty.txt", "none.txt"))
    assert Schedule1F1B(schedule_file=wrong).mistake() == (
        "schedule_file",
        f"{wrong}:1: found '0X', expected a slot such as 3F, 3B, 3F.1, 2B+5F, 3I+5F+1W or 3B+O",
    )
    assert Schedule1F1B(schedule_file=empty).mistake() == (
        "schedule_file",
        f"schedule file {empty!r} holds no stage; expected a line `<stage> | 0F 1F 0B ...` for each stage",
    )
    told = Schedule1F1B(schedule_file=none).mistake()
    assert told is not None
    assert told[0] == "schedule_file"
    assert told[1].startswith(f"schedule file {none}: cannot be read")


@pytest.mark.parametrize(
    ("program", "options", "told"),
    [
        (
            STAGES[0],
            {"interleave": "dx-first", "send_latency_weight": (1.0, 0.5, 2.0)},
            "send_latency_weight: found [1, 0.5, 2], 3 numbers; expected one number, or one for each of 2 stages",
        ),
        (
            STAGES[0],
            {"interleave": "dx-first", "send_latency_weight_at_end": (1.0,)},
            "send_latency_weight_at_end: found [1], 1 numbers; expected one number, or one for each of 2 stages",
        ),
        (
            STAGES[0],
            {"interleave": "dx-first", "weight_delay": 1, "inline_share": (0.5,)},
            "inline_share: found [0.5], 1 numbers; expected one number, or one for each of 2 stages",
        ),
        (
            STAGES[1],
            {"interleave": ("mixed", "mixed", "dx-first")},
            "interleave: found [mixed, mixed, dx-first], 3 forms; expected one form, or one for each of 2 stages",
        ),
        *(
            (
                STAGES[0],
                {"interleave": form, "inline_share": 0.5},
                f"inline_share: found 0.5 beside interleave: {form} without weight-gradient delay, where no weight gradients trail; "
                "give weight_delay, schedule_file or interleave: zb-h1, or leave inline_share out",
            )
            for form in ("auto", "off", "dx-first", "mixed")
        ),
        (
            STAGES[0],
            {"weight_delay": 1},
            "weight_delay: found 1 beside interleave: auto, which chooses its own; it goes with interleave dx-first or mixed; "
            "write one of them, or leave weight_delay out",
        ),
        (
            STAGES[0],
            {"interleave": "dx-first", "weight_delay": 1, "schedule_file": "my.txt"},
            "weight_delay: found 1 beside schedule_file: my.txt; it goes with interleave dx-first or mixed; leave one of them out",
        ),
        (
            STAGES[0],
            {"interleave": "mixed", "weight_delay": (1, 0, 1)},
            "weight_delay: found [1, 0, 1], 3 numbers; expected one for each of 2 stages",
        ),
        (
            STAGES[0],
            {"interleave": "mixed", "weight_delay": 1, "weight_delay_at_end": (1,)},
            "weight_delay_at_end: found [1], 1 numbers; expected one for each of 2 stages",
        ),
        (STAGES[0], {"interleave": "mixed", "depth": (2,)}, "depth: found [2], 1 numbers; expected one for each of 2 stages"),
        (
            CHUNKS[0],
            {"interleave": "mixed", "depth": (2, 1)},
            "depth: found [2, 1] with 2 chunks a stage; expected a pipeline without chunks; leave depth out",
        ),
        (
            STAGES[0],
            {"interleave": "dx-first", "weight_delay": 2, "weight_delay_at_end": 1},
            f"weight_delay_at_end: found 1 beside weight_delay 2; {NO_LESS}",
        ),
        (
            STAGES[0],
            {"interleave": "dx-first", "weight_delay": (1, 2), "weight_delay_at_end": (1, 1)},
            f"weight_delay_at_end: found [1, 1] beside weight_delay [1, 2]; {NO_LESS}",
        ),
        (
            STAGES[0],
            {"interleave": "dx-first", "weight_delay": (0, 1), "weight_delay_at_end": (1, 1)},
            f"weight_delay_at_end: found [1, 1] beside weight_delay [0, 1]; {NO_LESS}",
        ),
        (CHUNKS[0], {"interleave": "zb-h1"}, "interleave: zb-h1 has no chunks; expected a 1F1B pipeline, found VPP"),
        (
            STAGES[0],
            {"interleave": "mixed", "depth": (1, 1)},
            "depth: found [1, 1]; stages would wait for each other:\n0 | 0F 0B+1F <-- here 1B+2F 2B O\n1 | 0F 0B+1F <-- here 1B+2F 2B O",
        ),
        (
            STAGES[0],
            {"interleave": ("mixed", "dx-first"), "weight_delay": 0},
            None,
        ),
        (
            DRAWS[0],
            {"interleave": "dx-first", "depth": (3, 1)},
            "depth: found [3, 1]; forward and backward both draw random numbers, or may, and another depth than 1F1B's would "
            "change the order; leave depth out",
        ),
        (DRAWS[1], {"interleave": "dx-first", "depth": (2, 1)}, None),
    ],
)
def test_options_are_held_against_the_program(program: Program, options: dict[str, Any], told: str | None) -> None:
    if told is None:
        ran(program, **options)
        return
    with pytest.raises(ConfigError) as caught:
        ran(program, **options)
    assert str(caught.value) == f"schedule_1f1b.{told}"


# ---------------------------------------------------------------------------------------------------------- forms of the pass


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({}, "interleave: auto"),
        ({"interleave": ("mixed", "dx-first")}, "interleave: [mixed, dx-first]"),
        ({"interleave": "mixed", "weight_delay": 2}, "interleave: mixed, weight_delay 2"),
        (
            {
                "interleave": "dx-first",
                "weight_delay": (1, 2),
                "weight_delay_at_end": 3,
                "depth": (4, 5),
                "inline_share": (0.25, 0.5),
                "send_latency_weight": 1.5,
            },
            "interleave: dx-first, weight_delay [1, 2], weight_delay_at_end 3, depth [4, 5], inline_share [0.25, 0.5], "
            "send_latency_weight 1.5",
        ),
        ({"interleave": "mixed", "weight_delay_at_end": 0}, "interleave: mixed, weight_delay_at_end 0"),
        ({"interleave": "mixed", "send_latency_weight_at_end": (0.0, 2.0)}, "interleave: mixed, send_latency_weight_at_end [0, 2]"),
    ],
)
def test_a_form_is_called_by_what_was_chosen(options: dict[str, Any], label: str) -> None:
    assert label_of(Schedule1F1B(**options)) == label


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, []),
        ({"interleave": "off"}, []),
        ({"interleave": "zb-h1"}, []),
        ({"interleave": "dx-first"}, ["off"]),
        ({"interleave": "mixed"}, ["dx-first", "off"]),
        ({"interleave": ("dx-first", "mixed")}, ["dx-first", "off"]),
        ({"interleave": ("dx-first", "dx-first")}, ["off"]),
        ({"interleave": "mixed", "weight_delay": 1, "inline_share": 0.5}, ["mixed", "dx-first", "off"]),
        ({"interleave": "dx-first", "depth": (2, 1)}, ["dx-first", "off"]),
        ({"interleave": "mixed", "only_gains": False}, []),
        ({"interleave": "mixed", "schedule_file": "my.txt"}, []),
    ],
)
def test_a_form_falls_back_to_simpler_ones(options: dict[str, Any], labels: list[str]) -> None:
    """In the end to Paddle's own jobs; none with weight_delay or depth, and all else as it was."""
    found = fallbacks(Schedule1F1B(max_ops_per_job=7, **options))
    assert [label_of(each) for each in found] == [f"interleave: {label}" for label in labels]
    for each in found:
        assert isinstance(each, Schedule1F1B)
        assert (each.max_ops_per_job, each.inline_share) == (7, 0.0)


def test_the_plan_of_paddle_keeps_only_what_its_jobs_need() -> None:
    full = Schedule1F1B(
        interleave="mixed",
        weight_delay=2,
        weight_delay_at_end=3,
        depth=(2, 1),
        inline_share=0.5,
        send_latency_weight_at_end=1.0,
        max_ops_per_job=9,
    )
    assert baseline(full) == Schedule1F1B(interleave="off", max_ops_per_job=9)
    assert baseline(Schedule1F1B(schedule_file="x")) == Schedule1F1B(interleave="off", schedule_file="x")
    assert draft(full) == Schedule1F1B(**{name: getattr(full, name) for name in full.__struct_fields__} | {"search": False})
    assert isinstance(baseline(full), Pass)


# -------------------------------------------------------------------------------------------------------------- rows and jobs


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(["off", "dx-first", "mixed", "zb-h1"]), st.data())
def test_jobs_follow_the_row_of_the_form(pp: int, micro_batches: int, form: Any, data: st.DataObject) -> None:
    """Each form, by its own row; every operation is in one job for each micro-batch, the optimizer's once."""
    stage = data.draw(st.integers(0, pp - 1))
    program = programs(World(pp=pp, micro_batches=micro_batches))[stage]
    weight_delay = data.draw(st.sampled_from([0, 1, 2])) if form in ("dx-first", "mixed") else 0
    at_end = weight_delay + data.draw(st.sampled_from([0, 1])) if weight_delay else None
    made, context = ran(program, interleave=form, weight_delay=weight_delay, weight_delay_at_end=at_end, extra_bytes=1 << 20)
    # what mixed needs so that neighbours do not wait for each other
    depth = min(2 * (pp - 1 - stage) + 1, micro_batches) if form == "mixed" else None
    rows = {
        "off": lambda: SCHEDULES["1F1B"](stage, pp, micro_batches, 1),
        "zb-h1": lambda: zero_bubble(stage, pp, micro_batches),
    }
    row = rows.get(form, lambda: joined(stage, pp, micro_batches, weight_delay=weight_delay, warmup=depth, weight_delay_at_end=at_end))()
    if form != "off" and any(op.role == "optimize" and op.group >= 0 for op in program.ops):
        row = with_optimizer(row)
    assert row_of(context) == text(with_jobs(row, made))
    listed = sorted(item for job in made.jobs for item in job.items)
    inside = {op_id for op_id, _ in listed}
    roles = {op.id: op.role for op in program.ops}
    assert listed == sorted((op, m) for op in inside for m in (range(micro_batches) if roles[op] != "optimize" else (0,)))
    assert (made.ops, made.values) == (program.ops, program.values)


@pytest.mark.parametrize(("stage", "micro_batches", "before"), [(0, 3, []), (0, 4, ["B+F"]), (1, 3, ["B+F"])])
def test_the_job_of_the_last_forward_is_the_first_at_the_end(stage: int, micro_batches: int, before: list[str]) -> None:
    """Of a row such as `0F 1F 0B+2F 1B 2B O` the third slot and those behind it are ordered as `send_latency_weight_at_end` says."""
    program = programs(World(pp=2, micro_batches=micro_batches))[stage]
    _, context = ran(program, interleave="dx-first", send_latency_weight_at_end=1.0, extra_bytes=1 << 20)
    jobs = [(each.place.job, each.names.get("when", "")) for each in context.remarks if each.place.job]
    assert sorted(jobs) == sorted([*((job, "") for job in before), ("B", "at the end"), ("B+F", "at the end")])


@pytest.mark.parametrize("form", ["mixed", ("mixed", "mixed")])
def test_a_depth_that_was_asked_for_is_no_news(form: Any) -> None:
    """Nor does a stall of it fall back to another form."""
    assert "more-in-flight" not in rules_of(ran(STAGES[0], interleave=form, depth=(2, 1))[1].remarks)
    assert "more-in-flight" in rules_of(ran(STAGES[0], interleave=form)[1].remarks)
    with pytest.raises(ConfigError, match=r"schedule_1f1b\.depth: found \[1, 1\]; stages would wait for each other"):
        ran(STAGES[0], interleave=form, depth=(1, 1))


@pytest.mark.parametrize("max_ops_per_job", [1, 4000])
def test_what_is_listed_is_what_is_counted(max_ops_per_job: int) -> None:
    """Not slots without operations, and not a slot whose parts stay jobs of their own."""
    program = programs(World(pp=2, micro_batches=3))[0]
    for form in ("off", "dx-first"):
        made, context = ran(program, interleave=form, max_ops_per_job=max_ops_per_job, extra_bytes=1 << 20)
        assert row_of(context).split() == [_slot_of(job) for job in made.jobs]
        (cut,) = [each for each in context.remarks if each.rule == "jobs-cut"]
        assert cut.numbers == {"jobs": len(made.jobs)}
    assert any(job.kind == "pair" for job in made.jobs) == (max_ops_per_job == 4000)


@pytest.mark.parametrize("options", [{"interleave": "mixed"}, {"interleave": "auto"}, {"interleave": "zb-h1"}])
@pytest.mark.parametrize("schedule", ["FThenB", "none"])
def test_a_schedule_that_never_alternates_keeps_its_own_order(schedule: str, options: dict[str, Any]) -> None:
    plain = programs(World(pp=2 if schedule == "FThenB" else 1, micro_batches=2, schedule="FThenB"))[0]
    program = parse(show(plain).replace("schedule=FThenB", f"schedule={schedule}"))
    made, context = ran(program, **options)
    assert [each.names["schedule"] for each in context.remarks if each.rule == "never-alternates"] == [schedule]
    assert row_of(context) == text(with_jobs(SCHEDULES[schedule](0, program.pipeline.num_stages, 2, 1), made))


def test_mixed_at_another_depth_is_declined_where_draws_would_change() -> None:
    """And where a stage holds as many micro-batches as in 1F1B anyway, nothing changes."""
    _, context = ran(DRAWS[0], interleave="mixed")
    assert rules_of(declined(context))[0] == "random-draws"
    assert row_of(context) == text(joined(0, 2, 4, weight_delay=0))
    assert row_of(ran(DRAWS[0], interleave="dx-first")[1]) == text(joined(0, 2, 4, weight_delay=0))
    one_side = side_program(Sides(stage=0, stages=2, micro_batches=4, draws=True), 0)
    _, context = ran(one_side, interleave="mixed")
    assert declined(context) == []
    assert row_of(context) == text(joined(0, 2, 4, weight_delay=0, warmup=3))
    in_optimizer = parse(show(one_side).replace("pd_op.sgd_(", "pd_op.uniform_inplace_("))
    assert any(is_random(op) and op.role == "optimize" for op in in_optimizer.ops)
    assert declined(ran(in_optimizer, interleave="mixed")[1]) == []


@pytest.mark.parametrize("form", ["dx-first", "mixed"])
@pytest.mark.parametrize("stage", [0, 1])
def test_jobs_are_those_of_the_file(stage: int, form: Any, tmp_path: Path) -> None:
    rows = "0 | 0F 1F 0B+2F 1B 2B O\n1 | 0F 0I+1F 0W 1I 2F 1W 2I 2W O\n"
    (tmp_path / "my.txt").write_text(rows)
    made, context = ran(STAGES[stage], interleave=form, schedule_file=str(tmp_path / "my.txt"), extra_bytes=1 << 20)
    assert row_of(context) == text(parse_rows(rows)[stage])
    assert [job.micro_batch for job in made.jobs][:2] == [0, 1 - stage]


def test_a_file_of_other_stages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("0 | 0F 1F 2F 0B 1B 2B O\n")
    with pytest.raises(InterlaceError, match=r"has stages \[0\], expected \[0, 1\]"):
        ran(STAGES[0], schedule_file=str(tmp_path / "my.txt"))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.integers(1, 5), st.sampled_from(["off", "dx-first", "mixed"]), st.data())
def test_a_stage_receives_before_it_sends_what_its_neighbour_wants_later(
    pp: int, micro_batches: int, form: Any, data: st.DataObject
) -> None:
    """Where the previous stage runs `n` forwards in slots before that of backward `m`, this stage receives `n` activations before it
    sends gradient `m`. None is received earlier than such a send asks for, or its own forward."""
    stage = data.draw(st.integers(1, pp - 1))
    made = ran(programs(World(pp=pp, micro_batches=micro_batches))[stage], interleave=form)[0]
    rows = {
        "off": lambda: SCHEDULES["1F1B"](stage - 1, pp, micro_batches, 1),
        "dx-first": lambda: joined(stage - 1, pp, micro_batches, weight_delay=0),
        "mixed": lambda: joined(stage - 1, pp, micro_batches, weight_delay=0, warmup=min(2 * (pp - stage) + 1, micro_batches)),
    }
    before, done = dict[int, int](), 0
    for slot in rows[form]():
        done_in_slots = done
        for part in slot.parts:
            before |= {part.micro_batch: done_in_slots} if part.kind == "B" else {}
            done += part.kind == "F"
    kinds = {op.id: (op.kind, op.role) for op in made.ops}
    received = list[int]()
    for job in made.jobs:
        own = {m for op_id, m in job.items if kinds[op_id][1] == "forward" and kinds[op_id][0] != "recv_v2"}
        own |= {job.micro_batch} if job.kind == "recv_forward" else set()
        early = list[int]()
        for op_id, m in job.items:
            if kinds[op_id] == ("recv_v2", "forward"):
                received.append(m)
                early += [m] if m not in own else []
            elif kinds[op_id] == ("send_v2", "backward"):
                assert len(received) >= before[m]
                assert all(each < before[m] for each in early)
                early = []
            else:
                assert not early, "a receive that stands in another job stands right before a send that asks for it"
        assert not early
    assert received == list(range(micro_batches))
