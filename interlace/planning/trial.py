"""A trial of plans on a run's own training steps: which plan runs the next step, and which one is kept in the end. No Paddle here.

All plans give the same bits, so a step that tries one is a step of training like any other. Two plans alternate in turns of a few steps;
the faster one then competes with the next plan, and so on. Thus no more than two plans are in memory at a time, and drift of the machine
affects both equally. Every rank does this bookkeeping from the same times, and so comes to the same decision.
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
"""Steps of a turn: skipped at the start of a plan's first turn (the executor builds it, allocators fill), skipped in later turns (caches),
and counted after that."""
TURNS, MOST_TURNS = 3, 6
"""Turns that each of two plans gets: at least, and at most while the difference is not significant."""
CLEAR = 2.0
"""A plan counts as faster if the difference of medians exceeds this many standard errors."""
MEDIAN_ERROR = 0.93
"""Standard error of a median, in interquartile ranges divided by the square root of the count (normal distribution)."""
WINDOW = 100
"""Steps of a window of `Watch`."""
SLOWER, SLOW_WINDOWS = 1.15, 2
"""A plan has become slow if this many windows in a row take longer than its first window by this factor."""
RARELY = 10
"""Number of windows after a decision before plans may be tried again; it doubles each time they are."""


class Contender(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that may be tried.

    Attributes:
        name: Its name in reports.
        options: Changes to the configuration: pass (as options spell it) -> its options, and `memory_budget` as text; None for Paddle's
            baseline.
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
        median_ns, spread_ns: Median and interquartile range of these steps' times, each on its slowest rank.
        predicted_ns: The simulated step; 0 if there is none.
        build_ns: Time of planning, proving and lowering on the slowest rank; 0 if it was not built for the trial.
        device_bytes: Increase of the memory that the device allocator holds, after its first turn; 0 if not known.
        fault: Why it was dropped; empty if it was not.
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
    """The results of one contender so far: times of counted steps, each on its slowest rank, and the other fields of `Result`."""

    contender: Contender
    took_ns: list[int] = field(default_factory=list)
    predicted_ns: int = 0
    build_ns: int = 0
    device_bytes: int = 0
    fault: str = ""
    has_run: bool = False

    def result(self) -> Result:
        """The summary."""
        median_ns, spread_ns = middle(self.took_ns) if self.took_ns else (0, 0)
        costs = self.predicted_ns, self.build_ns, self.device_bytes
        return Result(self.contender.name, len(self.took_ns), median_ns, spread_ns, *costs, self.fault)


class Trial:
    """The state of a trial, equal on all ranks.

    Args:
        contenders: In the order in which they are tried. The first to beat is Paddle's baseline if it is among them, else the first one.

    Attributes:
        now: The plan of the next step.
        taken: The plan that was chosen; None until then.
        steps: Number of steps since the trial began.
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
        """The account of the plan of the next step."""
        return self.accounts[self.now.name]

    @property
    def held(self) -> list[Contender]:
        """The plans in use: the two that compete, or the one that was chosen."""
        return [self.taken] if self.taken else [each for each in (self.holder, self.rival) if each is not None]

    def took(self, dur_ns: int) -> bool:
        """Count a step of the plan `now` on this rank; returns whether the turn is over, so that ranks must exchange their times."""
        self.steps += 1
        self.account.has_run = True
        self._left -= 1
        if self._left < COUNTED:
            self._mine.append(dur_ns)
        return self._left == 0

    def propose(self, more: Sequence[Contender]) -> None:
        """Add these plans to the end of the queue."""
        for each in more:
            self.accounts[each.name] = Account(each)
            self.waiting.append(each)

    def mine(self) -> list[int]:
        """Times, in nanoseconds, of this rank's counted steps in the turn that is over."""
        return self._mine

    def turn(self, by_rank: Sequence[Sequence[int]]) -> None:
        """End a turn, given the result of `mine` on every rank; afterwards `now` is the next plan, and `taken` the decision, if any."""
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
        """Drop the plan `now`, which cannot run. The trial goes on with the others; if none is left, Paddle's baseline is chosen."""
        self.account.fault = fault
        other = self.rival if self.now is self.holder else self.holder
        if other is None:
            other = self.waiting.pop(0) if self.waiting else PADDLES
        self.accounts.setdefault(other.name, Account(other))
        self._next_pair(other)

    def results(self) -> list[Result]:
        """The result of every plan that was tried or dropped so far."""
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
    """Detects that the chosen plan becomes slow later, from the times between the starts of steps, so that nothing waits for the device.

    Every rank has one, gets the same medians, and so comes to the same decision.
    """

    def __init__(self) -> None:
        self.rest = RARELY
        self.restart()

    def restart(self) -> None:
        """Start again, with another plan."""
        self._took_ns: list[int] = []
        self._last_ns = self._windows = self._slow = self.before_ns = self.now_ns = 0

    def starts(self, at_ns: int) -> bool:
        """Note that a step starts; returns whether a window is over, so that ranks must exchange their medians."""
        if self._last_ns:
            self._took_ns.append(at_ns - self._last_ns)
        self._last_ns = at_ns
        return len(self._took_ns) == WINDOW

    def mine(self) -> int:
        """Median step, in nanoseconds, of this rank's window that is over."""
        return int(statistics.median(self._took_ns))

    def turn(self, by_rank: Sequence[int]) -> bool:
        """End a window, given the result of `mine` on every rank; returns whether plans should be tried again.

        Afterwards `before_ns` is the median step of the first window and `now_ns` that of this one, each on the slowest rank.
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
    """Which of two plans is significantly faster: 1 for the rival, -1 for the holder, 0 for neither.

    >>> compare([100, 101, 102, 103], [80, 81, 82, 83]), compare([100, 140, 90, 130], [99, 139, 91, 129])
    (1, 0)
    """
    (mine, my_spread), (other, other_spread) = middle(holder_ns), middle(rival_ns)
    error = MEDIAN_ERROR * math.hypot(my_spread / math.sqrt(len(holder_ns)), other_spread / math.sqrt(len(rival_ns)))
    if abs(mine - other) <= CLEAR * error:
        return 0
    return 1 if other < mine else -1


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trial, for reports.

    Attributes:
        taken: Name of the chosen plan; empty while the trial runs.
        steps: Number of steps until the decision, or so far.
        known: Path of the file with an earlier run's choice, if that was used instead; else empty.
    """

    results: tuple[Result, ...] = ()
    taken: str = ""
    steps: int = 0
    known: str = ""


def told_of(trial: Trial, known: str = "") -> Told:
    """A trial in its present state, for reports."""
    return Told(tuple(trial.results()), trial.taken.name if trial.taken else "", trial.steps, known)


def options_of(options: Mapping[str, Mapping[str, Any] | str]) -> str:
    """Options as one short line.

    >>> options_of({"schedule_1f1b": {"interleave": "mixed"}, "memory_budget": "+8GB"})
    'schedule_1f1b.interleave=mixed, memory_budget=+8GB'
    """
    said = []
    for name, given in options.items():
        said += [f"{name}={given}"] if isinstance(given, str) else [f"{name}.{key}={value}" for key, value in given.items()]
    return ", ".join(said)
