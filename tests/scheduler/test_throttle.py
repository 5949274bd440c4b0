"""Where the host waits for the device, and what that does to memory, times and safety."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.errors import PlanError
from interlace.ir import Program, parse, show, verify
from interlace.ir.target import GPU, Target
from interlace.ir.waits import computes
from interlace.passes import Pipeline, ThrottleHost
from interlace.scheduler.hazards import check
from interlace.scheduler.host_waits.throttle import (
    HostSync,
    _Alone,
    _Search,
    gpu_peak,
    jobs_with_side_work,
    plan_host_syncs,
    sync_at_job_ends,
    sync_at_outputs,
    with_host_syncs,
)
from interlace.scheduler.host_waits.waits_at_peaks import waits_at_peaks
from interlace.scheduler.memory import live as memory
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import Result, Times, simulate
from tests.default_passes import STREAMS, THROTTLED
from tests.scheduler.plans import Shape, shapes, world
from tests.scheduler.run_ahead import MICRO_BATCHES, run_ahead_program
from tests.strategies import World, plan, worlds
from tests.together import programs_of, together

ALONE = Options(peers_ready=True)
COST = GivenCosts({"comm": 400, "gemm": 1000, "default": 50}, host_ns=1, job_ns=2)
BLOCK = 4 << 20


def peak(program: Program, target: Target = GPU) -> int:
    return simulate([program], COST, ALONE, target=target).ranks[0].peak_bytes


def test_run_ahead_doubles_the_peak_and_auto_brings_it_down() -> None:
    """Measured peaks, memory budget. Free, the sums and products of all micro-batches are there at once; held, those of two at most."""
    program = run_ahead_program()
    serial, free = memory.in_order(program).peak(), peak(program)
    assert free - serial >= 2 * (MICRO_BATCHES - 2) * BLOCK
    planned, (*_, report) = Pipeline((*STREAMS, ThrottleHost(run_ahead_bytes=BLOCK))).run(program, COST)
    assert any(job.host_waits for job in planned.jobs)
    assert peak(planned) <= serial + 3 * BLOCK < free // 2
    assert gpu_peak(planned, COST) <= serial + 3 * BLOCK
    assert simulate([planned], COST, ALONE).step_ns <= 1.05 * simulate([program], COST, ALONE).step_ns
    (waits,) = report.remarks
    assert waits.rule == "waits-inside-jobs"
    assert (waits.numbers["free_bytes"], waits.numbers["throttled_bytes"]) == (gpu_peak(program, COST), gpu_peak(planned, COST))
    off, _ = Pipeline(STREAMS).run(program, COST)
    assert off.jobs == program.jobs
    on, _ = Pipeline((*STREAMS, ThrottleHost(syncs="job-ends"))).run(program, COST)
    assert [job.host_waits for job in on.jobs] == [*(((((5, m), (5, m))),) for m in range(MICRO_BATCHES - 1)), ()]


def test_small_blocks_hold_nobody() -> None:
    """Run-ahead within run_ahead_bytes costs no wait, and the report says why."""
    planned, (*_, report) = Pipeline(THROTTLED).run(run_ahead_program(), COST)
    assert not any(job.host_waits for job in planned.jobs)
    (told,) = report.declined
    assert told.rule == "few-side-bytes"
    assert told.numbers == {"side_bytes": 2 * MICRO_BATCHES * BLOCK, "run_ahead_bytes": 256 << 20}
    alone = plan_host_syncs(world(Shape(1, 1, 2, 2))[0], COST, 0)
    assert (alone.count, alone.reason) == (0, "no-side-work")


def test_waits_that_a_program_has_already_stay_and_count() -> None:
    """Where they hold the host back enough, no others are chosen."""
    program = run_ahead_program()
    held = with_host_syncs(program, sync_at_job_ends(program, jobs_with_side_work(program)))
    assert any(job.host_waits for job in held.jobs)
    assert plan_host_syncs(program, COST, BLOCK).waits
    assert not plan_host_syncs(held, COST, BLOCK).waits
    assert with_host_syncs(held, {}) == held


@pytest.mark.parametrize(("after", "awaited"), [(4, 2), (5, 2), (5, 4), (5, 5), (3, 2)])
def test_waits_that_a_program_has_already_are_for_what_they_name(after: int, awaited: int) -> None:
    """The host goes on when that is over, not when what it issued last is."""
    program = run_ahead_program()
    held = with_host_syncs(program, {f"forward_{m}": (((after, m), (awaited, m)),) for m in range(MICRO_BATCHES)})
    assert plan_host_syncs(held, QUICK, 0).free_bytes == gpu_peak(held, QUICK)


def test_a_copy_to_the_host_holds_the_host_beside_other_waits() -> None:
    """One of the program's own: the host waits for it where it stands."""
    copied = '#9 %9:float32[1024,1024]^pinned = pd_op.memcpy_d2h(%4) forward origin=9 {"dst_place_type":2}\n#5 '
    text = show(run_ahead_program()).replace("#5 ", copied, 1)
    for m in reversed(range(MICRO_BATCHES)):
        text = text.replace(f": 2-5@{m}", f": 2-4@{m} 9@{m} 5@{m}")
    assert plan_host_syncs(parse(text), QUICK, 0).free_bytes == gpu_peak(parse(text), QUICK) < gpu_peak(run_ahead_program(), QUICK)


