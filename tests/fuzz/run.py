"""`make fuzz`: random plans, and what checker and oracle say of them on every target.

What the checker calls safe must be safe: a plan of which the oracle says otherwise is made smaller and printed as text that `parse` reads,
for a test. What the checker refuses and the oracle does not is counted, by class of finding; `--strict` prints such plans too. One plan in
400 is one on a target, and those seen are orders from step to step that the checker does not follow: through a variable of a parameter
that has several, or through what an operation of the next step waits for by another storage.

    python -m tests.fuzz.run --seconds 600 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from interlace.errors import ProgramError
from interlace.ir import Program, show, verify
from interlace.ir.target import CPU, CUSTOM, GPU, IDEAL, Target
from interlace.scheduler.hazards import check
from testbed.target import RULES
from tests.closure import is_unsafe
from tests.fuzz.plans import random_plans, used_values, with_valid_events

EVERY_TARGET = (GPU, CUSTOM, RULES, IDEAL, CPU)
NOT_COMPARED = {"shared-stream"}
"""A communicator that two rings share is not a matter of order."""


@dataclass(slots=True)
class Outcome:
    """What was compared.

    Attributes:
        verdicts: Target and what was said of a plan -> number of plans.
        too_safe: Seed and target of each plan that the checker calls safe and the oracle does not.
        too_strict: The same the other way round, with the classes of the findings.
        refused: Plans that break a rule of the IR and are not compared.
    """

    plans: int = 0
    refused: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    too_safe: list[tuple[int, Target]] = field(default_factory=list)
    too_strict: list[tuple[int, Target, tuple[str, ...]]] = field(default_factory=list)


def found_kinds(plans: Sequence[Program], target: Target) -> tuple[str, ...]:
    """Classes of what the checker finds."""
    return tuple(sorted({finding.kind for finding in check(plans, target)} - NOT_COMPARED))


def compare(seeds: Iterator[int], until: Callable[[], bool], targets: Sequence[Target] = EVERY_TARGET) -> Outcome:
    """Compare plan after plan until told to stop, or until the checker calls something safe that is not."""
    outcome = Outcome()
    for seed in seeds:
        if until():
            break
        plans = random_plans(seed)
        try:
            for program in plans:
                verify(program)
        except ProgramError:
            outcome.refused += 1
            continue
        outcome.plans += 1
        for target in targets:
            try:
                kinds, unsafe = found_kinds(plans, target), is_unsafe(plans, target)
            except Exception as error:
                error.add_note(f"seed {seed}, target {target.name}")
                raise
            outcome.verdicts[f"{target.name} {'unsafe' if unsafe else 'safe'}"] += 1
            if unsafe and not kinds:
                outcome.too_safe.append((seed, target))
            elif kinds and not unsafe:
                outcome.too_strict.append((seed, target, kinds))
        if outcome.too_safe:
            break
    return outcome


# ---------------------------------------------------------------------------------------------------------------- smaller


Wrong = Callable[[Sequence[Program], Target], bool]


def too_safe(plans: Sequence[Program], target: Target) -> bool:
    """Whether the checker calls unsafe plans safe."""
    return not found_kinds(plans, target) and is_unsafe(plans, target)


def too_strict(kinds: tuple[str, ...]) -> Wrong:
    """Whether the checker refuses safe plans, for findings of these classes."""
    return lambda plans, target: found_kinds(plans, target) == kinds and not is_unsafe(plans, target)


def smallest(plans: list[Program], target: Target, wrong: Wrong) -> list[Program]:
    """The plans with as much taken away as leaves checker and oracle of two minds."""
    again = True
    while again:
        again = False
        for rank in range(len(plans)):
            for smaller in _smaller(plans[rank]):
                tried = [smaller if k == rank else program for k, program in enumerate(plans)]
                if _is_still_wrong(tried, target, wrong):
                    plans, again = tried, True
                    break
    return plans


def _is_still_wrong(plans: Sequence[Program], target: Target, wrong: Wrong) -> bool:
    try:
        for program in plans:
            verify(program)
        return wrong(plans, target)
    except (ProgramError, KeyError, IndexError, StopIteration):  # what was taken away is needed
        return False


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less each."""
    read = {v for op in program.ops for v in op.operands}
    for op in reversed(program.ops):
        if not read & set(op.results):
            rest = program.with_ops([each for each in program.ops if each is not op])
            rest = rest.with_ops(rest.ops, used_values(rest))
            jobs = [
                msgspec.structs.replace(
                    job,
                    items=tuple(item for item in job.items if item[0] != op.id),
                    host_waits=tuple(pair for pair in job.host_waits if op.id not in (pair[0][0], pair[1][0])),
                )
                for job in program.jobs
            ]
            rest = msgspec.structs.replace(rest, jobs=tuple(job for job in jobs if job.items))
            yield with_valid_events(rest, program.events)
    for k, event in enumerate(program.events):
        others = (*program.events[:k], *program.events[k + 1 :])
        yield msgspec.structs.replace(program, events=others)
        for wait in event.waits if len(event.waits) > 1 else ():
            fewer = msgspec.structs.replace(event, waits=tuple(item for item in event.waits if item != wait))
            yield msgspec.structs.replace(program, events=(*others, fewer))
    last = program.pipeline.num_micro_batches - 1
    if last:
        pipe = msgspec.structs.replace(program.pipeline, num_micro_batches=last)
        jobs = [
            msgspec.structs.replace(
                job, micro_batch=min(job.micro_batch, last - 1), items=tuple(i for i in job.items if i[1] < last), host_waits=()
            )
            for job in program.jobs
        ]
        fewer_batches = msgspec.structs.replace(program, pipeline=pipe, jobs=tuple(job for job in jobs if job.items))
        yield with_valid_events(fewer_batches, program.events)
    for k in range(1, len(program.jobs)):
        one, two = program.jobs[k - 1 : k + 1]
        joined = msgspec.structs.replace(one, items=(*one.items, *two.items), host_waits=(*one.host_waits, *two.host_waits))
        yield msgspec.structs.replace(program, jobs=(*program.jobs[: k - 1], joined, *program.jobs[k + 1 :]))
    for op in program.ops:
        if op.stream:
            yield program.with_ops([msgspec.structs.replace(each, stream="") if each is op else each for each in program.ops])


