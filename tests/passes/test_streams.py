"""What makes a plan safe on side streams: last readers that keep memory alive, and events, also at both ends of the step."""

from __future__ import annotations

import msgspec
import pytest

from interlace.cost_model import CostModel, load_profile
from interlace.errors import PlanError
from interlace.ir import Program, parse, verify
from interlace.ir.target import CUSTOM, GPU, Target
from interlace.passes import Pipeline, extend_lifetimes, insert_events
from interlace.scheduler.hazards import check
from interlace.scheduler.hazards.missing_orders import needs_of
from tests.closure import Closure
from tests.default_passes import THROTTLED

HEAD = "program rank=0 world=2 mode=train\ngroup 7 = 0,1\npipeline stage=0 of 1 micro_batches={count} chunks=1 schedule=accumulate\n"


def assigned(text: str, count: int = 1) -> Program:
    """A scheduled program of rank 0, and what the passes after the schedule make of it."""
    program = parse(HEAD.format(count=count) + text)
    verify(program)
    scheduled = msgspec.structs.replace(program, passes=("schedule-1f1b",))
    return Pipeline(THROTTLED).run(scheduled, CostModel(load_profile("h200")))[0]


def require_proved(program: Program, targets: tuple[Target, ...] = (GPU, CUSTOM)) -> None:
    for target in targets:
        assert [str(finding) for finding in check([program], target)] == []
    closure = Closure(program)
    assert (closure.races(), closure.freed_early(), closure.unwritten()) == ([], [], [])


def added(program: Program) -> list[tuple[str, str, tuple[int, ...]]]:
    """New operations: name, stream, operands."""
    return [(op.kind, op.stream, op.operands) for op in program.ops if op.kind == "share_data"]


LOSS = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.cross_entropy_with_softmax(%0) forward
#2 %2:float32[2] = pd_op.greater_than(%1) forward
#3 %3:float32[4] = pd_op.all_gather(%1) forward group=7
#4 %4:float32[4] = pd_op.masked_select(%3, %2) forward
#5 %5:float32[2] = pd_op.cast(%2) forward
#6 builtin.shadow_output(%4) forward {"output_name":"loss"}
"""


def test_a_loss_is_held_where_a_job_reads_it_last_on_compute() -> None:
    """A job that mixes micro-batches may have the comparison behind the gathering, as the program has not."""
    made = assigned(LOSS + "job a forward 0: 1-5@0\njob b forward 1: 1@1 3@1 2@1 5@1 4@1\n", count=2)
    require_proved(made)
    assert added(made) == [("share_data", "", (1,))]


def test_of_a_side_streams_operands_the_one_that_is_freed_early_is_held() -> None:
    """The first is read last by the side stream itself, the second by computation before that waits."""
    made = assigned(
        """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2] = pd_op.tanh(%0) forward
