"""Passes in their order: what is checked before any runs, what each is told, what is reported, what drafts leave out."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.errors import ConfigError, PassError, ProgramError
from interlace.ir import Op, Program, parse
from interlace.ir.remarks import remark
from interlace.passes import REGISTRY, Context, Pass, Pipeline, find_pass, register
from interlace.passes.base import is_built_in, option_name
from interlace.passes.pipeline import PassReport, applied, built_in, errors_named, ordered, report_of
from interlace.planning.variants import alternatives, baseline, drafted, fallbacks, label
from interlace.report.screen import places_text

COST = GivenCosts({"default": 1})
PROGRAM = parse("""program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.relu(%0) forward layer="act"
""")


class Plain(Pass, frozen=True):
    """Adds its name to what ran, and notes what it was told."""

    number: int = 0

    def run(self, program: Program, context: Context) -> Program:
        context.memo.setdefault("told", []).append((self.name, self.number, tuple(context.facts), context.memory_limit))
        return program


def own(name: str, base: type[Pass] = Plain, **body: Any) -> type[Pass]:
    """A registered pass of a user."""
    return register(type(Plain)(name.title().replace("-", ""), (base,), {"name": name, "__module__": __name__, **body}, frozen=True))


def refusal(*passes: Pass, program: Program = PROGRAM) -> str:
    with pytest.raises(PassError) as caught:
        Pipeline(passes).check(program)
    return str(caught.value)


# --------------------------------------------------------------------------------------------------------------------- check


def test_a_pass_that_lacks_what_it_needs_is_refused_with_those_that_give_it() -> None:
    eats = own("eats", needs=frozenset({"food", "drink"}))
    drink = own("waiter", gives=frozenset({"drink"}))
    head = "pass 'eats' needs ['drink', 'food'], which nothing before it gives (ran: []); put "
    assert refusal(eats()) == f"{head}'waiter' before it"
    cook = own("cook", gives=frozenset({"food", "smoke"}))
    assert refusal(eats()) == f"{head}'cook' or 'waiter' before it"
    assert refusal(drink(), eats()) == ("pass 'eats' needs ['food'], which nothing before it gives (ran: ['waiter']); put 'cook' before it")
    assert refusal(drink(), eats(), cook()).startswith("pass 'eats' needs ['food']")
    Pipeline((cook(), drink(), eats(), eats())).check(PROGRAM)
    Pipeline((drink(), cook(), eats())).check(PROGRAM)
    del REGISTRY["cook"], REGISTRY["waiter"]
    assert refusal(eats()) == f"{head}a pass that gives it before it"


def test_what_ran_before_gives_what_it_gave() -> None:
    own("cook", gives=frozenset({"food"}))
    eats, starves = own("eats", needs=frozenset({"food"})), own("starves", needs=frozenset({"water"}))
    before = Program(PROGRAM.ops, PROGRAM.values, passes=("unknown", "cook"))
    Pipeline((eats(),)).check(before)
    assert "(ran: ['unknown', 'cook', 'eats'])" in refusal(eats(), starves(), program=before)


def test_a_pass_is_refused_in_front_of_one_that_it_must_follow() -> None:
    first, second, last = own("first"), own("second"), own("last", after=("first", "second", "elsewhere"))
    assert refusal(last(), second(), first()) == (
        "pass 'last' must run after ['first', 'second']; the order given is ['last', 'second', 'first']"
    )
    assert refusal(first(), last(), second()) == "pass 'last' must run after ['second']; the order given is ['first', 'last', 'second']"
    Pipeline((second(), first(), last())).check(PROGRAM)
    Pipeline((last(),)).check(PROGRAM)
    Pipeline((first(), last(), own("other")())).check(PROGRAM)


# ----------------------------------------------------------------------------------------------------------------------- run


def test_each_pass_is_told_what_it_asked_for() -> None:
    asks = own("asks", facts=lambda self, program, context: program.rank)
    quiet, end = own("quiet"), own("end")
    passes, memo = (asks(number=1), quiet(number=2), end(number=3)), dict[Any, Any]()
    made, reports = Pipeline(passes).run(PROGRAM, COST, memory_limit=77, memo=memo)
    assert memo["told"] == [
        ("asks", 1, (0,), 77),
        ("quiet", 2, (), 77),
        ("end", 3, (), 77),
    ]
    assert [each.asks_ranks for each in passes] == [True, False, False]
    assert made.passes == ("asks", "quiet", "end")
    assert [each.name for each in reports] == ["asks", "quiet", "end"]
    assert Pipeline(passes).run(PROGRAM, COST)[0] == made  # a memo of its own, and no room
    assert PROGRAM.passes == ()


def test_a_pass_reports_remarks() -> None:
    def acts(self: Pass, program: Program, context: Context) -> Program:
        context.applied("moved", program.ops[1])
        context.found("memory", peak_bytes=512)
        context.declined("is-an-input", program.ops[0])
        return program.with_ops([*program.ops, Op(2, "pd_op.tanh", (1,), (), "forward")])

    def declines(self: Pass, program: Program, context: Context) -> Program:
        context.declined("no-use")
        return program

    def changes(self: Pass, program: Program, context: Context) -> Program:
        context.applied("all")
        return program

    passes = [own("acts", run=acts)(), own("idle", run=lambda self, program, context: program)()]
    passes += [own("declines", run=declines)(), own("changes", run=changes)()]
    _, reports = Pipeline(tuple(passes)).run(PROGRAM, COST)
    assert places_text(reports) == [
        "acts: 2 changed, 1 declined, ops 2 -> 3",
        "  + #1 pd_op.relu (act): moved [moved]",
        "  + memory: peak 512 B [memory]",
        "  - #0 pd_op.data: is an input [is-an-input]",
        "idle: found nothing to do, ops 3 -> 3",
        "declines: 0 changed, 1 declined, ops 3 -> 3",
        "  - no use [no-use]",
        "changes: 1 changed, 0 declined, ops 3 -> 3",
        "  + all [all]",
    ]
    assert [(each.kind, each.pass_name) for each in reports[0].remarks] == [(kind, "acts") for kind in ("applied", "analysis", "declined")]
    assert all(0 < each.run_ns < 10**10 for each in reports)
    said = remark("applied", "x")
    assert report_of(passes[1], Context(COST, remarks=[said]), PROGRAM, PROGRAM, 5) == PassReport("idle", (said.of("idle"),), 2, 2, 5)


def _spoils(self: Pass, program: Program, context: Context) -> Program:
    return program.with_ops([*program.ops, Op(10, "pd_op.relu", (99,), (), "forward")])


def test_what_a_pass_gives_is_verified_but_for_drafts() -> None:
    spoils = own("spoils", run=_spoils)()
    with pytest.raises(ProgramError, match=r"(?s)^pass 'spoils': rank 0: .*reads %99"):
        Pipeline((spoils,)).run(PROGRAM, COST)
    assert len(drafted(Pipeline((spoils,))).run(PROGRAM, COST)[0].ops) == 3


@pytest.mark.parametrize("where", ["run", "facts"])
def test_an_error_says_in_which_pass_it_was_raised(where: str) -> None:
    def fails(self: Pass, program: Program, context: Context) -> Any:
        raise ConfigError("wrong", 7)

    def breaks(self: Pass, program: Program, context: Context) -> Any:
        raise KeyError("gone")

    with pytest.raises(ConfigError) as caught:
        Pipeline((own("fails", **{where: fails})(),)).run(PROGRAM, COST)
    assert caught.value.args == ("pass 'fails': ('wrong', 7)", 7)
    with pytest.raises(PassError) as broken:
        Pipeline((own("breaks", **{where: breaks})(),)).run(PROGRAM, COST)
    assert str(broken.value) == "pass 'breaks' failed with KeyError: 'gone'; the program is as it was"
    assert isinstance(broken.value.__cause__, KeyError)
    with pytest.raises(PassError, match=r"^pass 'breaks': run\(\) gave int, expected a Program$"), errors_named(REGISTRY["breaks"]()):
        applied(own("number", run=lambda self, program, context: 3)(), PROGRAM, Context(COST))


def test_a_pass_without_run_says_so() -> None:
    empty = own("empty", base=Pass)()
    with pytest.raises(NotImplementedError, match=r"pass 'empty' has no run\(\)"):
        empty.run(PROGRAM, Context(COST))
    assert (empty.mistake(has_budget=False), empty.facts(PROGRAM, Context(COST))) == (None, None)
    assert (fallbacks(empty), alternatives(empty), baseline(empty), label(empty)) == ((), (), empty, "empty")


# --------------------------------------------------------------------------------------------------------------------- drafts


def test_a_draft_leaves_out_what_nothing_needs() -> None:
    slow = own("slow", in_drafts=False, gives=frozenset({"a"}))
    slower = own("slower", in_drafts=False, gives=frozenset({"b"}))
    short = own("short", needs=frozenset({"a"}))
    made = drafted(Pipeline((slow(number=1), slower(number=2), short(number=3))))
    assert made == Pipeline((slow(number=1), short(number=3)), is_draft=True)
    left = own("left", in_drafts=False, needs=frozenset({"b"}))  # what it needs is left out with it
    assert drafted(Pipeline((slower(), left()))) == Pipeline((), is_draft=True)
    assert drafted(Pipeline(())).is_draft
    assert not Pipeline(()).is_draft


# ---------------------------------------------------------------------------------------------------------------------- order


def test_ours_are_in_the_order_that_they_ask_for() -> None:
    own("aaa-first")
    kinds = built_in()
    names = [kind.name for kind in kinds]
    assert sorted(names) == sorted(name for name, kind in REGISTRY.items() if kind.__module__.startswith("interlace.passes."))
    assert all(names.index(other) < k for k, kind in enumerate(kinds) for other in kind.after)
    for k in range(1, len(kinds)):  # of those that may come, the first by name
        ready = [n for n in names[k:] if not set(REGISTRY[n].after) & set(names[k:])]
        assert names[k] == min(ready)
    assert not is_built_in(REGISTRY["aaa-first"])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.lists(st.lists(st.integers(0, 13), max_size=3), max_size=4),
    st.randoms(use_true_random=False),
)
def test_own_passes_come_as_early_as_they_may(chosen: list[bool], wanted: list[list[int]], rng: Any) -> None:
    """Ours keep their order. Each of a user's stands right behind the last that it asks for, or behind another of a user's there."""
    known = dict(REGISTRY)
    try:
        ours = [kind() for kind, taken in zip(built_in(), chosen, strict=False) if taken]
        names = [each.name for each in ours] + ["own-0", "own-1"]
        mine = [own(f"own-{k}", after=tuple(names[n] for n in asked if n < len(names)))() for k, asked in enumerate(wanted)]
        shuffled = [*ours, *mine]
        rng.shuffle(shuffled)
        asked_for = {each.name: {name for name in each.after if name != each.name} for each in mine}
        asked_for |= {name: {names[k]} for k, name in enumerate(names[1 : len(ours)])}
        try:
            list(TopologicalSorter(asked_for).static_order())
        except CycleError:
            with pytest.raises(PassError, match=r"^passes ask to run after each other in a circle: own-.*; change `after` or `needs`$"):
                ordered(shuffled)
            return
        found = list(ordered(shuffled).passes)
        assert [each for each in found if is_built_in(type(each))] == ours
        assert len(found) == len(shuffled)
        place = {each.name: k for k, each in enumerate(found)}
        for each in mine:
            behind = [place[name] for name in each.after if name in place and name != each.name]
            assert all(k < place[each.name] for k in behind)
            between = found[max(behind, default=-1) + 1 : place[each.name]]
            assert not [other.name for other in between if is_built_in(type(other))]
    finally:
        REGISTRY.clear()
        REGISTRY.update(known)


def test_what_a_pass_needs_comes_before_it() -> None:
    """Also where another of a user's gives it; two that need what the other gives are a circle."""
    eats, cook = own("eats", needs=frozenset({"food"})), own("cook", gives=frozenset({"food"}), after=("schedule-1f1b",))
    ours = [kind() for kind in built_in() if kind.name in ("split-backward", "schedule-1f1b", "insert-events")]
    found = [each.name for each in ordered([eats(), ours[2], cook(), ours[0], ours[1]]).passes]
    assert found == ["split-backward", "schedule-1f1b", "cook", "eats", "insert-events"]
    self_fed = own("self-fed", needs=frozenset({"x"}), gives=frozenset({"x"}))
    assert [each.name for each in ordered([self_fed()]).passes] == ["self-fed"]
    hen, egg = (
        own("hen", needs=frozenset({"egg"}), gives=frozenset({"hen"})),
        own("egg", needs=frozenset({"hen"}), gives=frozenset({"egg"})),
    )
    with pytest.raises(PassError, match=r"in a circle: (hen -> egg|egg -> hen); change `after` or `needs`"):
        ordered([hen(), egg()])
    late = own("late", gives=frozenset({"dw-split"}), after=("throttle-host",))  # ours keep their order, and one of them needs it before
    with pytest.raises(PassError, match=r"in a circle: .*late"):
        ordered([late(), *(kind() for kind in built_in() if kind.name in ("overlap-column-backward", "throttle-host"))])


