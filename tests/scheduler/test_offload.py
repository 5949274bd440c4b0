"""The offload planner: what moves, when it goes, when it comes back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace.cost_model import CostModel, GivenCosts, load_profile
from interlace.errors import ConfigError, PlanError
from interlace.ir import Event, Job, Op, Pipeline, Program, Value, parse
from interlace.passes.offload_activations import apply
from interlace.report.remarks import REASONS as REASON_WORDS
from interlace.scheduler.offload import (
    COPY_BACK,
    Measured,
    Names,
    OffloadOptions,
    OffloadPlan,
    agree,
    measure,
    plan_offload,
)
from interlace.scheduler.offload.copy_times import OpenTransfer, Timeline, place_transfers, placed_alone
from interlace.scheduler.offload.decision import Transfer
from interlace.scheduler.offload.optimizer_state import WHYS
from interlace.scheduler.offload.saved_values import REASONS, find_candidates
from interlace.scheduler.offload.selection import unknown_names
from interlace.scheduler.simulate.simulator import simulate
from tests.remarks import rules_of, sentences
from tests.strategies import World, plan, worlds

MB = 1_000_000


def chain(sizes: list[int], micro_batches: int = 3, warm: int = 2, extra: int = 0, lead: int = 60) -> Program:
    """Forward of one value a layer and `extra` more operations; `lead` operations, then the values' readers in reverse."""
    values = [Value(0, (1,), "float32", 0, "x")]
    ops = [Op(0, "pd_op.data", (), (0,), "forward")]

    def op(name: str, operands: tuple[int, ...], size: int, role: Any, layer: str) -> int:
        values.append(Value(len(values), (size // 4,), "float32", len(values)))
        ops.append(Op(len(ops), name, operands, (values[-1].id,), role, layer=layer))
        return values[-1].id

    saved = [0]
    for k, size in enumerate(sizes):
        saved.append(op("pd_op.gelu", (saved[-1],), size, "forward", f"layers.{k}.mlp"))
    head = saved[-1]
    for _ in range(extra):
        head = op("pd_op.relu", (head,), 4, "forward", "head")
    grad = op("pd_op.mean_grad", (), 4, "backward", "head")
    for _ in range(lead):
        grad = op("pd_op.relu_grad", (grad,), 4, "backward", "head")
    for k in range(len(sizes), 0, -1):
        grad = op("pd_op.gelu_grad", (saved[k], grad), 4, "backward", f"layers.{k - 1}.mlp")
    return program(ops, values, micro_batches, warm)


def program(ops: list[Op], values: list[Value], micro_batches: int, warm: int) -> Program:
    """With 1F1B jobs at a warm-up depth."""
    forward = [op.id for op in ops if op.role == "forward" and op.name != "pd_op.data"]
    backward = [op.id for op in ops if op.role == "backward"]

    def job(kind: str, ids: list[int], m: int) -> Job:
        return Job(f"{kind}_{m}", kind, m, tuple((op_id, m) for op_id in ids))

    jobs = [job("forward", forward, m) for m in range(min(warm, micro_batches))]
    for m in range(micro_batches):
        jobs += [job("backward", backward, m)]
        jobs += [job("forward", forward, m + warm)] if m + warm < micro_batches else []
    return Program(tuple(ops), tuple(values), (), Pipeline(0, warm, micro_batches, 1, "1F1B"), jobs=tuple(jobs))


def at_rate(program: Program, op_ns: int, bytes_per_s: int) -> Measured:
    """Every operation as long as every other; copies of both directions at a rate."""
    times = {s.size_bytes: s.size_bytes * 1_000_000_000 // bytes_per_s for s in find_candidates(program).saved}
    return Measured({op.id: op_ns for op in program.ops}, times, times)


def decide(program: Program, op_ns: int = 100_000, bytes_per_s: int = 10_000 * MB, **options: Any) -> OffloadPlan:
    measured = msgspec.structs.replace(at_rate(program, op_ns, bytes_per_s), memory_limit=options.pop("memory_budget", None))
    return plan_offload(program, measured, OffloadOptions(**{"min_bytes": 1 << 10, "prefetch_slack": 0.0, **options}))


def transfers(decided: OffloadPlan) -> dict[tuple[int, int], Transfer]:
    """(value, micro-batch) -> transfer."""
    return {(move.saved.value, transfer.micro_batch): transfer for move in decided.moves for transfer in move.transfers}


def place_of(program: Program) -> dict[tuple[int, int], int]:
    return {item: k for k, item in enumerate(item for job in program.jobs for item in job.items)}


# --------------------------------------------------------------------------------------------------------- O6: prefetch


def test_32_mb_at_10_gb_per_s_start_3_2_ms_ahead() -> None:
    """Prefetch. Exactly, where the operations allow it: 32 operations of 0.1 ms before the reader, across jobs."""
    program = chain([32 * MB], micro_batches=2, extra=60, lead=20)
    decided = decide(program, fraction=1.0)
    transfer = transfers(decided)[1, 1]
    place = place_of(program)
    reader = place[next(op.id for op in program.ops if op.name == "pd_op.gelu_grad"), 1]
    assert transfer.ahead_ns == 3_200_000
    assert reader - place[transfer.back_before] == 32
    assert transfer.back_before[1] == 0
    assert not transfer.late_ns
    assert decided.stall_ns == 0


def test_a_reserve_issues_the_copy_earlier_where_there_is_time() -> None:
    """Prefetch. A quarter of 3.2 ms earlier; no earlier than the copy out is over."""
    program = chain([32 * MB], micro_batches=2, extra=60, lead=20)
    ahead = [transfers(decide(program, fraction=1.0, prefetch_slack=slack))[1, 1].ahead_ns for slack in (0.25, 0.5, 5.0)]
    assert ahead == [4_000_000, 4_300_000, 4_300_000]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from((16, 32, 48)), min_size=1, max_size=3),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(10, 70),
    st.integers(0, 40),
    st.sampled_from((0.25, 1.0)),
    st.sampled_from((None, 0.4, 0.8)),
)
def test_a_reserve_loses_no_trip_and_delays_no_reader(
    sizes: list[int], micro_batches: int, warm: int, extra: int, lead: int, slack: float, budget: float | None
) -> None:
    """Memory budget, prefetch. The same transfers; no copy later; a budget holds; three quarters of what is saved stay saved."""
    program = chain([size * MB for size in sizes], micro_batches=micro_batches, warm=warm, extra=extra, lead=lead)
    plain = decide(program, fraction=1.0)
    if budget is None:
        first = plain
        second = decide(program, fraction=1.0, prefetch_slack=slack)
    else:
        least, most = plain.peak_bytes, plain.before_peak_bytes
        given_bytes = least + int(budget * (most - least))
        first, second = (decide(program, memory_budget=given_bytes, prefetch_slack=share) for share in (0.0, slack))
        assert second.peak_bytes <= given_bytes
    there, here = transfers(first), transfers(second)
    assert there.keys() == here.keys()
    assert all(here[key].ahead_ns >= there[key].ahead_ns for key in there)
    assert all(here[key].out_after == there[key].out_after for key in there)
    assert second.stall_ns <= first.stall_ns
    assert 4 * (second.before_peak_bytes - second.peak_bytes) >= 3 * (first.before_peak_bytes - first.peak_bytes)


def test_a_reserve_is_left_out_where_there_is_no_time_for_it() -> None:
    program = chain([32 * MB], micro_batches=4, warm=1, extra=16, lead=51)
    made = [transfers(decide(program, fraction=1.0, prefetch_slack=slack)).values() for slack in (0.0, 0.25)]
    ahead = [[transfer.ahead_ns for transfer in each] for each in made]
    assert len(ahead[0]) == len(ahead[1]) == 4


def test_unmeasured_bandwidth_is_just_in_time_and_marked() -> None:
    """Prefetch. Right before the reader, whatever the operations take; the text says so."""
    program = chain([32 * MB], extra=60)
    decided = plan_offload(program, Measured({op.id: 100_000 for op in program.ops}), OffloadOptions(fraction=1.0))
    reader = next(op.id for op in program.ops if op.name == "pd_op.gelu_grad")
    assert not decided.measured
    for (_, m), transfer in transfers(decided).items():
        assert transfer.just_in_time
        assert transfer.back_before == (reader, m)
    assert "just in time (copies were not measured)" in "\n".join(sentences(decided.remarks(program)))


def test_tight_memory_makes_the_return_later() -> None:
    """Prefetch, memory budget. With room the copy starts 3.2 ms ahead; where a peak stands before its reader, behind the peak."""
    ample = chain([32 * MB], micro_batches=2, extra=60)
    spike = Value(200, (8 * MB,), "float32", 200)
    ops = [*ample.ops[:-1], Op(200, "pd_op.exp", (), (200,), "backward"), *ample.ops[-1:]]
    tight = program(ops, [*ample.values, spike], 2, 2)
    free, held = decide(tight, fraction=1.0), decide(tight, memory_budget=40 * MB)
    assert [transfer.ahead_ns for transfer in transfers(free).values()] == [3_200_000, 3_200_000]
    assert free.peak_bytes > 64 * MB
    assert [(transfer.ahead_ns, transfer.late_ns) for transfer in transfers(held).values()] == [(0, 3_200_000), (0, 3_200_000)]
    assert held.peak_bytes <= 40 * MB
    assert held.stall_ns == 6_400_000
    assert "up to 3.200 ms late" in "\n".join(sentences(held.remarks(tight)))


def test_copies_of_one_direction_follow_one_another() -> None:
    """Prefetch, recompute, VPP. Readers 0.1 ms apart: the first's copy ends where the second's starts, 3.2 ms ahead of its own."""
    decided = decide(chain([32 * MB, 32 * MB], micro_batches=2, extra=100, lead=80), fraction=1.0)
    ahead = {key: transfer.ahead_ns for key, transfer in transfers(decided).items() if key[1] == 0}
    assert ahead == {(1, 0): 3_200_000, (2, 0): 6_300_000}
    assert decided.stall_ns == 0


def test_bandwidth_that_is_used_up_moves_no_more() -> None:
    """Prefetch, warm-up depth. What could not be out and back in time stays, counted; no reader waits."""
    program = chain([32 * MB] * 12, micro_batches=3, extra=40)
    decided = decide(program, bytes_per_s=6_000 * MB, fraction=1.0)
    assert decided.moves
    assert decided.reasons()["congested"][0] > 0
    assert decided.stall_ns == 0


# ---------------------------------------------------------------------------------------------------------- O7: at once


@pytest.mark.parametrize(("micro_batches", "warm", "moved"), [(3, 1, set()), (1, 4, set()), (2, 2, {0, 1}), (3, 3, {0, 1, 2})])
def test_nothing_moves_whose_return_follows_at_once(micro_batches: int, warm: int, moved: set[int]) -> None:
    """No quick return. Last stage and pp = 1 (depth 1), fewer micro-batches than stages; deeper stages do move."""
    program = chain([32 * MB], micro_batches, warm, extra=40, lead=20)
    decided = decide(program, op_ns=99_000, fraction=1.0)
    assert {transfer.micro_batch for move in decided.moves for transfer in move.transfers} == moved
    if moved != set(range(micro_batches)):
        assert decided.reasons()["at-once"] == (micro_batches - len(moved), 32 * MB * (micro_batches - len(moved)))


def test_unmeasured_needs_work_of_another_micro_batch_between() -> None:
    """No quick return, prefetch."""
    program = chain([32 * MB], micro_batches=3, warm=1, extra=64)
    decided = plan_offload(program, Measured({}), OffloadOptions(fraction=1.0))
    assert not decided.moves
    assert decided.reasons()["at-once"][0] == 3


def test_a_trip_that_frees_nothing_is_not_made() -> None:
    """No quick return. Out and back with no item in between would only cost."""
    exact, longer = (chain([32 * MB], micro_batches=1, warm=1, extra=extra, lead=32) for extra in (31, 33))
    assert decide(exact, fraction=1.0).reasons()["at-once"][0] == 1
    assert decide(longer, fraction=1.0).moves


# ---------------------------------------------------------------------------------------------------------- O4: choices


def moved_values(decided: OffloadPlan) -> set[int]:
    return {move.saved.value for move in decided.moves}


def test_fraction() -> None:
    """What is chosen. 0, a half and all of the eligible bytes; most bytes x idle time first."""
    program = chain([4 * MB, 4 * MB, 4 * MB, 4 * MB], extra=80)
    assert moved_values(decide(program, fraction=0.0)) == set()
    assert moved_values(decide(program, fraction=0.5)) == {1, 2}
    assert moved_values(decide(program, fraction=1.0)) == {1, 2, 3, 4}


def test_module_opt_out_floor_and_keep_together() -> None:
    """What is chosen. Each does what it says, alone and together."""
    program = chain([4 * MB, 8 * MB, 2 * MB, 4 * MB], extra=80)
    assert moved_values(decide(program, modules=("layers.0", "layers.[12].mlp"))) == {1, 2, 3}
    assert moved_values(decide(program, modules=("mlp",))) == {1, 2, 3, 4}
    assert moved_values(decide(program, fraction=1.0, exclude_ops=("layers.1.*", "layers.3"))) == {1, 3}
    assert moved_values(decide(program, fraction=1.0, exclude_ops=("gelu",))) == set()
    assert moved_values(decide(program, fraction=1.0, min_bytes=4 * MB)) == {1, 2, 4}
    assert moved_values(decide(program, fraction=1.0, keep_bytes=6 * MB)) == {1, 2}
    assert moved_values(decide(program, fraction=1.0, keep_bytes=(18 * MB, 0))) == set()
    options: dict[str, Any] = {"modules": ("mlp",), "exclude_ops": ("layers.0",), "min_bytes": 3 * MB, "max_in_flight": 1}
    together = decide(program, keep_bytes=4 * MB, **options)
    counts = {reason: count for reason, (count, _) in together.reasons().items()}
    assert moved_values(together) == {2}
    assert counts == {"below-floor": 1, "opted-out": 1, "kept": 3}


@pytest.mark.parametrize("cap", [1, 2, None])
def test_cap_on_copies_in_flight(cap: int | None) -> None:
    """What is chosen. No more than the cap are issued and not over, in each direction, in estimated time."""
    program = chain([8 * MB] * 6, micro_batches=4, warm=3, extra=30)
    decided = decide(program, fraction=1.0, max_in_flight=cap)
    place = place_of(program)
    each_ns = 800_000
    out = sorted(place[transfer.out_after] * 100_000 + 100_000 for transfer in transfers(decided).values())
    back = sorted(place[transfer.back_before] * 100_000 for transfer in transfers(decided).values())
    assert len(out) == 24
    assert in_flight(out, each_ns) <= (cap or 99)
    assert in_flight(back, each_ns) <= (cap or 99)
    assert cap or in_flight(out, each_ns) > 2


def in_flight(issued: list[int], each_ns: int) -> int:
    """Most copies issued and not over at one time, one running at a time."""
    ends: list[int] = []
    most = 0
    for now in issued:
        most = max(most, 1 + sum(end > now for end in ends))
        ends.append(max(now, ends[-1] if ends else 0) + each_ns)
    return most


def test_cap_of_none_moves_nothing() -> None:
    """What is chosen."""
    decided = decide(chain([4 * MB], extra=80), fraction=1.0, max_in_flight=0)
    assert not decided.moves
    assert rules_of(decided.notes) == ["no-copy-allowed"]


def test_names_that_fit_nothing_list_those_there_are() -> None:
    """What is chosen, wrong options. One program without a pipeline, or all ranks' programs, decide what exists."""
    alone = msgspec.structs.replace(chain([4 * MB]), pipeline=Pipeline(0, 1, 3, 1, "accumulate"))
    with pytest.raises(ConfigError, match=r"modules: 'attn' fits no layer; there are layers\.\*\.mlp"):
        decide(alone, modules=("attn",))
    with pytest.raises(ConfigError, match=r"exclude_ops: 'pd_op.softmax' fits .*pd_op.gelu"):
        decide(alone, fraction=1.0, exclude_ops=("pd_op.softmax",))
    stage = decide(chain([4 * MB]), modules=("attn",))
    assert sentences(stage.notes) == [
        "modules: 'attn' fits no layer of stage 0 of 2, it may fit one of another stage; there are layers.*.mlp"
    ]
    names = Names.of(chain([4 * MB]))
    assert unknown_names(OffloadOptions(modules=("mlp",)), [names]) == []
    assert unknown_names(OffloadOptions(modules=("mlp", "attn")), [names, Names(("tail.attn",), ())]) == []
    with pytest.raises(ConfigError, match="'attn' fits no layer"):
        plan_offload(chain([4 * MB]), Measured({}), OffloadOptions(modules=("mlp", "attn")), [names, names])


def test_call_by_call_opt_out() -> None:
    """What is chosen. What an operation marked `keep_on_device` gives stays."""
    program = chain([4 * MB, 4 * MB], extra=80)
    ops = [msgspec.structs.replace(op, attrs={"keep_on_device": True}) if op.id == 1 else op for op in program.ops]
    decided = decide(program.with_ops(ops), fraction=1.0)
    assert moved_values(decided) == {2}
    assert decided.reasons()["opted-out"][0] == 1


# ----------------------------------------------------------------------------------------------------------- O5: budget


def test_budget_moves_the_least() -> None:
    """Memory budget. One MB too much: of 8, 4 and 2 MB the smallest that does it goes, of both micro-batches in flight."""
    program = chain([8 * MB, 4 * MB, 2 * MB], micro_batches=2, extra=80)
    decided = decide(program, memory_budget=decide(program).before_peak_bytes - MB)
    assert set(transfers(decided)) == {(3, 0), (3, 1)}
    assert decided.out_bytes == 4 * MB
    assert decided.peak_bytes <= decided.before_peak_bytes - MB


def test_budget_that_holds_moves_nothing_and_says_so() -> None:
    """Memory budget."""
    decided = decide(chain([8 * MB], extra=80), memory_budget=1000 * MB)
    assert not decided.moves
    assert rules_of(decided.notes) == ["under-budget"]


def test_smallest_budget_of_the_group_counts() -> None:
    """Memory budget, ranks agree."""
    program = chain([8 * MB, 8 * MB], micro_batches=2, extra=80)
    peak = decide(program).before_peak_bytes
    measured = msgspec.structs.replace(at_rate(program, 100_000, 10_000 * MB), memory_limit=peak - 9 * MB)
    roomy = msgspec.structs.replace(measured, memory_limit=peak)
    assert plan_offload(program, agree([roomy, measured]), OffloadOptions()).peak_bytes <= peak - 9 * MB


@settings(max_examples=25, deadline=None)
@given(
    worlds(max_pp=1, max_mp=1, max_micro_batches=4, schedule="FThenB", offload=False, pairs=False, cut=False, hoist=False),
    st.integers(1, 200),
    st.sampled_from([1, 4]),
)
def test_budget_holds_in_the_simulator(world: World, less: int, copy_ns: int) -> None:
    """Memory budget, by hand. At every moment of the simulated step, copies on streams of their own."""
    cost = GivenCosts({"copy": copy_ns, "default": 2})
    (before,) = plan(world)
    peak = simulate([before], cost).ranks[0].peak_bytes
    decided = plan_offload(before, measure(before, cost, max(1, peak - less)), OffloadOptions(min_bytes=1))
    if "everything-moved" in rules_of(decided.notes):
        return
    after = held_back(apply(before, decided))
    result = simulate([after], cost).ranks[0]
    assert result.peak_bytes <= max(1, peak - less)
    assert result.step_ns <= simulate([before], cost).ranks[0].step_ns + decided.stall_ns


def held_back(program: Program) -> Program:
    """Copies back wait for the compute operation in front of their place, as the host's order alone does not make them."""
    ops = {op.id: op for op in program.ops}
    events: list[Event] = []
    last: tuple[int, int] | None = None
    for item in (item for job in program.jobs for item in job.items):
        if ops[item[0]].name == COPY_BACK and last is not None:
            events.append(Event(f"hold_{len(events)}", last, (item,)))
        if not ops[item[0]].stream:
            last = item
    return msgspec.structs.replace(program, events=(*program.events, *events))


# --------------------------------------------------------------------------------------------- what is said, and agreed


def test_ranks_agree_from_unequal_measurements() -> None:
    """Ranks agree, equal plans. Slowest time, smallest budget: one decision; what one rank did not measure is unmeasured."""
    program = chain([8 * MB, 8 * MB], extra=80)
    fast, slow = at_rate(program, 90_000, 11_000 * MB), at_rate(program, 100_000, 9_000 * MB)
    merged = agree([fast, msgspec.structs.replace(slow, memory_limit=5)])
    assert merged == agree([msgspec.structs.replace(slow, memory_limit=5), fast])
    assert merged.op_ns == slow.op_ns
    assert merged.out_ns == slow.out_ns
    assert merged.memory_limit == 5
    assert agree([fast, Measured(fast.op_ns)]).back_ns is None
    choice = OffloadOptions(fraction=1.0)
    assert plan_offload(program, agree([fast, slow]), choice) == plan_offload(program, agree([slow, fast]), choice)
    with pytest.raises(PlanError, match="time different operations"):
        agree([fast, Measured({1: 5})])


def test_plan_is_stored_and_read_back() -> None:
    """Text and dumps."""
    decided = decide(chain([8 * MB, 8 * MB], extra=80), fraction=1.0)
    assert msgspec.json.decode(msgspec.json.encode(decided), type=OffloadPlan) == decided


def test_explanation_counts_everything() -> None:
    """Never moved. Every saved value is moved or counted under one reason; every reason has its words."""
    program = chain([8 * MB, 512, 8 * MB], micro_batches=3, extra=80)
    decided = decide(program, modules=("layers.0", "layers.1"), min_bytes=1024)
    text = "\n".join(sentences(decided.remarks(program)))
    assert "#1 pd_op.gelu (layers.0.mlp): its result %1 (7.6 MiB) of micro-batches 0-2" in text
    assert "1 value(s), 512 B: below-floor" in text
    assert "1 value(s), 7.6 MiB: other-module" in text
    counted = sum(count for count, _ in decided.reasons().values())
    assert counted + len(decided.moves) == 3
    assert set(REASON_WORDS) == {*REASONS, *WHYS}


def test_measure_from_a_profile() -> None:
    """Times of ops, prefetch. Copies from measured samples; a profile without copies leaves them unmeasured."""
    profile = load_profile("h200")
    program = chain([32 * MB], extra=60)
    known = measure(program, CostModel(profile))
    assert known.out_ns is not None
    assert known.back_ns is not None
    assert 32 * MB in known.out_ns
    bare = measure(program, CostModel(msgspec.structs.replace(profile, copies=())))
    assert bare.out_ns is None
    assert bare.back_ns is None


def test_work_beside_the_compute_stream_gives_copies_no_time() -> None:
    """Prefetch. A collective on its own stream may be hidden: the copy starts earlier by what it would have given."""
    program = chain([32 * MB], micro_batches=2, extra=60)
    ops = [msgspec.structs.replace(op, stream="auto_parallel_mp") if op.id in (10, 11) else op for op in program.ops]
    beside = program.with_ops(ops)
    place = place_of(program)
    plain, apart = (transfers(decide(p, fraction=1.0))[1, 0] for p in (program, beside))
    assert apart.ahead_ns >= 3_200_000
    assert place[apart.back_before] <= place[plain.back_before]


# ------------------------------------------------------------------------------------------------------- small, by hand

HEAD = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
#0 %0:float32[64] = pd_op.data() forward
"""


def test_leaving_frees_the_storage_where_only_a_view_of_it_is_copied() -> None:
    (saved,) = find_candidates(
        parse(
            HEAD
            + """#1 %1:float32[64] = pd_op.exp(%0) forward
#2 %2:float32[16]~1 = pd_op.slice(%1) forward views=0:0
#3 %3:float32[16] = pd_op.gelu_grad(%2) backward
"""
        )
    ).saved
    assert (saved.value, saved.size_bytes, saved.freed_bytes) == (2, 64, 256)


def test_who_reads_a_vector_reads_its_tensors() -> None:
    """The copy out comes behind the concatenation."""
    (saved,) = find_candidates(
        parse(
            HEAD
            + """#1 %1:float32[64] = pd_op.exp(%0) forward
#2 %2:vector<float32[64];float32[64]> = builtin.combine(%1, %0) forward
#3 %3:float32[128] = pd_op.concat(%2) forward
#4 %4:float32[64] = pd_op.exp_grad(%1) backward
"""
        )
    ).saved
    assert 3 in saved.before


def test_views_are_remade_in_the_order_they_were_made_and_never_by_what_writes() -> None:
    text = (
        HEAD
        + """#1 %1:float32[64] = pd_op.exp(%0) forward
#2 %2:float32[8,8]~1 = pd_op.reshape(%1) forward views=0:0
#3 %3:float32[4,16]~1 = pd_op.reshape(%2) forward views=0:0
#4 %4:float32[64] = pd_op.exp_grad(%1, %3) backward
"""
    )
    (saved,) = find_candidates(parse(text)).saved
    assert [each.ops for each in saved.rebuilt] == [(2, 3)]
    writes = text.replace(
        "#3 %3:float32[4,16]~1 = pd_op.reshape(%2) forward views=0:0",
        "#3 %3:float32[4,16]~1, %9:float32[64]~8 = pd_op.tanh_(%2, %8) forward views=0:0 inplace=1:1",
    )
    writes = writes.replace("#2 %2", "#8 %8:float32[64] = pd_op.full() forward\n#2 %2")
    assert [each.reason for each in find_candidates(parse(writes)).skipped if each.value in (1, 2, 3)] == ["alias", "alias"]


def test_each_stage_keeps_what_was_given_for_it() -> None:
    choice = OffloadOptions(fraction=1.0, keep_bytes=(1, 2, 3))
    assert [choice.keep_on(stage, 3) for stage in range(3)] == [1, 2, 3]
    for count in (2, 4):
        with pytest.raises(ConfigError, match=rf"keep_bytes has 3 figures .* each of the {count} stages"):
            choice.keep_on(0, count)


def test_ranks_keep_the_smallest_budget() -> None:
    assert agree([Measured({1: 5}, memory_limit=90), Measured({1: 7}, memory_limit=80)]).memory_limit == 80


def test_the_two_directions_of_copies_are_timed_apart() -> None:
    found = measure(chain([32 * MB]), GivenCosts({"copy:d2h": 5, "copy:h2d": 9, "default": 1}))
    assert (found.out_ns, found.back_ns) == ({32 * MB: 5}, {32 * MB: 9})


def line_and_trip(out_ns: int, back_ns: int, op_ns: int) -> tuple[Timeline, OpenTransfer]:
    """Two jobs of three operations each; out behind the first item, read by the fourth."""
    (saved,) = find_candidates(chain([32 * MB])).saved
    ops = [Op(k, "pd_op.relu", (), (), "forward", stream="side" if k == 1 else "") for k in range(6)]
    jobs = tuple(Job(f"j{k}", "forward", 0, tuple((3 * k + n, 0) for n in range(3))) for k in range(2))
    program = Program(tuple(ops), (), (), Pipeline(0, 1, 1, 1, "none"), jobs=jobs)
    return Timeline.of(program, dict.fromkeys(range(6), op_ns)), OpenTransfer(saved, 0, 0, 3, out_ns, back_ns)


def test_what_runs_beside_compute_takes_no_time_on_its_line() -> None:
    line, _ = line_and_trip(0, 0, 10)
    assert line.at_ns == [0, 10, 10, 20, 30, 40, 50]


def test_a_copy_returns_in_a_later_job_and_in_time_or_not_at_all() -> None:
    """The reader is the later job's first item: there is no time behind the boundary, unless a copy takes none."""
    line, transfer = line_and_trip(1, 5, 10)
    assert not line.returns(0, 1, transfer)
    line, transfer = line_and_trip(0, 0, 10)
    assert line.returns(0, 10, transfer)
    assert not line.returns(0, 21, transfer)
    line, transfer = line_and_trip(0, 0, 0)
    assert not line.returns(3, 0, transfer)
    transfer.reader = 2
    assert not line.returns(0, 0, transfer)


@given(out_ns=st.integers(0, 90), back_ns=st.integers(0, 90), reader=st.integers(3, 5), measured=st.booleans(), late=st.booleans())
@example(out_ns=10, back_ns=15, reader=5, measured=True, late=True)
def test_a_transfer_placed_alone_lies_where_a_queue_of_one_puts_it(
    out_ns: int, back_ns: int, reader: int, measured: bool, late: bool
) -> None:
    line, trip = line_and_trip(out_ns, back_ns, 20)
    trip.reader, trip.not_before = reader, reader if late else 0
    queue, alone = place_transfers(line, [trip], None, measured), placed_alone(line, [trip], measured)
    (placed,) = queue.tried()
    assert alone.fits.tolist() == [bool(queue.transfers)]
    if placed.back:  # it found time in the first queue
        assert (alone.free.tolist(), alone.back.tolist()) == ([placed.free], [placed.back])


def test_what_lies_idle_longest_goes_first_not_what_is_largest() -> None:
    """The first value is 1 % smaller and lies idle for 2 % longer."""
    program = chain([4_000_000, 4_040_000], micro_batches=2, extra=20, lead=60)
    assert moved_values(decide(program, fraction=0.51)) == {1}


def test_any_operation_that_makes_a_storage_can_keep_it() -> None:
    text = (
        HEAD.replace("micro_batches=1", "micro_batches=2")
        + """#1 %1:float32[64] = pd_op.exp(%0) forward
#2 %2:float32[8,8]~1 = pd_op.reshape(%1) forward views=0:0
#3 %3:float32[64] = pd_op.exp_grad(%2) backward
job f0 forward 0: 1-2@0
job f1 forward 1: 1-2@1
job b0 backward 0: 3@0
job b1 backward 1: 3@1
"""
    )
    decided = plan_offload(parse(text), Measured({}), OffloadOptions(fraction=1.0, min_bytes=1, exclude_ops=("pd_op.reshape",)))
    assert decided.reasons()["opted-out"][0] == 1


def test_what_cannot_be_kept_moves_all_that_can_where_others_decide() -> None:
    """Memory budget. The same with any budget that is too small."""
    program = chain([8 * MB, 8 * MB], micro_batches=2, extra=80)
    made = []
    for budget in (1, 50_000):
        measured = msgspec.structs.replace(at_rate(program, 100_000, 10_000 * MB), memory_limit=budget)
        made.append(plan_offload(program, measured, OffloadOptions(min_bytes=1)))
        assert (made[-1].notes[0].rule, made[-1].notes[0].numbers["budget_bytes"]) == ("everything-moved", budget)
    assert made[0].moves == made[1].moves
    assert set(transfers(made[0])) == {(value, m) for value in (1, 2) for m in (0, 1)}


# ------------------------------------------------------------------------------------------------- the least under a budget


def test_a_budget_that_nothing_placed_can_hold_is_not_kept_however_near() -> None:
    """Memory budget. Everything out and back just in time would fit, if copies took no time: they hold 6 % more than this."""
    program = chain([size * MB for size in (8, 16, 24, 32)], micro_batches=4, warm=3, extra=10, lead=40)
    near, least = (decide(program, memory_budget=budget, prefetch_slack=0.25) for budget in (202_368_010, 216_000_012))
    assert rules_of(near.notes) == ["everything-moved"]
    assert not least.notes
    assert least.peak_bytes <= 216_000_012


def test_what_wastes_least_and_is_needed_goes() -> None:
    """Memory budget. Of 32, 8 and 16 MB the 8 of both micro-batches do; of 32, 8 and 16 the 16 alone, without the 8 tried first."""
    small = chain([size * MB for size in (32, 8, 16)], micro_batches=2, warm=2, extra=10, lead=40)
    assert set(transfers(decide(small, memory_budget=110_880_007, max_in_flight=1))) == {(2, 0), (2, 1)}
    first = chain([size * MB for size in (16, 32)], micro_batches=2, warm=3, extra=60, lead=20)
    assert set(transfers(decide(first, memory_budget=93_600_007, max_in_flight=1))) == {(1, 0), (1, 1)}
    pruned = chain([size * MB for size in (32, 8, 16)], micro_batches=2, warm=3, extra=60, lead=20)
    assert set(transfers(decide(pruned, memory_budget=101_920_007, prefetch_slack=0.25))) == {(3, 0), (3, 1)}


def test_a_reserve_does_not_break_a_budget() -> None:
    """Memory budget, prefetch. One transfer issued 0.1 ms earlier would hold 2 % more than allowed."""
    program = chain([size * MB for size in (8, 16, 24, 32)], micro_batches=2, warm=2, extra=60, lead=20)
    assert decide(program, memory_budget=133_680_007, prefetch_slack=0.25).peak_bytes <= 133_680_007
