"""What ranks of one host send each other in measurements, and the groups in which they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import paddle

from interlace.bridge.meeting import make_groups
from interlace.ir.program import DTYPE_BYTES

ops: Any = paddle._C_ops
DTYPE = "float32"


@dataclass(slots=True)
class Ranks:
    """The ranks of one host that measure together, in groups of consecutive ranks. All groups of a size run at once, as in training."""

    rank: int
    world: int

    def groups(self) -> dict[int, Any]:
        """Size -> the group of this rank."""
        made = make_groups([range(first, first + size) for size in self.sizes() for first in range(0, self.world, size)])
        mine = [group for group in made if self.rank in group.ranks]
        return dict(zip(self.sizes(), mine, strict=True))

    def sizes(self) -> list[int]:
        """Sizes of groups, ascending: the powers of two above 1 that divide the number of ranks, and that number itself."""
        return sorted({self.world, *(1 << k for k in range(1, self.world.bit_length()) if self.world % (1 << k) == 0)})


@dataclass(frozen=True, slots=True)
class Message:
    """What all ranks of a group do together. `add` adds it to a program; it gets a tensor, the ring id and size of the group, and this
    rank's place in it."""

    kind: str
    add: Callable[[Any, int, int, int], object]
    gets_whole: bool = False
    """Whether a rank contributes its part of the tensor and receives the whole."""


def _transfer(x: Any, ring: int, size: int, place: int, sender: int = 0) -> None:
    if place == sender:
        ops.send_v2(x, ring, 1 - sender, True, False)
    else:
        ops.recv_v2(list(x.shape), x.dtype, sender, ring, True, False)


COLLECTIVES = (
    Message("all_reduce", lambda x, ring, size, place: ops.all_reduce(x, ring, 0)),
    Message("all_gather", lambda x, ring, size, place: ops.all_gather(x, ring, size), gets_whole=True),
    Message("reduce_scatter", lambda x, ring, size, place: ops.reduce_scatter(x, ring, size)),
    Message("all_to_all", lambda x, ring, size, place: ops.all_to_all(x, ring)),
)
TRANSFER, BACK = Message("send_recv", _transfer), Message("send_recv", partial(_transfer, sender=1))
"""Transfers to the second rank of two, and to the first."""


def elements_of(size_bytes: int, count: int) -> int:
    """The largest number of elements in `size_bytes` that `count` ranks can share evenly; at least one for each rank.

    >>> elements_of(64, 2), elements_of(64, 3), elements_of(4, 3)
    (16, 15, 3)
    """
    return count * max(1, size_bytes // DTYPE_BYTES[DTYPE] // count)
