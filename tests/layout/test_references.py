"""What all layouts of a model are compared with: the model on one GPU, and on as many as a layout has replicas at most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from interlace.layout.search import Candidate, Limits, Search
from interlace.layout.space import Cluster, Template, layouts_of
from interlace.layout.store import Built, Store
from interlace.local.building import Request

WORDS = ("--pp", "{pp}", "--mp", "{mp}", "--dp", "{dp}", "--m", "{m}", "--sharding", "{sharding}", "--recompute", "{recompute}")


class Refusing(Store):
    """Builds nothing, and knows what it was asked for."""

    def build(self, requests: Sequence[Request], *, has_stages: bool = False) -> list[Built]:
        asked.extend(requests)
        return [Built(refused="no") for _ in requests]


asked: list[Request] = []


def asked_for(tmp_path: Path, gpus: int, batch: int, **tries: list[int | str]) -> set[tuple[int, str]]:
    """Worlds and arguments of the references."""
    asked.clear()
    template = Template("train.py", WORDS)
    layouts = layouts_of(template, Cluster(gpus, 8, 8, 8, batch), {"sharding": [0, 1], "recompute": ["none"], **tries})
    limits = Limits(memory=1000, layouts=8, finalists=1, jobs=1)
    search = Search(template, gpus, (), "h100", "", limits, Refusing(tmp_path, 1, print), print)
    search._refer([Candidate(each) for each in layouts])
    return {(each.world, " ".join(each.arguments)) for each in asked}


ONE = "--pp 1 --mp 1 --dp {} --m {} --sharding 0 --recompute none"


def test_replicas_on_all_gpus_where_the_batch_allows_them(tmp_path: Path) -> None:
    assert asked_for(tmp_path, 8, 8) == {(1, ONE.format(1, 1)), (8, ONE.format(8, 1))}


def test_fewer_ranks_where_the_batch_does_not_divide_over_all(tmp_path: Path) -> None:
    """12 sequences on 8 GPUs: pp or mp is 2 at least."""
    assert asked_for(tmp_path, 8, 12) == {(1, ONE.format(1, 1)), (4, ONE.format(4, 1))}


def test_fewer_ranks_where_a_script_takes_no_more_replicas(tmp_path: Path) -> None:
    assert asked_for(tmp_path, 8, 8, dp=[1, 2]) == {
        (1, ONE.format(1, 1)),
        (2, ONE.format(2, 1)),
        (2, ONE.format(2, 2)),
        (2, ONE.format(2, 4)),
    }


def test_without_layouts_nothing_is_built_and_what_is_kept_is_told(tmp_path: Path) -> None:
    asked.clear()
    template = Template("train.py", WORDS)
    layouts = layouts_of(template, Cluster(2, 8, 8, 8, 4), {"sharding": [0], "recompute": ["none"]})
    search = Search(template, 2, (), "h100", "", Limits(1000, 0, 0, 1), Refusing(tmp_path, 1, print), print)
    assert {each.state for each in search.run(layouts)} == {"waiting"}
    assert not asked
