"""Plans and pages of small worlds, made as a user makes them."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from interlace.cli import main
from interlace.ir import parse, save
from interlace.planning.curve import Base, Point, Sweep
from tests.passes.recomputed import PLAIN as RECOMPUTING
from tests.strategies import World, programs

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)


def make_plans(folder: Path, world: World, config: str) -> Path:
    """Dumps of a world and its plans; gives the folder of the plans."""
    for program in programs(world):
        save(program, folder / "dumps" / f"rank{program.rank}.ilp")
    path = folder / "config.yaml"
    path.write_text(config, encoding="utf-8")
    assert main(["plan", str(folder / "dumps"), "--config", str(path), "-o", str(folder / "plan")]) == 0
    return folder / "plan"


SWEEP = Sweep(
    (
        Point(
            budget_bytes=9 << 20,
            feasible=True,
            peak_bytes=8 << 20,
            step_us=900.5,
            exposed_us=80.25,
            kept_bytes=3 << 20,
            recomputed_bytes=0,
            offloaded_bytes=0,
        ),
        Point(
            budget_bytes=6 << 20,
            feasible=True,
            peak_bytes=6 << 20,
            step_us=1100.0,
            exposed_us=90.0,
            kept_bytes=1 << 20,
            recomputed_bytes=2 << 20,
            offloaded_bytes=512,
        ),
        Point(budget_bytes=1 << 20, feasible=False, why="the least feasible budget is 2.0 MiB"),
    ),
    Base(8 << 20, 1000.0, 200.0),
    "h200",
)
"""A curve of three budgets, of which one cannot be kept."""


def make_recomputing(folder: Path) -> Path:
    """Two ranks of three micro-batches whose backward repeats a part of forward, and their plans; gives the folder of the plans."""
    for rank in range(2):
        save(msgspec.structs.replace(parse(RECOMPUTING), rank=rank), folder / "dumps" / f"rank{rank}.ilp")
    (folder / "config.yaml").write_text("device: h200\nchoose_recompute: off\n", encoding="utf-8")
    assert main(["plan", str(folder / "dumps"), "--config", str(folder / "config.yaml"), "-o", str(folder / "plan")]) == 0
    return folder / "plan"


def data_in(page: Path) -> dict[str, Any]:
    """The JSON block of a page."""
    found = DATA.search(page.read_text(encoding="utf-8"))
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def columns(ops: dict[str, Any]) -> npt.NDArray[np.int64]:
    """Start, length, index in the table, and micro-batch of every packed operation. `[4, count]`"""
    found = np.frombuffer(zlib.decompress(base64.b64decode(ops["packed"])), "<i4").reshape(4, ops["count"]).astype(np.int64)
    found[0] = np.cumsum(found[0])
    return found
