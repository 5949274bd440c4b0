"""Collectives and transfers between the devices of ranks that calibrate together, through Paddle's own operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import paddle
from paddle.distributed.auto_parallel.static.process_group import new_process_group

from interlace.bridge.calibrate.bench import Bench
from interlace.bridge.doctor.meeting import meeting_of_run
from interlace.cost_model.profile import CommSample
from interlace.ir.program import DTYPE_BYTES

ops: Any = paddle._C_ops
SIZES = tuple(1 << power for power in range(14, 29, 2))
"""Bytes of the full tensor."""
MOST_BYTES, FEWEST, MOST = 1 << 30, 4, 64
"""Of messages in a row: their bytes together, and how many there are at least and at most; the same on all ranks."""
NUM_RUNS = 9


@dataclass(slots=True)
class Ranks:
    """The ranks of one host that measure together, and their groups of consecutive ranks: all of a size work at once, as in training."""

    rank: int
    world: int

    def group(self, size: int) -> Any:
        """The group of this rank; every rank makes all groups of the size, in one order."""
        groups = [new_process_group(list(range(first, first + size))) for first in range(0, self.world, size)]
        own = groups[self.rank // size]
        own.instantiate()
        return own

    def sizes(self) -> list[int]:
        """Powers of two that divide the number of ranks, and that number."""
        return sorted({self.world, *(1 << k for k in range(1, self.world.bit_length()) if self.world % (1 << k) == 0)})


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a group does: `send` gets a tensor of so many elements, the group's number and size, and this rank's place in it."""

    kind: str
    send: Callable[[Any, int, int, int], object]
    is_of_part: bool = False
    """Whether a rank gives a part of the tensor, and gets the whole."""


def _transfer(x: Any, ring: int, size: int, place: int) -> None:
    if place == 0:
        ops.send_v2(x, ring, 1, True, False)
    else:
        ops.recv_v2(list(x.shape), x.dtype, 0, ring, True, False)


COLLECTIVES = (
    Exchange("all_reduce", lambda x, ring, size, place: ops.all_reduce(x, ring, 0)),
    Exchange("all_gather", lambda x, ring, size, place: ops.all_gather(x, ring, size), is_of_part=True),
    Exchange("reduce_scatter", lambda x, ring, size, place: ops.reduce_scatter(x, ring, size)),
    Exchange("all_to_all", lambda x, ring, size, place: ops.all_to_all(x, ring)),
)
TRANSFER = Exchange("send_recv", _transfer)


class Exchanges(NamedTuple):
    """What was measured, or why nothing was."""

    collectives: tuple[CommSample, ...] = ()
    p2p: tuple[CommSample, ...] = ()
    why_not: str = ""


def exchanges_of_run(bench: Bench, quick: bool) -> Exchanges:
    """Of the ranks that Paddle's launcher started, if they are several and all of them come."""
    env = paddle.distributed.ParallelEnv()
    if env.world_size < 2:
        return Exchanges(why_not="one device was measured")
    if int(os.environ.get("PADDLE_NNODES", "1").partition(":")[0]) > 1:
        return Exchanges(why_not="ranks of several hosts were started; start those of one")
    if bench.is_serial:
        return Exchanges(why_not="of CPUs one process measures")
    if missing := meeting_of_run().come():
        return Exchanges(why_not=missing)
    return measured_exchanges(bench, Ranks(env.rank, env.world_size), quick)


def measured_exchanges(bench: Bench, ranks: Ranks, quick: bool) -> Exchanges:
    """Collectives of every group size, and transfers from each even rank to the next one. Every rank runs the same, and gets its own
    times, which differ little."""
    sizes = SIZES[2::3] if quick else SIZES
    everyone = ranks.group(ranks.world)
    groups = {count: ranks.group(count) for count in ranks.sizes()}

    def sample(exchange: Exchange, count: int, size_bytes: int) -> CommSample:
        return _sample(bench, ranks, exchange, groups[count], count, size_bytes, everyone)

    collectives = [sample(each, count, size) for count in groups for each in COLLECTIVES for size in sizes]
    transfers = [sample(TRANSFER, 2, size) for size in sizes] if 2 in groups else []
    return Exchanges(tuple(collectives), tuple(transfers))


def _sample(bench: Bench, ranks: Ranks, exchange: Exchange, group: Any, count: int, size_bytes: int, everyone: Any) -> CommSample:
    dtype = "bfloat16" if bench.is_fast else "float32"
    elements = size_bytes // DTYPE_BYTES[dtype] // (count if exchange.is_of_part else 1)
    number = max(FEWEST, min(MOST, MOST_BYTES // size_bytes))

    def build(messages: int) -> None:
        x = paddle.full([elements], 0.5, "float32").astype(dtype)
        bench.add_lead()
        ops.all_reduce(paddle.full([1], 1.0, "float32"), everyone.id, 0)  # ranks begin together
        for _ in range(messages):
            exchange.send(x, group.id, count, ranks.rank % count)

    base = median(bench.seconds(lambda: build(1), num_runs=NUM_RUNS))
    each_ns = [(run - base) / number * 1e9 for run in bench.seconds(lambda: build(1 + number), num_runs=NUM_RUNS)]
    return CommSample(exchange.kind, count, size_bytes, max(1, round(median(each_ns))), round(_spread(each_ns)), num_runs=NUM_RUNS)


def _spread(found: Sequence[float]) -> float:
    return max(found) - min(found)
