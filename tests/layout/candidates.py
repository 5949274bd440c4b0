"""Layouts with made-up steps and peaks, and answers about them."""

from __future__ import annotations

from interlace.layout.answer import Answer, answer_of
from interlace.layout.judge import Draft
from interlace.layout.search import Candidate, Limits
from interlace.layout.space import Cluster, Layout, Template
from interlace.planning.outcome import StageStep, Step

GIB, MS = 1 << 30, 1_000_000
LIMITS = Limits(memory=10 * GIB, layouts=4, finalists=1, jobs=1)
TEMPLATE = Template("train.py", ("--pp", "{pp}"))
CLUSTER = Cluster(4, 4)


def step(ns: int, peak: int, compute: int = 0, exposed: int = 0, bubble: int = 0) -> Step:
    stage = StageStep(0, (0,), compute, exposed, bubble, 0, 0, peak, 0)
    return Step(ns, exposed, bubble, peak, (stage,))


def layout(pp: int) -> Layout:
    return Layout((("pp", pp), ("mp", 1), ("dp", 4 // pp)))


def drafted(pp: int, ns: int, peak: int, **parts: int) -> Candidate:
    return Candidate(layout(pp), "drafted", draft=Draft(step(ns, peak, **parts), peak_bytes=peak, rel_error=0.05, tokens=1000 * pp))


def answer(*found: Candidate, tokens: int = 0) -> Answer:
    return answer_of(found, TEMPLATE, CLUSTER, LIMITS, "h100", "", tokens, 3)


SLOW = drafted(1, 300 * MS, 4 * GIB, compute=250 * MS)
FAST = drafted(2, 200 * MS, 8 * GIB, compute=150 * MS, exposed=20 * MS)
OVER = drafted(4, 100 * MS, 12 * GIB)
