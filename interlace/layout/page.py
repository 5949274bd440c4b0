"""The answer as an HTML page: the template with the data filled in."""

from __future__ import annotations

from importlib import resources

from interlace.layout.answer import Answer
from interlace.report.page.write import filled


def page_html(answer: Answer) -> str:
    """The page as one self-contained file; equal answers give equal bytes."""
    return filled((resources.files("interlace.layout") / "page.html").read_text(encoding="utf-8"), answer)
