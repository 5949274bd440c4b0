"""The interface of cost models, tables of a program's costs, and a model with given times for tests and experiments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from interlace.cost_model.interference import WAIT, BothWays, Stretch
from interlace.cost_model.profile import Power
from interlace.cost_model.work import Values, copy_direction, is_weight_gradient, work_of
from interlace.errors import ConfigError
from interlace.ir.kinds import is_copy, is_p2p
from interlace.ir.operation_kinds import ATTENTIONS, COLLECTIVES, GEMMS, forward_kind, memory_family
from interlace.ir.per_ops import once_per_ops
from interlace.ir.program import Group, Op, Program

How = Literal["exact", "interpolated", "extrapolated", "proxy", "roofline", "unknown", "free", "given"]
HOWS: tuple[How, ...] = ("exact", "interpolated", "extrapolated", "proxy", "roofline", "unknown", "free", "given")
"""How a time was determined, most reliable first: `exact`, a sample of this shape; `interpolated` between measured sizes of the kind and
dtype; `extrapolated` beyond them; `proxy`, samples of another kind, dtype or group size; `roofline`, rates of the device; `unknown`, at
best a lower bound. `free`: nothing is launched; `given`: by `GivenCosts`."""
MEASURED: tuple[How, ...] = ("exact", "interpolated", "free", "given")
"""Ways that rest on measurements of the very kind in question, or need none."""
LARGEST = 4
"""Number of kinds that a summary names."""
WORTH_PADDING = 0.005
"""Share of a step's device time from which on a summary says what padding would save."""
Groups = Mapping[int, Group]


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """A duration and its reliability.

    Attributes:
        dur_ns: Duration alone on the device; 0 if not even the shapes are known (`how` is then `unknown`).
        how: The least reliable of the ways in which the times of the operation's kernels were determined.
        rel_error: Expected relative error: 0.1 means that 10 % more or less is usual.
        detail: One line for reports.
        unaligned_ns: How much of the duration rows of multiples of 16 bytes would save (see `unaligned.py`).
    """

    dur_ns: int
    how: How
    rel_error: float
    detail: str = ""
    unaligned_ns: int = 0


class Draw(NamedTuple):
    """The power that an operation draws while it runs alone at the highest clock.

    Attributes:
        milliwatts: Above the device's static power.
        clock_share: Part of its duration that is inversely proportional to the clock.
        own_mhz: Clock at which its duration was measured; it never runs at a higher one. 0: the highest clock of the device.
    """

    milliwatts: int
    clock_share: float
    own_mhz: int = 0


class Row(NamedTuple):
    """One operation of a cost table; `runs` is how many times a step issues it. The other fields are as in `Estimate`."""

    op: int
    kind: str
    layer: str
    category: str
    dur_ns: int
    how: How
    rel_error: float
    detail: str
    runs: int = 1
    unaligned_ns: int = 0

    @property
    def step_ns(self) -> int:
        """Its total time in a step, in nanoseconds."""
        return self.runs * self.dur_ns


