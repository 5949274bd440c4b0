"""A drawing of a report's page as a file of its own: `python -m tests.report.figure PAGE ID FILE.svg` (needs Chromium).

The page draws it; what its style sheet says of each element is written into the element.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.report.browser import ask

QUESTION = """
const drawing = document.getElementById("%s"), all = [drawing, ...drawing.querySelectorAll("*")];
const names = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family"];
const said = all.map(each => names.map(name => name + ":" + getComputedStyle(each).getPropertyValue(name)).join(";"));
all.forEach((each, k) => { each.setAttribute("style", said[k]); each.removeAttribute("class"); });
drawing.setAttribute("xmlns", "http://www.w3.org/2000/svg");
drawing.setAttribute("style", said[0] + ";background:" + getComputedStyle(document.body).backgroundColor);
return new XMLSerializer().serializeToString(drawing);
"""


def main(page: str, name: str, out: str) -> None:
    """Write one drawing of a page."""
    said, text = ask(Path(page), QUESTION % name)
    if said or not isinstance(text, str):
        raise SystemExit(f"{page}: {name} could not be read: {said or text}")
    Path(out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
