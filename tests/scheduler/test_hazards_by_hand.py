"""Plans in which one order is missing, and the same plans with it: the checker must tell them apart."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.ir import Pipeline, Program, parse, show
from interlace.ir.schedule import find_schedule
from interlace.ir.target import GPU, Target
from interlace.scheduler.hazards import check
from interlace.scheduler.hazards.communication import shared_streams, wrong_groups
from tests.closure import is_unsafe

LOOSE = msgspec.structs.replace(GPU, name="loose", ring_is_serial=False)


def rank(number: int, ops: str, jobs: str, world: int = 2, groups: str = "", micro_batches: int = 1) -> Program:
    """A rank's program; `#0` gives a parameter `%0` that nobody writes; each group has all ranks unless it is given."""
    listed = groups or "".join(f"group {k} = {','.join(map(str, range(world)))}\n" for k in (6, 7, 8, 9))
    head = f"program rank={number} world={world} mode=train\n"
    pipe = f"pipeline stage=0 of 1 micro_batches={micro_batches} chunks=1 schedule=accumulate\n"
    return parse(f'{head}{pipe}{listed}#0 %0:float32[4]!"x" = builtin.parameter() forward\n{ops.strip()}\n{jobs.strip()}\n')


def kinds(programs: list[Program], target: Target = GPU) -> set[str]:
    """Classes of what is found, but for streams that two rings share, which is no matter here."""
    return {finding.kind for finding in check(programs, target)} - {"shared-stream"}


def reduce(number: int, group: int, stream: str, name: str = "all_reduce", operand: int | str = 0, dims: str = "4", more: str = "") -> str:
    return f'#{number} %{number}:float32[{dims}] = pd_op.{name}(%{operand}) forward group={group} stream="{stream}"{more}\n'


# ---------------------------------------------------------------------------------------------------- circles over ranks


def test_operations_of_one_ring_run_in_turn_on_whatever_stream() -> None:
    """Rank 0 calls 7, 7, 9 and waits with 9 for the second 7; rank 1 waits with the first 7 for 9."""
    first = reduce(1, 7, "a") + reduce(2, 7, "b") + reduce(3, 9, "b")
    second = reduce(1, 9, "a") + reduce(2, 7, "a") + reduce(3, 7, "b")
    programs = [rank(0, first, "job all forward 0: 1-3@0"), rank(1, second, "job all forward 0: 1-3@0")]
    assert kinds(programs) == {"deadlock"}
    assert kinds(programs, LOOSE) == set()


@pytest.mark.parametrize(("event", "found"), [("", set()), ('event "e" 1@0 -> 2@0', {"deadlock"})])
def test_a_call_waits_for_calls_of_other_streams_that_its_events_bring(event: str, found: set[str]) -> None:
    programs = [
        rank(0, reduce(1, 7, "a") + reduce(2, 8, "b"), f"job all forward 0: 1-2@0\n{event}"),
        rank(1, reduce(1, 8, "a") + reduce(2, 7, "a"), "job all forward 0: 1-2@0"),
    ]
    assert kinds(programs) == found


def test_a_call_waits_for_the_last_of_the_calls_that_an_event_brings() -> None:
    """The event brings 6 and 7 to rank 0; rank 1 holds up 7 alone."""
    programs = [
        rank(0, reduce(1, 6, "a") + reduce(2, 7, "a") + reduce(3, 8, "b"), 'job all forward 0: 1-3@0\nevent "e" 2@0 -> 3@0'),
        rank(1, reduce(1, 6, "a") + reduce(2, 8, "a") + reduce(3, 7, "a"), "job all forward 0: 1-3@0"),
    ]
    assert kinds(programs) == {"deadlock"}


@pytest.mark.parametrize(
    ("sent", "received", "found"),
    [("4", "4", set()), ("4096", "4096", {"deadlock"}), ("-1", "-1", {"deadlock"}), ("-1", "4", set()), ("4", "-1", set())],
)
def test_only_a_message_that_is_known_to_fit_is_over_before_it_is_received(sent: str, received: str, found: set[str]) -> None:
    """Both send first, then receive, on one stream; messages of up to 1024 bytes are buffered. One end that knows the size is enough."""
    ops = """
#1 %1:float32[{sent}] = pd_op.relu(%0) forward
#2 pd_op.send_v2(%1) forward group=7 stream="p2p" {{"peer":{other}}}
#3 %3:float32[{received}] = pd_op.recv_v2() forward group=7 stream="p2p" {{"peer":{other}}}
"""
    programs = [rank(k, ops.format(sent=sent, received=received, other=1 - k), "job all forward 0: 1-3@0") for k in (0, 1)]
    assert kinds(programs, msgspec.structs.replace(GPU, name="buffers", p2p_buffer_bytes=1024)) == found


