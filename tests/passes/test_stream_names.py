"""Which stream each communication runs on, by hand."""

from __future__ import annotations

import pytest

from interlace.cost_model import GivenCosts
from interlace.ir import parse, verify
from interlace.passes import InsertEvents, NameStreams
from interlace.passes.base import Context

TEXT = """program rank=0 world=2 mode=train
pipeline stage=0 of 2 micro_batches=1 chunks=1 schedule=1F1B
passes schedule-1f1b
group 7 = 0,1
group 8 = 0,1
group 3 = 0,1
group 4 = 0,1
#0 %0:float32[4]!"w" = builtin.parameter() forward
#1 %1:float32[4] = pd_op.full() forward
#2 %2:float32[4] = pd_op.all_reduce(%1) forward group=7
#3 %3:float32[4] = pd_op.all_reduce(%2) forward group=8
#4 %4:float32[4] = pd_op.all_gather(%0) forward group=7
#5 pd_op.send_v2(%3) forward group=3 {"peer":1}
#6 pd_op.send_v2(%3) forward group=4 {"peer":1}
#7 %7:float32[4] = pd_op.all_reduce(%1) optimize group=7
job forward_0 forward 0: 1-6@0
job optimizer optimizer 0: 7@0
"""


def test_each_ring_and_direction_has_a_stream_and_the_optimizer_has_none() -> None:
    made = NameStreams(priority=-3).run(parse(TEXT), Context(GivenCosts({"default": 1})))
    streams = {op.id: (op.stream, op.priority) for op in made.ops if op.group >= 0}
    assert streams == {
        2: ("auto_parallel_dp", -3),
        3: ("auto_parallel_mp", -3),
        4: ("auto_parallel_dp", -3),
        5: ("auto_parallel_pp_send_3", -3),
        6: ("auto_parallel_pp_send_4", -3),
        7: ("", 0),
    }


@pytest.mark.parametrize(("stream", "named"), [("", ""), ("side", "auto_parallel_pp_send_3")])
def test_a_message_of_the_optimizer_has_a_stream_of_its_own_where_it_is_on_a_side_stream(stream: str, named: str) -> None:
    text = TEXT.replace("job forward_0", f'#8 pd_op.send_v2(%1) optimize group=3 stream="{stream}" {{"peer":1}}\njob forward_0')
    made = NameStreams().run(parse(text.replace("0: 7@0", "0: 7-8@0")), Context(GivenCosts({"default": 1})))
    assert [op.stream for op in made.ops if op.kind == "send_v2" and op.group == 3] == ["auto_parallel_pp_send_3", named]


@pytest.mark.parametrize(
    ("lines", "streams"),
    [
        (
            ("#4 %4:float32[4] = pd_op.relu(%3) forward", "#7 %7:float32[4] = pd_op.relu(%1) optimize"),
            ["auto_parallel_mp_7", "auto_parallel_mp_8"],
        ),
        (  # as many bytes of both
            ("#4 %4:float32[4] = pd_op.all_gather(%0) forward group=7", "#7 %7:float32[4] = pd_op.relu(%1) optimize"),
            ["auto_parallel_mp_7", "auto_parallel_mp_8"],
        ),
        (
            ("#4 %4:float32[8] = pd_op.all_gather(%0) forward group=7", "#7 %7:float32[8] = pd_op.all_gather(%0) forward group=8"),
            ["auto_parallel_dp_7", "auto_parallel_dp_8"],
        ),
    ],
)
def test_a_rings_name_says_what_it_moves(lines: tuple[str, str], streams: list[str]) -> None:
    """Weights and their gradients: data parallelism; activations: tensor parallelism; two of a kind have their ring in the name."""
    text = TEXT.replace("#4 %4:float32[4] = pd_op.all_gather(%0) forward group=7", lines[0])
    text = text.replace("#7 %7:float32[4] = pd_op.all_reduce(%1) optimize group=7", lines[1])
    made = NameStreams().run(parse(text), Context(GivenCosts({"default": 1})))
    assert [op.stream for op in made.ops if op.id in (2, 3)] == streams


def test_a_ring_that_sums_gradients_of_weights_is_one_of_data_parallelism() -> None:
    """Though the gradient is no weight itself: it is what only leads to a sum that lasts."""
    text = TEXT.replace("#2 %2:float32[4] = pd_op.all_reduce(%1) forward", "#2 %2:float32[4] = pd_op.all_reduce(%1) backward")
    text = text.replace("pd_op.all_reduce(%2) forward", "pd_op.all_reduce(%1) forward")
    text = text.replace(
        "#4 %4:float32[4] = pd_op.all_gather(%0) forward group=7", "#4 %4:float32[4]~0! = pd_op.add_(%0, %2) backward inplace=0:0"
    )
    text = text.replace("#7 %7:float32[4] = pd_op.all_reduce(%1) optimize group=7", "#7 %7:float32[4] = pd_op.relu(%1) optimize")
    made = NameStreams().run(parse(text), Context(GivenCosts({"default": 1})))
    assert {op.id: op.stream for op in made.ops if op.id in (2, 3)} == {2: "auto_parallel_dp", 3: "auto_parallel_mp"}