def test_short_jobs_wait_at_their_ends() -> None:
    """Where a job is over before a wait can look back, the host waits for its last computation."""
    slow_wait = GivenCosts({"comm": 400, "gemm": 1000, "default": 50}, host_ns=10, job_ns=300)
    found = plan_host_syncs(run_ahead_program(), slow_wait, BLOCK)
    assert set(found.waits) == {f"forward_{m}" for m in range(MICRO_BATCHES - 1)}
    assert all(waits == (((5, m), (5, m)),) for m, waits in enumerate(found.waits.values()))
    assert found.throttled_bytes < found.free_bytes // 2


@settings(max_examples=35, deadline=None)
@given(shapes(), st.booleans())
def test_waits_never_raise_the_peak(shape: Shape, compiled: bool) -> None:
    """Law: with a host that issues in no time, peak(gpu, held) <= peak(gpu, free); held ones take as long or longer to issue. Counted
    until operations have completed: a host that is held looks later at what they used."""
    fast = GivenCosts({"comm": 97, "p2p": 31, "gemm": 53, "copy": 41, "default": 7})
    shape = both_forms(shape)
    engine = "fast" if compiled else "plain"
    free = simulate(world(shape[0]), fast, target=GPU, engine=engine)  # type: ignore[arg-type]
    bound = simulate(world(shape[1]), fast, target=GPU, engine=engine)  # type: ignore[arg-type]
    for at in range(len(free.ranks)):
        assert _until_completed(bound, at) <= _until_completed(free, at)
    assert (bound.times.issue >= free.times.issue).all()


def _until_completed(result: Result, at: int) -> int:
    """The peak if each block were given back when the last that uses it has completed."""
    sim, times = result.input, result.times
    mine = slice(int(sim.first[at]), int(sim.first[at + 1]))
    return memory.over_time(sim.programs[at], times.issue[mine], times.start[mine], times.end[mine], sim.stream[mine], GPU).peak()


def both_forms(shape: Shape) -> tuple[Shape, Shape]:
    """The same shape without waits, and with waits in every micro-batch."""
    import dataclasses

    return dataclasses.replace(shape, held=frozenset()), dataclasses.replace(shape, held=frozenset(range(shape.micro_batches)))


def looking_back(program: Program, back: int) -> dict[str, tuple[HostSync, ...]]:
    """Behind every third item the host waits for the computation some items before."""
    ops, values = {op.id: op for op in program.ops}, {value.id: value for value in program.values}
    found = {}
    for job in program.jobs:
        waits = []
        for k in range(back, len(job.items), 3):
            target = next((item for item in reversed(job.items[: k - back + 1]) if computes(ops[item[0]], values)), None)
            waits += [(job.items[k], target)] if target else []
        found[job.name] = tuple(waits)
    return found


