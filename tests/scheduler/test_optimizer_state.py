"""Optimizer state that stays on the host: what is chosen, when it is copied, and that nothing reads a buffer that is being written, in this
step or the next."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from interlace.cost_model import GivenCosts
from interlace.ir import Op, Program, parse, show
from interlace.ir.copies import fills_memory
from interlace.ir.target import CPU, CUSTOM, GPU
from interlace.passes import ExtendLifetimes, InsertEvents, NameStreams, OffloadOptimizerState, Pipeline, Schedule1F1B
from interlace.scheduler.hazards import check
from interlace.scheduler.memory.live import in_order, order_peak
from interlace.scheduler.offload.optimizer_state import StateOptions, find_states, measure_states, plan_states
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import last_end, simulate
from tests.closure import is_unsafe
from tests.interpreter import assert_same
from tests.scheduler.updated import LAYERS, trained

BYTES = 4 * 256
COSTS = GivenCosts({"copy": 40, "matmul": 100, "default": 10})
TAIL = (NameStreams(), ExtendLifetimes(), InsertEvents())


def planned(limit: int | None = None, fraction: float | None = 1.0, layers: int = LAYERS) -> Program:
    offload = OffloadOptimizerState(fraction=fraction, min_bytes=64)
    return Pipeline((Schedule1F1B(interleave="off"), offload, *TAIL)).run(trained(layers), COSTS, limit)[0]


def with_room(values: int) -> Program:
    """A plan with room for so many moments on the device during the updates."""
    beside = in_order(planned()).persistable_bytes() + 2 * BYTES  # `y` of two micro-batches
    return planned(beside + values * BYTES + BYTES // 4)


def plain() -> Program:
    return Pipeline((Schedule1F1B(interleave="off"), *TAIL)).run(trained(), COSTS)[0]


# ------------------------------------------------------------------------------------------------------------------- choice


def test_what_only_the_optimizer_part_uses_can_move() -> None:
    program = trained()
    names = {value.id: value.name for value in program.values}
    states, kept = find_states(program)
    assert {names[state.value] for state in states} == {"rate", *(f"{name}{k}" for name in "mc" for k in range(LAYERS))}
    assert not kept
    assert {state.layer for state in states if names[state.value] == "m2"} == {"layers.2"}


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({"min_bytes": 64}, ["m0", "m1", "m2", "m3"]),
        ({"min_bytes": 64, "fraction": 0.5}, ["m2", "m3"]),
        ({"min_bytes": 64, "fraction": 0.0}, []),
        ({"min_bytes": 64, "modules": ("layers.1",)}, ["m1"]),
        ({"min_bytes": BYTES + 1}, []),
    ],
)
def test_options_say_what_moves(options: dict[str, object], moved: list[str]) -> None:
    program = Pipeline((Schedule1F1B(interleave="off"),)).run(trained(), COSTS)[0]
    names = {value.id: value.name for value in program.values}
    plan = plan_states(program, measure_states(program, COSTS), StateOptions(**options))  # type: ignore[arg-type]
    assert [names[move.state.value] for move in plan.moves] == moved
    assert sum(each.size_bytes for each in plan.kept) + plan.moved_bytes == sum(s.size_bytes for s in find_states(program)[0])


def test_a_limit_moves_the_least_that_keeps_it() -> None:
    before = order_peak(plain())
    for layers_moved in range(LAYERS + 1):
        limit = before - layers_moved * BYTES
        made = planned(limit, fraction=None)
        there = [value for value in made.values if value.persistable and value.memory == "pinned"]
        assert len(there) == layers_moved
        assert order_peak(made) <= limit


# ------------------------------------------------------------------------------------------------------------------ rewrite


def test_values_keep_their_names_and_bits_and_leave_the_device_between_updates() -> None:
    before, after = plain(), planned()
    names = {value.name for value in after.values if value.memory == "pinned" and value.name}
    assert names == {f"m{k}" for k in range(LAYERS)}
    assert in_order(before).persistable_bytes() - in_order(after).persistable_bytes() == LAYERS * BYTES
    assert in_order(after).persistable_bytes("pinned") == LAYERS * BYTES
    assert parse(show(after)) == after
    assert_same([before], [after], 3)


# -------------------------------------------------------------------------------------------------------------------- proof


def _copies(program: Program) -> tuple[list[int], list[int], int]:
    """Copies in and out in program order, and the constant at the start of the step on the stream of copies out."""
    ins = [op.id for op in program.ops if op.kind == "memcpy_h2d"]
    outs = [op.id for op in program.ops if fills_memory(op)]
    return ins, outs, next(op.id for op in program.ops if op.kind == "full" and op.stream)


def _ordered(program: Program, change: Callable[[list[tuple[int, int]]], None], job: int) -> Program:
    items = list(program.jobs[job].items)
    change(items)
    jobs = list(program.jobs)
    jobs[job] = msgspec.structs.replace(jobs[job], items=tuple(items))
    index = {item: k for k, item in enumerate(item for each in jobs for item in each.items)}
    events = [
        msgspec.structs.replace(event, waits=tuple(wait for wait in event.waits if index.get(event.record, 1 << 30) < index[wait]))
        for event in program.events
        if event.record in index
    ]
    return msgspec.structs.replace(program, jobs=tuple(jobs), events=tuple(event for event in events if event.waits))


def _moved(program: Program, item: tuple[int, int]) -> Program:
    """With an op instance at the end of the last job in place of where it is, and without its events."""
    events = tuple(event for event in program.events if item not in (event.record, *event.waits))
    program = msgspec.structs.replace(program, events=events)
    jobs = [msgspec.structs.replace(each, items=tuple(i for i in each.items if i != item)) for each in program.jobs]
    jobs[-1] = msgspec.structs.replace(jobs[-1], items=(*jobs[-1].items, item))
    return msgspec.structs.replace(program, jobs=tuple(jobs))


def _without(program: Program, gone: Callable[[Op], bool]) -> Program:
    """Without some operations that only let a stream wait."""
    there = {op.id for op in program.ops if not gone(op)}
    jobs = tuple(msgspec.structs.replace(job, items=tuple(item for item in job.items if item[0] in there)) for job in program.jobs)
    ops = [op for op in program.ops if op.id in there]
    made = {value for op in ops for value in op.results}
    program = program.with_ops(ops, [value for value in program.values if value.id in made])
    return msgspec.structs.replace(program, jobs=jobs)


def _is_order(program: Program) -> Callable[[Op], bool]:
    """Whether an operation makes the stream of copies in wait for copies out: it reads a constant there."""
    constants = {value for op in program.ops if op.kind == "full" for value in op.results}
    return lambda op: op.kind == "share_data" and bool(op.stream) and constants.issuperset(op.operands)


def _nothing_orders_copies_in_behind_copies_out(program: Program) -> Program:
    return _without(program, _is_order(program))


def _memory_given_back_before_the_copy_out(program: Program) -> Program:
    """The first to come back, whose memory the next one takes, while its copy out may still read it."""
    orders = [op.id for op in program.ops if _is_order(program)(op)]
    index = {item[0]: k for k, item in enumerate(item for job in program.jobs for item in job.items)}
    second = sorted(orders, key=index.__getitem__)[1]  # the first is that of the step before
    return _without(program, lambda op: op.id == second)


def _copy_out_on_another_stream(program: Program) -> Program:
    _, outs, _ = _copies(program)
    return program.with_ops([msgspec.structs.replace(op, stream="other") if op.id == outs[-1] else op for op in program.ops])


def _copy_out_before_the_update(program: Program) -> Program:
    _, outs, _ = _copies(program)

    def change(items: list[tuple[int, int]]) -> None:
        at = items.index((outs[1], 0))
        items[at - 1], items[at] = items[at], items[at - 1]

    return _ordered(program, change, len(program.jobs) - 1)


def _copy_in_behind_the_update(program: Program) -> Program:
    ins, _, _ = _copies(program)
    return _moved(program, (ins[-1], 0))


def _two_in_one_buffer(program: Program) -> Program:
    first, second = [v.storage for v in program.values if v.memory == "pinned" and v.name][:2]
    values = [msgspec.structs.replace(v, storage=first) if v.storage == second else v for v in program.values]
    return program.with_ops(program.ops, values)


def _update_reads_the_host_buffer_late(program: Program) -> Program:
    """The wait that orders a copy in before an update that is in another job."""
    ins, _, _ = _copies(program)
    return msgspec.structs.replace(program, events=tuple(event for event in program.events if event.record[0] not in ins))


FAULTS = [
    _nothing_orders_copies_in_behind_copies_out,
    _memory_given_back_before_the_copy_out,
    _copy_out_on_another_stream,
    _copy_out_before_the_update,
    _copy_in_behind_the_update,
    _two_in_one_buffer,
    _update_reads_the_host_buffer_late,
]


@pytest.mark.parametrize("target", [CPU, CUSTOM, GPU], ids=lambda target: target.name)
def test_plans_are_safe_over_two_steps(target: object) -> None:
    for limit in (None, order_peak(plain()) - 2 * BYTES, order_peak(planned())):
        assert check([planned(limit, fraction=1.0)], target) == []  # type: ignore[arg-type]


def test_the_oracle_agrees() -> None:
    assert not is_unsafe([planned()])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_planted_faults_are_found_by_checker_and_oracle(fault: Callable[[Program], Program]) -> None:
    wrong = fault(with_room(2))
    assert wrong != with_room(2)
    assert is_unsafe([wrong])
    assert check([wrong])


def test_the_stream_of_copies_in_orders_the_steps() -> None:
    """It waits for copies out of the step before, first of all; computation and the host wait for no copy out."""
    made = planned()
    ins, outs, mark = _copies(made)
    items = [item for job in made.jobs for item in job.items]
    stream = {op.id: op.stream for op in made.ops}
    own = [op_id for op_id, _ in items if stream[op_id] == stream[ins[0]]]
    (first,) = [op for op in made.ops if op.id == own[0]]
    assert made.ops[[op.id for op in made.ops].index(mark)].results == first.operands
    assert not [event for event in made.events if event.record[0] in outs]
    assert not [wait for job in made.jobs for wait in job.host_waits]


# --------------------------------------------------------------------------------------------------------------------- time


def test_copies_out_run_beneath_the_next_steps_forward() -> None:
    """The step ends with its computation; what is left of the copies takes their stream, and memory, in the next step."""
    slow = GivenCosts({"copy": 400, "matmul": 100, "default": 10})
    before, after = (simulate([program], slow, Options.of(GPU, peers_ready=True), target=GPU) for program in (plain(), planned()))
    assert int(after.times.end.max()) > after.step_ns == last_end(after.input, after.times.end)
    left = int(after.times.end.max()) - after.step_ns
    mark = int(after.input.mark[0])  # type: ignore[index]
    assert after.times.end[mark] - after.times.start[mark] >= left
    ranks = after.ranks[0]
    assert ranks.step_ns == ranks.compute_ns + ranks.exposed_comm_ns + ranks.bubble_ns + ranks.host_ns
    assert before.step_ns < after.step_ns  # copies that long cannot all be hidden


@pytest.mark.parametrize("copy_ns", [1, 40, 4000])
@pytest.mark.parametrize("room", [0, BYTES, 2 * BYTES, 3 * BYTES])
def test_what_a_rank_holds_does_not_depend_on_how_long_copies_take(copy_ns: int, room: int) -> None:
    """The plan is made for copies of 40 ns."""
    limit = order_peak(planned()) + room
    made = planned(limit)
    assert order_peak(made) <= limit
    found = simulate([made], GivenCosts({"copy": copy_ns, "matmul": 100, "default": 10}), Options.of(GPU, peers_ready=True), target=GPU)
    constants = sum(op.kind == "full" for op in made.ops)
    assert found.memory[0].peak() <= limit + 4 * constants


def test_room_lets_copies_in_come_before_others_have_left() -> None:
    def number(room: int) -> int:
        """Of pairs of which one has left before the other comes."""
        made = with_room(room)
        ins, outs, _ = _copies(made)
        index = {item[0]: k for k, item in enumerate(item for job in made.jobs for item in job.items)}
        return sum(index[out] < index[copy] for out in outs for copy in ins)

    assert [number(room) for room in range(1, LAYERS + 1)] == [6, 3, 1, 0]