#3 %3:float32[2] = pd_op.add(%1, %2) forward stream="side"
#4 %4:float32[2] = pd_op.relu(%2) forward
#5 %5:float32[2] = pd_op.sin(%4) forward
#6 %6:float32[2] = pd_op.add(%3, %5) forward
#7 builtin.shadow_output(%6) forward {"output_name":"y"}
job a forward 0: 1-6@0
"""
    )
    require_proved(made)
    assert added(made) == [("share_data", "", (2,))]


def test_a_loss_whose_gathered_form_nobody_waits_for_is_read_once_more_beside() -> None:
    text = LOSS.replace("%4:float32[4] = pd_op.masked_select(%3, %2)", "%4:float32[4] = pd_op.exp(%2)")
    made = assigned(text + "job a forward 0: 1@0 3@0 2@0 5@0 4@0\n")
    require_proved(made)
    assert added(made) == [("share_data", "auto_parallel_mp", (1,))]


def test_what_is_not_held_after_all_rounds_is_told_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend_lifetimes, "READER_ROUNDS", 0)
    text = LOSS.replace("%4:float32[4] = pd_op.masked_select(%3, %2)", "%4:float32[4] = pd_op.exp(%2)")
    program = parse(HEAD.format(count=1) + text + "job a forward 0: 1@0 3@0 2@0 5@0 4@0\n")
    made, (_, report, *_) = Pipeline(THROTTLED).run(
        msgspec.structs.replace(program, passes=("schedule-1f1b",)), CostModel(load_profile("h200"))
    )
    require_proved(made)
    assert added(made) == []
    (told,) = report.declined
    assert (told.rule, told.place.op, told.place.value) == ("lifetime-not-extended", 3, 1)
    assert [each.op for each in told.ops["last"]] == [2]


def test_orders_that_no_event_mends_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof behind it (`check: off`) nobody else would say so."""
    monkeypatch.setattr(insert_events, "merged", lambda known, pairs: tuple(known))
    with pytest.raises(PlanError, match=r"still misses 1 order\(s\), the first: #3 pd_op.relu of micro-batch 0 must wait for #2 pd_op"):
        assigned(CROSSED)


def test_a_mask_that_leaves_first_thing_waits_for_the_batch_to_be_cut() -> None:
    """Inputs are cut on compute by a job of their own; nothing orders a side stream of another job behind it."""
    made = assigned(
        """
#0 %0:float32[2]"mask" = pd_op.data() forward
#1 %1:float32[2]"x" = pd_op.data() forward
#2 pd_op.send_v2(%0) forward group=7 {"peer":1}
#3 %3:float32[2] = pd_op.multiply(%1, %0) forward
#4 builtin.shadow_output(%3) forward {"output_name":"y"}
job a forward 0: 2-3@0
job b forward 1: 2-3@1
""",
        count=2,
    )
    require_proved(made)
    (event,) = [event for event in made.events if event.record[0] in (0, 1)]
    assert event.record == (1, 1), "the last piece that the first job cuts: one event for all inputs"
    assert event.waits == ((2, 0),), "later sends come behind it on their stream"
    assert "race" in {finding.kind for finding in check([msgspec.structs.replace(made, events=())])}


def test_an_output_of_a_side_stream_is_waited_for_by_the_job_that_collects_it() -> None:
    made = assigned(
        """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.mean(%0) forward
#2 %2:float32[2] = pd_op.all_reduce(%1) forward group=7
#3 builtin.shadow_output(%2) forward {"output_name":"loss"}
job a forward 0: 1-2@0
job b forward 1: 1-2@1
""",
        count=2,
    )
    require_proved(made)
    assert [(event.record, event.waits) for event in made.events] == [((2, 0), ((3, 0),)), ((2, 1), ((3, 1),))]
    (finding, *_) = check([msgspec.structs.replace(made, events=())])
    assert finding.kind == "race"
    assert "the job that collects the outputs (#3 builtin.shadow_output of micro-batch 0) may read %2 of #2" in finding.message


@pytest.mark.parametrize("jobs", ["job a forward 0: 1-4@0", "job a forward 0: 1-2@0\njob b backward 0: 3-4@0"])
def test_an_overwritten_memory_waits_for_a_side_reader_of_its_view(jobs: str) -> None:
    """The executor orders by variable: it does not see that a view and its base are one memory."""
    made = assigned(
        """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.exp(%0) forward
#2 %2:float32[2,2]~1 = pd_op.reshape(%1) forward views=0:0
#3 %3:float32[2,2] = pd_op.all_reduce(%2) forward group=7
#4 %4:float32[4]~1 = pd_op.relu_(%1) forward inplace=0:0
#5 builtin.shadow_output(%4) forward {"output_name":"y"}
#6 builtin.shadow_output(%3) forward {"output_name":"z"}
"""
        + jobs
    )
    require_proved(made)
    assert (3, 0) in [event.record for event in made.events]
    lost = [event for event in made.events if (4, 0) not in event.waits]
    assert {finding.kind for finding in check([msgspec.structs.replace(made, events=tuple(lost))])} == {"race"}


