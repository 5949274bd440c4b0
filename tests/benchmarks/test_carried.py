"""Kernel times carried from one card to another."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.carried import carried, main
from interlace.cost_model import load_profile


def test_from_a_card_to_itself_times_stay() -> None:
    h100 = load_profile("h100")
    assert [each.dur_ns for each in carried(h100, h100, h100).ops] == [each.dur_ns for each in h100.ops]


@pytest.mark.parametrize("slower", [1, 3])
def test_a_kernel_differs_between_cards_as_that_of_the_other_library_does(slower: int) -> None:
    """Kernels of a library three times as slow on the one card are so on the other; what is no operation stays the other card's."""
    h100, h200 = load_profile("h100"), load_profile("h200")
    ours = msgspec.structs.replace(h100, ops=[msgspec.structs.replace(each, dur_ns=slower * each.dur_ns) for each in h100.ops])
    found = carried(ours, h100, h200)
    expected = {(each.kind, each.dtype, *sorted(each.dims.items()), each.size_bytes): each.dur_ns for each in h200.ops}
    both = [
        (each.dur_ns, slower * expected[key])
        for each in found.ops
        if (key := (each.kind, each.dtype, *sorted(each.dims.items()), each.size_bytes)) in expected
    ]
    assert len(both) > 300
    assert [each for each, _ in both] == pytest.approx([each for _, each in both], rel=0.01)
    assert (found.collectives, found.power, found.device) == (h200.collectives, h200.power, h200.device)


def test_the_command_writes_a_profile_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "carried.json"
    main(["h100", "--from", "h100", "--to", "h200", "-o", str(out)])
    assert f"operations carried to NVIDIA H200: {out}" in capsys.readouterr().out
    assert load_profile(str(out)).provenance.note.startswith("operations of NVIDIA H100")