@settings(max_examples=15, deadline=None)
@given(worlds(streams=True), st.integers(0, 4))
def test_waits_leave_plans_safe(drawn: World, back: int) -> None:
    """No deadlock. What the checker finds in a plan it finds with waits and without; steps that end still end."""
    free = plan(drawn)
    for waits in ([sync_at_job_ends(p, jobs_with_side_work(p)) for p in free], [looking_back(p, back) for p in free]):
        bound = [with_host_syncs(p, each) for p, each in zip(free, waits, strict=True)]
        for program in bound:
            verify(program)
        assert check(bound, GPU) == check(free, GPU) == []
        assert simulate(bound, COST, with_memory=False).step_ns > 0


CROSSED = """
program rank={rank} world=2 mode=train
pipeline stage={rank} of 2 micro_batches=1 chunks=1 schedule=1F1B
group 3 = 0,1
group 4 = 1,0
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.recv_v2() forward group={receive} stream="auto_parallel_pp_recv" {{"peer":0}}
#2 %2:float32[2] = pd_op.relu(%1) forward
#3 pd_op.send_v2(%0) forward group={send} stream="auto_parallel_pp_send" {{"peer":1}}
job all forward 0: 1-3@0{wait}
event cut 0@0 -> 3@0
"""


@pytest.mark.parametrize("wait", ["", " | 2@0<2@0"])
def test_a_wait_that_stops_all_ranks_is_found(wait: str) -> None:
    """No deadlock. Each rank waits for what the other would only send behind its own wait."""
    pair = [parse(CROSSED.format(rank=rank, send=3 + rank, receive=4 - rank, wait=wait)) for rank in (0, 1)]
    kinds = [finding.kind for finding in check(pair, GPU)]
    assert kinds == (["deadlock"] if wait else [])
    if not wait:
        assert simulate(pair, COST).step_ns > 0
        return
    with pytest.raises(PlanError, match="ranks wait in a circle"):
        simulate(pair, COST)
    assert simulate(pair, COST, Options(host_waits=False)).step_ns > 0


def test_the_cost_of_a_wait_is_in_the_step() -> None:
    """A wait at the end of a job leaves a gap: the copy, the way there and back, and the issue of what follows."""
    program = run_ahead_program()
    cost = GivenCosts({"comm": 0, "gemm": 100, "copy": 30, "default": 10}, host_ns=2, job_ns=5)
    free = simulate([program], cost, ALONE)
    names = [job.name for job in program.jobs[:1]]
    waiting = simulate([with_host_syncs(program, sync_at_job_ends(program, names))], cost, ALONE)
    assert waiting.step_ns == free.step_ns + 2 + 2 + 5 + 30 + 5 + 2
    assert waiting.ranks[0].host_ns > free.ranks[0].host_ns


QUICK = GivenCosts({"comm": 400, "gemm": 1000, "copy": 1, "default": 50}, host_ns=1, job_ns=2)
"""A wait takes the host 5 ns, so it looks back 250 ns, and waits stand 4000, 2000, 1000, 500 or 250 ns apart; a job computes 2050 ns."""


@pytest.mark.parametrize(
    ("blocks", "waits", "peak_blocks"),
    [
        (0, {f"forward_{m}": (((5, m), (5, m)),) for m in range(MICRO_BATCHES - 1)}, 3),
        (3, {f"forward_{m}": (((4, m), (2, m)),) for m in range(MICRO_BATCHES - 1)}, 5),
        (12, {f"forward_{m}": (((4, m), (2, m)),) for m in range(1, MICRO_BATCHES - 1, 2)}, 7),
        (23, {}, 25),
    ],
)
def test_the_host_waits_as_seldom_as_keeps_memory(blocks: int, waits: dict[str, tuple[HostSync, ...]], peak_blocks: int) -> None:
    """Memory budget, measured peaks. Free run-ahead holds 23 blocks more than a serial step; what lies 250 ns back is the first product."""
    found = plan_host_syncs(run_ahead_program(), QUICK, blocks * BLOCK)
    assert {name: each for name, each in found.waits.items() if each} == waits
    assert found.throttled_bytes // BLOCK == peak_blocks
    assert found.free_bytes // BLOCK == 25


