"""A user's pass that gives partners different orders of communication is refused by its name, and `interlace check` names it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as drawing
from hypothesis import strategies as st

from interlace.cli import main
from interlace.config import Config, make_config
from interlace.cost_model import GivenCosts
from interlace.errors import PassError
from interlace.ir import Edit, Group, Op, Program, TensorType, Value, parse
from interlace.ir.kinds import is_p2p, is_send
from interlace.passes import REGISTRY, Pass, register
from interlace.passes.base import Context
from interlace.planning.orders import captured_orders, history_of
from interlace.planning.plan import Plan, make_plan, make_plans
from interlace.scheduler.hazards import check
from interlace.scheduler.hazards.pass_orders import breaks, changes, orders_of
from tests.strategies import World, programs, worlds

Item = TypeVar("Item")
COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10})


def behind(listed: Sequence[Item], one: Item, other: Item) -> list[Item]:
    """The list with one behind the other, where it has them."""
    if one not in listed or other not in listed:
        return list(listed)
    rest = [each for each in listed if each != one]
    return [*rest[: rest.index(other) + 1], one, *rest[rest.index(other) + 1 :]]


class Moves(Pass, frozen=True, kw_only=True):
    """Move one of two equal calls behind the other."""

    name = "moves"
    after = ("split-backward",)
    ranks: tuple[int, ...] = ()
    late: bool = False
    """In the jobs, and not in the program."""

    def wanted(self, program: Program) -> list[int]:
        """Numbers of the two operations."""
        return [op.id for op in program.ops if op.layer == "sums"]

    def run(self, program: Program, context: Context) -> Program:
        if program.rank not in self.ranks or bool(program.jobs) != self.late:
            return program
        one, two = self.wanted(program)[:2]
        context.applied("moved")
        if self.late:
            jobs = [msgspec.structs.replace(job, items=tuple(behind(job.items, (one, 0), (two, 0)))) for job in program.jobs]
            return msgspec.structs.replace(program, jobs=tuple(jobs))
        ops = {op.id: op for op in program.ops}
        return program.with_ops([ops[number] for number in behind(list(ops), one, two)])


class MovesLate(Moves, frozen=True, kw_only=True):
    """The same behind the schedule."""

    name = "moves-late"
    after = ("schedule-1f1b",)
    late: bool = True


class MovesMessages(Moves, frozen=True, kw_only=True):
    """The mask of a stage is sent behind its activation, of equal size."""

    name = "moves-messages"

    def wanted(self, program: Program) -> list[int]:
        return [op.id for op in program.ops if is_p2p(op) and op.role == "forward"]


class Drops(Moves, frozen=True, kw_only=True):
    """One sum is left out."""

    name = "drops"

    def run(self, program: Program, context: Context) -> Program:
        return without(program, self.wanted(program)[0]) if program.rank in self.ranks else program


class DropsOne(Moves, frozen=True, kw_only=True):
    """Each rank leaves out the sum with its own number in `ranks`."""

    name = "drops-one"

    def run(self, program: Program, context: Context) -> Program:
        return without(program, self.wanted(program)[self.ranks[program.rank]])


class MakesAnew(Moves, frozen=True, kw_only=True):
    """New operations without an origin in place of the sums; on some ranks in the other order."""

    name = "makes-anew"

    def run(self, program: Program, context: Context) -> Program:
        old = [op for op in program.ops if op.id in self.wanted(program)]
        at, number = program.ops.index(old[0]), max(op.id for op in program.ops) + 1
        order = old[:: -1 if program.rank in self.ranks else 1]
        new = [msgspec.structs.replace(op, id=number + k, origin=-1) for k, op in enumerate(order)]
        rest = [op for op in program.ops if op not in old]
        return program.with_ops([*rest[:at], *new, *rest[at:]])


class Copies(Moves, frozen=True, kw_only=True):
    """New sums, without an origin, of copies; on some ranks in the other order."""

    name = "copies"

    def run(self, program: Program, context: Context) -> Program:
        edit, values = Edit(program), {value.id: value for value in program.values}
        calls = [op for op in program.ops if op.id in self.wanted(program)]
        made = []
        for call in calls[:: -1 if program.rank in self.ranks else 1]:
            kind = TensorType(values[call.operands[0]].shape, "float32")
            out = edit.op("pd_op.assign", call.operands, [kind], like=call)
            total = edit.op("pd_op.all_reduce", out.results, [kind], like=call, attrs=call.attrs, group=call.group)
            into = (call.operands[0], *total.results)
            back = edit.op("pd_op.assign_out_", into[::-1], [values[call.results[0]]], like=call, inplace=((0, 1),))
            made += [out, total, back]
        edit.replace(calls[0].id, made)
        edit.replace(calls[1].id, [])
        return edit.build()


class Exchanges(Moves, frozen=True, kw_only=True):
    """Two calls stay where they are and exchange their operands, or their groups, or their peers."""

    name = "exchanges"
    what: str = "operands"

    def run(self, program: Program, context: Context) -> Program:
        if program.rank not in self.ranks:
            return program
        one, two = (op for op in program.ops if op.id in self.wanted(program))
        given = {one.id: two, two.id: one}
        ops = [msgspec.structs.replace(op, **self.of(given[op.id])) if op.id in given else op for op in program.ops]
        last = [op for op in ops if op.id in given and is_send(op)]
        return program.with_ops([*(op for op in ops if op not in last), *last])

    def wanted(self, program: Program) -> list[int]:
        return super().wanted(program) or [op.id for op in program.ops if is_p2p(op) and op.role == "forward"]

    def of(self, other: Op) -> dict[str, Any]:
        """What an operation takes over."""
        if self.what == "operands":
            return {"operands": other.operands, "results": other.results}
        return {"group": other.group, "attrs": other.attrs}


def without(program: Program, gone: int) -> Program:
    """The program without an operation and what it gives."""
    results = {value for op in program.ops if op.id == gone for value in op.results}
    return program.with_ops([op for op in program.ops if op.id != gone], [each for each in program.values if each.id not in results])


OWN = (Moves, MovesLate, MovesMessages, Drops, DropsOne, MakesAnew, Copies, Exchanges)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for kind in OWN:
        register(kind)
    yield
    for kind in OWN:
        REGISTRY.pop(kind.name)


def with_sums(program: Program) -> Program:
    """Gradients of two layers of equal size, summed over the replicas, before the optimizer's first operation."""
    group, ops, values = program.groups[0].id, list(program.ops), list(program.values)
    buffers = [value for value in values if value.name.startswith("g")]
    at = next(k for k, op in enumerate(ops) if op.role == "optimize")
    for k, buffer in enumerate(buffers):
        values.append(Value(len(values), buffer.shape, buffer.dtype, buffer.storage, persistable=True))
        ops.insert(
            at + k,
            Op(
                len(program.ops) + k,
                "pd_op.all_reduce_",
                (buffer.id,),
                (values[-1].id,),
                "optimize",
                layer="sums",
                group=group,
                inplace=((0, 0),),
                attrs={"reduce_type": 0},
            ),
        )
    return program.with_ops(ops, values)


