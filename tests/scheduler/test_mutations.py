"""Faults of every class planted into correct plans. An oracle that shares no line with the checker, an
explicit closure over all pairs, says whether a change is a fault at all; the checker must then find it, and must stay silent
otherwise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.ir import Event, Job, Op, Program
from interlace.ir.kinds import is_comm, is_receive, is_send
from interlace.ir.target import CPU
from interlace.scheduler.hazards import Finding, check
from tests.closure import collected, fed, is_unsafe
from tests.interpreter import Poisoned, Stuck, assert_same
from tests.strategies import World, plan, programs, random_world, worlds

Mutation = Callable[[list[Program], random.Random], list[Program] | None]


# -------------------------------------------------------------------------------------------------------------- mutations


def _with(programs: list[Program], rank: int, program: Program) -> list[Program]:
    return [program if k == rank else p for k, p in enumerate(programs)]


def _ops(program: Program) -> dict[int, Op]:
    return {op.id: op for op in program.ops}


def _jobs(program: Program, lists: list[list[tuple[int, int]]]) -> Program:
    """The program with other items in its jobs; events whose wait would come first lose it."""
    jobs = tuple(msgspec.structs.replace(job, items=tuple(items)) for job, items in zip(program.jobs, lists, strict=True))
    ends = {item: (-1, n) for n, item in enumerate(fed(program))} | {item: (len(lists), n) for n, item in enumerate(collected(program))}
    place = ends | {item: (k, n) for k, items in enumerate(lists) for n, item in enumerate(items)}
    events = [msgspec.structs.replace(e, waits=tuple(w for w in e.waits if place[w] > place[e.record])) for e in program.events]
    return msgspec.structs.replace(program, jobs=jobs, events=tuple(e for e in events if e.waits))


def _pick(programs: list[Program], rng: random.Random, wanted: Callable[[Op], bool]) -> tuple[int, int, int] | None:
    """A random `(rank, job, place)` of an item whose operation is wanted."""
    found = [
        (r, j, n)
        for r, program in enumerate(programs)
        for ops in [_ops(program)]
        for j, job in enumerate(program.jobs)
        for n, (op, _) in enumerate(job.items)
        if wanted(ops[op])
    ]
    return rng.choice(found) if found else None


def drop_event(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """One wait of one event is forgotten."""
    found = [(r, e, w) for r, program in enumerate(programs) for e in program.events for w in e.waits]
    if not found:
        return None
    rank, event, wait = rng.choice(found)
    rest: list[Event] = []
    for e in programs[rank].events:
        waits = tuple(w for w in e.waits if e is not event or w != wait)
        rest += [msgspec.structs.replace(e, waits=waits)] if waits else []
    return _with(programs, rank, msgspec.structs.replace(programs[rank], events=tuple(rest)))


def _swap(programs: list[Program], rng: random.Random, wanted: Callable[[Op], bool]) -> list[Program] | None:
    """Two wanted items of one rank change places."""
    rank = rng.randrange(len(programs))
    program, ops = programs[rank], _ops(programs[rank])
    places = [(j, n) for j, job in enumerate(program.jobs) for n, (op, _) in enumerate(job.items) if wanted(ops[op])]
    if len(places) < 2:
        return None
    k = rng.randrange(len(places) - 1)
    (j, n), (i, m) = places[k], places[k + 1]
    lists = [list(job.items) for job in program.jobs]
    lists[j][n], lists[i][m] = lists[i][m], lists[j][n]
    return _with(programs, rank, _jobs(program, lists))


def swap_collectives(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """Two neighbouring communications of one rank."""
    return _swap(programs, rng, is_comm)


def swap_p2p(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """Two neighbouring sends, or receives, of one rank."""
    return _swap(programs, rng, rng.choice([is_send, is_receive]))


def _move(programs: list[Program], rng: random.Random, wanted: Callable[[Op], bool], far: int) -> list[Program] | None:
    """A wanted item goes some places forward or back, across jobs."""
    picked = _pick(programs, rng, wanted)
    if picked is None:
        return None
    rank, j, n = picked
    program = programs[rank]
    bounds = [len(job.items) for job in program.jobs]
    flat = [item for job in program.jobs for item in job.items]
    old = sum(bounds[:j]) + n
    new = max(0, min(len(flat) - 1, old + rng.choice([-1, 1]) * rng.randint(1, far)))
    flat.insert(new, flat.pop(old))
    lists, start = [], 0
    for bound in bounds:
        lists.append(flat[start : start + bound])
        start += bound
    return _with(programs, rank, _jobs(program, lists))


def move_copy_or_reader(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """A copy, or any operation, overtakes or falls behind its neighbours."""
    return _move(programs, rng, rng.choice([lambda op: "memcpy" in op.name, lambda op: True]), 6)


def move_receive(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """A receive is issued earlier or later."""
    return _move(programs, rng, is_receive, 12)


def move_send(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """A send is issued earlier or later."""
    return _move(programs, rng, is_send, 12)


def free_early(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """A last reader stops being one: an operation changes its stream, so that the collector records another."""
    picked = _pick(programs, rng, lambda op: not op.name.startswith("builtin"))
    assert picked is not None
    rank, j, n = picked
    program = programs[rank]
    target = program.jobs[j].items[n][0]
    streams = sorted({op.stream for op in program.ops} | {"other"})
    ops = [msgspec.structs.replace(op, stream=rng.choice(streams)) if op.id == target else op for op in program.ops]
    return _with(programs, rank, program.with_ops(ops))


def reuse_pinned(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """Two copies out share one pinned buffer, or all micro-batches do."""
    found = [(r, v) for r, program in enumerate(programs) for v in program.values if v.memory == "pinned"]
    if not found:
        return None
    rank, value = rng.choice(found)
    program = programs[rank]
    others = [v for v in program.values if v.memory == "pinned" and v.id != value.id]
    if others and rng.random() < 0.6:
        changed = msgspec.structs.replace(value, storage=rng.choice(others).storage)
    else:
        changed = msgspec.structs.replace(value, persistable=True)
    values = [changed if v.id == value.id else v for v in program.values]
    return _with(programs, rank, program.with_ops(program.ops, values))


def lose_item(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """An operation runs for one micro-batch less."""
    picked = _pick(programs, rng, lambda op: "memcpy" not in op.name)
    assert picked is not None
    rank, j, n = picked
    program = programs[rank]
    item = program.jobs[j].items[n]
    jobs = [Job(job.name, job.kind, job.micro_batch, tuple(i for i in job.items if i != item)) for job in program.jobs]
    events = [msgspec.structs.replace(e, waits=tuple(w for w in e.waits if w != item)) for e in program.events if e.record != item]
    return _with(programs, rank, msgspec.structs.replace(program, jobs=tuple(jobs), events=tuple(e for e in events if e.waits)))


pytestmark = pytest.mark.slow
RACES = {"race", "copy-read-early", "buffer-reused", "freed-in-use"}
ORDERS = {"read-before-write", "wrong-version"}
MUTATIONS: dict[Mutation, set[str]] = {
    drop_event: RACES,
    swap_collectives: RACES | ORDERS | {"collective-order", "p2p-mismatch", "deadlock"},
    swap_p2p: RACES | ORDERS | {"p2p-mismatch", "deadlock"},
    move_copy_or_reader: RACES | ORDERS | {"collective-order", "p2p-mismatch", "deadlock"},
    move_receive: RACES | ORDERS | {"deadlock", "p2p-mismatch"},
    move_send: RACES | ORDERS | {"deadlock", "p2p-mismatch"},
    free_early: RACES | {"deadlock"},
    reuse_pinned: {"wrong-version", "buffer-reused", "copy-read-early", "read-before-write"},
}
"""Each mutation with the classes of findings it may give."""


def kinds(findings: Sequence[Finding]) -> set[str]:
    return {finding.kind for finding in findings if finding.kind != "shared-stream"}


@cache
def _planned(seed: int) -> list[Program]:
    return plan(random_world(seed, streams=True, offload=True))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_every_planted_fault_is_found_and_nothing_else(mutation: Mutation, examples: Callable[[int], int]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(examples(35)):
        programs = _planned(seed)
        rng = random.Random(seed)
        for _ in range(3):
            changed = mutation(programs, rng)
            if changed is None:
                continue
            findings = kinds(check(changed))
            assert bool(findings) == is_unsafe(changed), (seed, mutation.__name__, findings)
            assert findings <= MUTATIONS[mutation], (seed, mutation.__name__, findings)
            seen["fault" if findings else "harmless"] += 1
    assert seen["fault"] >= examples(10), seen


def test_a_lost_operation_whose_result_is_read_is_found(examples: Callable[[int], int]) -> None:
    found = 0
    for seed in range(examples(30)):
        programs = plan(random_world(seed, streams=True))
        changed = lose_item(programs, random.Random(seed))
        assert changed is not None
        findings = kinds(check(changed))
        assert bool(findings) >= is_unsafe(changed), (seed, findings)
        found += bool(findings)
    assert found > examples(15)


def test_generated_plans_compute_what_their_programs_compute(examples: Callable[[int], int]) -> None:
    for seed in range(examples(60)):
        world = random_world(seed, dropout=True)
        assert_same(programs(world), plan(world), seed)


def test_orders_that_the_checker_calls_wrong_do_change_the_result(examples: Callable[[int], int]) -> None:
    """The interpreter as a third opinion: it stops at a poisoned read, or gives other numbers."""
    wrong = 0
    for seed in range(examples(50)):
        before = _planned(seed)
        changed = move_copy_or_reader(before, random.Random(seed)) or before
        if not kinds(check(changed, CPU)):
            assert_same(before, changed, seed)
        elif kinds(check(changed, CPU)) & ORDERS:
            wrong += 1
            with pytest.raises((AssertionError, Poisoned, Stuck)):
                assert_same(before, changed, seed)
    assert wrong >= examples(5)


@settings(max_examples=20, deadline=None)
@given(worlds(max_dp=2), st.integers(0, 2**16), st.sampled_from(sorted(MUTATIONS, key=lambda m: m.__name__)))
def test_checker_and_oracle_agree_on_any_change(world: World, seed: int, mutation: Mutation) -> None:
    planned = plan(world)
    assert check(planned) == []
    assert check(planned, CPU) == []
    changed = mutation(planned, random.Random(seed))
    if changed is not None:
        assert bool(kinds(check(changed))) == is_unsafe(changed)
