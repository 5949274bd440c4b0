"""Small plans through the plain simulator, every number worked out by hand."""

from __future__ import annotations

import pytest

from interlace.cost_model.base import GivenCosts
from interlace.cost_model.interference import START_NS, BothWays
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.ir.copies import variants
from interlace.scheduler.simulate.arrays import ONE, Options
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.simulator import Engine, host_ends, run, simulate
from tests.scheduler.plans import Shape, rank, world

ALONE = Options(peers_ready=True)
APART = Options(share=False)
"""Computation on two streams does not share the device."""


def table(stretch: dict[tuple[str, str], tuple[float, float]] | None = None, host_ns: int = 0, job_ns: int = 0, **times: int) -> GivenCosts:
    """Times by the name of the operation, 10 for all others."""
    return GivenCosts({"default": 10, **times}, stretch or {}, host_ns, job_ns)


def ends(programs: list[Program], cost: GivenCosts, options: Options | None = None) -> list[int]:
    """Ends of all items, rank by rank."""
    return simulate(programs, cost, options, engine="plain").times.end.tolist()


# --------------------------------------------------------------------------------------- what waits for what on one rank


def two_micro_batches(first: str, second: str, state: str = '#1 %1:float32[2]!"s" = builtin.parameter() forward') -> Program:
    return rank(f"{state}\n#2 {first}\n#3 {second}", "job all forward 0: 2@0 3@0 2@1 3@1", micro_batches=2)


def test_state_written_beside_compute_waits_for_those_who_read_it_for_the_micro_batch_before() -> None:
    """The write takes 10 beside compute, the read 100: the second write must not begin before 110."""
    write = '%2:float32[2]~1! = pd_op.add_(%1, %0) forward inplace=0:0 stream="side"'
    program = two_micro_batches(write, "%3:float32[2] = pd_op.gelu(%2) forward")
    assert ends([program], table(gelu=100), APART) == [10, 110, 120, 220]


def test_state_is_read_behind_what_wrote_it_beside_compute_for_the_micro_batch_before() -> None:
    write = '%3:float32[2]~1! = pd_op.add_(%1, %0) forward inplace=0:0 stream="side"'
    program = two_micro_batches("%2:float32[2] = pd_op.gelu(%1) forward", write)
    assert ends([program], table(add=100), APART) == [10, 110, 120, 220]


def test_state_that_nobody_writes_orders_nobody() -> None:
    program = two_micro_batches('%2:float32[2] = pd_op.gelu(%1) forward stream="side"', "%3:float32[2] = pd_op.relu(%1) forward")
    assert ends([program], table(gelu=100), APART) == [100, 10, 200, 20]


EVENT = """
#1 %1:float32[2] = pd_op.gelu(%0) forward stream="side"
#2 %2:float32[2] = pd_op.relu(%0) forward
#3 %3:float32[2] = pd_op.tanh(%0) forward stream="other"
"""


@pytest.mark.parametrize(("waits", "wanted"), [("", [100, 10, 10]), ("2@0", [100, 110, 10]), ("2@0 3@0", [100, 110, 110])])
def test_every_stream_that_waits_for_an_event_waits(waits: str, wanted: list[int]) -> None:
    event = f'event "e" 1@0 -> {waits}' if waits else ""
    assert ends([rank(EVENT, f"job all forward 0: 1-3@0\n{event}")], table(gelu=100), APART) == wanted


def test_of_a_stream_the_last_item_waited_for_counts() -> None:
    ops = """
#1 %1:float32[2] = pd_op.gelu(%0) forward stream="side"
#2 %2:float32[2] = pd_op.tanh(%0) forward stream="side"
#3 %3:float32[2] = pd_op.add(%1, %2) forward
"""
    assert ends([rank(ops, "job all forward 0: 1-3@0")], table(gelu=50, tanh=70)) == [50, 120, 130]