@pytest.mark.parametrize(("room_blocks", "peak_blocks"), [(4, 4), (6, 6), (10, 10), (2, 3)])
def test_under_a_budget_the_host_waits_at_the_peak(room_blocks: int, peak_blocks: int) -> None:
    """Memory budget. Run-ahead alone would hold 25 blocks, and no spacing is asked to hold less; a serial step holds two and a half."""
    program = run_ahead_program()
    found = plan_host_syncs(program, QUICK, 23 * BLOCK, (room_blocks + 1) * BLOCK - 1)
    assert found.throttled_bytes // BLOCK == peak_blocks
    assert gpu_peak(with_host_syncs(program, found.waits), QUICK) == found.throttled_bytes
    if room_blocks == peak_blocks:  # with more room, waits are no more than with less
        assert found.count <= plan_host_syncs(program, QUICK, 23 * BLOCK, room_blocks * BLOCK - 1).count


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_no_wait_stands_behind_the_last_one_that_the_peak_needs(blocks: int) -> None:
    """The host prepares the next step meanwhile."""
    program = run_ahead_program()
    found = plan_host_syncs(program, COST, blocks * BLOCK)
    every = [(job.name, wait) for job in program.jobs for wait in found.waits.get(job.name, ())]
    assert every

    def peak_with(waits: list[tuple[str, HostSync]]) -> int:
        by_job = {job.name: tuple(wait for name, wait in waits if name == job.name) for job in program.jobs}
        return gpu_peak(with_host_syncs(program, by_job), COST)

    least = peak_with([(name, wait) for name, waits in sync_at_job_ends(program, jobs_with_side_work(program)).items() for wait in waits])
    assert peak_with(every) == found.throttled_bytes <= max(found.serial_bytes + blocks * BLOCK, least + blocks * BLOCK // 4)
    assert all(peak_with(every[:count]) > found.throttled_bytes for count in range(len(every)))


def test_with_room_for_all_the_host_waits_nowhere() -> None:
    assert plan_host_syncs(run_ahead_program(), QUICK, 23 * BLOCK, 26 * BLOCK).count == 0
    small = plan_host_syncs(run_ahead_program(), QUICK, 2 * MICRO_BATCHES * BLOCK, 6 * BLOCK)
    assert small.throttled_bytes <= 6 * BLOCK


def test_waits_follow_the_room_where_passes_are_remembered() -> None:
    """Less room for the very same program gives other waits, though the pass runs without a budget too."""
    passes = Pipeline((ThrottleHost(run_ahead_bytes=23 * BLOCK),))
    with together([run_ahead_program()], QUICK, passes.passes) as found:
        made = [programs_of(found, found.run(passes, (blocks * BLOCK,)))[0] for blocks in (26, 5)]
    assert [any(job.host_waits for job in each.jobs) for each in made] == [False, True]
    assert gpu_peak(made[1], QUICK) <= 5 * BLOCK < gpu_peak(made[0], QUICK)


def test_what_is_allowed_to_run_ahead_is_all_that_side_streams_hold() -> None:
    """Two blocks of each micro-batch are read or given beside computation."""
    assert plan_host_syncs(run_ahead_program(), QUICK, 2 * MICRO_BATCHES * BLOCK).reason == "few-side-bytes"
    assert plan_host_syncs(run_ahead_program(), QUICK, 2 * MICRO_BATCHES * BLOCK - 1).reason != "few-side-bytes"


def test_a_host_may_run_ahead_by_256_mib_where_nothing_else_is_asked_for() -> None:
    assert ThrottleHost() == ThrottleHost(run_ahead_bytes=256 * 1024 * 1024, syncs="auto")


def test_of_waits_that_hold_alike_the_widest_apart_are_taken() -> None:
    """With computation behind the last block a wait that looks back in its job holds as little as one at the job's end."""
    program = run_ahead_program()
    tail = parse(show(program).replace("#5 %5:float32[1] = pd_op.mean(%4) forward", "#5 %5:float32[1] = pd_op.matmul(%4) forward"))
    found = plan_host_syncs(tail, QUICK, 0)
    assert found.waits["forward_0"] != sync_at_job_ends(tail, ["forward_0"])["forward_0"]
    assert found.throttled_bytes == gpu_peak(with_host_syncs(tail, sync_at_job_ends(tail, jobs_with_side_work(tail))), QUICK)


def test_the_peak_on_the_place_is_that_of_the_fastest_host() -> None:
    slow = GivenCosts({"comm": 400, "gemm": 1000, "copy": 1, "default": 50}, host_ns=3000, job_ns=2)
    assert gpu_peak(run_ahead_program(), slow) == gpu_peak(run_ahead_program(), QUICK)


def test_a_rank_that_cannot_be_simulated_waits_at_the_end_of_every_job() -> None:
    endless = GivenCosts({"default": 1 << 41})
    program = run_ahead_program()
    found = plan_host_syncs(program, endless, 0)
    assert found.waits == sync_at_job_ends(program, jobs_with_side_work(program))
    assert found.reason == "not-simulated"
    assert found.error


def test_the_host_waits_for_what_the_step_gives_where_its_job_ends() -> None:
    """For the last that computes it, in every micro-batch; what is handed out as it came in is not computed."""
    program = run_ahead_program()
    given_ = (
        '#6 builtin.shadow_output(%4) forward {"output_name":"y"}\n#7 builtin.shadow_output(%1) forward {"output_name":"x"}\njob forward_0 '
    )
    made = parse(show(program).replace("job forward_0 ", given_, 1))
    assert sync_at_outputs(program) == {}
    assert sync_at_outputs(made) == {f"forward_{m}": (((5, m), (4, m)),) for m in range(MICRO_BATCHES)}


@pytest.mark.parametrize(
    ("beside", "found"),
    [
        ("#3 %3:float32[1024,1024] = pd_op.all_reduce(%2) forward group=7", True),
        ("#3 %3:float32[4,1024] = pd_op.all_reduce(%0) forward group=7", True),  # of a parameter, but what it gives is of a micro-batch
        ("#3 %3:float32[1024,1024]^pinned = pd_op.memcpy_d2h(%2) forward", True),  # reads what is of a micro-batch
        ("#3 %3:float32[4,1024]~0! = pd_op.all_reduce_(%0) forward group=7 inplace=0:0", False),  # all of it lasts
    ],
)
def test_jobs_that_use_memory_of_a_micro_batch_beside_computation(beside: str, found: bool) -> None:
    line = '#3 %3:float32[1024,1024] = pd_op.all_reduce(%2) forward group=7 stream="auto_parallel_mp"'
    text = show(run_ahead_program())
    assert line in text
    made = parse(text.replace(line, beside + ' stream="auto_parallel_mp"'))
    assert bool(jobs_with_side_work(made)) == found
    assert "forward_11" not in jobs_with_side_work(made)  # the last one


@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=6), min_size=1, max_size=4),
    st.frozensets(st.integers(0, 3)),
    st.integers(1, 12),
    st.integers(1, 30),
)
@settings(max_examples=40, deadline=None)
def test_waits_stand_so_far_apart_and_look_so_far_back(
    drawn: list[list[tuple[bool, int]]], chosen: frozenset[int], back: int, apart: int
) -> None:
    """Of the chosen jobs each op instance may wait for the last computation of its job that is over so long before it ends."""
    text, first = 'program rank=0 world=2 mode=train\ngroup 7 = 0,1\n#0 %0:float32[4]"x" = pd_op.data() forward\n', [0]
    for job in drawn:
        for number, (is_computation, _) in enumerate(job, first[-1] + 1):
            text += f"#{number} %{number}:float32[4] = pd_op.{'exp(%0)' if is_computation else 'recv_v2()'} forward"
            text += "\n" if is_computation else ' group=7 stream="side" {"peer":1}\n'
        first.append(first[-1] + len(job))
    text += "".join(f"job j{k} forward 0: {begin + 1}-{end}@0\n" for k, (begin, end) in enumerate(pairwise(first)))
    clock = np.cumsum([dur if is_computation else 0 for job in drawn for is_computation, dur in job])
    targets, waits, due = np.full(len(clock), -1), {f"j{k}": [] for k in range(len(drawn))}, apart
    for k, (begin, end) in enumerate(pairwise(first)):
        for item in range(begin, end):
            over = [at for at in range(begin, end) if drawn[k][at - begin][0] and clock[at] <= clock[item] - back]
            targets[item] = max(over, default=-1) if k in chosen else -1
            if targets[item] >= 0 and clock[item] >= due:
                waits[f"j{k}"].append(((item + 1, 0), (int(targets[item]) + 1, 0)))
                due = clock[item] + apart
    search = _Search(parse(text), COST, frozenset(f"j{k}" for k in chosen))
    assert search._targets(clock, back).tolist() == targets.tolist()
    assert search._waits_looking_back(clock, targets, apart) == {name: tuple(each) for name, each in waits.items()}


