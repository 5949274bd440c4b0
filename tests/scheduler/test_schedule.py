"""Job lists: equal to Paddle's own where Paddle gives one, sane where it does not; their text; their stalls."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.errors import ConfigError, PlanError
from interlace.ir import Graph, Pipeline, Program, parse
from interlace.ir.schedule import (
    OPTIMIZER,
    SCHEDULES,
    Part,
    Slot,
    accumulate,
    f_then_b,
    interleaved,
    joined,
    one_f_one_b,
    pair_up,
    parse_rows,
    sent_before,
    show_row,
    slot,
    with_optimizer,
    zero_bubble,
)
from interlace.passes import Schedule1F1B
from interlace.passes.base import Context
from interlace.scheduler.interleave.inline_weights import inline_weights
from interlace.scheduler.jobs.legal_rows import check_rows, stall
from interlace.scheduler.jobs.making import Jobs, receive_early
from interlace.scheduler.jobs.parts import Parts
from tests.strategies import World, programs

Row = list[tuple[str, int]]


def ours(name: str, stage: int, pp: int, micro_batches: int, chunks: int = 1) -> Row:
    """Job types and micro-batches as Paddle names them."""
    parts = Parts(Program((), (), pipeline=Pipeline(stage, pp, micro_batches, chunks, name)), set("RS"))
    row = SCHEDULES[name](stage, pp, micro_batches, chunks)
    return [(parts.kind_name(part), part.micro_batch) for slot in row for part in slot.parts]


def paddles(name: str, stage: int, pp: int, micro_batches: int, chunks: int = 1) -> Row:
    """Paddle's own job list."""
    from paddle.distributed.passes import new_pass

    attrs = {"num_micro_batches": micro_batches, "pp_stage": stage, "pp_degree": pp, "vpp_degree": chunks, "split_backward": False}
    made: Any = new_pass(f"pipeline_scheduler_{name}", attrs)
    return [(job.type(), job.micro_batch_id()) for job in made._create_job_list()]


@pytest.mark.paddle
@pytest.mark.parametrize("name", ["FThenB", "1F1B"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(4, 8), (4, 4), (4, 5), (2, 2), (2, 8), (2, 3), (8, 16), (1, 4), (1, 1)])
def test_job_lists_are_paddles(name: str, pp: int, micro_batches: int) -> None:
    """Job lists. FThenB and 1F1B, every stage."""
    for stage in range(pp):
        assert ours(name, stage, pp, micro_batches) == paddles(name, stage, pp, micro_batches)


@pytest.mark.paddle
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (2, 3), (2, 7), (2, 8), (3, 8), (4, 4), (4, 5), (4, 6), (4, 7), (4, 8), (4, 11)])
def test_vpp_job_lists_are_paddles(pp: int, micro_batches: int, chunks: int) -> None:
    """Job lists. VPP, ragged last rounds too, every stage."""
    for stage in range(pp):
        try:
            wanted = paddles("VPP", stage, pp, micro_batches, chunks)
        except (AssertionError, ZeroDivisionError, KeyError):
            pytest.skip("Paddle refuses this shape")
        assert ours("VPP", stage, pp, micro_batches, chunks) == wanted


@pytest.mark.paddle
@pytest.mark.parametrize(("name", "pp", "micro_batches", "chunks"), [("1F1B", 4, 2, 1), ("1F1B", 2, 1, 1), ("VPP", 4, 2, 2)])
def test_paddle_refuses_fewer_micro_batches_than_stages_and_we_do_not(name: str, pp: int, micro_batches: int, chunks: int) -> None:
    """Job lists. There our list has every slot once and no stage waits for ever."""
    with pytest.raises(Exception):  # noqa: B017
        paddles(name, 0, pp, micro_batches, chunks)
    assert_sane([SCHEDULES[name](stage, pp, micro_batches, chunks) for stage in range(pp)], micro_batches, chunks)