def test_the_optimizer_waits_for_what_a_side_stream_wrote() -> None:
    """Of all micro-batches' writes the last one orders the others; in the next step the first one comes behind computation."""
    made = assigned(
        """
#0 %0:float32[2]!"p" = builtin.parameter() forward
#1 %1:float32[2]!"g" = builtin.parameter() forward
#4 %4:float32[2] = pd_op.full() forward
#2 %2:float32[2]~1! = pd_op.all_reduce_(%1) backward group=7 inplace=0:0
#3 %3:float32[2]~0! = pd_op.sgd_(%0, %1) optimize inplace=0:0
job a backward 0: 4@0 2@0
job b backward 1: 4@1 2@1
job o optimizer 0: 3@0
""",
        count=2,
    )
    require_proved(made)
    assert [(event.record, event.waits) for event in made.events] == [((4, 0), ((2, 0),)), ((2, 1), ((3, 0),))]
    assert {finding.kind for finding in check([msgspec.structs.replace(made, events=())])} == {"race"}


@pytest.mark.parametrize("number", [2, 9])
def test_computation_waits_for_what_a_side_stream_keeps_behind_all_else(number: int) -> None:
    """Sharding gathers a new parameter on a stream of its own; the next step finds it there, whatever the step ends with."""
    made = assigned(f"""
#0 %0:float32[4]!"w" = builtin.parameter() forward
#1 %1:float32[2] = pd_op.full() optimize
#{number} %2:float32[4]~0! = pd_op.all_gather_(%1, %0) optimize group=7 stream="side" inplace=0:1
#3 %3:float32[2] = pd_op.full() optimize
job o optimizer 0: 1@0 {number}@0 3@0
""")
    require_proved(made)
    join = made.ops[-1]
    assert (join.kind, join.operands, join.stream) == ("share_data", (2,), "")
    assert made.jobs[-1].items[-1] == (join.id, 0)


GATHERED = """
#0 %0:float32[4]!"w" = builtin.parameter() forward
#1 %1:float32[4]!"v" = builtin.parameter() forward
#2 %2:float32[4]!"u" = builtin.parameter() forward
#3 %3:float32[2]"x" = pd_op.data() forward
#4 %4:float32[2] = pd_op.exp(%3) forward
#5 %5:float32[2] = pd_op.exp(%4) backward
#6 %6:float32[2] = pd_op.full() optimize
#7 %7:float32[4]~0! = pd_op.all_gather_(%6, %0) optimize group=7 stream="one" inplace=0:1
#8 %8:float32[4]~1! = pd_op.all_gather_(%6, %1) optimize group=7 stream="one" inplace=0:1
#9 %9:float32[4]~2! = pd_op.all_gather_(%6, %2) optimize group=7 stream="two" inplace=0:1
#10 %10:float32[2] = pd_op.tanh(%6) optimize
"""


@pytest.mark.parametrize(
    ("more", "behind", "joined"),
    [
        ("", "", [8, 9]),  # the last of each stream: what it wrote before is complete then
        ("#11 %11:float32[4] = pd_op.exp(%8) optimize\n", " 11@0", [9]),  # computation waits for it anyway
        ('#11 %11:float32[4] = pd_op.exp(%8) optimize stream="one"\n', " 11@0", [8, 9]),
        ("#11 builtin.shadow_output(%8) optimize\n", "", [8, 9]),
        ("#11 %11:float32[4] = pd_op.exp(%7) optimize\n", " 11@0", [8, 9]),
    ],
    ids=["alone", "read by computation", "read by its own stream", "an output", "another value read"],
)
def test_at_the_end_of_the_step_computation_waits_for_each_side_stream_once(more: str, behind: str, joined: list[int]) -> None:
    """The reader belongs to the optimizer, runs once a step, behind all else, on the stream that computes."""
    jobs = "".join(f"job f{m} forward {m}: 4@{m}\njob b{m} backward {m}: 5@{m}\n" for m in range(2))
    made = assigned(f"{GATHERED}{more}{jobs}job o optimizer 0: 6-10@0{behind}\n", count=2)
    require_proved(made)
    readers = [op for op in made.ops if op.kind == "share_data" and op.operands != (6,)]  # that one is held by other readers
    assert [op.operands for op in readers] == [(value,) for value in joined]
    assert {(op.role, op.stream, op.priority) for op in readers} == {("optimize", "", 0)}
    assert made.jobs[-1].items[-len(readers) :] == tuple((op.id, 0) for op in readers)


