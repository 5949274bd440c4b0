"""The list scheduler and the planners' clock compiled by numba: the functions of `list_schedule.py` and `clock.py`, over arrays."""

from __future__ import annotations

from functools import lru_cache

import numba.extending
import numpy as np

from interlace.compiling import compiled
from interlace.cost_model import interference
from interlace.scheduler.interleave import clock, columns, list_schedule
from interlace.scheduler.interleave.engine import Engine

SOURCES = (clock, columns, interference, list_schedule)
for helper in (*clock.HELPERS, *list_schedule.HELPERS):
    numba.extending.register_jitable(helper)
ENGINE = Engine(
    lambda listed: np.array(listed, np.int64),
    lambda listed: np.array(listed, np.float64),
    compiled(list_schedule.find_order, SOURCES, nogil=True),
    compiled(clock.run_order, SOURCES, nogil=True),
    compiled(clock.run_stamped, SOURCES, nogil=True),
    lambda columns: np.concatenate([*columns]),
    lru_cache(lambda function: compiled(function, ())),
)