class Costs(ABC):
    """Times of operations alone and beside each other. Answers are deterministic. With `is_launched`, one call launches each step as a
    graph (a CUDA graph), so that the host's time in a step is 0."""

    is_launched: bool = False

    @abstractmethod
    def op_time(self, op: Op, values: Values, groups: Groups) -> Estimate:
        """Time of one operation alone on its device."""

    @abstractmethod
    def stretch_between(self, category: str, beside: str) -> Stretch:
        """How much two operations of these categories slow each other while both run."""

    @abstractmethod
    def host_ns(self, op: Op) -> int:
        """Nanoseconds that the host spends on issuing the operation."""

    @abstractmethod
    def job_ns(self) -> int:
        """Nanoseconds that the host spends on one job beyond its operations."""

    def between_steps_ns(self) -> int:
        """Nanoseconds of the host between the last operation of a step and the first of the next; 0 if not known."""
        return 0

    def for_world(self, world: int) -> Costs:
        """This model for a training run on `world` devices: those of one host copy at the same time and share the host's memory."""
        return self

    def host_of(self, rank: int) -> int:
        """Number of the host whose memory and links a rank's device shares with others; all ranks are on one host by default."""
        return 0

    def both_directions(self) -> Mapping[int, BothWays]:
        """How much copies of both directions slow each other down, by the number of devices of a host that copy in both directions at the
        same time, from 1 on; the last one, which `stretch_between` gives, stands for all larger numbers. Empty if it does not depend on
        the number."""
        return {}

    def issued(self) -> Costs:
        """This model for steps in which the host issues each operation (not `is_launched`)."""
        return self

    def power(self) -> Power | None:
        """The device's power limit and what its kernels draw; None if not known."""
        return None

    def draw(self, op: Op, values: Values, groups: Groups) -> Draw:
        """What one operation draws; zero if the device's power is not known."""
        return Draw(0, 0.0)

    def category(self, op: Op, values: Values, groups: Groups) -> str:
        """Category by which interference is looked up: `gemm`, `gemm:dw`, `attention`, `attention_grad`, `memory:<kind>`,
        `comm:<kind>@<ranks>`, `p2p`, `copy:d2h`, `copy:h2d`, `free` or `unknown`."""
        base, _ = forward_kind(op.kind)
        if is_p2p(op):
            return "p2p"
        if (meeting := COLLECTIVES.get(op.kind)) and not meeting.uncounted:
            ranks = len(groups[op.group].ranks) if op.group in groups else 0
            return f"comm:{meeting.traffic}@{ranks}" if ranks else f"comm:{meeting.traffic}"
        if is_copy(op) and (way := copy_direction(op, values)) != "d2d":
            return f"copy:{way}"
        work = work_of(op, values)
        if not work.parts:
            return "unknown" if work.unknown else "free"
        if base in GEMMS:
            return "gemm:dw" if is_weight_gradient(op) else "gemm"
        if base in ATTENTIONS:
            return work.parts[0].kind
        return f"memory:{work.parts[0].kind.removesuffix('_mixed')}" if memory_family(op.kind) or is_copy(op) else "unknown"

    def stretch_beside_wait(self, op: Op, values: Values, groups: Groups) -> float:
        """How many times as long an operation takes beside a communication that waits for its peers."""
        return self.stretch_between(self.category(op, values, groups), WAIT).op

    def stretch(self, op: Op, beside: Op, values: Values, groups: Groups) -> tuple[float, float]:
        """How many times as long each of two operations takes while both run: `(factor of op, factor of beside)`."""
        found = self.stretch_between(self.category(op, values, groups), self.category(beside, values, groups))
        return found.op, found.beside

    def table(self, program: Program) -> list[Row]:
        """Every operation with its time, in program order."""
        values, groups = tables_of(program)
        runs, costs = runs_of(program), self.for_world(program.world)
        rows = []
        for op in program.ops:
            category, found = self.category(op, values, groups), costs.op_time(op, values, groups)
            times = found.dur_ns, found.how, found.rel_error, found.detail, runs[op.id], found.unaligned_ns
            rows.append(Row(op.id, op.kind, op.layer, category, *times))
        return rows


def mean_by_time(found: Sequence[tuple[int, float]], of_none: float = 0.0) -> float:
    """The mean of the figures in `(time, figure)` pairs, weighted by the times; `of_none` if these sum to 0."""
    total = sum(dur_ns for dur_ns, _ in found)
    return sum(dur_ns * figure for dur_ns, figure in found) / total if total else of_none


def tables_of(program: Program) -> tuple[Values, Groups]:
    """Values and groups of a program by id, as cost models take them."""
    return _values(program), {group.id: group for group in program.groups}


_values: Callable[[Program], Values] = once_per_ops(lambda program: {value.id: value for value in program.values})


