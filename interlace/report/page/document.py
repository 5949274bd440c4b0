"""What the page shows, as data: the JSON block inside it, and what `interlace report --json` writes.

Times are whole nanoseconds from the start of the step, memory is bytes. Long lists are flat: `[start, length, code, start, length, ...]`.
"""

from __future__ import annotations

import msgspec

from interlace.cost_model.base import How
from interlace.planning.curve import Sweep
from interlace.planning.outcome import Outcome
from interlace.planning.trial import Told
from interlace.report.causes import Wait
from interlace.report.rules import Rule
from interlace.scheduler.memory.live import LiveBytes

KINDS = ("forward", "backward", "weight", "optimizer", "collective", "p2p", "copy", "exposed", "host", "bubble")
"""Codes of what the picture shows, by position: computation of forward, of backward (input gradients, and in plans that do not split
them all of it), of weight gradients, of the optimizer; collectives, sends and receives, copies; and time without computation."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the parts of a page."""


class Ops(_Part, frozen=True):
    """The operations of a step of one rank, in the order in which they start.

    Attributes:
        table: One entry for each operation of the program that takes time: kind, layer, stream (index in `streams`), code, how its time is
            known, time alone.
        count: Number of op instances.
        packed: Base64 of the zlib stream of four columns of `count` little-endian 32-bit integers: start less the start before,
            length, index in `table`, micro-batch.
    """

    streams: list[str]
    table: list[tuple[str, str, int, int, str, int]]
    count: int
    packed: str


class Memory(_Part, frozen=True):
    """Device memory over time: `[moment, most bytes until the next]`, flat; when it is at its peak, and what holds that."""

    curve: list[int]
    peak_bytes: int
    peak_at_ns: int
    pinned_bytes: int
    holds: list[LiveBytes]


class Split(_Part, frozen=True):
    """The step of one rank; the first four are the whole step (`scheduler/simulate/simulator.py` defines them)."""

    compute_ns: int
    exposed_comm_ns: int
    bubble_ns: int
    host_ns: int
    hidden_comm_ns: int
    slowed_ns: int


class Row(_Part, frozen=True):
    """A rank in one plan; it represents equivalent ranks.

    Attributes:
        jobs: Name as schedules write it, start and end of its computation, kind of job.
        compute, side: Runs of computation, and of communication and copies, as `[start, length, code]`, flat; runs too short for
            the picture belong to their neighbours.
        gaps: Time without computation, likewise.
        joules, mean_mhz: Energy of the rank in the step, and its clock in the mean; 0 where the profile knows no power.
        clock: Its clock over time: `[moment, MHz until the next]`, flat; empty where the profile knows no power.
    """

    split: Split
    memory: Memory
    waits: list[Wait]
    jobs: list[tuple[str, int, int, str]]
    compute: list[int]
    side: list[int]
    gaps: list[int]
    ops: Ops
    joules: float = 0.0
    mean_mhz: int = 0
    clock: list[int] = []


class Communication(_Part, frozen=True):
    """Communication of one kind in layers of one name, of a mean rank in one step.

    Attributes:
        size_bytes: Of the largest one's data.
        count: How many a rank issues; a fraction where not every rank does.
        time_ns, hidden_ns, exposed_ns: How long they run; of it beside computation; and while the computation waits for them.
    """

    kind: str
    layer: str
    num_ranks: int
    size_bytes: int
    count: float
    time_ns: int
    hidden_ns: int
    exposed_ns: int


class Return(_Part, frozen=True):
    """A value of one micro-batch that backward gets back: when it left the device or its recomputation began, when it was there again,
    and when it was read first."""

    stage: int
    micro_batch: int
    left_ns: int
    back_ns: int
    read_ns: int


class Offload(_Part, frozen=True):
    """Activations of one kind and layers of one name that leave for pinned memory.

    Attributes:
        size_bytes: Of all copies out of a mean rank in one step.
        count: How many.
        away_ns: Shortest time between the end of the copy out and the start of the copy back.
        slack_ns: Shortest time between the end of the copy back and the start of its first reader; 0 where that waited for it.
        tightest: The return with the least slack; None where none comes back in the step.
    """

    kind: str
    layer: str
    stages: list[int]
    size_bytes: int
    count: float
    away_ns: int
    slack_ns: int
    tightest: Return | None


class Recomputed(_Part, frozen=True):
    """Operations of one kind and layers of one name that backward repeats, of a mean rank in one step.

    Attributes:
        size_bytes: Of their results that backward reads: without them these would be kept from forward on.
        count: How many run.
        time_ns: How long they run.
        slack_ns: Shortest time between the end of one and the start of what reads it first; 0 where nothing but others of these reads it.
        tightest: The repetition with the least slack; None where backward reads none of them itself.
    """

    kind: str
    layer: str
    stages: list[int]
    size_bytes: int
    count: float
    time_ns: int
    slack_ns: int
    tightest: Return | None


class PlanPart(_Part, frozen=True):
    """One plan: its rows in the order of `Page.rows`, its slots by stage, what it moves and repeats."""

    name: str
    rows: list[Row]
    schedule: list[str]
    communication: list[Communication]
    offload: list[Offload]
    recomputed: list[Recomputed]


class Label(_Part, frozen=True):
    """Ranks that are alike in all plans of the page."""

    stage: int
    ranks: list[int]


class Device(_Part, frozen=True):
    """Whose times they are, and how well they are known.

    Attributes:
        shares: Share of a step's time on the device by how it is known, with what that means.
        rel_error: Expected error of one operation's time.
        unmeasured: Largest kinds without a measurement of their own: kind, how it was found instead, share.
    """

    profile: str
    device: str
    date: str
    machine: str
    note: str
    rules: str
    memory_bytes: int
    shares: list[tuple[How, float, str]]
    rel_error: float
    unmeasured: list[tuple[str, str, float]]


class World(_Part, frozen=True):
    """Of what the plan is."""

    num_ranks: int
    num_stages: int
    num_micro_batches: int
    num_chunks: int
    schedule: str
    missing: list[int]


class Page(_Part, frozen=True):
    """Everything; `plans` ends with the plan itself, what it is compared with stands first. `imbalance` says that a stage has more to
    compute than others, where it has, `limit` what gave the limit of memory (`Outcome.memory`), where there was one. `sweep` is the curve
    of step time against memory, where `interlace plan --sweep` left one beside the plans. `trial` is what a run measured of several plans,
    where it did."""

    version: str
    world: World
    device: Device
    outcome: Outcome
    sentence: str
    imbalance: str
    limit: str
    rows: list[Label]
    plans: list[PlanPart]
    done: list[Rule]
    declined: list[Rule]
    sweep: Sweep | None = None
    trial: Told | None = None
    kinds: tuple[str, ...] = KINDS
