"""Which batches a plan takes."""

from __future__ import annotations

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from interlace.bridge.feeds import different_feed, matching_feed, shape_of  # noqa: E402
from interlace.bridge.lower import Lowered, lower  # noqa: E402
from interlace.bridge.targets.cpu import CpuDevice  # noqa: E402
from interlace.errors import PlanError  # noqa: E402
from interlace.ir import Pipeline  # noqa: E402
from tests.bridge.small import captured_small, planned  # noqa: E402

pytestmark = pytest.mark.paddle


def lowered(has_p2p: bool) -> Lowered:
    return Lowered([], {}, {}, None, {"x": (8, 4), "any": (-1, 4)}, 4, has_p2p)


def batch(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros(shape), "other": np.zeros(3)}


def test_a_lowered_program_knows_its_batch() -> None:
    captured = captured_small()
    assert lower(captured, planned(captured), CpuDevice(paddle.CPUPlace())).fed == {"x": (6, 4)}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("rows", [2, -1])
def test_a_batch_has_the_rows_of_all_micro_batches(rows: int, count: int) -> None:
    """Unknown ones stay unknown. A number has none: each micro-batch gets it as it is."""
    captured = captured_small(Pipeline(num_micro_batches=count, schedule="accumulate"), rows=rows, scaled=True)
    found = lower(captured, planned(captured), CpuDevice(paddle.CPUPlace()))
    assert found.fed == {"x": (max(-1, rows * count), 4), "by": ()}


@pytest.mark.parametrize("data", [batch(8, 4), [batch(8, 4)], [None, {}], {"any": np.zeros((3, 4))}, None])
def test_the_plans_own_batch_is_taken(data: object) -> None:
    assert different_feed(lowered(True), data) is None


@pytest.mark.parametrize(
    ("has_p2p", "shape"),
    [(True, (4, 4)), (True, (16, 4)), (False, (16, 4)), (False, (5, 4)), (False, (0, 4)), (False, (4, 5)), (False, (4,))],
)
def test_another_batch_is_refused_before_anything_runs(has_p2p: bool, shape: tuple[int, ...]) -> None:
    """Pinned memory. Stages know the sizes of what they send; without stages a smaller batch must still be cut evenly."""
    words = r"feed 'x': found shape .*, expected \[8, 4\], which the plan runs as 4 micro-batches of 2 rows; feed whole batches"
    with pytest.raises(PlanError, match=words), matching_feed(lowered(has_p2p), batch(*shape)):
        pytest.fail("the step ran")


def test_a_smaller_batch_is_paddles_to_judge_without_stages() -> None:
    """Pinned memory. What fails then says which batch it was."""
    with matching_feed(lowered(False), batch(4, 4)):
        pass
    with pytest.raises(PlanError, match=r"found shape \[4, 4\], expected \[8, 4\]"), matching_feed(lowered(False), batch(4, 4)):
        raise ValueError("capacity")
    with pytest.raises(ValueError, match="capacity"), matching_feed(lowered(False), batch(8, 4)):
        raise ValueError("capacity")


@pytest.mark.parametrize("data", [{"x": [[0.0] * 4] * 8}, {"x": 1.0}])
def test_what_has_no_shape_is_paddles_to_judge(data: object) -> None:
    """Such as rows in lists, which the executor makes a tensor of."""
    assert shape_of(data["x"]) is None  # type: ignore[index]
    assert different_feed(lowered(True), data) is None
