"""One small fault, and the tests that must find it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TOKEN = re.compile(r"""[rbfRBF]*(?:\"(?:[^"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')|\w+|[^\w\s]""")
"""A string, a word or a sign of Python; what a formatter may put between two of them is white space."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault that is planted in one file by replacing a text.

    Attributes:
        path: The file, from the root of the repository.
        find: Text that stands in it exactly once, whatever white space, and whatever comma before a closing bracket, the formatter
            puts between its tokens.
        put: What stands there instead.
        breaks: What is wrong then, in one line.
        tests: Ids of tests (`file::name`, or a file) of which one must fail. They run in one process, so that a test which starts
            another one does not see the fault there.
        equivalent: Why no test can tell the difference; such a mutant has no tests and is not run.
    """

    path: str
    find: str
    put: str
    breaks: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    @property
    def folder(self) -> str:
        """The folder that it is counted under."""
        return str(Path(self.path).parent)

    @property
    def module(self) -> str:
        """Import name of the file."""
        parts = Path(self.path).with_suffix("").parts
        name = ".".join(parts if parts[0] == "interlace" else ("interlace", *parts))
        return name.removesuffix(".__init__")

    def source(self) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: The text stands there not at all or more than once, is replaced by itself, or what comes out is no Python;
                or the entry has neither tests nor a reason to have none, or both.
        """
        where = f"{self.path}: {self.breaks}"
        text = (ROOT / self.path).read_text(encoding="utf-8")
        places = list(anchor(self.find).finditer(text))
        if len(places) != 1:
            raise ValueError(
                f"{where}: the text to replace stands there {len(places)} times, expected once; bring the entry up to date:\n{self.find}"
            )
        if self.find == self.put:
            raise ValueError(f"{where}: the text is replaced by itself")
        if bool(self.tests) == bool(self.equivalent):
            raise ValueError(f"{where}: give tests that must fail, or say why none can (equivalent), one of the two")
        begin, end = places[0].span()
        made = text[:begin] + self.put + text[end:]
        try:
            compile(made, self.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"{where}: what comes out is no Python: {error}") from error
        return made


def anchor(text: str) -> re.Pattern[str]:
    """Pattern of a piece of code, however it is broken into lines."""
    tokens = TOKEN.findall(text)
    pattern = ""
    for before, token in zip(["", *tokens], tokens, strict=False):
        both_words = before[-1:].isidentifier() and token[:1].isidentifier()
        between = r",?\s*" if token in (")", "]", "}") and before != "," else r"\s+" if both_words else r"\s*"
        pattern += (between if before else "") + (r",?" if token == "," else re.escape(token))
    before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return re.compile(re.escape(before) + pattern + re.escape(after))
