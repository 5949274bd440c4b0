"""What ranks tell each other while they plan, so that they decide alike."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import msgspec

from interlace.errors import PlanError
from interlace.ir import Op, Program, Value
from interlace.ir.per_ops import KEPT, once_per_ops
from interlace.ir.stand_ins import likeness

Told = TypeVar("Told")
_DECODING = Lock()
"""msgspec 0.22 crashed (null read) where threads decoded a type for the first time at once."""


class Peers(Protocol):
    """The ranks that plan at the same time, this one among them."""

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """What each rank says on a topic, in the order of ranks. Every rank asks for the same topics in the same order.

        Raises:
            PlanError: A rank is at another topic; on every rank alike.
        """
        ...


def gather(peers: Peers | None, topic: str, mine: Told) -> list[Told]:
    """What every rank says on a topic, by rank; only this one's own where nobody else plans at the same time.

    Raises:
        PlanError: As `Peers.gather`.
    """
    if peers is None:
        return [mine]
    said = peers.gather(topic, msgspec.msgpack.encode(mine))
    with _DECODING:
        told = {each: msgspec.msgpack.decode(each, type=type(mine)) for each in set(said)}
    return [told[each] for each in said]


def stand_ins(program: Program, peers: Peers | None) -> dict[int, int]:
    """Rank -> the first rank that is like it, which is simulated in its place: one of each stage, where all ranks of a stage are alike.
    Empty if no other rank plans at the same time.
    """
    if peers is None:
        return {}
    kinds = gather(peers, "stages", likeness(program))
    return {rank: kinds.index(kind) for rank, kind in enumerate(kinds)}


def plans_of_stages(program: Program, peers: Peers | None, stands_for: dict[int, int]) -> list[Program]:
    """The plans of one rank of each stage (`stand_ins`), in the order of ranks, for rank 0; nothing for the others, which only send
    theirs. A rank that plans alone gets its own.
    """
    if peers is None:
        return [program]
    plans = gather(peers, "plans of stages", _shown(program) if stands_for[program.rank] == program.rank else Shown())
    return [_seen(plans[rank]) for rank in sorted(set(stands_for.values()))] if program.rank == 0 else []


class Shown(msgspec.Struct, frozen=True):
    """A plan as a rank shows it: operations and values apart, which are the same in many plans."""

    ops: bytes = b""
    rest: bytes = b""


_packed = once_per_ops(lambda program: zlib.compress(msgspec.msgpack.encode((program.ops, program.values)), 1))


@lru_cache(maxsize=KEPT)
def _unpacked(packed: bytes) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
    return msgspec.msgpack.decode(zlib.decompress(packed), type=tuple[tuple[Op, ...], tuple[Value, ...]])


_of_this_process: WeakValueDictionary[Shown, Program] = WeakValueDictionary()
"""What ranks of this process show, for as long as they hold it: tables that follow from it are made once."""


def _shown(program: Program) -> Shown:
    shown = Shown(_packed(program), zlib.compress(msgspec.msgpack.encode(program.with_ops((), ())), 1))
    _of_this_process[shown] = program
    return shown


def _seen(shown: Shown) -> Program:
    """The plan that was shown: that very object where a rank of this process holds it. Plans of the same operations and values hold the
    same tuples of them."""
    found = _of_this_process.get(shown)
    return found if found is not None else msgspec.msgpack.decode(zlib.decompress(shown.rest), type=Program).with_ops(*_unpacked(shown.ops))


def require_one_topic(topics: Sequence[str]) -> None:
    """Raises PlanError where ranks speak of different things."""
    other = next((rank for rank, topic in enumerate(topics) if topic != topics[0]), None)
    if other is not None:
        raise PlanError(f"ranks 0 and {other} planned with different options: one is at {topics[0]!r}, the other at {topics[other]!r}; "
                        "give every rank the same configuration")  # fmt: skip