def test_each_message_of_a_channel_is_buffered_or_not() -> None:
    """The first fits; the second, from the other job, does not."""
    ops = """
#1 %1:float32[4] = pd_op.relu(%0) forward
#2 pd_op.send_v2(%1) forward group=7 stream="p2p" {{"peer":{other}}}
#3 %3:float32[4096] = pd_op.full() forward
#4 pd_op.send_v2(%3) forward group=7 stream="p2p" {{"peer":{other}}}
#5 %5:float32[4] = pd_op.recv_v2() forward group=7 stream="p2p" {{"peer":{other}}}
#6 %6:float32[4096] = pd_op.recv_v2() forward group=7 stream="p2p" {{"peer":{other}}}
"""
    programs = [rank(k, ops.format(other=1 - k), "job all forward 0: 1-6@0") for k in (0, 1)]
    assert kinds(programs, msgspec.structs.replace(GPU, name="buffers", p2p_buffer_bytes=1024)) == {"deadlock"}
    assert kinds(programs, msgspec.structs.replace(GPU, name="buffers", p2p_buffer_bytes=1 << 20)) == set()


@pytest.mark.parametrize(("waits", "found"), [(True, set()), (False, {"race"})])
def test_the_next_step_finds_done_what_the_host_waited_for_in_this_one(waits: bool, found: set[str]) -> None:
    """Computation waits for a read on a side stream, and the host for computation at the end of each job."""
    ops = """
#1 %1:float32[4]~0! = pd_op.relu_(%0) forward stream="first" inplace=0:0
#2 %2:float32[4] = pd_op.exp(%1) forward stream="side"
#3 %3:float32[4] = pd_op.tanh(%2) forward
#4 %4:float32[4] = pd_op.sin(%3) forward
"""
    jobs = "".join(f"job j{k} forward 0: {k}@0\n" for k in range(1, 5))
    events = "event a 1@0 -> 2@0\nevent b 2@0 -> 3@0\n"
    assert kinds([rank(0, ops, jobs + events)], msgspec.structs.replace(GPU, name="host", job_end_waits=waits)) == found


# ------------------------------------------------------------------------------------------------- state of several parts

Part = tuple[str, int, int]
"""A letter for forward or backward, the chunk, the micro-batch."""


def own_order(schedule: str, chunks: int, micro_batches: int) -> list[Part]:
    """The parts of the first of two stages in Paddle's own schedule."""
    slots = find_schedule(schedule)(0, 2, micro_batches, chunks)
    return [(part.kind, part.chunk, part.micro_batch) for slot in slots for part in slot.parts if part.kind in "FB"]


def last_writes(order: list[Part], uses: dict[tuple[str, int], str]) -> dict[Part, Part | None]:
    """Of each part that uses the state, the part that wrote it last."""
    found, last = {}, None
    for part in order:
        if uses[part[:2]] != "none":
            found[part] = last
        last = part if uses[part[:2]] == "write" else last
    return found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_state_is_found_as_in_paddles_own_schedule(data: st.DataObject) -> None:
    """Whichever parts of the step read and write it, forward and backward, of one chunk and of another: every use behind the same write."""
    schedule = data.draw(st.sampled_from(["1F1B", "FThenB", "VPP"]))
    chunks = 2 if schedule == "VPP" else 1
    own = own_order(schedule, chunks, 4)
    parts = [("F", k) for k in range(chunks)] + [("B", k) for k in reversed(range(chunks))]
    uses = {part: data.draw(st.sampled_from(["write", "read", "none"])) for part in parts}
    ops, state = "", 0
    number = {part: k for k, part in enumerate(parts, 1)}
    for (half, chunk), k in number.items():
        role = f"{'forward' if half == 'F' else 'backward'} chunk={chunk}"
        match uses[half, chunk]:
            case "write":
                ops += f"#{k} %{k}:float32[4]~0! = pd_op.relu_(%{state}) {role} inplace=0:0\n"
                state = k
            case "read":
                ops += f"#{k} %{k}:float32[4] = pd_op.exp(%{state}) {role}\n"
            case "none":
                ops += f"#{k} %{k}:float32[4] = pd_op.full() {role}\n"
    order = list(own)
    for at in data.draw(st.lists(st.integers(0, len(own) - 2), max_size=3)):
        order[at : at + 2] = order[at + 1], order[at]
    names = {"F": "forward", "B": "backward"}
    jobs = "".join(f"job j{k} {names[half]} {m}: {number[half, chunk]}@{m}\n" for k, (half, chunk, m) in enumerate(order))
    program = rank(0, ops, jobs, micro_batches=4)
    program = msgspec.structs.replace(program, pipeline=Pipeline(0, 2, 4, chunks, schedule))
    found = kinds([program])
    assert found <= {"wrong-version", "read-before-write"}
    assert bool(found) == (last_writes(order, uses) != last_writes(own, uses))


@pytest.mark.parametrize(("order", "found"), [("012", set()), ("102", set()), ("021", {"wrong-version"})])
def test_what_makes_new_contents_may_run_in_any_order_but_for_the_last_before_a_read(order: str, found: set[str]) -> None:
    """Backward finds what the last micro-batch's forward made; what it made anew before nobody finds."""
    ops = '#1 %1:float32[4]!"state" = pd_op.full() forward\n#2 %2:float32[4] = pd_op.exp(%1) backward\n'
    jobs = "".join(f"job f{m} forward {m}: 1@{m}\n" for m in order) + "".join(f"job b{m} backward {m}: 2@{m}\n" for m in range(3))
    program = rank(0, ops, jobs, micro_batches=3)
    assert kinds([msgspec.structs.replace(program, pipeline=Pipeline(0, 1, 3, 1, "FThenB"))]) == found


