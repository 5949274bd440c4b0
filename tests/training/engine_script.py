"""A training script that also evaluates, fetches a value of its own and saves; asserts what must hold.

Started by `interlace run`; arguments are those of `examples/gpt.py`.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gpt
import numpy as np
import paddle.distributed as dist
import pytest

import interlace
from interlace.errors import PlanError


def value(loss: object) -> np.ndarray | None:
    return None if loss is None else np.asarray(loss)


args = gpt.parse(sys.argv[1:])
model, loader = gpt.build(args)
batches = list(islice(loader(), 4))

model.train()
first = value(model(*batches[0]))
model.eval()
before = value(model(*batches[1]))
again = value(model(*batches[1]))
model.train()
trained = value(model(*batches[1]))
model.eval()
after = value(model(*batches[1]))
model.train()

if trained is not None:
    assert before is not None
    assert after is not None
    assert again is not None
    assert np.array_equal(before, again), "evaluation changed the parameters"
    assert np.array_equal(before, trained), "evaluation and training see different parameters"
    assert not np.array_equal(trained, after), "training did not change the parameters"

dense = model._engine._pir_dense_main_progs["train"]
forward = [op for op in dense.global_block().ops if op.op_role == 0 and op.name() == "pd_op.layer_norm"]
model._fetch_value(forward[0].result(0), "normed")
model(*batches[2])
normed = model.outs["normed"]
count = args.micro_batches * args.gradient_accumulation
assert normed.shape[0] == count if count > 1 else normed.ndim == 3, normed.shape
assert np.isfinite(normed).all()
assert len(model.state_dict()) > 0
assert interlace.plan_of(model).jobs
assert interlace.plan_of(model).explain().splitlines()[-1].startswith("Paddle's baseline takes ")
with tempfile.TemporaryDirectory() as folder:
    page = interlace.plan_of(model).report(Path(folder) / "report.html")
    assert (page is None) == (dist.get_rank() > 0)
    assert page is None or "Paddle's baseline takes " in page.read_text(encoding="utf-8")
with pytest.raises(PlanError, match=r"model\.predict\(\)"):
    interlace.plan_of(model, "predict")

fed = model._engine._interlace.modes["train"].lowered.fed
ragged = {name: np.zeros([shape[0] + 1, *shape[1:]], "int64") for name, shape in fed.items()}
if fed:
    with pytest.raises(PlanError, match=r"feed '(input|label)0': found shape .*, expected .*drop the last, smaller one"):
        model._engine.run(ragged)
print("ENGINE OK", dist.get_rank())
