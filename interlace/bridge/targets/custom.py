"""Custom devices (plugins): streams are real, copies go through the plugin's `memcpy_d2h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import paddle

from interlace.bridge.targets.base import Device, move
from interlace.ir.target import CUSTOM, Target

PINNED = 1
"""Destination number of `memcpy_d2h` for pinned memory; a plugin must supply that kernel."""


@dataclass(frozen=True, slots=True)
class CustomDevice(Device):
    """A custom device. The executor waits for the default stream after each job; freed memory is not recorded on side streams."""

    target: ClassVar[Target] = CUSTOM

    def copy_out(self, value: Any) -> Any:
        """An asynchronous copy to pinned memory."""
        return paddle._C_ops.memcpy_d2h(value, PINNED)

    def is_on_host(self, tensor: Any) -> bool:
        """Whether a tensor is in host memory, pinned or not."""
        return bool(tensor._place().is_cpu_place())

    def move_to_host(self, tensor: Any) -> None:
        """Move a tensor to pageable memory, which the first copy out replaces by pinned memory."""
        move(tensor, paddle.CPUPlace())

    def move_to_device(self, tensor: Any) -> None:
        """Move a tensor from host memory to the device."""
        move(tensor, self.place)
