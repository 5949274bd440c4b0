"""Random plans for the comparison of checker and oracle: small, of many shapes, most of them close to safe.

Beside what `tests.strategies` builds: three side streams and three rings, views of views, in-place chains, vectors, copies out to pinned
and pageable memory and back, buffers that copies share, parameters that are written in forward, sent and reduced, outputs of every kind,
control flow, shapes. Operations compute nothing: only who reads and writes what counts. A plan is a pure function of its seed.

>>> [program.rank for program in random_plans(3)] in ([0], [0, 1])
True
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec

from interlace.errors import PlanError
from interlace.ir import Event, Group, Job, Op, Pipeline, Program, Value
from interlace.ir.kinds import DATA, PARAMETER, SHADOW_OUTPUT
from interlace.ir.storage import FETCH
from interlace.ir.waits import computes
from interlace.passes.insert_events import events_of
from tests.closure import collected, fed
from tests.interpreter import Item
from tests.strategies import ROW, Builder

STREAMS = ("", "", "", "a", "b", "c")
RINGS = (1, 2, 3)
TO_PREVIOUS, TO_NEXT = 8, 9
HOST_ONLY = frozenset({"builtin.combine", "builtin.split", "pd_op.full_int_array"})


class Maker:
    """Builds one rank's program; ranks of a world draw the same, and differ in who sends and who receives."""

    def __init__(self, rng: random.Random, rank: int, world: int) -> None:
        self.rng, self.rank, self.world = rng, rank, world
        self.build = Builder()
        self.pinned: list[int] = []
        self.live: list[int] = []
        self.held: list[int] = []

    def program(self) -> Program:
        """Forward, backward, optimizer."""
        rng, build = self.rng, self.build
        count = rng.choice([1, 1, 2, 2, 3])
        self.held = [build.named(PARAMETER, ROW, f"p{k}", True) for k in range(rng.randint(1, 3))]
        self.live = [build.named(DATA, ROW, f"x{k}") for k in range(rng.randint(1, 2))]
        for role, most in (("forward", 9), ("backward", 7)):
            build.role = role
            for _ in range(rng.randint(2, most)):
                self.step()
            self.outputs(2)
        build.role, self.live = "optimize", []
        for _ in range(rng.randint(0, 4)):
            self.update()
        self.outputs(1)
        groups = (*(Group(ring, tuple(range(self.world))) for ring in RINGS), Group(TO_NEXT, (0, 1)), Group(TO_PREVIOUS, (1, 0)))
        pipe = Pipeline(0, 1, count, 1, "accumulate")
        return Program(tuple(build.ops), tuple(build.values), groups if self.world > 1 else (), pipe, self.rank, self.world)

    def outputs(self, most: int) -> None:
        """Name some results; a few of them because the user fetches them."""
        for value in self.rng.sample(self.live, min(len(self.live), self.rng.randint(0, most))):
            fetched = self.rng.random() < 0.3
            attrs = {FETCH: value} if fetched else {"output_name": f"out{value}"}
            if self.build.values[value].memory == "device":
                self.build.raw(SHADOW_OUTPUT, [value], [], attrs=attrs)

    def op(self, name: str, operands: Iterable[int], results: int = 1, **more: Any) -> list[int]:
        """An operation on a random stream, captured or new."""
        origin = len(self.build.ops) if self.rng.random() < 0.5 else -1
        made = self.build.op(name, operands, [ROW] * results, **{"stream": self.rng.choice(STREAMS), "origin": origin, **more})
        self.live += made
        return made

    def any(self) -> int:
        """Something to read: a value of this step, most often a late one, or a parameter."""
        if not self.live or self.rng.random() < 0.15:
            return self.rng.choice(self.held)
        return self.rng.choice(self.live[-4:] if self.rng.random() < 0.7 else self.live)

    def step(self) -> None:
        """One or a few operations of forward or backward."""
        kinds = [
            self.plain,
            self.plain,
            self.plain,
            self.in_place,
            self.in_place,
            self.view,
            self.view,
            self.vectors,
            self.shape_only,
            self.offload,
            self.offload,
            self.to_host,
            self.accumulate,
            self.accumulate,
            self.constant,
            self.branch,
        ]
        if self.world > 1:
            kinds += [self.reduce, self.reduce, self.reduce, self.exchange, self.meet]
        self.rng.choice(kinds)()

    def plain(self) -> None:
        """Reads one or two, gives one or two."""
        operands = [self.any() for _ in range(self.rng.randint(1, 2))]
        self.op(self.rng.choice(["pd_op.exp", "pd_op.add", "pd_op.matmul"]), operands, self.rng.choice([1, 1, 2]))

    def in_place(self) -> None:
        """Writes over its operand."""
        self.op("pd_op.relu_", [self.of_step()], inplace=((0, 0),))

    def view(self) -> None:
        """Another variable over the same memory."""
        self.op(self.rng.choice(["pd_op.reshape", "pd_op.share_data"]), [self.any()], views=((0, 0),))

    def of_step(self) -> int:
        """A value of this step in device memory that operations may write over, or a new one."""
        inner = [v for v in self.live if self.build.values[v].memory == "device" and not self.build.values[v].persistable]
        return self.rng.choice(inner[-4:]) if inner else self.op("pd_op.full", [])[0]

    def vectors(self) -> None:
        """A kernel that gives a vector, its elements, and a vector that refers to tensors."""
        build, rng = self.build, self.rng
        size = rng.choice([2, 3])
        if rng.random() < 0.5:
            vector = build.vector([ROW] * size)
            build.raw("pd_op.split_with_num", [self.any()], [vector], stream=rng.choice(STREAMS), attrs={"axis": 0, "num": size})
            self.live += build.op("builtin.split", [vector], [ROW] * size)
        if rng.random() < 0.7:
            joined = build.vector([ROW] * size)
            build.raw("builtin.combine", [self.any() for _ in range(size)], [joined])
            self.op("pd_op.add_n", [joined])

    def shape_only(self) -> None:
        """An operand of which only the shape is read, or a shape as a value."""
        if self.rng.random() < 0.3:
            self.op("pd_op.shape", [self.any()], no_buffer=(0,))
        else:
            self.op("pd_op.exp_grad", [self.any(), self.any()], no_buffer=(0,))

    def offload(self) -> None:
        """A copy out to pinned memory, whose buffer may be another's, and a copy in of a buffer that was written before."""
        build, rng = self.build, self.rng
        if not self.pinned or rng.random() < 0.6:
            for_each = [v for v in self.pinned if not build.values[v].persistable]
            shared = rng.choice(for_each) if for_each and rng.random() < 0.2 else -1
            out = build.value(
                ROW,
                storage=build.values[shared].storage if shared >= 0 else -1,
                memory="pinned",
                persistable=shared < 0 and rng.random() < 0.1,
            )
            name, target = rng.choice([("pd_op.memcpy", 2), ("pd_op.memcpy_d2h", 1)])
            build.raw(
                name,
                [self.of_step()],
                [out],
                attrs={"dst_place_type": target},
                stream=rng.choice(["out", "out", "a", ""]),
                origin=len(build.ops) if rng.random() < 0.2 else -1,
            )
            self.pinned.append(out)
        if rng.random() < 0.7:
            self.op("pd_op.memcpy_h2d", [rng.choice(self.pinned)], stream=rng.choice(["in", "in", "b", ""]), origin=-1)

    def to_host(self) -> None:
        """A copy to pageable memory, and one back."""
        build = self.build
        out = build.value(ROW, memory="host")
        build.raw(
            "pd_op.memcpy_d2h",
            [self.any()],
            [out],
            attrs={"dst_place_type": 0},
            stream=self.rng.choice(["out", "c", ""]),
            origin=len(build.ops) if self.rng.random() < 0.7 else -1,
        )
        self.op("pd_op.memcpy_h2d", [out], origin=-1)

    def accumulate(self) -> None:
        """Adds to what lasts: a gradient buffer, statistics."""
        held = self.rng.choice(self.held)
        if self.rng.random() < 0.8:
            self.op("pd_op.add_", [held, self.any()], inplace=((0, 0),))
        else:
            self.op("pd_op.exp", [held])

    def constant(self) -> None:
        """What needs no operand, on the device or on the host."""
        if self.rng.random() < 0.6:
            self.op("pd_op.full", [], attrs={"place": "Place(cpu)"} if self.rng.random() < 0.2 else {})
        else:
            made = self.build.op("pd_op.full_int_array", [], [ROW])
            self.op("pd_op.reshape_like", [self.any(), *made])

    def branch(self) -> None:
        """Control flow, moved as one."""
        self.op(self.rng.choice(["pd_op.if", "pd_op.while"]), [self.any(), self.any()], num_blocks=2)

    def reduce(self) -> None:
        """A collective of one of three rings."""
        ring = self.rng.choice(RINGS)
        inplace = self.rng.random() < 0.5
        operand = self.rng.choice(self.held) if self.rng.random() < 0.2 else self.of_step()
        self.op(
            "pd_op.all_reduce_" if inplace else "pd_op.all_reduce",
            [operand],
            group=ring,
            inplace=((0, 0),) if inplace else (),
            stream=self.rng.choice(["", f"ring{ring}", f"ring{ring}"]),
            attrs={"ring_id": ring},
        )

    def meet(self) -> None:
        """Statistics over ranks that no attribute names."""
        self.op(self.rng.choice(["pd_op.sync_batch_norm_", "pd_op.sync_batch_norm_grad"]), [self.any()])

    def exchange(self) -> None:
        """Rank 0 sends to rank 1, a parameter at times, or the other way round."""
        source, value, stream = self.rng.choice([0, 1]), self.any(), self.rng.choice(["p2p", "p2p", ""])
        ring, origin = (TO_NEXT if source == 0 else TO_PREVIOUS), self.rng.choice([-1, len(self.build.ops)])
        more: dict[str, Any] = {"group": ring, "stream": f"{stream}{ring}" if stream else "", "origin": origin}
        received = self.build.value(ROW)
        if self.rank == source:
            self.build.raw("pd_op.send_v2", [value], [], attrs={"peer": 1, "ring_id": ring}, **more)
            self.build.raw("pd_op.full", [], [received], stream=more["stream"])
        else:
            self.build.raw("pd_op.recv_v2", [], [received], attrs={"peer": 0, "ring_id": ring}, **more)
            self.build.raw("pd_op.exp", [value], [self.build.value(ROW)], stream=more["stream"])
        self.live.append(received)

    def update(self) -> None:
        """The optimizer part: norms, sums over a ring, in-place updates, a parameter that is sent at the end."""
        rng = self.rng
        kinds = [self.plain, self.accumulate, self.accumulate, self.view]
        if self.world > 1:
            kinds += [self.reduce, self.exchange]
        if not self.live:
            self.live += self.build.op("pd_op.squared_l2_norm", [rng.choice(self.held)], [ROW], stream=rng.choice(STREAMS))
        rng.choice(kinds)()


