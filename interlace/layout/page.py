"""The answer as a page: the template with the data in it."""

from __future__ import annotations

from importlib import resources

from interlace.layout.answer import Answer
from interlace.report.page.write import filled


def page_html(answer: Answer) -> str:
    """The whole file; it needs nothing else, and equal answers give equal bytes."""
    return filled((resources.files("interlace.layout") / "page.html").read_text(encoding="utf-8"), answer)
