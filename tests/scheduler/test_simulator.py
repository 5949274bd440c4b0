"""The simulator: twins agree, laws hold, every part of the step is what its definition says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model.base import GivenCosts
from interlace.cost_model.interference import START_NS
from interlace.errors import PlanError
from interlace.ir import Graph, Job, Program, dependencies, parse, verify
from interlace.ir.copies import variants
from interlace.ir.kinds import is_p2p
from interlace.scheduler.simulate.arrays import ONE, BothDirections, Options, SimInput
from interlace.scheduler.simulate.dependences import item_order, op_edges
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.simulator import NEVER, Result, Simulation, covered, issue_times, run, simulate
from tests.scheduler.plans import Shape, shapes, world

fast = pytest.importorskip("interlace.scheduler.simulate.compiled")

STRETCHED = {
    ("gemm", "comm"): (1.5, 2.0),
    ("memory", "comm"): (1.2, 1.7),
    ("gemm", "copy"): (1.1, 1.3),
    ("copy:d2h", "copy:h2d"): (1.4, 1.4),
    ("comm", "copy"): (1.05, 1.25),
    ("gemm", "p2p"): (1.15, 1.9),
    ("gemm", "wait"): (1.35, 1.0),
}


def costs(host_ns: int = 2, job_ns: int = 5, stretch: bool = True, **times: int) -> GivenCosts:
    """A table model with odd numbers, so that rounding matters."""
    table = {"comm": 97, "p2p": 31, "gemm": 53, "copy": 41, "default": 7, **times}
    return GivenCosts(table, STRETCHED if stretch else {}, host_ns, job_ns)


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_operations_are_ordered_as_by_the_dependencies_of_the_program_without_skipped_copies(shape: Shape) -> None:
    for form in (form for program in world(shape) for form in variants(program)):
        alone = [msgspec.structs.replace(op, group=-1) for op in form.program.ops]
        wanted = {(before, op) for op, befores in dependencies(Graph(form.program), alone).items() for before in befores}
        assert {(before, op) for before, op in op_edges(form.whole, form.absent).tolist()} == wanted


@settings(max_examples=60, deadline=None)
@given(shapes(2), st.randoms(use_true_random=False))
def test_what_op_instances_wait_for_is_found_anew_where_more_than_transfers_moved(shape: Shape, random: Random) -> None:
    """Jobs that are looked at one after another, some with transfers elsewhere and some with other op instances too, wait for what they
    would wait for if they were the first."""
    for first in world(shape):
        transfers, program = {op.id for op in first.ops if is_p2p(op)}, first
        for moves in (transfers, {op.id for op in first.ops}, transfers):
            item_order(program)
            program = msgspec.structs.replace(first, jobs=shuffled(program.jobs, moves, random))
            anew = program.with_ops((*program.ops[:-1], program.ops[-1]), program.values)  # nothing is known of this tuple yet
            assert set(map(tuple, item_order(program).tolist())) == set(map(tuple, item_order(anew).tolist()))


def shuffled(jobs: Sequence[Job], moves: set[int], random: Random) -> tuple[Job, ...]:
    """The jobs with some of these operations elsewhere."""
    listed = [list(job.items) for job in jobs]
    for item in [each for items in listed for each in items if each[0] in moves and random.random() < 0.5]:
        next(items for items in listed if item in items).remove(item)
        to = random.choice(listed)
        to.insert(random.randint(0, len(to)), item)
    return tuple(msgspec.structs.replace(job, items=tuple(items)) for job, items in zip(jobs, listed, strict=True))


@st.composite
def cost_models(draw: st.DrawFn) -> GivenCosts:
    """Table models with random times, some of them nothing."""
    times = {name: draw(st.integers(0, 60)) for name in ("comm", "p2p", "gemm", "copy", "default")}
    return costs(draw(st.integers(0, 9)), draw(st.integers(0, 20)), draw(st.booleans()), **times)


@st.composite
def inputs(draw: st.DrawFn) -> SimInput:
    """Arrays of any kind, also such as wait in a circle."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_ranks, per_rank, per_stream = draw(st.integers(1, 3)), draw(st.integers(1, 14)), draw(st.integers(1, 3))
    count = num_ranks * per_rank
    first = np.arange(num_ranks + 1) * per_rank
    rank = np.repeat(np.arange(num_ranks), per_rank)
    deps = [
        sorted({int(rng.integers(first[rank[k]], k)) for _ in range(rng.integers(0, 3))}) if k > first[rank[k]] else []
        for k in range(count)
    ]
    meet, follow = np.full(count, -1), np.full(count, -1)
    rows: list[list[int]] = []
    for k in range(draw(st.integers(0, per_rank))):
        members = sorted(rng.choice(num_ranks, rng.integers(1, num_ranks + 1), replace=False).tolist()) if num_ranks > 1 else []
        # Mostly at alike places, so that most inputs run through.
        row = [int(first[r] + min(per_rank - 1, k + int(rng.integers(0, 2)))) for r in members]
        if len(row) > 1 and (meet[row] < 0).all() and (follow[row] < 0).all() and not np.isin(row, follow).any():
            if len(row) == 2 and rng.random() < 0.3:
                follow[row[1]] = row[0]
            else:
                meet[row] = len(rows)
                rows.append(row)
    kinds = 4
    awaits = np.where(rng.random(count) < 0.1, np.arange(count), -1)
    for k in np.flatnonzero(rng.random(count) < 0.1).tolist():  # held behind a job: waits for an earlier item
        awaits[k] = int(rng.integers(max(first[rank[k]], k - 4), k + 1))
    excess = rng.integers(0, 2 * ONE, (2, kinds, kinds)) * rng.integers(0, 2)
    gap = rng.integers(0, int(rng.choice([6, 2 * START_NS])), count) * rng.integers(0, 2)
    longest = int(rng.choice([3, 30]))  # short ones make many events fall on one moment
    way, hosts, devices = rng.integers(0, 3, kinds), rng.integers(0, 2, num_ranks), rng.integers(1, 3, num_ranks)
    both = BothDirections(way, rng.integers(0, 4 * ONE, (4 * num_ranks + 1, 2)), hosts, devices) if rng.random() < 0.5 else None
    return SimInput(
        list(range(num_ranks)),
        first,
        np.arange(num_ranks + 1) * per_stream,
        [f"s{k}" for k in range(per_stream)] * num_ranks,
        np.arange(count) - first[rank],
        np.zeros(count, np.int64),
        rng.integers(0, per_stream, count) + rank * per_stream,
        np.concatenate([np.cumsum(gap[rank == r]) for r in range(num_ranks)]),
        rng.integers(0, longest, count),
        rng.random(count) < 0.4,
        awaits,
        rng.integers(0, kinds, count),
        excess,
        rng.integers(0, ONE, kinds) * rng.integers(0, 2),
        np.r_[0, np.cumsum([len(d) for d in deps])],
        np.array([k for d in deps for k in d], np.int64),
        meet,
        np.r_[0, np.cumsum([len(row) for row in rows])].astype(np.int64),
        np.array([k for row in rows for k in row], np.int64),
        np.array([len(row) for row in rows], np.int64),
        follow,
        np.zeros(num_ranks, np.int64),
        [[] for _ in range(num_ranks)],
        {},
        [],
        both=both,
    )


