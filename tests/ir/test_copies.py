"""Copies that a micro-batch leaves out: one rule for simulator, memory, proof and lowering."""

from __future__ import annotations

import numpy as np

from interlace.ir import parse
from interlace.ir.copies import omitted_copies, places_of, variants

TEXT = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=1F1B
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4]^pinned = pd_op.memcpy(%0) forward
#2 %2:float32[4] = pd_op.memcpy_h2d(%1) backward
#3 %3:float32[4] = pd_op.memcpy_d2h(%2) forward origin=7
#4 %4:float32[4] = pd_op.memcpy(%3) optimize
"""
JOBS = "job first backward 0: 0@0\njob second backward 1: 0-2@1\n"


def test_what_no_job_runs_for_a_micro_batch_is_omitted_there() -> None:
    """Not what was captured, which every micro-batch runs, nor what runs once a step."""
    assert omitted_copies(parse(TEXT + JOBS)) == {(1, 0), (2, 0)}
    assert [form.micro_batches for form in variants(parse(TEXT + JOBS))] == [[0], [1]]


def test_a_program_without_jobs_omits_nothing() -> None:
    program = parse(TEXT)
    assert omitted_copies(program) == set()
    assert [(form.program, form.micro_batches) for form in variants(program)] == [(program, [0, 1])]


def test_places_of_op_instances_are_those_of_the_jobs_and_none_elsewhere() -> None:
    program = parse(TEXT + JOBS)
    found = places_of(program, np.array([[0], [1], [9], [-1]]), np.array([0, 1, 2]))
    assert found.tolist() == [[0, 1, -1], [-1, 2, -1], [-1] * 3, [-1] * 3]
    assert places_of(parse(TEXT), np.array([0]), np.array([0])).tolist() == [-1]
