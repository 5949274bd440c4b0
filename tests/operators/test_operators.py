"""What is said of operators holds for the installed wheel: all of them, by definition and by machine code."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from interlace.errors import ProgramError
from interlace.ir import Op, operation_kinds, operators
from interlace.ir.effects import ONLY_ABOVE_0, ONLY_AT_0
from interlace.scheduler.memory.executor import REUSING
from tests.operators import probe, table, wheel

pytestmark = pytest.mark.paddle
LISTS = {"draws": operators.DRAWS, "acts": operators.ACTS, "controls": operators.CONTROLS, "computes": operators.COMPUTES}


def lacking() -> frozenset[str]:
    """Operators of the lists that the installed version does not have."""
    import paddle

    return table.LACKING.get(paddle.__version__, frozenset())


def test_every_operator_of_the_wheel_is_in_one_list() -> None:
    """In the one that its definition and its kernel's machine code give; `python -m tests.operators.table --write` writes them. The lists
    are those of the newest version: an older one has all of them but the named."""
    found = table.derived()
    everyone = {operators.key(name) for name in wheel.definitions()}
    assert len(everyone) > 1000
    assert {key: [name for name, keys in LISTS.items() if key in keys] for key in everyone} == {
        key: [name for name, keys in found.items() if key in keys] for key in everyone
    }
    assert set().union(*LISTS.values()) - everyone == lacking()
    assert sum(map(len, LISTS.values())) == len(everyone | lacking())


def test_every_operator_that_may_share_memory_without_saying_so_is_listed() -> None:
    """All of the wheel: by the code of its kernel, or by the names of its results where the wheel has no code."""
    lists = {name: getattr(operators, name) for name in table.PAIRS}
    here = {name: {key: pairs for key, pairs in found.items() if key not in lacking()} for name, found in lists.items()}
    mine = {name: {f"{key}:{r}:{o}" for key, pairs in found.items() for r, o in pairs} for name, found in here.items()}
    assert mine | {"MAY_SHARE_ANY": operators.MAY_SHARE_ANY - lacking()} == table.sharing()
    judged = {kind for judged in table.SHARED.values() for kind in judged} | table.APART
    assert judged <= {operators.key(name) for name in wheel.definitions()} | lacking()


def test_an_operator_whose_sharing_nobody_has_judged_may_share() -> None:
    """With any operand where its kernel lets tensors share memory, with its namesake where it has no code; with none otherwise."""
    made = wheel.Definition("pd_op.new", ("x", "state"), (), ("out", "state_out"), "new")
    assert table.sharing_of(made, {"new"}, {"new"}) == ("MAY_SHARE_ANY", ())
    assert table.sharing_of(made, set(), set()) == ("MAY_WRITE", ("1:1",))
    assert table.sharing_of(made, set(), {"new"})[1] == ()
    said = wheel.Definition("pd_op.new_", ("x", "state"), (), ("out", "state_out"), "new", (("state_out", "state"),))
    assert table.sharing_of(said, set(), set())[1] == ()


def test_operators_that_communicate_without_a_group_are_known() -> None:
    judged = {kind for kind, reason in table.JUDGED["acts"].items() if reason.startswith(("communicates", "lets ranks", "makes comm"))}
    assert judged == operation_kinds.WITHOUT_GROUP


def test_an_operator_that_nobody_has_judged_is_told_apart() -> None:
    """By its code, or by the words of its definition."""
    made = wheel.Definition("pd_op.new", ("x",), ("axis",), ("out",), "new")
    assert table.class_of(made, set(), set()) == "computes"
    assert table.class_of(made, {"new"}, set()) == "draws"
    assert table.class_of(made, set(), {"new"}) == "acts"
    assert table.class_of(wheel.Definition("pd_op.new", ("x",), ("attn_dropout_rate",), ("out",), "new"), set(), set()) == "draws"
    assert table.class_of(wheel.Definition("pd_op.new", ("x",), (), (), "new"), set(), set()) == "acts"


@pytest.mark.parametrize(
    ("kernel", "what", "expected"),
    [
        ("dropout", wheel.DRAWS, True),
        ("dirichlet", wheel.DRAWS, True),
        ("shuffle_batch", wheel.DRAWS, True),
        ("dpsgd", wheel.DRAWS, True),
        ("dropout_grad", wheel.DRAWS, False),
        ("matmul", wheel.DRAWS, False),
        ("layer_norm", wheel.DRAWS, False),
        ("print_kernel", wheel.ACTS, True),
        ("check_numerics", wheel.ACTS, True),
        ("read_file", wheel.ACTS, True),
        ("matmul", wheel.ACTS, False),
        ("layer_norm", wheel.ACTS, False),
    ],
)
def test_machine_code_says_who_draws_and_who_acts(kernel: str, what: Any, expected: bool) -> None:
    """Directly, through functions without a symbol, from the C++ library's generator, and by the clock."""
    assert (kernel in wheel.reaching(what)) == expected


