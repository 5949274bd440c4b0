"""Plans and pages of small worlds, made as a user makes them."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from interlace.cli import main
from interlace.ir import save
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
