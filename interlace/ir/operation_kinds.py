"""What Interlace knows about Paddle's operations from their kind: whether they communicate, and what their time depends on.

To add an operation, edit only this file and its test (docs/operation-kinds.md). What an operator does besides computing its results, and
which memory its results share, is in `interlace.ir.operators`, which is generated from the wheel.

Source: names as PaddlePaddle 3.3.1 and older versions emit them, without dialect and in-place mark; messages of collectives as their
kernels send them (phi/kernels/gpu, phi/kernels/fusion/gpu).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from interlace.ir.operators import names
from interlace.ir.program import Op

# -- communication --------------------------------------------------------------------------------------------------

SENDS = names("send_v2 p_send partial_send")
RECEIVES = names("recv_v2 p_recv partial_recv")
COPIES = names("memcpy memcpy_d2h memcpy_h2d")

Carried = Literal["operands", "results", "first operand", "last operand", "rows", "number"]


class Collective(NamedTuple):
    """What operations of a kind send to all ranks of their ring, and what they compute besides.

    Attributes:
        traffic: Name, as in device profiles, of the collective that each message is equivalent to.
        messages: What each message contains, in order: all `operands`, all `results`, the `first operand`, the `last operand`, a number of
            4 bytes for each of its `rows`, or a single `number` of 4 bytes.
        kernel: Kind of the kernel that also runs; empty for none.
        even: Whether all ranks pass tensors of the same size.
        uncounted: A note about computation that no rule covers; the time of the operation is then a lower bound, and reports list it as
            unknown. Empty if everything is covered.
    """

    traffic: str
    messages: tuple[Carried, ...] = ("operands",)
    kernel: str = ""
    even: bool = True
    uncounted: str = ""


ALL_REDUCES = names("all_reduce mp_allreduce_sum c_allreduce_sum c_allreduce_max c_allreduce_min c_allreduce_prod c_allreduce_avg")
_LAYER = "the products, norms and dropout of a fused layer are not counted"
COLLECTIVES = dict.fromkeys(ALL_REDUCES, Collective("all_reduce")) | {
    "all_gather": Collective("all_gather", ("results",)),
    "c_allgather": Collective("all_gather", ("results",)),
    "c_concat": Collective("all_gather", ("results",)),
    "partial_allgather": Collective("all_gather", ("results",)),
    "reduce_scatter": Collective("reduce_scatter"),
    "c_reducescatter": Collective("reduce_scatter"),
    "all_to_all": Collective("all_to_all"),
    "global_scatter": Collective("all_to_all", ("first operand",), even=False),
    "global_scatter_grad": Collective("all_to_all", ("last operand",), even=False),
    "global_gather": Collective("all_to_all", ("first operand",), even=False),
    "global_gather_grad": Collective("all_to_all", ("last operand",), even=False),
    "broadcast": Collective("broadcast"),
    "c_broadcast": Collective("broadcast"),
    "c_scatter": Collective("broadcast"),
    "reduce": Collective("reduce"),
    "c_reduce_sum": Collective("reduce"),
    "barrier": Collective("barrier"),
    "c_softmax_with_cross_entropy": Collective("all_reduce", ("rows", "rows", "rows"), "softmax"),
    "c_softmax_with_multi_label_cross_entropy": Collective("all_reduce", ("rows", "rows", "rows"), "softmax"),
    "margin_cross_entropy": Collective("all_reduce", ("number", "rows", "rows", "rows"), "softmax", even=False),
    "margin_cross_entropy_grad": Collective("all_reduce", ("number",), "multiply", even=False),
    "class_center_sample": Collective("all_reduce", ("number",), even=False, uncounted="its sorts are not counted"),
    "fused_attention": Collective("all_reduce", ("first operand",), uncounted=_LAYER),
    "fused_attention_grad": Collective("all_reduce", ("first operand",), uncounted=_LAYER),
    "fused_feedforward": Collective("all_reduce", ("first operand",), uncounted=_LAYER),
    "fused_feedforward_grad": Collective("all_reduce", ("first operand",), uncounted=_LAYER),
}
"""Kinds that communicate with all ranks of their ring. The three numbers per row are the maximum, the sum and the target's logit of a
softmax whose classes are split over the ranks; a single number is the number of classes on each rank."""
UNEVEN = frozenset(kind for kind, known in COLLECTIVES.items() if not known.even)
"""Kinds whose ranks may pass tensors of different sizes."""
SILENT = names("""
    c_identity c_split c_concat_grad mp_allreduce_sum_grad c_softmax_with_cross_entropy_grad
    c_softmax_with_multi_label_cross_entropy_grad sync_comm_stream sync_calc_stream
""")
"""Kinds that have a ring attribute, but whose kernels do not communicate."""
WITHOUT_GROUP = names("barrier comm_init_all sync_batch_norm sync_batch_norm_grad sync_batch_norm_sp sync_batch_norm_grad_sp")
"""Kinds that communicate with ranks that no attribute names."""
ALONE_WITHOUT_RANKS = names("margin_cross_entropy margin_cross_entropy_grad class_center_sample")
"""Kinds that communicate only with `nranks` above 1; Paddle sets ring 0 and one rank if the user names no group."""
NO_EVENTS = names("shape shape64 assert has_elements select_input select_output")
"""Kinds with a kernel on the host, or with an instruction of their own, after which the executor records no event."""

# -- families: what the time depends on ----------------------------------------------------------------------------
# A backward operation (`..._grad`) is in the family of its forward one unless it is listed here itself. A kind that is in no family is
# *unknown*: reports list it, and its time is a lower bound from the memory that it moves.

GEMMS = names("""
    addmm baddbmm bmm fc fused_gemm_epilogue fused_linear_param_grad_add gemm_epilogue linear_v2 matmul matmul_with_flatten
