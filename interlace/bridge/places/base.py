"""The rules of a device that lowering follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
from paddle.base import core


@dataclass(frozen=True, slots=True)
class Place:
    """Rules and builders of one device.

    Attributes:
        name: `cpu`, `custom` or `gpu`.
        device: Paddle's place object.
        has_events: Whether events between jobs exist and are needed (streams are real).
        has_streams: Whether streams are real.
        keeps_pinned: Whether pinned buffers must stay out of garbage collection (the device knows no event on them).
    """

    name: str
    device: Any
    has_events: bool
    has_streams: bool
    keeps_pinned: bool

    def own(self) -> Any:
        """Paddle's attribute form of the executor's own place."""
        made = core.Place()
        made.set_place(self.device)
        return made

    def undefined(self) -> Any:
        """The place of inputs that the executor finds where they are."""
        return core.Place()

    def copy_out(self, value: Any) -> Any:
        """A copy to host memory."""
        raise NotImplementedError

    def copy_in(self, value: Any) -> Any:
        """A copy from host memory back to the device."""
        return paddle._C_ops.memcpy_h2d(value, 1)

    def never_collected(self, name: str) -> bool:
        """Whether the executor must never collect a variable (pinned buffers, where the device has no events on them)."""
        return self.keeps_pinned and name.startswith(PINNED_PREFIX)

    def hold_back(self, value: Any) -> None:
        """Put at the end of a job what keeps the host from running ahead of the device, behind a value of the job's last computation."""

    def label(self, built: Any, text: str) -> None:
        """Say on a communication operation which one it is, where errors can show it."""

    def prepare(self) -> None:
        """Set what the executor reads before it builds a plan of ours."""

    def finish(self, program: Any, job: str) -> None:
        """Last rewrite of a job program."""


PINNED_PREFIX = "interlace_pinned_"