# ------------------------------------------------------------------------------------------------------------------ plans


def random_plans(seed: int) -> list[Program]:
    """The plans of all ranks of a world, of one or two ranks."""
    rng = random.Random(seed)
    world = rng.choice([1, 1, 1, 2])
    plans = []
    for rank in range(world):
        program = Maker(random.Random(seed + 1), rank, world).program()
        plans.append(_planned(program, random.Random(seed + 2)))
    for _ in range(rng.choice([0, 1, 1, 2])):
        rank = rng.randrange(world)
        plans[rank] = rng.choice([_without_wait, _without_wait, _misplaced, _with_stray_event, _with_moved_item, _with_other_stream])(
            plans[rank], rng
        )
    return plans


def _planned(program: Program, rng: random.Random) -> Program:
    """Jobs, waits of the host, and the events that the pass adds, or some of them."""
    planned = msgspec.structs.replace(program, jobs=_jobs(program, _order(program, rng), rng))
    if rng.random() < 0.2:
        planned = _with_host_waits(planned, rng)
    if rng.random() < 0.1:
        return planned
    try:
        return msgspec.structs.replace(planned, events=events_of(planned))
    except PlanError:  # no set of events orders it
        return planned


def _order(program: Program, rng: random.Random) -> list[Item]:
    """Host order: forward and backward of the micro-batches in turn or mixed, then what runs once; at times a few places are swapped."""
    count = program.pipeline.num_micro_batches
    absent = set()
    for out in [op for op in program.ops if op.kind in ("memcpy", "memcpy_d2h") and op.origin < 0 and op.attrs["dst_place_type"]]:
        back = [op.id for op in program.ops if op.kind == "memcpy_h2d" and op.operands == out.results and op.origin < 0]
        absent |= {(op, m) for m in range(count) if rng.random() < 0.2 for op in (out.id, *back)}

    def items(role: str, m: int) -> list[Item]:
        return [
            (op.id, m)
            for op in program.ops
            if op.role == role and op.name not in (PARAMETER, DATA, SHADOW_OUTPUT) and (op.id, m) not in absent
        ]

    warm = rng.randint(1, count)
    rows = [items("forward", m) for m in range(warm)]
    for m in range(count):
        ahead = items("forward", m + warm) if m + warm < count else []
        rows += [_mixed(items("backward", m), ahead, rng)] if rng.random() < 0.5 else [items("backward", m), ahead]
    order = [item for row in rows for item in row]
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        k = rng.randrange(max(1, len(order) - 1))
        order[k : k + 2] = order[k : k + 2][::-1]
    return order + items("optimize", 0)