@settings(max_examples=2000, deadline=None)
@given(inputs())
def test_twins_agree_on_any_arrays(sim: SimInput) -> None:
    """Acceptance: C4. Also on which items never run."""
    for plain, compiled in zip(Simulation(sim).run(), fast.run_items(sim), strict=True):
        assert plain.tolist() == compiled.tolist()


@settings(max_examples=60, deadline=None)
@given(shapes(), cost_models(), st.sampled_from(["rendezvous", "buffered"]))
def test_twins_agree_on_plans(shape: Shape, cost: GivenCosts, p2p: str) -> None:
    """Acceptance: C4. Times, memory and every part of the step; the same again for the same inputs."""
    sim = lower(world(shape), cost, Options(p2p=p2p))  # type: ignore[arg-type]
    plain, compiled = run(sim, engine="plain"), run(sim, engine="fast")
    assert plain.ranks == compiled.ranks == run(sim, engine="fast").ranks
    assert (plain.times.end == compiled.times.end).all()


@settings(max_examples=16, deadline=None)
@given(shapes(), cost_models())
def test_makespan_is_at_least_every_load(shape: Shape, cost: GivenCosts) -> None:
    """Acceptance: C4. No shorter than the critical path, nor than what any stream or host has to do."""
    programs = world(shape)
    sim = lower(programs, cost)
    found = run(sim, with_memory=False)
    bound = longest_path(sim, found)
    assert (found.times.end >= bound).all()
    for stream in range(len(sim.stream_names)):
        assert found.step_ns >= sim.dur[sim.stream == stream].sum()
    assert found.step_ns >= sim.host_end.max()
    assert all(rank.peak_bytes >= 0 for rank in found.ranks)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(shapes(), cost_models())
