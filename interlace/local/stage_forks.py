"""All stages from one build. On every rank Paddle traces the whole model, differentiates it and adds the optimizer, before it cuts out what
the rank runs: most of the time of a build. There the process forks for each other stage, and the fork goes on as the first rank of it.

What a script itself makes of its rank before that point stays that of the first rank: whoever asks for forks compares one with a build of
that rank by itself (`interlace.layout.store`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class ForkFailed(BaseException):
    """Ends the build where a fork has failed, and said why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a fork ended with code {code}")
        self.code = code


def path_of(first: Path, rank: int) -> Path:
    """Where the program of another rank goes: beside the first.

    >>> path_of(Path("a.json"), 4).name
    'rank4-a.json'
    """
    return first.with_name(f"rank{rank}-{first.name}")


class StageForks:
    """Forks of this process, which is now `rank`."""

    def __init__(self, rank: int, environment: Callable[[int], Mapping[str, str]], transport: Any) -> None:
        """`environment`: what tells Paddle its rank; `transport`: has a rank too."""
        self.rank = rank
        self._environment, self._transport = environment, transport
        self._engine: Any = None

    def install(self) -> None:
        """Stand in front of Paddle's partition."""
        from paddle.distributed.auto_parallel.static import engine as engine_module

        parallel, partition = engine_module.Engine._parallel_pir, engine_module.apply_partition_pass

        def parallel_noted(engine: Any, mode: str) -> None:
            self._engine = engine if mode == "train" else None
            parallel(engine, mode)

        def partition_forked(program: Any) -> None:
            if self._engine is not None:
                self._fork()
            partition(program)

        engine_module.Engine._parallel_pir, engine_module.apply_partition_pass = parallel_noted, partition_forked

    def _fork(self) -> None:
        """Returns in each fork, and in this process when all forks have ended. Raises ForkFailed."""
        engine, self._engine = self._engine, None
        pipeline, world = engine._strategy.pipeline, self._transport.world
        stages = pipeline.pp_degree if pipeline.enable else 1
        if world % stages:
            return
        for rank in range(0, world, world // stages):
            if rank == self.rank:
                continue
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                self._become(rank, engine)
                return
            if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                raise ForkFailed(code)

    def _become(self, rank: int, engine: Any) -> None:
        from paddle.distributed import parallel
        from paddle.distributed.communication.group import _GroupManager

        self.rank = self._transport.rank = engine._cur_rank = rank
        os.environ.update(self._environment(rank))
        parallel._global_parallel_env = None
        for group in _GroupManager.group_map_by_id.values():
            group._rank_in_group = group.ranks.index(rank) if rank in group.ranks else -1
            group._world_size = len(group.ranks) if rank in group.ranks else -1
