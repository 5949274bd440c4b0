"""`narrow-gathers`: the values of every rank are those of before, element by element, and what is no exchange stays a gathering."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from interlace.cost_model import GivenCosts
from interlace.ir import Graph, Program, parse, verify
from interlace.passes import NarrowGathers, Pipeline
from interlace.passes.narrow_gathers import sites
from interlace.passes.pipeline import PassReport
from tests.remarks import rules_of
from tests.together import run_together

Array = NDArray[np.int64]
COSTS = GivenCosts({"default": 1})


def text(rank: int, ranks: Sequence[int], shape: Sequence[int], cut: int, joined: int = 0, part: int | None = None, more: str = "") -> str:
    """Rank `rank`'s program: a tensor of this shape is gathered, joined along a dim, and part `part` (its own) of dim `cut` is kept."""
    count = len(ranks)
    whole = [*shape]
    whole[joined] *= count
    length = whole[cut] // count
    part = ranks.index(rank) if part is None else part
    kept = [length if dim == cut else size for dim, size in enumerate(whole)]
    join = f"""#2 %2:int32[1] = pd_op.full() forward {{"value":0.0}}
#3 %3:vector<{";".join([tensor(shape)] * count)}> = pd_op.split_with_num(%1, %2) forward {{"num":{count}}}
#4 %4:int32[1] = pd_op.full() forward {{"value":{float(joined)}}}
#5 %5:{tensor(whole)} = pd_op.concat(%3, %4) forward
"""
    return f"""program rank={rank} world={max(ranks) + 1} mode=train
group 7 = {",".join(map(str, ranks))}
#0 %0:{tensor(shape)}"x" = pd_op.data() forward
#1 %1:{tensor([count * shape[0], *shape[1:]])} = pd_op.all_gather(%0) forward group=7 {{"nranks":{count},"ring_id":7}}
{join if joined else ""}#6 %6:int64[1] = pd_op.full_int_array() forward {{"value":[{part * length}]}}
#7 %7:int64[1] = pd_op.full_int_array() forward {{"value":[{(part + 1) * length}]}}
#8 %8:{tensor(kept)} = pd_op.slice(%{5 if joined else 1}, %6, %7) forward {{"axes":[{cut}],"decrease_axis":[]}}
#9 %9:{tensor(kept)} = pd_op.relu(%8) forward
{more}"""


def tensor(shape: Sequence[int]) -> str:
    """A type as text."""
    return f"float32[{','.join(map(str, shape))}]"


def narrowed(texts: Sequence[str]) -> tuple[list[Program], list[PassReport]]:
    """What the pass makes of these ranks' programs, which plan together."""
    pipeline = Pipeline((NarrowGathers(),))
    made = run_together(pipeline, list(map(parse, texts)), COSTS)
    for program, _ in made:
        verify(program)
    return [program for program, _ in made], [reports[0] for _, reports in made]


def computed(programs: Sequence[Program], last: int) -> list[Array]:
    """Value `last` of each rank, where all of them run operation by operation."""
    values: list[dict[int, Array | list[Array]]] = [{} for _ in programs]
    for together in zip(*(program.ops for program in programs), strict=True):
        for rank, (op, mine) in enumerate(zip(together, values, strict=True)):
            read = [mine.get(value) for value in op.operands]
            if op.kind in ("all_gather", "all_to_all"):
                sent = [each[op.operands[0]] for each in values]
                parts = sent if op.kind == "all_gather" else [np.split(each, len(programs))[rank] for each in sent]
                mine[op.results[0]] = np.concatenate(parts)
            elif op.kind == "data":
                shape = next(value.shape for value in programs[rank].values if value.id == op.results[0])
                mine[op.results[0]] = np.arange(np.prod(shape)).reshape(shape) + 1000 * rank
            elif op.results:
                mine[op.results[0]] = evaluated(op.kind, op.attrs, read)
    return [mine[last] for mine in values]


