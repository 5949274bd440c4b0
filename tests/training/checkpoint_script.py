"""`examples/checkpoint.py FOLDER`: run through, and in halves of unmodified Paddle and Interlace; prints the losses of each as JSON.

Every run is a process of its own, because Paddle counts its optimizers' names on in a process; forked, so that Paddle is imported once.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import checkpoint

from tests.forked import make_building_cheap

SHAPE = ["--layers", "1", "--hidden", "16", "--gradient-accumulation", "2", "--steps", "2", "--batch-size", "2", "--lr-scheduler", "cosine"]


def run(name: str, baseline: bool, words: list[str], folder: Path) -> None:
    os.environ["INTERLACE_DISABLE"] = "1" if baseline else "0"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        checkpoint.main(checkpoint.parse([*SHAPE, *words]))
    (folder / f"{name}.losses").write_text(said.getvalue())


def together(*runs: tuple[str, bool, list[str]]) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=run, args=(*each, folder)) for each in runs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_building_cheap()
    parts = {"baseline": str(folder / "from_baseline"), "interlace": str(folder / "from_interlace")}
    together(("whole", True, []), *((f"{name} first", name == "baseline", ["--stop", "1", "--save", part]) for name, part in parts.items()))
    together(*((f"{name} first, then the other", name != "baseline", ["--load", part]) for name, part in parts.items()))
    print(json.dumps({path.stem: path.read_text().splitlines() for path in folder.glob("*.losses")}))