def test_alone_it_is_the_longest_path(shape: Shape, cost: GivenCosts) -> None:
    """Acceptance: C4. With nothing stretched and nothing shared."""
    sim = lower(world(shape), dataclasses_without_stretch(cost), Options(share=False))
    found = run(sim, with_memory=False)
    assert found.times.end.tolist() == longest_path(sim, found).tolist()


def dataclasses_without_stretch(cost: GivenCosts) -> GivenCosts:
    return GivenCosts(cost._table, {}, cost._host_ns, cost._job_ns)


def longest_path(sim: SimInput, found: Result) -> np.ndarray:
    """Ends by relaxation over stream order, dependencies, rendezvous, issue times and the host's waits; by itself."""
    end = np.zeros(sim.num_items, np.int64)
    before: list[list[int]] = [[] for _ in range(sim.num_items)]
    last: dict[int, int] = {}
    for item in range(sim.num_items):
        stream = int(sim.stream[item])
        before[item] += [last[stream]] if stream in last else []
        before[item] += sim.dep[sim.dep_first[item] : sim.dep_first[item + 1]].tolist()
        last[stream] = item
    waits = np.flatnonzero(sim.awaits >= 0).tolist()
    for _ in range(sim.num_items + 1):
        begin = np.zeros(sim.num_items, np.int64)
        for item in range(sim.num_items):
            at = sim.rank_index(item)
            held = [b for b in waits if sim.first[at] <= b < item]
            issued = sim.issue[item] + max([0, *(end[sim.awaits[b]] - sim.issue[b] for b in held)])
            begin[item] = max([int(issued)] + [int(end[k]) for k in before[item]])
        new = begin + sim.dur
        for meet in range(len(sim.meet_size)):
            mates = sim.mates[sim.meet_first[meet] : sim.meet_first[meet + 1]]
            new[mates] = begin[mates].max() + sim.dur[mates].max()
        if (new == end).all():
            return end
        end = new
    raise AssertionError("no fixed point")


@settings(max_examples=40, deadline=None)
@given(shapes(), cost_models())
def test_every_read_follows_its_write(shape: Shape, cost: GivenCosts) -> None:
    """Order by data holds on the device, for each micro-batch, and nothing is lost or run twice (nothing lost)."""
    programs = world(shape)
    found = simulate(programs, cost, with_memory=False)
    for at, program in enumerate(programs):
        verify(program)
        ids = [item for job in program.jobs for item in job.items]
        mine = slice(int(found.input.first[at]), int(found.input.first[at + 1]))
        start = dict(zip(ids, found.times.start[mine].tolist(), strict=True))
        end = dict(zip(ids, found.times.end[mine].tolist(), strict=True))
        assert min(end.values()) >= 0
        after = dependencies(Graph(program), program.ops)
        for (op_id, micro_batch), begin in start.items():
            for before in after[op_id]:
                assert end.get((before, micro_batch), 0) <= begin


