"""The answer as a page: the template with the data in it."""

from __future__ import annotations

from importlib import resources

import msgspec

from interlace.layout.answer import Answer

MARK = "/*DATA*/"


def page_html(answer: Answer) -> str:
    """The whole file; it needs nothing else, and equal answers give equal bytes."""
    data = msgspec.json.encode(answer, order="deterministic").decode()
    before, _, after = (resources.files("interlace.layout") / "page.html").read_text(encoding="utf-8").partition(MARK)
    return before + data.replace("<", "\\u003c") + after