""")
ATTENTIONS = names("""
    flash_attn flash_attn_qkvpacked flash_attn_v3 flashmask_attention flashmask_attention_v2 fused_dot_product_attention
    memory_efficient_attention
""")
ELEMENTWISE = names("""
    abs add add_n arange assign assign_out assign_value bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor c_identity cast
    ceil celu clip copy_to copysign cos divide dropout elementwise_pow elu equal erf exp expm1 fill floor floor_divide
    fmax fmin full full_like full_with_tensor fused_bias_act fused_dropout_add fused_elementwise_add fused_elementwise_div
    fused_elementwise_mul fused_elementwise_sub fused_partial_rope fused_rotary_position_embedding gaussian gelu greater_equal
    greater_than hardsigmoid hardswish hardtanh increment isfinite isinf isnan label_smooth leaky_relu lerp less_equal less_than log
    log10 log1p log2 logical_and logical_not logical_or logical_xor logsigmoid masked_fill maximum minimum mish multiply not_equal
    one_hot ones ones_like pow randint reciprocal relu relu6 remainder round rsqrt scale selu sigmoid
    sigmoid_cross_entropy_with_logits sign silu sin softplus softsign sqrt square stanh subtract swiglu swish tan tanh tril triu
    trunc truncated_gaussian_random uniform where zeros zeros_like
""")
MOVES = names("""
    as_strided broadcast_tensors c_split coalesce_tensor concat crop expand expand_as flatten flip index_add index_put masked_select
    pad pad3d put_along_axis repeat_interleave reshape reverse roll scatter scatter_nd_add set_value set_value_with_tensor split
    split_with_num squeeze stack tile unbind unsqueeze unstack view_dtype view_shape view_slice
""")
PICKS = names("""
    c_embedding embedding gather gather_nd index_sample index_select slice strided_slice take_along_axis
""")
"""Kinds that read no more of one operand than they write: of the second in `embedding`, of the first in all others."""
EMBEDDINGS = names("""
    c_embedding embedding
""")
"""Kinds that read rows of a table. Their gradient is a table of zeros to which rows are added."""
TRANSPOSES = names("""
    fused_transpose_split_quant transpose
""")
NORMS = names("""
    batch_norm fast_ln fast_rms_norm fused_bias_dropout_residual_layer_norm fused_bias_residual_layernorm fused_rms_norm_ext
    group_norm instance_norm layer_norm norm rms_norm skip_layernorm
""")
SOFTMAXES = names("""
    c_softmax_with_cross_entropy_grad c_softmax_with_multi_label_cross_entropy_grad cross_entropy_with_softmax fused_softmax_mask
    fused_softmax_mask_upper_triangle log_softmax logsumexp nll_loss softmax
""")
REDUCTIONS = names("""
    accuracy all allclose amax amin any check_numerics clip_by_norm cumsum equal_all frobenius_norm isclose l1_norm max mean
    mean_all min p_norm prod reduce_as squared_l2_norm sum
""")
OPTIMIZERS = names("""
    adagrad adam adamax adamw check_finite_and_unscale lamb merged_adam merged_momentum momentum rmsprop sgd update_loss_scaling
""")
VIEWS = names("""
    as_strided assign expand flatten reshape share_data slice split split_with_num squeeze transpose unbind unsqueeze view_dtype
    view_shape view_slice
""")
"""Kinds that cost nothing if, according to the captured program, the result shares its operand's memory."""
FREE = names("""
    data full_int_array share_data share_var nop depend shape shape64 numel empty empty_like print kwarg fetch feed sync_calc_stream
    sync_comm_stream is_empty identity_loss builtin_combine builtin_split slice_array create_array array_length
""")
"""Kinds that launch nothing, or only bookkeeping on a few bytes. All of Paddle's `builtin` and `cf` operations are free too."""

_FAMILIES = (
    ("elementwise", ELEMENTWISE),
    ("move", MOVES | PICKS),
    ("transpose", TRANSPOSES),
    ("norm", NORMS),
    ("softmax", SOFTMAXES),
    ("reduction", REDUCTIONS),
    ("optimizer", OPTIMIZERS),
)


def is_free(op: Op) -> bool:
    """Whether an operation takes no time on the device: `builtin.split` only takes a vector apart, but `pd_op.split` copies.

    >>> [is_free(Op(0, name, (), (), "forward")) for name in ("builtin.split", "pd_op.split", "pd_op.shape")]
    [True, False, True]
    """
    return op.kind in FREE or op.name.startswith(("builtin.", "cf."))


def memory_family(kind: str) -> str:
    """Family of a kind whose time is that of its memory traffic; empty for other kinds.

    >>> memory_family("gelu_grad"), memory_family("layer_norm_grad"), memory_family("conv2d")
    ('elementwise', 'norm_grad', '')
    """
    base, grad = forward_kind(kind)
    for family, members in _FAMILIES:
        if kind in members or base in members:
            return family + "_grad" if grad and family in ("norm", "softmax") else family
    return ""


def forward_kind(kind: str) -> tuple[str, bool]:
    """The forward kind and whether `kind` is its backward; a gradient of a gradient is a kind of its own.

    >>> forward_kind("gelu_grad"), forward_kind("gelu")
    (('gelu', True), ('gelu', False))
    """
    for ending in ("_grad_dense", "_grad"):
        if kind.endswith(ending):
            return kind[: -len(ending)], True
    return kind, False
