"""The measured step beside the predicted one: which steps count, when the two do not fit, what is said where no one can tell."""

from __future__ import annotations

import pytest

from interlace.report.measured import COUNTED, WARM_UP, Measured

H200 = "NVIDIA H200"


def after(took_ms: float, device: str = H200, warm_up_ms: float = 900.0) -> Measured:
    """A process whose counted steps took this long."""
    return Measured(device, H200, [round(each * 1e6) for each in [warm_up_ms] * WARM_UP + [took_ms] * COUNTED])


def test_nothing_is_said_before_the_steps_have_run() -> None:
    early = Measured(H200, H200, [1] * (WARM_UP + COUNTED - 1))
    assert (early.is_open, early.step_ns, early.clause(), early.beside(5, "h200")) == (True, None, "", "")


def test_warm_up_does_not_count() -> None:
    """A host that runs ahead returns early from the first steps, and late from the last: only their sum says what a step takes."""
    found = after(50.0)
    found.took_ns[-2:] = [10_000_000, 90_000_000]
    assert found.step_ns == 50_000_000


@pytest.mark.parametrize(("took_ms", "apart"), [(54.9, False), (45.1, False), (55.6, True), (44.4, True)])
def test_more_than_a_tenth_apart_is_hinted_at(took_ms: float, apart: bool) -> None:
    line = after(took_ms).beside(50_000_000, "h200")
    assert line.startswith(f"measured {took_ms:.3f} ms a step (mean of steps 4 to 8), predicted 50.000 ms (profile h200): measured ")
    assert ("interlace calibrate -o" in line) == apart


def test_a_profile_of_another_device_is_not_blamed() -> None:
    found = after(5000.0, device="AMD EPYC 9K84")
    line = found.beside(50_000_000, "h200")
    assert "5000.000 ms a step (mean of steps 4 to 8) on AMD EPYC 9K84; the 50.000 ms predicted are for another device, " + H200 in line
    assert "calibrate" not in line
    assert "%" not in line
    assert found.clause() == "measured 5000.000 ms on AMD EPYC 9K84, another device than the profile's, mean of 5 steps"


def test_where_the_device_has_no_name_the_hint_says_for_which_it_holds() -> None:
    assert "apart; if this device is NVIDIA H200, `interlace calibrate" in after(70.0, device="").beside(50_000_000, "h200")


def test_without_a_prediction_the_time_stands_alone() -> None:
    assert after(70.0).beside(None, "h200").endswith("no whole step was simulated to compare it with")
