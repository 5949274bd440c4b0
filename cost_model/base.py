"""The interface of cost models, what a program costs by one of them, and one with given times for tests and experiments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from interlace.cost_model.interference import WAIT, Stretch
from interlace.cost_model.profile import Power
from interlace.cost_model.work import Values, copy_direction, is_weight_gradient, work_of
from interlace.errors import ConfigError
from interlace.ir.kinds import is_copy, is_p2p
from interlace.ir.operation_kinds import ATTENTIONS, COLLECTIVES, GEMMS, forward_kind, memory_family
from interlace.ir.per_ops import once_per_ops
from interlace.ir.program import Group, Op, Program

How = Literal["exact", "interpolated", "extrapolated", "proxy", "roofline", "unknown", "free", "given"]
HOWS: tuple[How, ...] = ("exact", "interpolated", "extrapolated", "proxy", "roofline", "unknown", "free", "given")
"""How a time was determined, most reliable first: a sample of this shape; between measured sizes of the kind and type; beyond them;
samples of another kind, type or group size (`proxy`); rates of the device; at best a lower bound (`unknown`)."""
MEASURED: tuple[How, ...] = ("exact", "interpolated", "free", "given")
"""Ways that rest on measurements of what is asked for."""
LARGEST = 4
"""Kinds that a summary names."""
Groups = Mapping[int, Group]


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """A duration and its reliability.

    Attributes:
        dur_ns: Alone on the device; 0 where not even the shapes are known (`how` is then `unknown`).
        how: The weakest of the ways in which the operation's kernels were found.
        rel_error: Expected relative error: with 0.1, 10 % more or less is usual.
        detail: One line for reports.
    """

    dur_ns: int
    how: How
    rel_error: float
    detail: str = ""


class Draw(NamedTuple):
    """What an operation draws above the device's static power while it runs alone at the highest clock, the part of its time there that is
    inversely proportional to the clock, and the clock at which its time was taken: it runs at no higher one (0: the highest there is)."""

    milliwatts: int
    clock_share: float
    own_mhz: int = 0


class Row(NamedTuple):
    """One operation of a cost table; `runs` is how often a step issues it."""

    op: int
    kind: str
    layer: str
    category: str
    dur_ns: int
    how: How
    rel_error: float
    detail: str
    runs: int = 1

    @property
    def step_ns(self) -> int:
        """Its time in a step."""
        return self.runs * self.dur_ns


class Costs(ABC):
    """Times of operations alone and beside each other. Answers are deterministic. With `is_launched` steps are launched as a graph (a CUDA
    graph) with one call, so that the host has no time in them."""

    is_launched: bool = False

    @abstractmethod
    def op_time(self, op: Op, values: Values, groups: Groups) -> Estimate:
        """Time of one operation alone on its device."""

    @abstractmethod
    def stretch_between(self, category: str, beside: str) -> Stretch:
        """How much two operations of these categories stretch each other while both run."""

    @abstractmethod
    def host_ns(self, op: Op) -> int:
        """Time the host spends on issuing the operation."""

    @abstractmethod
    def job_ns(self) -> int:
        """Time the host spends on one job beyond its operations."""

    def between_steps_ns(self) -> int:
        """Time the host spends between the last operation of a step and the first of the next; 0 where it is not known."""
        return 0

    def for_world(self, world: int) -> Costs:
        """The same in a job of so many devices: those of a host copy at once, and share its memory."""
        return self

    def issued(self) -> Costs:
        """The same for steps of which the host issues each operation."""
        return self

    def power(self) -> Power | None:
        """The device's limit of power; None where it is not known."""
        return None

    def draw(self, op: Op, values: Values, groups: Groups) -> Draw:
        """What one operation draws; nothing where the device's power is not known."""
        return Draw(0, 0.0)

    def category(self, op: Op, values: Values, groups: Groups) -> str:
        """`gemm`, `gemm:dw`, `attention`, `attention_grad`, `memory:<kind>`, `comm:<kind>@<ranks>`, `p2p`, `copy:d2h`,
        `copy:h2d`, `free` or `unknown`."""
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
        """How many times as long each of two operations takes while both run: `(op's, beside's)`."""
        found = self.stretch_between(self.category(op, values, groups), self.category(beside, values, groups))
        return found.op, found.beside

    def table(self, program: Program) -> list[Row]:
        """Every operation with its time, in program order."""
        values, groups = tables_of(program)
        runs, costs = runs_of(program), self.for_world(program.world)
        rows = []
        for op in program.ops:
            category, found = self.category(op, values, groups), costs.op_time(op, values, groups)
            rows.append(Row(op.id, op.kind, op.layer, category, found.dur_ns, found.how, found.rel_error, found.detail, runs[op.id]))
        return rows


