"""The first training steps as measured, compared with the predicted step, and the results of a trial of several plans."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from interlace.planning.trial import Result, Told
from interlace.units import ms, ms_figure

WARM_UP = 3
"""Number of first steps that do not count, because caches of the executor and of the allocator still fill."""
COUNTED = 5
APART = 0.1
"""If the measured step differs from the predicted one by more than this share of it, the log says so and gives advice."""


@dataclass(slots=True)
class Measured:
    """Wall times of a rank's first training steps.

    Attributes:
        device: Name of the rank's device, as in device profiles; empty if unknown.
        profile_device: Name of the device that the plan's profile was measured on.
        took_ns: Time of each step, at most `WARM_UP + COUNTED` of them: from the return of the previous step to its own. The first step,
            the first that counts and a step after one of another plan are timed from their own start. The host waits for the device before
            the steps that count and after them.
        returned_ns: When the last of them returned; 0 if the next one is timed from its own start.
        trial: State or result of a trial of plans; None without a trial.
        launches: Number of steps that were launched as a captured graph.
        energy_mj: The energy counter of the rank's device in millijoules, before the steps that count and after them; empty if the driver
            has none.
        run_joules: Energy per step that counts, of the devices of all ranks; 0 if one of them was not read.
        tokens: Tokens per step of all ranks together; 0 if not known.
        late_fetches: Number of fetched values besides the losses because of which all outputs are read at the end of the step; else 0.
    """

    device: str = ""
    profile_device: str = ""
    took_ns: list[int] = field(default_factory=list)
    trial: Told | None = None
    launches: int = 0
    energy_mj: list[int] = field(default_factory=list)
    run_joules: float = 0.0
    tokens: int = 0
    late_fetches: int = 0
    returned_ns: int = 0

    def returned(self, start_ns: int, end_ns: int) -> None:
        """Record when a step began and returned; if the host runs ahead, it returns early."""
        self.took_ns.append(end_ns - (self.returned_ns or start_ns))
        self.returned_ns = 0 if self.is_edge else end_ns

    @property
    def joules(self) -> float | None:
        """Energy per step that counts, of the rank's device; None if it was not read."""
        return (self.energy_mj[1] - self.energy_mj[0]) / 1e3 / COUNTED if len(self.energy_mj) == 2 else None

    @property
    def is_edge(self) -> bool:
        """Whether the steps that count are about to begin, or have just ended, which is when the energy counter is read."""
        return len(self.took_ns) in (WARM_UP, WARM_UP + COUNTED)

    @property
    def tokens_per_joule(self) -> float | None:
        """Tokens per joule over all ranks, in the steps that count; None if tokens or a device's energy are not known."""
        return self.tokens / self.run_joules if self.tokens and self.run_joules else None

    def late_line(self) -> str:
        """Line for the log about fetched values that keep the host from running ahead.

        >>> Measured(late_fetches=2).late_line()
        '2 value(s) are fetched besides the losses: all outputs are read at the end of the step, and the next is prepared only then'
        """
        return (
            f"{self.late_fetches} value(s) are fetched besides the losses: all outputs are read at the end of the step, "
            "and the next is prepared only then"
        )

    def energy_line(self, predicted: float, predicted_run: float = 0.0) -> str:
        """Line for the log: the measured joules of a step next to the predicted ones of this rank and of all ranks (0: not known), and
        tokens per joule; empty if nothing was measured.

        >>> Measured(energy_mj=[1_000_000, 1_750_000]).energy_line(148.6)
        "this rank's device: 150.0 J a step, predicted 148.6 J (measured +0.9 %)"
        >>> Measured(energy_mj=[1_000_000, 1_750_000], run_joules=320.0, tokens=8192).energy_line(148.6, 300.0).partition("; ")[2]
        'all devices: 320.0 J a step, predicted 300.0 J (measured +6.7 %); 8192 tokens a step, 25.60 tokens per joule, predicted 27.31'
        """
        if not self.joules:
            return ""
        if self.is_other_device:
            predicted = predicted_run = 0.0
        parts = [f"this rank's device: {_joules(self.joules, predicted)}"]
        parts += [f"all devices: {_joules(self.run_joules, predicted_run)}"] if self.run_joules else []
        if self.tokens_per_joule:
            beside = f", predicted {self.tokens / predicted_run:.2f}" if predicted_run else ""
            parts.append(f"{self.tokens} tokens a step, {self.tokens_per_joule:.2f} tokens per joule{beside}")
        return "; ".join(parts)

    @property
    def is_open(self) -> bool:
        """Whether the next step is to be measured too."""
        return len(self.took_ns) < WARM_UP + COUNTED

    @property
    def is_last(self) -> bool:
        """Whether the step that runs is the last to be measured."""
        return len(self.took_ns) == WARM_UP + COUNTED - 1

    @property
    def step_ns(self) -> int | None:
        """Mean of the steps that count; None until all have run."""
        return None if self.is_open else int(statistics.fmean(self.took_ns[WARM_UP:]))

    @property
    def is_other_device(self) -> bool:
        """Whether the profile is known to be of another device, so that its predictions are not compared with these steps."""
        return bool(self.device) and self.device.casefold() != self.profile_device.casefold()

    def clause(self) -> str:
        """Clause for the sentence about the plan; empty until all steps have run.

        >>> Measured("NVIDIA H200", "NVIDIA H200", [9, 9, 9, 5, 5, 5, 5, 5]).clause()
        'measured 0.000005 ms, mean of 5 steps'
        """
        if self.step_ns is None:
            return ""
        other = f" on {self.device}, another device than the profile's" if self.is_other_device else ""
        return f"measured {ms(self.step_ns)}{other}, mean of {COUNTED} steps"

    def beside(self, predicted_ns: int | None, profile: str) -> str:
        """Line for the log: the measured step next to the predicted one (None if no whole step was simulated), with advice if they differ
        by more than `APART`; empty until all steps have run.

        >>> print(Measured("NVIDIA H200", "NVIDIA H200", [90, 80, 70, 50, 50, 51, 52, 52]).beside(50, "h200"))
        measured 0.000051 ms a step (mean of steps 4 to 8), predicted 0.000050 ms (profile h200): measured +2.0 %
        """
        if self.step_ns is None:
            return ""
        found = f"measured {ms(self.step_ns)} a step (mean of steps {WARM_UP + 1} to {WARM_UP + COUNTED})"
        if not predicted_ns:
            return f"{found}; no whole step was simulated to compare it with"
        if self.is_other_device:
            return (
                f"{found} on {self.device}; the {ms_figure(predicted_ns)} ms predicted are for another device, {self.profile_device} "
                f"(profile {profile}), so the two are not compared"
            )
        off = self.step_ns / predicted_ns - 1
        line = f"{found}, predicted {ms(predicted_ns)} (profile {profile}): measured {100 * off:+.1f} %"
        return line if abs(off) <= APART else f"{line}, more than a tenth apart; {self._advice()}"

    def _advice(self) -> str:
        same = "" if self.device else f"if this device is {self.profile_device}, "
        return (
            f"{same}`interlace calibrate -o my-device.json` measures this machine, and `device: my-device.json` plans with it; if they "
            "still differ, look for other work on the device or its host"
        )


