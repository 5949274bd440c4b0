"""Schedules of Paddle's own that receive in another order than they send: refused with cause and remedy."""

from __future__ import annotations

import pytest

from interlace.errors import PlanError
from interlace.ir import Pipeline
from interlace.scheduler.hazards import require_straight


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 3)])
def test_vpp_needs_whole_rounds_on_two_stages(stages: int, chunks: int) -> None:
    for count in range(1, 13):
        pipeline = Pipeline(num_stages=stages, num_micro_batches=count, num_chunks=chunks, schedule="VPP")
        if stages == 2 and count > 2 and count % 2:
            with pytest.raises(PlanError, match=rf"set it to {count - 1} or {count + 1}, or use schedule_mode 1F1B"):
                require_straight(pipeline)
        else:
            require_straight(pipeline)
    require_straight(Pipeline(num_stages=stages, num_micro_batches=5, schedule="1F1B"))