def mean_by_time(found: Sequence[tuple[int, float]], of_none: float = 0.0) -> float:
    """The mean of figures, each weighted by a time; `of_none` where there is no time."""
    total = sum(dur_ns for dur_ns, _ in found)
    return sum(dur_ns * figure for dur_ns, figure in found) / total if total else of_none


def tables_of(program: Program) -> tuple[Values, Groups]:
    """Values and groups of a program by id, as cost models take them."""
    return _values(program), {group.id: group for group in program.groups}


_values: Callable[[Program], Values] = once_per_ops(lambda program: {value.id: value for value in program.values})


def runs_of(program: Program) -> Counter[int]:
    """How often a step issues each operation: as its jobs say; without jobs, once a micro-batch in forward and backward."""
    if program.jobs:
        return Counter(op_id for job in program.jobs for op_id, _ in job.items)
    batches = max(1, program.pipeline.num_micro_batches)
    return Counter({op.id: batches if op.role in ("forward", "backward") else 1 for op in program.ops})


def shares_by_how(rows: Sequence[Row]) -> dict[How, float]:
    """Share of a step's time on the device, all operations one after the other, by how it is known; strongest first.

    >>> rows = [Row(0, "add", "", "", 30, "exact", 0.0, "", 2), Row(1, "cast", "", "", 40, "proxy", 0.4, "")]
    >>> shares_by_how(rows)
    {'exact': 0.6, 'proxy': 0.4}
    """
    time: Counter[How] = Counter()
    for row in rows:
        time[row.how] += row.step_ns
    return {how: time[how] / time.total() for how in HOWS if time[how]}


def largest_unmeasured(rows: Sequence[Row]) -> list[tuple[str, How, float]]:
    """Kinds whose time rests on no measurement of their own, with their share of a step's time on the device, largest first."""
    time: Counter[tuple[str, How]] = Counter()
    for row in rows:
        if row.how not in MEASURED:
            time[row.kind, row.how] += row.step_ns
    total = sum(row.step_ns for row in rows)
    found = sorted(time.items(), key=lambda each: (-each[1], each[0]))
    return [(kind, how, spent / total) for (kind, how), spent in found if spent]


def expected_error(rows: Sequence[Row]) -> float:
    """Expected relative error of one operation's time, weighted by its share of a step's time on the device.

    >>> expected_error([Row(0, "add", "", "", 30, "exact", 0.0, "", 2), Row(1, "cast", "", "", 40, "proxy", 0.5, "")])
    0.2
    """
    return mean_by_time([(row.step_ns, row.rel_error) for row in rows])


def trust_text(rows: Sequence[Row], whose: str = "") -> str:
    """Lines for reports: shares of a step's device time by how it is known, the largest that were not measured themselves, and what has
    neither a measurement nor a rule."""
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
    if unknown := Counter(row.kind for row in rows if row.how == "unknown"):
        names = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
        lines.append(f"  no measurement and no rule for: {names}; their times are lower bounds from memory traffic, or 0")
    return "\n".join(lines)


def explain_rows(rows: Sequence[Row]) -> str:
    """Totals of a cost table: `how  ops  time  share  expected error`, with what `trust_text` says."""
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
    """A cost model made by hand.

    Keys of `table` are tried from the most to the least specific: Paddle's name (`pd_op.add_`), the kind (`all_reduce`),
    the category (`gemm:dw`, `comm:all_reduce@2`, `comm:all_reduce`), its first word (`comm`), `default`. Operations that
    launch nothing take 0 unless their name or kind is given. Keys of `stretch` are pairs of categories or their first words, and pairs
    of which the first holds up the second (`Stretch.holds`) are in `holds` as well.

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
        """The table's entry. Raises ConfigError where none fits and there is no `default`."""
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
        """The given pair, either way round, else 1 and 1."""
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
    """`comm:all_reduce@2` -> itself, `comm:all_reduce`, `comm`."""
    names = (category, category.partition("@")[0], category.partition(":")[0])
    return tuple(dict.fromkeys(names))
