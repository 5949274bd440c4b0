"""Transport between ranks: values, matching, time-outs, lost peers. Ranks are threads of this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlace.cpu.reduction import Array, bfloat16_to_float32, float32_to_bfloat16, reduce_arrays
from interlace.cpu.transport import PeerLostError, Transport
from interlace.errors import TransportError

NUMPY_DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
DTYPES = (*NUMPY_DTYPES, "bfloat16", "float8_e4m3fn")
SHAPES = ((), (0, 3), (1,), (4,), (6, 5), (2, 3, 4))


@contextmanager
def world_of(count: int, timeout_s: float = 20.0, threshold_bytes: int = 64) -> Iterator[list[Transport]]:
    """Connected transports of all ranks; arrays above `threshold_bytes` go through shared memory."""
    with tempfile.TemporaryDirectory() as run_dir:
        made: dict[int, Transport] = {}

        def make(rank: int) -> None:
            made[rank] = Transport(rank, count, run_dir, timeout_s, threshold_bytes)

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            yield [made[rank] for rank in range(count)]
        finally:
            for transport in made.values():
                transport.close()
        assert os.listdir(run_dir) == []


def on_all(transports: list[Transport], action: Callable[[Transport], Any]) -> list[Any]:
    """What `action` gives or raises on each rank, all at once."""
    results: list[Any] = [None] * len(transports)

    def run(index: int) -> None:
        try:
            results[index] = action(transports[index])
        except TransportError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(transports))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(scope="module")
def three() -> Iterator[list[Transport]]:
    with world_of(3) as transports:
        yield transports


def sample(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """Random values of an element type, as Paddle hands them out."""
    random = np.random.default_rng(seed)
    if dtype == "bfloat16":
        return float32_to_bfloat16(np.asarray(random.standard_normal(shape), np.float32))
    if dtype.startswith("float8"):
        return random.integers(-128, 127, shape).astype(np.int8)
    if dtype == "bool":
        return np.asarray(random.integers(0, 2, shape) > 0)
    return np.asarray(random.standard_normal(shape) * 5).astype(dtype)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.sampled_from([(0, 1, 2), (2, 0), (1, 2)]), st.integers(0, 99))
def test_all_gather_keeps_every_bit(three: list[Transport], dtype: str, shape: tuple[int, ...], ranks: tuple[int, ...], seed: int) -> None:
    values = {rank: sample(dtype, shape, seed + rank) for rank in ranks}
    members = [three[rank] for rank in ranks]
    group = 100 + sum(10**position * rank for position, rank in enumerate(ranks))
    results = on_all(members, lambda t: t.all_gather(values[t.rank], group, ranks, dtype=dtype))
    for parts in results:
        for rank, part in zip(ranks, parts, strict=True):
            assert part.shape == shape
            assert part.tobytes() == values[rank].tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([name for name in DTYPES if not name.startswith("float8")]),
    st.sampled_from(SHAPES),
    st.sampled_from(["sum", "max", "min", "prod", "avg"]),
    st.integers(0, 99),
)
def test_reductions_are_in_rank_order_and_equal_everywhere(
    three: list[Transport], dtype: str, shape: tuple[int, ...], op: str, seed: int
) -> None:
    meaningless = (dtype == "bool" and op == "avg") or (dtype.startswith("complex") and op in ("max", "min"))
    ranks = (0, 1, 2)
    values = [sample(dtype, shape, seed + rank) for rank in ranks]
    results = on_all(three, lambda t: t.all_reduce(values[t.rank], op, 1, ranks, dtype=dtype))
    if meaningless:
        assert all("cast the value" in str(error) for error in results)
        return
    expected = reduce_arrays(values, op, dtype)
    assert all(result.tobytes() == expected.tobytes() and result.shape == shape for result in results)
    if dtype in ("float32", "float64") and op == "sum":
        assert np.array_equal(expected, values[0] + values[1] + values[2])


def test_bfloat16_rounds_to_nearest_even() -> None:
    exact = np.array([1.0, -2.5, 0.0, np.inf, -np.inf], np.float32)
    assert np.array_equal(bfloat16_to_float32(float32_to_bfloat16(exact)), exact)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38], np.float32)
    assert bfloat16_to_float32(float32_to_bfloat16(ties)).tolist() == [1.0, 1 + 2**-6, np.inf]
    assert np.isnan(bfloat16_to_float32(float32_to_bfloat16(np.array([np.nan], np.float32))))[0]
    ones = [float32_to_bfloat16(np.array([256.0 if i == 0 else 0.75], np.float32)) for i in range(3)]
    assert bfloat16_to_float32(reduce_arrays(ones, "sum", "bfloat16"))[0] == 258.0  # rounded once: 257.5 -> 258


def test_integer_average_cuts_towards_zero() -> None:
    parts = [np.array([7, -7], np.int32), np.array([0, 0], np.int32)]
    assert reduce_arrays(parts, "avg", "int32").tolist() == [3, -3]


def test_scatter_gather_and_roots(three: list[Transport]) -> None:
    ranks = (2, 0, 1)  # a group's order is its own
    rows = np.arange(18, dtype=np.float32).reshape(6, 3)
    scattered = on_all(three, lambda t: t.reduce_scatter(rows * (t.rank + 1), "sum", 2, ranks))
    for position, rank in enumerate(ranks):
        assert np.array_equal(scattered[rank], 6 * rows[2 * position : 2 * position + 2])
    swapped = on_all(three, lambda t: t.all_to_all(np.arange(3) + 10 * t.rank, 2, ranks))
    assert [part.tolist() for part in swapped] == [[21, 1, 11], [22, 2, 12], [20, 0, 10]]
    spread = on_all(three, lambda t: t.broadcast(np.full(4, t.rank), 1, 2, ranks))
    assert all(part.tolist() == [1] * 4 for part in spread)
    reduced = on_all(three, lambda t: t.reduce(np.full(2, t.rank + 1), "prod", 0, 2, ranks))
    assert [part.tolist() for part in reduced] == [[6, 6], [2, 2], [3, 3]]


def test_groups_do_not_wait_for_each_other_and_sends_are_buffered(three: list[Transport]) -> None:
    """Rank 0 starts two groups in the order opposite to its peers'; sends of 8 MB need no receiver."""
    big = np.arange(1 << 20, dtype=np.float64)

    def run(t: Transport) -> Any:
        order = (31, 32) if t.rank == 0 else (32, 31)
        pending = {group: t.start_all_reduce(np.full(3, group), "sum", group, (0, 1, 2)) for group in order}
        for peer in {0, 1, 2} - {t.rank}:
            t.send(big + t.rank, peer, 33, (0, 1, 2))
        first = [t.start_recv([-1], "float64", peer, 33, (0, 1, 2)) for peer in sorted({0, 1, 2} - {t.rank})]
        received = [part.wait()[0] for part in reversed(first)][::-1]
        return [pending[group].wait().tolist() for group in (31, 32)], received

    results = on_all(three, run)
    for rank, (sums, received) in enumerate(results):
        assert sums == [[93] * 3, [96] * 3]
        assert received == sorted({0, 1, 2} - {rank})


