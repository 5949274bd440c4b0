"""Inputs of operations that are measured."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.paddle


def inputs_of(*inputs: tuple[tuple[int, ...], str]) -> list[Any]:
    """Arrays that an operation with inputs of these shapes and types gets."""
    import numpy as np

    from interlace.bridge.probe.bench import Case, bench_of, paddle_settings
    from interlace.bridge.targets.choose import choose_device
    from interlace.cost_model.work import Part

    with paddle_settings():
        found = bench_of(choose_device(), quick=True).inputs(
            Case(Part("add", "memory", "float32", (), 0, 1), [*inputs], lambda given: lambda: None)
        )
        return [np.asarray(found.scope.find_var(name).get_tensor()) for name in found.names]


@pytest.mark.parametrize("dtype", ["uint8", "bool"])
@pytest.mark.parametrize("shape", [(256, 384), (64, 1024), (3, 5, 7, 64)])
def test_nine_tenths_of_a_mask_are_set_and_rows_differ(dtype: str, shape: tuple[int, ...]) -> None:
    (mask,) = inputs_of((shape, dtype))
    assert (mask.shape, str(mask.dtype)) == (shape, dtype)
    assert abs(mask.astype(bool).mean() - 0.9) < 0.01
    assert {*map(int, {*mask.reshape(-1).tolist()})} == {0, 1}
    rows = mask.reshape(-1, shape[-1])
    assert len({row.tobytes() for row in rows}) > len(rows) // 2


def test_rows_of_tables_count_up_and_others_are_no_zeros() -> None:
    rows, numbers = inputs_of(((2, 3), "int64"), ((4, 4), "float32"))
    assert rows.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (numbers > 0).all()
