"""What operations ask of the device, from shapes alone."""

from __future__ import annotations

import json

import pytest

from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.work import Part, copy_direction, moved_bytes, work_of
from interlace.ir.operation_kinds import forward_kind, memory_family
from interlace.passes.split_backward import PRODUCTS
from tests.cost_model.programs import binary, last_op, matmul, unary


def parts(found) -> tuple[Part, ...]:
    op, values, _ = found
    return work_of(op, values).parts


@pytest.mark.parametrize(
    ("x", "y", "out", "attrs", "sizes"),
    [
        ("8,32", "32,48", "8,48", "{}", (1, 8, 48, 32)),
        ("2,8,32", "32,48", "2,8,48", "{}", (1, 16, 48, 32)),
        ("2,8,32", "48,32", "2,8,48", '{"transpose_y":true}', (1, 16, 48, 32)),
        ("16,32", "16,48", "32,48", '{"transpose_x":true}', (1, 32, 48, 16)),
        ("16,32", "48,16", "32,48", '{"transpose_x":true,"transpose_y":true}', (1, 32, 48, 16)),
        ("2,4,8,64", "2,4,16,64", "2,4,8,16", '{"transpose_y":true}', (8, 8, 16, 64)),
        ("8,10,32", "8,32,48", "8,10,48", "{}", (8, 10, 48, 32)),
        ("32", "32,48", "48", "{}", (1, 1, 48, 32)),
    ],
)
def test_matmul_sizes(x, y, out, attrs, sizes):
    (part,) = parts(matmul(x, y, out, attrs=attrs))
    batch, m, n, k = sizes
    assert {name: size for name, size in part.dims if name in ("batch", "m", "n", "k")} == {"batch": batch, "m": m, "n": n, "k": k}
    assert {name for name, size in part.dims if size and name not in ("batch", "m", "n", "k")} == set(json.loads(attrs))
    assert part.result_elements == batch * m * n
    assert part.flops == 2 * batch * m * n * k


@pytest.mark.parametrize(("results", "count"), [("%3:f32[8,32], %4:f32[32,48]", 2), ("%3:null, %4:f32[32,48]", 1)])
def test_matmul_grad_is_a_gemm_for_each_gradient_it_gives(results, count):
    found = parts(
        last_op(
            "%0:float32[8,32] = pd_op.data() forward",
            "%1:float32[32,48] = pd_op.data() forward",
            "%2:float32[8,48] = pd_op.data() forward",
            f"{results.replace('f32', 'float32')} = pd_op.matmul_grad(%0, %1, %2) backward",
        )
    )
    assert [part.flops for part in found] == [2 * 8 * 32 * 48] * count


@pytest.mark.parametrize("transposes", [(False, False), (False, True), (True, False), (True, True)])
def test_a_products_gradients_have_the_transposes_of_the_products_that_replace_them(transposes):
    """The sizes and transposes of dX and dW are those that split-backward gives the products it makes of them."""
    x, y = ("32,8" if transposes[0] else "8,32"), ("48,32" if transposes[1] else "32,48")
    attrs = json.dumps(dict(zip(("transpose_x", "transpose_y"), transposes, strict=True)))
    data = [f"%{place}:float32[{shape}] = pd_op.data() forward" for place, shape in enumerate((x, y, "8,48"))]
    found = parts(last_op(*data, f"%3:float32[{x}], %4:float32[{y}] = pd_op.matmul_grad(%0, %1, %2) backward {attrs}"))
    shapes = {"x": x, "y": y, "dout": "8,48"}
    for part, product, out in zip(found, PRODUCTS[transposes], (x, y), strict=True):
        transposed = json.dumps({"transpose_x": product.transpose_left, "transpose_y": product.transpose_right})
        assert parts(matmul(shapes[product.left], shapes[product.right], out, "float32", transposed)) == (part,)