def assert_sane(rows: list[list[Slot]], micro_batches: int, chunks: int) -> None:
    """Every forward and backward once, the optimizer at the end, no stall, micro-batches of a chunk in order."""
    for row in rows:
        parts = [part for each in row for part in each.parts]
        for kind in "FB":
            done = [(part.chunk, part.micro_batch) for part in parts if part.kind == kind]
            assert sorted(done) == [(c, m) for c in range(chunks) for m in range(micro_batches)]
            for chunk in range(chunks):
                assert [m for c, m in done if c == chunk] == list(range(micro_batches))
        assert row[-1] == OPTIMIZER
        assert row.count(OPTIMIZER) == 1
    assert stall(rows, chunks) == ""


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12))
def test_every_schedule_is_sane(pp: int, micro_batches: int) -> None:
    """Job lists, no deadlock. Any number of stages and micro-batches, fewer than stages and one alone too; joined ones as well."""
    for make in (f_then_b, one_f_one_b, partial(joined, weight_delay=0)):
        assert_sane([make(stage, pp, micro_batches) for stage in range(pp)], micro_batches, 1)
    assert_sane([pair_up(one_f_one_b(stage, pp, micro_batches)) for stage in range(pp)], micro_batches, 1)
    with_last = {stage: with_optimizer(pair_up(one_f_one_b(stage, pp, micro_batches))) for stage in range(pp)}
    check_rows(with_last, pp, micro_batches, 1, "here")
    assert parse_rows("\n".join(show_row(stage, row) for stage, row in with_last.items())) == with_last
    assert_sane([accumulate(0, 1, micro_batches)], micro_batches, 1)
    deep = [min(2 * (pp - 1 - stage) + 1, micro_batches) for stage in range(pp)]
    assert_sane([joined(stage, pp, micro_batches, weight_delay=0, warmup=deep[stage]) for stage in range(pp)], micro_batches, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12))
def test_zero_bubble_is_sane(pp: int, micro_batches: int) -> None:
    """Job lists, no deadlock. Each backward in two parts, once each, the weights' part behind; a stage holds no more than the first."""
    rows = {stage: zero_bubble(stage, pp, micro_batches) for stage in range(pp)}
    check_rows(rows, pp, micro_batches, 1, "here")
    for row in rows.values():
        for m in range(micro_batches):
            assert row.index(slot("F", m)) < row.index(slot("I", m)) < row.index(slot("W", m))
        held = 0
        for part in (part for each in row for part in each.parts):
            held += {"F": 1, "W": -1}.get(part.kind, 0)
            assert held <= min(pp, micro_batches)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_a_lagged_schedule_is_sane(pp: int, micro_batches: int, data: st.DataObject) -> None:
    """Any weight_delay on any stage: every part once, weight gradients after their input gradients, in the order of micro-batches."""
    weight_delays = data.draw(st.lists(st.integers(0, micro_batches + 1), min_size=pp, max_size=pp))
    ends = [weight_delay + data.draw(st.integers(0, 3)) for weight_delay in weight_delays]
    rows = {
        stage: joined(stage, pp, micro_batches, weight_delay=weight_delays[stage], weight_delay_at_end=ends[stage]) for stage in range(pp)
    }
    check_rows(rows, pp, micro_batches, 1, "here")
    for row, weight_delay, end in zip(rows.values(), weight_delays, ends, strict=True):
        at = {(part.kind, part.micro_batch): k for k, each in enumerate(row) for part in each.parts}
        weights = [part.micro_batch for each in row for part in each.parts if part.kind == "W"]
        assert weights == (list(range(micro_batches)) if weight_delay else [])
        last = at["F", micro_batches - 1]
        waiting = [sum(at["I", m] <= k < at["W", m] for m in range(micro_batches)) for k in range(len(row))] if weight_delay else [0]
        assert all(count <= (weight_delay if k < last else end) for k, count in enumerate(waiting))
        assert all(at["I", m] < at["W", m] for m in weights)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 | 0F+0B O", "slot 0F+0B has 0F and 0B, which need each other"),
        (
            "0 | 0F 0I+0W O",
            "slot 0I+0W has 0I and 0W, which need each other or run alone; put them into slots of their own "
            "(for I and W of one micro-batch, write B)",
        ),
        ("0 | 0R+0F 0B O", "slot 0R+0F has 0R and 0F"),
        ("0 | 0F 0B+0S O", "slot 0B+0S has 0B and 0S"),
        ("0 | 0B 0F+O", "slot 0F+O has 0F and O"),
        ("0 | 0F 0I+O 0W", "O is not last"),
        ("0 | 0F O+0B", "found 'O+0B', expected a slot such as"),
    ],
)
def test_a_slot_holds_parts_that_need_nothing_of_each_other(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        check_rows(parse_rows(text), 1, 1, 1, "my.txt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 | 0F 0B O", "has stages [0], expected [0, 1]"),
        (
            "0 | 0F 0B O\n1 | 0F 0F 0B O",
            "stage 1: each of ['B', 'F'] for 1 micro-batches and 1 chunk(s) must occur once, and O last; missing, twice or unknown: ['0F']",
        ),
        ("0 | 0F 1F 0B 1B O\n1 | 0F 0B 1F 1B O", "stage 0: is of 2 micro-batch(es) a step, the model has 1; expected as many"),
        ("0 | 0F 0B\n1 | 0F 0B O", "unknown: ['O']"),
        ("0 | 0F O 0B\n1 | 0F 0B O", "unknown: O is not last"),
        ("0 | 0F 0I O\n1 | 0F 0B O", "each of ['F', 'I', 'W']"),
        ("0 | 0R 0F 0B O\n1 | 0F 0R 0B O", "stage 1: 0R stands behind 0F; expected the receives (R) of a forward before it"),
        ("0 | 0F 0B O\n1 | 0F 0S 0B O", "stages wait for each other:\n0 | 0F 0B <-- here O\n1 | 0F 0S <-- here 0B O"),
        (
            "0 | 0F 0B O\n1 | 0F 0B 7S O",
            "stage 1: each of ['B', 'F', 'S'] for 1 micro-batches and 1 chunk(s) must occur once, and O last; "
            "missing, twice or unknown: ['0S', '7S']",
        ),
        ("0 | 0B 0F O\n1 | 0F 0B O", "stages wait for each other:\n0 | 0B <-- here 0F O\n1 | 0F <-- here 0B O"),
    ],
)
def test_a_schedule_of_ones_own_is_held_against_the_step(text: str, words: str) -> None:
    """Wrong options, no deadlock. What is missing, doubled or unknown, and the grid where stages would wait for each other."""
    with pytest.raises(PlanError) as caught:
        check_rows(parse_rows(text), 2, 1, 1, "my.txt")
    assert str(caught.value).startswith("my.txt: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 | 0F 1F 1B 0B O", "stage 0: 0B in slot 0B stands behind 1B; expected the micro-batches of a kind and chunk in order"),
        ("0 | 0F 1F 0I+1I 1W 0W O", "stage 0: 0W in slot 0W stands behind 1W"),
        ("0 | 1F+0F 0B+1B O", "stage 0: 0F in slot 1F+0F stands behind 1F"),
    ],
)
def test_micro_batches_keep_their_order(text: str, words: str) -> None:
    """Equal results: a sum over micro-batches in another order has other bits."""
    with pytest.raises(PlanError, match=re.escape(words)):
        check_rows(parse_rows(text), 1, 2, 1, "my.txt")