def replicas() -> list[Program]:
    return [with_sums(program) for program in programs(World(dp=2, layers=2, micro_batches=2, schedule="accumulate"))]


def stages() -> list[Program]:
    return programs(World(pp=2, micro_batches=3, masks=True))


def config(**options: Any) -> Config:
    return make_config({"schedule_1f1b": {"interleave": "off"}, **options})


def refused(given: list[Program], **options: Any) -> str:
    with pytest.raises(PassError) as found:
        make_plans(given, config(**options), COSTS, "cpu")
    return str(found.value)


@pytest.mark.parametrize("name", ["moves", "moves_late"])
def test_a_pass_that_moves_an_equal_sum_on_one_rank_is_refused_by_name(name: str) -> None:
    told = refused(replicas(), **{name: {"ranks": [1]}})
    kebab = name.replace("_", "-")
    ids = [op.id for op in replicas()[0].ops if op.layer == "sums"]
    assert told == (
        f"pass '{kebab}': group 50 of ranks [0, 1]: after pass '{kebab}' ranks 0 and 1 no longer issue the same collectives in "
        f"one order; number 0 is #{ids[0]} pd_op.all_reduce_ (sums) of micro-batch 0 on rank 0, "
        f"#{ids[1]} pd_op.all_reduce_ (sums) of micro-batch 0 on rank 1; let the pass keep the order of communication inside each group, "
        "or change it on all ranks alike"
    )


def test_a_pass_that_moves_a_message_on_one_stage_is_refused_by_name() -> None:
    told = refused(stages(), moves_messages={"ranks": [0]})
    assert told.startswith(
        "pass 'moves-messages': group 100 of ranks [0, 1], 0 to 1: after pass 'moves-messages' ranks 0 and 1 no longer "
        "send and receive the same messages in one order; number 0 is #"
    )


def test_ranks_that_stand_for_others_are_compared() -> None:
    first, _, second, _ = programs(World(pp=2, dp=2, micro_batches=3, masks=True))
    given = [msgspec.structs.replace(first, equivalent_ranks=(1,)), msgspec.structs.replace(second, equivalent_ranks=(3,))]
    assert refused(given, moves_messages={"ranks": [2]}).startswith("pass 'moves-messages': group ")
    assert len(make_plans(given, config(moves_messages={"ranks": [0, 2]}), COSTS, "cpu")) == 2