def runs_of(program: Program) -> Counter[int]:
    """Operation id -> how many times a step issues it: counted in the jobs, or, without jobs, once per micro-batch for forward and backward
    and once for the rest."""
    if program.jobs:
        return Counter(op_id for job in program.jobs for op_id, _ in job.items)
    batches = max(1, program.pipeline.num_micro_batches)
    return Counter({op.id: batches if op.role in ("forward", "backward") else 1 for op in program.ops})


def shares_by_how(rows: Sequence[Row]) -> dict[How, float]:
    """Share of a step's device time, summed over all operations, by how it was determined; most reliable first.

    >>> rows = [Row(0, "add", "", "", 30, "exact", 0.0, "", 2), Row(1, "cast", "", "", 40, "proxy", 0.4, "")]
    >>> shares_by_how(rows)
    {'exact': 0.6, 'proxy': 0.4}
    """
    time: Counter[How] = Counter()
    for row in rows:
        time[row.how] += row.step_ns
    return {how: time[how] / time.total() for how in HOWS if time[how]}


def largest_unmeasured(rows: Sequence[Row]) -> list[tuple[str, How, float]]:
    """Kinds without measurements of their own, with how their times were determined and their shares of a step's device time, largest
    first."""
    time: Counter[tuple[str, How]] = Counter()
    for row in rows:
        if row.how not in MEASURED:
            time[row.kind, row.how] += row.step_ns
    total = sum(row.step_ns for row in rows)
    found = sorted(time.items(), key=lambda each: (-each[1], each[0]))
    return [(kind, how, spent / total) for (kind, how), spent in found if spent]


def expected_error(rows: Sequence[Row]) -> float:
    """Mean of the operations' expected relative errors, weighted by their time in a step.

    >>> expected_error([Row(0, "add", "", "", 30, "exact", 0.0, "", 2), Row(1, "cast", "", "", 40, "proxy", 0.5, "")])
    0.2
    """
    return mean_by_time([(row.step_ns, row.rel_error) for row in rows])


def trust_text(rows: Sequence[Row], whose: str = "") -> str:
    """Lines for reports: shares of a step's device time by how it was determined, the largest kinds without measurements of their own, what
    padding would save, and operations with neither a measurement nor a rule."""
    total = sum(row.step_ns for row in rows)
    shares = ", ".join(f"{how} {share:.0%}" for how, share in shares_by_how(rows).items())
    lines = [
        f"device time{whose} {total / 1e6:.3f} ms a step, one operation after another: {shares or 'none'}; "
        f"one operation's time may be off by {expected_error(rows):.0%}"
    ]
    largest = largest_unmeasured(rows)
    if largest:
        names = ", ".join(f"{kind} {share:.1%} ({how})" for kind, how, share in largest[:LARGEST])
        more = f", {len(largest) - LARGEST} more" if len(largest) > LARGEST else ""
        lines.append(f"  largest without a measurement of their own: {names}{more}")
    lost = Counter[str]()
    for row in rows:
        lost[row.layer] += row.runs * row.unaligned_ns
    if lost.total() >= WORTH_PADDING * total > 0:
        names = ", ".join(f"{layer or 'no layer'} {ns / 1e6:.3f} ms{whose}" for layer, ns in lost.most_common(LARGEST) if ns)
        told = "products on rows that are no multiple of 16 bytes: padded sizes, such as that of a vocabulary, would save"
        lines.append(f"  {told} {lost.total() / total:.1%} of the device time ({names})")
    if unknown := Counter(row.kind for row in rows if row.how == "unknown"):
        names = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
        lines.append(f"  no measurement and no rule for: {names}; their times are lower bounds from memory traffic, or 0")
    return "\n".join(lines)