MISMATCHES: dict[str, tuple[Callable[[Transport, Array], Any], list[str]]] = {
    "op": (
        lambda t, a: t.all_reduce(a, "sum", 7, (0, 1), "micro-batch 3") if t.rank else t.all_gather(a, 7, (0, 1)),
        ["all_reduce (sum) #0 of float32[2, 3]", "all_gather #0", "micro-batch 3", "group 7 (ranks 0, 1)"],
    ),
    "reduction": (
        lambda t, a: t.all_reduce(a, "sum" if t.rank else "max", 7, (0, 1)),
        ["all_reduce (sum)", "all_reduce (max)"],
    ),
    "shape": (lambda t, a: t.all_reduce(a[: 1 + t.rank], "sum", 7, (0, 1)), ["float32[1, 3]", "float32[2, 3]"]),
    "dtype": (lambda t, a: t.all_gather(a.astype(np.int32) if t.rank else a, 7, (0, 1)), ["int32[2, 3]", "float32[2, 3]"]),
    "ranks": (lambda t, a: t.all_gather(a, 7, (0, 1) if t.rank else (1, 0)), ["ranks 0, 1", "ranks 1, 0"]),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatch_names_both_sides(kind: str) -> None:
    action, words = MISMATCHES[kind]
    with world_of(2) as transports:
        errors = on_all(transports, lambda t: action(t, np.zeros((2, 3), np.float32)))
    for error in errors:
        assert isinstance(error, TransportError)
        assert not isinstance(error, PeerLostError)
        assert all(word in str(error) for word in ["rank 0", "rank 1", *words]), str(error)


def test_receive_of_another_shape_is_refused() -> None:
    def run(t: Transport) -> Any:
        if t.rank == 0:
            return t.send(np.zeros((2, 3), np.float32), 1, 5, (0, 1), "op 9 send_v2")
        return t.recv((2, 4), "float32", 0, 5, (0, 1), "op 3 recv_v2")

    with world_of(2) as transports:
        _, error = on_all(transports, run)
    assert "recv (from rank 0) #0 of float32[2, 4]" in str(error)
    assert "send (to rank 1) #0 of float32[2, 3]" in str(error)
    assert "op 9 send_v2" in str(error)


def test_time_out_says_who_is_missing() -> None:
    def run(t: Transport) -> Any:
        t.barrier(9, (0, 1, 2))
        if t.rank == 1:
            time.sleep(1.0)
            return None
        return t.all_reduce(np.zeros(2), "sum", 9, (0, 1, 2), "micro-batch 2, op 7 pd_op.all_reduce")

    with world_of(3, timeout_s=0.3) as transports:
        errors = on_all(transports, run)
    for rank in (0, 2):
        text = str(errors[rank])
        assert text.startswith(f"rank {rank}: all_reduce (sum) #1 of float64[2] on group 9 (ranks 0, 1, 2)")
        assert "micro-batch 2, op 7" in text
        assert "not arrived: rank(s) 1; rank 1 said last: barrier #0" in text


def test_a_finished_peer_is_noticed_at_once_but_its_messages_count() -> None:
    with world_of(2) as transports:
        transports[0].send(np.arange(3), 1, 4, (0, 1))
        transports[0].close()
        assert transports[1].recv((3,), "int64", 0, 4, (0, 1)).tolist() == [0, 1, 2]
        start_s = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 0 will not come: it has finished its script"):
            transports[1].recv((3,), "int64", 0, 4, (0, 1))
        assert time.monotonic() - start_s < 10.0, "half of the time after which a rank gives up"


def test_a_rank_may_close_as_soon_as_it_has_everything() -> None:
    """The last collective is in shared memory: nothing is written to a peer after the part that lets it finish."""

    def run(t: Transport) -> Any:
        result = t.all_gather(np.ones(64), 4, (0, 1))
        t.close()
        return len(result)

    for _ in range(30):
        with world_of(2) as transports:
            assert on_all(transports, run) == [2, 2]


def test_a_killed_peer_is_noticed_at_once_and_leaves_nothing() -> None:
    """The peer dies right after sending 8 MB through shared memory, which nobody has read yet."""
    script = """
        import os, signal, sys, numpy as np
        from interlace.cpu.transport import Transport
        t = Transport(1, 2, sys.argv[1], 20)
        t.send(np.ones(1 << 20), 0, 4, (0, 1))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as run_dir:
        peer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), run_dir])
        with Transport(0, 2, run_dir, 20) as transport:
            assert peer.wait() == -signal.SIGKILL
            assert transport.recv((1 << 20,), "float64", 1, 4, (0, 1)).sum() == 1 << 20
            with pytest.raises(PeerLostError, match=r"rank 1 (will not come|is gone): its process has ended"):
                transport.all_reduce(np.ones(3), "sum", 6, (0, 1))
        assert os.listdir(run_dir) == []
    assert set(os.listdir("/dev/shm")) <= before


def test_a_rank_that_never_connects() -> None:
    with tempfile.TemporaryDirectory() as run_dir:
        with pytest.raises(TransportError, match=r"rank 0 of 2: rank\(s\) 1 did not connect within 0.2 s"):
            Transport(0, 2, run_dir, 0.2)
        assert os.listdir(run_dir) == []


def test_refusals() -> None:
    with world_of(1) as (alone,):
        assert alone.all_reduce(np.array(3.0), "sum", 1, (0,)) == 3.0
        with pytest.raises(TransportError, match="unknown reduction 'mean'"):
            alone.all_reduce(np.zeros(1), "mean", 1, (0,))
        with pytest.raises(TransportError, match="rank 3 is not in this group"):
            alone.send(np.zeros(1), 3, 1, (0,))
        with pytest.raises(TransportError, match="multiple of the 1 ranks"):
            alone.all_to_all(np.array(1.0), 1, (0,))
    with pytest.raises(TransportError, match="outside the world"):
        Transport(2, 2, "unused")
