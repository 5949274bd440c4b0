"""The page as a file: the template with the data in it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from interlace.ir.dump import write_whole
from interlace.report.page.document import Page

MARK = "/*DATA*/"
"""Placeholder for the data in a template."""


def filled(template: str, document: msgspec.Struct) -> str:
    """A page with its data in it; equal data give equal bytes."""
    data = msgspec.json.encode(document, order="deterministic").decode()
    before, _, after = template.partition(MARK)
    return before + data.replace("<", "\\u003c") + after


def template() -> str:
    """The page without data: texts, style and script."""
    return (resources.files("interlace.report.page") / "page.html").read_text(encoding="utf-8")


def write_page(page: Page, path: str | Path) -> None:
    """Write the file, which needs nothing else, from the network or from disk; equal plans give equal bytes."""
    write_whole(Path(path), filled(template(), page).encode())
