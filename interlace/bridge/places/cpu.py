"""The CPU place: one serial stream, no events; communication runs through Interlace's own transport."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import paddle

from interlace.bridge.places.base import Place


@dataclass(frozen=True, slots=True)
class CpuPlace(Place):
    """Copies are real copies between two buffers in host memory (destination 1, pinned, does not exist here)."""

    def copy_out(self, value: Any) -> Any:
        return paddle._C_ops.memcpy_d2h(value, 0)

    def label(self, built: Any, text: str) -> None:
        built.set_str_attr("interlace_at", text)

    def finish(self, program: Any, job: str) -> None:
        from interlace.cpu import install

        if install.RUN_DIR_VARIABLE in os.environ:
            install.prepare_program(program, job)


def cpu_place() -> Place:
    """The CPU's rules."""
    return CpuPlace("cpu", paddle.CPUPlace(), has_events=False, has_streams=False, keeps_pinned=False)
