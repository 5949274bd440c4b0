"""Builders of the operations that passes add; captured operations are cloned instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from interlace.bridge.targets import Device
from interlace.ir import Op

Builder = Callable[[Op, list[Any], Device], Any]


def _one_sided(made: Any, op: Op) -> Any:
    """The results of a gradient; one that the pass left out gets the null type, so that Paddle's kernel does not compute it."""
    left_out = op.attrs.get("left_out")
    if left_out is not None:
        made[left_out].set_type(pir.fake_value().type())
    return made


_ops = paddle._C_ops
BUILDERS: dict[str, Builder] = {
    "pd_op.full": lambda op, operands, device: _ops.full(
        op.attrs["shape"], op.attrs["value"], getattr(paddle, op.attrs["dtype"]), device.undefined()
    ),
    "pd_op.empty": lambda op, operands, device: _ops.empty(operands[0], getattr(paddle, op.attrs["dtype"]), device.undefined()),
    "pd_op.full_int_array": lambda op, operands, device: _ops.full_int_array(op.attrs["value"], paddle.int64, paddle.CPUPlace()),
    "pd_op.reshape": lambda op, operands, device: _ops.reshape(*operands[:2]),
    "pd_op.matmul": lambda op, operands, device: _ops.matmul(*operands[:2], op.attrs["transpose_x"], op.attrs["transpose_y"]),
    "pd_op.matmul_grad": lambda op, operands, device: _one_sided(
        _ops.matmul_grad(*operands, op.attrs["transpose_x"], op.attrs["transpose_y"]), op
    ),
    "pd_op.bmm_grad": lambda op, operands, device: _one_sided(_ops.bmm_grad(*operands), op),
    "pd_op.transpose": lambda op, operands, device: _ops.transpose(operands[0], op.attrs["perm"]),
    "pd_op.all_to_all": lambda op, operands, device: _ops.all_to_all(operands[0], op.attrs["ring_id"]),
    "pd_op.all_reduce_": lambda op, operands, device: _ops.all_reduce_(operands[0], op.attrs["ring_id"], op.attrs["reduce_type"]),
    "pd_op.share_data": lambda op, operands, device: _ops.share_data(operands[0]),
    "pd_op.memcpy_d2h": lambda op, operands, device: device.copy_out(operands[0]),
    "pd_op.memcpy_h2d": lambda op, operands, device: device.copy_in(operands[0]),
}
