"""What lowering builds differently for each kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import paddle
from paddle.base import core

from interlace.passes.streams import AutoParallelStreamType
from interlace.scheduler.target import Target


@dataclass(frozen=True, slots=True)
class Device:
    """A device that programs are built for; a kind of device is a subclass with its target.

    Attributes:
        place: Paddle's place object.
        target: What such a device does by itself.
        labels_all: Whether every operation says which one it is, not communication alone.
    """

    place: Any
    target: ClassVar[Target]
    labels_all: ClassVar[bool] = False

    def place_attribute(self) -> Any:
        """Paddle's attribute form of the place that the executor runs on."""
        made = core.Place()
        made.set_place(self.place)
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
        return self.target.keeps_pinned and name.startswith(PINNED_PREFIX)

    def watch(self, value: Any) -> Any:
        """One element, cut out right behind a computation, so that nothing issued later stands in front of it.

        None where the host needs no holding back.
        """
        return first_element(value) if self.target.host_runs_ahead else None

    def wait_for(self, watched: Any) -> None:
        """Make the host wait for what is watched before it issues more."""
        if self.target.host_runs_ahead:
            sync_behind(watched)

    def label(self, built: Any, text: str) -> None:
        """Say on an operation which one it is, where errors can show it."""

    def prepare(self) -> None:
        """Set what the executor reads before it builds a plan of ours.

        The in-place pass would add write-after-read edges between streams that end an overlap. Fast collection frees at issue.
        """
        if not self.target.in_place_pass:
            paddle.set_flags({"FLAGS_pir_apply_inplace_pass": False})
        if self.target.free == "end" and not self.target.serial:
            paddle.set_flags({"FLAGS_fast_eager_deletion_mode": False})

    def finish(self, program: Any, job: str) -> None:
        """Last rewrite of a job program."""


def first_element(value: Any) -> Any:
    """A float32 value of one element, in memory of its own, that is there when a value is.

    The value itself would not do: a wait at the job's end would be its last reader, and collection at issue time records no other.
    """
    num_dims = len(value.shape)
    if num_dims:
        value = paddle._C_ops.slice(value, list(range(num_dims)), [0] * num_dims, [1] * num_dims, [1] * num_dims, [])
    elif value.dtype == paddle.float32:
        value = paddle._C_ops.assign(value)
    return value if value.dtype == paddle.float32 else paddle._C_ops.cast(value, paddle.float32)


def sync_behind(watched: Any) -> None:
    """Block the host until `watched` is there: Paddle's operator that synchronizes a stream, on a stream that has nothing but this.

    The executor lets that stream wait for the computation. The operator has kernels of few types; float32 is one. A blocking copy
    would stand behind offload's in the copy engine (measured on H200s: steps with offload 4 to 36 % longer).
    """
    synced = paddle._C_ops.sync_calc_stream_(watched)
    synced.get_defining_op().set_execution_stream(AutoParallelStreamType.HOST_WAIT.value)


PINNED_PREFIX = "interlace_pinned_"
