"""CUDA GPUs. Tests compare the lowered programs with the rules of Paddle's source (docs/gpu-place.md).

The one asynchronous copy out is `memcpy` to pinned memory (destination 2): `memcpy_d2h` blocks the host. Its result has a place
that operations of the same program cannot read, so it crosses a job boundary; there it is a block argument with the executor's
own place, which `memcpy_h2d` reads. Pinned buffers carry no events and no stream records, so they are never collected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import paddle

from interlace.bridge.targets.base import Device, move
from interlace.ir.target import GPU, Target

PINNED = 2
"""`memcpy`'s destination number of pinned host memory."""


@dataclass(frozen=True, slots=True)
class GpuDevice(Device):
    """CUDA streams, fast garbage collection at issue time, events between jobs of one micro-batch id."""

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
        """As Paddle counts it."""
        return int(paddle.device.cuda.memory_reserved(self.place))

    def gpu_index(self) -> int | None:
        """As the place has it."""
        return int(self.place.get_device_id())

    def total_bytes(self) -> int:
        """As the driver has it."""
        return int(paddle.device.cuda.get_device_properties(self.place).total_memory)

    def release_memory(self) -> None:
        """Free idle blocks of all streams' pools."""
        paddle.device.cuda.empty_cache()

    def copy_out(self, value: Any) -> Any:
        """An asynchronous copy to pinned memory."""
        return paddle._C_ops.memcpy(value, PINNED)

    def is_on_host(self, tensor: Any) -> bool:
        """Whether it is pinned."""
        return bool(tensor._place().is_cuda_pinned_place())

    def move_to_host(self, tensor: Any) -> None:
        """Into pinned memory; the copy waits."""
        move(tensor, paddle.CUDAPinnedPlace())

    def move_to_device(self, tensor: Any) -> None:
        """The reverse."""
        move(tensor, self.place)