def test_every_operator_with_a_ring_is_known_to_communicate_or_not() -> None:
    """Those of which it is not known are refused where they name a ring (`capture.with_group`): they belong to no training."""
    found = {op.name.rpartition(".")[2].rstrip("_") for op in wheel.definitions().values() if "ring_id" in op.attributes}
    from interlace.bridge.capture import with_group

    refused = {"comm_init_all", *(name for name in found if name.startswith("fused_multi_transformer"))}
    assert len(found) > 20
    assert found - refused <= set(operation_kinds.COLLECTIVES) | operation_kinds.SENDS | operation_kinds.RECEIVES | operation_kinds.SILENT
    for name in refused:
        with pytest.raises(ProgramError, match="does not know how operations of this kind do"):
            with_group(Op(1, f"pd_op.{name}", (), (), "forward", attrs={"ring_id": 1}))


def test_operators_that_the_in_place_pass_changes_are_paddles() -> None:
    """Each has a form in place, with the same results in the same operands."""
    for kind, pairs in REUSING.items():
        found = wheel.definitions()[f"pd_op.{kind}_"]
        assert pairs == tuple((found.results.index(result), found.operands.index(operand)) for result, operand in found.inplace)


def test_attributes_that_keep_an_operator_from_drawing_exist() -> None:
    for kind, attribute in (ONLY_ABOVE_0 | ONLY_AT_0).items():
        assert attribute in wheel.definitions()[f"pd_op.{kind}"].attributes
        assert kind in operators.DRAWS


DYNAMIC_ONLY = {
    *((name, "x") for name in ("reshape", "flatten", "squeeze", "unsqueeze")),
    ("batch_norm", "mean"),
    ("batch_norm", "variance"),
}
"""What these share when they are called without a program; a program has views and results in place of their own names."""


PARTS = 24
"""Of the operators that can be called, of which `make test` calls one: what they do changes with Paddle's wheel alone."""


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_called_operators_share_and_write_no_more_than_is_said(part: int) -> None:
    """All of the wheel that can be called with guessed operands: more than half of them."""
    names = probe.callable_operators()[part::PARTS]
    seen = probe.seen(names, 60, 6)
    assert len([each for each in seen.values() if each.calls]) > 500 // PARTS
    unsaid = {}
    for name, each in seen.items():
        made, key = wheel.definitions()[name], operators.key(name)
        lists = (operators.VIEWS, operators.WRITES, operators.MAY_SHARE, operators.MAY_WRITE)
        listed = {(made.results[r], made.operands[o]) for pairs in lists for r, o in pairs.get(key, ())}
        writable = {made.operands[o] for pairs in lists[1::2] for _, o in pairs.get(key, ())} | {operand for _, operand in made.inplace}
        shared = (
            [] if key in operators.MAY_SHARE_ANY else [pair for pair in each.shared if pair not in {*listed, *made.inplace, *made.views}]
        )
        wrong = [*(operand for _, operand in shared), *(operand for operand in each.written if operand not in writable)]
        unsaid |= {(key, operand): each for operand in wrong if (key, operand) not in DYNAMIC_ONLY}
    assert unsaid == {}


def test_calling_an_operator_tells_what_it_shares_and_writes() -> None:
    """By itself, and through an operand that is no result; of several tensors too."""
    seen = probe.seen(["pd_op.view_slice", "pd_op.einsum", "pd_op.set", "pd_op.add", "pd_op.increment_"], 60, 20)
    assert seen["pd_op.view_slice"].shared == [("out", "input")]
    assert not seen["pd_op.view_slice"].written
    assert seen["pd_op.einsum"].shared == [("inner_cache", "x"), ("out", "x")]
    assert seen["pd_op.set"].shared == [("out", "source")]
    assert seen["pd_op.increment_"].written == ["x"]
    assert seen["pd_op.add"].calls > 5
    assert not seen["pd_op.add"].shared
    assert not seen["pd_op.add"].written


LAYERS = """
import paddle
from paddle import nn

def drawn(layer, shape):
    values = []
    for first in (True, False):
        paddle.seed(7)
        if first:
            layer(paddle.ones(shape))
        values.append(paddle.rand([4]).tolist())
    return values[0] != values[1]

print(drawn(nn.LSTM(4, 4, num_layers=2, dropout=0.0), [2, 3, 4]), drawn(nn.LSTM(4, 4, num_layers=2, dropout=0.5), [2, 3, 4]),
      drawn(nn.FractionalMaxPool2D(3, random_u=0.3), [1, 1, 8, 8]), drawn(nn.FractionalMaxPool2D(3), [1, 1, 8, 8]))
"""


def test_only_a_layer_that_draws_changes_the_generator() -> None:
    """What comes after it is drawn as if it had not been there, or not; in a process that never left the dynamic graph."""
    said = subprocess.run([sys.executable, "-c", LAYERS], check=True, capture_output=True, text=True).stdout
    assert said.split()[-4:] == ["False", "True", "False", "True"]