@pytest.mark.slow
def test_streams_of_real_programs_are_named_for_what_they_are() -> None:
    """Data parallelism beside tensor parallelism, and alone: the loss's mean over replicas is no tensor parallelism."""
    from tests.captured.stored import programs_of

    found = {}
    for name, rank in (("dp2 mp2 sharding 1, clip", 3), ("dp2 pp2 sharding 2, clip", 2), ("mp2 without accumulation", 0)):
        program = programs_of(name)[rank]
        made = NameStreams().run(program, Context(GivenCosts({"default": 1})))
        groups = {group.id: group.ranks for group in made.groups}
        found[name] = {groups[op.group]: op.stream for op in made.ops if op.stream.startswith(("auto_parallel_dp", "auto_parallel_mp"))}
    assert found == {
        "dp2 mp2 sharding 1, clip": {(1, 3): "auto_parallel_dp", (2, 3): "auto_parallel_mp"},
        "dp2 pp2 sharding 2, clip": {(2, 3): "auto_parallel_dp"},
        "mp2 without accumulation": {(0, 1): "auto_parallel_mp"},
    }


def test_a_rings_name_does_not_depend_on_what_was_named_before() -> None:
    """A plan that repeats collectives (recomputation) may move more of activations than of weights, and another one not."""
    repeated = "".join(f"#{op} %{op}:float32[4] = pd_op.all_reduce(%1) forward group=7\n" for op in (8, 9))
    more = TEXT.replace("#3 ", f"{repeated}#3 ").replace("1-6@0", "1-2@0 8-9@0 3-6@0")
    context = Context(GivenCosts({"default": 1}))
    found = [{op.stream for op in NameStreams().run(parse(text), context).ops if op.id in (2, 3)} for text in (TEXT, more, TEXT)]
    assert found == [{"auto_parallel_dp", "auto_parallel_mp"}, {"auto_parallel_mp_7", "auto_parallel_mp_8"}, found[0]]


def test_a_collective_that_overlap_named_has_its_rings_stream() -> None:
    """That pass knows the rings of the collectives that it moves alone: two rings must not end on one name, nor one ring on two."""
    text = TEXT.replace(
        "#4 %4:float32[4] = pd_op.all_gather(%0) forward group=7", "#4 %4:float32[4] = pd_op.all_reduce(%3) forward group=7"
    )
    text = text.replace("all_reduce(%1) forward group=7", 'all_reduce(%1) forward group=7 stream="auto_parallel_mp"')
    made = NameStreams().run(parse(text), Context(GivenCosts({"default": 1})))
    streams = {op.id: op.stream for op in made.ops if op.id in (2, 3, 4)}
    assert streams == {2: "auto_parallel_mp_7", 3: "auto_parallel_mp_8", 4: "auto_parallel_mp_7"}


def test_collectives_of_an_optimizer_in_a_job_with_gradients_have_their_rings_stream() -> None:
    joined = parse(TEXT.replace("job forward_0 forward 0: 1-6@0\njob optimizer optimizer 0: 7@0", "job pair_0F_O pair 0: 1-7@0"))
    made = NameStreams().run(joined, Context(GivenCosts({"default": 1})))
    assert {op.id: op.stream for op in made.ops if op.group == 7} == dict.fromkeys((2, 4, 7), "auto_parallel_dp")


def test_what_paddle_put_on_a_stream_of_ours_gets_our_priority() -> None:
    """Sharding with overlap names a stream; a ring's other collectives go there too, and a stream has one priority."""
    given = TEXT.replace("optimize group=7", 'optimize group=7 stream="auto_parallel_sharding"')
    made = NameStreams(priority=-3).run(parse(given), Context(GivenCosts({"default": 1})))
    assert {op.id: (op.stream, op.priority) for op in made.ops if op.group == 7 and op.stream} == {
        2: ("auto_parallel_sharding", -3),
        4: ("auto_parallel_sharding", -3),
        7: ("auto_parallel_sharding", -3),
    }


GATHERED = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=1F1B
passes schedule-1f1b
group 7 = 0,1
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4]!"w" = builtin.parameter() forward
#2 %2:float32[4] = pd_op.all_gather(%1) forward group=7
#3 %3:float32[4] = pd_op.multiply(%0, %2) forward
#4 %4:float32[4]~1 = pd_op.sgd_(%1) optimize inplace=0:0
job forward_0 forward 0: 2-3@0
job forward_1 forward 1: 2-3@1
job optimizer optimizer 0: 4@0
"""


def test_a_gathered_parameter_waits_in_the_next_step_for_what_follows_its_update() -> None:
    """No event reaches into the next step: its first gathering waits for the job that cuts its batch, which runs behind the update."""
    context = Context(GivenCosts({"default": 1}))
    made = InsertEvents().run(NameStreams().run(parse(GATHERED), context), context)
    verify(made)
    assert ((0, 1), (2, 0)) in [(event.record, wait) for event in made.events for wait in event.waits]
