"""The outcome of a plan in a sentence, and what an even split of computation over the stages would gain."""

from __future__ import annotations

from interlace.planning.limits import room_of
from interlace.planning.outcome import OtherLimit, Outcome, Step
from interlace.units import ms, ms_figure, ranges, size

SPARE_NS, LESS_NS = 10_000_000, 1_000_000
"""A plan whose hosts are so far ahead at the end of a step bears scripts that take three times as long between steps as the profiles of
H100 and H200 expect (5 ms). Of others it is said how far they are ahead, if that is less than with the other plan by at least `LESS_NS`."""

UNBALANCED = 0.02
"""Stages are reported as unbalanced if an even split would shorten the step by at least this share."""


def outcome_sentence(outcome: Outcome, measured: str = "", name: str = "This plan") -> str:
    """The outcome in one sentence, followed by what is known about errors of predictions and other memory limits. `measured` is a clause
    with the measured step, empty until steps have run; `name` is the subject if there is no plan to compare with.

    >>> one, other = Step(300_000_000, 9_000_000, 60_000_000, 3 << 30), Step(250_000_000, 2_000_000, 30_000_000, 7 << 29)
    >>> outcome_sentence(Outcome(other, "h200", one))
    "Paddle's baseline takes 300.000 ms a step, this plan 250.000 ms (-16.7 %, simulated with the profile h200): exposed communication \
9.000 -> 2.000 ms, bubble 60.000 -> 30.000 ms (means over ranks), peak memory 3.000 GiB -> 3.500 GiB (fullest rank)."
    """
    new, old = outcome.plan, outcome.before
    how = f"simulated with the profile {outcome.profile}" + (f"; {measured}" if measured else "")
    if old is None:
        return (
            f"{name} takes {ms_figure(new.step_ns)} ms a step ({how}): exposed communication {ms_figure(new.exposed_ns)} "
            f"ms, bubble {ms_figure(new.bubble_ns)} ms (means over ranks), peak memory {size(new.peak_bytes)} (fullest "
            f"rank){_pools(outcome)}{_energy(new)}.{_memory(outcome)}"
        )
    return (
        f"{outcome.against[0].upper()}{outcome.against[1:]} takes {ms_figure(old.step_ns)} ms a step, this plan "
        f"{ms_figure(new.step_ns)} ms ({outcome.change():+.1f} %, {how}): exposed communication {ms_figure(old.exposed_ns)} -> "
        f"{ms_figure(new.exposed_ns)} ms, bubble {ms_figure(old.bubble_ns)} -> {ms_figure(new.bubble_ns)} ms (means over ranks), "
        f"peak memory {size(old.peak_bytes)} -> {size(new.peak_bytes)} (fullest rank){_pools(outcome)}{_energy(old, new)}."
        f"{f' The baseline is simulated only: {outcome.refusal}.' if outcome.refusal else ''}{_caution(outcome)}{_spare(outcome)}"
        f"{_memory(outcome)}"
    )


def _spare(outcome: Outcome) -> str:
    """What a script that takes long between steps costs with the plan and not with the one compared with; empty if nothing.

    >>> _spare(Outcome(Step(250_000_000, 0, 0, 0, spare_ns=1_500_000), "h200", Step(300_000_000, 0, 0, 0, spare_ns=60_000_000)))
    " This plan's hosts are 1.500 ms ahead at the end of a step (with Paddle's baseline 60.000 ms): if the script takes more than that \
between steps beyond the profile's `host.between_steps_ns`, the rest makes this plan's steps longer."
    """
    new, old = outcome.plan.spare_ns, outcome.before.spare_ns if outcome.before else None
    if new is None or old is None or new >= min(SPARE_NS, old - LESS_NS):
        return ""
    return (
        f" This plan's hosts are {ms(new)} ahead at the end of a step (with {outcome.against} {ms(old)}): if the script takes more than "
        "that between steps beyond the profile's `host.between_steps_ns`, the rest makes this plan's steps longer."
    )


def _pools(outcome: Outcome) -> str:
    """What allocator pools take; empty if that is not known.

    >>> from interlace.planning.outcome import Pools
    >>> _pools(Outcome(Step(1, 0, 0, 0), "h200", Step(2, 0, 0, 0), pools=Pools(7 << 29, 3 << 30)))
    ', with free blocks in allocator pools 3.000 GiB -> 3.500 GiB'
    >>> _pools(Outcome(Step(1, 0, 0, 0), "h200", pools=Pools(7 << 29, 0, 15 << 28)))
    ', with free blocks in allocator pools 3.500 GiB (limit 3.750 GiB)'
    """
    found = outcome.pools
    if found is None:
        return ""
    limit = f" (limit {size(found.limit_bytes)})" if found.limit_bytes else ""
    before = f"{size(found.before_bytes)} -> " if outcome.before else ""
    return f", with free blocks in allocator pools {before}{size(found.plan_bytes)}{limit}"


def _energy(*steps: Step) -> str:
    """Energy of a step and the clock of the slowest rank; empty if the profile has no power.

    >>> from interlace.planning.outcome import StageStep
    >>> stage = StageStep(0, (0, 1), *[0] * 7, joules=150.0, mean_mhz=1890)
    >>> _energy(Step(250_000_000, 0, 0, 0, (stage,), 300.0))
    ', energy 300.0 J (all ranks), clock 1890 MHz (slowest rank)'
    """
    if not all(step.joules for step in steps):
        return ""
    clocks = [str(min(each.mean_mhz for each in step.stages)) for step in steps]
    return f", energy {' -> '.join(f'{step.joules:.1f}' for step in steps)} J (all ranks), clock {' -> '.join(clocks)} MHz (slowest rank)"


