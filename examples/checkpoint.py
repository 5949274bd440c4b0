"""Save under unmodified Paddle, go on under Interlace, and the other way round: parameters and optimizer states have the same names and
bits.

INTERLACE_DISABLE=1 interlace run examples/checkpoint.py --world 2 -- --pp 2 --steps 4 --stop 2 --save out/checkpoint
interlace run examples/checkpoint.py --world 2 -- --pp 2 --steps 4 --load out/checkpoint

Each rank keeps its own shard in a file: what `model.state_dict()` gives it (parameters, optimizer states, float32 copies), and
the step and the learning-rate scheduler. The layout (--pp, --mp, --dp) must be the same when it is read. Takes the options of gpt.py too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import gpt
import numpy as np
import paddle
import paddle.distributed as dist


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options: our own, and those of gpt.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep a checkpoint there at the end")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="go on from the checkpoint there")
    parser.add_argument("--stop", type=int, metavar="STEP", help="end after this step, of the --steps that the data are made for")
    own, rest = parser.parse_known_args(argv)
    return argparse.Namespace(**{**vars(gpt.parse(rest)), **vars(own)})


def file_of(folder: Path) -> Path:
    """This rank's part of a checkpoint."""
    return folder / f"rank{dist.get_rank()}.pdparams"


def state_of(model: dist.DistModel) -> dict[str, paddle.Tensor]:
    """This rank's parameters and optimizer states; not the learning rate, which the optimizer sets anew at each step."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("learning_rate_")}


def scheduler_of(model: dist.DistModel) -> paddle.optimizer.lr.LRScheduler | None:
    """The learning-rate scheduler, if there is one."""
    rate = model._engine._optimizer._learning_rate
    return rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None


def save(model: dist.DistModel, step: int, folder: Path) -> None:
    """Keep this rank's shard of all parameters and optimizer states."""
    folder.mkdir(parents=True, exist_ok=True)
    state, scheduler = {name: np.asarray(tensor._local_value()) for name, tensor in state_of(model).items()}, scheduler_of(model)
    paddle.save({"step": step, "state": state, "scheduler": scheduler.state_dict() if scheduler else None}, str(file_of(folder)))


def load(model: dist.DistModel, folder: Path) -> int:
    """Give the model, which must be in training mode, this rank's shard of a checkpoint; returns its step.

    Raises:
        SystemExit: There is no such file, or it is of another model or layout.
    """
    if not file_of(folder).is_file():
        raise SystemExit(f"--load {folder}: no {file_of(folder).name} there; expected a checkpoint of as many ranks")
    kept, state = paddle.load(str(file_of(folder)), return_numpy=True), state_of(model)
    found = {name: array.shape for name, array in kept["state"].items()}
    expected = {name: tuple(tensor._local_value().shape) for name, tensor in state.items()}
    if found != expected:
        name = next(name for name in [*expected, *found] if expected.get(name) != found.get(name))
        raise SystemExit(
            f"--load {folder}: {name} is {found.get(name)} in the checkpoint, {expected.get(name)} in the model; "
            "expected the same model and layout"
        )
    with paddle.base.dygraph.guard():
        for name, tensor in state.items():
            paddle.assign(paddle.to_tensor(kept["state"][name]), tensor._local_value())
    model.set_state_dict(state)
    if kept["scheduler"]:
        scheduler_of(model).set_state_dict(kept["scheduler"])
    return int(kept["step"])


def main(args: argparse.Namespace) -> None:
    """Train from the checkpoint's step, or the first, to the last or `--stop`."""
    model, loader = gpt.build(args)
    model.train()  # builds the program and, the first time, its parameters in the executor's scope
    done = load(model, args.load) if args.load else 0
    last = args.stop or args.steps
    for step, (tokens, labels) in enumerate(loader(), 1):
        if done < step <= last:
            loss = model(tokens, labels)
            if scheduler_of(model):
                scheduler_of(model).step()
            if loss is not None:
                print(f"step {step} loss {float(np.mean(np.asarray(loss))):.9f}", flush=True)
    if args.save:
        save(model, last, args.save)


if __name__ == "__main__":
    main(parse())