@pytest.mark.parametrize(
    ("jobs", "found"),
    [
        ("job all forward 0: 1-3@0", set()),
        ("job all forward 0: 1@0 3@0 2@0", {"read-before-write"}),
        ("job one forward 0: 1-2@0\njob two forward 0: 3@0", set()),
        ("job one forward 0: 1@0 3@0\njob two forward 0: 2@0", {"read-before-write"}),
        ("job one forward 0: 1@0 3@0", {"read-before-write"}),
    ],
)
def test_a_view_is_made_before_it_is_read(jobs: str, found: set[str]) -> None:
    """What it shows is there, but not the variable that shows it."""
    ops = """
#1 %1:float32[4] = pd_op.exp(%0) forward
#2 %2:float32[2,2]~1 = pd_op.reshape(%1) forward views=0:0
#3 %3:float32[2,2] = pd_op.relu(%2) forward
"""
    programs = [rank(0, ops, jobs)]
    assert kinds(programs) == found
    assert is_unsafe(programs) == bool(found)
    assert all("#2 pd_op.reshape" in finding.message or "no job runs" in finding.message for finding in check(programs))


def test_what_shares_a_variable_may_be_read_before() -> None:
    """`share_data_` gives its operand's variable, which is there."""
    ops = """
#1 %1:float32[4] = pd_op.exp(%0) forward
#2 %2:float32[4]~1 = pd_op.share_data_(%1) forward inplace=0:0
#3 %3:float32[4] = pd_op.relu(%1) forward
#4 %4:float32[4] = pd_op.relu(%2) forward
"""
    assert kinds([rank(0, ops, "job all forward 0: 1@0 3@0 2@0 4@0")]) == set()


def test_nothing_waits_for_itself() -> None:
    ops = "#1 %1:float32[4] = pd_op.relu(%0) forward\n"
    assert kinds([rank(0, ops, 'job all forward 0: 1@0\nevent "e" 1@0 -> 1@0')]) == {"event-order"}


@pytest.mark.parametrize(("first", "found"), [("1@0 ", {"race"}), ("", set())])
def test_of_a_stream_its_first_read_in_the_next_step_is_the_one_to_wait(first: str, found: set[str]) -> None:
    """A parameter is written at the end of the step. A later read of the side stream waits for computation, which is in order."""
    ops = """
#1 %1:float32[4] = pd_op.exp(%0) forward stream="side"
#2 %2:float32[4] = pd_op.full() forward
#3 %3:float32[4] = pd_op.tanh(%0) forward stream="side"
#4 %4:float32[4]~0! = pd_op.relu_(%0) backward inplace=0:0
"""
    jobs = f"job one forward 0: {first}2-3@0\njob two backward 0: 4@0\nevent a 2@0 -> 3@0\nevent b 3@0 -> 4@0"
    assert kinds([rank(0, ops, jobs)]) == found


@pytest.mark.parametrize(("event", "found"), [("", {"race"}), ("event e 2@0 -> 4@0", set())])
def test_a_parameter_is_written_behind_the_readers_of_every_stream(event: str, found: set[str]) -> None:
    """Also of the one between two of computation; in the next step that one waits for computation, which is in order."""
    ops = """
#1 %1:float32[4] = pd_op.exp(%0) forward
#2 %2:float32[4] = pd_op.tanh(%0) forward stream="side"
#3 %3:float32[4] = pd_op.sin(%0) forward
#4 %4:float32[4]~0! = pd_op.relu_(%0) optimize inplace=0:0
"""
    assert kinds([rank(0, ops, f"job one forward 0: 1-3@0\njob o optimizer 0: 4@0\nevent d 1@0 -> 2@0\n{event}")]) == found


def test_what_runs_once_a_step_is_named_with_its_one_producer() -> None:
    """The optimizer's, however many micro-batches there are."""
    ops = """
#1 %1:float32[4] = pd_op.full() forward
#2 %2:float32[4]~0! = pd_op.relu_(%0) optimize inplace=0:0
#3 %3:float32[4] = pd_op.exp(%2) optimize
"""
    program = rank(0, ops, "job f0 forward 0: 1@0\njob f1 forward 1: 1@1\njob o optimizer 0: 3@0 2@0", micro_batches=2)
    (finding,) = check([program])
    assert (finding.kind, [(item.op, item.micro_batch) for item in finding.items]) == ("read-before-write", [(2, 0), (3, 0)])
    assert "#2 pd_op.relu_ of micro-batch 0 on the compute stream comes later in host order" in finding.message


# ------------------------------------------------------------------------------------------------------ partners that differ

MICRO_BATCHES = reduce(1, 7, "a")
HALVES = reduce(1, 7, "a") + reduce(2, 7, "a").replace("forward", "backward")