def evaluated(kind: str, attrs: dict, read: list):  # type: ignore[type-arg,no-untyped-def]
    """What one operation gives."""
    match kind:
        case "full" | "full_int_array":
            return attrs["value"]
        case "split_with_num":
            return np.split(read[0], attrs["num"], int(read[1]))
        case "concat":
            return np.concatenate(read[0], int(read[1]))
        case "slice":
            return np.take(read[0], range(read[1][0], read[2][0]), attrs["axes"][0])
        case "reshape":
            return read[0].reshape(read[1])
        case "transpose":
            return read[0].transpose(attrs["perm"])
    return read[0]


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    ("shape", "cut", "joined"),
    [((8, 1, 3), 0, 1), ((8, 2, 3), 0, 2), ((2, 4, 3), 1, 0), ((2, 3, 4), 2, 0), ((2, 3, 4), 2, 1), ((3, 8, 2), 1, 2)],
)
def test_each_rank_gets_the_same_elements(ranks: tuple[int, ...], shape: tuple[int, ...], cut: int, joined: int) -> None:
    """Tokens to their experts, hidden dim to sequence, and back; between two other dims."""
    texts = [text(rank, ranks, shape, cut, joined) for rank in ranks]
    programs, _ = narrowed(texts)
    for before, after in zip(computed([parse(each) for each in texts], 9), computed(programs, 9), strict=True):
        np.testing.assert_array_equal(before, after)
    assert all([op.kind for op in program.ops].count("all_to_all") == 1 for program in programs)
    assert not any(op.kind in ("all_gather", "slice", "split_with_num", "concat") for program in programs for op in program.ops)


@pytest.mark.parametrize(("shape", "cut", "joined"), [((4, 1, 0), 0, 1), ((2, 0, 3), 1, 0), ((2, 0, 3), 1, 2)])
def test_a_dim_without_elements_is_exchanged_like_any_other(shape: tuple[int, ...], cut: int, joined: int) -> None:
    """One that stays as it is, and the one that is cut."""
    texts = [text(rank, (0, 1), shape, cut, joined) for rank in (0, 1)]
    programs, _ = narrowed(texts)
    for before, after in zip(computed([parse(each) for each in texts], 9), computed(programs, 9), strict=True):
        np.testing.assert_array_equal(before, after)
    assert all([op.kind for op in program.ops].count("all_to_all") == 1 for program in programs)


def test_the_group_and_its_communicator_stay() -> None:
    program = narrowed([text(rank, (0, 1), (4, 1), 0, 1) for rank in (0, 1)])[0][1]
    exchange = next(op for op in program.ops if op.kind == "all_to_all")
    assert (exchange.group, exchange.attrs, exchange.origin) == (7, {"ring_id": 7}, -1)


@pytest.mark.parametrize(
    "changed",
    [
        {"more": "#10 %10:float32[4,4] = pd_op.relu(%1) forward\n"},
        {"more": "#10 %10:float32[2,8] = pd_op.relu(%5) forward\n"},
        {"cut": 1},
        {"joined": 0},
    ],
)
def test_what_is_read_as_a_whole_stays_gathered(changed: dict[str, object]) -> None:
    """Another reader, of the gathered tensor or the joined one; the dim along which it was joined, or gathered, is cut again."""
    given = {"cut": 0, "joined": 1, **changed}
    texts = [text(rank, (0, 1), (4, 4), **given) for rank in (0, 1)]  # type: ignore[arg-type]
    assert [program.ops for program in narrowed(texts)[0]] == [parse(each).ops for each in texts]


def test_a_part_of_another_rank_is_no_exchange_on_any_of_them() -> None:
    """The second keeps the first one's part: both gather, and the first says why."""
    texts = [text(0, (0, 1), (4, 1), 0, 1), text(1, (0, 1), (4, 1), 0, 1, part=0)]
    programs, reports = narrowed(texts)
    assert [program.ops for program in programs] == [parse(each).ops for each in texts]
    assert rules_of(reports[0].remarks) == ["peers-keep-more"]
    assert reports[1].remarks == ()


