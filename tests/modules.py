"""Every module of the package by name and file, whatever folder it stands in."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = ("passes", "cost_model", "scheduler", "configs")
"""Top-level folders that are packages below `interlace`."""


def package_modules() -> dict[str, Path]:
    """Import name -> file."""
    found = {}
    for folder in ("interlace", *OUTSIDE):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "interlace" else ("interlace", *parts)).removesuffix(".__init__")
            found[name] = path
    return found