WHOSE = {
    "baseline": "the peak of Paddle's baseline plus 1 %",
    "beyond": "the peak of Paddle's baseline plus 1 % and what is allowed beyond it",
    "budget": "the memory budget",
}
"""Origin of a memory limit (`MemoryLimit.whose`), in words."""


def _memory(outcome: Outcome) -> str:
    """The memory limit, the plan's peak, and the steps of plans within other limits, as far as they are known.

    >>> from interlace.planning.outcome import MemoryLimit
    >>> more, less = OtherLimit(11 << 30, 21 << 29, 245_000_000), OtherLimit(9 << 30, 8 << 30, 260_000_000)
    >>> _memory(Outcome(Step(250_000_000, 0, 0, 0), "h200", memory=MemoryLimit("budget", 10 << 30, 19 << 29, 0, more, less)))
    ' Its memory limit is 10.000 GiB, the memory budget; it holds 9.500 GiB at most on a GPU, however fast its host. Of the plans that \
were looked at, one within a tenth more takes 245.000 ms (-2.0 %), one within a tenth less takes 260.000 ms (+4.0 %).'
    """
    memory = outcome.memory
    if memory is None:
        return ""
    fits = memory.less is not None and memory.less.peak_bytes == memory.peak_bytes
    told = (
        f" Its memory limit is {size(memory.limit_bytes)}, {WHOSE[memory.whose]}; it holds {size(memory.peak_bytes)} at most on a GPU, "
        f"however fast its host{', so that a tenth less would do' if fits else ''}."
    )
    found = {"more": memory.more, "less": None if fits else memory.less}
    others = [_other(outcome.plan, name, other, memory.device_bytes) for name, other in found.items() if other]
    return told + (f" Of the plans that were looked at, {', '.join(others)}." if others else "")


def _other(step: Step, name: str, other: OtherLimit, device_bytes: int) -> str:
    """The step within another limit, and whether that limit is more than plans may take of the device, if its memory is known."""
    full = " (more than plans may take of the device)" if device_bytes and other.limit_bytes > room_of(device_bytes) else ""
    return f"one within a tenth {name}{full} takes {ms(other.step_ns)} ({100 * (other.step_ns / step.step_ns - 1):+.1f} %)"


def _caution(outcome: Outcome) -> str:
    """How far predictions with this profile were from measured steps and, if a gain is predicted, from measured gains; empty if not
    known."""
    found = outcome.errors
    if found is None:
        return ""
    off = f"{100 * found.step_median:.1f} % off"
    if outcome.change() >= 0:
        return f" Predicted steps of GPT and Llama were {off} the measured ones."
    return (
        f" Predicted gains of GPT and Llama were {found.gain_ratio:.2f} times the measured ones "
        f"(median of {found.gains}, {found.right_sign} with the right sign), steps {off}."
    )


def imbalance(step: Step) -> str:
    """Which stage computes more than the others, and what an even split would gain; empty if that is little (`UNBALANCED`).

    The estimate changes computation alone: the fullest stage waits as long as before, and computes the mean of all stages.

    >>> from interlace.planning.outcome import StageStep
    >>> alike = dict(exposed_ns=0, bubble_ns=0, host_ns=0, hidden_ns=0, peak_bytes=0, pinned_bytes=0)
    >>> stages = tuple(StageStep(stage=k, ranks=(k,), compute_ns=ns, **alike) for k, ns in enumerate((191_000_000, 295_000_000)))
    >>> imbalance(Step(300_000_000, 0, 0, 0, stages))
    'Stages are unbalanced: stage 1 computes 295.000 ms of a step, stage 0 191.000 ms; with 243.000 ms on each, and the waiting of \
stage 1 as it is, a step would take 248.000 ms (-17.3 %).'
    """
    compute, even_ns = _computation(step), evened_ns(step)
    if not even_ns:
        return ""
    fullest = max(compute, key=lambda stage: compute[stage])
    mean_ns = sum(compute.values()) // len(compute)
    others = [stage for stage in compute if stage != fullest]
    least, most = (ms_figure(each(compute[stage] for stage in others)) for each in (min, max))
    return (
        f"Stages are unbalanced: stage {fullest} computes {ms(compute[fullest])} of a step, stage{'s' * (len(others) > 1)} "
        f"{ranges(others)} {least if least == most else f'{least} to {most}'} ms; with {ms(mean_ns)} on each, and the waiting of "
        f"stage {fullest} as it is, a step would take {ms(even_ns)} "
        f"({100 * (even_ns / step.step_ns - 1):+.1f} %)."
    )


def evened_ns(step: Step) -> int:
    """The step in nanoseconds with the same computation on each stage, as `imbalance` estimates it; 0 if it is hardly shorter."""
    compute = _computation(step)
    saved_ns = max(compute.values()) - sum(compute.values()) // len(compute) if len(compute) > 1 else 0
    return step.step_ns - saved_ns if saved_ns and saved_ns >= UNBALANCED * step.step_ns else 0


def _computation(step: Step) -> dict[int, int]:
    """Stage -> computation of its fullest rank, in nanoseconds."""
    return {each.stage: max(other.compute_ns for other in step.stages if other.stage == each.stage) for each in step.stages}
