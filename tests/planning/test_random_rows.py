"""Any legal rows are planned, proved and computed to the same numbers; rows that are not legal are refused with their place."""

from __future__ import annotations

import random
import re
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace.config import make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import ConfigError, PlanError
from interlace.ir import Program
from interlace.ir.schedule import OPTIMIZER, Part, Slot, joined, show_row
from interlace.ir.target import CPU, CUSTOM, GPU
from interlace.planning.plan import make_plans
from interlace.scheduler.hazards import check
from interlace.scheduler.jobs.legal_rows import stall
from tests.closure import Closure
from tests.interpreter import assert_same
from tests.strategies import World, programs, worlds

COST = CostModel(load_profile("h200"))


@dataclass
class Drawing:
    """A random run of a step: a stage that can go on takes a slot of parts that are ready, until all is done."""

    world: World
    rng: random.Random
    rows: list[list[Slot]] = field(default_factory=list)
    done: set[tuple[int, Part]] = field(default_factory=set)
    line: dict[tuple[int, str], deque[Part]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self) -> None:
        stages = range(self.world.pp)
        self.rows = [[] for _ in stages]
        self.kinds = [("F", *self.rng.choice([("B",), ("I", "W")]), *self.rng.choice([(), ("R",), ("S",), ("R", "S")])) for _ in stages]
        self.next = [{(kind, chunk): 0 for kind in self.kinds[stage] for chunk in range(self.world.chunks)} for stage in stages]
        self.depth = [self.rng.randint(1, self.world.micro_batches * self.world.chunks) for _ in stages]
        self.width = self.rng.randint(1, 4)

    def drawn(self) -> list[list[Slot]]:
        """Rows of all stages."""
        while any(count < self.world.micro_batches for counts in self.next for count in counts.values()):
            deep = {stage: list(self.ready(stage, [])) for stage in range(self.world.pp)}
            shallow = [stage for stage, parts in deep.items() if any(part.kind != "F" or self.room(stage) for part in parts)]
            self.step(self.rng.choice(shallow or [stage for stage, parts in deep.items() if parts]), bool(shallow))
        return [[*row, OPTIMIZER] for row in self.rows]

    def room(self, stage: int) -> bool:
        """Whether a stage may take one more micro-batch."""
        first = self.kinds[stage][1]
        held = sum(self.next[stage]["F", c] - self.next[stage][first, c] for c in range(self.world.chunks))
        return held < self.depth[stage]

    def step(self, stage: int, shallow: bool) -> None:
        """Draw a slot of a stage, and run it."""
        parts: list[Part] = []
        for _ in range(self.rng.randint(1, self.width)):
            found = [part for part in self.ready(stage, parts) if part.kind != "F" or not shallow or self.room(stage)]
            if found:
                parts.append(self.rng.choice(found))
                self.take(stage, parts[-1])
        self.rows[stage].append(Slot(tuple(parts)))
        self.done.update((stage, part) for part in parts)
        for part in parts:
            self.send(stage, part)

    def ready(self, stage: int, beside: list[Part]) -> Iterator[Part]:
        """Parts that a stage can run now, in one slot with others."""
        if any(part.kind in "RS" for part in beside):
            return
        for (kind, chunk), micro_batch in self.next[stage].items():
            part = Part(kind, micro_batch, chunk)
            if micro_batch < self.world.micro_batches and not (beside and kind in "RS") and self.can(stage, part):
                yield part

    def can(self, stage: int, part: Part) -> bool:
        """Whether what a part needs is there, and it is its message's turn."""
        kinds, here = self.kinds[stage], lambda kind: (stage, Part(kind, part.micro_batch, part.chunk)) in self.done
        if part.kind in "WS":
            return here(kinds[1])
        if part.kind == "F" and "R" in kinds:
            return here("R")
        if part.kind in "BI" and not here("F"):
            return False
        way = "F" if part.kind in "FR" else "B"
        comes = self.comes(stage, part, way)
        return comes is None or bool(comes and comes[0] == Part(way, part.micro_batch, part.chunk))

    def comes(self, stage: int, part: Part, way: str) -> deque[Part] | None:
        """Messages on their way to a part of a stage; None where the model starts or its loss is."""
        ends = (stage, part.chunk) == ((0, 0) if way == "F" else (self.world.pp - 1, self.world.chunks - 1))
        return None if ends else self.line[stage, way]

    def take(self, stage: int, part: Part) -> None:
        """A part is in a slot: it has its message."""
        self.next[stage][part.kind, part.chunk] += 1
        way = "F" if part.kind in "FR" else "B"
        if part.kind in "FRBI" and not (part.kind == "F" and "R" in self.kinds[stage]):
            comes = self.comes(stage, part, way)
            if comes:
                comes.popleft()

    def send(self, stage: int, part: Part) -> None:
        """A part is done: its message is on its way."""
        kinds, step = self.kinds[stage], 1 if part.kind == "F" else -1
        if part.kind not in ("F", "S" if "S" in kinds else kinds[1]):
            return
        target, chunk = stage + step, part.chunk
        if not 0 <= target < self.world.pp:
            target, chunk = target % self.world.pp, chunk + step
        if 0 <= chunk < self.world.chunks:
            way = "F" if part.kind == "F" else "B"
            self.line[target, way].append(Part(way, part.micro_batch, chunk))


def planned_as(before: list[Program], **options: Any) -> list[Program]:
    return [plan.program for plan in make_plans(before, make_config({"schedule_1f1b": options}), COST, "h200")]