def test_a_call_that_one_rank_lacks_is_told() -> None:
    told = refused(replicas(), drops={"ranks": [0]})
    assert told.startswith("pass 'drops': group 50 of ranks [0, 1]: after pass 'drops' ")
    assert "number 1 is none on rank 0, #" in told


@pytest.mark.parametrize("name", ["moves", "moves_late", "drops"])
def test_a_pass_that_does_the_same_on_all_ranks_passes(name: str) -> None:
    plans = make_plans(replicas(), config(**{name: {"ranks": [0, 1]}}), COSTS, "cpu")
    assert check([plan.program for plan in plans]) == []


def test_the_pass_that_breaks_the_order_is_named_and_none_that_changes_it_on_all_ranks() -> None:
    assert refused(replicas(), moves={"ranks": [0, 1]}, moves_messages={"ranks": []}, moves_late={"ranks": [1]}).startswith(
        "pass 'moves-late': group 50"
    )


def test_passes_after_which_the_ranks_have_one_order_again_pass() -> None:
    plans = make_plans(replicas(), config(moves={"ranks": [1]}, moves_late={"ranks": [0]}), COSTS, "cpu")
    assert check([plan.program for plan in plans]) == []


def test_nothing_is_refused_without_the_check() -> None:
    plans = make_plans(replicas(), config(moves={"ranks": [1]}, check=False), COSTS, "cpu")
    assert [finding.kind for finding in check([plan.program for plan in plans])] == ["collective-order"]


def alone(given: list[Program], folder: Path, **options: Any) -> list[Plan]:
    """Plans of ranks that do not know of each other."""
    plans = [make_plan(program, config(**options), COSTS, "cpu") for program in given]
    for plan in plans:
        plan.dump(folder)
    return plans


def test_check_names_the_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that are planned one by one are first compared there."""
    alone(replicas(), tmp_path / "wrong", moves={"ranks": [1]})
    assert main(["check", str(tmp_path / "wrong")]) == 1
    said = capsys.readouterr().out
    assert "- collective-order: group 50 of ranks [0, 1]: collective 2 differs: rank 0 #" in said or "collective 0 differs" in said
    assert "- collective-order: group 50 of ranks [0, 1]: after pass 'moves' ranks 0 and 1 no longer issue the same " in said
    alone(replicas(), tmp_path / "right", moves={"ranks": [0, 1]})
    assert main(["check", str(tmp_path / "right")]) == 0
    assert "safe: no race" in capsys.readouterr().out


def two_rings() -> list[Program]:
    """Replicas that take the second sum on another ring."""
    made = []
    for program in replicas():
        number = [op.id for op in program.ops if op.layer == "sums"][1]
        ops = [msgspec.structs.replace(op, group=90) if op.id == number else op for op in program.ops]
        made.append(msgspec.structs.replace(program.with_ops(ops), groups=(*program.groups, Group(90, (0, 1)))))
    return made


def two_messages() -> list[Program]:
    """Rank 0 sends two values of equal size to rank 1."""
    head = (
        "program rank={} world=2 mode=train\npipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate\ngroup 7 = 0,1\n"
        '#0 %0:float32[2]"x" = pd_op.data() forward\n#1 %1:float32[2]"y" = pd_op.data() forward\n'
    )
    send = '#{} pd_op.send_v2(%{}) forward group=7 layer="sums" {{"peer":1}}\n'
    receive = '#{0} %{0}:float32[2] = pd_op.recv_v2() forward group=7 layer="sums" {{"peer":0}}\n'
    texts = (send.format(2, 0) + send.format(3, 1), receive.format(2) + receive.format(3))
    return [parse(head.format(rank) + text) for rank, text in enumerate(texts)]


def to_two_peers() -> list[Program]:
    """Rank 0 sends values of equal size to ranks 1 and 2, on one ring."""
    head = (
        "program rank={} world=3 mode=train\npipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate\ngroup 7 = 0,1,2\n"
        '#0 %0:float32[2]"x" = pd_op.data() forward\n'
    )
    send = '#{} pd_op.send_v2(%{}) forward group=7 layer="sums" {{"peer":{}}}\n'
    double = "#1 %1:float32[2] = pd_op.add(%0, %0) forward\n"
    receive = '#1 %1:float32[2] = pd_op.recv_v2() forward group=7 layer="sums" {"peer":0}\n'
    texts = (double + send.format(2, 0, 1) + send.format(3, 1, 2), receive, receive)
    return [parse(head.format(rank) + text) for rank, text in enumerate(texts)]


WRONG: dict[str, tuple[Callable[[], list[Program]], dict[str, Any], str]] = {
    "each leaves out another one": (replicas, {"drops_one": {"ranks": [0, 1]}}, "optimize call 1 (#"),
    "made anew in another order": (replicas, {"makes_anew": {"ranks": [1]}}, "optimize call 1 (#"),
    "copies summed in another order": (replicas, {"copies": {"ranks": [1]}}, "optimize call 1 (#"),
    "other operands": (replicas, {"exchanges": {"ranks": [1]}}, "optimize call 1 (#"),
    "other messages sent": (two_messages, {"exchanges": {"ranks": [0]}}, "forward call 1 (#"),
    "other messages received": (two_messages, {"exchanges": {"ranks": [1]}}, "forward call 1 (#"),
}


@pytest.mark.parametrize("case", WRONG)
def test_calls_that_stand_for_others_than_their_partners_are_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has as many calls as before, or as its partner, all of equal size: only the captured program tells them apart."""
    given, options, other = WRONG[case]
    name = next(iter(options)).replace("_", "-")
    told = refused(given(), **options)
    assert told.startswith(f"pass '{name}': group ")
    assert told.count("is the captured") == 1
    assert f"the captured {other}" in told
    alone(given(), tmp_path, **options)
    assert main(["check", str(tmp_path)]) == 1
    assert f"after pass '{name}'" in capsys.readouterr().out