@pytest.mark.parametrize(
    ("ops", "jobs"),
    [
        (MICRO_BATCHES, ("job all forward 0: 1@0 1@1", "job all forward 0: 1@1 1@0")),
        (HALVES, ("job all forward 0: 1@0 2@0 1@1 2@1", "job all forward 0: 2@0 1@0 1@1 2@1")),
    ],
    ids=["micro-batch", "half of the step"],
)
def test_partners_are_of_one_micro_batch_and_one_half_of_the_step(ops: str, jobs: tuple[str, str]) -> None:
    same, other = ([rank(0, ops, jobs[0], micro_batches=2), rank(1, ops, each, micro_batches=2)] for each in jobs)
    assert kinds(same) == set()
    assert kinds(other) == {"collective-order"}


def test_every_rank_of_a_group_is_compared() -> None:
    third = [rank(k, reduce(1, 7, "a", "all_reduce" if k < 2 else "all_gather"), "job all forward 0: 1@0", 3) for k in range(3)]
    assert kinds(third) == {"collective-order"}
    assert kinds(third[:2]) == set()


def test_a_persistable_variable_is_one_for_all_micro_batches() -> None:
    """Within a job the executor orders what uses one variable, also of several micro-batches; a view is another variable."""
    ops = """
#1 %1:float32[2,2]~0! = pd_op.reshape(%0) forward stream="side" views=0:0
#2 %2:float32[4]~0! = pd_op.relu_(%0) forward stream="side" inplace=0:0
#3 %3:float32[4] = pd_op.exp(%2) forward
#4 %4:float32[4] = pd_op.tanh(%3) forward stream="side"
"""
    straight, apart = "job all forward 0: 1-3@0 1-3@1 4@0 4@1", "job one forward 0: 1-3@0\njob two forward 1: 1-3@1 4@0 4@1"
    goes_on = msgspec.structs.replace(GPU, name="goes on", job_end_waits=False)
    assert kinds([rank(0, ops, straight, micro_batches=2)], goes_on) == set()
    assert kinds([rank(0, ops, apart, micro_batches=2)], goes_on) == {"race"}


def test_of_a_line_the_first_difference_is_told_alone() -> None:
    ranks = [rank(k, reduce(1, 7, "a", "all_gather" if k else "all_reduce"), "job all forward 0: 1@0", 3) for k in range(3)]
    assert [finding.ranks for finding in check(ranks, GPU)] == [(0, 1)]


@pytest.mark.parametrize(("origin", "found"), [(0, set()), (2, set()), (-1, {"race"})])
def test_a_copy_to_the_host_holds_the_host_where_it_is_one_of_the_programs_own(origin: int, found: set[str]) -> None:
    """Whichever: what a pass added is a copy of the device's. What is issued behind it runs when all before it on its stream has."""
    ops = f"""
#1 %1:float32[4] = pd_op.exp(%0) forward stream="side"
#2 %2:float32[4]^pinned = pd_op.memcpy_d2h(%1) forward stream="side" origin={origin} {{"dst_place_type":2}}
#3 %3:float32[4]~0! = pd_op.relu_(%0) backward inplace=0:0
#4 %4:float32[4] = pd_op.exp(%1) backward stream="side"
"""
    jobs = "job one forward 0: 1-2@0\njob two backward 0: 3-4@0\nevent e 3@0 -> 4@0"
    assert kinds([rank(0, ops, jobs)]) == found


@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("origin", [0, 4])
@pytest.mark.parametrize(
    ("copied", "jobs", "lost"),
    [
        (2, ("1 2 3 4", "5"), False),
        (2, ("1 2", "3 4", "5"), True),
        (0, ("1 3", "4 5"), True),
        (2, ("1 3", "2 4 5"), False),
    ],
    ids=["own job", "another job", "a parameter", "last job"],
)
def test_a_copy_to_the_host_waits_where_its_operand_is_computed_in_its_job(
    copied: int, jobs: tuple[str, ...], lost: bool, origin: int, micro_batch: int
) -> None:
    """Computation behind the copy overwrites what the event's operation reads."""
    ops = f"""
#1 %1:float32[4] = pd_op.tanh(%0) forward
#2 %2:float32[4] = pd_op.exp(%0) forward
#3 %3:float32[4] = pd_op.relu(%1) forward stream="side"
#4 %4:float32[4]^pinned = pd_op.memcpy_d2h(%{copied}) forward origin={origin} {{"dst_place_type":2}}
#5 %5:float32[4]~1 = pd_op.relu_(%1) backward inplace=0:0
"""
    text = "".join(f"job j{k} forward 0: {' '.join(f'{op}@0' for op in job.split())}\n" for k, job in enumerate(jobs))
    text = f"{text}event d 1@0 -> 3@0\nevent e 3@0 -> 4@0".replace("@0", f"@{micro_batch}")
    assert kinds([rank(0, ops, text, micro_batches=2)]) == ({"race", "freed-in-use"} if lost else set())


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        (reduce(1, 7, "a", dims="-1"), reduce(1, 7, "a"), set()),
        (reduce(1, 7, "a", operand=2, dims="-1"), reduce(1, 7, "a", "all_gather", operand=2), {"collective-order"}),
        (reduce(1, 7, "a", "broadcast", more=' {"root":0}'), reduce(1, 7, "a", "broadcast", more=' {"root":1}'), {"collective-order"}),
        (reduce(1, 7, "a", "broadcast", more=' {"root":1}'), reduce(1, 7, "a", "broadcast", more=' {"root":1}'), set()),
        (reduce(1, 7, "a", "margin_cross_entropy", operand=3), reduce(1, 7, "a", "margin_cross_entropy"), set()),
        (reduce(1, 7, "a", "all_reduce", operand=3), reduce(1, 7, "a", "all_reduce"), {"collective-order"}),
        (reduce(1, 7, "a", operand="3, %0"), reduce(1, 7, "a", operand="0, %0"), {"collective-order"}),
        (reduce(1, 7, "a", operand="0, %3"), reduce(1, 7, "a", operand="0, %0"), set()),
    ],
    ids=[
        "unknown size",
        "unknown size of another kind",
        "another root",
        "one root",
        "a kind of uneven sizes",
        "another size",
        "another first operand",
        "another last operand",
    ],
)
def test_what_partners_must_agree_on(left: str, right: str, found: set[str]) -> None:
    made = "#2 %2:float32[-1] = pd_op.relu(%0) forward\n#3 %3:float32[8] = pd_op.relu(%0) forward\n"
    programs = [rank(k, made + ops, "job all forward 0: 2-3@0 1@0") for k, ops in enumerate((left, right))]
    assert kinds(programs) == found


