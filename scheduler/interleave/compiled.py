"""The list scheduler and the planners' clock compiled by numba: the functions of `list_schedule.py` and `clock.py`, over arrays."""

from __future__ import annotations

import numba
import numba.extending
import numpy as np

from interlace.scheduler.interleave import clock, list_schedule
from interlace.scheduler.interleave.engine import Engine

_jit = numba.njit(cache=True, nogil=True)
for helper in (*clock.HELPERS, *list_schedule.HELPERS):
    numba.extending.register_jitable(helper)
ENGINE = Engine(lambda listed: np.array(listed, np.int64), lambda listed: np.array(listed, np.float64),
                _jit(list_schedule.find_order), _jit(clock.run_order))  # fmt: skip
