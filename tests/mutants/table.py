"""The table of mutants, read from the text files beside this one.

    # scheduler/host_waits/throttle.py                                           the file that the following are planted in

    the host waits in the step's last job too                     what is wrong then, in one line
    - for job in program.jobs[:-1]                                text that stands there exactly once, of one or more lines
    + for job in program.jobs                                     what stands there instead
    > tests/scheduler/test_throttle.py::test_short_jobs_wait          tests of which one must fail
    = jobs behind it ...                                          or: why no test can tell the difference

Entries are parted by empty lines; lines that begin with `//` are remarks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.mutants.mutant import Mutant

FILES = tuple(sorted(Path(__file__).parent.glob("*.txt")))
MARKS = ("-", "+", ">", "=")


@cache
def mutants() -> tuple[Mutant, ...]:
    """All of them, file by file."""
    return tuple(mutant for file in FILES for mutant in parse(file.read_text(encoding="utf-8"), file.name))


def parse(text: str, where: str) -> list[Mutant]:
    """Read one table.

    Raises:
        ValueError: An entry is not of the form above; with its line.
    """
    found: list[Mutant] = []
    path, entry, begin = "", [], 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.startswith("# "):
            path = line[2:].strip()
        elif line.strip() and not line.startswith("//"):
            begin = begin if entry else number
            entry.append(line)
        elif entry and not line.strip():
            found.append(_entry(path, entry, f"{where}:{begin}"))
            entry = []
    return found


def _entry(path: str, lines: list[str], where: str) -> Mutant:
    breaks, *rest = lines
    parts: dict[str, list[str]] = {mark: [] for mark in MARKS}
    for line in rest:
        if line[:1] not in parts or line[1:2] not in ("", " "):
            raise ValueError(f"{where}: found {line!r}, expected a line that begins with one of {' '.join(MARKS)} and a space")
        parts[line[0]].append(line[2:])
    if not path or breaks[:1] in MARKS or not parts["-"] or not parts["+"]:
        raise ValueError(f"{where}: expected `# file` somewhere above, then a description, lines with `- ` and lines with `+ `")
    find, put = ("\n".join(parts[mark]) for mark in "-+")
    return Mutant(path, find, put, breaks, tuple(parts[">"]), " ".join(parts["="]))