def test_the_two_directions_of_a_group_do_not_wait_for_each_other() -> None:
    ops = """
#1 %1:float32[2] = pd_op.gelu(%0) forward
#2 pd_op.send_v2(%1) forward group=3 stream="send" {"peer":1}
#3 %3:float32[2] = pd_op.recv_v2() forward group=3 stream="recv" {"peer":1}
"""
    program = rank(ops, "job all forward 0: 1-3@0", 0, 2, "group 3 = 0,1\n")
    assert ends([program], table(gelu=100), ALONE) == [100, 110, 10]


def test_what_is_issued_in_front_of_one_it_waits_for_is_refused() -> None:
    ops = "#1 %1:float32[2] = pd_op.gelu(%0) forward\n#2 %2:float32[2] = pd_op.relu(%1) forward"
    with pytest.raises(PlanError, match=r"#2 pd_op.relu of micro-batch 0 is issued before #1 pd_op.gelu of micro-batch 0"):
        simulate([rank(ops, "job all forward 0: 2@0 1@0")], table())


def test_a_micro_batch_skips_its_own_copies_only() -> None:
    program = world(Shape(1, 1, 3, 2, ("", "", "", "copies"), frozenset({1})))[0]
    copies = [op.id for op in program.ops if op.kind.startswith("memcpy")]
    forms = variants(program)
    assert [form.micro_batches for form in forms] == [[0, 2], [1]]
    whole, skipped = forms[1].program, forms[0].program
    assert whole is program
    assert not {op.id for op in skipped.ops} & set(copies)
    assert {v for op in skipped.ops for v in op.operands} <= {value.id for value in skipped.values}


def test_what_shares_a_skipped_copys_memory_shares_its_operands() -> None:
    ops = """
#1 %1:float32[2] = pd_op.gelu(%0) forward
#2 %2:float32[2] = pd_op.memcpy(%1) forward
#3 %3:float32[2]~2 = pd_op.reshape(%2) forward views=0:0
#4 %4:float32[2] = pd_op.relu(%3) forward
"""
    form = variants(rank(ops, "job all forward 0: 1@0 3@0 4@0"))[0]
    assert {value.id: value.storage for value in form.program.values}[3] == 1


# ------------------------------------------------------------------------------------------------------------------ the host

HELD = """
#1 %1:float32[2] = pd_op.gelu(%0) forward
#2 %2:float32[2] = pd_op.relu(%0) forward
#3 %3:float32[2] = pd_op.tanh(%0) forward
"""


def awaited(ops: str, jobs: str, blocks: tuple[int, ...] = ()) -> list[int]:
    """What the host waits for behind each item."""
    options = Options(blocks=lambda op: op.id in blocks)
    return lower([rank(ops, jobs, micro_batches=2)], table(), options).awaits.tolist()


def test_the_host_waits_for_the_item_that_is_named_and_not_for_the_one_it_stands_behind() -> None:
    assert awaited(HELD, "job all forward 0: 1-3@0 | 2@0<1@0") == [-1, 0, -1]
    assert awaited(HELD, "job one forward 0: 1-3@0\njob two forward 1: 1-3@1 | 3@1<1@1") == [-1, -1, -1, -1, -1, 3]


def test_a_wait_behind_a_blocking_copy_stands_in_front_of_it() -> None:
    """The copy blocks the host itself, and both are waited for."""
    assert awaited(HELD, "job all forward 0: 1-3@0 | 3@0<1@0", blocks=(3,)) == [-1, 0, 2]


def test_each_ranks_host_waits_for_its_own_items() -> None:
    jobs = "job all forward 0: 1-3@0 | 2@0<1@0"
    assert lower([rank(HELD, jobs, k, 2) for k in (0, 1)], table()).awaits.tolist() == [-1, 0, -1, -1, 3, -1]
    assert lower([rank(HELD, jobs)], table(), Options(host_waits=False)).awaits.tolist() == [-1, -1, -1]


