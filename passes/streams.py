"""Names of the executor's streams. Paddle opens one stream for each name that an operation carries."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class AutoParallelStreamType(str, Enum):
    """What a stream is for; the value is its name in `execution_stream`.

    `MP` is Paddle's own (`paddle/distributed/passes/pass_utils.py`). None is for computation: its stream has the empty name, or
    `DefaultStream`; Paddle's `default`, written into an operation, would open a stream of its own.
    """

    MP = "auto_parallel_mp"
    DP = "auto_parallel_dp"
    PP_SEND = "auto_parallel_pp_send"
    PP_RECV = "auto_parallel_pp_recv"
    D2H = "auto_parallel_d2h"
    H2D = "auto_parallel_h2d"
    HOST_WAIT = "auto_parallel_host_wait"


def ring_stream(kind: AutoParallelStreamType, ring: int, rings: Iterable[int]) -> str:
    """The stream of one of the rings of a kind: two rings on one name would share the first one's communicator.

    >>> [ring_stream(AutoParallelStreamType.MP, 12, rings) for rings in ({12}, {12, 17})]
    ['auto_parallel_mp', 'auto_parallel_mp_12']
    """
    return kind.value + ("" if set(rings) <= {ring} else f"_{ring}")
