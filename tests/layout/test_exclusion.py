"""A layout whose first stage alone takes longer than another layout in full is excluded before its other stages are built."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.ir import parse
from interlace.layout import search as search_module
from interlace.layout.search import Candidate, Limits, Search
from interlace.layout.space import Template
from interlace.layout.store import Store
from interlace.planning.floor import Floors
from tests.layout.candidates import drafted, layout

PROGRAM = parse("program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n")


@pytest.mark.parametrize(("takes_ns", "state"), [(99, "waiting"), (101, "excluded")])
def test_what_the_first_stage_computes_is_compared_with_the_best_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_ns: int, state: str
) -> None:
    monkeypatch.setattr(search_module, "without_recomputation", lambda program, costs: program)
    monkeypatch.setattr(search_module, "needed_at_once", lambda program: 0)
    monkeypatch.setattr(search_module, "occupied", lambda program, costs: Floors(takes_ns, 0))
    limits = Limits(memory=1000, layouts=8, finalists=1, jobs=1)
    search = Search(Template("train.py", ()), 2, (), "h100", "", limits, Store(tmp_path, 1, print), print)
    built = Candidate(layout(2))
    assert search._is_bounded(built, PROGRAM, [drafted(1, 100, 500), built]) == (state == "excluded")
    assert built.state == state
