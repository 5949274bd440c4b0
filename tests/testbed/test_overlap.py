"""What runs beside computation, measured: collectives until their first reader, in one order on all ranks, and copies of losses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.trace import COMM, Planned, RankTrace, align, read_rank
from tests.testbed.trained import train

pytestmark = pytest.mark.paddle
NUM_COLUMN_GRADIENTS = (2 * 2 + 1) * 4  # two layers with two column-parallel linears each, and the head, by micro-batches
LATE = "seed=5,permille=1000,max_us=60000,kinds=collective"


def traces(folder: Path, form: str) -> list[RankTrace]:
    """The last step of each rank, its collectives late by milliseconds."""
    folder.mkdir()
    train(
        folder,
        "gpt",
        2,
        ("--mp", "2", "--schedule", "1F1B"),
        form,
        TESTBED_DELAYS=LATE,
        TESTBED_MEASURE=os.fspath(folder),
        TESTBED_STEPS="2",
        TESTBED_TRACE="2",
    )
    return [read_rank(folder / f"trace{rank}.msgpack") for rank in range(2)]


def collectives(ranked: RankTrace) -> list[tuple[str, str, str]]:
    """Kernel, role and what it says it is, in the order of the stream that has them."""
    known = align(ranked.planned, ranked.trace.issues)
    nothing = Planned(-1, "", "", "", None)
    rows = [(each, known.get(each.op, nothing)) for each in sorted(ranked.trace.intervals) if each.name in COMM]
    return [(each.name, planned.role, planned.label) for each, planned in rows]


def covered(ranked: RankTrace) -> int:
    """Collectives of backward between whose issue and end a matrix product that was issued later began and ended."""
    known = align(ranked.planned, ranked.trace.issues)
    issued = {each.number: each.at_us for each in ranked.trace.issues}
    products = [each for each in ranked.trace.intervals if each.name == "gemm"]
    mine = [each for each in ranked.trace.intervals if each.name in COMM and each.op in known and known[each.op].role == "backward"]
    return sum(
        any(product.op > each.op and issued[each.op] < product.begin_us and product.end_us <= each.end_us for product in products)
        for each in mine
    )


@pytest.fixture(scope="module")
def ours(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> list[RankTrace]:
    return traces(tmp_path_factory.mktemp("traced") / "ours", "off")


def test_the_host_has_the_losses_while_gradients_are_computed(ours: list[RankTrace]) -> None:
    """The host prepares the next step meanwhile."""
    for ranked in ours:
        (copied,) = [each for each in ranked.trace.intervals if each.name == "copy_d2h" and each.op >= 0][-1:]
        behind = [each for each in ranked.trace.intervals if each.name == "gemm" and each.begin_us > copied.end_us]
        assert len(behind) > NUM_COLUMN_GRADIENTS // 4


def test_products_run_under_collectives_in_one_order_on_every_rank(ours: list[RankTrace], tmp_path: Path) -> None:
    """First reader."""
    baseline = traces(tmp_path / "baseline", "")
    assert collectives(ours[0]) == collectives(ours[1])
    assert all(label for _, _, label in collectives(ours[0]))
    assert [covered(each) for each in baseline] == [0, 0]
    assert all(covered(each) >= 3 * NUM_COLUMN_GRADIENTS // 4 for each in ours)  # a busy host may issue a product after a short delay
