"""Ranks prove their plans together before the first step: on what they say, and on the two ways by which they say it."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from interlace.errors import PlanError
from interlace.ir import Program
from interlace.ir.target import GPU, as_graph
from interlace.planning.peers import Peers
from interlace.scheduler.hazards import RankComm, check, require_safe
from tests.scheduler.groups import pair, three_ranks_in_a_circle
from tests.strategies import World, plan
from tests.together import in_threads

pytestmark = pytest.mark.paddle


@pytest.fixture(scope="module")
def agree() -> Any:
    from interlace.bridge import agree as module

    return module


def together(agree: Any, programs: Sequence[Program], options: Sequence[str] = ()) -> list[str]:
    """What each rank is refused with (nothing: it goes on), all in threads of their own."""
    given = list(zip(programs, options or [""] * len(programs), strict=True))

    def one(each: tuple[Program, str], peers: Peers) -> str:
        try:
            agree.agree(peers, each[0], each[1], require_safe([each[0]])[0], GPU)
        except PlanError as error:
            return str(error)
        return ""

    return in_threads(one, given)


# ----------------------------------------------------------------------------------------------------------------- verdicts


def test_a_circle_that_no_rank_sees_by_itself_is_refused_on_every_rank_alike(agree: Any) -> None:
    """No deadlock, equal plans. With the words of `interlace check`."""
    ranks = three_ranks_in_a_circle()
    (finding,) = check(ranks)
    texts = together(agree, ranks)
    assert texts[0] == f"the plans of all ranks together are not safe on gpu: 1 finding(s)\n  {finding}"
    assert texts == [texts[0]] * 3
    assert texts[0].count("earlier on the compute stream") == 3
    assert together(agree, three_ranks_in_a_circle(straight=True)) == [""] * 3


def test_ranks_that_capture_differently_are_refused_on_every_rank_alike(agree: Any) -> None:
    ranks = pair(((7, 8), (7, 8)), ((7, 8), (7, 8)))

    def one(program: Program, peers: Peers) -> str:
        target = as_graph(GPU) if program.rank else GPU
        try:
            agree.agree(peers, program, "[h200]", require_safe([program], target)[0], target)
        except PlanError as error:
            return str(error)
        return ""

    texts = in_threads(one, ranks)
    assert texts[0].startswith("ranks 0 and 1 planned with different options: [h200] and [h200], captured; give every rank the same ")
    assert texts[1] == texts[0]


def test_an_order_in_which_partners_differ_is_refused_on_every_rank_alike(agree: Any) -> None:
    """Equal plans. With both calls by name, each told by its own rank."""
    ranks = pair(((7, 8), (7, 8)), ((7, 7), (7, 7)))
    jobs = [msgspec.structs.replace(job, items=job.items[::-1]) for job in ranks[1].jobs]
    ranks[1] = msgspec.structs.replace(ranks[1], jobs=tuple(jobs))
    (finding,) = check(ranks)
    assert "rank 0 #1 pd_op.all_reduce (a)" in finding.message
    assert "rank 1 #3 pd_op.all_reduce (b)" in finding.message
    assert together(agree, ranks) == [f"the plans of all ranks together are not safe on gpu: 1 finding(s)\n  {finding}"] * 2
    ranks = pair(((7, 8), (7, 8)), ((7, 8), (8, 7)))
    first, second = check(ranks)
    assert "rank 1 #3 pd_op.all_reduce (b)" in first.message
    assert together(agree, ranks) == [f"the plans of all ranks together are not safe on gpu: 2 finding(s)\n  {first}\n  {second}"] * 2


def test_a_rank_that_calls_once_less_is_refused_on_every_rank_alike(agree: Any) -> None:
    ranks = plan(World(pp=2, mp=2, micro_batches=2, layers=1))
    comm = next(op.id for op in ranks[3].ops if op.group == 11 and op.role == "optimize")
    jobs = [msgspec.structs.replace(job, items=tuple(i for i in job.items if i[0] != comm)) for job in ranks[3].jobs]
    ranks[3] = msgspec.structs.replace(ranks[3], jobs=tuple(jobs))
    ranks[3] = ranks[3].with_ops([op for op in ranks[3].ops if op.role != "optimize" or op.id < comm])
    jobs = [msgspec.structs.replace(job, items=tuple(i for i in job.items if i[0] < comm)) for job in ranks[3].jobs]
    ranks[3] = msgspec.structs.replace(ranks[3], jobs=tuple(jobs))
    (finding,) = check(ranks)
    assert finding.kind == "collective-order"
    texts = together(agree, ranks)
    assert "rank 3 has only 4" in texts[0]
    assert texts == [texts[0]] * 4


def test_other_options_are_refused_on_every_rank_alike_and_shown(agree: Any) -> None:
    ranks = plan(World(pp=2, mp=2, micro_batches=2))
    texts = together(agree, ranks, ["[h200]", "[h200]", "[cpu]", "[cpu]"])
    assert (
        texts
        == ["ranks 0 and 2 planned with different options: [h200] and [cpu]; give every rank the same configuration and device profile"] * 4
    )
    assert together(agree, ranks, ["[h200]"] * 4) == [""] * 4


def test_ranks_of_one_stage_say_their_order_once(agree: Any) -> None:
    """What goes from rank to rank stays small: some hundred bytes, and a skeleton for each stage."""
    said: list[tuple[str, int, int]] = []

    class Heard:
        def __init__(self, peers: Peers) -> None:
            self.peers = peers

        def gather(self, topic: str, mine: bytes) -> list[bytes]:
            said.append((topic, len(mine), threading.get_ident()))
            return self.peers.gather(topic, mine)

    ranks = plan(World(pp=2, mp=3, micro_batches=8, layers=3))
    in_threads(lambda program, peers: agree.agree(Heard(peers), program, "", require_safe([program])[0], GPU), ranks)
    sizes = {topic: sorted(size for name, size, _ in said if name == topic) for topic, _, _ in said}
    assert list(sizes) == ["the finished plan", "orders of communication"]
    assert max(sizes["the finished plan"]) < 200
    assert sizes["orders of communication"][:4] == [0] * 4
    assert sizes["orders of communication"][4] > 0


# ------------------------------------------------------------------------------------------------------------ Paddle's store


@pytest.fixture
def stores(agree: Any) -> Callable[..., list[Any]]:
    """Clients of a store on this machine, as real ranks have them, and the rounds that they make on it."""
    from paddle.base import core

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first = core.TCPStore("127.0.0.1", port, True, 1, 30)

    def rounds(world: int, timeout_s: float = 30.0) -> list[Any]:
        clients = [first, *(core.TCPStore("127.0.0.1", port, False, 1, 30) for _ in range(world - 1))]
        return [agree.StoreRounds(client, rank, world, timeout_s) for rank, client in enumerate(clients)]

    return rounds


def on_all(rounds: Sequence[Any], act: Callable[[Any], Any]) -> list[Any]:
    """Call `act` for every rank at once; what it gave, or the text of its PlanError."""

    def one(each: Any) -> Any:
        try:
            return act(each)
        except PlanError as error:
            return str(error)

    with ThreadPoolExecutor(len(rounds)) as pool:
        return list(pool.map(one, rounds))


def test_the_store_carries_round_after_round(agree: Any, stores: Callable[..., list[Any]]) -> None:
    """Every round has keys of its own: nobody reads what was said before, however far behind it is."""
    late = itertools.count()

    def act(each: Any) -> list[list[bytes]]:
        heard = []
        for number in range(5):
            if each.rank == number % 3:
                threading.Event().wait(0.05 * (next(late) % 2))
            mine = b"" if (each.rank, number) == (1, 2) else bytes([each.rank, number, 0, 255]) * 10 ** (number % 4)
            heard.append(agree.gather_on(each, f"round {number}", mine))
        return heard

    expected = [
        [b"" if (rank, number) == (1, 2) else bytes([rank, number, 0, 255]) * 10 ** (number % 4) for rank in range(3)]
        for number in range(5)
    ]
    assert on_all(stores(3), act) == [expected] * 3


def test_a_rank_at_another_topic_is_told_to_all_through_the_store(agree: Any, stores: Callable[..., list[Any]]) -> None:
    """Equal plans."""
    texts = on_all(stores(3), lambda each: agree.gather_on(each, "offload" if each.rank == 2 else "stages", b"x"))
    assert (
        texts
        == [
            "ranks 0 and 2 have different options: one is at 'stages', the other at 'offload'; give every rank the same "
            "configuration and kind of device"
        ]
        * 3
    )


def test_a_circle_is_refused_through_the_store(agree: Any, stores: Callable[..., list[Any]]) -> None:
    class Ranks:
        def __init__(self, rounds: Any) -> None:
            self.rounds = rounds

        def gather(self, topic: str, mine: bytes) -> list[bytes]:
            return agree.gather_on(self.rounds, topic, mine)

    rounds = stores(3)
    for straight in (True, False):
        ranks = three_ranks_in_a_circle(straight)
        comms = [require_safe([one])[0] for one in ranks]

        def act(each: Any, ranks: list[Program] = ranks, comms: list[RankComm] = comms) -> None:
            agree.agree(Ranks(each), ranks[each.rank], "", comms[each.rank], GPU)

        texts = on_all(rounds, act)
        assert [text is None for text in texts] == [straight] * 3
        assert texts == [texts[0]] * 3
    assert "ranks wait in a circle" in texts[0]


def test_a_rank_that_says_nothing_is_named_and_nobody_waits_for_ever(agree: Any, stores: Callable[..., list[Any]]) -> None:
    texts = on_all(stores(3, 0.3)[:2], lambda each: agree.gather_on(each, "plan", b"x"))
    assert texts[0].startswith("rank 2 sent nothing to rank 0 within 0.3 s")
    assert texts[1].startswith("rank 0 sent nothing to rank 1 within 0.3 s")


def test_a_process_has_one_row_of_rounds_for_all_its_engines(agree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of two engines take turns on one row of keys; on a GPU place it is Paddle's own store that they use."""
    asked: list[int] = []
    monkeypatch.setattr(agree.paddle.base.core, "create_or_get_global_tcp_store", lambda: asked.append(1))
    agree._store_rounds.cache_clear()
    try:
        assert agree._store_rounds(0, 2) is agree._store_rounds(0, 2)
    finally:
        agree._store_rounds.cache_clear()
    assert asked == [1]


