"""What `interlace calibrate` makes of the times of operations beside collectives, transfers and copies, on a device that is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import msgspec
import pytest

pytestmark = pytest.mark.paddle

EACH_S = {"gemm": 4e-4, "attention": 2e-4, "gelu": 1e-4}
ON_OP = {"gemm": 1.6, "attention": 1.3, "gelu": 1.2}
ON_MESSAGE = {"gemm": 1.1, "attention": 1.2, "gelu": 1.8}
MESSAGE_S, LATE_S, WAIT_S = 0.004, 1.2e-6, 0.010


class Group(NamedTuple):
    id: int
    ranks: list[int]

    @property
    def nranks(self) -> int:
        return len(self.ranks)


class Simulated:
    """A device on which operations and messages slow each other down as the tables above say; a product holds collectives up."""

    def __init__(self) -> None:
        self.now_s, self.begins = 0.0, 0

    def step(
        self,
        lab: Any,
        side: Any = None,
        inputs: Any = None,
        case: Any = None,
        count: int = 0,
        is_first: bool = False,
        is_alone: bool = False,
        blocked: int = 0,
    ):
        kind = case.part.kind if case else ""
        alone_s = EACH_S[kind] * count if count else 0.0
        message_s = 0.0 if side is None or is_alone else WAIT_S if side.beside == "wait" else MESSAGE_S

        def run(times: int = 1, meanwhile: Callable[[], object] = lambda: None) -> float:
            self.begins += 1
            begin_s = 0.005 * (1 + 0.02 * (self.begins % 5 == 0))  # the work in front takes longer at times
            ops_s, left_s = alone_s + count * LATE_S * bool(blocked), message_s
            if message_s and count:
                if side.beside == "wait":
                    ops_s *= ON_OP[kind]
                    left_s -= ops_s
                elif not (is_first and kind == "gemm" and side.beside.startswith("comm:")):
                    ops_s *= ON_OP[kind]
                    left_s -= ops_s / ON_MESSAGE[kind]
            self.now_s += begin_s + ops_s
            meanwhile()
            self.now_s += left_s
            return begin_s + ops_s + left_s

        return run


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`measured_beside` on the simulated device, given what to change of it."""
    from interlace.bridge.calibrate import beside
    from interlace.bridge.probe.bench import Case
    from interlace.cost_model.work import Part

    device = Simulated()

    class Bench:
        is_fast = True

        class device:
            copy_out = copy_in = staticmethod(lambda x: x)

        def runner(self, build: Callable[[], None], inputs: Any = None) -> Callable[[], float]:
            return lambda: 0.0

        def inputs(self, case: Any) -> str:
            if case.part.kind in breaks:
                raise RuntimeError("out of memory")
            return "tensors"

    breaks: tuple[str, ...] = ()

    monkeypatch.setattr(beside.Lab, "step", lambda *given, **named: device.step(*given, **named))
    monkeypatch.setattr(beside.time, "perf_counter", lambda: device.now_s)

    def cases(kind: str, family: str, sizes: tuple[int, ...]) -> list[Any]:
        dims = [(("batch", 1), ("k", 64), ("m", size), ("n", 64)) if kind == "gemm" else (("elements", size),) for size in sizes]
        flops = [128 * size * (family != "activation") for size in sizes]
        return [
            Case(Part(kind, family, "bfloat16", each, flop, size << 10), [], lambda given: lambda: None)
            for each, flop, size in zip(dims, flops, sizes, strict=True)
        ]

    def run(rank: int = 0, world: int = 2, here: tuple[str, ...] = (), there: str = "") -> Any:
        """`here`: kinds of operations that fail on this rank; `there`: a kind that fails on the other one."""
        nonlocal breaks
        breaks = here
        groups = {world: Group(2, list(range(world)))} if world > 1 else {}
        groups |= {2: Group(1, [rank - rank % 2, rank - rank % 2 + 1])} if world % 2 == 0 else {}
        given = [
            *cases("gemm", "gemm", (1024, 2048, 4096)),
            *cases("attention", "attention", (2048,)),
            *cases("gelu", "activation", (1024, 1 << 15, 1 << 16)),
        ]
        return beside.measured_beside(Bench(), given, False, groups, rank, Pair(there) if world == 2 else None)

    return run


