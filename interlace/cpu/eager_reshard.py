"""`dist.reshard` of tensors outside of programs, between CPU processes.

Paddle's own version uses communicators that only devices have; without one it crashes the process (SIGSEGV). Models call it to place
tables and parameters on the stages of a pipeline.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from interlace.cpu.ops import to_tensor, type_name
from interlace.cpu.reduction import Array, reduce_arrays
from interlace.cpu.transport import Transport
from interlace.errors import ProgramError

_P2P_CHANNEL = -2
_FIRST_CHANNEL = -1_000_000  # channels for the ranks of a mesh count down from here; those of dynamic groups and programs are far above
_WHERE = "dist.reshard outside of a program"

Reshard = Callable[[Any, Any], Any]


def resharder(transport: Transport, baseline: Reshard) -> Reshard:
    """Paddle's `core.reshard(tensor, dist_attr)` for CPU processes: communicates through `transport`, and calls `baseline` if mesh and
    placements stay the same.

    All ranks of both meshes must call it, in the same order. Gradients do not flow through it outside of programs.
    """

    def reshard(tensor: Any, wanted: Any) -> Any:
        placements = _placements(wanted)
        if _described(tensor):
            return tensor
        if tensor.process_mesh == wanted.process_mesh and list(tensor.placements) == placements:
            return baseline(tensor, wanted) if tensor._is_initialized() else tensor
        with paddle.no_grad():
            whole = _moved(transport, tensor, wanted.process_mesh)
            made = core.eager.Tensor(whole, process_mesh=wanted.process_mesh, placements=placements)
        made.stop_gradient = tensor.stop_gradient
        return made

    return reshard


def _described(tensor: Any) -> bool:
    """Whether a tensor is a parameter that `LazyGuard` left without memory on every rank."""
    return getattr(tensor, "_init_func", None) is not None and not tensor._is_initialized()


def _placements(wanted: Any) -> list[Any]:
    """The placements of a distribution, one for each dimension of its mesh."""
    mesh = wanted.process_mesh
    made: list[Any] = [paddle.distributed.Replicate() for _ in mesh.shape]
    for dim, axes in enumerate(wanted.multi_dims_mapping):
        for axis in axes:
            made[axis] = paddle.distributed.Shard(dim)
    for axis in wanted._partial_dims():
        made[axis] = paddle.distributed.Partial()
    return made


def _moved(transport: Transport, tensor: Any, mesh: Any) -> Any:
    """The whole tensor on every rank of `mesh`; on other ranks a tensor of the same shape with arbitrary contents."""
    source, target = sorted(tensor.process_mesh.process_ids), sorted(mesh.process_ids)
    shape, dtype = list(tensor.shape), type_name(tensor.dtype)
    gains = [rank for rank in target if rank not in source]
    pairs = {rank: source[k % len(source)] for k, rank in enumerate(gains)}
    if transport.rank in source:
        whole = _gathered(transport, tensor, source, dtype)
        for rank, sender in pairs.items():
            if sender == transport.rank:
                transport.send(whole, rank, _P2P_CHANNEL, sorted((sender, rank)), _WHERE, dtype)
        return to_tensor(whole, dtype)
    if transport.rank in pairs:
        sender = pairs[transport.rank]
        return to_tensor(transport.recv(shape, dtype, sender, _P2P_CHANNEL, sorted((sender, transport.rank)), _WHERE), dtype)
    return paddle.empty(shape, tensor.dtype)


def _gathered(transport: Transport, tensor: Any, source: Sequence[int], dtype: str) -> Array:
    """The whole tensor, joined from the parts on the ranks `source` of its mesh. Raises ProgramError if the parts do not give its shape."""
    mine: Array = tensor._local_value().numpy()
    if all(placement.is_replicated() for placement in tensor.placements):
        return mine
    channel = _FIRST_CHANNEL - zlib.crc32(repr(source).encode()) % 1_000_000
    parts = dict(zip(source, transport.all_gather(mine, channel, source, _WHERE, dtype), strict=True))
    mesh = np.array(tensor.process_mesh.process_ids).reshape(tensor.process_mesh.shape)
    whole = _joined(mesh, list(tensor.placements), parts, dtype)
    if list(whole.shape) != list(tensor.shape):
        raise ProgramError(
            f"{_WHERE}: parts of {tensor.process_mesh} give {list(whole.shape)}, expected {list(tensor.shape)}; "
            "reshard it inside of the model's forward"
        )
    return whole


def _joined(mesh: Array, placements: list[Any], parts: dict[int, Array], dtype: str) -> Array:
    """The tensor whose parts are on the ranks of a mesh, or of a part of it; outer dimensions of the mesh split first."""
    if not placements:
        return parts[int(mesh)]
    first, *inner = placements
    pieces = [_joined(row, inner, parts, dtype) for row in mesh]
    if first.is_shard():
        return np.concatenate(pieces, axis=next(dim for dim in range(pieces[0].ndim) if first.is_shard(dim)))
    return pieces[0] if first.is_replicated() else reduce_arrays(pieces, "sum", dtype)
