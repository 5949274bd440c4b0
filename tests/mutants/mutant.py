"""One small fault, and the tests that must find it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault that is planted in one file by replacing a text.

    Attributes:
        path: The file, from the root of the repository.
        find: Text that stands in it exactly once.
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
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{where}: the text to replace stands there {count} times, expected once; bring the entry up to date:\n"
                             f"{self.find}")  # fmt: skip
        if self.find == self.put:
            raise ValueError(f"{where}: the text is replaced by itself")
        if bool(self.tests) == bool(self.equivalent):
            raise ValueError(f"{where}: give tests that must fail, or say why none can (equivalent), one of the two")
        made = text.replace(self.find, self.put)
        try:
            compile(made, self.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"{where}: what comes out is no Python: {error}") from error
        return made