@settings(max_examples=10, deadline=None)
@given(shapes(2), cost_models(), st.sampled_from(["rendezvous", "buffered"]))
def test_parts_of_the_step_by_the_nanosecond(shape: Shape, cost: GivenCosts, p2p: str) -> None:
    """The parts add up, and equal what looking at every single nanosecond gives."""
    found = simulate(world(shape), cost, Options(p2p=p2p), with_memory=False)  # type: ignore[arg-type]
    assert found.compute_ns == [rank.compute_ns for rank in found.ranks]
    for at, rank in enumerate(found.ranks):
        assert rank.step_ns == rank.compute_ns + rank.exposed_comm_ns + rank.bubble_ns + rank.host_ns
        count = dict.fromkeys(("compute", "exposed", "hidden", "bubble", "host", "idle"), 0)
        for part in moments(found, at):
            for name in part:
                count[name] += 1
        assert count == {
            "compute": rank.compute_ns,
            "exposed": rank.exposed_comm_ns,
            "hidden": rank.hidden_comm_ns,
            "bubble": rank.bubble_ns,
            "host": rank.host_ns,
            "idle": rank.idle_ns,
        }


def moments(found: Result, at: int) -> Iterator[list[str]]:
    """What each nanosecond of a rank's step is, straight from the definitions."""
    sim, times = found.input, found.times
    low, high = int(sim.first[at]), int(sim.first[at + 1])
    items = range(low, high)
    start, end, ready, issue = (column.tolist() for column in (times.start, times.end, times.ready, times.issue))
    waits = reach(sim, low, high)
    host_end = int(sim.host_end[at]) + max((end[sim.awaits[k]] - int(sim.issue[k]) for k in items if sim.awaits[k] >= 0), default=0)
    compute = sorted((k for k in items if not sim.side[k]), key=lambda k: (start[k], k))
    for now in range(found.step_ns):
        runs = [k for k in items if start[k] <= now < end[k]]
        beside = [k for k in runs if sim.side[k]]
        if len(beside) < len(runs):
            yield ["compute", "hidden"] if beside else ["compute"]
            continue
        following = [k for k in compute if start[k] > now]
        target = following[0] if following else -1
        wanted = [k for k in items if sim.side[k] and (target < 0 or any(start[c] == start[target] for c in compute if c in waits[k]))]
        if any(k in wanted for k in beside):
            yield ["exposed"]
            continue
        extra = [] if beside else ["idle"]
        standing = any(ready[k] <= now < start[k] for k in wanted)
        blocked = any(issue[k] <= now < end[sim.awaits[k]] for k in items if sim.awaits[k] >= 0)
        busy = now < (host_end if target < 0 else issue[target])
        yield [*extra, "host" if busy and not blocked and not standing else "bubble"]


def reach(sim: SimInput, low: int, high: int) -> list[set[int]]:
    """Item -> later items of the rank that wait for it through data, events, streams and a blocked host."""
    found: list[set[int]] = [set() for _ in range(sim.num_items)]
    for item in range(high - 1, low - 1, -1):
        follow = [k for k in range(item + 1, high) if sim.stream[k] == sim.stream[item]][:1]
        follow += [k for k in range(item + 1, high) if item in sim.dep[sim.dep_first[k] : sim.dep_first[k + 1]]]
        for k in range(item, high):
            follow += list(range(k + 1, high)) if sim.awaits[k] == item else []
        for k in follow:
            found[item] |= {k} | found[k]
    return found


ONE_RANK = """
program rank=0 world={world} mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
group 7 = {ranks}
#0 %0:float32[2] = pd_op.data() forward
#1 %1:float32[2] = pd_op.{first}(%0) forward{first_more}
#2 %2:float32[2] = pd_op.{second}(%0) forward{second_more}
#3 %3:float32[2] = pd_op.add(%1, %2) forward
job all forward 0: 1-3@0
"""


def pair(first: str, second: str, first_more: str = "", second_more: str = "", ranks: int = 1) -> list[Program]:
    """Two ops side by side and an `add` that waits for both, on one rank or more alike."""
    text = ONE_RANK.format(
        world=ranks, ranks=",".join(map(str, range(ranks))), first=first, second=second, first_more=first_more, second_more=second_more
    )
    return [msgspec.structs.replace(parse(text), rank=rank) for rank in range(ranks)]


def ends(programs: list[Program], cost: GivenCosts, options: Options | None = None) -> list[int]:
    """Ends of rank 0's items."""
    found = simulate(programs, cost, options, engine="plain")
    assert found.ranks == simulate(programs, cost, options, engine="fast").ranks
    return found.times.end[: found.input.first[1]].tolist()


