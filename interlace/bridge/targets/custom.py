"""Custom devices (plugins): streams are real, copies go through the plugin's `memcpy_d2h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import paddle

from interlace.bridge.targets.base import Device
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
