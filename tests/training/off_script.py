"""A script as README has it, and its neighbours: models with Interlace off, and never asked for. Started by `interlace run`."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gpt
import pytest

import interlace
from interlace.errors import PlanError

enable = interlace.enable
model, loader = gpt.build(gpt.parse(["--gradient-accumulation", "2", "--layers", "1"]))
model.train()
told = interlace.plan_of(model).explain()
print(told)
if os.environ.get("INTERLACE_DISABLE") == "1":
    assert told == "Interlace is off (INTERLACE_DISABLE=1): Paddle's plan is untouched"
    assert interlace.plan_of(model).jobs == ()
else:
    assert told.startswith("rank 0 of 1")
for batch in islice(loader(), 2):
    model(*batch)

interlace.enable = lambda strategy: enable(strategy, {"enable": False})
quiet, _ = gpt.build(gpt.parse(["--layers", "1"]))
assert interlace.plan_of(quiet).explain().startswith("Interlace is off (")

interlace.enable = lambda strategy: None
never, _ = gpt.build(gpt.parse(["--layers", "1"]))
with pytest.raises(PlanError, match="never asked for Interlace"):
    interlace.plan_of(never)
with pytest.raises(PlanError, match="found NoneType"):
    interlace.plan_of(None)