def planned(before: list[Program], text: str, **options: Any) -> list[Program]:
    """Plans of a schedule given as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.rows"
        path.write_text(text)
        return planned_as(before, schedule_file=str(path), **options)


def chunked(world: World) -> World:
    """The same with two chunks a stage."""
    return msgspec.structs.replace(world, schedule="VPP", chunks=2, pp=max(2, world.pp))


PLAIN = dict.fromkeys(("streams", "pairs", "offload", "hoist", "cut"), False)
SMALL = worlds(max_pp=3, max_micro_batches=5, max_layers=2, schedule="1F1B", **PLAIN)


def drawn_rows(world: World, rng: random.Random) -> str:
    return "\n".join(show_row(stage, row) for stage, row in enumerate(Drawing(world, rng).drawn()))


def edited(text: str, rng: random.Random) -> str:
    """One slip of the pen: a word left out, written twice, swapped with another, joined to the next, or with another number or kind."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    head, words = lines[at][:4], lines[at][4:].split()
    k, other = rng.randrange(len(words)), rng.randrange(len(words))
    change = rng.choice(["drop", "double", "swap", "join", "number", "kind"])
    if change == "swap":
        words[k], words[other] = words[other], words[k]
    elif change == "join":
        words[k : k + 2] = ["+".join(words[k : k + 2])]
    elif change in ("number", "kind"):
        letters = "0123" if change == "number" else "FBIWRS"
        place = rng.choice([i for i, letter in enumerate(words[k]) if letter.isdigit() == (change == "number")] or [0])
        words[k] = words[k][:place] + rng.choice(letters) + words[k][place + 1 :]
    else:
        words[k : k + 1] = [words[k]] * (2 * (change == "double"))
    return "\n".join([*lines[:at], head + " ".join(words), *lines[at + 1 :]])


def prove_and_compute(before: list[Program], after: list[Program], seed: int) -> None:
    for target in (GPU, CPU, CUSTOM):
        assert [str(finding) for finding in check(after, target)] == []
    for one in after:
        closure = Closure(one)
        assert (closure.races(), closure.freed_early(), closure.unwritten()) == ([], [], [])
    assert_same(before, after, seed=seed)


@settings(max_examples=8, deadline=None)
@given(SMALL, st.booleans(), st.integers(0, 2**16), st.sampled_from(["dx-first", "mixed"]))
def test_any_legal_rows_are_planned_proved_and_computed(world: World, chunks: bool, seed: int, form: str) -> None:
    world = chunked(world) if chunks else world
    before, text = programs(world), drawn_rows(world, random.Random(seed))
    prove_and_compute(before, planned(before, text, interleave=form, search=False), seed)


SHARES = st.floats(0, 0.99)
REFUSED = re.compile(r"my\.rows(:\d+: found '|: stage \d+: |: stages wait for each other:\n.*<-- here)", re.S)


@settings(max_examples=40, deadline=None)
@given(SMALL, st.booleans(), st.integers(0, 2**16))
@example(World(pp=3, micro_batches=1, schedule="1F1B", **PLAIN), True, 463)  # a receive before the forward that its message needs
def test_rows_with_a_slip_are_refused_with_their_place_or_still_legal(world: World, chunks: bool, seed: int) -> None:
    rng = random.Random(seed)
    world = chunked(world) if chunks else world
    before, text = programs(world), edited(drawn_rows(world, rng), rng)
    refused = ""
    try:
        after = planned(before, text, search=False)
    except (ConfigError, PlanError) as error:
        refused = str(error)
    if refused:
        assert REFUSED.search(refused), refused
    else:
        prove_and_compute(before, after, seed)


@settings(max_examples=6, deadline=None)
@given(SMALL, st.booleans(), st.data())
def test_any_lag_and_depth_are_planned_proved_and_computed(world: World, chunks: bool, data: st.DataObject) -> None:
    """With chunks micro-batches come in multiples of the stages: Paddle's baseline order of others waits in a circle, or swaps messages."""
    world = chunked(world) if chunks else world
    world = msgspec.structs.replace(world, micro_batches=2 * world.pp) if chunks else world
    before, count = programs(world), world.micro_batches
    numbers = st.lists(st.integers(0, count + 1), min_size=world.pp, max_size=world.pp).map(tuple)
    forms = st.lists(st.sampled_from(["dx-first", "mixed"]), min_size=world.pp, max_size=world.pp).map(tuple)
    options: dict[str, Any] = {"interleave": "dx-first" if chunks else data.draw(forms)}
    options["weight_delay"] = data.draw(numbers | st.integers(0, count + 1))
    weight_delays = options["weight_delay"] if isinstance(options["weight_delay"], tuple) else (options["weight_delay"],) * world.pp
    options["weight_delay_at_end"] = data.draw(
        st.none() | st.tuples(*(st.integers(weight_delay, weight_delay + 2 * bool(weight_delay)) for weight_delay in weight_delays))
    )
    options["send_latency_weight_at_end"] = data.draw(st.none() | SHARES)
    if options["weight_delay"]:
        options["inline_share"] = data.draw(SHARES | st.lists(SHARES, min_size=world.pp, max_size=world.pp).map(tuple))
    if not chunks:
        options["depth"] = tuple(1 + deep for deep in data.draw(numbers))
        if stall([joined(s, world.pp, count, weight_delay=0, warmup=options["depth"][s]) for s in range(world.pp)]):
            with pytest.raises(ConfigError, match=r"(?s)schedule_1f1b\.depth: .*<-- here"):
                planned_as(before, **options)
            return
    prove_and_compute(before, planned_as(before, only_gains=False, search=False, **options), data.draw(st.integers(0, 99)))