CROSSED = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 pd_op.send_v2(%1) forward group=7 {"peer":1}
#3 %3:float32[2] = pd_op.relu(%1) backward
#4 %4:float32[2] = pd_op.exp(%3) backward
job a forward 0: 1-2@0
job b backward 0: 3-4@0
"""


def test_memory_that_another_job_reads_last_waits_for_its_side_reader() -> None:
    made = assigned(CROSSED)
    require_proved(made)
    assert [(event.record, event.waits) for event in made.events] == [((2, 0), ((3, 0),))]
    assert added(made) == []


def test_state_that_a_side_stream_reads_last_is_waited_for_before_the_step_ends() -> None:
    """No event reaches from one step into the next, where the buffer is written first thing."""
    made = assigned("""
#0 %0:float32[2]!"b" = builtin.parameter() forward
#1 %1:float32[2]~0! = pd_op.relu_(%0) forward inplace=0:0
#2 %2:float32[2] = pd_op.all_reduce(%1) forward group=7
#3 %3:float32[2] = pd_op.full() forward
job a forward 0: 1@0
job b forward 0: 2-3@0
""")
    require_proved(made)
    assert ((2, 0), ((3, 0),)) in [(event.record, event.waits) for event in made.events]


BRANCHES = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.{branch}(%0) forward
#2 %2:float32[2] = pd_op.exp(%0) forward
#3 %3:float32[2] = pd_op.exp(%1) forward stream="side"
#4 %4:float32[2] = pd_op.tanh(%2) backward
#5 %5:float32[2] = pd_op.{branch}(%3) backward
job one forward 0: 1@0{after}
job two forward 0: 3@0
job three backward 0:{before} 5@0
"""


def branches(kind: str, after: str, before: str) -> Program:
    """A value that control flow gives goes to a side stream and comes back to control flow."""
    text = "\n".join(line + " num_blocks=2" if "{branch}" in line else line for line in BRANCHES.splitlines())
    program = parse(HEAD.format(count=1) + text.format(branch=kind, after=after, before=before))
    verify(program)
    return program


@pytest.mark.parametrize("kind", ["if", "while"])
def test_events_stand_at_the_nearest_kernels_where_control_flow_takes_none(kind: str) -> None:
    program = branches(kind, " 2@0", " 4@0")
    planned = msgspec.structs.replace(program, events=insert_events.events_of(program))
    require_proved(planned)
    assert [(event.record, event.waits) for event in planned.events] == [((2, 0), ((3, 0),)), ((3, 0), ((4, 0),))]


@pytest.mark.parametrize(("after", "before"), [("", " 2@0 4@0"), (" 2@0 4@0", "")], ids=["behind", "in front"])
def test_control_flow_without_a_kernel_beside_it_is_refused_by_name(after: str, before: str) -> None:
    with pytest.raises(PlanError, match=r"still misses 1 order\(s\), the first: #\d .* must wait for #\d "):
        insert_events.events_of(branches("if", after, before))


