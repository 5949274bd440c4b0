"""Storages: what exists once a step, and what the jobs at both ends of the step give and take."""

from __future__ import annotations

from interlace.ir import parse
from interlace.ir.storage import Storages, collect_items

KEPT = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=3 chunks=1 schedule=1F1B
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4]!NAME = pd_op.relu(%0) forward
#2 builtin.shadow_output(%1) forward {"output_name":"y"}
"""


def test_a_result_that_is_only_kept_from_collection_exists_for_each_micro_batch() -> None:
    """Paddle marks such results as persistable without giving them a name."""
    for name, count in (("", 3), ('"state"', 0)):
        program = parse(KEPT.replace("NAME", name))
        assert Storages(program).is_once(1) == (not count)
        assert len(collect_items(program)) == count