# ------------------------------------------------------------------------------------------------------------------- registry


def test_names_are_found_and_taken_once() -> None:
    mine = own("mine")
    assert find_pass("mine") is mine
    assert register(mine) is mine  # the same class again, as when a file is imported twice
    again = own("mine")
    assert find_pass("mine") is again
    with pytest.raises(PassError) as caught:
        register(type(Plain)("Other", (Plain,), {"name": "mine", "__module__": __name__}, frozen=True))
    assert str(caught.value) == f"pass 'mine' is registered already by {__name__}.Mine; choose another name"
    with pytest.raises(PassError, match="is registered already"):
        register(type(Plain)("Mine", (Plain,), {"name": "mine", "__module__": "elsewhere"}, frozen=True))
    with pytest.raises(PassError, match=rf"^register\(\) got {PROGRAM.rank}; expected a subclass of interlace\.passes\.Pass$"):
        register(0)  # type: ignore[type-var]
    with pytest.raises(PassError) as nameless:
        register(type(Plain)("Nameless", (Pass,), {"__module__": __name__}, frozen=True))
    assert str(nameless.value) == 'pass class Nameless has no name; give it `name = "kebab-case"`'
    with pytest.raises(PassError) as unknown:
        find_pass("mien")
    assert str(unknown.value) == (f"no pass 'mien'; there are {sorted(REGISTRY)}; a pass of your own needs @interlace.passes.register")
    assert option_name("a-b-c") == "a_b_c"


def test_what_a_context_holds_at_first() -> None:
    context = Context(COST)
    assert (context.remarks, context.facts, context.is_whole, context.memory_limit, context.memo) == (
        [],
        (),
        False,
        None,
        {},
    )
