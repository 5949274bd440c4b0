"""Programs of all stages from one build. On every rank, Paddle traces the whole model, differentiates it and adds the optimizer, before it
cuts out what the rank runs. That is most of a build's time. At this point the process forks for each other stage, and the fork continues as
the first rank of that stage.

What the script derived from its rank before this point is that of the process that forked. Users of forks therefore compare one of them
with a separate build of its rank (`interlace.layout.store`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class ForkFailed(BaseException):
    """Ends the build if a fork failed, which has then printed why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a fork ended with code {code}")
        self.code = code


def path_of(first: Path, rank: int) -> Path:
    """The path for the program of another rank, beside that of the first.

    >>> path_of(Path("a.json"), 4).name
    'rank4-a.json'
    """
    return first.with_name(f"rank{rank}-{first.name}")


class StageForks:
    """Forks this process, which runs as `rank`."""

    def __init__(self, rank: int, environment: Callable[[int], Mapping[str, str]], transport: Any) -> None:
        """`environment`: rank -> variables that tell Paddle its rank; `transport`: its `rank` and `world` are read, and `rank` is set in
        forks."""
        self.rank = rank
        self._environment, self._transport = environment, transport
        self._engine: Any = None

    def install(self) -> None:
        """Make Paddle's engine fork right before it partitions the training program."""
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
        """Fork for the first rank of each other stage, one after another. Returns in each fork, and in this process when all forks have
        ended. Raises ForkFailed if one fails."""
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
