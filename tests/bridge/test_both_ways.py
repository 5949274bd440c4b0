"""What `interlace calibrate` makes of the times of copies in both directions, on a device that is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.paddle

COPY_OUT_S, COPY_IN_S, BEGIN_S = 1.2e-3, 1.3e-3, 4e-3


class Bench:
    """Copies on two streams, which begin together; while both run, each takes its factor times as long."""

    def __init__(self, into: float, out: float, noise: float = 0.0, in_s: float = COPY_IN_S) -> None:
        self.into, self.out, self.noise, self.in_s, self.is_fast, self.runs = into, out, noise, in_s, True, 0
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
        out, into = self.counts["out"] * COPY_OUT_S, self.counts["in"] * self.in_s

        def run(times: int = 1, meanwhile: Callable[[], object] = lambda: None) -> float:
            meanwhile()
            self.runs += 1
            return BEGIN_S + self._took_s(out, into) * (1 + self.noise * (self.runs % 17 == 3))

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


@pytest.mark.parametrize(("into", "out"), [(1.4, 1.05), (1.0, 1.5), (1.5, 1.5), (1.0, 1.0), (2.0, 2.0)])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_factors_of_both_directions_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch, into: float, out: float, noise: float) -> None:
    """Also of directions that take turns, and if some steps take half as long again."""
    found = measured(Bench(into, out, noise), monkeypatch)
    (row,) = found.rows
    assert (row.op, row.beside, row.group_size) == ("copy:h2d", "copy:d2h", 1)
    assert (row.stretch_op, row.stretch_beside) == pytest.approx((into, out), abs=1e-3)
    assert (row.range_op, row.range_beside) == ((row.stretch_op,) * 2, (row.stretch_beside,) * 2)
    assert (found.samples, found.failed) == ((), ())  # alone, one rank's copies are measured elsewhere


def test_several_ranks_also_have_times_of_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Bench(1.4, 1.05), monkeypatch, Everyone)
    assert [(each.direction, each.ranks, each.size_bytes, each.dur_ns) for each in found.samples] == [
        (way, 4, size, dur_ns) for size in (1 << 22, 1 << 26) for way, dur_ns in (("d2h", 1_200_000), ("h2d", 1_300_000))
    ]
    assert found.rows[0].group_size == 4


LOPSIDED = "a copy of one direction takes up to 3 times as long as one of the other, or longer"


@pytest.mark.parametrize(
    ("device", "why", "count"),
    [
        (Bench(5.0, 1.05), LOPSIDED, 4),
        (Bench(1.05, 1.1, in_s=4 * COPY_OUT_S), LOPSIDED, 4),
        (Bench(1.4, 1.05, in_s=0.0), "their times do not differ from noise", 2),
    ],
)
def test_why_there_are_no_factors_is_told(monkeypatch: pytest.MonkeyPatch, device: Bench, why: str, count: int) -> None:
    found = measured(device, monkeypatch, Everyone)
    assert found.failed == (f"copies in both directions on 4 device(s) at once: {why}",)
    assert (len(found.samples), found.rows) == (count, ())
