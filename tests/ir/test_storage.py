"""Storages: which values share memory, under which variables, and what the jobs at both ends of the step give and take."""

from __future__ import annotations

from interlace.ir import parse
from interlace.ir.storage import Storage, Storages, collect_items, feed_items

HEAD = "program rank=0 world=1 mode=train\n"


def storages(text: str) -> Storages:
    """Of a program's text."""
    return Storages(parse(HEAD + text))


def only(table: Storages, value: int) -> Storage:
    """The one storage of a value."""
    (storage,) = table.of(value)
    return storage


def test_a_view_has_a_variable_of_its_own_and_a_result_in_place_has_its_operands() -> None:
    table = storages("""#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[2,2]~0 = pd_op.reshape(%0) forward views=0:0
#2 %2:float32[4]~0 = pd_op.relu_(%0) forward inplace=0:0
#3 %3:float32[2,2]~0 = pd_op.scale_(%1) forward inplace=0:0
""")
    storage = only(table, 0)
    assert [table.numbers(value) for value in range(4)] == [(0,)] * 4
    assert [table.variable(value) for value in range(4)] == [0, 1, 0, 1]
    assert (storage.variables, storage.values, storage.producer, storage.size_bytes) == ({0, 1}, [0, 1, 2, 3], 0, 16)
    assert {table.parts[value][0].root for value in range(4)} == {0}
    assert [table.writes(op) for op in table.program.ops] == [[0], [], [2], [3]]
    assert [table.views(op) for op in table.program.ops] == [[], [1], [], []]


def test_a_vector_put_together_is_its_tensors_also_behind_an_operation_in_place() -> None:
    """As clipping and loss scaling do it: together, in place, apart."""
    table = storages("""#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[2] = pd_op.full() forward
#2 %2:vector<float32[4];float32[2]> = builtin.combine(%0, %1) forward
#3 %3:vector<float32[4];float32[2]>~2 = pd_op.check_(%2) forward inplace=0:0
#4 %4:float32[4], %5:float32[2] = builtin.split(%3) forward
#5 %6:float32[2]~5 = pd_op.relu_(%5) forward inplace=0:0
""")
    assert table.numbers(2) == table.numbers(3) == (0, 1)
    assert [table.numbers(value) for value in (4, 5, 6)] == [(0,), (1,), (1,)]
    assert [table.variable(value) for value in (2, 3, 4, 5, 6)] == [2, 3, 0, 1, 1]
    assert (only(table, 5).values, only(table, 5).vectors) == ([1, 5, 6], [2, 3])
    assert [table.reads(op) for op in table.program.ops] == [[], [], [], [2], [], [5]]
    assert [table.writes(op) for op in table.program.ops] == [[0], [1], [], [3], [], [6]]


def test_a_kernels_vector_is_its_elements_named_by_what_is_taken_out() -> None:
    table = storages("""#0 %0:vector<float32[4];float32[2]> = pd_op.split_with_num() forward
#1 %1:float32[4], %2:float32[2] = builtin.split(%0) forward
#2 %3:float32[2]~2 = pd_op.reshape(%2) forward views=0:0
""")
    assert [(storage.producer, storage.value, storage.size_bytes) for storage in table.of(0)] == [(0, 1, 16), (0, 2, 8)]
    assert [table.numbers(value) for value in range(4)] == [(0, 1), (0,), (1,), (1,)]
    assert [storage.variables for storage in table.of(0)] == [{1}, {2, 3}]
    assert table.writes(table.program.ops[0]) == [0]


def test_elements_that_nothing_takes_out_have_the_vectors_name() -> None:
    table = storages("#0 %0:vector<float32[4];float32[?]> = pd_op.split_with_num() forward\n".replace("?", "-1"))
    assert [(storage.value, storage.size_bytes, storage.values) for storage in table.of(0)] == [(0, 16, []), (0, -1, [])]


def test_what_is_taken_out_of_a_kernels_vector_names_it_through_an_operation_in_place() -> None:
    table = storages("""#0 %0:vector<float32[4];float32[2]> = pd_op.split_with_num() forward
#1 %1:vector<float32[4];float32[2]>~0 = pd_op.check_(%0) forward inplace=0:0
#2 %2:float32[4], %3:float32[2] = builtin.split(%1) forward
""")
    assert [table.variable(value) for value in (2, 3)] == [2, 3]
    assert [storage.variables for storage in table.of(0)] == [{2}, {3}]


def test_an_operand_of_which_only_the_shape_is_read_is_not_read() -> None:
    table = storages("""#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.add_grad(%0, %0, _) backward no_buffer=0
#2 %2:float32[4] = pd_op.add_grad(%0) backward no_buffer=0
""")
    assert [table.reads(op) for op in table.program.ops] == [[], [0], []]


def test_parts_of_a_fused_buffer_are_one_storage_with_a_variable_each() -> None:
    table = storages("""#0 %0:float32[6]!"fused" = builtin.kwarg() forward
#1 %1:float32[4]~0!"a" = builtin.parameter() forward
#2 %2:float32[2]~0!"b" = builtin.parameter() forward
#3 %3:float32[4]~0 = pd_op.sgd_(%1) optimize inplace=0:0
""")
    storage = only(table, 3)
    assert (storage.size_bytes, storage.persistable, storage.variables) == (24, True, {0, 1, 2})
    assert {part.root for value in range(4) for part in table.parts[value]} == {0}
    assert all(table.is_persistable(value) for value in range(4))


