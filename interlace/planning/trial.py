"""A trial of plans on a run's own training steps: which plan runs the next step, and which one is taken in the end. No Paddle here.

All plans give the same bits, so a step that tries one is a step of training like any other. Two plans run in turns of a few steps; the
faster one meets the next, and so on: no more than two are held at a time, and what drifts on the machine meets both alike. Every rank
keeps this account, from the same times, and so comes to the same decision.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from interlace.planning.baseline import BASELINE

FIRST_SKIPPED, SKIPPED, COUNTED = 3, 1, 4
"""Steps of a turn: not counted in a plan's first turn (the executor builds it, allocators fill) and in later ones (caches), and counted."""
TURNS, MOST_TURNS = 3, 6
"""Turns that each of two plans has at least, and at most, where the difference is within the spread."""
CLEAR = 2.0
"""Standard errors of the difference of two medians by which a plan must be faster."""
MEDIAN_ERROR = 0.93
"""Standard error of a median: so many interquartile ranges, divided by the root of the count (normal distribution)."""
WINDOW = 100
"""Steps over which a run looks whether the plan that was taken has become slow."""
SLOWER, SLOW_WINDOWS = 1.15, 2
"""Times its first window, in so many windows in a row, that a plan has become slow."""
RARELY = 10
"""Windows after a decision in which plans are not tried again; twice as many after each further one."""