def test_waits_at_the_peak_join_those_that_there_are() -> None:
    """Behind one op instance the host waits for the later of two; places are counted over all jobs, waits stand in the order of jobs."""
    program = run_ahead_program()
    waits = {"forward_0": (((4, 0), (2, 0)), ((5, 0), (4, 0))), "forward_1": (((5, 1), (4, 1)),), "forward_3": (((3, 3), (2, 3)),)}
    more = {2: 1, 3: 0, 4: 4, 7: 5, 5: 4, 9: 8}  # four op instances a job
    found = _Alone(program, None, None, None)._joined(waits, more)  # type: ignore[arg-type]
    assert {name: each for name, each in found.items() if each} == {
        "forward_0": (((4, 0), (3, 0)), ((5, 0), (4, 0))),
        "forward_1": (((2, 1), (2, 1)), ((3, 1), (2, 1)), ((5, 1), (4, 1))),
        "forward_2": (((3, 2), (2, 2)),),
        "forward_3": (((3, 3), (2, 3)),),
    }


ENDS = (5, 15, 300, 120, 130, 140, 150, 160)
"""When the op instances of two jobs end, four in each, issued every 10 ns; the third runs on a side stream."""
AWAY, TAKEN = (1, 2, 100, 10, False), (3, 7, 10**6, 10, False)
"""Blocks: by whom taken, last reader, when given back, bytes, whether in host memory. The first is read last on the side stream."""