def _mixed(left: list[Item], right: list[Item], rng: random.Random) -> list[Item]:
    picks = [0] * len(left) + [1] * len(right)
    rng.shuffle(picks)
    sides = (iter(left), iter(right))
    return [next(sides[side]) for side in picks]


def _jobs(program: Program, order: list[Item], rng: random.Random) -> tuple[Job, ...]:
    """The order cut into jobs, never between a vector and what it is made of or taken into."""
    ops = {op.id: op for op in program.ops}
    vectors = {value.id for value in program.values if value.dtype == "vector"}
    tied = vectors | {v for op in program.ops if op.name == "builtin.split" for v in op.results}
    place = {item: k for k, item in enumerate(order)}
    spans = []
    for op in program.ops:
        for m in range(program.pipeline.num_micro_batches):
            if (op.id, m) in place:
                made = [v for v in op.results if v in tied]
                users = [place[each.id, m] for each in program.ops if (each.id, m) in place and set(made) & set(each.operands)]
                spans += [(place[op.id, m], max(users))] if users else []
    most = rng.choice([1, 2, 4, 8])
    inner = [k for k in range(1, len(order)) if not any(a < k <= b for a, b in spans)]
    once = next((k for k, (op, _) in enumerate(order) if ops[op].role == "optimize"), len(order))
    cuts = {*rng.sample(inner, min(len(inner), rng.randint(0, most))), once if rng.random() < 0.8 else 0}
    bounds = sorted({0, *cuts, len(order)})
    parts = [order[a:b] for a, b in pairwise(bounds) if b > a]
    return tuple(Job(f"job_{k}", "forward", items[0][1], tuple(items)) for k, items in enumerate(parts))