def test_gemm_beside_collective_stretches_both() -> None:
    """100 beside 100 at 1.5 and 2.0: the GEMM ends at 150, the collective has 25 of its 100 left and ends at 175."""
    cost = GivenCosts({"comm": 100, "gemm": 100, "default": 1}, {("gemm", "comm"): (1.5, 2.0)})
    assert ends(pair("matmul", "all_reduce", "", ' group=7 stream="mp"', ranks=2), cost) == [150, 175, 176]


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("all_gather", "all_reduce", [200, 200]),
        ("memcpy_d2h", "memcpy_d2h", [200, 200]),
        ("memcpy_d2h", "memcpy_h2d", [125, 125]),
        ("all_gather", "memcpy_d2h", [100, 100]),
    ],
)
def test_bandwidth_is_shared(first: str, second: str, both: list[int]) -> None:
    """Acceptance: C4. Two collectives, two copies of one direction; copies both ways by the model's factor."""
    cost = GivenCosts({"comm": 100, "copy": 100, "default": 1}, {("copy:d2h", "copy:h2d"): (1.25, 1.25)})

    def more(kind: str, stream: str) -> str:
        group = " group=7" if kind.startswith("all") else ""
        return f'{group} stream="{stream}"' + (' {"dst_place_type":2}' if "d2h" in kind else "")

    programs = pair(first, second, more(first, "a"), more(second, "b"), ranks=2)
    if first.startswith("all") and second.startswith("all"):  # groups of their own, or one would wait for the other
        programs = [parse_with_second_group(program) for program in programs]
    assert ends(programs, cost)[:2] == both
    assert ends(programs, cost, Options(share=False))[:2] == ([100, 100] if both[0] == 200 else both)


def parse_with_second_group(program: Program) -> Program:
    """The same with the second collective on a group of its own."""
    ops = [msgspec.structs.replace(op, group=8) if op.id == 2 else op for op in program.ops]
    groups = (*program.groups, msgspec.structs.replace(program.groups[0], id=8))
    return msgspec.structs.replace(program.with_ops(ops), groups=groups)


def test_collectives_of_one_group_run_one_after_the_other() -> None:
    cost = GivenCosts({"comm": 100, "default": 1})
    assert ends(pair("all_gather", "all_reduce", ' group=7 stream="a"', ' group=7 stream="b"', ranks=2), cost)[:2] == [
        100,
        200,
    ]


def test_a_collective_goes_at_the_pace_of_its_slowest_rank() -> None:
    """Rank 1 has a GEMM beside it, rank 0 has nothing."""
    cost = GivenCosts({"comm": 100, "gemm": 400, "default": 0}, {("gemm", "comm"): (1.0, 2.0)})
    slow = pair("matmul", "all_reduce", "", ' group=7 stream="mp"', ranks=2)
    idle = pair("gelu", "all_reduce", "", ' group=7 stream="mp"', ranks=2)
    assert ends([idle[0], slow[1]], cost)[1] == 200


def test_host_time_and_blocking() -> None:
    """Acceptance: C5. Ops of 10 ns issued every 30 ns are host-bound; a copy to pageable memory holds the host."""
    cost = GivenCosts({"default": 10, "copy": 10}, host_ns=30, job_ns=5)
    found = simulate(pair("gelu", "relu"), cost)
    assert found.times.issue.tolist() == [35, 65, 95]
    assert (found.ranks[0].compute_ns, found.ranks[0].host_ns, found.step_ns) == (30, 75, 105)
    held = simulate(pair("memcpy_d2h", "relu", ' {"dst_place_type":0}'), cost)
    assert held.times.issue.tolist() == [35, 75, 105]
    assert (held.ranks[0].exposed_comm_ns, held.ranks[0].host_ns) == (10, 85)


