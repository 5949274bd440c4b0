"""Times of collectives and point-to-point transfers between the devices of ranks that calibrate together, through Paddle's operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import paddle

from interlace.bridge.meeting import make_groups, meeting_of_run
from interlace.bridge.probe.bench import Bench, spread
from interlace.cost_model.profile import CommSample
from interlace.ir.program import DTYPE_BYTES

ops: Any = paddle._C_ops
DTYPE = "float32"
SIZES = tuple(1 << power for power in range(14, 29, 2))
"""Bytes of the full tensor, rounded down to a multiple of the number of ranks (`elements_of`)."""
MOST_BYTES, FEWEST, MOST = 1 << 30, 4, 64
"""Messages that are sent one after another: the most bytes of all of them, and their least and most number. The same on all ranks."""
NUM_RUNS = 9


class Communication(NamedTuple):
    """Samples of collectives and of transfers, or in `why_not` the reason why there are none; and the messages whose times do not differ
    from noise."""

    collectives: tuple[CommSample, ...] = ()
    p2p: tuple[CommSample, ...] = ()
    why_not: str = ""
    noise: tuple[str, ...] = ()


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


def _transfer(x: Any, ring: int, size: int, place: int) -> None:
    if place == 0:
        ops.send_v2(x, ring, 1, True, False)
    else:
        ops.recv_v2(list(x.shape), x.dtype, 0, ring, True, False)


COLLECTIVES = (
    Message("all_reduce", lambda x, ring, size, place: ops.all_reduce(x, ring, 0)),
    Message("all_gather", lambda x, ring, size, place: ops.all_gather(x, ring, size), gets_whole=True),
    Message("reduce_scatter", lambda x, ring, size, place: ops.reduce_scatter(x, ring, size)),
    Message("all_to_all", lambda x, ring, size, place: ops.all_to_all(x, ring)),
)
TRANSFER = Message("send_recv", _transfer)


def communication_of_run(bench: Bench, quick: bool) -> Communication:
    """Communication between the ranks that Paddle's launcher started on this host. Nothing is measured on a CPU, or if there is one rank,
    if ranks run on several hosts, or if not all ranks arrive."""
    env = paddle.distributed.ParallelEnv()
    if env.world_size < 2:
        return Communication(why_not="one rank was started")
    if int(os.environ.get("PADDLE_NNODES", "1").partition(":")[0]) > 1:
        return Communication(why_not="ranks were started on several hosts; start those of one host")
    if bench.is_serial:
        return Communication(why_not="on CPUs one rank measures alone")
    if missing := meeting_of_run().come():
        return Communication(why_not=missing)
    return measured_communication(bench, Ranks(env.rank, env.world_size), quick)


def measured_communication(bench: Bench, ranks: Ranks, quick: bool) -> Communication:
    """Times of collectives with every size of group, and of transfers from each even rank to the next one. Every rank must call this with
    the same arguments; it gets its own times, which differ little between ranks."""
    sizes, groups = SIZES[2::3] if quick else SIZES, ranks.groups()

    noise = list[str]()

    def samples(message: Message, count: int) -> Iterator[CommSample]:
        for size in sizes:
            found = _sample(bench, message, (groups[count], count, ranks.rank % count), size, groups[ranks.world])
            if found is not None:
                yield found
            else:
                noise.append(f"{message.kind} of {size} bytes between {count} ranks")

    collectives = [each for count in groups for message in COLLECTIVES for each in samples(message, count)]
    transfers = tuple(samples(TRANSFER, 2)) if 2 in groups else ()
    return Communication(tuple(collectives), transfers, noise=tuple(noise))


def elements_of(size_bytes: int, count: int) -> int:
    """The largest number of elements in `size_bytes` that `count` ranks can share evenly; at least one for each rank.

    >>> elements_of(64, 2), elements_of(64, 3), elements_of(4, 3)
    (16, 15, 3)
    """
    return count * max(1, size_bytes // DTYPE_BYTES[DTYPE] // count)


def _sample(bench: Bench, message: Message, group: tuple[Any, int, int], size_bytes: int, everyone: Any) -> CommSample | None:
    """None if the time of a message does not differ from noise."""
    own, count, place = group
    elements, number = elements_of(size_bytes, count), max(FEWEST, min(MOST, MOST_BYTES // size_bytes))

    def build(messages: int) -> None:
        x = paddle.full([elements // (count if message.gets_whole else 1)], 0.5, DTYPE)
        bench.add_lead()
        ops.all_reduce(paddle.full([1], 1.0, DTYPE), everyone.id, 0)  # so that all ranks begin together
        for _ in range(messages):
            message.add(x, own.id, count, place)

    base = median(bench.seconds(lambda: build(1), num_runs=NUM_RUNS))
    each_ns = [(run - base) / number * 1e9 for run in bench.seconds(lambda: build(1 + number), num_runs=NUM_RUNS)]
    took_ns = round(median(each_ns))
    if took_ns < 1:
        return None
    return CommSample(message.kind, count, elements * DTYPE_BYTES[DTYPE], took_ns, round(spread(each_ns)), num_runs=NUM_RUNS)
