"""How Interlace's programs are built for the testbed. `register` makes this known to Interlace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import paddle

from interlace.bridge.targets import register_device
from interlace.bridge.targets.custom import CustomDevice
from interlace.errors import PlanError
from interlace.ir.target import Target
from testbed import device
from testbed.device import NAME
from testbed.gpus import machine
from testbed.target import RULES


@dataclass(frozen=True, slots=True)
class TestbedDevice(CustomDevice):
    """The testbed imitates a GPU: memory is freed at issue time, a freed block stays allocated while its last reader's stream reads it,
    and the host runs ahead (switch `nosync`)."""

    __test__ = False
    target: ClassVar[Target] = RULES
    labels_all: ClassVar[bool] = True
    passes_priorities: ClassVar[bool] = True
    cannot_capture: ClassVar[str] = ""

    def name(self) -> str:
        return machine()["gpus"].partition(",")[0] if device.variant() == "cuda" else ""

    def gpu_index(self) -> int | None:
        return 0 if device.variant() == "cuda" else None

    def reserved_bytes(self) -> int:
        return device.memory().reserved

    def begin_capture(self) -> None:
        _reasoned(device.begin_capture)

    def end_capture(self, failed: bool = False) -> int:
        return int(_reasoned(lambda: device.end_capture(failed)))

    def launch(self, graph: int) -> None:
        _reasoned(lambda: device.launch(graph))

    def copy_result(self, value: Any) -> Any:
        return paddle._C_ops.memcpy_d2h(value, device.RESULT)

    def await_results(self, graph: int) -> None:
        _reasoned(lambda: device.await_results(graph))

    def forget(self, graph: int) -> None:
        device.destroy_graph(graph)

    def total_bytes(self) -> int:
        from testbed.device import total_bytes

        return total_bytes()

    def available_bytes(self) -> int:
        return min(self.total_bytes(), device.memory().reserved + device.free_bytes())

    def label(self, built: Any, text: str) -> None:
        built.set_str_attr("interlace_at", text)

    def finish(self, program: Any, job: str) -> None:
        from testbed.programs import prepare_program

        prepare_program(program, job)


def _reasoned(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except device.TestbedError as error:
        raise PlanError(str(error)) from error


def register() -> None:
    """Register `TestbedDevice`, so that plans for the testbed are built with it."""
    register_device(NAME, TestbedDevice)