def behind(*blocks: tuple[int, int, int, int, bool], ends: tuple[int, ...] = ENDS, limit: int = 15) -> dict[int, int]:
    """Where the host waits, and for what, if no more bytes than the limit may be live; 1 byte is persistable."""
    first, last_read, free_at, size, pinned = (np.array(column) for column in zip(*blocks, strict=True))
    issue = 10 * np.arange(8)
    none, never = np.zeros_like(first), first < 0
    lives = memory.Lives(issue[first], free_at, none + 1, none, size, pinned, first, none, none, never)
    placed = memory.Placed(first, last_read, never, never, size, pinned, first, none, first, first, first, None, none, {"device": 1}, [])
    times = Times(issue, issue, issue, np.array(ends))
    return waits_at_peaks(run_ahead_program(), times, lives, free_at, placed, np.arange(8) != 2, limit)


@pytest.mark.parametrize(
    ("blocks", "ends", "limit", "waits"),
    [
        ((AWAY, TAKEN), ENDS, 15, {}),  # nothing that was issued before ends as late
        ((AWAY, (3, 7, 10**6, 10, False)), (5, 110, 300, 120, 130, 140, 150, 160), 15, {2: 1}),
        ((AWAY, TAKEN), (100, 110, 300, 120, 130, 140, 150, 160), 15, {2: 0}),  # the first that ends when the block is given back
        ((AWAY, TAKEN), (99, 110, 300, 120, 130, 140, 150, 160), 20, {2: 1}),
        ((AWAY, TAKEN), (99, 110, 300, 120, 130, 140, 150, 160), 21, {}),  # no more than the limit
        ((AWAY, (4, 7, 10**6, 10, False)), ENDS, 15, {}),  # the first of its job: nothing of it was issued before
        ((AWAY, (5, 7, 10**6, 10, False)), ENDS, 15, {4: 4}),  # of the job before nobody waits
        ((AWAY, (6, 7, 10**6, 10, False)), ENDS, 15, {5: 4}),
        (((1, 3, 100, 10, False), TAKEN), (5, 110, 300, 120, 130, 140, 150, 160), 15, {}),  # what takes memory reads the block
        (((1, -1, 100, 10, False), TAKEN), (5, 110, 300, 120, 130, 140, 150, 160), 15, {}),  # nobody reads it
        (((1, 2, 100, 10, True), TAKEN), (5, 110, 300, 120, 130, 140, 150, 160), 15, {}),  # it is in host memory
        ((AWAY, (3, 7, 10**6, 20, True)), (5, 110, 300, 120, 130, 140, 150, 160), 15, {}),
        ((AWAY, (0, 2, 105, 10, False), TAKEN), (5, 108, 300, 120, 130, 140, 150, 160), 15, {2: 1}),
        ((AWAY, (0, 2, 105, 10, False), (6, 7, 10**6, 10, False)), (5, 15, 300, 20, 102, 107, 1, 1), 15, {5: 5}),  # both are given back
        ((AWAY, (0, 2, 105, 10, False), (6, 7, 10**6, 10, False)), (5, 15, 300, 20, 102, 103, 1, 1), 15, {5: 4}),  # one
        ((AWAY, (5, 7, 10**6, 10, False), (7, 7, 10**6, 10, False)), ENDS, 15, {4: 4}),  # the next one finds it given back
        ((AWAY, (0, 2, 145, 10, False), (7, 7, 10**6, 10, False)), ENDS, 25, {6: 4}),  # one of the two blocks is enough
        ((AWAY, (0, 2, 145, 10, False), (7, 7, 10**6, 10, False)), ENDS, 15, {6: 6}),
        ((AWAY, (0, 2, 145, 10, False), (5, 5, 55, 10, False), (7, 7, 10**6, 10, False)), ENDS, 25, {4: 4}),  # and for both allocations
        ((AWAY, (0, 2, 145, 10, False), (5, 7, 10**6, 10, False), (7, 7, 10**6, 10, False)), ENDS, 15, {4: 4, 6: 6}),
    ],
)
def test_the_host_waits_in_front_of_what_passes_the_limit(
    blocks: tuple[tuple[int, int, int, int, bool], ...], ends: tuple[int, ...], limit: int, waits: dict[int, int]
) -> None:
    """For the first computation of the same job that ends after blocks are given back which nothing issued later needs."""
    assert behind(*blocks, ends=ends, limit=limit) == waits


@pytest.mark.parametrize("has_output", [True, False])
def test_waits_for_outputs_are_told_where_there_are_some_and_else_why_there_are_none(has_output: bool) -> None:
    text = (
        """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
passes schedule-1f1b
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.exp(%0) forward
"""
        + '#2 builtin.shadow_output(%1) forward {"output_name":"y"}\n' * has_output
    )
    made, (report,) = Pipeline((ThrottleHost(syncs="outputs"),)).run(parse(text + "job a forward 0: 1@0\n"), COST)
    (told,) = report.remarks
    assert (told.rule, told.kind) == (("waits-for-outputs", "applied") if has_output else ("no-outputs", "declined"))
    assert told.numbers == ({"waits": 1, "jobs": 1} if has_output else {})
    assert made.jobs[0].host_waits == ((((1, 0), (1, 0)),) if has_output else ())
