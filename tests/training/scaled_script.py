"""A GPT in float16 whose loss is scaled so that updates of the first steps are skipped, or (`TRAINED=groups`) whose parameters are in two
groups of their own rate and decay; `interlace run` compares losses, parameters and optimizer state."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import common
import gpt
import numpy as np
import paddle

FIRST_SCALE = 2.0**18
make_strategy, make_optimizer = common.make_strategy, common.make_optimizer


def scaled_strategy(args: Any) -> Any:
    strategy = make_strategy(args)
    strategy.amp.init_loss_scaling = FIRST_SCALE
    strategy.amp.decr_every_n_nan_or_inf, strategy.amp.decr_ratio = 1, 0.5
    return strategy


def grouped_optimizer(args: Any, model: Any) -> Any:
    """Matrices decay; all else does not, and learns at half the rate."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    rest = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "learning_rate": 0.5}]
    return paddle.optimizer.AdamW(learning_rate=args.learning_rate, parameters=groups)


def scale() -> float:
    found = [paddle.static.global_scope().find_var(name) for name in ("loss_scaling_0", "loss_scaling")]
    (tensor,) = [each.get_tensor() for each in found if each is not None]
    return float(np.asarray(tensor).reshape(-1)[0])


def main() -> None:
    args = gpt.parse()
    grouped = os.environ.get("TRAINED") == "groups"
    if grouped:
        common.make_optimizer = grouped_optimizer
    else:
        common.make_strategy = scaled_strategy
    steps = sum(1 for _ in common.losses(*gpt.build(args)))
    if not grouped and not FIRST_SCALE / 2**steps < scale() < FIRST_SCALE:
        raise SystemExit(f"some updates of {steps} steps were to be skipped and others not; the scale is {scale()}")


main()
