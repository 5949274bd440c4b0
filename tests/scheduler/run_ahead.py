"""A program whose host may run ahead of the device."""

from __future__ import annotations

from interlace.ir import Program, parse

MICRO_BATCHES = 12


def run_ahead_program() -> Program:
    """Forward after forward: a product, its sum over two ranks on a stream of its own, and what reads that."""
    ops = """
#0 %0:float32[4,1024]!"w" = builtin.parameter() forward
#1 %1:float32[1024,4]"x" = pd_op.data() forward
#2 %2:float32[1024,1024] = pd_op.matmul(%1, %0) forward
#3 %3:float32[1024,1024] = pd_op.all_reduce(%2) forward group=7 stream="auto_parallel_mp"
#4 %4:float32[1024,1024] = pd_op.matmul(%3, %0) forward
#5 %5:float32[1] = pd_op.mean(%4) forward
"""
    jobs = "".join(f"job forward_{m} forward {m}: 2-5@{m}\n" for m in range(MICRO_BATCHES))
    head = f"program rank=0 world=2 mode=train\npipeline stage=0 of 1 micro_batches={MICRO_BATCHES} chunks=1 schedule=accumulate\n"
    return parse(f"{head}group 7 = 0,1\npasses schedule-1f1b\n{ops}{jobs}")
