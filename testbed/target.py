"""The testbed as a target of Interlace: `interlace run --target testbed` trains on it."""

from __future__ import annotations

import msgspec

from interlace.cpu.transport import Transport
from interlace.errors import ConfigError
from interlace.ir.target import GPU
from interlace.local.own_target import OwnTarget

RULES = msgspec.structs.replace(GPU, name="testbed", blocking=frozenset(), host_memory_edges=False)
"""Those of a GPU, but for `memcpy_d2h`: it copies without blocking, and the executor orders no stream by what it wrote."""


class Testbed(OwnTarget):
    """Ranks on host threads or CUDA streams, as `TESTBED_VARIANT` says."""

    rules = RULES

    def require(self) -> None:
        """The plugin must be built."""
        from testbed.build import library
        from testbed.device import variant

        if not library(variant()).is_file():
            raise ConfigError(f"--target testbed: {library(variant())} is not there; build it with `make testbed`")

    def install(self, rank: int, world: int, run_dir: str, timeout_s: float) -> Transport:
        """See `testbed.world`."""
        from testbed import world as own_world

        return own_world.install(rank, world, run_dir, timeout_s)


TARGET = Testbed()
