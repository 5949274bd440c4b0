"""Times of collectives and point-to-point transfers between the devices of ranks that calibrate together, through Paddle's operators, and
interference of operations with them and with copies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import paddle

from interlace.bridge.agree import peers_of_run
from interlace.bridge.calibrate.beside import Beside, lab_of, measured_beside
from interlace.bridge.calibrate.both_ways import Copies, copies_of_all_ranks
from interlace.bridge.calibrate.cases import cases, is_usual
from interlace.bridge.calibrate.messages import COLLECTIVES, DTYPE, TRANSFER, Message, Ranks, elements_of
from interlace.bridge.meeting import meeting_of_run
from interlace.bridge.probe.bench import Bench, spread
from interlace.cost_model.profile import CommSample
from interlace.ir.program import DTYPE_BYTES
from interlace.planning.peers import Peers

ops: Any = paddle._C_ops
SIZES = tuple(1 << power for power in range(14, 29, 2))
"""Bytes of the full tensor, rounded down to a multiple of the number of ranks (`elements_of`)."""
MOST_BYTES, FEWEST, MOST = 1 << 30, 4, 64
"""Messages that are sent one after another: the most bytes of all of them, and their least and most number. The same on all ranks."""
NUM_RUNS = 9


class Communication(NamedTuple):
    """Samples of collectives and of transfers, or in `why_not` the reason why there are none; the messages whose times do not differ
    from noise; interference with messages and copies; and copies of all ranks at once."""

    collectives: tuple[CommSample, ...] = ()
    p2p: tuple[CommSample, ...] = ()
    why_not: str = ""
    noise: tuple[str, ...] = ()
    beside: Beside = Beside()
    copies: Copies = Copies()


def communication_of_run(bench: Bench, quick: bool) -> Communication:
    """Communication between the ranks that Paddle's launcher started on this host, and interference. One rank measures interference with
    copies. Nothing is measured on a CPU, if ranks run on several hosts, or if not all ranks arrive."""
    env = paddle.distributed.ParallelEnv()
    if env.world_size < 2:
        alone = Communication(why_not="one rank was started")
        return alone if bench.is_serial else _with_interference(alone, bench, quick)
    nodes = os.environ.get("PADDLE_NNODES", "1")
    if nodes.partition(":")[0] != "1":
        return Communication(why_not=f"ranks were started on several hosts (PADDLE_NNODES={nodes}); start those of one host")
    if bench.is_serial:
        return Communication(why_not="on CPUs one rank measures alone")
    if missing := meeting_of_run().come():
        return Communication(why_not=missing)
    groups = Ranks(env.rank, env.world_size).groups()
    found = measured_communication(bench, groups, env.rank, quick)
    return _with_interference(found, bench, quick, groups, env.rank, peers_of_run())


def _with_interference(
    found: Communication, bench: Bench, quick: bool, groups: Mapping[int, Any] | None = None, rank: int = 0, peers: Peers | None = None
) -> Communication:
    """The same with interference and copies of all ranks at once; arguments as those of `measured_beside`."""
    wanted = [case for case in cases(bench.is_fast, quick) if is_usual(case.part)]
    beside = measured_beside(bench, wanted, quick, groups, rank, peers)
    return found._replace(beside=beside, copies=copies_of_all_ranks(lab_of(bench, quick, groups or {}, peers)))


def measured_communication(bench: Bench, groups: Mapping[int, Any], rank: int, quick: bool) -> Communication:
    """Times of collectives with every size of group, and of transfers from each even rank to the next one. Every rank must call this with
    its groups by their number of ranks; it gets its own times, which differ little between ranks."""
    sizes, noise = SIZES[2::3] if quick else SIZES, list[str]()

    def samples(message: Message, count: int) -> Iterator[CommSample]:
        for size in sizes:
            found = _sample(bench, message, (groups[count], count, groups[count].ranks.index(rank)), size, groups[max(groups)])
            if found is not None:
                yield found
            else:
                noise.append(f"{message.kind} of {size} bytes between {count} ranks")

    collectives = [each for count in groups for message in COLLECTIVES for each in samples(message, count)]
    transfers = tuple(samples(TRANSFER, 2)) if 2 in groups else ()
    return Communication(tuple(collectives), transfers, noise=tuple(noise))


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