def _joules(measured: float, predicted: float) -> str:
    beside = f", predicted {predicted:.1f} J (measured {100 * (measured / predicted - 1):+.1f} %)" if predicted else ""
    return f"{measured:.1f} J a step{beside}"


def trial_lines(told: Told | None) -> list[str]:
    """A line with the decision, or the progress, and one for each plan; none without a trial."""
    if told is None:
        return []
    if told.known:
        head = f"plans measured: {told.taken} was the fastest in an earlier run ({told.known}); delete that file to try again"
    elif told.taken:
        head = f"plans measured in {told.steps} steps of this run: {told.taken} is taken"
    else:
        head = f"plans are being measured, {told.steps} steps so far"
    return [head, *(f"  {each}" for each in map(_line, told.results))]


def _line(each: Result) -> str:
    if each.fault:
        return f"{each.name}: dropped: {each.fault}"
    predicted = f", predicted {ms(each.predicted_ns)}" if each.predicted_ns else ""
    built = f"; built in {each.build_ns / 1e9:.1f} s" if each.build_ns else ""
    held = f", {each.device_bytes / (1 << 20):.0f} MiB more of device memory" if each.device_bytes else ""
    if not each.steps:
        return f"{each.name}: no step counted yet{predicted}{built}"
    return f"{each.name}: {ms(each.median_ns)} a step, half of {each.steps} steps within {ms(each.spread_ns)}{predicted}{built}{held}"
