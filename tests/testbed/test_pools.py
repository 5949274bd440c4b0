"""What is simulated of the allocator, held against the allocator of the installed Paddle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from interlace.scheduler.memory import compiled
from interlace.scheduler.memory.pools import best_fit
from testbed import device
from testbed.lowering import TestbedDevice
from tests.scheduler.pools import random_step

pytestmark = pytest.mark.paddle


@pytest.mark.parametrize("count", [1, 7, 60, 400, 3000])
def test_pools_take_what_paddles_allocator_takes(plugin: Path, count: int) -> None:
    """Those that are simulated, by the plain function and its compiled twin, and those of the testbed."""
    for seed in range(max(1, 200 // count)):
        step = random_step(seed, count)
        expected = device.best_fit(*step, own=False)
        assert best_fit(*step).tolist() == expected
        assert compiled.best_fit(*step).tolist() == expected
        assert device.best_fit(*step, own=True) == expected


def test_what_is_available_is_what_is_held_and_what_is_free(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory", lambda: SimpleNamespace(reserved=5))
    monkeypatch.setattr(device, "free_bytes", lambda: 10)
    for total, available in ((100, 15), (12, 12)):
        monkeypatch.setattr(device, "total_bytes", lambda found=total: found)
        assert TestbedDevice(None).available_bytes() == available