def test_a_wait_costs_the_host_what_stands_behind_it() -> None:
    """Each item 1, a job 100; a wait 1 + 1 + 100 and 10 for its copy, in front of the next item or behind the last."""
    cost = table(host_ns=1, job_ns=100)
    free, middle, last = (lower([rank(HELD, f"job all forward 0: 1-3@0{wait}")], cost) for wait in ("", " | 2@0<1@0", " | 3@0<1@0"))
    assert (free.issue.tolist(), free.host_end.tolist()) == ([101, 102, 103], [103])
    assert (middle.issue.tolist(), middle.host_end.tolist()) == ([101, 102, 103 + 112], [103 + 112])
    assert (last.issue.tolist(), last.host_end.tolist()) == ([101, 102, 103], [103 + 112])


@pytest.mark.parametrize("engine", ["plain", "compiled"])
@pytest.mark.parametrize(("between", "step"), [(0, 31), (28, 31), (29, 32), (100, 103)])
def test_a_step_is_no_shorter_than_the_host_needs_to_begin_the_next(engine: Engine, between: int, step: int) -> None:
    """Three items take 10 each, the first from 1 on; the last is issued at 3. Behind a wait at the end all of it is added."""
    cost = GivenCosts({"default": 10}, {}, 1, 0, between)
    free, waits = (simulate([rank(HELD, f"job all forward 0: 1-3@0{wait}")], cost, engine=engine) for wait in ("", " | 3@0<3@0"))
    assert (free.step_ns, free.ranks[0].host_ns) == (step, step - 30)
    assert waits.step_ns == 31 + 1 + 1 + 10 + between  # a wait is two items and a copy


def test_an_earlier_long_wait_is_not_made_up_for_by_a_later_short_one() -> None:
    """The host waits until 101 behind the first item, and behind the second for the same: it is late by 100, not by 99."""
    ops = """
#1 %1:float32[2] = pd_op.gelu(%0) forward
#2 %2:float32[2] = pd_op.relu(%0) forward stream="side"
#3 %3:float32[2] = pd_op.tanh(%0) forward stream="side"
"""
    sim = lower([rank(ops, "job all forward 0: 1-3@0", micro_batches=1)], table(host_ns=1, gelu=100, relu=1))
    sim.awaits[:] = [0, 0, -1]
    sim.host_end[:] = 50
    found = run(sim, engine="plain", with_memory=False)
    assert found.times.issue.tolist() == [1, 102, 103]
    assert found.times.end.tolist() == [101, 103, 113]
    assert host_ends(sim, found.times).tolist() == [50 + 100]
    assert found.step_ns == 150


def test_the_step_lasts_until_the_host_is_through() -> None:
    program = rank("#1 %1:float32[2] = pd_op.gelu(%0) forward", "job one forward 0: 1@0\njob two forward 0:")
    found = simulate([program], table(host_ns=1, job_ns=100), engine="plain", with_memory=False)
    assert found.times.end.tolist() == [111]
    assert found.step_ns == 201


# ------------------------------------------------------------------------------------------------------------ many at once


def meeting(kinds: tuple[str, str], more: tuple[str, str] = ("", "")) -> list[Program]:
    """Two ranks, each with something on compute and a collective of both beside it."""
    return [
        rank(
            f'#1 %1:float32[2] = pd_op.{more[k] or "nop"}(%0) forward\n#2 %2:float32[2] = pd_op.{kinds[k]}(%0) forward group=7 stream="mp"',
            "job all forward 0: 1-2@0",
            k,
            2,
            "group 7 = 0,1\n",
        )
        for k in (0, 1)
    ]


def test_mates_run_for_the_longest_of_their_times() -> None:
    cost = GivenCosts({"pd_op.all_reduce": 60, "pd_op.all_reduce_": 100, "default": 0})
    assert ends(meeting(("all_reduce", "all_reduce_")), cost)[1::2] == [100, 100]
    assert ends(meeting(("all_reduce_", "all_reduce")), cost)[1::2] == [100, 100]


@pytest.mark.parametrize("slow", [0, 1])
def test_mates_go_at_the_pace_of_the_slowest(slow: int) -> None:
    """One of the ranks computes beside the collective, which takes twice as long there."""
    cost = table({("gemm", "comm"): (1.0, 2.0)}, comm=100, gemm=400, nop=0)
    more = ("matmul", "") if slow == 0 else ("", "matmul")
    assert ends(meeting(("all_reduce", "all_reduce"), more), cost)[1::2] == [200, 200]


