"""What the benchmarks of simulated plans share: their programs, built once or stored for tests, and their command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measuring import ROOT

from interlace.ir import Program, load
from interlace.ir.dump import find_dumps


def built(where: Path, script: str, world: int, words: Sequence[str], *, stages: bool = True) -> list[Program]:
    """Programs of an example, built by `interlace dump` where the folder is not there: of one rank of each stage, or of all ranks."""
    if not where.is_dir():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "interlace",
                "dump",
                f"examples/{script}.py",
                "--world",
                str(world),
                *(["--stages"] if stages else []),
                "-o",
                str(where),
                "--",
                *words,
            ],
            cwd=ROOT,
            check=True,
        )
    return [load(path) for path in find_dumps([where])]


def captured(name: str) -> list[Program]:
    """Programs that are stored for the tests, by the name of their case: small ones."""
    sys.path.insert(0, str(ROOT))
    from tests.captured.stored import programs_of

    return programs_of(name)


def parser(about: str | None, quick: str) -> argparse.ArgumentParser:
    """A command line with the folder of the programs, `--quick` (`quick` says what it takes in their place) and `-o`."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, nargs="?", help="where the programs are, or will be built")
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("-o", "--out", type=Path)
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program with a message where neither a folder nor `--quick` is given."""
    args = made.parse_args(argv)
    if not args.quick and args.folder is None:
        made.error("name the folder of the programs, or take --quick")
    return args
