"""What benchmarks of simulated plans share: programs, which are built once or stored for tests, and the command line."""

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
    """Programs of an example, of one rank of each stage or of all ranks; built by `interlace dump` if the folder does not exist."""
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
    """Small programs that are stored for tests, by the name of their case."""
    sys.path.insert(0, str(ROOT))
    from tests.captured.stored import programs_of

    return programs_of(name)


def parser(about: str | None, quick: str) -> argparse.ArgumentParser:
    """A command line with the folder of the programs, `--quick` (`quick` says what it uses instead of them) and `-o`."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, nargs="?", help="where the programs are, or will be built")
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("-o", "--out", type=Path)
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the process with a message if neither a folder nor `--quick` is given."""
    args = made.parse_args(argv)
    if not args.quick and args.folder is None:
        made.error("name the folder of the programs, or take --quick")
    return args