def test_fused_linear_param_grad_add_is_one_gemm_that_reads_and_writes_the_buffer():
    (part,) = parts(
        last_op(
            "%0:bfloat16[2,8,32] = pd_op.data() forward",
            "%1:bfloat16[2,8,48] = pd_op.data() forward",
            "%2:float32[32,48] = pd_op.data() forward",
            "%3:float32[32,48]~2, %4:null = pd_op.fused_linear_param_grad_add_(%0, %1, %2, _) backward inplace=0:2",
        )
    )
    assert dict(part.dims) == {"batch": 1, "m": 32, "n": 48, "k": 16, "transpose_x": 1}
    assert part.size_bytes == 2 * 16 * (32 + 48) + 2 * 4 * 32 * 48


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_half_the_pairs_when_causal_and_knows_grouped_heads(causal):
    tensors = [f"%{k}:bfloat16[2,128,{heads},64] = pd_op.data() forward" for k, heads in enumerate((8, 2, 2))]
    flag = str(causal).lower()
    given = "%3:bfloat16[2,128,8,64], %4:null, %5:float32[2,8,128], %6:int64[2]"
    (part,) = parts(last_op(*tensors, f'{given} = pd_op.flash_attn(%0, %1, %2) forward {{"causal":{flag}}}'))
    assert part.flops == 4 * 2 * 8 * 128 * 128 * 64 // (2 if causal else 1)
    assert dict(part.dims)["kv_heads"] == 2


def test_traffic_counts_an_operand_once_and_leaves_out_what_is_only_shape():
    op, values, _ = last_op(
        "%0:float32[4,4] = pd_op.data() forward",
        "%1:float32[4,4] = pd_op.data() forward",
        "%2:float32[4,4] = pd_op.multiply_grad(%0, %0, %1) backward no_buffer=2",
    )
    assert moved_bytes(op, values) == 2 * 64


@pytest.mark.parametrize(("kind", "operands"), [("embedding", "%1, %0"), ("c_embedding", "%0, %1")])
def test_embedding_reads_the_rows_it_gives_not_the_whole_table(kind, operands):
    (part,) = parts(
        last_op(
            "%0:float32[1000,16] = pd_op.data() forward",
            "%1:int64[8] = pd_op.data() forward",
            f"%2:float32[8,16] = pd_op.{kind}({operands}) forward",
        )
    )
    assert (part.kind, part.dtype, dict(part.dims)) == ("embedding", "float32", {"elements": 8})
    assert part.size_bytes == 2 * 8 * 16 * 4 + 64


@pytest.mark.parametrize(("kind", "operands"), [("embedding_grad", "%1, %0, %2"), ("c_embedding_grad", "%0, %1, %2")])
def test_the_gradient_of_an_embedding_is_zeros_for_the_table_and_sums_of_rows(kind, operands):
    op = last_op(
        "%0:float32[1000,16] = pd_op.data() forward",
        "%1:int64[8] = pd_op.data() forward",
        "%2:float32[8,16] = pd_op.data() forward",
        f"%3:float32[1000,16] = pd_op.{kind}({operands}) backward",
    )
    sums, zeros = parts(op)
    assert CostModel(load_profile("h200")).category(*op) == "memory:embedding_grad"
    assert (zeros.kind, zeros.size_bytes, sums.kind, sums.size_bytes) == ("full", 1000 * 16 * 4, "embedding_grad", 64 + 2 * 8 * 16 * 4)
    assert dict(sums.dims) == {"elements": 8}


def test_rows_of_a_loss_gradient_are_those_of_its_scores():
    (part,) = parts(
        last_op(
            "%0:int64[8,1] = pd_op.data() forward",
            "%1:float32[8,100] = pd_op.data() forward",
            "%2:float32[8,1] = pd_op.data() forward",
            "%3:float32[8,100] = pd_op.cross_entropy_with_softmax_grad(%0, %1, %2) backward",
        )
    )
    assert (part.dtype, dict(part.dims)) == ("float32", {"rows": 8, "cols": 100})


@pytest.mark.parametrize("fields", ["inplace=0:0", "views=0:0"])
def test_a_reshape_that_shares_memory_is_free_and_one_that_does_not_is_a_copy(fields):
    assert parts(unary("pd_op.reshape", "4,4", fields=fields)) == ()
    assert parts(unary("pd_op.reshape", "4,4"))[0].size_bytes == 2 * 32


@pytest.mark.parametrize("name", ["builtin.combine", "pd_op.full_int_array", "pd_op.share_data_", "builtin.shadow_output"])
def test_bookkeeping_is_free(name):
    assert parts(unary(name, "4")) == ()


