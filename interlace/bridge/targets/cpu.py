"""The CPU: one serial stream, no events; communication runs through Interlace's own transport."""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import paddle

from interlace.bridge.targets.base import Device
from interlace.cpu import ops
from interlace.ir.target import CPU, Target


@dataclass(frozen=True, slots=True)
class CpuDevice(Device):
    """The CPU. Copies are real copies between two buffers in host memory, as there is no pinned memory (destination 1)."""

    target: ClassVar[Target] = CPU
    cannot_capture: ClassVar[str] = "a CPU runs each operation as it is issued, so there is nothing to capture"

    def name(self) -> str:
        """The model of the CPU."""
        return cpu_model()

    def synchronize(self) -> None:
        """Does nothing, as operations run when they are issued."""

    def forget_failure(self) -> None:
        """Clear the first failure, which the transport remembers for messages."""
        if ops.has_transport():
            ops.forget_failure()

    def copy_out(self, value: Any) -> Any:
        """A copy to another buffer in host memory."""
        return paddle._C_ops.memcpy_d2h(value, 0)

    def label(self, built: Any, text: str) -> None:
        """Set the label that the transport shows in errors."""
        built.set_str_attr("interlace_at", text)

    def finish(self, program: Any, job: str) -> None:
        """In a run on CPU processes, replace communication by operations of the transport."""
        if ops.has_transport():
            ops.rewrite_program(program, job)


def cpu_model() -> str:
    """Model name of the CPU, as Linux reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
