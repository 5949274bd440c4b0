"""Each target's own rules, and what its jobs hold once a plan is lowered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle

from interlace.bridge.lower import JobProgram, Lowered
from interlace.bridge.targets import Device
from interlace.bridge.targets.cpu import CpuDevice
from interlace.bridge.targets.custom import CustomDevice
from interlace.bridge.targets.gpu import GpuDevice
from testbed.lowering import TestbedDevice


class Held(TestbedDevice):
    """The testbed's rules without its rewrite of finished programs, which needs the device."""

    def finish(self, program: Any, job: str) -> None:
        """Nothing."""


DEVICES: dict[str, Device] = {
    name: kind(paddle.CPUPlace()) for name, kind in {"cpu": CpuDevice, "custom": CustomDevice, "gpu": GpuDevice, "testbed": Held}.items()
}
"""Each target's own builders; with the CPU in the device's stead they are enough to lower, not to run."""


def job(lowered: Lowered, name: str) -> JobProgram:
    return next(each for each in lowered.jobs if each.name == name)


def ops_of(each: JobProgram, name: str = "") -> list[Any]:
    return [op for op in each.program.global_block().ops if not name or op.name() == name]


def attrs_of(each: JobProgram) -> Iterator[tuple[str, dict[str, Any]]]:
    for op in ops_of(each):
        yield op.name(), op.attrs()


def copies(lowered: Lowered, job_name: str) -> list[tuple[str, int]]:
    """Copies of a job: name and destination."""
    return [(name, attrs["dst_place_type"]) for name, attrs in attrs_of(job(lowered, job_name)) if "memcpy" in name]