def test_gradient_accumulation_is_told_from_an_add():
    lines = ["%0:float32[4]! = pd_op.data() forward", "%1:float32[4] = pd_op.data() forward"]
    (sink,) = parts(last_op(*lines, "%2:float32[4]~0! = pd_op.add_(%0, %1) backward inplace=0:0"))
    assert (sink.kind, parts(binary("pd_op.add", "4"))[0].kind) == ("grad_accumulate", "add")


def test_control_flow_and_dynamic_shapes_are_assumed_with_the_reason():
    op, values, _ = unary("pd_op.if", "4", fields="num_blocks=2")
    assert "control flow" in work_of(op, values).assumed
    assert work_of(op, values).parts
    op, values, _ = unary("pd_op.gelu", "-1,4")
    work = work_of(op, values)
    assert (work.unknown, work.assumed) == ("", "known only at run time: [-1, 4] as [1, 4], [-1, 4] as [1, 4]")
    assert [part.size_bytes for part in work.parts] == [2 * 4 * 2]


def test_a_gradient_of_a_gradient_is_no_gradient():
    assert forward_kind("matmul_double_grad") == ("matmul_double", True)
    assert memory_family("gelu_double_grad") == ""
    assert (memory_family("swiglu_grad"), memory_family("rms_norm_grad")) == ("elementwise", "norm_grad")


def test_splitting_a_tensor_copies_and_taking_a_vector_apart_does_not():
    text = "%1:float32[2,4], %2:float32[2,4] = {}(%0) forward"
    assert parts(last_op("%0:float32[4,4] = pd_op.data() forward", text.format("pd_op.split")))[0].size_bytes == 128
    assert parts(last_op("%0:vector<float32[2,4];float32[2,4]> = pd_op.data() forward", text.format("builtin.split"))) == ()


def test_the_gradient_of_attention_is_five_products_for_two() -> None:
    data = [f"%{k}:bfloat16[2,128,8,64] = pd_op.data() forward" for k in range(3)]
    forward, backward = (
        parts(last_op(*data, f"%3:bfloat16[2,128,8,64] = pd_op.{name}(%0, %1, %2) backward"))[0]
        for name in ("flash_attn", "flash_attn_grad")
    )
    assert (backward.flops, forward.flops) == (10 * 2 * 8 * 128 * 128 * 64, 4 * 2 * 8 * 128 * 128 * 64)


def test_parallel_cross_entropy_is_a_softmax_and_three_sums_of_a_number_a_row() -> None:
    data = ["%0:bfloat16[4,6,100] = pd_op.data() forward", "%1:int64[4,6,1] = pd_op.data() forward"]
    found = parts(last_op(*data, "%2:bfloat16[4,6,100], %3:float32[4,6,1] = pd_op.c_softmax_with_cross_entropy(%0, %1) forward group=1"))
    assert [(part.kind, part.size_bytes) for part in found[1:]] == [("all_reduce", 4 * 24)] * 3
    assert (found[0].kind, dict(found[0].dims)) == ("softmax", {"rows": 24, "cols": 100})


@pytest.mark.parametrize(("place", "way"), [(0, "d2h"), (1, "d2d"), (2, "d2h")])
def test_paddles_place_says_where_a_copy_goes_if_its_values_do_not(place: int, way: str) -> None:
    op, values, _ = unary("pd_op.memcpy", "4", fields=f'{{"dst_place_type":{place}}}')
    assert copy_direction(op, values) == way


def test_a_sum_of_another_type_into_a_buffer_is_a_kind_of_its_own() -> None:
    lines = ["%0:float32[4]! = pd_op.data() forward", "%1:bfloat16[4] = pd_op.data() forward"]
    assert parts(last_op(*lines, "%2:float32[4]~0! = pd_op.add_(%0, %1) backward inplace=0:0"))[0].kind == "grad_accumulate_mixed"


def test_a_constant_that_the_host_keeps_runs_no_kernel():
    host, device = (last_op(f'%0:float32[1] = pd_op.full() forward {{"place":"Place({place})"}}') for place in ("cpu", "undefined:0"))
    assert parts(host) == ()
    assert not work_of(*host[:2]).unknown
    assert [part.kind for part in parts(device)] == ["full"]