def test_dims_may_be_counted_from_the_end() -> None:
    """Of the slice and of the join: the same exchange as with the dims themselves."""
    texts = [text(rank, (0, 1), (2, 4, 3), 1, 2) for rank in (0, 1)]
    from_end = [each.replace('"axes":[1]', '"axes":[-2]').replace('"value":2.0', '"value":-1.0') for each in texts]
    assert all(each != other for each, other in zip(texts, from_end, strict=True))
    programs, others = (narrowed(each)[0] for each in (texts, from_end))
    assert [each.ops for each in programs] == [each.ops for each in others]
    assert all("all_to_all" in [op.kind for op in each.ops] for each in programs)
    for before, after in zip(computed([parse(each) for each in from_end], 9), computed(others, 9), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("number", [2, 4, 6, 7])
def test_constants_that_others_read_stay(number: int) -> None:
    texts = [text(rank, (0, 1), (4, 1), 0, 1, more=f"#10 %10:int64[1] = pd_op.relu(%{number}) forward\n") for rank in (0, 1)]
    for program in narrowed(texts)[0]:
        assert {op.id for op in program.ops} & {2, 4, 6, 7} == {number}
        assert "all_to_all" in [op.kind for op in program.ops]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("= pd_op.slice(%5, %6, %7) forward", "= pd_op.slice(%5, %6, %7) backward"),
        ("= pd_op.concat(%3, %4) forward", "= pd_op.concat(%3, %4) backward"),
        ("= pd_op.split_with_num(%1, %2) forward", "= pd_op.split_with_num(%1, %2) backward"),
    ],
)
def test_what_another_role_reads_stays_gathered(was: str, now: str) -> None:
    """The slice, what joins the parts, or what takes them apart is of backward, and all behind it."""
    texts = []
    for rank in (0, 1):
        lines = text(rank, (0, 1), (4, 1), 0, 1).replace(was, now).splitlines()
        first = next(k for k, line in enumerate(lines) if " backward" in line)
        texts.append("\n".join(line.replace(" forward", " backward") if k > first else line for k, line in enumerate(lines)) + "\n")
    assert [program.ops for program in narrowed(texts)[0]] == [parse(each).ops for each in texts]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ('"decrease_axis":[]', '"decrease_axis":[0]'),
        ('"axes":[0]', '"axes":[0,1]'),
        ("%1:float32[8,1] = ", "%1:float32[8,1]! = "),  # kept beyond the step
        ("pd_op.concat(%3, %4)", "pd_op.stack(%3, %4)"),
        ("pd_op.concat(%3, %4)", "pd_op.add_n(%3)"),
        ('"ring_id":7', '"other":7'),  # no communicator is known
        ("%2:int32[1] = pd_op.full() forward", "%2:int32[1] = pd_op.full(%0) forward"),
    ],
)
def test_what_is_no_plain_part_of_a_plain_gathering_stays(was: str, now: str) -> None:
    """A dim that the slice takes away, a slice of two dims, a gathered tensor that outlives the step."""
    texts = [text(rank, (0, 1), (4, 1), 0, 1).replace(was, now) for rank in (0, 1)]
    assert all(now in each for each in texts)
    if "full(%0)" in now:  # it is computed, so it stays when the gathering goes
        assert all(2 in {op.id for op in program.ops} for program in narrowed(texts)[0])
        return
    assert [program.ops for program in narrowed(texts)[0]] == [parse(each).ops for each in texts]


@pytest.mark.parametrize("kept_first", [0, 1])
def test_gatherings_of_one_group_are_told_apart_by_their_place_and_their_dim(kept_first: int) -> None:
    """Two gatherings of a group; of one of them a rank keeps another part. It stays, before the other or behind, which is exchanged."""
    texts = []
    for rank in (0, 1):
        second = rank if kept_first else 0
        texts.append(
            text(rank, (0, 1), (4, 2), 0, 1, part=0 if kept_first else rank)
            + f"""
#11 %11:float32[8,2] = pd_op.all_gather(%0) forward group=7 {{"nranks":2,"ring_id":7}}
#12 %12:int64[1] = pd_op.full_int_array() forward {{"value":[{second}]}}
#13 %13:int64[1] = pd_op.full_int_array() forward {{"value":[{second + 1}]}}
#14 %14:float32[8,1] = pd_op.slice(%11, %12, %13) forward {{"axes":[1],"decrease_axis":[]}}
"""
        )
    programs, reports = narrowed(texts)
    for program in programs:
        kinds = [op.kind for op in program.ops if op.group == 7]
        assert kinds == (["all_gather", "all_to_all"] if kept_first else ["all_to_all", "all_gather"])
    assert sorted(rules_of(reports[0].remarks)) == ["gather-narrowed", "peers-keep-more"]
    assert rules_of(reports[1].remarks) == ["gather-narrowed"]


def test_a_gathering_is_named_by_the_collectives_of_its_ranks_before_it() -> None:
    """In program order, whatever is behind it."""
    texts = []
    for rank in (0, 1):
        lines = text(rank, (0, 1), (4, 4), 1).splitlines()
        again = [re.sub(r"([#%])(\d+)", lambda found: f"{found[1]}{int(found[2]) + 20}", line) for line in lines[2:]]
        summed = "#19 %19:float32[4,4] = pd_op.all_reduce(%0) forward group=7"
        texts.append("\n".join([*lines, summed, *again, "#49 %49:float32[4,4] = pd_op.all_reduce(%0) forward group=7", ""]))
    for each in texts:
        program = parse(each)
        verify(program)
        assert list(sites(Graph(program))) == [((0, 1), 0, 1), ((0, 1), 2, 1)]