UNEVEN = ["margin_cross_entropy", "class_center_sample", "global_gather", "global_scatter"]


@pytest.mark.parametrize("kind", [*UNEVEN, *(f"{kind}_grad" for kind in UNEVEN if kind != "class_center_sample")])
def test_ranks_may_pass_tensors_of_other_sizes_to_these(kind: str) -> None:
    """Classes, or tokens of an expert, of which each rank has its own number."""
    sizes = [
        reduce(1, 7, "a", kind, operand=2, dims=dims).replace("#1", f"#2 %2:float32[{dims}] = pd_op.full() forward\n#1") for dims in "48"
    ]
    assert kinds([rank(k, ops, "job all forward 0: 2@0 1@0") for k, ops in enumerate(sizes)]) == set()


def test_each_difference_is_told_with_its_own_calls() -> None:
    ops = [reduce(1, 7, "a", name) + reduce(2, 8, "b", name) for name in ("all_reduce", "all_gather")]
    found = check([rank(k, each, "job all forward 0: 1-2@0") for k, each in enumerate(ops)])
    texts = {finding.message.partition(" of ranks")[0]: finding.message for finding in found}
    assert "#1 pd_op" in texts["group 7"]
    assert "#2 pd_op" not in texts["group 7"]
    assert "#2 pd_op" in texts["group 8"]
    assert "#1 pd_op" not in texts["group 8"]


def test_a_group_that_is_not_listed_is_a_finding() -> None:
    program = rank(0, reduce(1, 5, "a"), "job all forward 0: 1@0")
    assert kinds([program]) == {"wrong-group"}


@pytest.mark.parametrize("number", [0, 1])
def test_a_message_without_a_peer_goes_to_nobody(number: int) -> None:
    (finding,) = wrong_groups(rank(number, '#1 pd_op.send_v2(%0) forward group=7 stream="a"', "job all forward 0: 1@0"))
    assert "no member number -1" in finding.message
    assert [(item.op, item.micro_batch) for item in finding.items] == [(1, 0)]


def test_calls_of_two_rings_on_one_stream_are_told_once() -> None:
    """The first call of each, in the first micro-batch; kinds that find their ring by its id are none of them."""
    ops = reduce(1, 6, "a", "c_allreduce_sum") + reduce(2, 7, "a") + reduce(3, 7, "a") + reduce(4, 8, "a") + reduce(5, 9, "a")
    (finding,) = shared_streams(rank(0, ops, "job all forward 0: 1-5@0 1-5@1", micro_batches=2))
    assert [(item.op, item.micro_batch) for item in finding.items] == [(2, 0), (4, 0)]
    assert "groups 7 and 8 share a stream" in finding.message


def test_a_circle_of_ranks_alike_is_looked_at_rank_by_rank() -> None:
    """Ranks 0 and 1 run the same calls on other rings: the second of rank 0 is the first of rank 1, which is no circle. A buffered
    message of what never was suspected comes behind them."""
    ops = reduce(1, 6, "a") + reduce(2, 7, "a") + '#3 %3:float32[4] = pd_op.recv_v2() forward group=8 stream="a" {"peer":1}\n'
    sends = '#1 pd_op.send_v2(%0) forward group=8 stream="a" {"peer":0}\n'
    given = [
        (ops, "6 = 0,2", "7 = 0,1", "8 = 0,2"),
        (ops, "6 = 0,1", "7 = 1,3", "8 = 1,3"),
        (sends + reduce(2, 6, "a"), "6 = 0,2", "8 = 0,2"),
        (sends + reduce(2, 7, "a"), "7 = 1,3", "8 = 1,3"),
    ]
    programs = [
        rank(k, text, f"job all forward 0: 1-{3 - k // 2}@0", 4, "".join(f"group {group}\n" for group in groups))
        for k, (text, *groups) in enumerate(given)
    ]
    assert kinds(programs, msgspec.structs.replace(GPU, name="buffers", p2p_buffer_bytes=1024)) == set()


