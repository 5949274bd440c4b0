"""`interlace/ir/operators.py` from the installed wheel: `python -m tests.operators.table` says what differs, `--write` writes it."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

from interlace.ir import operators
from tests.operators import wheel
from tests.operators.wheel import Definition

FILE = Path(operators.__file__)
DRAWING = re.compile(r"(^|_)(seed|rng|random|dropout|drop_out|sampler|sampling)\d*(_|$)")
"""Words in the name of an operator, of an attribute or of a result of one that draws."""
CODE = ("if", "while", "pylayer", "cuda_graph", "select_input", "select_output")
"""Control flow, and what Paddle puts into its blocks: defined by hand in Paddle, without a kernel."""
JUDGED = {
    "draws": {
        "fused_gate_attention": "phi/kernels/funcs/fused_gate_attention.h increments the generator",
        "dgc": "its GPU kernel is of a library outside of Paddle",
    },
    "acts": {
        "enable_check_model_nan_inf": "sets a flag of the process",
        "disable_check_model_nan_inf": "sets a flag of the process",
        "accuracy_check": "raises an error",
        "barrier": "lets ranks wait",
        "comm_init_all": "makes communicators",
        "sync_batch_norm": "communicates over a group that no attribute names",
        "sync_batch_norm_grad": "communicates over a group that no attribute names",
        "sync_batch_norm_sp": "communicates over a group that no attribute names",
        "sync_batch_norm_grad_sp": "communicates over a group that no attribute names",
        "tensorrt_engine": "runs what an attribute holds",
        "fusion_group": "runs what an attribute holds",
        "ap_facade": "runs what an attribute holds",
        "ap_variadic": "runs what an attribute holds",
        "ap_trivial_fusion_begin": "runs what an attribute holds",
        "ap_trivial_fusion_end": "runs what an attribute holds",
    },
    "computes": {
        "random_routing": "routes tokens by numbers that it is given",
        "roi_align": "samples at places that attributes give",
        "psroi_pool": "samples at places that attributes give",
    },
}
"""What neither machine code nor definition tells, by class, with the reason."""

SHARED = {
    "VIEWS": {
        "as_strided": "0:0",
        "index_select_strided": "0:0",
        "npu_identity": "0:0",
        "onednn_to_paddle_layout": "0:0",
        "shadow_feed": "0:0",
        "shadow_feed_tensors": "0:0",
        "share_data": "0:0",
        "share_data_sr": "0:0",
        "view_dtype": "0:0",
        "view_dtype_grad": "0:1",
        "view_shape": "0:0",
        "view_shape_grad": "0:1",
        "view_slice": "0:0",
    },
    "WRITES": {"fused_linear_param_grad_add": "0:2"},
    "MAY_SHARE": {"set": "0:1"},
}
"""Results and operands that share memory though no definition says so, as the kernels' sources do it."""
PAIRS = ("VIEWS", "WRITES", "MAY_SHARE", "MAY_WRITE")
"""Lists of `operators` that say which result and which operand."""
APART = operators.names("""
    affine_grid affine_grid_grad as_strided_grad auc baddbmm_grad batch_norm_double_grad bilinear bilinear_grad bipartite_match box_clip
    c_concat c_embedding c_embedding_grad c_softmax_with_cross_entropy c_softmax_with_cross_entropy_grad coalesce_tensor conv2d
    conv2d_grad conv2d_grad_grad conv2d_transpose conv2d_transpose_grad conv3d conv3d_double_grad conv3d_grad conv3d_transpose
    conv3d_transpose_grad crf_decoding cross_entropy_with_softmax deformable_conv deformable_conv_grad depthwise_conv2d
    depthwise_conv2d_grad depthwise_conv2d_transpose depthwise_conv2d_transpose_grad dequantize_linear dist_grad
    distribute_fpn_proposals eigh eigvals eigvalsh einsum_grad fake_channel_wise_dequantize_max_abs fake_channel_wise_quantize_abs_max
    fake_channel_wise_quantize_dequantize_abs_max fold fold_grad fused_softmax_mask fused_softmax_mask_grad generate_proposals gru
    gru_grad im2sequence im2sequence_grad index_select_strided_grad kron kron_grad layer_norm load_combine lstm lstm_grad
    matmul_with_flatten matmul_with_flatten_grad matrix_nms matrix_rank matrix_rank_atol_rtol matrix_rank_tol multiclass_nms3 nms
    quantize_linear rnn rnn_grad row_conv row_conv_grad segment_pool segment_pool_grad send_u_recv send_u_recv_grad send_ue_recv
    send_ue_recv_grad sequence_conv sequence_conv_grad sequence_expand_grad sequence_pool sequence_pool_grad slogdet_grad
    slogdet_v2_grad softmax softmax_grad svd_grad unfold unfold_grad unique unique_consecutive
    viterbi_decode
    all any check_finite_and_unscale frame frame_grad index_put index_put_grad instance_norm masked_fill masked_fill_grad masked_select
    masked_select_grad matmul_grad median nanmedian roll set_value set_value_with_tensor std_grad var_grad
    fused_attention fused_rotary_position_embedding
    amax max slice_grad
""")
"""Operators whose kernels cut, assign and shape tensors for their own use only, or whose results are only named like operands: all results
have memory of their own, but for what they are declared to write in place. Last, those of which some wheels have bytes that only look
like a call."""
LACKING = {
    "3.3.0": operators.names("""
        depthwise_conv2d_bias depthwise_conv2d_bias_grad depthwise_conv3d_bias depthwise_conv3d_bias_grad linear_v2 linear_v2_double_grad
        linear_v2_grad nansum nansum_grad rms_norm rms_norm_grad std std_grad var var_grad
    """)
}
"""Version of Paddle -> operators of the lists, which are of the newest version, that it does not have."""


