"""Random allocations and frees of steps that follow one another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from interlace.ir.arrays import Ints

NUM_POOLS, NUM_STEPS = 3, 4


class Step(NamedTuple):
    """The arguments of `best_fit`."""

    order: Ints
    size: Ints
    pool: Ints
    num_pools: int = NUM_POOLS
    num_steps: int = NUM_STEPS


def random_step(seed: int, count: int) -> Step:
    """Blocks of few sizes, some much larger than others, that live for about a tenth of the step; some into the next."""
    rng = np.random.default_rng(seed)
    size = rng.choice([256, 512, 1024, 4096, 1 << 16, 1 << 20], count) * rng.integers(1, 5, count)
    begin = rng.random(count)
    end = (begin + rng.exponential(0.1, count)) % 1
    return Step(np.argsort(np.concatenate([begin, end])), size, rng.integers(0, NUM_POOLS, count))