@pytest.mark.parametrize("p2p", ["rendezvous", "buffered"])
def test_computation_beside_a_receive_that_stands(p2p: str) -> None:
    """The sender comes at 60; until then the receive stretches the product (100) by 1.5, and a copy (90) not at all.

    The product has done 40 by then and runs beside the transfer (50, until 110) at 1.0: it ends at 120.
    """
    cost = GivenCosts({"p2p": 50, "gemm": 100, "copy": 90, "default": 60}, {("gemm", "wait"): (1.5, 1.0)})
    text = """
program rank={rank} world=2 mode=train
pipeline stage={rank} of 2 micro_batches=1 chunks=1 schedule=1F1B
group 3 = 0,1
#0 %0:float32[2] = pd_op.data() forward
{ops}
job all forward 0: {items}
"""
    sender = text.format(
        rank=0,
        items="1-2@0",
        ops="""#1 %1:float32[2] = pd_op.relu(%0) forward
#2 pd_op.send_v2(%1) forward group=3 {"peer":1}""",
    )
    receiver = text.format(
        rank=1,
        items="1-3@0",
        ops="""#1 %1:float32[2] = pd_op.recv_v2() forward group=3 stream="recv" {"peer":0}
#2 %2:float32[2] = pd_op.memcpy_d2h(%0) forward stream="d2h" {"dst_place_type":1}
#3 %3:float32[2] = pd_op.matmul(%0, %0) forward""",
    )
    for engine in ("plain", "fast"):
        found = simulate([parse(sender), parse(receiver)], cost, Options(p2p=p2p), engine=engine)  # type: ignore[arg-type]
        assert found.times.end.tolist() == [60, 110, 110, 90, 120]


def test_p2p_buffered_and_rendezvous() -> None:
    """A send to a late receiver ends at once if buffered, with it else; the receive never ends before the send."""
    cost = GivenCosts({"p2p": 50, "gemm": 200, "default": 1})
    text = """
program rank={rank} world=2 mode=train
pipeline stage={rank} of 2 micro_batches=1 chunks=1 schedule=1F1B
group 3 = 0,1
#0 %0:float32[2] = pd_op.data() forward
#1 %1:float32[2] = pd_op.{first}(%0) forward
{p2p}
#3 %3:float32[2] = pd_op.relu(%{last}) forward
job all forward 0: 1-3@0
"""
    send = text.format(rank=0, first="relu", p2p='#2 pd_op.send_v2(%1) forward group=3 {"peer":1}', last=1)
    late = text.format(rank=1, first="matmul", p2p='#2 %2:float32[2] = pd_op.recv_v2() forward group=3 {"peer":0}', last=2)
    early = late.replace("matmul", "relu")
    for receiver, p2p, wanted in (
        (late, "rendezvous", [250, 250]),
        (late, "buffered", [51, 200]),
        (early, "buffered", [51, 51]),
    ):
        for engine in ("plain", "fast"):
            found = simulate([parse(send), parse(receiver)], cost, Options(p2p=p2p), engine=engine)  # type: ignore[arg-type]
            assert found.times.end[[1, 4]].tolist() == wanted
    alone = simulate([parse(send)], cost, Options(peers_ready=True))
    assert alone.times.end.tolist() == [1, 51, 52]


