"""Which device this process runs on."""

from __future__ import annotations

import paddle
from paddle.base.framework import _current_expected_place_

from interlace.bridge.places.base import Place
from interlace.bridge.places.cpu import cpu_place
from interlace.bridge.places.custom import custom_place
from interlace.bridge.places.gpu import gpu_place
from interlace.errors import PlanError


def choose_place() -> Place:
    """The rules of the device Paddle's executor will use.

    Raises:
        PlanError: A device whose rules nobody has written down.
    """
    device = _current_expected_place_()
    if isinstance(device, paddle.CPUPlace):
        return cpu_place()
    if isinstance(device, paddle.CUDAPlace):
        return gpu_place(paddle.CUDAPlace(paddle.distributed.ParallelEnv().dev_id))
    if isinstance(device, paddle.CustomPlace):
        return custom_place(device)
    raise PlanError(f"device {device}: Interlace knows the rules of CPU, CUDA GPU and custom devices only; turn it off here")