def _with_host_waits(program: Program, rng: random.Random) -> Program:
    """The host waits for some computation in some jobs."""
    ops, values = {op.id: op for op in program.ops}, {value.id: value for value in program.values}
    jobs = []
    for job in program.jobs:
        awaited = [k for k, (op, _) in enumerate(job.items) if computes(ops[op], values)]
        if awaited and rng.random() < 0.5:
            k = rng.choice(awaited)
            job = msgspec.structs.replace(job, host_waits=((job.items[rng.randrange(k, len(job.items))], job.items[k]),))
        jobs.append(job)
    return msgspec.structs.replace(program, jobs=tuple(jobs))


# ----------------------------------------------------------------------------------------------------------------- changes


def _host_order(program: Program) -> list[Item]:
    return [*fed(program), *(item for job in program.jobs for item in job.items), *collected(program)]


def with_valid_events(program: Program, events: Iterable[Event]) -> Program:
    """The program with those of these events that a plan may have: recorded once by an item that runs, waited for later."""
    place = {item: k for k, item in enumerate(_host_order(program))}
    cut = fed(program)
    kept: dict[Item, Event] = {}
    for event in events:
        record = cut[-1] if event.record in cut else event.record
        waits = tuple(item for item in event.waits if item in place and record in place and place[item] > place[record])
        old = kept.get(record)
        if waits:
            merged = waits if old is None else tuple(dict.fromkeys((*old.waits, *waits)))
            kept[record] = Event(event.name if old is None else old.name, record, merged)
    return msgspec.structs.replace(program, events=tuple(kept.values()))