# ---------------------------------------------------------------------------------------------------------------- command


def main(words: Sequence[str] | None = None) -> int:
    """Compare for a while; 1 if the checker called an unsafe plan safe."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long (default: an hour)")
    parser.add_argument("--seed", type=int, default=None, help="the first plan's; the ones after it follow (default: the time)")
    parser.add_argument("--strict", type=int, default=0, metavar="N", help="also print plans that the checker alone refuses, of N classes")
    given = parser.parse_args(words)
    first = given.seed if given.seed is not None else time.time_ns() % 1_000_000 * 1_000_000
    end = time.monotonic() + given.seconds
    print(f"plans from seed {first} on", flush=True)
    outcome = compare(iter(range(first, sys.maxsize)), lambda: time.monotonic() > end)
    spent = given.seconds - (end - time.monotonic())
    print(f"{outcome.plans} plans in {spent:.0f} s, {outcome.refused} more that the IR refuses")
    print(f"verdicts of the oracle: {dict(sorted(outcome.verdicts.items()))}")
    strict = Counter(f"{target.name}: {', '.join(kinds)}" for _, target, kinds in outcome.too_strict)
    print(f"refused by the checker alone: {dict(strict.most_common())}")
    for seed, target, kinds in list({each[2]: each for each in outcome.too_strict}.values())[: given.strict]:
        _print(f"seed {seed}: the checker finds {', '.join(kinds)} on {target.name}, the oracle nothing", seed, target, too_strict(kinds))
    for seed, target in outcome.too_safe:
        _print(f"seed {seed}: the checker calls unsafe plans safe on {target.name}", seed, target, too_safe)
    return 1 if outcome.too_safe else 0


def _print(headline: str, seed: int, target: Target, wrong: Wrong) -> None:
    print(f"\n{headline}; the smallest like it:")
    plans = smallest(random_plans(seed), target, wrong)
    print("\n".join(show(program) for program in plans))
    print(*check(plans, target), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
