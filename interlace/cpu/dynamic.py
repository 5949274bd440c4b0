"""Paddle's dynamic-graph communication on CPU processes: groups, collectives and resharding outside of programs.

Training scripts call `fleet.init` or `init_parallel_env`, create groups and wait at barriers before the static engine
takes over. Their process groups are replaced by objects that use the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.distributed import collective, parallel
from paddle.distributed.auto_parallel.static import process_group
from paddle.distributed.communication.group import _GroupManager
from paddle.distributed.fleet.utils import tensor_fusion_helper

from interlace.cpu.eager_reshard import resharder
from interlace.cpu.ops import to_tensor, type_name
from interlace.cpu.reduction import Array
from interlace.cpu.transport import Transport

_FIRST_CHANNEL = -1000  # channels of dynamic groups count down from here, so that they differ from those of programs
_BARRIER_CHANNEL = -1
_FUSION_ALIGNMENT_BYTES = 256  # as on a GPU, so that fused buffers have the same layout


class Task:
    """A communication that has completed already."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    synchronize = wait


class DynamicGroup:
    """Replaces Paddle's process group of one group id; its methods are those that Paddle calls from Python."""

    def __init__(self, transport: Transport, group_id: int) -> None:
        self._transport = transport
        self._group_id = group_id
        self._channel = _FIRST_CHANNEL - group_id

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """`<method>_on_calc_stream` is the same as `<method>`: there is one stream."""
        plain = name.removesuffix("_on_calc_stream")
        if plain == name or not hasattr(type(self), plain):
            raise AttributeError(f"{name!r} is not supported between CPU processes (group {self._group_id})")
        method: Callable[..., Any] = getattr(self, plain)
        return method

    def name(self) -> str:
        return "interlace"

    def barrier(self, *args: Any) -> Task:
        self._transport.barrier(self._channel, self._ranks(), "dynamic barrier")
        return Task()

    def all_reduce(self, tensor: Any, op: Any, sync_op: bool = True) -> Task:
        return self._exchange("all_reduce", tensor, tensor, type_name(op))

    def broadcast(self, tensor: Any, root: int, sync_op: bool = True) -> Task:
        return self._exchange("broadcast", tensor, tensor, self._ranks()[root])

    def reduce(self, tensor: Any, root: int, op: Any, sync_op: bool = True) -> Task:
        return self._exchange("reduce", tensor, tensor, type_name(op), self._ranks()[root])

    def all_gather(self, tensors: list[Any], tensor: Any, sync_op: bool = True) -> Task:
        array, dtype = _read(tensor)
        parts = self._transport.all_gather(array, self._channel, self._ranks(), "dynamic all_gather", dtype)
        for target, part in zip(tensors, parts, strict=True):
            _write(target, part, dtype)
        return Task()

    def all_gather_into_tensor(self, out: Any, tensor: Any, sync_op: bool = True) -> Task:
        array, dtype = _read(tensor)
        parts = self._transport.all_gather(array, self._channel, self._ranks(), "dynamic all_gather", dtype)
        return _write(out, np.concatenate([np.atleast_1d(part) for part in parts]), dtype)

    def reduce_scatter_tensor(self, out: Any, tensor: Any, op: Any, sync_op: bool = True) -> Task:
        return self._exchange("reduce_scatter", tensor, out, type_name(op))

    def all_to_all_tensor(self, out: Any, tensor: Any, sync_op: bool = True) -> Task:
        return self._exchange("all_to_all", tensor, out)

    def send(self, tensor: Any, peer: int, sync_op: bool = True) -> Task:
        array, dtype = _read(tensor)
        ranks = self._ranks()
        self._transport.send(array, ranks[peer], self._channel, ranks, "dynamic send", dtype)
        return Task()

    def recv(self, tensor: Any, peer: int, sync_op: bool = True) -> Task:
        array, dtype = _read(tensor)
        ranks = self._ranks()
        return _write(tensor, self._transport.recv(array.shape, dtype, ranks[peer], self._channel, ranks, "dynamic recv"), dtype)

    def _exchange(self, call: str, tensor: Any, out: Any, *given: Any) -> Task:
        """Call the transport with `tensor`, and write the result into `out`, which may be the same tensor."""
        array, dtype = _read(tensor)
        result = getattr(self._transport, call)(array, *given, self._channel, self._ranks(), f"dynamic {call}", dtype)
        return _write(out, result, dtype)

    def _ranks(self) -> Sequence[int]:
        ranks: Sequence[int] = _GroupManager.group_map_by_id[self._group_id].ranks
        return ranks


def patch(transport: Transport) -> None:
    """Replace everything in this process that would need a GPU's communicator or a network port."""
    world = tuple(range(transport.world))

    def instantiate(self: Any) -> None:
        self._is_instantiate = True  # the transport needs no communicator per group

    def barrier(*args: Any, **kwargs: Any) -> None:
        transport.barrier(_BARRIER_CHANNEL, world, "barrier of the engine")

    def new_process_group(*args: Any, group_id: int = 0, **kwargs: Any) -> DynamicGroup:
        return DynamicGroup(transport, group_id)

    process_group.ProcessGroup.instantiate = instantiate
    paddle._legacy_C_ops.barrier = barrier
    setattr(core, "reshard", resharder(transport, core.reshard))  # noqa: B010 - Paddle's stubs forbid the plain form
    setattr(core, "create_or_get_global_tcp_store", lambda *args, **kwargs: None)  # noqa: B010
    collective._new_process_group_impl = new_process_group
    parallel._new_process_group_impl = new_process_group
    tensor_fusion_helper.alignment["cpu"] = _FUSION_ALIGNMENT_BYTES
    tensor_fusion_helper.__current_device_type__ = "cpu"


def _read(tensor: Any) -> tuple[Array, str]:
    return tensor.numpy(), type_name(tensor.dtype)


def _write(tensor: Any, array: Array, dtype: str) -> Task:
    with paddle.no_grad():
        paddle.assign(to_tensor(array, dtype), output=tensor)
    return Task()