def test_what_another_side_stream_reads_last_gets_an_event_and_no_reader() -> None:
    """The memory is free when that stream's reader has completed; one more reader on computation would not hold it for the other."""
    made = assigned("""
group 8 = 0,1
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2] = pd_op.all_reduce(%1) forward group=7 stream="a"
#3 %3:float32[2] = pd_op.all_reduce(%1) forward group=8 stream="b"
#4 %4:float32[2] = pd_op.exp(%3) forward
#5 %5:float32[2] = pd_op.add(%2, %4) forward
#6 builtin.shadow_output(%5) forward {"output_name":"y"}
job a forward 0: 1-5@0
""")
    require_proved(made)
    assert len({op.stream for op in made.ops if op.kind == "all_reduce"}) == 2
    assert added(made) == []
    assert [(event.record, event.waits) for event in made.events] == [((2, 0), ((3, 0),))]


@pytest.mark.parametrize(
    ("waits_first", "behind"),
    [
        ("6@1 4@0 5@1 4@1 5@0", (5, 1)),  # computation of another micro-batch waits for the gathering first: it is read no more
        ("6@1 5@1 4@0 4@1 5@0", (4, 1)),
        ("6@1 4@1 4@0 5@1 5@0", (4, 1)),
    ],
)
def test_the_reader_comes_behind_what_waits_in_the_same_micro_batch(waits_first: str, behind: tuple[int, int]) -> None:
    text = LOSS.replace("#6 ", "#6 %6:float32[2] = pd_op.exp(%0) forward\n#7 ")
    made = assigned(text + f"job a forward 0: 6@0 1@0 1@1 2@0 3@1 3@0 2@1 {waits_first}\n", count=2)
    require_proved(made)
    (reader,) = [op for op in made.ops if op.kind == "share_data"]
    assert (reader.stream, reader.operands) == ("", (1,))
    items = made.jobs[0].items
    assert items[items.index((reader.id, 1)) - 1] == behind


def test_backward_in_one_job_with_forward_holds_nothing_for_it() -> None:
    """The reader of a value of forward comes behind forward's own wait, though backward waits for the stream before."""
    text = LOSS.replace("#6 ", "#6 %6:float32[4] = pd_op.exp(%3) backward\n#7 ")
    made = assigned(text + "job a forward 0: 1@0 3@0 2@0 5@0 6@0 4@0\n")
    require_proved(made)
    items = made.jobs[0].items
    (reader,) = [op for op in made.ops if op.kind == "share_data"]
    assert items[items.index((reader.id, 0)) - 1] == (4, 0)
    assert reader.role == "forward"


