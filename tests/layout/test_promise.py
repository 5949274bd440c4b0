"""The order in which layouts are built."""

from __future__ import annotations

import itertools

import pytest

from interlace.layout.promise import Promise, Seen, guess, guess_held, guess_state
from interlace.layout.space import Layout


def layout(**values: int | str) -> Layout:
    return Layout(tuple(values.items()))


def test_factors_of_values_are_learned_from_a_part_of_the_layouts() -> None:
    """Steps that are products of a factor for each value are ordered right when every value was seen in a few layouts."""
    factors = {"pp": {1: 1.0, 2: 1.3, 4: 2.0}, "mp": {1: 1.0, 2: 1.6, 4: 3.1}, "m": {1: 1.5, 2: 1.0, 4: 1.2}}
    every = [layout(pp=pp, mp=mp, m=m) for pp, mp, m in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4))]

    def true(each: Layout) -> float:
        return factors["pp"][each.number("pp")] * factors["mp"][each.number("mp")] * factors["m"][each.number("m")]

    promise = Promise([Seen(each, true(each), 2.0) for each in every[::3] + every[1::4]])
    assert min(every, key=promise.step) == min(every, key=true)
    assert promise.peak(every[5]) == pytest.approx(2.0)


def test_values_that_were_not_seen_are_tried() -> None:
    promise = Promise([Seen(layout(pp=1, mp=1), 1.0, 10), Seen(layout(pp=2, mp=1), 2.0, 20)])
    assert promise.step(layout(pp=4, mp=1)) == pytest.approx(promise.step(layout(pp=1, mp=1)))
    assert promise.step(layout(pp=4, mp=1)) < promise.step(layout(pp=2, mp=1))
    assert Promise([]).peak(layout(pp=1)) == 1.0


def test_the_first_guess_knows_bubbles_and_recomputation() -> None:
    assert guess(layout(pp=4, m=4), 400.0) == pytest.approx(700.0)
    assert guess(layout(pp=4, m=4, vpp=3), 400.0) == pytest.approx(500.0)
    assert guess(layout(pp=1, m=4, recompute="full"), 300.0) == pytest.approx(400.0)


def test_the_first_guess_of_memory_knows_micro_batches_and_recomputation() -> None:
    """A stage of two holds two micro-batches of half of the layers."""
    assert guess_held(layout(pp=1, m=1), 4, 400.0) == pytest.approx(100.0)
    assert guess_held(layout(pp=1, m=8), 4, 400.0) == pytest.approx(12.5)
    assert guess_held(layout(pp=2, m=8), 4, 400.0) == pytest.approx(25.0)
    assert guess_held(layout(pp=2, m=1), 4, 400.0) == pytest.approx(100.0)
    assert guess_held(layout(pp=1, m=1, recompute="full"), 4, 400.0) < 50
    assert 100.0 < guess_held(layout(pp=1, mp=4, m=1), 4, 400.0) < 400.0  # ranks of a layer do not share all


def test_the_first_guess_of_state_knows_what_sharding_shares() -> None:
    held = [guess_state(layout(pp=2, mp=1, sharding=stage), 8, 360.0) for stage in (0, 1, 2, 3)]
    assert held == pytest.approx([180.0, 90.0, 60.0, 45.0])