def test_a_result_written_into_what_lasts_lasts() -> None:
    """Paddle marks the buffer alone."""
    table = storages("""#0 %0:float32[4]!"g" = builtin.kwarg() forward
#1 %1:float32[4] = pd_op.full() backward
#2 %2:float32[4]~0 = pd_op.add_(%0, %1) backward inplace=0:0
""")
    assert [table.is_persistable(value) for value in range(3)] == [True, False, True]
    assert only(table, 2).lasting
    assert not only(table, 1).lasting


def test_host_buffers_last_beyond_the_step_but_are_of_each_micro_batch() -> None:
    table = storages("""#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4]^pinned = pd_op.memcpy_d2h(%0) forward
""")
    assert only(table, 1).lasting
    assert not only(table, 1).persistable


def test_inputs_are_fed_and_outputs_collected_and_neither_is_kept() -> None:
    """What surrounds the program keeps parameters, and what the step leaves in one."""
    table = storages("""pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=1F1B
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4]!"w" = builtin.parameter() forward
#2 %2:float32[4] = pd_op.add(%0, %1) forward
#3 %3:float32[4] = pd_op.full() optimize
#4 builtin.shadow_output(%2) forward {"output_name":"y"}
#5 builtin.shadow_output(%3) optimize {"output_name":"lr"}
""")
    assert feed_items(table.program) == [(0, 0), (0, 1)]
    assert collect_items(table.program) == [(4, 0), (4, 1)]
    assert [only(table, value).kept for value in range(4)] == [False, True, False, True]
    assert [table.is_once(value) for value in range(4)] == [False, True, False, True]


KEPT = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=3 chunks=1 schedule=1F1B
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4]!NAME = pd_op.relu(%0) forward
#2 builtin.shadow_output(%1) forward {"output_name":"y"}
"""


def test_a_result_that_is_only_kept_from_collection_exists_for_each_micro_batch() -> None:
    """Paddle marks such results as persistable without giving them a name."""
    for name, count in (("", 3), ('"state"', 0)):
        program = parse(KEPT.replace("NAME", name))
        assert Storages(program).is_once(1) == (not count)
        assert len(collect_items(program)) == count


def test_what_may_be_in_memory_of_others_may_be_there_behind_a_vector_too() -> None:
    """Put together and taken apart again, it is not in memory that nobody else knows."""
    table = storages("""#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[2] = pd_op.full() forward
#2 %2:float32[4] = custom_op.mine(%0) forward
#3 %3:vector<float32[4];float32[2]> = builtin.combine(%2, %1) forward
#4 %4:float32[4], %5:float32[2] = builtin.split(%3) forward
""")
    assert table.numbers(2) == (2, 0)
    assert table.numbers(3) == (2, 1, 0)
    assert table.numbers(4) == (2, 0)
    assert table.numbers(5)[0] == 1


def test_elements_of_a_kernels_vector_may_be_in_memory_of_what_it_is_given() -> None:
    """As the operands that einsum keeps for backward, and its result where nothing is left to compute."""
    table = storages("""#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.full() forward
#2 %2:vector<float32[4];float32[4]> = builtin.combine(%0, %1) forward
#3 %3:float32[4], %4:vector<float32[4];float32[4]> = pd_op.einsum(%2) forward
#4 %5:float32[4], %6:float32[4] = builtin.split(%4) forward
""")
    assert table.numbers(3) == (2, 0, 1)
    assert table.numbers(4) == (3, 4, 0, 1)
    assert (table.numbers(5), table.numbers(6)) == ((3, 0, 1), (4, 0, 1))
    assert [part.storage for part in table.written_parts(table.program.ops[3], 4)] == [3, 4]


def test_a_result_in_place_may_be_in_the_memory_of_another_operand() -> None:
    """`set_` gives its first operand's variable the memory of the second."""
    table = storages("""#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.full() forward
#2 %2:float32[4]~0 = pd_op.set_(%0, %1) forward inplace=0:0
""")
    assert table.numbers(2) == (0, 1)
    assert {part.variable for part in table.parts[2]} == {0}
    assert [part.storage for part in table.written_parts(table.program.ops[2], 2)] == [0]


def test_an_unknown_operation_writes_what_is_given_to_it_though_that_may_be_in_what_lasts() -> None:
    """Its operand is not what lasts; what lasts it writes only where it says so."""
    table = storages("""#0 %0:float32[4]!"p" = builtin.parameter() forward
#1 %1:float32[4] = custom_op.mine(%0) forward
#2 %2:float32[4] = custom_op.mine(%1) forward
""")
    assert table.numbers(1) == (1, 0)
    assert [[part.storage for part in table.written_parts(op, 1)] for op in table.program.ops[2:]] == [[1]]
    assert table.writes(table.program.ops[2]) == [2, 1]
    assert table.writes(table.program.ops[1]) == [1]
