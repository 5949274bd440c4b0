"""Check that the ranks in a script's meshes are those of the running processes."""

from __future__ import annotations

import functools
from typing import Any

from interlace.errors import ConfigError
from interlace.units import ranges

_INSTALLED = "_interlace_requires_world"


def install() -> None:
    """Install the check, which then runs before any engine of this process builds a program; a second call does nothing."""
    from paddle.distributed.auto_parallel.static.engine import Engine

    if getattr(Engine, _INSTALLED, False):
        return
    build = Engine._build

    @functools.wraps(build)
    def build_required(self: Any, *args: Any, **kwargs: Any) -> Any:
        require_world(_named_ranks(), _world())
        return build(self, *args, **kwargs)

    Engine._build = build_required
    setattr(Engine, _INSTALLED, True)


def require_world(named: set[int], world: int) -> None:
    """Check that every process is in a mesh, and that every rank of a mesh has a process. A script without meshes passes. Raises
    ConfigError, with the number of processes to start, if they differ.

    >>> require_world({0, 1}, 2)
    """
    wanted = max(named, default=-1) + 1
    if not named or named == set(range(world)):
        return
    where = "; ".join(_differences(named, world))
    if wanted == world:
        raise ConfigError(
            f"the script's meshes and the processes that run differ: {where}; expected each process in a mesh: change the "
            "mesh, or number its ranks from 0 and start as many processes"
        )
    raise ConfigError(
        f"the script's meshes and the processes that run differ: {where}; expected each process in a mesh and each rank of "
        f"a mesh running: start {wanted} with --world {wanted}, or change the mesh"
    )


def _differences(named: set[int], world: int) -> list[str]:
    absent, idle = sorted(rank for rank in named if rank >= world), sorted(set(range(world)) - named)
    found = [f"{world} process{'es run' if world > 1 else ' runs'}"]
    found += [f"the meshes also name rank(s) {ranges(absent)}"] if absent else []
    return found + ([f"no mesh names rank(s) {ranges(idle)}"] if idle else [])


def _named_ranks() -> set[int]:
    """Ranks of all meshes made in this process, from the list that Paddle keeps."""
    from paddle.distributed.auto_parallel.static.dist_context import get_default_distributed_context

    return {int(rank) for mesh in get_default_distributed_context().process_meshes for rank in mesh.process_ids}


def _world() -> int:
    import paddle

    return int(paddle.distributed.ParallelEnv().world_size)