def test_a_circle_is_told_by_what_never_starts_alone() -> None:
    """Its calls wait for others as well, which are a circle only where ranks that do the same count as one, and start."""
    ops = "".join(reduce(number, group, "a") for number, group in enumerate((6, 7, 8, 9), 1))
    given = [
        (ops, {6: (0, 2), 7: (0, 1), 8: (0, 2), 9: (0, 2)}),
        (ops, {6: (0, 1), 7: (1, 3), 8: (1, 3), 9: (1, 3)}),
        (reduce(1, 6, "a") + reduce(2, 9, "a") + reduce(3, 8, "a"), {6: (0, 2), 8: (0, 2), 9: (0, 2)}),
        (reduce(1, 7, "a") + reduce(2, 9, "a") + reduce(3, 8, "a"), {7: (1, 3), 8: (1, 3), 9: (1, 3)}),
    ]
    programs = [
        rank(k, text, f"job all forward 0: 1-{4 - k // 2}@0", 4, "".join(f"group {n} = {a},{b}\n" for n, (a, b) in groups.items()))
        for k, (text, groups) in enumerate(given)
    ]
    (finding,) = (each for each in check(programs) if each.kind != "shared-stream")
    assert finding.kind == "deadlock"
    assert "4 communications never start" in finding.remedy
    assert {item.op for item in finding.items} <= {3, 4} | {2, 3}
    assert len({item.rank for item in finding.items} & {0, 1}) == len({item.rank for item in finding.items} & {2, 3}) == 1


# --------------------------------------------------------------------------------------------------------------- one rank

ACROSS = """
#1 %1:float32[4] = pd_op.relu(%0) forward stream="side"
#2 %2:float32[4] = pd_op.gelu(%1) forward
"""
TWO_JOBS = "job one forward 0: 1@0\njob two forward 0: 2@0\n"


def test_a_rank_that_differs_in_its_events_only_is_walked_by_itself() -> None:
    with_event, without = (rank(k, ACROSS, TWO_JOBS + event) for k, event in enumerate(('event "e" 1@0 -> 2@0', "")))
    assert {finding.ranks for finding in check([with_event, without])} == {(1,)}


SHARED = """
#1 %1:float32[4] = pd_op.full() forward
#2 %2:float32[4] = pd_op.relu(%0) forward stream="side"
#3 %3:float32[4] = pd_op.gelu(%1) forward stream="side"
#4 %4:float32[4] = pd_op.tanh(%1) forward
"""
"""A block of compute that a side stream reads with `#3`, and that compute reads last."""


@pytest.mark.parametrize(("events", "found"), [('event "e" 2@0 -> 4@0', {"freed-in-use"}), ('event "e" 3@0 -> 4@0', set())])
def test_an_earlier_operation_of_a_stream_does_not_speak_for_a_later_one(events: str, found: set[str]) -> None:
    assert kinds([rank(0, SHARED, f"job all forward 0: 1-4@0\n{events}")]) == found


def test_a_block_goes_to_the_next_operation_of_its_stream_not_to_one_that_has_waited() -> None:
    """Compute waits for the side stream with `#6`, but `#5` in front of it may have the block already."""
    late = SHARED + "#5 %5:float32[4] = pd_op.exp(%0) forward\n#6 %6:float32[4] = pd_op.add(%3, %2) forward"
    assert kinds([rank(0, late, "job all forward 0: 1-6@0")]) == {"freed-in-use"}
    assert kinds([rank(0, late, "job all forward 0: 1-4@0 6@0 5@0")]) == set()


def test_the_last_reader_of_each_variable_is_noted() -> None:
    """The side stream is the last to read the view, compute the last to read what it is a view of."""
    beside = '#2 %2:float32[4] = pd_op.relu(%0) forward stream="side"'
    view = SHARED.replace(beside, "#2 %2:float32[4]~1 = pd_op.reshape(%1) forward views=0:0")
    assert kinds([rank(0, view.replace("gelu(%1)", "gelu(%2)"), "job all forward 0: 1-4@0")]) == set()
    assert kinds([rank(0, view, "job all forward 0: 1-4@0")]) == {"freed-in-use"}


def test_what_is_written_in_place_is_the_same_variable() -> None:
    """Its last reader is compute; that a side stream wrote it is noted nowhere, and so is the side stream's later read."""
    ops = """
#1 %1:float32[4] = pd_op.full() forward
#2 %2:float32[4]~1 = pd_op.add_(%1, %0) forward inplace=0:0 stream="side"
#3 %3:float32[4] = pd_op.gelu(%2) forward stream="side"
#4 %4:float32[4] = pd_op.tanh(%2) forward
"""
    assert kinds([rank(0, ops, "job all forward 0: 1-4@0")]) == {"freed-in-use"}


HELD = """
#1 %1:float32[4] = pd_op.gelu(%0) forward
#2 %2:float32[4] = pd_op.relu(%0) forward stream="side"
#3 %3:float32[4] = pd_op.tanh(%{}) forward{}
"""


