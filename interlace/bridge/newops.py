"""How the lowering builds operations that passes made; captured ones are cloned instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from interlace.bridge.targets import Device
from interlace.ir import Op

Builder = Callable[[Op, list[Any], Device], Any]


def _full_int_array(op: Op, operands: list[Any], device: Device) -> Any:
    return paddle._C_ops.full_int_array(op.attrs["value"], paddle.int64, paddle.CPUPlace())


def _full(op: Op, operands: list[Any], device: Device) -> Any:
    """A constant that the device computes."""
    return paddle._C_ops.full(op.attrs["shape"], op.attrs["value"], getattr(paddle, op.attrs["dtype"]), device.undefined())


def _reshape(op: Op, operands: list[Any], device: Device) -> Any:
    return paddle._C_ops.reshape(operands[0], operands[1])


def _matmul(op: Op, operands: list[Any], device: Device) -> Any:
    return paddle._C_ops.matmul(operands[0], operands[1], op.attrs["transpose_x"], op.attrs["transpose_y"])


def _matmul_grad(op: Op, operands: list[Any], device: Device) -> Any:
    """Both results, or one alone: a result of null type is not computed by Paddle's kernels."""
    return _one_sided(paddle._C_ops.matmul_grad(*operands, op.attrs["transpose_x"], op.attrs["transpose_y"]), op)


def _bmm_grad(op: Op, operands: list[Any], device: Device) -> Any:
    return _one_sided(paddle._C_ops.bmm_grad(*operands), op)


def _one_sided(made: Any, op: Op) -> Any:
    left_out = op.attrs.get("left_out")
    if left_out is not None:
        made[left_out].set_type(pir.fake_value().type())
    return made


def _transpose(op: Op, operands: list[Any], device: Device) -> Any:
    return paddle._C_ops.transpose(operands[0], op.attrs["perm"])


def _all_to_all(op: Op, operands: list[Any], device: Device) -> Any:
    return paddle._C_ops.all_to_all(operands[0], op.attrs["ring_id"])


def _share_data(op: Op, operands: list[Any], device: Device) -> Any:
    return paddle._C_ops.share_data(operands[0])


def _copy_out(op: Op, operands: list[Any], device: Device) -> Any:
    return device.copy_out(operands[0])


def _copy_in(op: Op, operands: list[Any], device: Device) -> Any:
    return device.copy_in(operands[0])


BUILDERS: dict[str, Builder] = {
    "pd_op.full": _full,
    "pd_op.full_int_array": _full_int_array,
    "pd_op.reshape": _reshape,
    "pd_op.matmul": _matmul,
    "pd_op.matmul_grad": _matmul_grad,
    "pd_op.bmm_grad": _bmm_grad,
    "pd_op.transpose": _transpose,
    "pd_op.all_to_all": _all_to_all,
    "pd_op.share_data": _share_data,
    "pd_op.memcpy_d2h": _copy_out,
    "pd_op.memcpy_h2d": _copy_in,
}
