"""The result of a search as data: what is known of every layout, the recommended one, and why it is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from interlace.errors import ConfigError
from interlace.layout.search import Candidate, Limits, State
from interlace.layout.space import Cluster, Layout, Template, command_line
from interlace.planning.outcome import Step
from interlace.report.outcome import evened_ns, imbalance
from interlace.units import ms, size

LEAST_PART = 0.02
"""Differences smaller than this share of the step are not reported."""
LAYOUT = 3
"""Version of the JSON format; raised with every change of it."""
PADDLES, OURS = "Paddle's plan", "Interlace"


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Simulated figures of a layout with one plan.

    Attributes:
        tokens_per_s: Throughput of all GPUs; 0 if the tokens of a step are not known.
        peak_bytes: Peak of the fullest rank.
        fits: Whether the peak is within the memory limit.
        exposed_ns, bubble_ns: Means over ranks.
        compute_ns: Computation of the stage that computes most.
        rel_error: Expected relative error of the step.
        joules, tokens_per_joule: Energy of a step on all GPUs, and tokens for each joule; 0 if the profile has no power, or the tokens of a
            step are not known.
    """

    step_ns: int
    tokens_per_s: float
    peak_bytes: int
    fits: bool
    exposed_ns: int
    bubble_ns: int
    compute_ns: int
    rel_error: float
    joules: float = 0.0
    tokens_per_joule: float = 0.0


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of one layout.

    Attributes:
        layout: The layout as text.
        values: Placeholder -> its value.
        command: How to start the script with this layout.
        state: How far the search got with it.
        why: Why it was excluded, refused or not planned.
        paddles, ours: Figures with Paddle's own plan, and with one of Interlace; None if not known.
        refusal: Why Paddle cannot run its own plan, so that `paddles` is None although the layout was simulated.
        least_ns, least_bytes: Lower bounds of the step and of the peak; 0 if not known.
        across_hosts: Share of the device time that is only estimated because it crosses hosts.
        imbalance: What an even split of the layers over the stages would gain, as text.
        even_ns: The step with such a split; 0 if it would hardly be shorter.
        plans: Folder of the plans.
    """

    layout: str
    values: dict[str, int | str]
    command: str
    state: State
    why: str = ""
    least_ns: int = 0
    least_bytes: int = 0
    across_hosts: float = 0.0
    imbalance: str = ""
    even_ns: int = 0
    paddles: Figures | None = None
    ours: Figures | None = None
    plans: str = ""
    refusal: str = ""

    @property
    def is_known(self) -> bool:
        """Whether there are figures of a plan that can run."""
        return self.paddles is not None or self.ours is not None

    def best(self) -> tuple[str, Figures] | None:
        """The fastest plan within the memory limit: whose it is, and its figures; None if there is none."""
        fit = [(name, each) for name, each in ((PADDLES, self.paddles), (OURS, self.ours)) if each and each.fits]
        return min(fit, key=lambda each: each[1].step_ns, default=None)


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan to which no other is superior in both time and memory."""

    layout: str
    whose: str
    step_ns: int
    peak_bytes: int


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a search; all times are simulated.

    Attributes:
        tokens: Tokens of a step, over all replicas; 0 if not known.
        network: The network between hosts, as text; empty with one host.
        rows: The fastest first, then those without a plan that fits, the most promising bound first.
        counts: State -> number of layouts, and the number of programs that were built for this answer.
        decides: Why the first row is faster than the second, as text.
        gap: The most by which a layout that was not built may be faster, according to the bounds; 0 if none may.
        frontier: Plans to which no other is superior in both time and memory.
    """

    version: int
    script: str
    gpus: int
    gpus_a_host: int
    memory_bytes: int
    device: str
    network: str
    tokens: int
    counts: dict[str, int]
    rows: tuple[Row, ...]
    decides: str
    gap: float
    frontier: tuple[Point, ...]


def answer_of(
    found: Sequence[Candidate], template: Template, cluster: Cluster, limits: Limits, device: str, network: str, tokens: int, built: int
) -> Answer:
    """Make the answer. `tokens`: tokens of a step, 0 to take them from the programs' inputs; `built`: number of programs that were built.
    Raises ConfigError if layouts differ in their number of tokens per step."""
    tokens = tokens or _tokens(found, cluster)
    rows = sorted((_row(each, template, limits, tokens) for each in found), key=_order)
    best, second = ([row for row in rows if row.best()] + [None, None])[:2]
    states = [row.state for row in rows]
    counts = {"layouts": len(rows), **{state: states.count(state) for state in ("excluded", "refused", "drafted", "planned", "waiting")}}
    shortest = best.best() if best else None
    left = min((row.least_ns for row in rows if row.state == "waiting" and row.least_bytes <= limits.memory), default=None)
    gap = max(0.0, 1 - left / shortest[1].step_ns) if shortest and left is not None else 0.0
    return Answer(
        LAYOUT,
        template.script,
        cluster.gpus,
        cluster.gpus_a_host,
        limits.memory,
        device,
        network,
        tokens,
        {**counts, "programs built": built},
        tuple(rows),
        _decides(best, second) if best and second else "",
        round(gap, 4),
        tuple(_frontier(rows)),
    )


def _tokens(found: Sequence[Candidate], cluster: Cluster) -> int:
    """Tokens of a step over all replicas; 0 if not known."""
    counts = {each.layout: each.draft.tokens * _replicas(each.layout, cluster) for each in found if each.draft and each.draft.step}
    known = {count: layout for layout, count in counts.items() if count}
    if len(known) > 1:
        (one, first), (other, second), *_ = sorted(known.items())
        raise ConfigError(
            f"layouts train different batches: {first} reads {one} tokens a step, {second} {other}; expected a script that trains the "
            "same batch in every layout (for one of other data give --tokens-a-step)"
        )
    return next(iter(known), 0)


def _replicas(layout: Layout, cluster: Cluster) -> int:
    if isinstance(layout.get("dp"), int):
        return layout.number("dp")
    return cluster.gpus // (layout.number("pp") * layout.number("mp")) if cluster.gpus == 1 or layout.get("mp") is not None else 0


def _row(each: Candidate, template: Template, limits: Limits, tokens: int) -> Row:
    draft, planned = each.draft, each.planned
    step = (planned.step if planned else None) or (draft.step if draft else None)
    return Row(
        str(each.layout),
        dict(each.layout.values),
        command_line(template, each.layout),
        each.state,
        each.why,
        each.least_ns,
        each.least_bytes,
        draft.across_hosts if draft else 0.0,
        imbalance(step) if step else "",
        evened_ns(step) if step else 0,
        _figures(draft.step, draft.peak_bytes, draft.rel_error, limits, tokens) if draft and not each.refusal else None,
        _figures(planned.step, planned.peak_bytes, planned.rel_error, limits, tokens) if planned else None,
        each.folder if planned and planned.step else "",
        each.refusal,
    )


def _figures(step: Step | None, peak_bytes: int, rel_error: float, limits: Limits, tokens: int) -> Figures | None:
    if step is None:
        return None
    peak, compute = max(peak_bytes, step.peak_bytes), max((stage.compute_ns for stage in step.stages), default=0)
    rate = round(tokens * 1e9 / step.step_ns, 1) if step.step_ns else 0.0
    parts = (step.exposed_ns, step.bubble_ns, compute, rel_error, step.joules, round(tokens / step.joules, 2) if step.joules else 0.0)
    return Figures(step.step_ns, rate, peak, peak <= limits.memory, *parts)


def _order(row: Row) -> tuple[int, float, str]:
    best = row.best()
    known = 0 if best else 1 if row.is_known else ("drafted", "waiting", "excluded", "refused").index(row.state) + 2
    told = best[1] if best else row.paddles or row.ours
    return known, told.step_ns if told else row.least_ns or inf, row.layout


def _decides(best: Row, second: Row) -> str:
    """Why the best layout is faster than the second, as text: the parts of the step in which their plans differ most."""
    (whose, mine), (other, theirs) = best.best() or ("", None), second.best() or ("", None)
    if mine is None or theirs is None:
        return ""
    parts = [
        ("computation of the slowest stage", mine.compute_ns - theirs.compute_ns),
        ("exposed communication", mine.exposed_ns - theirs.exposed_ns),
        ("waiting for other stages", mine.bubble_ns - theirs.bubble_ns),
    ]
    told = [
        f"{name} {ms(abs(by))} {'shorter' if by < 0 else 'longer'}"
        for name, by in sorted(parts, key=lambda part: -abs(part[1]))
        if abs(by) >= LEAST_PART * mine.step_ns
    ]
    behind = theirs.step_ns / mine.step_ns - 1 if mine.step_ns else 0.0
    within = max(mine.rel_error, theirs.rel_error)
    sure = (
        f"more than the expected error of {within:.0%}" if behind > within else f"within the expected error of {within:.0%}: measure both"
    )
    memory = f"peak {size(mine.peak_bytes)} and {size(theirs.peak_bytes)}"
    plans = f" ({whose} and {other})" if whose != other else ""
    return f"{best.layout} is {behind:.1%} ahead of {second.layout}{plans}, {sure}: {'; '.join([*told, memory])}."


def _frontier(rows: Sequence[Row]) -> list[Point]:
    """Plans to which no other is superior in both time and memory, sorted by memory."""
    points = [
        Point(row.layout, name, each.step_ns, each.peak_bytes)
        for row in rows
        for name, each in ((PADDLES, row.paddles), (OURS, row.ours))
        if each
    ]
    kept: list[Point] = []
    for point in sorted(points, key=lambda each: (each.peak_bytes, each.step_ns, each.layout)):
        if not kept or point.step_ns < kept[-1].step_ns:
            kept.append(point)
    return kept