def _without_wait(program: Program, rng: random.Random) -> Program:
    """One wait less."""
    waits = [(event.name, item) for event in program.events for item in event.waits]
    if not waits:
        return program
    gone = rng.choice(waits)
    return with_valid_events(
        program,
        [msgspec.structs.replace(event, waits=tuple(w for w in event.waits if (event.name, w) != gone)) for event in program.events],
    )


def _misplaced(program: Program, rng: random.Random) -> Program:
    """One event is recorded, or one wait stands, a few places away."""
    if not program.events:
        return program
    order = _host_order(program)
    place = {item: k for k, item in enumerate(order)}
    event = rng.choice(program.events)

    def near(item: Item) -> Item:
        return order[max(0, min(len(order) - 1, place[item] + rng.choice([-2, -1, 1, 2])))]

    if rng.random() < 0.5:
        changed = msgspec.structs.replace(event, record=near(event.record))
    else:
        changed = msgspec.structs.replace(event, waits=tuple(near(item) for item in event.waits))
    return with_valid_events(program, [changed if each is event else each for each in program.events])


def _with_stray_event(program: Program, rng: random.Random) -> Program:
    """One event more, between any two."""
    order = _host_order(program)
    a, b = sorted(rng.sample(range(len(order)), 2)) if len(order) > 1 else (0, 0)
    return with_valid_events(program, [*program.events, Event("stray", order[a], (order[b],))])


def _with_moved_item(program: Program, rng: random.Random) -> Program:
    """One item a few places earlier or later, into another job at times."""
    lists = [list(job.items) for job in program.jobs]
    flat = [item for items in lists for item in items]
    bounds = [len(items) for items in lists]
    old = rng.randrange(len(flat))
    new = max(0, min(len(flat) - 1, old + rng.choice([-3, -2, -1, 1, 2, 3])))
    flat.insert(new, flat.pop(old))
    jobs, start = [], 0
    for job, bound in zip(program.jobs, bounds, strict=True):
        jobs.append(Job(job.name, job.kind, job.micro_batch, tuple(flat[start : start + bound])))
        start += bound
    return with_valid_events(msgspec.structs.replace(program, jobs=tuple(jobs)), program.events)


def _with_other_stream(program: Program, rng: random.Random) -> Program:
    """One operation on another stream."""
    movable = [op for op in program.ops if op.group < 0 and op.name not in (PARAMETER, DATA, SHADOW_OUTPUT, *HOST_ONLY)]
    changed = rng.choice(movable)
    ops: list[Op] = [msgspec.structs.replace(op, stream=rng.choice(STREAMS)) if op is changed else op for op in program.ops]
    return program.with_ops(ops)


def used_values(program: Program) -> tuple[Value, ...]:
    """Values that some operation gives."""
    given = {v for op in program.ops for v in op.results}
    return tuple(value for value in program.values if value.id in given)