@pytest.mark.parametrize("ranks", [(0, 1, 3), (0, 2, 3, 5), (4,), (3, 1, 2), (0, 4, 8, 9, 10, 12), (7, 5, 3, 0)])
def test_a_groups_ranks_come_back_as_they_were(agree: Any, ranks: tuple[int, ...]) -> None:
    assert agree.members(agree.runs(ranks)) == ranks


class Transport:
    """The transport of two ranks that say these texts."""

    def __init__(self, texts: tuple[bytes, bytes]) -> None:
        self.texts = texts

    def all_gather(self, mine: Any, channel: int, ranks: tuple[int, ...], what: str, dtype: str) -> list[Any]:
        if dtype == "int64":
            return [np.array([len(text)]) for text in self.texts]
        return [np.frombuffer(text.ljust(len(mine), b"\0")[: len(mine)], dtype=np.uint8) for text in self.texts]


@pytest.mark.parametrize("texts", [(b"short", b"a good deal longer\0"), (b"a good deal longer\0", b"short"), (b"", b"x")])
def test_what_ranks_say_comes_whole_through_the_transport(agree: Any, texts: tuple[bytes, bytes]) -> None:
    """Rows are as long as the longest, and given back as long as they were."""
    for text in texts:
        assert agree.TransportRounds(Transport(texts), 2).exchange(text) == list(texts)


def test_ranks_that_another_launcher_started_use_their_transport(agree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks of a device of one's own do under Paddle's launcher: where there is a transport, Paddle has no store."""
    from interlace.cpu import ops

    monkeypatch.delenv("INTERLACE_RUN_DIR", raising=False)
    monkeypatch.setattr(agree.paddle.base.core, "create_or_get_global_tcp_store", lambda: None)
    said = tuple(msgspec.msgpack.encode(("power", text)) for text in (b"mine", b"theirs"))
    ops.set_transport(Transport(said))  # type: ignore[arg-type]
    try:
        assert agree._Ranks(0, 2).gather("power", b"mine") == [b"mine", b"theirs"]
    finally:
        ops.set_transport(None)
