"""Moves optimizer state to where a plan expects it between steps: in host memory or on the device. Names in the scope stay the same.

During a plan, its copies in read these variables in host memory and its copies out write them there, so they stay in place. They are moved
only before the first step of a plan, and after a checkpoint was loaded onto the device: one after the other, after which the device's
memory is released. Until then all of them are on the device, because Paddle's startup program computes them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import paddle

from interlace.bridge.targets import Device, choose_device
from interlace.ir import Program
from interlace.ir.kinds import is_boundary

_on_host: dict[str, Any] = {}
"""Variables of the global scope that were moved to host memory, and their tensors."""


def names_on_host(program: Program) -> frozenset[str]:
    """Names of the variables that a plan keeps in host memory."""
    given = {value for op in program.ops if is_boundary(op) for value in op.results}
    return frozenset(value.name for value in program.values if value.id in given and value.persistable and value.memory != "device")


def settle(wanted: Iterable[str], device: Device) -> None:
    """Move variables to where a plan that is about to run expects them: the `wanted` ones to host memory, others back to the device."""
    wanted = frozenset(wanted)
    back = [name for name in _on_host if name not in wanted]
    scope = paddle.static.global_scope()
    out = [name for name in wanted if name not in _on_host or not device.is_on_host(_on_host[name])]
    if back or out:
        device.synchronize()
    for name in back:
        device.move_to_device(_on_host.pop(name))
    there = {name: found.get_tensor() for name in sorted(out) if (found := scope.find_var(name)) is not None}
    for tensor in there.values():
        device.move_to_host(tensor)
    _on_host.update(there)
    if there:
        device.release_memory()


def await_copies(device: Device) -> None:
    """Wait for copies to the host, if there may be any; nothing else waits for them before host memory is read."""
    if _on_host:
        device.synchronize()


def state_dict_of(baseline: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Paddle's `Program.state_dict`, so that it waits for copies to the host first."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        await_copies(choose_device())
        return baseline(self, *args, **kwargs)

    return state_dict
