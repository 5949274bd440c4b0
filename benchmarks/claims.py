"""Statements in texts about stored results: `python benchmarks/claims.py` rewrites them; `--check` only compares.

The text between `<!-- claims: NAME -->` and `<!-- /claims -->` in `TEXTS` is what the function of that name in a module `claims_*` returns,
computed only from `benchmarks/results`. Ranges cover every case in the files. A sentence stays on the line of its comment; if the comment
ends its line, the sentence is wrapped.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import claims_alone  # noqa: F401
import claims_beside  # noqa: F401
import claims_captured  # noqa: F401
import claims_external  # noqa: F401
import claims_h100  # noqa: F401
import claims_h200  # noqa: F401
import claims_layouts  # noqa: F401
import claims_power  # noqa: F401
import claims_published  # noqa: F401
import claims_speed  # noqa: F401
import claims_states  # noqa: F401
import claims_tuning  # noqa: F401
from claiming import CLAIMS, ROOT

TEXTS = (
    "README.md",
    "benchmarks/README.md",
    "benchmarks/results/external/README.md",
    "benchmarks/results/gpu.md",
    "benchmarks/results/layouts.md",
    "benchmarks/results/optimizer_state.md",
    "benchmarks/results/planning.md",
    "benchmarks/results/power.md",
    "benchmarks/results/simulated.md",
    "benchmarks/results/tuning.md",
    "benchmarks/results/h100/README.md",
    "docs/evidence.md",
    "docs/guide-memory.md",
    "docs/decisions/007-what-is-not-cut-and-not-removed.md",
    "docs/decisions/008-copies-back-with-slack.md",
    "docs/decisions/010-the-whole-step-decides.md",
    "docs/decisions/013-recomputation-that-is-left-out.md",
    "docs/decisions/014-one-memory-budget.md",
    "docs/decisions/015-the-optimizer-runs-with-the-last-gradients.md",
    "docs/decisions/017-power-and-clock-in-the-simulator.md",
    "docs/decisions/027-copies-back-use-the-compute-streams-pool.md",
    "docs/decisions/028-copies-of-both-directions.md",
)
WIDTH = 138
"""Width to which sentences are wrapped."""
BLOCK = re.compile(r"<!-- claims: (\S+) -->(.*?)<!-- /claims -->", re.DOTALL)


def rewritten(text: str, where: str) -> str:
    """The text with every block rewritten. Raises SystemExit for a block without a function of its name, and for one that is not closed."""
    if len(re.findall(r"<!-- claims: ", text)) != len(BLOCK.findall(text)) or text.count("<!-- /claims -->") != len(BLOCK.findall(text)):
        raise SystemExit(f"{where}: a `<!-- claims: NAME -->` without its `<!-- /claims -->`, or the other way round")

    def fresh(match: re.Match[str]) -> str:
        name = match[1]
        if name not in CLAIMS:
            raise SystemExit(f"{where}: no claim {name!r}; there are {', '.join(sorted(CLAIMS))}")
        said, indent = CLAIMS[name](), " " * (match.start() - text.rfind("\n", 0, match.start()) - 1)
        if said.startswith("|"):
            said = f"\n{said}\n"
        elif match[2].startswith("\n"):
            said = f"\n{textwrap.fill(f'{said}.', WIDTH, initial_indent=indent, subsequent_indent=indent)}\n{indent}"
        return f"<!-- claims: {name} -->{said}<!-- /claims -->"

    return BLOCK.sub(fresh, text)


def stale() -> Iterator[tuple[Path, str]]:
    """Texts that differ from the results, with the text that they should have."""
    for name in TEXTS:
        path = ROOT / name
        text = path.read_text()
        if (new := rewritten(text, name)) != text:
            yield path, new


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing; exit code 1 where a text says other than the results")
    args = parser.parse_args(argv)
    found = list(stale())
    for path, text in found:
        if not args.check:
            path.write_text(text)
        print(f"{path.relative_to(ROOT)} {'says other than the results' if args.check else 'written'}")
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
