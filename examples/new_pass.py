"""Interlace on a plain `paddle.static` program, through Paddle's `new_pass`: no `dist.to_static`, no launcher.

python examples/new_pass.py

The pass `interlace_schedule_1f1b` leaves the program as it is and gives two attributes of its context: `plan`, which the
executor runs in the place of the program, and `fetch_list`, the values of the program that were asked for as values of the plan.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle.distributed.passes import PassContext, new_pass

import interlace  # noqa: F401 - registers the passes

BATCH, WIDTH, STEPS = 8, 16, 3


def build() -> tuple[paddle.static.Program, paddle.static.Program, paddle.pir.Value]:
    """(main program, startup program, loss) of a small MLP with AdamW; the same parameters at each call."""
    paddle.seed(3)
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.utils.unique_name.guard(), paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [BATCH, WIDTH], "float32")
        mlp = paddle.nn.Sequential(paddle.nn.Linear(WIDTH, 64), paddle.nn.GELU(), paddle.nn.Linear(64, WIDTH))
        loss = (mlp(x) - x).square().mean()
        paddle.optimizer.AdamW(0.01, parameters=mlp.parameters()).minimize(loss)
    return main, startup, loss


def plan(main: paddle.static.Program, startup: paddle.static.Program, loss: paddle.pir.Value) -> PassContext:
    """The context after the pass: the executor's plan, the loss as a value of that plan, and ours with its reasons."""
    options = {
        "device": "cpu",  # the device profile that is asked for times
        "fetch_list": [loss],  # what `executor.run` is to give
        "interlace": {"offload_activations": {"fraction": 1.0, "min_bytes": 0}},  # options of the other passes
    }
    return new_pass("interlace_schedule_1f1b", options).apply([main], [startup], PassContext())


def train(main: paddle.static.Program, startup: paddle.static.Program, fetch: list, job_plan=None) -> list[float]:
    """The loss of each step, of the program itself or of a plan of it."""
    executor = paddle.static.Executor(paddle.CPUPlace())
    batches = np.random.default_rng(5).standard_normal([STEPS, BATCH, WIDTH], "float32")
    with paddle.static.scope_guard(paddle.static.Scope()):
        executor.run(startup)
        if job_plan is not None:
            executor._set_plan(job_plan)  # from here on `run` runs the plan
        return [executor.run(main, feed={"x": batch}, fetch_list=fetch)[0].item() for batch in batches]


if __name__ == "__main__":
    paddle.enable_static()
    main, startup, loss = build()
    baseline = train(main, startup, [loss])
    main, startup, loss = build()
    context = plan(main, startup, loss)
    planned = train(main, startup, context.get_attr("fetch_list"), context.get_attr("plan"))
    print(context.get_attr("interlace_schedule_1f1b").explain())
    print(f"baseline     {baseline}\ninterlace {planned}\n{'the same bits' if baseline == planned else 'DIFFERENT'}")
    if baseline != planned:
        raise SystemExit(1)