class Pair:
    """Two ranks; an operation of kind `fails` fails on the other one."""

    topics: ClassVar[list[str]] = []

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.topics.clear()

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        from interlace.bridge.guard import Fault

        self.topics.append(topic)
        theirs = Fault("no kernel") if self.fails and topic.startswith(f"whether {self.fails} of ") else Fault()
        return [mine, msgspec.msgpack.encode(theirs)]


@pytest.mark.parametrize(
    ("given", "why"),
    [({"here": ("gelu",)}, "rank 0: RuntimeError: out of memory"), ({"there": "gelu"}, "rank 1: no kernel")],
)
def test_an_operation_that_fails_on_one_rank_is_left_out_on_all(measured: Callable[..., Any], given: dict[str, Any], why: str) -> None:
    """Both ranks ask each other the same, whoever fails, so that neither waits for the other."""
    measured()
    asked = [*Pair.topics]
    found = measured(**given)
    assert Pair.topics == asked
    assert {row.op for row in found.rows} == {"gemm:any", "attention"}
    assert found.failed == (f"gelu of bfloat16 beside others: {why}",)


def test_factors_are_those_of_the_device(measured: Callable[..., Any]) -> None:
    found = measured()
    assert found.failed == ()
    assert found.late_ns == pytest.approx(LATE_S * 1e9, abs=1)
    messages = {"copy:d2h", "copy:h2d", "comm:all_reduce", "comm:all_gather", "comm:reduce_scatter", "comm:all_to_all", "p2p"}
    assert {(row.op, row.beside) for row in found.rows if row.beside != "wait"} == {
        (op, beside) for op in ("gemm:any", "attention", "memory:gelu") for beside in messages
    }
    for row in found.rows:
        kind = row.op.removesuffix(":any").removeprefix("memory:")
        on_message = 1.0 if row.beside == "wait" else ON_MESSAGE[kind]
        assert (row.stretch_op, row.stretch_beside) == pytest.approx((ON_OP[kind], on_message), rel=0.01)
        assert row.holds == (kind == "gemm" and row.beside.startswith("comm:"))
        assert row.group_size == 2


def test_products_beside_a_wait_are_told_apart_by_their_results(measured: Callable[..., Any]) -> None:
    rows = [row for row in measured().rows if (row.op, row.beside) == ("gemm:any", "wait")]
    assert sorted(row.dims.get("elements", 0) for row in rows) == [0, 64 * 1024, 64 * 2048, 64 * 4096]


def test_who_sends_late_measures_only_the_other_rows(measured: Callable[..., Any]) -> None:
    found = measured(rank=1)
    assert found.late_ns == pytest.approx(LATE_S * 1e9, abs=1)
    assert "wait" not in {row.beside for row in found.rows}
    assert len(found.rows) == 7 * 3


def test_every_size_of_group_has_rows(measured: Callable[..., Any]) -> None:
    found = measured(world=4)
    assert {(row.beside, row.group_size) for row in found.rows if row.beside.startswith("comm:")} == {
        (f"comm:{kind}", size) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") for size in (2, 4)
    }
    assert {row.group_size for row in found.rows if row.beside.startswith("copy:")} == {4}  # all ranks copy at once


def test_an_odd_number_of_ranks_has_no_transfers_and_says_so(measured: Callable[..., Any]) -> None:
    found = measured(world=3)
    assert {row.beside.partition(":")[0] for row in found.rows} == {"copy", "comm"}
    assert found.failed == ("transfers and receives that wait beside operations: an odd number of ranks has no groups of two",)


def test_one_rank_has_copies_only(measured: Callable[..., Any]) -> None:
    found = measured(world=1)
    assert {(row.beside, row.group_size) for row in found.rows} == {("copy:d2h", 1), ("copy:h2d", 1)}


def test_operations_that_end_after_the_message_are_named(measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EACH_S, "gelu", 0.02)
    found = measured(world=1)
    assert not [row for row in found.rows if row.op == "memory:gelu"]
    assert [line.partition(" of ")[0] for line in found.failed] == ["memory:gelu beside copy:d2h", "memory:gelu beside copy:h2d"]
    assert all("the operations ended after" in line for line in found.failed)
