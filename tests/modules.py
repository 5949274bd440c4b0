"""Every module of the package by name and file, whatever folder it stands in."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def package_modules() -> dict[str, Path]:
    """Import name -> file."""
    found = {}
    for folder, _, files in sorted(os.walk(ROOT / "interlace", followlinks=True)):
        for path in sorted(Path(folder) / name for name in files if name.endswith(".py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found
