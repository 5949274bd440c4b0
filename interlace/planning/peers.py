"""Exchange between the ranks of a run: each gives bytes on a topic, and all get what every rank gave."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from interlace.errors import PlanError

T = TypeVar("T")


class TopicError(PlanError):
    """Ranks are at different points of their work, because their options differ or one of them failed earlier."""


class Peers(Protocol):
    """The ranks of a run, this one among them."""

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """What each rank gives on a topic, in the order of ranks. Every rank must call this with the same topics in the same order. Raises
        PlanError on all ranks if one is at another topic."""
        ...


def gather(peers: Peers | None, topic: str, mine: T) -> list[T]:
    """What every rank gives on a topic, by rank; only `mine` if `peers` is None. Raises PlanError as `Peers.gather`."""
    if peers is None:
        return [mine]
    said = peers.gather(topic, msgspec.msgpack.encode(mine))
    known = {each: decoded(each, type(mine)) for each in set(said)}
    return [known[each] for each in said]


def decoded(packed: bytes, kind: Any, hook: Callable[[type, Any], Any] | None = None) -> Any:
    """A message, decoded as type `kind`; `hook` is msgspec's `dec_hook` for custom types."""
    return msgspec.msgpack.decode(packed, type=kind, dec_hook=hook)


def first_other(said: Sequence[Any]) -> int | None:
    """The first rank whose entry differs from rank 0's; None if there is none."""
    return next((rank for rank, each in enumerate(said) if each != said[0]), None)


def require_one_topic(topics: Sequence[str]) -> None:
    """Raise TopicError if the topics of ranks differ."""
    other = first_other(topics)
    if other is not None:
        raise TopicError(
            f"ranks 0 and {other} have different options: one is at {topics[0]!r}, the other at {topics[other]!r}; "
            "give every rank the same configuration and kind of device"
        )


def mark(text: str) -> bytes:
    """A digest of options, for comparison between ranks."""
    return hashlib.sha256(text.encode()).digest()[:16]


def require_same_options(peers: Peers, rank: int, options: str, marks: Sequence[bytes]) -> None:
    """Raise PlanError on all ranks, with the options of two that differ, if the ranks' marks (digests of options) differ."""
    other = first_other(marks)
    if other is not None:
        texts = peers.gather("options that differ", options.encode() if rank in (0, other) else b"")
        raise PlanError(
            f"ranks 0 and {other} planned with different options: {texts[0].decode()} and {texts[other].decode()}; "
            "give every rank the same configuration and device profile"
        )
