"""The part of the proof that needs all ranks: what each rank says, what they find together, and at what cost."""

from __future__ import annotations

import time

import msgspec
import pytest

from interlace.cost_model import GivenCosts
from interlace.errors import PlanError
from interlace.ir import Group, Op, Program, parse
from interlace.ir.target import CPU, GPU
from interlace.scheduler.hazards import Finding, RankComm, check, check_together, unpacked
from interlace.scheduler.hazards.check import prove
from interlace.scheduler.hazards.skeleton import Skeleton
from interlace.scheduler.simulate.simulator import simulate
from tests.scheduler.groups import HEAD, pair, program, three_ranks_in_a_circle
from tests.strategies import plan, random_world


def kinds(found: list[Finding]) -> list[str]:
    return [finding.kind for finding in found]


def test_three_ranks_and_three_groups_of_two_stand_in_a_circle() -> None:
    """Each rank alone is safe, and partners agree about every group."""
    ranks = three_ranks_in_a_circle()
    for one in ranks:
        assert check([one]) == []
    (finding,) = check(ranks)
    assert finding.kind == "deadlock"
    assert finding.ranks == (0, 1, 2)
    assert "3 communications never start" in finding.remedy
    assert check(three_ranks_in_a_circle(straight=True)) == []


# ------------------------------------------------------------------------------------------------------ what each rank says


def received(comm: RankComm) -> RankComm:
    """Communication of a rank as another rank gets it."""
    return RankComm(comm.rank, comm.groups, comm.rings, unpacked(comm.skeleton.packed))


def test_what_ranks_say_is_all_that_the_proof_needs() -> None:
    """Equal plans, no deadlock. Of any world the skeletons alone lead to the verdict that whole programs lead to."""
    for seed in range(12):
        ranks = plan(random_world(seed, streams=True))
        for target in (GPU, CPU):
            proof = prove(ranks, target)
            assert proof.findings == []
            assert check_together([received(comm) for comm in proof.comms], target, lambda queries: pytest.fail(f"{queries}")) == []


def test_a_skeleton_that_did_not_come_whole_is_refused() -> None:
    skeleton = prove(three_ranks_in_a_circle(), GPU).comms[0].skeleton
    assert unpacked(skeleton.packed) == skeleton
    for wrong in (skeleton.packed[:-9], b"", b"x" + skeleton.packed, skeleton.packed[:20] + b"?" + skeleton.packed[21:]):
        with pytest.raises(PlanError, match="did not come whole"):
            unpacked(wrong)


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ({"way": [0]}, "columns of unequal length: ring 2, way 1"),
        ({"num_waits": [0, 7]}, "num_waits counts 7 waits, there are"),
        ({"num_waits": [-1, 2], "waits": [0]}, "num_waits counts 1 waits, there are 1"),
        ({"role": [0, 9]}, "role 9 of 3"),
        ({"signature": [0, -1]}, "signature -1 of"),
        ({"num_waits": [1, 0], "waits": [1]}, "call 0 waits for one that is not before it"),
    ],
)
def test_a_skeleton_whose_columns_do_not_fit_is_refused(column: dict[str, list[int]], told: str) -> None:
    """It unpacks, but is none that a rank would say."""
    skeleton = prove(three_ranks_in_a_circle(), GPU).comms[0].skeleton
    wrong = msgspec.structs.replace(skeleton, calls=msgspec.structs.replace(skeleton.calls, **column))
    with pytest.raises(PlanError, match=rf"{told}.*run the same version of Interlace on all ranks"):
        unpacked(wrong.packed)


