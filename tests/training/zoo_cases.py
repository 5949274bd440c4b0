"""Cases of models unlike a transformer."""

from __future__ import annotations

from pathlib import Path

SCRIPT = Path(__file__).with_name("zoo.py")
OFF = dict.fromkeys(("split_backward", "overlap_column_backward", "name_streams"), "off")
PLAIN = {**OFF, "schedule_1f1b": {"interleave": "off"}}
OFFLOAD = {"offload_activations": {"fraction": 1.0, "min_bytes": 64}}
DX_FIRST = {"memory_budget": "off", "schedule_1f1b": {"interleave": "dx-first"}, **OFFLOAD}
RECOMPUTED = {"schedule_1f1b": {"interleave": "mixed"}, "choose_recompute": {"level": 1}}
MIXED = {"memory_budget": "off", "schedule_1f1b": {"interleave": "mixed"}, **OFFLOAD}
CASES = {
    "nothing but lowering; predicting in between": (2, "norm,tied,branch --pp 2 --predict", PLAIN),
    "batch norm, a branch, dropout, stages of 1 and 2 layers, 5 micro-batches": (
        2,
        "norm,branch,dropout --pp 2 --micro-batches 5 --layers 1,2",
        DX_FIRST,
    ),
    "convolutions, 3 micro-batches, Momentum": (
        2,
        "conv --pp 2 --micro-batches 3 --optimizer Momentum",
        {**MIXED, "offload_optimizer_state": {"fraction": 1.0, "min_bytes": 64}},
    ),
    "frozen batch norm, a skipped stage, 3 stages, 7 micro-batches of a row": (
        3,
        "frozen,skip --pp 3 --micro-batches 7 --rows 1 --optimizer SGD",
        DX_FIRST,
    ),
    "3 stages of 2 chunks, a table handed on": (3, "beside --pp 3 --vpp 2 --schedule VPP --micro-batches 3 --rows 1", DX_FIRST),
    "2 stages of 2 chunks, a table put on each stage before": (
        2,
        "placed --pp 2 --vpp 2 --schedule VPP --micro-batches 2 --rows 1",
        DX_FIRST,
    ),
    "one stage, 3 micro-batches, Lamb": (1, "norm,tied,branch --micro-batches 3 --optimizer Lamb", DX_FIRST),
}