def test_a_wait_of_the_host_orders_what_it_waits_for_and_nothing_else() -> None:
    """Behind `#2` the host waits for `#1`: a later job may read that on any stream, but not what `#2` gives."""
    jobs = "job one forward 0: 1-2@0{}\njob two forward 0: 3@0"
    wait = jobs.format(" | 2@0<1@0")
    of_awaited, of_behind = HELD.format(1, ' stream="side"'), HELD.format(2, "")
    assert kinds([rank(0, of_awaited, wait)]) == set()
    assert kinds([rank(0, of_awaited, jobs.format(""))]) != set()
    assert kinds([rank(0, of_awaited, wait)], msgspec.structs.replace(GPU, name="never held", host_runs_ahead=False)) != set()
    assert kinds([rank(0, of_behind, wait)]) != set()


def test_a_copy_to_the_host_holds_the_host_till_it_is_over() -> None:
    """What stands in front of it on its stream is over then, too."""
    copy = '#2 %2:float32[4]^host = pd_op.memcpy_d2h(%1) forward {"dst_place_type":0}\n'
    ops = '#1 %1:float32[4] = pd_op.gelu(%0) forward\n{}#3 %3:float32[4] = pd_op.tanh(%1) forward stream="side"\n'
    assert kinds([rank(0, ops.format(copy), "job one forward 0: 1-2@0\njob two forward 0: 3@0")]) == set()
    assert kinds([rank(0, ops.format(""), "job one forward 0: 1@0\njob two forward 0: 3@0")]) != set()


def test_a_view_orders_its_readers_in_its_own_job_only() -> None:
    ops = """
#1 %1:float32[4] = pd_op.gelu(%0) forward stream="side"
#2 %2:float32[4]~1 = pd_op.reshape(%1) forward views=0:0 stream="side"
#3 %3:float32[4] = pd_op.tanh(%2) forward
"""
    assert kinds([rank(0, ops, "job all forward 0: 1-3@0")]) == set()
    assert kinds([rank(0, ops, "job one forward 0: 1-2@0\njob two forward 0: 3@0")]) != set()


def test_the_parts_of_a_split_are_apart() -> None:
    """Compute overwrites the first while a side stream reads the second, in another job."""
    ops = """
#1 %1:vector<float32[2];float32[2]> = pd_op.split_with_num(%0) forward
#2 %2:float32[2], %3:float32[2] = builtin.split(%1) forward
#3 %4:float32[2] = pd_op.gelu(%3) forward stream="side"
#4 %5:float32[2]~{} = pd_op.relu_(%{}) forward inplace=0:0
#5 %6:float32[2] = pd_op.add(%5, %4) forward
"""
    jobs = 'job one forward 0: 1-3@0\njob two forward 0: 4-5@0\nevent "e" 3@0 -> 5@0'
    assert kinds([rank(0, ops.format(2, 2), jobs)]) == set()
    assert kinds([rank(0, ops.format(3, 3), jobs)]) != set()


STATE = """
#1 %1:float32[4]!"s" = builtin.parameter() forward
#2 %2:float32[4] = pd_op.relu(%1) forward{}
#3 %3:float32[4] = pd_op.gelu(%1) forward{}
#4 %4:float32[4]~1! = pd_op.add_(%1, %0) backward inplace=0:0{}
"""
A, B = ' stream="a"', ' stream="b"'


def told(streams: tuple[str, str, str], jobs: str) -> str:
    """All that is found of the three operations on these streams."""
    return "\n".join(finding.message for finding in check([rank(0, STATE.format(*streams), jobs)]))


@pytest.mark.parametrize("unordered", [(), (2,), (3,), (2, 3)])
def test_a_write_waits_for_the_readers_of_every_stream(unordered: tuple[int, ...]) -> None:
    """In another job nothing but events orders them."""
    events = "".join(f'event "e{k}" {k}@0 -> 4@0\n' for k in (2, 3) if k not in unordered)
    found = told((A, B, ""), f"job one forward 0: 2-3@0\njob two backward 0: 4@0\n{events}")
    names = {2: "#2 pd_op.relu of micro-batch 0 on stream 'a'", 3: "#3 pd_op.gelu of micro-batch 0 on stream 'b'"}
    assert [k for k, name in names.items() if f"may overwrite %1 's' while {name} still uses it" in found] == list(unordered)


def test_the_next_step_reads_what_this_one_wrote() -> None:
    """Where the write runs beside compute in a later job nothing orders that read; in the same job the job's own last run does."""
    apart = told(("", "", A), 'job one forward 0: 2-3@0\njob two backward 0: 4@0\nevent "e" 3@0 -> 4@0')
    assert "of the next step may read %1 's' before #4" in apart
    assert told(("", "", A), "job all forward 0: 2-4@0") == ""


# --------------------------------------------------------------------------------------------------------- fused buffers

FUSED = """
#1 %1:float32[4]!"g" = builtin.kwarg() forward
#2 %2:float32[2]!"h" = builtin.kwarg() forward
#3 %3:vector<float32[4];float32[2]> = builtin.combine(%1, %2) optimize
#4 %4:vector<float32[4];float32[2]>~3, %5:float32[6]! = pd_op.coalesce_tensor_(%3) optimize inplace=0:0
#5 %6:float32[6] = pd_op.scale(%5) optimize{stream}
#6 %7:float32[4]~1 = pd_op.scale_(%1) optimize inplace=0:0
"""
"""Gradients are put into a buffer; the buffer is read (reduced, in a program), and a gradient is cleared, which lies in the buffer."""


