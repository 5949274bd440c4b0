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
    """A device that programs are built for; a kind of device is a subclass with its target.

    Attributes:
        labels_all: Whether every operation gets a label, and not only communication.
        tunes: Whether plans are measured there by default (`tune: auto`).
        examines: Whether the machine is looked at by default before the first plan (`examine: auto`).
        passes_priorities: Whether the device gets the priority that operations ask for their stream.
        cannot_capture: Why a step cannot be captured there; empty where it can be.
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
        """What the device is, as profiles call theirs; empty where that cannot be known. Raises ValueError, RuntimeError or OSError where
        Paddle cannot tell."""
        return ""

    def synchronize(self) -> None:
        """Wait until the device has done all that was issued."""
        paddle.device.synchronize(self.place)

    def reserved_bytes(self) -> int:
        """Device memory that Paddle's allocator holds; 0 where that is not known."""
        return 0

    def gpu_index(self) -> int | None:
        """Number of the NVIDIA GPU among those that this process sees; None on other devices."""
        return None

    def total_bytes(self) -> int:
        """Memory of the device; 0 where that is not known."""
        return 0

    def release_memory(self) -> None:
        """Give back what the allocator holds and nobody uses, where it keeps such memory."""

    def forget_failure(self) -> None:
        """Do as if no step had failed, after one was undone."""

    def undefined(self) -> Any:
        """The place of inputs that the executor finds where they are."""
        return core.Place()

    def copy_out(self, value: Any) -> Any:
        """A copy to host memory."""
        raise NotImplementedError

    def copy_in(self, value: Any) -> Any:
        """A copy from host memory back to the device."""
        return paddle._C_ops.memcpy_h2d(value, 1)

    def is_on_host(self, tensor: Any) -> bool:
        """Whether a tensor is in host memory, from which copies in read and into which copies out write."""
        return True

    def move_to_host(self, tensor: Any) -> None:
        """Give a tensor memory of the host in place of the device's; nothing may use it."""

    def move_to_device(self, tensor: Any) -> None:
        """The reverse."""

    def never_collected(self, name: str) -> bool:
        """Whether the executor must never collect a variable (pinned buffers, where the device has no events on them)."""
        return self.target.keeps_pinned and name.startswith(PINNED_PREFIX)

    def begin_capture(self) -> None:
        """Let the device take down what it is asked for, instead of doing it. Raises PlanError with the reason."""
        raise PlanError(self.cannot_capture)

    def end_capture(self, failed: bool = False) -> int:
        """The number of what was taken down; with `failed` nothing is kept. Raises PlanError with the first reason, then always."""
        raise PlanError(self.cannot_capture)

    def launch(self, graph: int) -> None:
        """Do what was taken down, behind what the compute stream was given before. Raises PlanError where it cannot be any more."""
        raise PlanError(self.cannot_capture)

    def copy_result(self, value: Any) -> Any:
        """A copy to host memory of what the host reads while a captured step goes on."""
        raise PlanError(self.cannot_capture)

    def await_results(self, graph: int) -> None:
        """Wait until the last launch has made these copies. Raises PlanError where the launch failed."""
        raise PlanError(self.cannot_capture)

    def forget(self, graph: int) -> None:
        """Give up what was taken down, once the device is idle."""

    def watch(self, value: Any) -> Any:
        """Cut out one element of a result right after its computation, so that a wait for it does not wait for later operations.

        None on targets whose host does not run ahead.
        """
        return first_element(value) if self.target.host_runs_ahead else None

    def wait_for(self, watched: Any) -> None:
        """Make the host wait for an element that `watch` returned before it issues more.

        Paddle's operator that synchronizes a stream does it, on a stream that else only copies outputs, behind all waits of a step.
        The executor lets that stream wait for the computation. The operator has kernels for few types; float32 is one. A blocking copy
        would queue after offload's copies in the copy engine (docs/decisions/006).
        """
        if self.target.host_runs_ahead:
            synced = paddle._C_ops.sync_calc_stream_(watched)
            synced.get_defining_op().set_execution_stream(AutoParallelStreamType.HOST_WAIT.value)

    def label(self, built: Any, text: str) -> None:
        """Set a label on an operation, for error messages."""

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
        """Rewrite a finished job program."""


def move(tensor: Any, place: Any) -> None:
    """Give a tensor of the executor's scope memory at another place, with the same contents."""
    made = core.DenseTensor()
    made._copy_from(tensor, place)
    tensor._share_data_with(made)


def first_element(value: Any) -> Any:
    """A float32 value of one element, in memory of its own, that is computed right after a value.

    The host must not wait for the value itself: the wait would become the value's last reader, the only one that garbage collection
    at issue time records.
    """
    num_dims = len(value.shape)
    if num_dims:
        value = paddle._C_ops.slice(value, list(range(num_dims)), [0] * num_dims, [1] * num_dims, [1] * num_dims, [])
    elif value.dtype == paddle.float32:
        value = paddle._C_ops.assign(value)
    return value if value.dtype == paddle.float32 else paddle._C_ops.cast(value, paddle.float32)


PINNED_PREFIX = "interlace_pinned_"
