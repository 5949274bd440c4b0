"""Softmax with cross entropy over classes that are split over the ranks of a group. No Paddle here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from interlace.cpu.reduction import Array, narrowed, widened
from interlace.cpu.transport import Transport


def cross_entropy(
    transport: Transport,
    logits: Array,
    label: Array,
    dtype: str,
    ignore_index: int,
    group: int,
    ranks: Sequence[int],
    where: str,
) -> tuple[Array, Array]:
    """Softmax `[..., d]` of this rank's classes and the loss `[..., 1]`, both in `dtype`.

    Rank i of the group has the classes `[i * d, (i + 1) * d)`; `label` is `[..., 1]` or `[...]`. Computed in float32,
    or in float64 if that is `dtype`, with three all-reduces. Rows labelled `ignore_index` get loss 0.
    """
    values = widened(logits, dtype)
    rows = label.reshape(*values.shape[:-1], 1)
    highest = transport.all_reduce(values.max(axis=-1, keepdims=True), "max", group, ranks, where)
    shifted = values - highest
    exponentials = np.exp(shifted)
    total = transport.all_reduce(exponentials.sum(axis=-1, keepdims=True), "sum", group, ranks, where)
    mine, columns = _own_labels(rows, values.shape[-1], list(ranks).index(transport.rank))
    picked = np.where(mine, np.take_along_axis(shifted, columns, axis=-1), values.dtype.type(0))
    target = transport.all_reduce(picked, "sum", group, ranks, where)
    loss = np.where(rows == ignore_index, values.dtype.type(0), np.log(total) - target)
    return narrowed(exponentials / total, dtype), narrowed(loss, dtype)


def cross_entropy_grad(softmax: Array, label: Array, loss_grad: Array, dtype: str, ignore_index: int, group_rank: int) -> Array:
    """Gradient of the logits `[..., d]` on rank `group_rank` of the group, in `dtype`; needs no communication."""
    probability = widened(softmax, dtype)
    rows = label.reshape(*probability.shape[:-1], 1)
    mine, columns = _own_labels(rows, probability.shape[-1], group_rank)
    hot = np.zeros_like(probability)
    np.put_along_axis(hot, columns, mine.astype(hot.dtype), axis=-1)
    scale = np.where(rows == ignore_index, probability.dtype.type(0), widened(loss_grad, dtype).reshape(rows.shape))
    return narrowed((probability - hot) * scale, dtype)


def _own_labels(rows: Array, num_classes: int, group_rank: int) -> tuple[Array, Array]:
    """Whether each row's label is one of this rank's classes, and its column (0 if it is not)."""
    columns = rows - group_rank * num_classes
    mine = (columns >= 0) & (columns < num_classes)
    return mine, np.where(mine, columns, 0)
