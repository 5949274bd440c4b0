"""What lowering builds differently for each kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import paddle
from paddle.base import core

from interlace.errors import PlanError
from interlace.ir.target import Target
from interlace.passes.streams import AutoParallelStreamType


@dataclass(frozen=True, slots=True)
class Device:
    """A device that programs are built for; each kind of device is a subclass with its target.

    Attributes:
        place: Paddle's place object.
        target: The rules of this kind of device.
        labels_all: Whether every operation gets a label, not only communication.
        tunes: Whether plans are measured by default (`tune: auto`).
        examines: Whether the machine is examined by default before the first plan (`examine: auto`).
        passes_priorities: Whether Paddle passes stream priorities on to the device.
        cannot_capture: Why a step cannot be captured; empty if it can be.
    """

    place: Any
    target: ClassVar[Target]
    labels_all: ClassVar[bool] = False
    tunes: ClassVar[bool] = False
    examines: ClassVar[bool] = False
    passes_priorities: ClassVar[bool] = False
    cannot_capture: ClassVar[str] = "Interlace knows no way to capture what Paddle's executor gives this device"

    def place_attribute(self) -> Any:
        """Paddle's attribute form of the place that the executor runs on."""
        made = core.Place()
        made.set_place(self.place)
        return made

    def name(self) -> str:
        """Name of the device, in the form of `DeviceProfile.device`; empty if it cannot be determined. Raises ValueError, RuntimeError or
        OSError if Paddle cannot tell."""
        return ""

    def synchronize(self) -> None:
        """Wait until the device has completed everything issued."""
        paddle.device.synchronize(self.place)

    def reserved_bytes(self) -> int:
        """Device memory that Paddle's allocator holds; 0 if not known."""
        return 0

    def gpu_index(self) -> int | None:
        """Index of the NVIDIA GPU among those that this process sees; None on other devices."""
        return None

    def total_bytes(self) -> int:
        """Total memory of the device; 0 if not known."""
        return 0

    def available_bytes(self) -> int:
        """Memory of the device that this process holds or may still take; 0 if not known."""
        return self.total_bytes()

    def release_memory(self) -> None:
        """Return unused memory of the allocator to the device, if it keeps such memory."""

    def forget_failure(self) -> None:
        """Clear the record of a failed step, after the step was undone."""

    def undefined(self) -> Any:
        """Paddle's undefined place, for inputs that the executor takes from wherever they are."""
        return core.Place()

    def copy_out(self, value: Any) -> Any:
        """A copy to host memory."""
        raise NotImplementedError

    def copy_in(self, value: Any) -> Any:
        """A copy from host memory back to the device."""
        return paddle._C_ops.memcpy_h2d(value, 1)

    def is_on_host(self, tensor: Any) -> bool:
        """Whether a tensor is in the host memory that copies in read and copies out write."""
        return True

    def move_to_host(self, tensor: Any) -> None:
        """Move a tensor from the device to host memory; nothing else may be using it."""

    def move_to_device(self, tensor: Any) -> None:
        """Move a tensor from host memory to the device."""

    def never_collected(self, name: str) -> bool:
        """Whether the executor must never garbage-collect a variable (pinned buffers, if the device records no events on them)."""
        return self.target.keeps_pinned and name.startswith(PINNED_PREFIX)

    def begin_capture(self) -> None:
        """Make the device record what it is asked for in a graph, instead of running it. Raises PlanError with the reason if it cannot."""
        raise PlanError(self.cannot_capture)

    def end_capture(self, failed: bool = False) -> int:
        """End recording; returns the number of the graph. With `failed` nothing is kept, and PlanError is always raised, with the first
        reason."""
        raise PlanError(self.cannot_capture)

    def launch(self, graph: int) -> None:
        """Run a graph after the earlier work of the compute stream. Raises PlanError if it can no longer be run."""
        raise PlanError(self.cannot_capture)

    def copy_result(self, value: Any) -> Any:
        """A copy to host memory of a value that the host reads while a captured step continues."""
        raise PlanError(self.cannot_capture)

    def await_results(self, graph: int) -> None:
        """Wait until the last launch has made the copies of `copy_result`. Raises PlanError if the launch failed."""
        raise PlanError(self.cannot_capture)

    def forget(self, graph: int) -> None:
        """Release a graph, once the device is idle."""

    def watch(self, value: Any) -> Any:
        """Copy one element of a result right after its computation, so that a wait for it does not wait for later operations.

        Returns None on targets whose host does not run ahead.
        """
        return first_element(value) if self.target.host_runs_ahead else None

    def wait_for(self, watched: Any) -> None:
        """Make the host wait, before it issues more, for an element that `watch` returned.

        This uses Paddle's operator that synchronizes a stream. Its stream is used otherwise only to copy outputs, after all waits of a
        step, and the executor makes it wait for the computation. The operator has kernels for few dtypes; float32 is one. A blocking copy
        would queue after offload's copies in the copy engine (docs/decisions/006).
        """
        if self.target.host_runs_ahead:
            synced = paddle._C_ops.sync_calc_stream_(watched)
            synced.get_defining_op().set_execution_stream(AutoParallelStreamType.HOST_WAIT.value)

    def label(self, built: Any, text: str) -> None:
        """Set the label of an operation for error messages."""

    def prepare(self) -> None:
        """Set Paddle's flags before the executor builds a plan of ours.

        The in-place pass is turned off because its write-after-read edges between streams would prevent overlap, and fast garbage
        collection because it frees at issue.
        """
        if not self.target.in_place_pass:
            paddle.set_flags({"FLAGS_pir_apply_inplace_pass": False})
        if self.target.free == "end" and not self.target.serial:
            paddle.set_flags({"FLAGS_fast_eager_deletion_mode": False})

    def finish(self, program: Any, job: str) -> None:
        """Rewrite a finished job program for this device."""


def move(tensor: Any, place: Any) -> None:
    """Move a tensor of the executor's scope to another place, with the same contents."""
    made = core.DenseTensor()
    made._copy_from(tensor, place)
    tensor._share_data_with(made)


def first_element(value: Any) -> Any:
    """A float32 value of one element, in memory of its own, that is computed right after a value.

    The host must not wait for the value itself: this wait would become the value's last reader, and garbage collection at issue time
    only records that one.
    """
    num_dims = len(value.shape)
    if num_dims:
        value = paddle._C_ops.slice(value, list(range(num_dims)), [0] * num_dims, [1] * num_dims, [1] * num_dims, [])
    elif value.dtype == paddle.float32:
        value = paddle._C_ops.assign(value)
    return value if value.dtype == paddle.float32 else paddle._C_ops.cast(value, paddle.float32)


PINNED_PREFIX = "interlace_pinned_"