ALIKE: dict[str, tuple[Callable[[], list[Program]], dict[str, Any]]] = {
    "all leave out the same": (replicas, {"drops_one": {"ranks": [1, 1]}}),
    "made anew on all": (replicas, {"makes_anew": {"ranks": []}}),
    "made anew on all in another order": (replicas, {"makes_anew": {"ranks": [0, 1]}}),
    "copies summed on all": (replicas, {"copies": {"ranks": []}}),
    "copies summed on all in another order": (replicas, {"copies": {"ranks": [0, 1]}}),
    "other operands on all": (replicas, {"exchanges": {"ranks": [0, 1]}}),
    "other messages on both": (two_messages, {"exchanges": {"ranks": [0, 1]}}),
}


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2]])
def test_a_call_keeps_its_group_and_its_peer(ranks: list[int]) -> None:
    """Lowering takes both from the captured call."""
    for given, fact in ((two_rings, "group"), (to_two_peers, "attrs")):
        told = refused(given(), exchanges={"ranks": ranks, "what": "groups"})
        assert told.startswith("pass 'exchanges': #")
        assert f" has {fact} " in told


@pytest.mark.parametrize("case", ALIKE)
def test_calls_that_stand_for_others_on_all_ranks_alike_pass(case: str) -> None:
    given, options = ALIKE[case]
    assert check([plan.program for plan in make_plans(given(), config(**options), COSTS, "cpu")]) == []


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@drawing(worlds(max_pp=2, max_dp=2, max_micro_batches=3, max_layers=2), st.sampled_from(["mixed", "dx-first", "off"]))
def test_our_own_passes_keep_the_captured_calls(drawn: World, form: str) -> None:
    plans = make_plans(programs(drawn), make_config({"schedule_1f1b": {"interleave": form}}), COSTS, "cpu")
    assert breaks([history_of(each.captured, each.program, captured_orders(each.captured), each.reports) for each in plans]) == []


def test_captured_programs_that_differ_blame_no_pass() -> None:
    """One rank sums one gradient less: the calls themselves are told by the common proof."""
    first, second = replicas()
    less = Drops(ranks=(1,)).run(second, Context(COSTS))
    plans = make_plans([first, less], config(moves={"ranks": []}), COSTS, "cpu")
    assert [finding.kind for finding in check([plan.program for plan in plans])] == ["collective-order"]


def test_micro_batches_in_another_order_are_another_order() -> None:
    program = make_plan(programs(World(pp=2, micro_batches=2))[0], config(), COSTS, "cpu").program
    call = next(op.id for op in program.ops if is_p2p(op) and op.role == "forward")
    jobs = [msgspec.structs.replace(job, items=tuple((op, 1 - m if op == call else m) for op, m in job.items)) for job in program.jobs]
    (change,) = changes(orders_of(program), orders_of(msgspec.structs.replace(program, jobs=tuple(jobs))))
    assert change.group == next(op.group for op in program.ops if op.id == call)


def test_orders_of_a_program_are_those_of_its_operations() -> None:
    program = replicas()[0]
    assert changes(orders_of(program), orders_of(Moves(ranks=(0,)).run(program, Context(COSTS))))


def test_records_without_orders_blame_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of an older version; the calls themselves are told all the same."""
    alone(replicas(), tmp_path, moves={"ranks": [1]})
    for path in (tmp_path / "captured").glob("*.json"):
        record = msgspec.json.decode(path.read_bytes())
        del record["captured_orders"]
        for report in record["reports"]:
            del report["orders"]
        path.write_bytes(msgspec.json.encode(record))
    assert main(["check", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "collective-order: group 50 of ranks [0, 1]: collective" in said
    assert "after pass" not in said
