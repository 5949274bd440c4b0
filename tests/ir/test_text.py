"""The printed form: its parser is the inverse of its printer, and says where it cannot read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.errors import ProgramError
from interlace.ir import Program, parse, show, verify
from tests.ir.odd_programs import odd_programs
from tests.strategies import plan, programs, worlds

HEAD = "program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n"


@settings(max_examples=40, deadline=None)
@given(worlds(dropout=True))
def test_parse_is_the_inverse_of_show(world: Any) -> None:
    """Text and dumps. Programs and plans of whole worlds: copies, events, vectors, views, in-place writes, jobs cut in two."""
    for program in (*programs(world), *plan(world)):
        verify(program)
        text = show(program)
        assert parse(text) == program
        assert show(parse(text)) == text


@settings(max_examples=300, deadline=None)
@given(odd_programs())
def test_every_field_survives_in_every_form(program: Program) -> None:
    """Text and dumps, odd programs. Names and attributes in any script, absent operands, vectors, null results, dynamic dims."""
    assert parse(show(program)) == program


def test_ranks_that_a_program_stands_for_survive() -> None:
    program = Program((), (), rank=1, world=4, equivalent_ranks=(2, 3))
    assert parse(show(program)) == program


def test_comments_and_blank_lines_are_skipped() -> None:
    """Text and dumps."""
    text = HEAD + '#0 %0:float32[2]"x" = pd_op.data() forward\n'
    assert parse("// what it is\n\n" + text.replace("#0", "  #0")) == parse(text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("#0 pd_op.relu() forwards", "role 'forwards'"),
        ("#0 %0:float32[2]^gpu = pd_op.relu() forward", "memory 'gpu'"),
        ("#0 %0:float32[2] pd_op.relu() forward", "#id %results"),
        ("#0 %0:float32 = pd_op.relu() forward", "float32[...]"),
        ("#0 %0:ector<float32[2]> = builtin.combine() forward", "ector[...]"),
        ("#0 %0:vector[2] = builtin.combine() forward", "vector<...>"),
        ("#0 %0:vector<float32[2];float32> = builtin.combine() forward", "element type 'float32'"),
        ("#0 %0:null[2] = pd_op.relu() forward", "expected null"),
        ("#0 pd_op.relu(%a) forward", "%a"),
        ("#0 pd_op.relu() forward colour=3", "colour"),
        ("#0 pd_op.relu() forward group=mp", "mp"),
        ("#0 pd_op.relu() forward layer=3", "str"),
        ('#0 pd_op.relu() forward {"a":}', "JSON"),
        ("#0 pd_op.relu() forward inplace=0", "0"),
        ("job forward_0 forward: 0@0", "job"),
        ("job a forward 0: 0-1", "0-1"),
        ("event e", "event"),
        ("pipeline stage=0", "micro_batches"),
        ("group 3 = a,b", "a"),
        ("program world=2", "rank"),
        ("programme rank=0", "expected program"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, words: str) -> None:
    """Text and dumps. A clear error with file, line and what was expected, whatever is wrong."""
    with pytest.raises(ProgramError) as caught:
        parse(HEAD + line, "fixture.txt")
    assert str(caught.value).startswith("fixture.txt:3: cannot read ")
    assert words in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_spoilt_text_gives_a_program_error_or_a_program(data: st.DataObject) -> None:
    """Text and dumps. No other exception, wherever a character is lost, doubled or changed; what is read is what is shown again."""
    program = plan(data.draw(worlds(max_pp=2, max_layers=1, max_micro_batches=2)))[0]
    text = show(msgspec.structs.replace(program, refusals=("one",)))
    place = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.sampled_from(["", "#", '"', "{", "%", "x", "7", "=", ",", "\n", "@", ":"]))
    try:
        read = parse(text[:place] + new + text[place + 1 :])
    except ProgramError as error:
        refused = str(error)
    else:
        refused = ""
        assert parse(show(read)) == read
    assert not refused or refused.startswith("program text:")