def test_work_is_booked_at_the_pace_it_was_done() -> None:
    """100 beside 100 at 1.5 and 2: the product ends at 150, the collective with 25 left at 175; half of 150 was slowing down."""
    cost = table({("gemm", "comm"): (1.5, 2.0)}, comm=100, gemm=100)
    found = simulate(meeting(("all_reduce", "all_reduce"), ("matmul", "matmul")), cost, engine="plain")
    assert found.times.end.tolist() == [150, 175, 150, 175]
    assert [each.slowed_ns for each in found.ranks] == [50, 50]


def test_ends_are_rounded_up() -> None:
    cost = table({("gemm", "comm"): (1.05, 1.0)}, comm=100, gemm=9)
    assert ends(meeting(("all_reduce", "all_reduce"), ("matmul", "matmul")), cost)[0] == 10


@pytest.mark.parametrize(("receives", "end"), [(1, 150), (2, 150)])
def test_communication_that_stands_slows_computation_once(receives: int, end: int) -> None:
    """A product of 100 takes 150 beside one receive whose sender comes late, and beside two."""
    cost = table({("gemm", "wait"): (1.5, 1.0)}, gemm=100, gelu=1000)
    sends = "".join(f'#{k} pd_op.send_v2(%1) forward group={k} stream="s{k}" {{"peer":1}}\n' for k in range(2, receives + 2))
    take = '#{0} %{0}:float32[2] = pd_op.recv_v2() forward group={0} stream="r{0}" {{"peer":0}}\n'
    takes = "".join(take.format(k) for k in range(2, receives + 2))
    groups = "".join(f"group {k} = 0,1\n" for k in range(2, receives + 2))
    sender = rank("#1 %1:float32[2] = pd_op.gelu(%0) forward\n" + sends, f"job all forward 0: 1-{receives + 1}@0", 0, 2, groups)
    taker = rank("#1 %1:float32[2] = pd_op.matmul(%0, %0) forward\n" + takes, f"job all forward 0: 1-{receives + 1}@0", 1, 2, groups)
    found = simulate([sender, taker], cost, engine="plain")
    assert found.times.end[found.input.first[1]] == end


