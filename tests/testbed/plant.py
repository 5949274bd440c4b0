"""A pass for `--import`: it gives plans from a folder, whatever they are. Only tests have reason to."""

from __future__ import annotations

from pathlib import Path

import msgspec

from interlace.ir import Program
from interlace.passes import Pass, register
from interlace.passes.base import Context


@register
class Plant(Pass, frozen=True, kw_only=True):
    """Take this rank's plan from a folder of packed programs."""

    name = "plant"
    needs = frozenset({"events"})
    after = ("throttle-host",)

    folder: str = ""

    def run(self, program: Program, context: Context) -> Program:
        context.applied("planted", folder=self.folder)
        return msgspec.msgpack.decode((Path(self.folder) / f"rank{program.rank}").read_bytes(), type=Program)
