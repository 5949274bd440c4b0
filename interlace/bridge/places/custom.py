"""Custom devices (plugins): streams are real, copies go through the plugin's `memcpy_d2h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import paddle

from interlace.bridge.places.base import Place
from interlace.scheduler.target import GPU, TARGETS

PINNED = 1
"""`memcpy_d2h`'s destination number of pinned memory; a plugin must supply that kernel."""

TESTBED_RULES = msgspec.structs.replace(GPU, name="testbed", blocking=frozenset(), host_memory_edges=False)
"""The GPU place's, but for `memcpy_d2h`: it copies without blocking, and the executor orders no stream by what it wrote."""


@dataclass(frozen=True, slots=True)
class CustomPlace(Place):
    """The executor waits for the default stream after each job; freed memory is not recorded on side streams."""

    def copy_out(self, value: Any) -> Any:
        return paddle._C_ops.memcpy_d2h(value, PINNED)

    def prepare(self) -> None:
        """Fast collection frees memory that a side stream still reads: collect by events. No in-place pass, as on the GPU place."""
        paddle.set_flags({"FLAGS_fast_eager_deletion_mode": False, "FLAGS_pir_apply_inplace_pass": False})


@dataclass(frozen=True, slots=True)
class TestbedPlace(CustomPlace):
    """The testbed plays the GPU place: it frees at issue time, holds a block that its last reader's stream still reads, and lets the host
    run ahead (switch `nosync`)."""

    __test__ = False
    holds_host: ClassVar[bool] = True

    def label(self, built: Any, text: str) -> None:
        built.set_str_attr("interlace_at", text)

    def prepare(self) -> None:
        """As on the GPU place."""
        paddle.set_flags({"FLAGS_pir_apply_inplace_pass": False})

    def finish(self, program: Any, job: str) -> None:
        from testbed.programs import prepare_program

        prepare_program(program, job)


def custom_place(device: Any) -> Place:
    """The rules of one custom device."""
    if device.get_device_type() != TESTBED_RULES.name:
        return CustomPlace("custom", device, has_events=True, has_streams=True, keeps_pinned=True)
    TARGETS.setdefault(TESTBED_RULES.name, TESTBED_RULES)
    return TestbedPlace(TESTBED_RULES.name, device, has_events=True, has_streams=True, keeps_pinned=True, labels_all=True)
