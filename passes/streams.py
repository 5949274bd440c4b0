"""Names of the executor's streams. Paddle opens one stream for each name that it finds on an operation."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class AutoParallelStreamType(str, Enum):
    """What a side stream is for; the value is its name in `execution_stream`.

    `MP` is Paddle's own (`paddle/distributed/passes/pass_utils.py`). There is no member for computation: its stream has the empty name, or
    `DefaultStream`; the name `default`, which Paddle's own enumeration has, would open another stream if an operation had it.
    """

    MP = "auto_parallel_mp"
    DP = "auto_parallel_dp"
    PP_SEND = "auto_parallel_pp_send"
    PP_RECV = "auto_parallel_pp_recv"
    D2H = "auto_parallel_d2h"
    H2D = "auto_parallel_h2d"
    HOST_WAIT = "auto_parallel_host_wait"


def ring_stream(kind: AutoParallelStreamType, ring: int, rings: Iterable[int]) -> str:
    """The stream name of one ring of a kind. If there are several, each gets its own: rings under one name would share the first ring's
    communicator.

    >>> [ring_stream(AutoParallelStreamType.MP, 12, rings) for rings in ({12}, {12, 17})]
    ['auto_parallel_mp', 'auto_parallel_mp_12']
    """
    return kind.value + ("" if set(rings) <= {ring} else f"_{ring}")
