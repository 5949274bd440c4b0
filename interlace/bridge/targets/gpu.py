"""CUDA GPUs. Tests compare the lowered programs with the rules of Paddle's source (docs/gpu-place.md).

The only asynchronous copy out is `memcpy` to pinned memory (destination 2), as `memcpy_d2h` blocks the host. The result of `memcpy`
has a place that operations of the same program cannot read, so it must cross a job boundary, after which it is a block argument with
the executor's own place that `memcpy_h2d` can read. No events or streams are recorded on pinned buffers, so they are never collected.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import paddle

from interlace.bridge.targets.base import Device, move
from interlace.ir.target import GPU, Target

PINNED = 2
"""Destination number of `memcpy` for pinned host memory."""


@dataclass(frozen=True, slots=True)
class GpuDevice(Device):
    """A CUDA GPU: streams are real, fast garbage collection frees at issue time, and events order jobs of the same micro-batch id."""

    target: ClassVar[Target] = GPU
    tunes: ClassVar[bool] = True
    examines: ClassVar[bool] = True
    passes_priorities: ClassVar[bool] = True
    cannot_capture: ClassVar[str] = (
        "Paddle's GPU place cannot: its executor waits inside a step for events of the step before and forks no named stream from the one "
        "that is captured (docs/paddle-limits.md)"
    )

    def name(self) -> str:
        """The GPU's name, such as `NVIDIA H200`."""
        return str(paddle.device.cuda.get_device_name(self.place))

    def reserved_bytes(self) -> int:
        """Device memory that Paddle's allocator holds, as Paddle counts it."""
        return int(paddle.device.cuda.memory_reserved(self.place))

    def gpu_index(self) -> int | None:
        """The index in Paddle's place."""
        return int(self.place.get_device_id())

    def total_bytes(self) -> int:
        """Total memory of the GPU, as the driver reports it."""
        return int(paddle.device.cuda.get_device_properties(self.place).total_memory)

    def available_bytes(self) -> int:
        """What Paddle's allocator holds, and what the driver reports as free; the total memory if Paddle cannot tell what is free."""
        total = self.total_bytes()
        with suppress(AttributeError, RuntimeError, ValueError):
            return min(total, self.reserved_bytes() + int(paddle.cuda.mem_get_info(self.gpu_index())[0]))
        return total

    def release_memory(self) -> None:
        """Free the unused blocks in the pools of all streams."""
        paddle.device.cuda.empty_cache()

    def copy_out(self, value: Any) -> Any:
        """An asynchronous copy to pinned memory."""
        return paddle._C_ops.memcpy(value, PINNED)

    def is_on_host(self, tensor: Any) -> bool:
        """Whether a tensor is in pinned memory."""
        return bool(tensor._place().is_cuda_pinned_place())

    def move_to_host(self, tensor: Any) -> None:
        """Move a tensor to pinned memory; the copy blocks."""
        move(tensor, paddle.CUDAPinnedPlace())

    def move_to_device(self, tensor: Any) -> None:
        """Move a tensor from host memory to the device."""
        move(tensor, self.place)