def test_only_computation_is_stretched_beside_what_stands_and_nothing_is_sped_up() -> None:
    ops = """
#1 %1:float32[2] = pd_op.matmul(%0, %0) forward
#2 %2:float32[2] = pd_op.memcpy_d2h(%0) forward stream="d2h" {"dst_place_type":2}
#3 %3:float32[2] = pd_op.all_reduce(%0) forward group=7 stream="mp"
"""
    cost = table({("gemm", "wait"): (1.5, 1.0), ("copy", "wait"): (3.0, 1.0), ("gemm", "comm"): (0.5, 0.75)})
    sim = lower([rank(ops, "job all forward 0: 1-3@0", 0, 2, "group 7 = 0,1\n")], cost, ALONE)
    product, copy, reduce = sim.kind.tolist()
    assert [int(sim.blocked_excess[k]) for k in (product, copy, reduce)] == [ONE // 2, 0, 0]
    assert not sim.excess[:, product, reduce].any()
    assert not sim.excess[:, reduce, product].any()


ENGINES: tuple[Engine, ...] = ("plain", "fast")
COPIES = """
#1 %1:float32[2] = pd_op.memcpy_d2h(%0) forward stream="out" {"dst_place_type":2}
#2 %2:float32[2] = pd_op.memcpy_h2d(%0) forward stream="in" {"dst_place_type":1}
"""
LATER = COPIES.replace("#2", '#3 %3:float32[2] = pd_op.gelu(%0) forward stream="in"\n#2')
"""The copy to the device begins 40 later."""


class Hosts(GivenCosts):
    """If one device of a host copies in both directions, copies to it take twice as long; if two or three do, four or eight times, and
    others twice."""

    def __init__(self, a_host: int) -> None:
        both = {("copy:h2d", "copy:d2h"): (8.0, 2.0), ("copy:d2h", "copy:h2d"): (2.0, 8.0)}
        super().__init__({"default": 60, "memcpy_d2h": 1000, "memcpy_h2d": 100}, both)
        self.a_host = a_host

    def host_of(self, rank: int) -> int:
        return rank // self.a_host

    def both_directions(self) -> dict[int, BothWays]:
        return {1: BothWays(2.0, 1.0), 2: BothWays(4.0, 2.0), 3: BothWays(8.0, 2.0)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("a_host", "world", "ranks", "options", "h2d", "d2h"),
    [
        # Until 60, devices copy in three directions, and rank 0 has 20 of 100 on the device; then in four, 1 in 4 until 380.
        (2, 2, (0, 1), None, [380, 440], [1180, 1180]),
        (1, 2, (0, 1), None, [200, 260], [1000, 1000]),
        (2, 2, (0,), Options(representative={1: 0}), [400], [1200]),
        (2, 2, (0,), ALONE, [400], [1200]),
        (3, 3, (0,), ALONE, [800], [1400]),
        (1, 2, (0,), ALONE, [200], [1000]),
        (2, 2, (1,), Options(representative={0: 1}), [460], [1200]),
        (4, 4, (0, 1), Options(representative={2: 1, 3: 1}), [780, 860], [1390, 1400]),
        (2, 4, (0, 2), Options(representative={1: 0, 3: 0}), [400, 400], [1200, 1200]),  # rank 3 is not on the host of rank 0
        (3, 3, (0, 1), ALONE, [780, 820], [1390, 1380]),  # rank 2 copies when rank 0 does
    ],
)
def test_copies_of_both_directions_slow_each_other_the_more_devices_do_it(
    engine: Engine, a_host: int, world: int, ranks: tuple[int, ...], options: Options | None, h2d: list[int], d2h: list[int]
) -> None:
    """On rank 1, the copy to the device begins later."""
    programs = [
        rank(*((LATER, "job all forward 0: 1@0 3@0 2@0") if at == 1 else (COPIES, "job all forward 0: 1@0 2@0")), at, world) for at in ranks
    ]
    sim = lower(programs, Hosts(a_host), options)
    found = run(sim, engine=engine).times.end
    assert [found[sim.op == op].tolist() for op in (2, 1)] == [h2d, d2h]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_copy_that_has_ended_slows_no_copies_though_its_stream_goes_on(engine: Engine) -> None:
    """Rank 1 copies until 100 and computes on the same stream until 160. Rank 0 has copied 1 in 3 until 100, and then copies 1 in 2."""
    copy = '#2 %2:float32[2] = pd_op.memcpy_h2d(%0) forward stream="in" {"dst_place_type":1}'
    alone = f'{copy}\n#3 %3:float32[2] = pd_op.gelu(%0) forward stream="in"'
    programs = [rank(COPIES, "job all forward 0: 1@0 2@0", 0, 2), rank(alone, "job all forward 0: 2@0 3@0", 1, 2)]
    sim = lower(programs, Hosts(2))
    assert run(sim, engine=engine).times.end[sim.op == 2].tolist() == [234, 100]


PRODUCTS = """
#1 %1:float32[2] = pd_op.gelu(%0) forward
#2 %2:float32[2] = pd_op.all_reduce(%1) forward group=7 stream="mp"
#3 %3:float32[2] = pd_op.gelu(%0) forward
#4 %4:float32[2] = pd_op.matmul(%0, %0) forward
"""


@pytest.mark.parametrize(
    ("between", "told"),
    [
        (0, [10_000, 60_000, 10_000, 30_000]),  # the product begins with it, holds it up for 20 us, and is not slowed
        (START_NS, [10_000, 60_000, 13_500, 33_500]),  # what began within START_NS was first
        (START_NS + 1, [10_000, 50_000, 13_501, 43_501]),  # the product is 1.5 times as long, and makes it 1.5 times as long
    ],
)
def test_a_product_that_runs_holds_a_communication_up(between: int, told: list[int]) -> None:
    cost = GivenCosts(
        {"comm": 30_000, "gemm": 20_000, "gelu": 10_000, "default": 0}, {("gemm", "comm"): (1.5, 1.5)}, holds=[("gemm", "comm")]
    )
    sim = lower([rank(PRODUCTS, "job all forward 0: 1-4@0", 0, 2, "group 7 = 0,1\n")], cost, ALONE)
    sim.dur[2] = between
    for engine in ENGINES:
        found = run(sim, engine=engine, with_memory=False)
        assert found.times.end.tolist() == pytest.approx(told, abs=50)


def test_what_launches_nothing_takes_no_time_whatever_the_table_says() -> None:
    ops = """
#1 %1:vector<float32[2];float32[2]> = builtin.combine(%0, %0) forward
#2 %2:float32[4] = pd_op.concat(%1) forward
"""
    assert ends([rank(ops, "job all forward 0: 1-2@0")], GivenCosts({"builtin.combine": 500, "default": 10})) == [0, 10]


def test_a_time_that_no_step_can_take_is_refused() -> None:
    with pytest.raises(PlanError, match=r"#1 pd_op.gelu takes 2199023255552 ns, expected 0 to 1099511627776 ns; mend the profile"):
        simulate([rank("#1 %1:float32[2] = pd_op.gelu(%0) forward", "job all forward 0: 1@0")], table(gelu=1 << 41))


def test_pinned_memory_is_told_apart_from_the_devices() -> None:
    program = world(Shape(1, 1, 1, 3, ("", "", "", ""), frozenset({0}), width=32))[0]
    (found,) = simulate([program], table(), engine="plain").ranks
    assert found.pinned_bytes == 2 * (2 * 32 * 4)
    assert found.peak_bytes > found.pinned_bytes


# ---------------------------------------------------------------------------------------------------------- who meets whom


def sender_and_receiver(sends: int, receives: int) -> list[Program]:
    out = "".join(f'#{k + 1} pd_op.send_v2(%0) forward group=3 {{"peer":1}}\n' for k in range(sends))
    take = "".join(f'#{k + 1} %{k + 1}:float32[2] = pd_op.recv_v2() forward group=3 {{"peer":0}}\n' for k in range(receives))
    return [
        rank(out, f"job all forward 0: 1-{sends}@0", 0, 2, "group 3 = 0,1\n"),
        rank(take, f"job all forward 0: 1-{receives}@0", 1, 2, "group 3 = 0,1\n"),
    ]


@pytest.mark.parametrize("p2p", ["rendezvous", "buffered"])
def test_a_receive_whose_message_is_never_sent_is_named(p2p: str) -> None:
    with pytest.raises(PlanError, match=r"number 2 from rank 0 to rank 1 on group 3 of ranks \[0, 1\] has no send"):
        simulate(sender_and_receiver(1, 2), table(), Options(p2p=p2p))  # type: ignore[arg-type]


def test_a_buffered_send_that_nobody_receives_ends() -> None:
    assert ends(sender_and_receiver(2, 1), table(), Options(p2p="buffered"))[:2] == [10, 20]
    with pytest.raises(PlanError, match=r"number 2 from rank 0 to rank 1 on group 3 of ranks \[0, 1\] has no receive"):
        simulate(sender_and_receiver(2, 1), table())


def test_no_rank_stands_for_its_own_partner() -> None:
    with pytest.raises(PlanError, match=r"sends to rank 1, which the same rank stands for"):
        simulate(sender_and_receiver(1, 1)[:1], table(), Options(representative={1: 0}))


def test_a_rank_with_a_program_stands_for_itself() -> None:
    programs = sender_and_receiver(1, 1)
    assert ends(programs, table(), Options(representative={1: 0})) == ends(programs, table())


def test_messages_both_ways_between_two_ranks_are_two_queues() -> None:
    ops = """
#1 pd_op.send_v2(%0) forward group=3 stream="send" {{"peer":{other}}}
#2 %2:float32[2] = pd_op.recv_v2() forward group=3 stream="recv" {{"peer":{other}}}
"""
    both = [rank(ops.format(other=1 - k), "job all forward 0: 1-2@0", k, 2, "group 3 = 0,1\n") for k in (0, 1)]
    assert ends(both, table()) == [10] * 4


# ------------------------------------------------------------------------------------------------------------ why it stands

CIRCLE = (
    """
#1 %1:float32[2] = pd_op.recv_v2() forward group=3 stream="recv" {"peer":0}
#2 %2:float32[2] = pd_op.relu(%1) forward
#3 pd_op.send_v2(%0) forward group=4 stream="send" {"peer":1}
#4 %4:float32[2] = pd_op.tanh(%2) forward stream="late"
""",
    """
#1 %1:float32[2] = pd_op.recv_v2() forward group=4 stream="recv" {"peer":0}
#2 %2:float32[2] = pd_op.relu(%1) forward
#3 pd_op.send_v2(%0) forward group=3 stream="send" {"peer":1}
""",
)
"""Each host waits, behind what reads a message, for that, and only then issues the other's message."""


def circle() -> list[str]:
    """The lines that say why it stands."""
    groups = "group 3 = 1,0\ngroup 4 = 0,1\n"
    ranks = [rank(ops, f"job all forward 0: 1-{4 - k}@0 | 2@0<2@0", k, 2, groups) for k, ops in enumerate(CIRCLE)]
    with pytest.raises(PlanError) as caught:
        simulate(ranks, table())
    return str(caught.value).splitlines()


def test_a_host_that_waits_is_named_in_the_circle() -> None:
    lines = circle()
    assert "ranks wait in a circle" in lines[0]
    assert any(
        "#3 pd_op.send_v2 of micro-batch 0 waits for the host, which waits for rank 0 stream compute: #2 pd_op.relu" in line
        for line in lines[1:]
    )


def test_what_only_waits_for_the_circle_is_not_part_of_it() -> None:
    """Three items a rank; the first that is stuck, `tanh`, reads what the circle holds up."""
    lines = circle()
    assert len(lines) == 7
    assert not any("#4 pd_op.tanh" in line for line in lines[1:])


def test_who_waits_for_the_circle_of_others_is_not_part_of_it() -> None:
    """Rank 0 receives what rank 1 would send after the circle of ranks 1 and 2."""
    groups = "group 3 = 2,1\ngroup 4 = 1,2\ngroup 5 = 1,0\n"
    first = CIRCLE[0] + '#5 pd_op.send_v2(%4) forward group=5 stream="last" {"peer":1}\n'
    ops = ('#1 %1:float32[2] = pd_op.recv_v2() forward group=5 {"peer":0}', first, CIRCLE[1])
    jobs = ("1@0", "1-5@0 | 2@0<2@0", "1-3@0 | 2@0<2@0")
    ranks = [rank(ops[k], f"job all forward 0: {jobs[k]}", k, 3, groups) for k in range(3)]
    with pytest.raises(PlanError) as caught:
        simulate(ranks, table())
    assert "rank 0" not in str(caught.value)


def test_the_mate_that_is_not_there_is_named_and_not_one_that_stands_too() -> None:
    """Ranks 0 and 1 stand at the collective of three, rank 2 is stuck behind a message that never comes."""
    ready = '#1 %1:float32[2] = pd_op.all_reduce(%0) forward group=7 stream="mp"'
    stuck = (
        '#1 %1:float32[2] = pd_op.recv_v2() forward group=3 {"peer":0}\n#2 %2:float32[2] = pd_op.all_reduce(%1) forward group=7 stream="mp"'
    )
    groups = "group 7 = 0,1,2\ngroup 3 = 0,2\n"
    programs = [rank(ready, "job all forward 0: 1@0", k, 3, groups) for k in (0, 1)]
    programs.append(rank(stuck, "job all forward 0: 1-2@0", 2, 3, groups))
    with pytest.raises(PlanError) as caught:
        simulate(programs, table())
    assert "rank 0 stream mp: #1 pd_op.all_reduce of micro-batch 0 waits for its mate, rank 2" in str(caught.value)