class Contender(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that may be tried.

    Attributes:
        name: How reports call it.
        options: On top of the configuration: of passes by option name, and `memory_budget` as text; None for Paddle's baseline.
    """

    name: str
    options: dict[str, dict[str, Any] | str] | None = None

    @property
    def is_paddles(self) -> bool:
        """Whether it is Paddle's baseline, which Interlace does not lower."""
        return self.options is None


PADDLES = Contender(BASELINE)


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trial found of one plan.

    Attributes:
        steps: Number of steps that count.
        median_ns, spread_ns: Of these steps, each as long as on its slowest rank; the spread is the interquartile range.
        predicted_ns: The simulated step; 0 where there is none.
        build_ns: What planning, proving and lowering took, on the slowest rank; 0 where it was not built for the trial.
        device_bytes: Device memory that the allocator held more than before, after its first turn; 0 where that is not known.
        fault: Why it was dropped; empty where it was not.
    """

    name: str
    steps: int = 0
    median_ns: int = 0
    spread_ns: int = 0
    predicted_ns: int = 0
    build_ns: int = 0
    device_bytes: int = 0
    fault: str = ""


@dataclass(slots=True)
class Account:
    """Of one contender: times of counted steps on the slowest rank, and what else is told of it."""

    contender: Contender
    took_ns: list[int] = field(default_factory=list)
    predicted_ns: int = 0
    build_ns: int = 0
    device_bytes: int = 0
    fault: str = ""
    has_run: bool = False

    def result(self) -> Result:
        """In short."""
        median_ns, spread_ns = middle(self.took_ns) if self.took_ns else (0, 0)
        costs = self.predicted_ns, self.build_ns, self.device_bytes
        return Result(self.contender.name, len(self.took_ns), median_ns, spread_ns, *costs, self.fault)


class Trial:
    """The account of a trial, equal on all ranks.

    Args:
        contenders: In the order in which they are tried. Paddle's baseline, where it is among them, is what others must beat; else the
            first.

    Attributes:
        now: The plan of the next step.
        taken: What was decided for; None until then.
        steps: Steps since the trial began.
    """

    def __init__(self, contenders: Sequence[Contender]) -> None:
        self.accounts = {each.name: Account(each) for each in contenders}
        self.waiting = list(contenders)
        self.taken: Contender | None = None
        self.steps = 0
        holder = next((each for each in contenders if each.is_paddles), contenders[0])
        self.waiting.remove(holder)
        self.holder, self.rival = holder, self.waiting.pop(0) if self.waiting else None
        self._pair: dict[str, list[int]] = {}
        self._mine: list[int] = []
        self._begin_pair()

    @property
    def account(self) -> Account:
        """Of the plan of the next step."""
        return self.accounts[self.now.name]

    @property
    def held(self) -> list[Contender]:
        """The plans that are in use: two at most."""
        return [self.taken] if self.taken else [each for each in (self.holder, self.rival) if each is not None]

    def took(self, dur_ns: int) -> bool:
        """Count a step of the plan `now` on this rank; says whether the turn is over, so that ranks have to tell their times."""
        self.steps += 1
        self.account.has_run = True
        self._left -= 1
        if self._left < COUNTED:
            self._mine.append(dur_ns)
        return self._left == 0

    def propose(self, more: Sequence[Contender]) -> None:
        """Try these plans, too, after those that are waiting."""
        for each in more:
            self.accounts[each.name] = Account(each)
            self.waiting.append(each)

    def mine(self) -> list[int]:
        """Times of this rank's counted steps in the turn that is over."""
        return self._mine

    def turn(self, by_rank: Sequence[Sequence[int]]) -> None:
        """End a turn, with the times that `mine` gives on every rank; the next plan, or the decision, is known afterwards."""
        took_ns = [max(each) for each in zip(*by_rank, strict=True)]
        self.account.took_ns += took_ns
        self._pair[self.now.name] += took_ns
        self._turns[self.now.name] += 1
        assert self.rival is not None
        if self._turns[self.holder.name] == self._turns[self.rival.name] >= TURNS:
            verdict = compare(self._pair[self.holder.name], self._pair[self.rival.name])
            if verdict or self._turns[self.holder.name] >= MOST_TURNS:
                self._next_pair(self.rival if verdict > 0 else self.holder)
                return
        self._begin_turn(self.rival if self.now is self.holder else self.holder)

    def drop(self, fault: str) -> None:
        """The plan `now` cannot run: the others go on without it, in the end Paddle's baseline."""
        self.account.fault = fault
        other = self.rival if self.now is self.holder else self.holder
        if other is None:
            other = self.waiting.pop(0) if self.waiting else PADDLES
        self.accounts.setdefault(other.name, Account(other))
        self._next_pair(other)

    def results(self) -> list[Result]:
        """Of every plan that was tried or dropped so far."""
        return [each.result() for each in self.accounts.values() if each.has_run or each.fault]

    def _next_pair(self, holder: Contender) -> None:
        self.holder = holder
        self.rival = self.waiting.pop(0) if self.waiting else None
        self._begin_pair()

    def _begin_pair(self) -> None:
        names = [each.name for each in (self.holder, self.rival) if each is not None]
        self._pair, self._turns = {name: [] for name in names}, dict.fromkeys(names, 0)
        if self.rival is None:
            self.taken = self.now = self.holder
            self._left, self._mine = 0, []
        else:
            self._begin_turn(self.rival)

    def _begin_turn(self, now: Contender) -> None:
        self.now, self._mine = now, []
        self._left = COUNTED + (SKIPPED if self.accounts[now.name].has_run else FIRST_SKIPPED)


class Watch:
    """Whether a plan that was taken becomes slow later, from the times between the starts of a run's steps: nothing waits for the device.

    Every rank keeps it, and with the same medians comes to the same decision.
    """

    def __init__(self) -> None:
        self.rest = RARELY
        self.restart()

    def restart(self) -> None:
        """Begin anew, with another plan."""
        self._took_ns: list[int] = []
        self._last_ns = self._windows = self._slow = self.before_ns = self.now_ns = 0

    def starts(self, at_ns: int) -> bool:
        """Note that a step starts; says whether a window is over, so that ranks have to tell their medians."""
        if self._last_ns:
            self._took_ns.append(at_ns - self._last_ns)
        self._last_ns = at_ns
        return len(self._took_ns) == WINDOW

    def mine(self) -> int:
        """Median of this rank's window that is over."""
        return int(statistics.median(self._took_ns))

    def turn(self, by_rank: Sequence[int]) -> bool:
        """End a window, with what `mine` gives on every rank; says whether plans are to be tried again.

        Afterwards `before_ns` has the step of the first window and `now_ns` that of this one, each as long as on the slowest rank.
        """
        self._took_ns, self._last_ns, self.now_ns = [], 0, max(by_rank)
        self._windows += 1
        if not self.before_ns:
            self.before_ns = self.now_ns
        self._slow = self._slow + 1 if self.now_ns > SLOWER * self.before_ns else 0
        if self._slow < SLOW_WINDOWS or self._windows <= self.rest:
            return False
        self.rest *= 2
        return True


def middle(took_ns: Sequence[int]) -> tuple[int, int]:
    """Median and interquartile range.

    >>> middle([5, 1, 2, 3, 4])
    (3, 2)
    """
    if len(took_ns) < 2:
        return took_ns[0], 0
    first, _, third = statistics.quantiles(took_ns, n=4, method="inclusive")
    return int(statistics.median(took_ns)), int(third - first)


def compare(holder_ns: Sequence[int], rival_ns: Sequence[int]) -> int:
    """Which of two plans is faster by more than chance gives: 1 the rival, -1 the holder, 0 neither.

    >>> compare([100, 101, 102, 103], [80, 81, 82, 83]), compare([100, 140, 90, 130], [99, 139, 91, 129])
    (1, 0)
    """
    (mine, my_spread), (other, other_spread) = middle(holder_ns), middle(rival_ns)
    error = MEDIAN_ERROR * math.hypot(my_spread / math.sqrt(len(holder_ns)), other_spread / math.sqrt(len(rival_ns)))
    if abs(mine - other) <= CLEAR * error:
        return 0
    return 1 if other < mine else -1


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trial as reports show it.

    Attributes:
        taken: The name of the one that was taken; empty while the trial runs.
        steps: Steps until it was decided, or so far.
        known: Where an earlier run's choice was found instead; empty where there was none.
    """

    results: tuple[Result, ...] = ()
    taken: str = ""
    steps: int = 0
    known: str = ""


def told_of(trial: Trial, known: str = "") -> Told:
    """A trial as it stands."""
    return Told(tuple(trial.results()), trial.taken.name if trial.taken else "", trial.steps, known)


def options_of(options: Mapping[str, Mapping[str, Any] | str]) -> str:
    """Options in a few words.

    >>> options_of({"schedule_1f1b": {"interleave": "mixed"}, "memory_budget": "+8GB"})
    'schedule_1f1b.interleave=mixed, memory_budget=+8GB'
    """
    said = []
    for name, given in options.items():
        said += [f"{name}={given}"] if isinstance(given, str) else [f"{name}.{key}={value}" for key, value in given.items()]
    return ", ".join(said)