def explain_rows(rows: Sequence[Row]) -> str:
    """Totals of a cost table as text, `how  ops  time  share  expected error`, followed by `trust_text`."""
    shares = shares_by_how(rows)
    lines = [f"{len(rows)} operations", trust_text(rows)]
    for how in HOWS:
        found = [row for row in rows if row.how == how]
        time = sum(row.step_ns for row in found)
        if found:
            share = f"{time / 1e6:10.3f} ms {shares.get(how, 0.0):6.1%}  expected error {expected_error(found):.0%}"
            lines.append(f"  {how:13s}{len(found):6d} ops {share if how != 'free' else ''}".rstrip())
    return "\n".join(lines)


class GivenCosts(Costs):
    """A cost model with given times, in nanoseconds.

    Keys of `table` are tried from the most to the least specific: Paddle's name (`pd_op.add_`), the kind (`all_reduce`),
    the category (`gemm:dw`, `comm:all_reduce@2`, `comm:all_reduce`), its first word (`comm`), `default`. Operations that
    launch nothing take 0 unless their name or kind is given. Keys of `stretch` are pairs of categories or their first words. Pairs
    whose first member holds up the second (`Stretch.holds`) are in `holds` as well.

    >>> op = Op(0, "pd_op.matmul", (), (), "forward")
    >>> GivenCosts({"gemm": 5, "default": 1}).op_time(op, {}, {}).dur_ns
    5
    """

    def __init__(
        self,
        table: Mapping[str, int],
        stretch: Mapping[tuple[str, str], tuple[float, float]] | None = None,
        host_ns: int = 0,
        job_ns: int = 0,
        between_steps_ns: int = 0,
        holds: Collection[tuple[str, str]] = (),
    ) -> None:
        for key, dur_ns in table.items():
            if not isinstance(dur_ns, int) or dur_ns < 0:
                raise ConfigError(f"cost table: {key!r} is {dur_ns!r}, expected a whole number of nanoseconds >= 0")
        self._table, self._stretch, self._holds = dict(table), dict(stretch or {}), frozenset(holds)
        self._host_ns, self._job_ns, self._between_steps_ns = host_ns, job_ns, between_steps_ns

    def op_time(self, op: Op, values: Values, groups: Groups) -> Estimate:
        """The table's entry. Raises ConfigError if none fits and there is no `default`."""
        category = self.category(op, values, groups)
        names = (op.name, op.kind) if category == "free" else (op.name, op.kind, *_widening(category), "default")
        for name in names:
            if name in self._table:
                return Estimate(self._table[name], "given", 0.0, name)
        if category == "free":
            return Estimate(0, "free", 0.0)
        raise ConfigError(f"cost table has no entry for #{op.id} {op.name}: expected one of {', '.join(names)}")

    def category(self, op: Op, values: Values, groups: Groups) -> str:
        """As in `Costs`; a GEMM needs no shapes."""
        if forward_kind(op.kind)[0] in GEMMS:
            return "gemm:dw" if is_weight_gradient(op) else "gemm"
        return super().category(op, values, groups)

    def stretch_between(self, category: str, beside: str) -> Stretch:
        """The factors given for the pair in either order, else 1 and 1."""
        for a in _widening(category):
            for b in _widening(beside):
                if (a, b) in self._stretch:
                    return Stretch(*self._stretch[a, b], "given", f"{a} beside {b}", (a, b) in self._holds)
                if (b, a) in self._stretch:
                    return Stretch(*self._stretch[b, a][::-1], "given", f"{b} beside {a}", (b, a) in self._holds)
        return Stretch(1.0, 1.0, "given", "no entry")

    def host_ns(self, op: Op) -> int:
        """The same for every operation."""
        return self._host_ns

    def job_ns(self) -> int:
        """As given."""
        return self._job_ns

    def between_steps_ns(self) -> int:
        """As given."""
        return self._between_steps_ns


def _widening(category: str) -> tuple[str, ...]:
    """A category from specific to general: `comm:all_reduce@2` -> itself, `comm:all_reduce`, `comm`."""
    names = (category, category.partition("@")[0], category.partition(":")[0])
    return tuple(dict.fromkeys(names))