def test_messages_of_chunks_arrive_in_the_order_in_which_they_are_sent() -> None:
    rows = ["0 | 0F 1F 0F.1 1F.1 0B.1 1B.1 0B 1B O", "1 | 0F 1F 0F.1 1F.1 0B.1 1B.1 0B 1B O"]
    check_rows(parse_rows("\n".join(rows)), 2, 2, 2, "my.txt")
    rows[1] = "1 | 0F 1F 0F.1 1F.1 0B.1 0B 1B.1 1B O"
    words = "my.txt: stage 0: 1B.1 stands where 0B is expected, whose message comes first: messages arrive in the order in which stage 1"
    with pytest.raises(PlanError, match=re.escape(words)):
        check_rows(parse_rows("\n".join(rows)), 2, 2, 2, "my.txt")


def test_a_gradient_that_is_sent_late_is_waited_for() -> None:
    """No deadlock. Where sends have slots of their own, the gradient leaves there."""
    rows = ["0 | 0F 0B 1F 1B O", "1 | 0F 0B 1F 1B 0S 1S O"]
    assert stall([parse_rows("\n".join(rows))[stage] for stage in (0, 1)]) == "0 | 0F 0B <-- here 1F 1B O\n1 | 0F 0B 1F <-- here 1B 0S 1S O"