STATE = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2]"y" = pd_op.data() forward
#2 %2:float32[2]!"g" = builtin.parameter() forward
#3 %3:float32[2] = pd_op.exp(%0) forward
#4 %4:float32[2]~2! = pd_op.all_reduce_(%2) backward group=7 stream="side" inplace=0:0
#5 %5:float32[2] = pd_op.exp(%1) forward
#6 %6:float32[2] = pd_op.exp(%2) optimize
#7 %7:float32[2] = pd_op.all_reduce(%3) backward group=7 stream="side"
"""


@pytest.mark.parametrize(
    ("jobs", "carried"),
    [
        # the sum is written first thing in the next step, where computation may still read it: it waits for what computes first, which
        # is the job that cuts the batch, by the last input that it cuts;
        ("job a backward 0: 4@0 3@0 5@0 7@0\njob o optimizer 0: 6@0", [((1, 0), (4, 0))]),
        # and where the side stream issues more behind the last use, the last of it waits for that
        ("job a backward 0: 3@0 4@0 5@0\njob o optimizer 0: 6@0\njob p backward 0: 7@0", [((6, 0), (7, 0))]),
    ],
)
def test_what_the_next_step_may_overtake_is_ordered_within_this_one(jobs: str, carried: list[object]) -> None:
    program = parse(HEAD.format(count=1) + STATE + jobs)
    verify(program)
    assert list(needs_of(program).carried) == carried


KEPT = """
#0 %0:float32[2]!^pinned"m" = builtin.parameter() optimize
#1 %1:float32[2]!^pinned"n" = builtin.parameter() optimize
#2 %2:float32[2] = pd_op.full() optimize stream="out"
#3 %3:float32[2] = pd_op.memcpy_h2d(%0) optimize stream="in"
#4 %4:float32[2] = pd_op.memcpy_h2d(%1) optimize stream="in"
#5 %5:float32[2]~0!^pinned = pd_op.memcpy_d2h(%3, %0) optimize stream="out" inplace=0:1
#6 %6:float32[2]~1!^pinned = pd_op.memcpy_d2h(%4, %1) optimize stream="out" inplace=0:1
"""


@pytest.mark.parametrize(("order", "first"), [("3@0 4@0 5@0 6@0", 3), ("4@0 3@0 5@0 6@0", 4)])
def test_state_on_the_host_is_read_behind_what_the_stream_that_wrote_it_does_first(order: str, first: int) -> None:
    """In the next step that runs behind the copy. The first copy in of a stream waits for it, and with it the others."""
    program = parse(HEAD.format(count=1) + KEPT + f"job o optimizer 0: 2@0 {order}\n")
    assert needs_of(program).carried == (((2, 0), (first, 0)),)


def test_without_inputs_the_next_step_begins_with_what_computes_first() -> None:
    constants = STATE.replace('"x" = pd_op.data()', " = pd_op.full()").replace('"y" = pd_op.data()', " = pd_op.full()")
    program = parse(HEAD.format(count=1) + constants + "job a backward 0: 0@0 3@0 4@0 1@0 5@0 7@0\njob o optimizer 0: 6@0")
    assert needs_of(program).carried == (((0, 0), (4, 0)),)


def test_of_orders_that_follow_from_another_none_is_supplied() -> None:
    """What reads two results of a side stream, from another job, waits for the later one."""
    text = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.all_reduce(%0) forward group=7 stream="side"
#2 %2:float32[2] = pd_op.all_reduce(%0) forward group=7 stream="side"
#3 %3:float32[2] = pd_op.add(%1, %2) forward
job a forward 0: 1-2@0
job b forward 0: 3@0
"""
    for ops in (text, text.replace("(%1, %2)", "(%2, %1)")):
        assert needs_of(parse(HEAD.format(count=1) + ops)).orders == (((0, 0), (1, 0)), ((2, 0), (3, 0)))


def test_the_reader_comes_behind_computation_that_waits_not_behind_another_side_stream() -> None:
    text = LOSS.replace("#6 ", '#6 %6:float32[4] = pd_op.all_reduce(%3) forward group=8 stream="other"\n#7 ')
    made = assigned("group 8 = 0,1\n" + text + "job a forward 0: 1@0 3@0 2@0 5@0 6@0 4@0\n")
    require_proved(made)
    (reader,) = [op for op in made.ops if op.kind == "share_data" and op.operands == (1,)]
    items = made.jobs[0].items
    assert (reader.stream, items[items.index((reader.id, 0)) - 1]) == ("", (4, 0))


def test_a_fetched_value_of_a_side_stream_is_waited_for_by_the_job_that_collects_it() -> None:
    """Fetching another value than the named outputs needs an order of its own; fetching none changes nothing."""
    made = assigned("""
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward stream="side"
#2 %2:float32[2] = pd_op.tanh(%0) forward
#3 builtin.shadow_output(%2) forward {"output_name":"y"}
job a forward 0: 1-2@0
""")
    assert insert_events.fetching(made, []) is made
    wider = insert_events.fetching(made, [1])
    require_proved(wider)
    (fetch,) = (op for op in wider.ops if op.operands == (1,) and not op.results)
    assert ((1, 0), ((fetch.id, 0),)) in [(event.record, event.waits) for event in wider.events]
