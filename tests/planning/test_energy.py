"""Of equally fast drafts the one of least energy is taken."""

from __future__ import annotations

import msgspec

from interlace.passes import Schedule1F1B
from interlace.planning.drafts import Judged, fitting
from interlace.planning.outcome import Outcome, StageStep, Step
from interlace.report.outcome import outcome_sentence
from interlace.report.screen import step_table


def judged(step_ns: int | None, joules: float, peak_bytes: int = 1) -> Judged:
    return Judged(Schedule1F1B(), (), None, (), step_ns, peak_bytes, joules)


def test_of_equal_times_the_least_energy_comes_first_and_a_shorter_step_before_both() -> None:
    dear, cheap, slow, large = judged(5, 9.0), judged(5, 7.0), judged(6, 1.0), judged(4, 1.0, 3)
    assert fitting([dear, slow, cheap, judged(None, 0.0), large], 2) == [cheap, dear, slow]
    assert fitting([dear, judged(5, 9.0)], 2)[0] is dear, "of these the order stays"


STAGE = StageStep(0, (0, 1), 200_000_000, 0, 0, 0, 0, 1 << 30, 0, 148.6, 1890)
STEP = Step(250_000_000, 0, 0, 1 << 30, (STAGE,), 297.2)


def test_sentence_and_screen_tell_energy_and_clock_and_nothing_where_they_are_not_known() -> None:
    told = Outcome(STEP, "h100", msgspec.structs.replace(STEP, joules=310.0))
    assert "energy 310.0 -> 297.2 J (all ranks), clock 1890 -> 1890 MHz (slowest rank)" in outcome_sentence(told)
    head, row, _ = step_table(told).splitlines()
    assert head.split()[-4:] == ["J", "a", "rank", "MHz"]
    assert row.split()[-2:] == ["148.6", "1890"]
    bare = msgspec.structs.replace(STEP, joules=0.0, stages=(msgspec.structs.replace(STAGE, joules=0.0, mean_mhz=0),))
    assert "energy" not in outcome_sentence(Outcome(bare, "cpu", bare))
    assert "MHz" not in step_table(Outcome(bare, "cpu", bare))
