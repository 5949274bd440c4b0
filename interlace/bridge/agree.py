"""Ranks of one run talk to each other while they plan, and compare their plans before the first step."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import msgspec
import numpy as np
import paddle

from interlace.errors import PlanError
from interlace.ir import Program
from interlace.passes.peers import Peers, require_one_topic
from interlace.plan import Plan
from interlace.scheduler.hazards import compare_digests, digest

CHANNEL = -2
"""Channel of the CPU transport for this exchange; groups of programs have numbers from 0."""
STORE_KEY = "interlace/plan"


def require_agreement(plan: Plan) -> None:
    """Compare options and communication orders of all ranks.

    Raises:
        PlanError: On every rank alike, with the first difference.
    """
    program = plan.program
    peers = peers_of(program)
    if peers is None or not program.jobs:
        return
    mine = msgspec.json.encode((plan.fingerprint(), digest(program)))
    found = [msgspec.json.decode(text, type=tuple[str, str]) for text in peers.gather("the finished plan", mine)]
    for rank, (options, _) in enumerate(found):
        if options != found[0][0]:
            raise PlanError(f"ranks 0 and {rank} planned with different options: {found[0][0]} and {options}; "
                            "give every rank the same configuration and device profile")  # fmt: skip
    differences = compare_digests([text for _, text in found])
    if differences:
        raise PlanError("ranks planned different orders of communication:\n  " + "\n  ".join(map(str, differences)))


def peers_of(program: Program) -> Peers | None:
    """The ranks of this run, each of which builds its program now; None for a rank alone."""
    return _Ranks(program.rank, program.world) if program.world > 1 else None


class _Ranks:
    """Peers in processes of their own, through the transport of CPU ranks or Paddle's store."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """See `Peers.gather`."""
        packed = msgspec.msgpack.encode((topic, mine))
        every = self._through_store(packed) if _local_transport() is None else self._through_transport(packed)
        said = [msgspec.msgpack.decode(each, type=tuple[str, bytes]) for each in every]
        require_one_topic([topic for topic, _ in said])
        return [text for _, text in said]

    def _through_store(self, mine: bytes) -> list[bytes]:
        store = paddle.base.core.create_or_get_global_tcp_store()
        tag = f"{STORE_KEY}/{next(_rounds)}"
        store.set(f"{tag}/{self.rank}", mine.hex())
        return [bytes.fromhex(_text(store.get(f"{tag}/{rank}"))) for rank in range(self.world)]

    def _through_transport(self, mine: bytes) -> list[bytes]:
        transport, ranks = _local_transport(), tuple(range(self.world))
        sizes = transport.all_gather(np.array([len(mine)], dtype=np.int64), CHANNEL, ranks, "planning", "int64")
        longest = max(int(size[0]) for size in sizes)
        padded = np.frombuffer(mine.ljust(longest, b"\0"), dtype=np.uint8)
        rows = transport.all_gather(padded, CHANNEL, ranks, "planning", "uint8")
        return [row.tobytes()[: int(size[0])] for row, size in zip(rows, sizes, strict=True)]


_rounds = count()
"""One number for each exchange of this process, so that each uses keys of its own."""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _local_transport() -> Any:
    from interlace.bridge.cpu import install, ops

    return ops.transport() if install.RUN_DIR_VARIABLE in os.environ else None