@pytest.mark.parametrize(
    ("stream", "jobs", "found"),
    [
        ("", "job all optimizer 0: 3-6@0", set()),
        ("", "job all optimizer 0: 3-4@0 6@0 5@0", {"wrong-version"}),
        (' stream="a"', "job first optimizer 0: 3-5@0\njob second optimizer 0: 6@0", {"race"}),
        (' stream="a"', 'job first optimizer 0: 3-5@0\njob second optimizer 0: 6@0\nevent "e" 5@0 -> 6@0', set()),
    ],
)
def test_clearing_a_part_of_a_fused_buffer_writes_the_buffer(stream: str, jobs: str, found: set[str]) -> None:
    assert kinds([rank(0, FUSED.format(stream=stream), jobs, world=1, groups="group 6 = 0\n")]) == found


@pytest.mark.parametrize(("jobs", "found"), [("1@1 2@1", set()), ("2@1 1@1", {"read-before-write"})])
def test_what_launches_nothing_gives_its_result_in_its_own_micro_batch(jobs: str, found: set[str]) -> None:
    """A shape, which the host makes, is there for the micro-batch that made it."""
    ops = """
#1 %1:int64[1] = pd_op.full_int_array() forward {"value":[4]}
#2 %2:float32[4] = pd_op.expand(%0, %1) forward
#3 %3:float32[4] = pd_op.expand(%0, %1) forward
"""
    assert kinds([rank(0, ops, f"job a forward 0: 1@0 2@0 3@0\njob b forward 1: {jobs} 3@1", micro_batches=2)]) == found


def test_at_the_end_of_a_job_the_host_has_waited_for_computation_where_the_target_does() -> None:
    """What the next job issues on any stream comes behind it; of side streams the host knows nothing."""
    waiting = msgspec.structs.replace(GPU, name="waiting", job_end_waits=True)
    ops = """
#1 %1:float32[4] = pd_op.relu(%0) forward{}
#2 %2:float32[4] = pd_op.exp(%1) forward{}
#3 %3:float32[4] = pd_op.exp(%2) forward
"""
    for streams, found in ((("", ' stream="side"'), set()), ((' stream="side"', ""), {"race"})):
        plan = [rank(0, ops.format(*streams), "job a forward 0: 1@0\njob b forward 0: 2-3@0")]
        assert "race" in kinds(plan)
        assert kinds(plan, waiting) & {"race"} == found


def test_host_buffers_hide_nothing_that_is_freed_early() -> None:
    """A pinned buffer, which two streams use first, lasts; what comes behind it is looked at all the same."""
    copies = """
#7 %7:float32[4]^pinned = pd_op.memcpy_d2h(%0) forward stream="copies" {"dst_place_type":1}
#8 %8:float32[4] = pd_op.memcpy_h2d(%7) forward {"dst_place_type":1}
"""
    events = 'event "copied" 7@0 -> 8@0\nevent "e" 2@0 -> 4@0'
    assert kinds([rank(0, SHARED + copies, f"job all forward 0: 7-8@0 1-4@0\n{events}")]) == {"freed-in-use"}
    assert kinds([rank(0, SHARED + copies, f"job all forward 0: 7-8@0 1-4@0\n{events.replace('2@0', '3@0')}")]) == set()


def test_a_circle_is_told_by_the_event_that_brings_it_among_others() -> None:
    """The second call waits for two events; that of a stream which has nothing to do with the first call leads nowhere."""
    ops = '#3 %3:float32[4] = pd_op.relu(%0) forward stream="c"\n' + reduce(1, 7, "a") + reduce(2, 8, "b")
    events = 'event "none" 3@0 -> 2@0\nevent "brings" 1@0 -> 2@0'
    programs = [
        rank(0, ops, f"job all forward 0: 3@0 1@0 2@0\n{events}"),
        rank(1, reduce(1, 8, "a") + reduce(2, 7, "a"), "job all forward 0: 1-2@0"),
    ]
    (finding,) = [each for each in check(programs, GPU) if each.kind == "deadlock"]
    assert '(through event "brings" to #2 pd_op.all_reduce)' in finding.message


def test_the_same_operations_in_another_pipeline_are_read_anew() -> None:
    """What was worked out for one micro-batch says nothing of two."""
    once = rank(0, '#1 %1:float32[4] = pd_op.relu(%0) forward stream="s"\n#2 %2:float32[4] = pd_op.exp(%1) forward', "job a forward 0: 1@0")
    assert check([once]) == []
    twice = rank(0, "", "job a forward 0: 1@0\njob b forward 1: 1@1\njob c forward 0: 2@0\njob d forward 1: 2@1", micro_batches=2)
    changed = msgspec.structs.replace(once, jobs=twice.jobs, pipeline=twice.pipeline)
    found = check([changed])
    assert [str(each) for each in found] == [str(each) for each in check([parse(show(changed))])] != []
