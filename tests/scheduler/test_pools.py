"""What allocator pools take from the device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.ir.arrays import ints
from interlace.ir.target import CPU, CUSTOM, GPU, as_graph
from interlace.scheduler.memory.live import END, Lives, Profile
from interlace.scheduler.memory.pools import best_fit, pool_bytes, reserved_bytes
from tests.scheduler.pools import random_step
from tests.scheduler.run_ahead import run_ahead_program


def taken(text: str, *sizes: int, steps: int = 1) -> int:
    """What one pool takes; capital letters allocate blocks of these sizes, small ones free them."""
    order = [ord(each) - ord("A") if each.isupper() else ord(each) - ord("a") + len(sizes) for each in text]
    return int(best_fit(ints(order), ints(sizes), ints([0] * len(sizes)), 1, steps)[0])


@pytest.mark.parametrize(
    ("text", "sizes", "expected"),
    [
        ("AaBb", (4, 3), 4),  # the second gets a part of the first
        ("AaBb", (3, 4), 7),  # too small
        ("AaBCbc", (4, 1, 3), 4),  # both fit into it
        ("AaBCcDbd", (4, 1, 1, 3), 4),  # what is left grows together again
        ("AaBCbcDd", (4, 1, 1, 4), 4),  # on both sides
        ("AaBCbDd", (4, 1, 2, 2), 6),  # a request gets the end of a block: two parts stay free, each too small
        ("ABabCc", (2, 2, 4), 8),  # chunks never grow together
        ("ABabCDcd", (8, 4, 4, 8), 12),  # the smallest that is large enough
        ("ABCacDbd", (2, 1, 2, 4), 9),
    ],
)
def test_the_smallest_free_block_that_is_large_enough_is_split(text: str, sizes: tuple[int, ...], expected: int) -> None:
    assert taken(text, *sizes) == expected


def test_steps_run_in_what_the_ones_before_left() -> None:
    """A block may be held into the next step, where it is freed before it is allocated again."""
    assert [taken("AaBb", 3, 4, steps=steps) for steps in (1, 2, 5)] == [7, 7, 7]
    assert [taken("aA", 3, steps=steps) for steps in (1, 2)] == [3, 3]
    assert [taken("BbaA", 3, 3, steps=steps) for steps in (1, 2, 3)] == [3, 6, 6]


def profile(alloc: list[int], free: list[int], size: list[int], stream: list[int], step: int | None) -> Profile:
    count, never = np.arange(len(size)), np.zeros(len(size), np.bool_)
    lives = Lives(ints(alloc), ints(free), 2 * count + 1, 2 * count + 2, ints(size), never, count, count * 0, ints(stream), never)
    return Profile(run_ahead_program(), lives, {"device": 1000, "pinned": 0}, step=step)


def test_each_stream_has_a_pool_and_every_block_is_rounded() -> None:
    """What one stream frees is of no use to the other. Tensors without bytes take nothing."""
    found = profile([0, 2, 4], [1, 3, 5], [300, 300, 0], [0, 3, 7], None)
    assert pool_bytes(found) == {0: 512, 3: 512}
    assert reserved_bytes([found], GPU) == 2024 > found.peak() == 1300
    assert [reserved_bytes([found], target) for target in (CPU, CUSTOM, as_graph(GPU))] == [None] * 3
    assert pool_bytes(profile([0, 2], [1, 3], [300, 300], [0, 0], None)) == {0: 512}


def test_what_is_held_into_the_next_step_is_freed_there() -> None:
    """At 12 of a step of 10, that is at 2 of the next one, where the other is still held until 3."""
    assert pool_bytes(profile([5, 1], [12, 3], [256, 256], [0, 0], 10)) == {0: 512}
    assert pool_bytes(profile([5, 1], [12, 3], [256, 256], [0, 0], None)) == {0: 256}
    assert pool_bytes(profile([5, 1], [END, 3], [256, 256], [0, 0], 10)) == {0: 256}


@given(st.integers(0, 1 << 32), st.integers(0, 60))
def test_the_compiled_twin_gives_the_same(seed: int, count: int) -> None:
    pytest.importorskip("numba")
    from interlace.scheduler.memory import compiled

    step = random_step(seed, count)
    assert compiled.best_fit(*step).tolist() == best_fit(*step).tolist()