def grid(stages: int, data: int, tensor: int, calls: int) -> tuple[list[RankComm], int]:
    """What the ranks of a mesh say whose stages do `calls` reductions, each over both of two axes, and pass on to the next stage."""
    world, lanes = stages * data * tensor, data * tensor
    comms = []
    shared: dict[int, Skeleton] = {}
    for rank in range(world):
        stage, lane = divmod(rank, lanes)
        first = stage * lanes
        groups = [
            Group(10 + rank // tensor, tuple(rank // tensor * tensor + k for k in range(tensor))),
            Group(1000 + stage * tensor + lane % tensor, tuple(range(first + lane % tensor, first + lanes, tensor))),
        ]
        groups += [Group(9000 + rank - lanes, (rank - lanes, rank))] if stage else []
        groups += [Group(9000 + rank, (rank, rank + lanes))] if stage < stages - 1 else []
        if stage not in shared:
            shared[stage] = prove([_stage_program(groups, rank, world, stage, stages, calls)], GPU).comms[0].skeleton
        used = tuple(group.id for group in groups)
        used = (*used[2:3], *used[:2], *used[3:]) if stage else used
        comms.append(RankComm(rank, tuple(groups), used, shared[stage]))
    return comms, len(shared)


def _stage_program(groups: list[Group], rank: int, world: int, stage: int, stages: int, calls: int) -> Program:
    lines = [f"group {group.id} = {','.join(map(str, group.ranks))}" for group in groups]
    lines.append('#0 %0:float32[2]"x" = pd_op.data() forward')
    if stage:
        lines.append(f'#1 %1:float32[2] = pd_op.recv_v2() forward group={groups[2].id} {{"peer":0}}')
    for k in range(2, 2 + calls):
        lines.append(f"#{k} %{k}:float32[2] = pd_op.all_reduce(%0) forward group={groups[k % 2].id}")
    if stage < stages - 1:
        lines.append(f'#{2 + calls} pd_op.send_v2(%0) forward group={groups[-1].id} {{"peer":1}}')
    names = [line.split()[0][1:] for line in lines if line.startswith("#")][1:]
    lines.append("job f forward 0: " + " ".join(f"{name}@0" for name in names))
    made = program("\n".join(lines), rank, world)
    return msgspec.structs.replace(made, pipeline=msgspec.structs.replace(made.pipeline, stage=stage, num_stages=stages))


def test_a_large_world_costs_one_rank_a_stage() -> None:
    """2,048 ranks: eight skeletons of a few kilobytes, judged in seconds."""
    comms, stages = grid(8, 32, 8, 500)
    assert len(comms) == 2048
    assert stages == len({comm.skeleton.mark for comm in comms}) == 8
    assert max(len(comm.skeleton.packed) for comm in comms[::256]) < 20_000
    start_s = time.process_time()
    assert check_together(comms, GPU, lambda queries: pytest.fail(f"{queries}")) == []
    assert time.process_time() - start_s < 20


def test_what_is_a_circle_of_stages_and_none_of_ranks_passes() -> None:
    """All ranks do the same, hand on to the right and then take from the left: folded, they wait for themselves."""

    def chain(closed: bool) -> list[Program]:
        count, made = 4, []
        for rank in range(count):
            left, right = (rank - 1) % count, (rank + 1) % count
            lines = [
                f"group {50 + left} = {left},{rank}",
                f"group {50 + rank} = {rank},{right}",
                '#0 %0:float32[2]"x" = pd_op.data() forward',
                f'#1 pd_op.send_v2(%0) forward group={50 + rank} {{"peer":1}}',
                f'#2 %2:float32[2] = pd_op.recv_v2() forward group={50 + left} {{"peer":0}}',
            ]
            ends = {0: lines[:1] + lines[4:], count - 1: lines[1:2] + lines[3:4]} if not closed else {}
            lines = [line for line in lines if line not in ends.get(rank, [])]
            items = " ".join(f"{k}@0" for k in (1, 2) if any(line.startswith(f"#{k} ") for line in lines))
            made.append(program("\n".join([*lines, f"job f forward 0: {items}"]), rank, count))
        return made

    assert check(chain(closed=False)) == []
    proof = prove(chain(closed=False), GPU)
    assert len({comm.skeleton.mark for comm in proof.comms}) == 3
    (finding,) = check(chain(closed=True))
    assert finding.kind == "deadlock"
    assert finding.ranks == (0, 1, 2, 3)
    assert check(chain(closed=True), CPU) == []


# ------------------------------------------------------------------------------------------------------ who is who among rings


def test_ranks_with_unequal_lists_of_groups_are_compared_group_by_group() -> None:
    """Rank 0 knows a group of the same ranks that rank 1 does not list: their numbers say which is which."""
    assert check(pair(((5, 7), (7,)), ((7, 7), (7, 7)))) == []
    found = check(pair(((5, 7), (7,)), ((5, 5), (7, 7))))
    assert kinds(found) == ["collective-order"] * 2
    assert found[0].message.startswith("group 5 of ranks [0, 1]: collective 0 differs: rank 0 #1 pd_op.all_reduce (a)")
    assert "rank 1 has only 0" in found[0].message


def test_ranks_that_number_their_rings_apart_are_known_by_their_order() -> None:
    assert check(pair(((7, 8), (27, 28)), ((7, 8), (27, 28)))) == []
    assert kinds(check(pair(((7, 8), (27, 28)), ((7, 7), (28, 28))))) == ["collective-order"] * 2
    simulate(pair(((7, 8), (27, 28)), ((7, 8), (27, 28))), GivenCosts({"default": 5}))
    (finding,) = check(pair(((7, 8), (28,)), ((8, 8), (28, 28))))
    assert finding.kind == "wrong-group"
    assert finding.message == "groups of ranks [0, 1]: rank 0 has 7, 8, rank 1 has 28; which of them are the same cannot be told"


def test_groups_of_the_same_ranks_in_another_order_are_two() -> None:
    ranks = pair(((7,), (7,)), ((7, 7), (7, 7)))
    turned = msgspec.structs.replace(ranks[1], groups=(Group(7, (1, 0)),))
    assert set(kinds(check([ranks[0], turned]))) == {"collective-order"}


# -------------------------------------------------------------------------------------------------- what no rank may do at all


@pytest.mark.parametrize(
    ("ranks", "call", "words"),
    [
        ("1,2", "%1:float32[2] = pd_op.all_reduce(%0) forward group=7", "group 7 of ranks [1, 2], to which rank 0 does not belong"),
        ("1,2", '%1:float32[2] = pd_op.recv_v2() forward group=7 {"peer":1}', "to which rank 0 does not belong"),
        ("0,1", 'pd_op.send_v2(%0) forward group=7 {"peer":0}', "in which its peer is the rank itself"),
        ("1,0", '%1:float32[2] = pd_op.recv_v2() forward group=7 {"peer":1}', "in which its peer is the rank itself"),
    ],
)
def test_calls_that_nobody_answers_are_found(ranks: str, call: str, words: str) -> None:
    text = f'group 7 = {ranks}\n#0 %0:float32[2]"x" = pd_op.data() forward\n#1 {call}\njob f forward 0: 1@0'
    (finding,) = check([program(text, 0, 3)])
    assert finding.kind == "wrong-group"
    assert words in finding.message
    assert "rank 0 #1 pd_op." in finding.message


def test_what_has_a_group_is_communication_of_whatever_kind() -> None:
    """Kinds that are no plain collective, and kinds that nobody knows."""
    for name in ("pd_op.margin_cross_entropy", "pd_op.all_of_a_sudden"):
        ranks = pair(((7, 8), (7, 8)), ((7, 8), (7, 8)))
        ops = [[_renamed(op, name) for op in one.ops] for one in ranks]
        ranks = [one.with_ops(its) for one, its in zip(ranks, ops, strict=True)]
        assert check(ranks) == []
        simulate(ranks, GivenCosts({"default": 5}))
        jobs = [msgspec.structs.replace(job, items=job.items[::-1]) for job in ranks[1].jobs]
        crossed = msgspec.structs.replace(ranks[1], jobs=tuple(jobs))
        assert kinds(check([ranks[0], crossed])) == ["deadlock"]


def _renamed(op: Op, name: str) -> Op:
    return msgspec.structs.replace(op, name=name) if op.group == 7 else op


# ------------------------------------------------------------------------------------------------------ what partners agree on


def test_the_part_of_the_step_counts() -> None:
    """Two calls alike in kind and size are not the same for another micro-batch, or in another part of the step."""
    text = """group 7 = 0,1
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.all_reduce(%0) forward group=7
#2 %2:float32[2] = pd_op.all_reduce(%0) backward group=7
"""

    def ranks(second: str) -> list[Program]:
        head = HEAD.replace("micro_batches=1", "micro_batches=2")
        return [
            parse(head.format(rank=rank, world=2) + text + f"job f forward 0: {items}")
            for rank, items in enumerate(("1@0 2@0 1@1 2@1", second))
        ]

    assert check(ranks("1@0 2@0 1@1 2@1")) == []
    for wrong in ("1@1 2@0 1@0 2@1", "2@0 1@0 1@1 2@1"):
        assert kinds(check(ranks(wrong))) == ["collective-order"]


def test_the_last_rank_of_a_group_counts() -> None:
    text = """group 7 = 0,1,2
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.all_reduce(%0) forward group=7
#2 %2:float32[2] = pd_op.all_gather(%0) forward group=7
"""
    orders = ["1-2@0", "1-2@0", "2@0 1@0"]
    found = check([program(f"{text}job f forward 0: {order}", rank, 3) for rank, order in enumerate(orders)])
    assert [(finding.kind, finding.ranks) for finding in found] == [("collective-order", (0, 2))]


def test_two_streams_of_one_ring_take_turns() -> None:
    """A ring runs one thing after the other, whatever the streams: crossed with another ring that is a circle."""
    text = """group 7 = 0,1
group 8 = 0,1
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.all_reduce(%0) forward group=7 stream="a"
#2 %2:float32[2] = pd_op.all_gather(%0) forward group=7 stream="b"
#3 %3:float32[2] = pd_op.all_reduce(%0) forward group=8 stream="{third}"
"""
    ranks = [
        program(text.format(third=third) + f"job f forward 0: {order}", rank, 2)
        for rank, (third, order) in enumerate((("b", "1-3@0"), ("a", "3@0 1-2@0")))
    ]
    assert "deadlock" in kinds(check(ranks))
    loose = msgspec.structs.replace(GPU, name="loose", ring_is_serial=False)
    assert "deadlock" not in kinds(check(ranks, loose))


def test_waits_across_streams_of_a_rank_are_waits() -> None:
    """What is read on another stream is waited for there: in the other order on the other rank that is a circle."""
    text = """group 7 = 0,1
group 8 = 0,1
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2] = pd_op.all_reduce(%1) forward group={first} stream="a"
#3 %3:float32[2] = pd_op.all_reduce(%2) forward group={second} stream="b"
job f forward 0: 1-3@0
"""
    ranks = [program(text.format(first=7 + rank, second=8 - rank), rank, 2) for rank in range(2)]
    (finding,) = check(ranks)
    assert finding.kind == "deadlock"
    assert finding.message.count("through data to #3 pd_op.all_reduce") == 2
