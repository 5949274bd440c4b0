"""Custom devices (plugins): streams are real, copies go through the plugin's `memcpy_d2h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import paddle

from interlace.bridge.targets.base import Device, move
from interlace.ir.target import CUSTOM, Target

PINNED = 1
"""`memcpy_d2h`'s destination number of pinned memory; a plugin must supply that kernel."""


@dataclass(frozen=True, slots=True)
class CustomDevice(Device):
    """The executor waits for the default stream after each job; freed memory is not recorded on side streams."""

    target: ClassVar[Target] = CUSTOM

    def copy_out(self, value: Any) -> Any:
        """An asynchronous copy to pinned memory."""
        return paddle._C_ops.memcpy_d2h(value, PINNED)

    def is_on_host(self, tensor: Any) -> bool:
        """Whether it is in host memory, be it pinned or not."""
        return bool(tensor._place().is_cpu_place())

    def move_to_host(self, tensor: Any) -> None:
        """Into pageable memory; the first copy out puts pinned memory in its place."""
        move(tensor, paddle.CPUPlace())

    def move_to_device(self, tensor: Any) -> None:
        """The reverse."""
        move(tensor, self.place)
