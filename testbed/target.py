"""The testbed as a target of Interlace, for `interlace run --target testbed`."""

from __future__ import annotations

import msgspec

from interlace.cpu.transport import Transport
from interlace.errors import ConfigError
from interlace.ir.target import GPU
from interlace.local.own_target import OwnTarget

RULES = msgspec.structs.replace(GPU, name="testbed", blocking=frozenset(), host_memory_edges=False)
"""Rules of a GPU, except for `memcpy_d2h`: it does not block, and the executor makes no stream wait for the host memory that it wrote."""


class Testbed(OwnTarget):
    """Ranks whose streams are host threads or CUDA streams, depending on `TESTBED_VARIANT`."""

    rules = RULES

    def require(self) -> None:
        """Raise ConfigError if the plugin is not built."""
        from testbed.build import library
        from testbed.device import variant

        if not library(variant()).is_file():
            raise ConfigError(f"--target testbed: {library(variant())} is not there; build it with `make testbed`")

    def install(self, rank: int, world: int, run_dir: str, timeout_s: float) -> Transport:
        """See `testbed.world`."""
        from testbed import world as own_world

        return own_world.install(rank, world, run_dir, timeout_s)


TARGET = Testbed()
