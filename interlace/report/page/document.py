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
"""What the picture shows; codes are positions in this tuple. Computation of forward, of backward (input gradients, or all of it if the plan
does not split gradients), of weight gradients and of the optimizer; collectives, sends and receives, copies; time without computation."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the parts of a page."""


class Ops(_Part, frozen=True):
    """The operations of a step of one rank, in the order in which they start.

    Attributes:
        table: One entry for each operation of the program that takes time: kind, layer, stream (index in `streams`), code, how its time is
            known, and the time that it takes when nothing runs beside it.
        count: Number of op instances.
        packed: Base64 of the zlib stream of four columns of `count` little-endian 32-bit integers: start minus the previous start,
            length, index in `table`, micro-batch.
    """

    streams: list[str]
    table: list[tuple[str, str, int, int, str, int]]
    count: int
    packed: str


class Memory(_Part, frozen=True):
    """Memory of one rank.

    Attributes:
        curve: Device memory over time: `[moment, most bytes until the next]`, flat.
        peak_at_ns: When device memory is at its peak.
        pinned_bytes: Peak of pinned memory.
        holds: What takes the device memory at the peak.
    """

    curve: list[int]
    peak_bytes: int
    peak_at_ns: int
    pinned_bytes: int
    holds: list[LiveBytes]


class Split(_Part, frozen=True):
    """The parts of one rank's step; the first four add up to the step (`scheduler/simulate/simulator.py` defines them)."""

    compute_ns: int
    exposed_comm_ns: int
    bubble_ns: int
    host_ns: int
    hidden_comm_ns: int
    slowed_ns: int


class Row(_Part, frozen=True):
    """A rank in one plan; it represents equivalent ranks.

    Attributes:
        jobs: Slot of each job in the notation of schedules, start and end of its computation, kind of job.
        compute, side: Runs of computation, and of communication and copies, as `[start, length, code]`, flat; runs too short for
            the picture are merged with their neighbours.
        gaps: Time without computation, in the same form.
        joules, mean_mhz: Energy of the rank in the step, and its mean clock; 0 if the profile has no power.
        clock: Its clock over time: `[moment, MHz until the next]`, flat; empty if the profile has no power.
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
    """Communication calls of one kind in layers of one pattern, per step, as a mean over ranks.

    Attributes:
        num_ranks: Size of the group.
        size_bytes: Data of the largest call.
        count: Number of calls per rank; a fraction if not every rank issues them.
        time_ns, hidden_ns, exposed_ns: How long they run; how much of it beside computation; how long computation waits for them.
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
    """A value of one micro-batch that is copied back or recomputed for backward: when its copy out or its recomputation began, when it was
    available again, and when it was first read."""

    stage: int
    micro_batch: int
    left_ns: int
    back_ns: int
    read_ns: int


class Offload(_Part, frozen=True):
    """Activations of one kind, in layers of one pattern, that are copied to pinned memory.

    Attributes:
        size_bytes: Bytes of all copies out, per step, as a mean over ranks.
        count: Number of these copies.
        away_ns: Shortest time between the end of the copy out and the start of the copy back.
        slack_ns: Shortest time between the end of the copy back and the start of its first reader; 0 if that waited for it.
        tightest: The return with the least slack; None if none comes back in the step.
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
    """Operations of one kind, in layers of one pattern, that backward repeats, per step, as a mean over ranks.

    Attributes:
        size_bytes: Bytes of their results that backward reads, which would otherwise be kept from forward on.
        count: Number of operations that run.
        time_ns: How long they run.
        slack_ns: Shortest time between the end of one and the start of the first operation that reads it and is not itself repeated; 0 if
            there is no such operation.
        tightest: The repetition with the least slack; None if only repeated operations read them.
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
    """One plan: its rows in the order of `Page.rows`, the slots of each stage, its communication, and what it offloads and recomputes.
    `span_ns`: as in `Result`."""

    name: str
    span_ns: int
    rows: list[Row]
    schedule: list[str]
    communication: list[Communication]
    offload: list[Offload]
    recomputed: list[Recomputed]


class Label(_Part, frozen=True):
    """Ranks of one stage whose steps have the same figures in all plans of the page."""

    stage: int
    ranks: list[int]


class Device(_Part, frozen=True):
    """The device profile, and how well times are known.

    Attributes:
        rules: Name of the target.
        shares: How a time is known, the share of the step's device time that is known so, and what that means.
        rel_error: Expected relative error of one operation's time.
        unmeasured: Largest kinds without measurements of their own: kind, how their time was found instead, share.
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
    """The run that the plan is for; `missing` are the ranks that no program covers."""

    num_ranks: int
    num_stages: int
    num_micro_batches: int
    num_chunks: int
    schedule: str
    missing: list[int]


class Page(_Part, frozen=True):
    """All data of a page.

    Attributes:
        imbalance: A sentence about a stage that computes more than others; empty if stages are balanced.
        limit: Origin of the memory limit (`Outcome.memory`), in words; empty without one.
        rows: The ranks of each row.
        plans: The plan that it is compared with, if any, then the plan itself.
        done, declined: What passes did and declined.
        sweep: Step time against memory budget, if `interlace plan --sweep` wrote it beside the plans.
        trial: What a run measured of several plans; None without a trial.
    """

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
