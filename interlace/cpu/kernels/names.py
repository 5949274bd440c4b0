"""Names of Paddle's kernels that half precision on a CPU needs, by how they are provided."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SUFFIXES = ("", "_grad", "_double_grad", "_triple_grad", "_raw")
"""Suffixes with which each name in COMPUTED and MOVED is tried; names without a float32 kernel in the wheel are left out."""
COMPUTED = _words("""
    add subtract multiply divide maximum minimum fmax fmin remainder floor_divide elementwise_pow atan2 heaviside
    grad_add
    abs acos acosh asin asinh atan atanh cos cosh digamma erf erfinv exp expm1 increment lerp lgamma log log10 log1p
    log2
    logit negative pow reciprocal round rsqrt scale sign sin sinh sqrt square tan tanh trunc clip
    celu elu gelu hard_shrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish prelu relu relu6 rrelu selu
    sigmoid
    silu soft_relu softplus softshrink softsign stanh swiglu swish tanh_shrink thresholded_relu
    batch_norm batch_norm_infer group_norm instance_norm layer_norm norm p_norm frobenius_norm l1_norm squared_l2_norm
    clip_by_norm renorm
    softmax log_softmax gumbel_softmax fused_softmax_mask fused_softmax_mask_upper_triangle cross_entropy_with_softmax
    nll_loss bce_loss huber_loss kldiv_loss log_loss hinge_loss sigmoid_cross_entropy_with_logits label_smooth
    sum mean mean_all max min amax amin prod logsumexp nansum cumsum cumprod logcumsumexp reduce_as add_n
    matmul matmul_with_flatten legacy_matmul linear_v2 bmm mv dot addmm baddbmm multi_dot einsum kron
    conv2d conv3d conv2d_transpose conv3d_transpose depthwise_conv2d depthwise_conv2d_transpose pool2d pool3d
    dropout dropout_nd
    adam adamw momentum sgd
    check_finite_and_unscale update_loss_scaling
""")
"""Kernels that calculate. Half-precision kernels that the wheel has are replaced, because some of them accumulate in half precision."""
SUMMED = _words("""
    embedding_grad expand_grad expand_as_grad gather_grad gather_nd_grad index_select_grad index_add_grad
    repeat_interleave_grad tile_grad broadcast_tensors_grad index_sample_grad take_along_axis_grad c_embedding_grad
""")
"""Gradients of kernels that only move elements; the gradients are sums, so half-precision kernels of the wheel are replaced too."""
MOVED = _words("""
    all any allclose isclose equal_all argmax argmin is_empty shape
    bernoulli exponential multinomial uniform uniform_inplace gaussian gaussian_inplace truncated_gaussian_random
    arange range linspace eye full full_like full_batch_size_like empty empty_like fill
    argsort kthvalue topk mode median
    assign broadcast_tensors c_embedding concat crop diag diag_embed diagonal embedding expand expand_as flatten flip
    gather
    gather_nd index_add index_sample index_select masked_fill masked_select meshgrid multiplex nonzero pad pad3d
    pixel_shuffle put_along_axis repeat_interleave reshape reverse roll scatter scatter_nd_add set_value
    set_value_with_tensor slice split
    split_with_num squeeze stack strided_slice take_along_axis tile tril triu tril_triu unbind unfold unsqueeze unstack
    where
    transpose equal not_equal less_than less_equal greater_than greater_equal isfinite isinf isnan
""")
"""Kernels that move, select or create elements; half-precision kernels that the wheel has are kept."""
UNTOUCHED = ("share_data", "nop", "depend", "coalesce_tensor")
"""Kernels that never read an element, so that the float32 one works for any type."""