def test_one_rank_stands_for_its_stage() -> None:
    """The step of two representatives equals that of the whole world, where all ranks of a stage are alike."""
    shape = Shape(2, 2, 3, 2, ("mp", "s", "r", ""), norm=True)
    programs = world(shape)
    alone = costs(comm=97)
    whole = simulate(programs, alone)
    for chosen in ((0, 2), (0, 3)):
        stands = {rank: chosen[rank // 2] for rank in range(4)}
        part = simulate([programs[rank] for rank in chosen], alone, Options(representative=stands))
        assert [dataclasses.replace(r, rank=0) for r in part.ranks] == [dataclasses.replace(whole.ranks[k], rank=0) for k in (0, 2)]
    with pytest.raises(PlanError, match="for which there is no program"):
        simulate(programs[:2], alone)


def test_hand_made_costs_decide_what_is_exposed() -> None:
    """Acceptance: C5. comm 100, gemm 5, other 1: on the compute stream all is exposed, on its own what gemms do not fill."""
    cost = GivenCosts({"comm": 100, "gemm": 5, "p2p": 1, "default": 1})
    baseline = simulate(world(Shape(1, 2, 1, 1)), cost).ranks[0]
    ours = simulate(world(Shape(1, 2, 1, 1, ("mp", "", "", ""))), cost).ranks[0]
    assert (baseline.exposed_comm_ns, baseline.hidden_comm_ns) == (200, 0)
    assert (ours.exposed_comm_ns, ours.hidden_comm_ns) == (200 - 5 - 1 - 1, 7)
    assert baseline.step_ns - ours.step_ns == 7


def test_1f1b_on_one_stream_waits_in_a_circle() -> None:
    """Acceptance: F5. Two stages that both send first; the circle is printed with ops, streams and micro-batches."""
    with pytest.raises(PlanError) as caught:
        simulate(world(Shape(2, 1, 2, 1)), costs())
    assert str(caught.value).splitlines()[0].endswith("ranks wait in a circle:")
    assert "rank 0 stream compute: #5 pd_op.send_v2 of micro-batch 1 waits for its mate, rank 1 stream compute" in str(caught.value)
    assert simulate(world(Shape(2, 1, 2, 1)), costs(), Options(p2p="buffered")).step_ns > 0


def test_planted_faults_are_found() -> None:
    """Acceptance: F5. Collectives of two groups swapped on one rank; a receive behind what needs it; a lost collective."""
    shape = Shape(1, 2, 1, 1, norm=True)
    first, second = world(shape)
    reduces = [op.id for op in second.ops if op.kind == "all_reduce"]
    swapped = _reordered(second, {reduces[0]: reduces[-1], reduces[-1]: reduces[0]})
    with pytest.raises(PlanError, match=r"is issued before .* which it waits for"):
        simulate([first, swapped], costs())
    lost = msgspec.structs.replace(second, jobs=tuple(_without_item(job, reduces[-1]) for job in second.jobs))
    with pytest.raises(PlanError, match=r"number 1 on group 5 of ranks \[0, 1\] is never issued by rank\(s\) 1"):
        simulate([first, lost], costs())
    other = second.with_ops([msgspec.structs.replace(op, name="pd_op.all_gather") if op.id == reduces[0] else op for op in second.ops])
    with pytest.raises(PlanError, match="issue different collectives as number 1 of group 10"):
        simulate([first, other], costs())
    free = pair("all_gather", "all_reduce", " group=7", " group=8", ranks=2)
    free = [msgspec.structs.replace(p, groups=(*p.groups, msgspec.structs.replace(p.groups[0], id=8))) for p in free]
    crossed = msgspec.structs.replace(free[1], jobs=(Job("all", "forward", 0, ((2, 0), (1, 0), (3, 0))),))
    with pytest.raises(PlanError, match="ranks wait in a circle"):
        simulate([free[0], crossed], costs())
    with pytest.raises(PlanError, match="has no jobs"):
        simulate([msgspec.structs.replace(first, jobs=()), second], costs())


def _reordered(program: Program, names: dict[int, int]) -> Program:
    jobs = [msgspec.structs.replace(job, items=tuple((names.get(op, op), m) for op, m in job.items)) for job in program.jobs]
    return msgspec.structs.replace(program, jobs=tuple(jobs))


def _without_item(job: Job, op_id: int) -> Job:
    return msgspec.structs.replace(job, items=tuple(item for item in job.items if item[0] != op_id))


def test_skipped_copies_are_identities() -> None:
    """A micro-batch without its copies reads what was to be copied, and keeps the order by data."""
    with_copies = world(Shape(1, 1, 2, 2, ("", "", "", "c"), frozenset({0, 1})))
    without = world(Shape(1, 1, 2, 2, ("", "", "", "c")))
    mixed = world(Shape(1, 1, 2, 2, ("", "", "", "c"), frozenset({1})))
    numbers = [len(lower(programs, costs()).op) for programs in (without, mixed, with_copies)]
    assert numbers[1] - numbers[0] == 2 == numbers[2] - numbers[1]
    found = simulate(mixed, costs(), with_memory=False)
    assert (found.times.end >= 0).all()


def test_issue_times_and_cover() -> None:
    assert covered(np.array([[0, 5], [3, 7], [9, 8], [10, 12]])) == 9
    assert covered(np.empty((0, 2), np.int64)) == 0
    assert NEVER > 1 << 61
    sim = lower(pair("gelu", "relu"), costs())
    assert issue_times(sim, np.array([1, 2, 3])).tolist() == sim.issue.tolist()