def class_of(definition: Definition, drawing: set[str], acting: set[str]) -> str:
    """What an operator does beside computing its results: a name of `operators`' lists, in lower case.

    Args:
        definition: As Paddle defines it.
        drawing, acting: Kernels of the wheel that draw, and that write to the world outside.
    """
    dialect, _, kind = definition.name.rstrip("_").partition(".")
    judged = [which for which, kinds in JUDGED.items() if dialect == "pd_op" and kind in kinds]
    if judged:
        return judged[0]
    if dialect == "dist_op":
        return "acts"  # they move tensors between ranks
    if dialect == "cf" or (dialect == "pd_op" and kind in CODE):
        return "controls"
    by_name = any(DRAWING.search(word) for word in wheel.words_of(definition))
    if definition.kernel in drawing or (by_name and not is_gradient(kind)):
        return "draws"
    return "acts" if definition.kernel in acting or (definition.kernel and not definition.results and not is_send(kind)) else "computes"


def sharing_of(definition: Definition, cutting: set[str], known: set[str]) -> tuple[str, tuple[str, ...]]:
    """The list that an operator belongs to whose results may be in an operand's memory without saying so, and the pairs of positions.

    Nobody's judgement is needed where code is known and shares nothing, or where none is known and no result is named after an operand.

    Args:
        definition: As Paddle defines it.
        cutting: Kernels of the wheel through which one tensor gets the memory of another.
        known: Kernels of the wheel whose code is known.
    """
    dialect, _, kind = definition.name.rstrip("_").partition(".")
    said = {result for result, _ in (*definition.inplace, *definition.views)}
    if dialect != "pd_op" or kind in APART or not definition.kernel:
        return "", ()
    for which, kinds in SHARED.items():
        if kind in kinds:
            return which, (kinds[kind],)
    if definition.kernel in known:
        return ("MAY_SHARE_ANY", ()) if definition.kernel in cutting else ("", ())
    results = [(k, name) for k, name in enumerate(definition.results) if name not in said]
    pairs = [(k, name, o, operand) for k, name in results for o, operand in enumerate(definition.operands)]
    return "MAY_WRITE", tuple(f"{k}:{o}" for k, name, o, operand in pairs if name in (f"{operand}_out", f"out_{operand}"))


def sharing() -> dict[str, set[str]]:
    """List -> `operator:result:operand`, or `operator` alone, as `operators` has them."""
    cutting, known = set(wheel.reaching(wheel.SHARES, False)), set(wheel.kernels())
    found: dict[str, set[str]] = {name: set() for name in (*PAIRS, "MAY_SHARE_ANY", "")}
    for definition in wheel.definitions().values():
        which, pairs = sharing_of(definition, cutting, known)
        key = operators.key(definition.name)
        found[which].update(f"{key}:{pair}" for pair in pairs) if which in PAIRS else found[which].add(key)
    del found[""]
    return found


def is_gradient(kind: str) -> bool:
    """Whether it is a gradient: what forward drew comes to it as an operand, and only its code says that it draws anew."""
    return "_grad" in kind


def is_send(kind: str) -> bool:
    """Whether it gives nothing because it sends: the order of communication is held by group."""
    return "send" in kind


def derived() -> dict[str, set[str]]:
    """Class -> operators, as `operators` names them."""
    drawing, acting = (set(wheel.reaching(what)) for what in (wheel.DRAWS, wheel.ACTS))
    found: dict[str, set[str]] = {name: set() for name in ("draws", "acts", "controls", "computes")}
    for definition in wheel.definitions().values():
        found[class_of(definition, drawing, acting)].add(operators.key(definition.name))
    return found


def text(classes: dict[str, set[str]], shared: dict[str, set[str]]) -> str:
    """The module with these lists."""
    source = FILE.read_text()
    lists = {f"{name.upper()} = names": keys for name, keys in classes.items()}
    lists |= {f"{name} = {'_pairs' if name in PAIRS else 'names'}": keys for name, keys in shared.items()}
    for name, keys in lists.items():
        rows = textwrap.fill(" ".join(sorted(keys)), 136, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        head = f'{name}("""\n'
        source = re.sub(rf'^{re.escape(head)}(?:    .*\n)*"""', f'{head}{rows}\n"""', source, flags=re.M)
    return source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the module anew")
    made = text(derived(), sharing())
    if parser.parse_args().write:
        FILE.write_text(made)
    elif made != FILE.read_text():
        print(f"{FILE} differs from the installed wheel; run python -m tests.operators.table --write and read the difference")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
