"""Custom devices (plugins): streams are real, copies go through the plugin's `memcpy_d2h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle

from interlace.bridge.places.base import Place

HOST = 1
"""`memcpy_d2h`'s destination number of pinned memory; a plugin must supply that kernel."""


@dataclass(frozen=True, slots=True)
class CustomPlace(Place):
    """The executor waits for the default stream after each job; freed memory is not recorded on side streams."""

    def copy_out(self, value: Any) -> Any:
        return paddle._C_ops.memcpy_d2h(value, HOST)

    def prepare(self) -> None:
        """Fast collection frees memory that a side stream still reads: collect by events."""
        paddle.set_flags({"FLAGS_fast_eager_deletion_mode": False})


def custom_place(device: Any) -> Place:
    """The rules of one custom device."""
    return CustomPlace("custom", device, has_events=True, has_streams=True, keeps_pinned=True)
