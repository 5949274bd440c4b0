"""Build the stored programs anew: `python -m tests.captured.build` (two minutes). One process loads Paddle, each rank is a fork of it."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from interlace.errors import LaunchError
from interlace.ir import load, show
from interlace.ir.dump import SUFFIX
from tests.training import cases, zoo_cases

ARCHIVE = Path(__file__).with_name("programs.tar.xz")
MANIFEST = "cases.json"
ROOT = Path(__file__).parents[2]
Case = tuple[int, str, str]
"""Ranks, script and its arguments."""

MASKED = "dp2 pp2 mp2 sequence parallel, sharding 1, O2, a loss gathered and masked"
CASES: dict[str, Case] = {
    **{name: (world, f"examples/{model}.py", words) for name, (world, model, words, _) in cases.CASES.items()},
    **{name: (world, "tests/training/zoo.py", words.removesuffix(" --predict")) for name, (world, words, _) in zoo_cases.CASES.items()},
    "pp2, clip": (2, "examples/gpt.py", "--pp 2 --clip-grad 1"),
    "pp2, tied embeddings": (2, "examples/gpt.py", "--pp 2 --tie-embeddings"),
    "pp2 mp2, tied embeddings, clip": (4, "examples/gpt.py", "--pp 2 --mp 2 --tie-embeddings --clip-grad 1"),
    MASKED: (
        8,
        "tests/training/masked_llama.py",
        "--dp 2 --pp 2 --mp 2 --layers 2 --hidden 2048 --heads 16 --vocab 32000 --seq-len 2048 "
        "--micro-batches 4 --sequence-parallel --sharding-stage 1 --amp O2 --master-grad",
    ),
    "dp2 pp2 sharding 2, clip": (4, "examples/gpt.py", "--dp 2 --pp 2 --sharding-stage 2 --clip-grad 1"),
}
ONE_A_STAGE = {MASKED: (0, 4)}
"""Cases of which these ranks alone are stored; of all others, all. (This one has sizes at which offload of half moves some.)"""


def ranks(name: str) -> Sequence[int]:
    """The ranks of a case that the archive holds."""
    return ONE_A_STAGE.get(name) or range(CASES[name][0])


def member(name: str, rank: int) -> str:
    """A stored program's name in the archive; text packs better than dumps."""
    return f"{list(CASES).index(name)}/rank{rank}.txt"


def build(name: str, rank: int, path: Path) -> None:
    """Build one rank's program in a process of its own.

    Raises:
        LaunchError: The rank could not be built.
    """
    child = os.fork()
    if child == 0:
        try:
            _in_child(CASES[name], rank, path)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise LaunchError(f"{name}: rank {rank} could not be built; its error stands above")


def _in_child(case: Case, rank: int, path: Path) -> None:
    from interlace.ir import save
    from interlace.local.build_rank import build_program

    world, script, words = case
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    save(build_program(str(ROOT / script), words.split(), rank, world), path)


def main() -> int:
    """Build all and write the archive; its bytes depend on the programs alone."""
    import interlace.bridge.hook
    import interlace.bridge.lower  # noqa: F401

    with tempfile.TemporaryDirectory() as folder, tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        _add(archive, MANIFEST, msgspec.json.encode(CASES))
        for name in CASES:
            print(name, file=sys.stderr, flush=True)
            for rank in ranks(name):
                path = Path(folder) / f"rank{rank}{SUFFIX}"
                build(name, rank, path)
                _add(archive, member(name, rank), show(load(path)).encode())
    return 0


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    sys.exit(main())