@pytest.mark.parametrize("joined", [False, True], ids=["plain", "joined"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_vpp_is_sane(pp: int, joined: bool) -> None:
    """Job lists, no deadlock. Every shape that Paddle's order holds for; its ragged ones too where they do not stall in Paddle."""
    for chunks in (2, 3):
        for micro_batches in range(pp, 4 * pp + 1, pp):
            rows = [interleaved(stage, pp, micro_batches, chunks) for stage in range(pp)]
            assert_sane([pair_up(row) for row in rows] if joined else rows, micro_batches, chunks)


def test_pairing_is_the_same_from_either_side() -> None:
    """Pairs of parts. Without weight_delay, `joined` is `pair_up` of Paddle's 1F1B."""
    for pp in range(1, 5):
        for stage in range(pp):
            for micro_batches in range(1, 9):
                assert joined(stage, pp, micro_batches, weight_delay=0) == pair_up(one_f_one_b(stage, pp, micro_batches))


def test_a_stall_shows_who_waits_where() -> None:
    """Warm-up depth, no deadlock. Mixed pairs without the depth they need: both stages wait for each other."""
    assert stall([joined(stage, 2, 3, weight_delay=0, warmup=1) for stage in range(2)]).splitlines() == [
        "0 | 0F 0B+1F <-- here 1B+2F 2B O",
        "1 | 0F 0B+1F <-- here 1B+2F 2B O",
    ]
    assert stall([joined(stage, 2, 4, weight_delay=0, warmup=2 * (1 - stage) + 1) for stage in range(2)]) == ""


def test_a_stage_without_a_slot_stalls_its_neighbour() -> None:
    """No deadlock."""
    rows = [one_f_one_b(stage, 2, 2) for stage in range(2)]
    rows[0] = [each for each in rows[0] if each != slot("F", 1)]
    assert "1R <-- here" in stall(rows)


PARTS = st.builds(Part, st.sampled_from("FBRSIW"), st.integers(0, 99), st.integers(0, 9))
ROWS = st.lists(st.just(OPTIMIZER) | st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: Slot(tuple(parts))))


@settings(max_examples=100, deadline=None)
@given(st.lists(ROWS, max_size=4))
def test_rows_are_read_back_as_they_were_written(rows: list[list[Slot]]) -> None:
    """Job lists."""
    assert parse_rows("\n".join(show_row(k, row) for k, row in enumerate(rows))) == dict(enumerate(rows))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0 | 0F 0X", "my.txt:1: found '0X', expected a slot such as 3F, 3B, 3F.1, 2B+5F, 3I+5F+1W or 3B+O"),
        ("\n1 | 0B+", "my.txt:2: found '0B+', expected a slot such as 3F, 3B, 3F.1, 2B+5F, 3I+5F+1W or 3B+O"),
        ("1 | 0B+1F+2X", "my.txt:1: found '0B+1F+2X', expected a slot such as 3F, 3B, 3F.1, 2B+5F, 3I+5F+1W or 3B+O"),
        ("0F 0B", "my.txt:1: found '0F 0B', expected `<stage> | 0F 1F 0B ...`"),
        ("a | 0F", "my.txt:1: found 'a | 0F', expected `<stage> | 0F 1F 0B ...`"),
        ("0 | 0F\n0 | 0B", "my.txt:2: stage 0 occurs twice"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_named(text: str, error: str) -> None:
    """Wrong options."""
    with pytest.raises(PlanError) as caught:
        parse_rows(text, "my.txt")
    assert str(caught.value) == error


def test_an_unknown_schedule_lists_those_there_are() -> None:
    """Wrong options."""
    program = parse("program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=ZeroBubble")
    with pytest.raises(ConfigError, match=r"schedule 'ZeroBubble' is not known; there are \['1F1B', 'FThenB', 'VPP'"):
        Schedule1F1B().run(program, Context(GivenCosts({"default": 1})))


def test_the_last_stages_backward_waits_for_its_own_forward() -> None:
    """No deadlock. Nobody sends it a gradient, so only its own forward can hold it back."""
    assert stall([list(row) for row in parse_rows("0 | 0F 0B O\n1 | 0B 0F O").values()]).count("<-- here") == 2
    assert stall([list(row) for row in parse_rows("0 | 0B 0F O").values()]) == "0 | 0B <-- here 0F O"


def test_forwards_inside_pairs_are_sent_too() -> None:
    """No deadlock. Before the second micro-batch's gradient the first stage has sent 0, 1 and, in a pair, 2."""
    assert [sent_before(joined(0, 2, 4, weight_delay=0), m) for m in range(4)] == [2, 3, 4, 4]
    assert [sent_before(one_f_one_b(0, 2, 4), m) for m in range(4)] == [2, 3, 4, 4]


def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b() -> None:
    """Job lists."""
    assert show_row(1, zero_bubble(1, 2, 4)) == "1 | 0F 0I 1F 1I 0W 2F 2I 1W 3F 3I 2W 3W O"
    assert show_row(2, zero_bubble(2, 3, 4)) == "2 | 0F 0I 1F 1I 2F 2I 0W 3F 3I 1W 2W 3W O"


@pytest.mark.parametrize("forms", [("dx-first", "mixed"), ("mixed", "dx-first")])
def test_a_stage_of_given_depth_has_its_form(forms: tuple[Any, Any]) -> None:
    """And the depth that is its own; without one, mixed stages that would wait for each other have dx-first."""
    plain = programs(World(pp=2, micro_batches=4))
    chosen = Schedule1F1B(interleave=forms, depth=(3, 1))
    for program, form in zip(plain, forms, strict=True):
        rows, found = chosen._rows(program, Context(GivenCosts({"default": 1})))
        assert found == form
        assert [rows[stage] for stage in (0, 1)] == [joined(stage, 2, 4, 1, weight_delay=0, warmup=(3, 1)[stage]) for stage in (0, 1)]
    alone = Schedule1F1B(interleave="dx-first")._rows(plain[0], Context(GivenCosts({"default": 1})))
    assert alone[1] == "dx-first"
    assert alone[0][0] == joined(0, 2, 4, 1, weight_delay=0)


def test_weight_gradients_of_every_chunk_are_chosen_among_themselves() -> None:
    """Those that are computed at once are about the same part of each chunk's."""
    program, cost = programs(World(pp=2, micro_batches=2, layers=4, chunks=2, schedule="VPP"))[0], GivenCosts({"gemm": 20, "default": 5})
    halves = Parts(program, {"I", "W"})
    expected = [inline_weights(Graph(program), ops, cost, 0.5) for (kind, _), ops in halves.ops.items() if kind == "W"]
    assert len(expected) == 2
    assert any(expected)
    schedule = Schedule1F1B(interleave="dx-first", weight_delay=1, inline_share=0.5)
    assert Jobs(program, schedule, cost, {}, has_budget=False, extra_bytes=0)._inline_weights(0.5) == expected[0] | expected[1]
    assert Jobs(program, schedule, cost, {}, has_budget=False, extra_bytes=0)._inline_weights(0.0) == frozenset()


@pytest.mark.parametrize(
    ("role", "options", "orders"),
    [
        ("optimize", {"interleave": "dx-first"}, True),
        ("optimize", {"interleave": "off"}, False),
        ("optimize", {"schedule_file": "mine.txt"}, False),
        ("backward", {"interleave": "dx-first"}, False),
    ],
)
def test_an_optimizer_that_communicates_is_ordered(role: str, options: dict[str, Any], orders: bool) -> None:
    program = parse(f"""program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate
group 7 = 0,1
#0 %0:float32[4]!"g" = builtin.parameter() forward
#1 %1:float32[4]~0! = pd_op.all_reduce_(%0) {role} group=7 inplace=0:0
""")
    assert Schedule1F1B(**options)._orders_optimizer(program) is orders


def test_an_activation_is_received_before_the_gradient_that_its_sender_wants_first() -> None:
    """And no earlier: the previous stage sends activations 0 and 1 before it receives gradient 0, and 2 before it receives gradient 1."""
    program = parse("""program rank=1 world=2 mode=train
pipeline stage=1 of 2 micro_batches=3 chunks=1 schedule=1F1B
group 7 = 0,1
group 8 = 0,1
#0 %0:float32[4]!"w" = builtin.parameter() forward
#1 %1:float32[4] = pd_op.relu(%0) forward
#2 %2:float32[4] = pd_op.recv_v2() forward group=7 {"peer":0}
#3 %3:float32[4] = pd_op.add(%1, %2) forward
#4 %4:float32[4] = pd_op.exp(%3) backward
#5 pd_op.send_v2(%4) backward group=8 {"peer":0}
job f0 forward 0: 1-3@0
job b0 backward 0: 4-5@0
job f1 forward 1: 1-3@1
job b1 backward 1: 4-5@1
job f2 forward 2: 1-3@2
job b2 backward 2: 4-5@2
""")
    made = receive_early(program.jobs, program, one_f_one_b(0, 2, 3))
    assert [job.items for job in made] == [
        ((1, 0), (2, 0), (3, 0)),
        ((4, 0), (2, 1), (5, 0)),
        ((1, 1), (3, 1)),
        ((4, 1), (2, 2), (5, 1)),
        ((1, 2), (3, 2)),
        ((4, 2), (5, 2)),
    ]
