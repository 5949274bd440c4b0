"""What `interlace calibrate` makes of the times of copies in both directions, on a device that is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.paddle

COPY_OUT_S, COPY_IN_S, BEGIN_S = 1.2e-3, 1.3e-3, 4e-3


class Bench:
    """Copies on two streams, which begin together; while both run, each takes its factor times as long."""

    def __init__(self, into: float, out: float, takes_time: bool = True) -> None:
        self.into, self.out, self.is_fast, self.takes_time = into, out, True, takes_time
        self.counts = {"out": 0, "in": 0}
        self.device = self

    def copy_out(self, x: Any) -> Any:
        self.counts["out"] += 1
        return x

    def copy_in(self, x: Any) -> Any:
        self.counts["in"] += 1
        return x

    def add_lead(self, seconds: float) -> None: ...

    def runner(self, build: Callable[[], None], inputs: Any = None) -> Callable[..., float]:
        import paddle

        self.counts = {"out": -1, "in": -1}  # one of each direction prepares
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            build()
        out, into = self.counts["out"] * COPY_OUT_S, self.counts["in"] * COPY_IN_S

        def run(times: int = 1, meanwhile: Callable[[], object] = lambda: None) -> float:
            meanwhile()
            return BEGIN_S + self._took_s(out, into) * self.takes_time

        return run

    def _took_s(self, out_s: float, in_s: float) -> float:
        """Until the shorter row has ended, both are slower; then the other one runs alone."""
        together_s = min(out_s * self.out, in_s * self.into)
        return together_s + (out_s - together_s / self.out) + (in_s - together_s / self.into)


class Everyone:
    id, nranks = 1, 4


def measured(bench: Bench, monkeypatch: pytest.MonkeyPatch, everyone: Any = None) -> Any:
    import paddle

    from interlace.bridge.calibrate import beside
    from interlace.bridge.calibrate.both_ways import copies_of_all_ranks
    from interlace.bridge.probe.bench import paddle_settings

    monkeypatch.setattr(paddle._C_ops, "all_reduce", lambda *given: None)
    monkeypatch.setattr(beside.time, "perf_counter", lambda: 0.0)
    with paddle_settings():
        return copies_of_all_ranks(beside.Lab(bench, 3, everyone))


@pytest.mark.parametrize(("into", "out"), [(1.4, 1.05), (1.0, 1.5), (1.5, 1.5), (1.0, 1.0)])
def test_factors_of_both_directions_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch, into: float, out: float) -> None:
    found = measured(Bench(into, out), monkeypatch)
    (row,) = found.rows
    assert (row.op, row.beside, row.group_size) == ("copy:h2d", "copy:d2h", 1)
    assert (row.stretch_op, row.stretch_beside) == pytest.approx((into, out), abs=1e-3)
    assert (row.range_op, row.range_beside) == ((row.stretch_op,) * 2, (row.stretch_beside,) * 2)
    assert (found.samples, found.failed) == ((), ())  # alone, one rank's copies are measured elsewhere


def test_several_ranks_also_have_times_of_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Bench(1.4, 1.05), monkeypatch, Everyone)
    assert [(each.direction, each.ranks, each.size_bytes, each.dur_ns) for each in found.samples] == [
        ("d2h", 4, 1 << 26, 1_200_000),
        ("h2d", 4, 1 << 26, 1_300_000),
    ]
    assert found.rows[0].group_size == 4


@pytest.mark.parametrize(
    ("device", "what"), [(Bench(1.4, 1.05, takes_time=False), "copies"), (Bench(5.0, 1.05), "copies in both directions")]
)
def test_times_that_are_not_possible_are_told(monkeypatch: pytest.MonkeyPatch, device: Bench, what: str) -> None:
    found = measured(device, monkeypatch, Everyone)
    assert found.failed == (f"{what} of 4 device(s) at once: their times do not differ from noise",)
    assert (len(found.samples), found.rows) == (2 * (what != "copies"), ())
