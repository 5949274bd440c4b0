"""Before the first step all ranks compare what they planned."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import msgspec
import numpy as np
import paddle

from interlace.errors import PlanError
from interlace.ir import Program
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
    if program.world < 2 or not program.jobs:
        return
    mine = msgspec.json.encode((plan.fingerprint(), digest(program)))
    found = [msgspec.json.decode(text, type=tuple[str, str]) for text in _exchange(program, mine)]
    for rank, (options, _) in enumerate(found):
        if options != found[0][0]:
            raise PlanError(f"ranks 0 and {rank} planned with different options: {found[0][0]} and {options}; "
                            "give every rank the same configuration and device profile")  # fmt: skip
    differences = compare_digests([text for _, text in found])
    if differences:
        raise PlanError("ranks planned different orders of communication:\n  " + "\n  ".join(map(str, differences)))


def _exchange(program: Program, mine: bytes) -> list[bytes]:
    """Every rank's bytes, in the order of ranks."""
    if _local_transport() is not None:
        return _through_transport(program, mine)
    store = paddle.base.core.create_or_get_global_tcp_store()
    tag = f"{STORE_KEY}/{hashlib.sha256(str(len(_rounds)).encode()).hexdigest()[:8]}"
    _rounds.append(1)
    store.set(f"{tag}/{program.rank}", mine.hex())
    return [bytes.fromhex(_text(store.get(f"{tag}/{rank}"))) for rank in range(program.world)]


_rounds: list[int] = []
"""One entry for each exchange of this process, so that each uses keys of its own."""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _local_transport() -> Any:
    from interlace.bridge.cpu import install, ops

    return ops.transport() if install.RUN_DIR_VARIABLE in os.environ else None


def _through_transport(program: Program, mine: bytes) -> list[bytes]:
    transport, ranks = _local_transport(), tuple(range(program.world))
    sizes = transport.all_gather(np.array([len(mine)], dtype=np.int64), CHANNEL, ranks, "plan digests", "int64")
    longest = max(int(size[0]) for size in sizes)
    padded = np.frombuffer(mine.ljust(longest, b"\0"), dtype=np.uint8)
    rows = transport.all_gather(padded, CHANNEL, ranks, "plan digests", "uint8")
    return [row.tobytes()[: int(size[0])] for row, size in zip(rows, sizes, strict=True)]
