"""What `strategy.interlace` prints."""

from __future__ import annotations

from interlace.bridge.flags import Flags


def test_flags_print_what_is_in_force() -> None:
    flags = Flags({"device": "h200", "overlap_column_backward": {"min_bytes": 7}, "offload_activations": "off"}, "test")
    assert repr(flags).startswith("Flags(enable=True, device='h200', ")
    assert "overlap_column_backward=OverlapColumnBackward(min_bytes=7, " in repr(flags)
    assert "offload_activations" not in repr(flags)
    assert repr(flags.offload_activations) == "offload_activations: off"
    assert repr(flags.overlap_column_backward).startswith("OverlapColumnBackward(min_bytes=7")
