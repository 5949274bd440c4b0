"""Remarks are data until they are rendered: one place has the sentences, and every rule that is emitted has one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.ir import Op
from interlace.ir.remarks import Place, Remark, remark
from interlace.planning.plan import make_plans
from interlace.report.remarks import SENTENCES, If, Unless, names_in, sentence
from interlace.scheduler.interleave import planner
from tests.strategies import World, programs

ROOT = Path(__file__).parents[2]
EMITTERS = ("remark", "applied", "declined", "found", "said", "told")
"""Functions that make remarks; the rule is their first argument, or the second where the first is the kind."""
KINDS = ("applied", "declined", "decided", "analysis")
RENDERER = ROOT / "interlace" / "report" / "remarks.py"
CONSTANTS = {"BASELINE_KEPT": "baseline-kept", "FORM_TAKEN": "form-taken"}


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    folders = ("interlace", "passes", "scheduler", "cost_model")
    return [(path, ast.parse(path.read_text())) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def emissions() -> Iterator[tuple[Path, ast.Call, str]]:
    """Calls that make a remark, each with its rule."""
    for path, tree in sources():
        if path == RENDERER or path.parent.name in ("hazards", "bridge", "local", "cli"):
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
            words = [_word(each) for each in call.args[:2]]
            rules = [word for word in words[:2] if word and word not in KINDS][:1]
            if name in EMITTERS and rules:
                yield path, call, rules[0]


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return CONSTANTS.get(node.id, "")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_every_rule_that_is_emitted_has_a_sentence_and_every_sentence_a_rule() -> None:
    assert {rule for _, _, rule in emissions()} == SENTENCES.keys()


def test_no_emitter_puts_facts_into_words() -> None:
    """Facts are numbers, names and operations: no text is put together of others where a remark is made."""
    for path, call, rule in emissions():
        texts = [node for node in ast.walk(call) if isinstance(node, ast.JoinedStr | ast.Mod)]
        assert not texts, f"{path}:{call.lineno}: {rule}"


def test_sentences_are_read_by_what_shows_them_alone() -> None:
    """Nothing that plans, proves or decides imports the renderer, so no text of a remark can be read back there."""
    shows = {"interlace/report/rules.py", "interlace/report/screen.py", "interlace/bridge/paddle_passes.py"}
    found = {
        str(path.relative_to(ROOT))
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "interlace.report.remarks"
    }
    assert found == shows


def clauses() -> list[tuple[str, str]]:
    return [(rule, each.text if isinstance(each, If | Unless) else each) for rule, every in SENTENCES.items() for each in every]


@pytest.fixture(scope="module")
def told() -> list[Remark]:
    """Remarks of plans of many kinds."""
    costs = GivenCosts({"comm": 60, "gemm": 50, "copy": 5, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})
    plain = World(pp=2, mp=2, micro_batches=4, layers=2, schedule="1F1B")
    every = [
        (plain, {}),
        (plain, {"memory_budget": "1TB"}),
        (plain, {"schedule_1f1b": {"interleave": "mixed"}, "offload_activations": {"fraction": 1.0, "min_bytes": 1}}),
        (plain, {"schedule_1f1b": {"interleave": "zb-h1"}, "throttle_host": {"run_ahead_bytes": 0}}),
        (plain, {"schedule_1f1b": {"interleave": "dx-first", "weight_delay": (2, 0)}, "throttle_host": {"syncs": "job-ends"}}),
        (plain, {"schedule_1f1b": {"interleave": "off"}, "choose_recompute": {"level": 0.5}}),
        (plain, {"schedule_1f1b": {"max_ops_per_job": 1, "interleave": "dx-first"}, "overlap_column_backward": {"modules": ["layers.0"]}}),
        (World(pp=2, micro_batches=4, layers=2, schedule="FThenB"), {"schedule_1f1b": {"interleave": "dx-first"}}),
        (World(), {"split_backward": {"modules": ["layers.0"]}}),
    ]
    found = [
        each
        for world, options in every
        for plan in make_plans(programs(world), make_config(options), costs, "given")
        for report in plan.reports
        for each in report.remarks
    ]
    (alone,) = make_plans(programs(plain)[:1], make_config({}), costs, "given")
    return [*found, *(each for report in alone.reports for each in report.remarks)]


@pytest.fixture(autouse=True, scope="module")
def _no_search() -> Iterator[None]:
    work, planner.SEARCH_WORK = planner.SEARCH_WORK, 0
    yield
    planner.SEARCH_WORK = work


@pytest.mark.slow
def test_what_passes_say_is_told_in_whole_sentences(told: list[Remark]) -> None:
    """Each remark has the facts that its first clause needs, and its sentence names every fact."""
    assert len({each.rule for each in told}) > 25
    unnamed: dict[str, set[str]] = {}
    for each in told:
        bare = msgspec.structs.replace(each, place=msgspec.structs.replace(each.place, name=""))
        assert not sentence(bare).startswith(each.rule.replace("-", " ")), f"{each} is told by its name"
        named = frozenset().union(*(names_in(clause) for rule, clause in clauses() if rule == each.rule))
        tests = {clause.fact for clause in SENTENCES[each.rule] if isinstance(clause, If | Unless)}
        unnamed.setdefault(each.rule, set()).update({*each.numbers, *each.names, *each.ops} - named - tests)
    assert {rule: facts for rule, facts in unnamed.items() if facts} == {}


@pytest.mark.slow
def test_remarks_are_stored_as_they_are(told: list[Remark]) -> None:
    assert msgspec.json.decode(msgspec.json.encode(told), type=list[Remark]) == told
    assert all(each.pass_name for each in told)


def test_facts_go_where_their_types_say() -> None:
    op = Op(3, "pd_op.matmul", (), (), "forward", layer="blocks.0")
    found = remark("applied", "rule", Place.of(op, 7), count=2, shares=(0.5, 1), name="a", names=["b", "c"], other=op, others=[op, op])
    place = Place(3, "pd_op.matmul", "blocks.0")
    assert found.place == Place(3, "pd_op.matmul", "blocks.0", 7)
    assert (found.numbers, found.names) == ({"count": 2, "shares": (0.5, 1)}, {"name": "a", "names": ("b", "c")})
    assert found.ops == {"other": (place,), "others": (place, place)}
    with pytest.raises(TypeError, match="remark: what=None; expected a number, a string, an operation"):
        remark("applied", "rule", what=None)  # type: ignore[arg-type]
