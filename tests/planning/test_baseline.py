"""Paddle's baseline: the baseline of every report."""

from __future__ import annotations

import msgspec

from interlace.config import load_config
from interlace.cost_model import GivenCosts
from interlace.ir import parse, verify
from interlace.passes.pipeline import built_in
from interlace.planning.baseline import baseline_plan
from interlace.planning.variants import baseline

COSTS = GivenCosts({"default": 1000})
PROGRAM = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=1F1B
#0 %0:float32[2] = pd_op.data() forward {"name":"x"}
#1 %1:float32[2] = pd_op.matmul(%0, %0) forward
#2 %2:float32[] = pd_op.mean(%1) forward
#3 builtin.shadow_output(%2) forward {"output_name":"loss"}
#4 %3:float32[2] = pd_op.mean_grad(%1, %2) backward
"""


def test_the_host_waits_for_an_output_in_the_job_that_computes_it() -> None:
    """Paddle fetches a loss at the end of each forward job, and its host waits for it there."""
    program = baseline_plan(parse(PROGRAM), COSTS)
    assert not verify(program)
    waits = {job.name: job.host_waits for job in program.jobs}
    forward = [job for job in program.jobs if (2, 0) in job.items or (2, 1) in job.items]
    assert [job.host_waits for job in forward] == [((job.items[-1], (2, k)),) for k, job in enumerate(forward)]
    assert sum(map(len, waits.values())) == len(forward) == 2
    assert baseline_plan(program, COSTS) is program


def test_the_preset_is_the_baseline_of_every_comparison() -> None:
    """It stands as a file, for users, and follows from what each pass says of itself, for passes of others."""
    program = parse(PROGRAM)
    preset = load_config("baseline").pipeline().run(program, COSTS)[0]
    assert preset.jobs == baseline_plan(program, COSTS).jobs
    passes = (baseline(kind()) for kind in built_in() if kind.is_default)
    ours = {each.name: msgspec.to_builtins(each) for each in passes if each is not None}
    assert {each.name: msgspec.to_builtins(each) for each in load_config("baseline").pipeline().passes} == ours
