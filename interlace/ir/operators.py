"""What every operator of PaddlePaddle 3.3.1 does besides computing its results.

Do not edit the lists by hand: `python -m tests.operators.table --write` derives them from the installed wheel, from its definitions of
operators and the machine code of their kernels, and a test compares them with it. Names have neither the in-place mark nor `pd_op.`.
In-place results that an operator declares are not listed here: capture reads them from Paddle for each operation (`Op.inplace`).
"""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _pairs(text: str) -> dict[str, tuple[tuple[int, int], ...]]:
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, result, operand in (word.split(":") for word in text.split()):
        found[name] = (*found.get(name, ()), (int(result), int(operand)))
    return found


DRAWS = names("""
    bernoulli binomial class_center_sample cudnn_lstm dgc dirichlet dpsgd dropout exponential flash_attn flash_attn_qkvpacked
    flash_attn_unpadded flash_attn_varlen_qkvpacked flashmask_attention fractional_max_pool2d fractional_max_pool3d fused_attention
    fused_bias_dropout_residual_layer_norm fused_dot_product_attention fused_dropout_add fused_feedforward fused_gate_attention
    fused_multi_transformer fused_multi_transformer_int8 fused_multi_transformer_int8_xpu fused_multi_transformer_xpu gaussian
    gaussian_inplace graph_khop_sampler graph_sample_neighbors gumbel_softmax memory_efficient_attention multinomial nce nce_grad
    nce_sr_grad poisson pyramid_hash randint random randperm rnn rrelu seed shuffle_batch standard_gamma tdm_sampler top_p_sampling
    truncated_gaussian_random uniform uniform_inplace uniform_random_batch_size_like uniform_random_batch_size_like_sr
    weighted_sample_neighbors
""")
"""Operators that draw random numbers, from a generator or seeded by a clock. Their results differ each time and depend on their order."""

ACTS = names("""
    accuracy_check ap_facade ap_trivial_fusion_begin ap_trivial_fusion_end ap_variadic assert barrier check_numerics comm_init_all
    disable_check_model_nan_inf dist_op.dist_reshape dist_op.dtensor_from_local dist_op.dtensor_to_local dist_op.moe_global_mesh_tensor
    dist_op.moe_sub_mesh_tensors dist_op.reshard dist_op.shard_tensor enable_check_model_nan_inf fusion_group load_combine print
    read_file save_combine sync_batch_norm sync_batch_norm_grad sync_batch_norm_grad_sp sync_batch_norm_sp tensorrt_engine
""")
"""Operators that act on more than their results, or depend on more than their operands: they print, raise errors, read and write files,
set flags, run code that an attribute contains, or move data between ranks in a way that no attribute names."""

CONTROLS = names("""
    cf.has_elements cf.stack_create cf.tuple_pop cf.tuple_push cf.yield cuda_graph if pylayer select_input select_output while
""")
"""Control flow: what these operators do depends on their blocks, and stacks determine their order."""

COMPUTES = names("""
    abs abs_coo_grad_sp abs_coo_sp abs_csr_grad_sp abs_csr_sp abs_double_grad abs_grad abs_triple_grad accuracy acos acos_coo_grad_sp
    acos_coo_sp acos_csr_grad_sp acos_csr_sp acos_double_grad acos_grad acosh acosh_coo_grad_sp acosh_coo_sp acosh_csr_grad_sp
    acosh_csr_sp acosh_grad adadelta adagrad adagrad_dense_param_sparse_grad adam adam_dense_param_sparse_grad adamax adamw add
    add_act_xpu add_coo_coo_grad_sp add_coo_coo_sp add_coo_dense_grad_sp add_coo_dense_sp add_csr_csr_grad_sp add_csr_csr_sp
    add_double_grad add_grad add_group_norm_silu add_layernorm_xpu add_n add_n_array add_position_encoding add_position_encoding_grad
    add_triple_grad addcmul_xpu addmm addmm_coo_coo_grad_sp addmm_coo_coo_sp addmm_coo_dense_grad_sp addmm_coo_dense_sp
    addmm_csr_csr_grad_sp addmm_csr_csr_sp addmm_csr_dense_grad_sp addmm_csr_dense_sp addmm_grad affine_channel affine_channel_grad
    affine_grid affine_grid_grad all all_gather all_reduce all_to_all allclose amax amax_grad amin amin_grad anchor_generator angle
    angle_grad any apply_per_channel_scale arange argmax argmin argsort argsort_grad array_length array_pop array_read array_to_tensor
    array_write as_complex as_complex_grad as_real as_real_grad as_strided as_strided_grad asgd asin asin_coo_grad_sp asin_coo_sp
    asin_csr_grad_sp asin_csr_sp asin_grad asinh asinh_coo_grad_sp asinh_coo_sp asinh_csr_grad_sp asinh_csr_sp asinh_grad assign
    assign_array assign_grad assign_out assign_out__grad assign_pos assign_value atan atan2 atan2_grad atan_coo_grad_sp atan_coo_sp
    atan_csr_grad_sp atan_csr_sp atan_grad atanh atanh_coo_grad_sp atanh_coo_sp atanh_csr_grad_sp atanh_csr_sp atanh_grad attention_lstm
    auc average_accumulates baddbmm baddbmm_grad batch_fc batch_fc_grad batch_norm batch_norm_double_grad batch_norm_grad
    batch_norm_grad_sp batch_norm_sp batched_gemm bce_loss bce_loss_grad beam_search beam_search_decode bicubic_interp
    bicubic_interp_grad bilinear bilinear_grad bilinear_interp bilinear_interp_grad bincount bipartite_match bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blha_get_max_len block_multihead_attention
    block_multihead_attention_xpu bmm bmm_double_grad bmm_grad bn_act_xpu box_clip box_coder broadcast broadcast_tensors
    broadcast_tensors_grad build_src_rank_and_local_expert_id builtin.combine builtin.constant builtin.group builtin.module
    builtin.parameter builtin.set_parameter builtin.shadow_output builtin.slice builtin.split c_allreduce_sum c_concat c_concat_grad
    c_embedding c_embedding_grad c_identity c_scatter c_softmax_with_cross_entropy c_softmax_with_cross_entropy_grad
    c_softmax_with_multi_label_cross_entropy c_softmax_with_multi_label_cross_entropy_grad c_split cal_aux_loss cal_aux_loss_grad
    calc_reduced_attn_scores cast cast_coo_grad_sp cast_coo_sp cast_csr_grad_sp cast_csr_sp cast_grad ceil ceil_grad celu
    celu_double_grad celu_grad channel_shuffle channel_shuffle_grad check_finite_and_unscale cholesky cholesky_grad cholesky_solve
    cholesky_solve_grad chunk_eval clip clip_by_norm clip_by_norm_sr clip_double_grad clip_grad coalesce_sp coalesce_tensor
    collect_fpn_proposals complex complex_grad concat concat_double_grad concat_grad conj conj_grad conv1d_xpu conv2d conv2d_grad
    conv2d_grad_grad conv2d_transpose conv2d_transpose_bias conv2d_transpose_double_grad conv2d_transpose_grad conv2d_transpose_xpu
    conv2d_xpu conv3d conv3d_double_grad conv3d_grad conv3d_grad_sp conv3d_implicit_gemm_sp conv3d_sp conv3d_transpose
    conv3d_transpose_grad coo_to_csr_sp coo_to_dense_sp copy_to copysign copysign_grad correlation correlation_grad cos cos_double_grad
    cos_grad cos_triple_grad cosh cosh_grad create_array create_array_like crf_decoding crop crop_grad cross cross_attention_xpu
    cross_entropy_with_softmax cross_entropy_with_softmax_bwd_w_downcast cross_entropy_with_softmax_grad cross_grad csr_to_coo_sp
    csr_to_dense_sp ctc_align cudnn_lstm_grad cummax cummax_grad cummin cummin_grad cumprod cumprod_grad cumsum cumsum_grad cvm cvm_grad
    data decayed_adagrad decode_jpeg deformable_conv deformable_conv_grad dense_to_coo_sp dense_to_csr_sp depend depthwise_conv2d
    depthwise_conv2d_bias depthwise_conv2d_bias_grad depthwise_conv2d_double_grad depthwise_conv2d_grad depthwise_conv2d_transpose
    depthwise_conv2d_transpose_grad depthwise_conv3d_bias depthwise_conv3d_bias_grad dequantize_abs_max dequantize_linear dequantize_log
    dequantize_xpu det det_grad dgc_clip_by_norm dgc_clip_by_norm_sr dgc_momentum diag diag_embed diag_grad diagonal diagonal_grad
    digamma digamma_grad disable_check_model_nan_inf_grad dist dist_grad distribute_fpn_proposals distributed_fused_lamb_init divide
    divide_coo_coo_grad_sp divide_coo_coo_sp divide_csr_csr_grad_sp divide_csr_csr_sp divide_double_grad divide_grad
    divide_scalar_coo_sp divide_scalar_csr_sp divide_scalar_grad_sp dot dot_grad dropout_grad edit_distance eig eig_grad eigh eigh_grad
    eigvals eigvalsh eigvalsh_grad einsum einsum_grad elementwise_pow elementwise_pow_grad elu elu_double_grad elu_grad embedding
    embedding_grad embedding_grad_add_to embedding_sparse_grad embedding_with_eltwise_add_xpu embedding_with_scaled_gradient
    embedding_with_scaled_gradient_grad empty empty_like enable_check_model_nan_inf_grad equal equal_all erf erf_grad erfinv erfinv_grad
    exp exp_double_grad exp_grad expand expand_as expand_as_grad expand_double_grad expand_grad expand_modality_expert_id expm1
    expm1_coo_grad_sp expm1_coo_sp expm1_csr_grad_sp expm1_csr_sp expm1_grad exponential__grad eye fake_channel_wise_dequantize_max_abs
    fake_channel_wise_quantize_abs_max fake_channel_wise_quantize_dequantize_abs_max fake_channel_wise_quantize_dequantize_abs_max_grad
    fake_dequantize_max_abs fake_quantize_abs_max fake_quantize_dequantize_abs_max fake_quantize_dequantize_abs_max_grad
    fake_quantize_dequantize_moving_average_abs_max fake_quantize_dequantize_moving_average_abs_max_grad
    fake_quantize_moving_average_abs_max fake_quantize_range_abs_max fast_layernorm_xpu fast_ln fast_ln_grad fast_rms_norm
    fast_rms_norm_grad fast_where_xpu faster_tokenizer fc fc_xpu feed fetch fft_c2c fft_c2c_grad fft_c2r fft_c2r_grad fft_r2c
    fft_r2c_grad fill fill_diagonal fill_diagonal_grad fill_diagonal_tensor fill_diagonal_tensor_grad fill_grad flash_attn_grad
    flash_attn_qkvpacked_grad flash_attn_unpadded_grad flash_attn_v3 flash_attn_v3_grad flash_attn_v3_varlen flash_attn_v3_varlen_grad
    flash_attn_varlen_qkvpacked_grad flashmask_attention_grad flashmask_attention_v2 flashmask_attention_v2_grad flatten flatten_grad
    flip flip_grad floor floor_divide floor_grad fmax fmax_grad fmin fmin_grad fold fold_grad fp8_fp8_half_gemm_fused fp8_gemm_blockwise
    fp8_quant_blockwise fractional_max_pool2d_grad fractional_max_pool3d_grad frame frame_grad frobenius_norm frobenius_norm_grad ftrl
    ftrl_sr full full_batch_size_like full_int_array full_like full_like_coo_sp full_like_csr_sp full_with_tensor fused_act_dequant
    fused_adam fused_attention_grad fused_attention_grad_sp fused_attention_sp fused_batch_norm_act fused_batch_norm_act_grad
    fused_bias_act fused_bias_dropout_residual_layer_norm_grad fused_bias_residual_layernorm fused_bn_add_activation
    fused_bn_add_activation_grad fused_conv2d_add_act fused_dconv_drelu_dbn fused_dot_product_attention_grad fused_dropout_add_grad
    fused_elementwise_add fused_elementwise_div fused_elementwise_mul fused_elementwise_sub fused_elemwise_activation
    fused_elemwise_activation_grad fused_elemwise_add_activation fused_elemwise_add_activation_grad fused_embedding_eltwise_layernorm
    fused_embedding_fc_lstm fused_fc_elementwise_layernorm fused_feedforward_grad fused_gate_attention_grad fused_gemm_epilogue
    fused_gemm_epilogue_grad fused_linear_param_grad_add fused_partial_rope fused_partial_rope_grad fused_rms_norm_ext
    fused_rms_norm_ext_grad fused_rms_norm_quant fused_rms_norm_quant_grad fused_rotary_position_embedding
    fused_rotary_position_embedding_grad fused_scale_bias_add_relu fused_scale_bias_relu_conv_bn fused_seqpool_cvm
    fused_seqpool_cvm_grad fused_softmax_mask fused_softmax_mask_grad fused_softmax_mask_upper_triangle
    fused_softmax_mask_upper_triangle_grad fused_stack_quant fused_stack_transpose_quant fused_swiglu_weighted_bwd fused_token_prune
    fused_transpose_split_quant fused_transpose_wlch_split_quant fused_weighted_swiglu_act_quant fusion_gru fusion_lstm
    fusion_repeated_fc_relu fusion_seqconv_eltadd_relu fusion_seqpool_concat fusion_seqpool_cvm_concat fusion_squared_mat_sub
    fusion_transpose_flatten_concat gammaincc gammaincc_grad gammaln gammaln_grad gather gather_double_grad gather_grad gather_nd
    gather_nd_double_grad gather_nd_grad gather_tree gaussian_inplace_grad gelu gelu_grad gemm_epilogue generate_proposals
    generate_sequence_xpu get_tensor_from_selected_rows global_gather global_gather_grad global_scatter global_scatter_grad
    greater_equal greater_than grid_sample grid_sample_grad group_norm group_norm_grad group_norm_silu_xpu gru gru_grad gru_unit
    gru_unit_grad gumbel_softmax_grad hardshrink hardshrink_grad hardsigmoid hardsigmoid_grad hardswish hardswish_grad hardtanh
    hardtanh_grad hash heaviside heaviside_grad hinge_loss hinge_loss_grad histogram hsigmoid_loss hsigmoid_loss_grad huber_loss
    huber_loss_grad i0 i0_grad i0e i0e_grad i1 i1_grad i1e i1e_grad identity_loss identity_loss_grad im2sequence im2sequence_grad imag
    imag_grad increment index_add index_add_double_grad index_add_grad index_elementwise_get index_elementwise_get_double_grad
    index_elementwise_get_grad index_elementwise_put index_elementwise_put_double_grad index_elementwise_put_grad
    index_elementwise_put_with_tensor index_elementwise_put_with_tensor_double_grad index_elementwise_put_with_tensor_grad index_put
    index_put_double_grad index_put_grad index_sample index_sample_grad index_select index_select_double_grad index_select_grad
    index_select_strided index_select_strided_grad indices_sp instance_norm instance_norm_double_grad instance_norm_grad int_bincount
    interp_antialias interp_antialias_grad inverse inverse_grad is_empty isclose isfinite isfinite_sr isinf isinf_sr isnan isnan_coo_sp
    isnan_csr_sp isnan_sr kldiv_loss kldiv_loss_grad kron kron_grad kthvalue kthvalue_grad l1_norm l1_norm_grad label_smooth
    label_smooth_grad lamb lamb_sr lars_momentum layer_norm layer_norm_act_xpu layer_norm_grad layer_norm_relu_xpu leaky_relu
    leaky_relu_coo_grad_sp leaky_relu_coo_sp leaky_relu_csr_grad_sp leaky_relu_csr_sp leaky_relu_double_grad leaky_relu_grad
    legacy_matmul legacy_matmul_grad legacy_reshape legacy_reshape_grad lerp lerp_grad less_equal less_than lgamma lgamma_grad
    limit_by_capacity linear_interp linear_interp_grad linear_v2 linear_v2_double_grad linear_v2_grad linspace llm_int8_linear
    lod_array_length lod_reset lod_reset_grad log log10 log10_grad log1p log1p_coo_grad_sp log1p_coo_sp log1p_csr_grad_sp log1p_csr_sp
    log1p_grad log2 log2_grad log_double_grad log_grad log_loss log_loss_grad log_softmax log_softmax_grad logcumsumexp
    logcumsumexp_grad logical_and logical_not logical_or logical_xor logit logit_grad logsigmoid logsigmoid_grad logspace logsumexp
    logsumexp_grad lookup_table lookup_table_dequant lookup_table_grad lookup_table_grad_sr lookup_table_sparse_grad
    lookup_table_sparse_grad_sr lookup_table_sr lp_pool2d lp_pool2d_grad lrn lrn_grad lstm lstm_grad lstsq lu lu_grad lu_solve
    lu_solve_grad lu_unpack lu_unpack_grad margin_cross_entropy margin_cross_entropy_grad mask_adaptive_xpu mask_as_coo_grad_sp
    mask_as_coo_sp mask_as_csr_grad_sp mask_as_csr_sp masked_fill masked_fill_double_grad masked_fill_grad masked_matmul_grad_sp
    masked_matmul_sp masked_multihead_attention masked_select masked_select_double_grad masked_select_grad match_matrix_tensor
    match_matrix_tensor_grad matmul matmul_coo_coo_grad_sp matmul_coo_coo_sp matmul_coo_dense_grad_sp matmul_coo_dense_sp
    matmul_csr_csr_grad_sp matmul_csr_csr_sp matmul_csr_dense_grad_sp matmul_csr_dense_sp matmul_double_grad matmul_grad
    matmul_triple_grad matmul_with_flatten matmul_with_flatten_grad matrix_nms matrix_power matrix_power_grad matrix_rank
    matrix_rank_atol_rtol matrix_rank_tol max max_grad max_pool2d_v2 max_pool2d_v2_grad max_pool2d_with_index max_pool2d_with_index_grad
    max_pool3d_with_index max_pool3d_with_index_grad max_with_index max_with_index_grad maximum maximum_grad maxout maxout_grad
    maxpool_grad_sp maxpool_sp mean mean_all mean_all_grad mean_double_grad mean_grad median median_grad memcpy memcpy_d2h
    memcpy_d2h_multi_io memcpy_h2d memory_efficient_attention_grad merge_selected_rows merged_adam merged_momentum meshgrid
    meshgrid_grad min min_grad min_with_index min_with_index_grad minimum minimum_grad mish mish_grad mode mode_grad moe_combine
    moe_combine_auto moe_combine_auto_grad moe_combine_grad moe_combine_no_weight moe_combine_no_weight_grad moe_gate_dispatch
    moe_gate_dispatch_and_quant moe_gate_dispatch_auto moe_gate_dispatch_auto_grad moe_gate_dispatch_grad
    moe_gate_dispatch_partial_nosoftmaxtopk moe_gate_dispatch_partial_nosoftmaxtopk_grad moe_gate_dispatch_permute
    moe_gate_dispatch_permute_grad moe_permute moe_unpermute momentum momentum_dense_param_sparse_grad moving_average_abs_max_scale
    mp_allreduce_sum mp_allreduce_sum_grad multi_dot multi_dot_grad multi_encoder_xpu multiclass_nms3 multihead_matmul multiplex
    multiplex_grad multiply multiply_coo_coo_grad_sp multiply_coo_coo_sp multiply_csr_csr_grad_sp multiply_csr_csr_sp
    multiply_double_grad multiply_grad multiply_sr multiply_triple_grad mv mv_coo_grad_sp mv_coo_sp mv_csr_grad_sp mv_csr_sp mv_grad
    nadam nanmedian nanmedian_grad nansum nansum_grad nearest_interp nearest_interp_grad nextafter nll_loss nll_loss_grad nms nonzero
    nop norm norm_grad not_equal npu_identity number_count numel one_hot onednn_op.expand onednn_to_paddle_layout ones ones_like
    overlap_add overlap_add_grad p_norm p_norm_grad pad pad2d_xpu pad3d pad3d_double_grad pad3d_grad pad_double_grad pad_grad
    partial_allgather partial_concat partial_concat_grad partial_recv partial_send partial_sum partial_sum_grad pixel_shuffle
    pixel_shuffle_grad pixel_unshuffle pixel_unshuffle_grad poisson_grad polygamma polygamma_grad pool2d pool2d_double_grad pool2d_grad
    pool3d pool3d_grad pow pow_coo_grad_sp pow_coo_sp pow_csr_grad_sp pow_csr_sp pow_double_grad pow_grad pow_triple_grad prelu
    prelu_grad print_grad prior_box prod prod_grad prune_gate_by_capacity psroi_pool psroi_pool_grad put_along_axis
    put_along_axis_double_grad put_along_axis_grad pyramid_hash_grad qkv_attention_xpu qkv_unpack_mha qr qr_grad quantize_linear
    quantize_xpu radam random_grad random_routing range_v2 rank_attention rank_attention_grad real real_grad reciprocal reciprocal_grad
    recv_v2 reduce reduce_as reduce_as_grad reduce_scatter reindex_graph relu relu6 relu6_coo_grad_sp relu6_coo_sp relu6_csr_grad_sp
    relu6_csr_sp relu6_grad relu_coo_grad_sp relu_coo_sp relu_csr_grad_sp relu_csr_sp relu_double_grad relu_grad remainder
    remainder_grad renorm renorm_grad repeat_interleave repeat_interleave_double_grad repeat_interleave_grad
    repeat_interleave_with_tensor_index repeat_interleave_with_tensor_index_double_grad repeat_interleave_with_tensor_index_grad reshape
    reshape_coo_grad_sp reshape_coo_sp reshape_csr_grad_sp reshape_csr_sp reshape_double_grad reshape_grad resnet_basic_block
    resnet_basic_block_grad resnet_unit resnet_unit_grad restrict_nonzero reverse reverse_grad rint rint_grad rms_norm rms_norm_grad
    rmsprop rmsprop_dense_param_sparse_grad rnn_grad roformer_relative_embedding_xpu roi_align roi_align_grad roi_pool roi_pool_grad
    roll roll_grad round round_grad row_conv row_conv_grad rprop rrelu_grad rsqrt rsqrt_double_grad rsqrt_grad scale scale_coo_sp
    scale_csr_sp scale_grad scale_grad_sp scale_sr scatter scatter_grad scatter_nd_add scatter_nd_add_grad searchsorted segment_pool
    segment_pool_grad self_dp_attention selu selu_grad send_u_recv send_u_recv_grad send_ue_recv send_ue_recv_grad send_uv send_uv_grad
    send_v2 sequence_conv sequence_conv_grad sequence_expand sequence_expand_grad sequence_mask sequence_pool sequence_pool_grad
    sequence_softmax sequence_softmax_grad sequence_unpad_xpu set set_value set_value_grad set_value_with_tensor
    set_value_with_tensor_grad sgd sgd_dense_param_sparse_grad sgd_sparse_param_sparse_grad shadow_feed shadow_feed_tensors shape
    shape64 shape64_sr shape_broadcast shape_sr shard_index share_data share_data_sr share_var shuffle_batch_grad shuffle_channel
    shuffle_channel_grad sigmoid sigmoid_cross_entropy_with_logits sigmoid_cross_entropy_with_logits_grad sigmoid_double_grad
    sigmoid_grad sigmoid_triple_grad sign sign_grad silu silu_double_grad silu_grad sin sin_coo_grad_sp sin_coo_sp sin_csr_grad_sp
    sin_csr_sp sin_double_grad sin_grad sin_triple_grad sine_pos_xpu sinh sinh_coo_grad_sp sinh_coo_sp sinh_csr_grad_sp sinh_csr_sp
    sinh_grad skip_layernorm slice slice_array slice_array_dense slice_coo_grad_sp slice_coo_sp slice_csr_grad_sp slice_csr_sp
    slice_double_grad slice_grad slogdet slogdet_grad slogdet_v2 slogdet_v2_grad soft_relu soft_relu_grad softmax softmax_coo_grad_sp
    softmax_coo_sp softmax_csr_grad_sp softmax_csr_sp softmax_grad softplus softplus_double_grad softplus_grad softshrink
    softshrink_grad softsign softsign_grad solve solve_grad sparse_attention sparse_attention_grad sparse_coo_tensor_grad_sp
    sparse_coo_tensor_sp sparse_momentum sparse_weight_embedding sparse_weight_embedding_grad sparse_weight_embedding_sparse_grad
    spatial_transformer_resblock_xpu spectral_norm spectral_norm_grad split split_grad split_with_num split_with_num_grad sqrt
    sqrt_coo_grad_sp sqrt_coo_sp sqrt_csr_grad_sp sqrt_csr_sp sqrt_double_grad sqrt_grad sqrt_sr square square_coo_grad_sp square_coo_sp
    square_csr_grad_sp square_csr_sp square_double_grad square_grad square_sr squared_l2_norm squared_l2_norm_grad squeeze
    squeeze_double_grad squeeze_excitation_block squeeze_grad stack stack_double_grad stack_grad stanh stanh_grad std std_grad stft
    stft_grad straight_through_estimator_grad strided_slice strided_slice_grad subtract subtract_coo_coo_grad_sp subtract_coo_coo_sp
    subtract_csr_csr_grad_sp subtract_csr_csr_sp subtract_double_grad subtract_grad sum sum_coo_grad_sp sum_coo_sp sum_csr_grad_sp
    sum_csr_sp sum_double_grad sum_grad svd svd_grad svdvals svdvals_grad swiglu swiglu_grad swish swish_grad sync_calc_stream
    sync_comm_stream take_along_axis take_along_axis_double_grad take_along_axis_grad tan tan_coo_grad_sp tan_coo_sp tan_csr_grad_sp
    tan_csr_sp tan_grad tanh tanh_coo_grad_sp tanh_coo_sp tanh_csr_grad_sp tanh_csr_sp tanh_double_grad tanh_grad tanh_shrink
    tanh_shrink_grad tanh_triple_grad tdm_child temporal_shift temporal_shift_grad tensor_to_array thresholded_relu
    thresholded_relu_grad tile tile_double_grad tile_grad to_dense_grad_sp to_sparse_coo_grad_sp topk topk_grad trace trace_grad
    trans_layout trans_layout_grad transpose transpose_coo_grad_sp transpose_coo_sp transpose_csr_grad_sp transpose_csr_sp
    transpose_double_grad transpose_grad triangular_solve triangular_solve_grad tril tril_grad tril_indices trilinear_interp
    trilinear_interp_grad triu triu_grad triu_indices trunc trunc_divide trunc_grad unbind unbind_grad unfold unfold_grad
    uniform_inplace_grad unique unique_consecutive unpool unpool3d unpool3d_grad unpool_grad unsqueeze unsqueeze_double_grad
    unsqueeze_grad unstack unstack_grad update_loss_scaling values_coo_sp values_csr_sp values_grad_sp var var_grad
    variable_length_memory_efficient_attention variance view_dtype view_dtype_grad view_shape view_shape_double_grad view_shape_grad
    view_slice viterbi_decode warpctc warpctc_grad warprnnt warprnnt_grad weight_dequantize weight_only_linear weight_only_linear_grad
    weight_quantize where where_double_grad where_grad write_to_array yolo_box yolo_box_head yolo_box_post yolo_box_xpu yolo_loss
    yolo_loss_grad zeros zeros_like
""")
"""Operators that compute the same results each time from operands and attributes; for collectives, from the operands of all their ranks."""

VIEWS = _pairs("""
    as_strided:0:0 index_select_strided:0:0 npu_identity:0:0 onednn_to_paddle_layout:0:0 shadow_feed:0:0 shadow_feed_tensors:0:0
    share_data:0:0 share_data_sr:0:0 view_dtype:0:0 view_dtype_grad:0:1 view_shape:0:0 view_shape_grad:0:1 view_slice:0:0
""")
"""`operator:result:operand`, where in the static executor the result lies in the operand's memory although no definition says so, and
nothing is written. Reshape and similar operators copy there unless they are in place."""

WRITES = _pairs("""
    fused_linear_param_grad_add:0:2
""")
"""`operator:result:operand`, where the result lies in the operand's memory, if that operand is given, and overwrites it although no
definition says so."""

MAY_SHARE = _pairs("""
    set:0:1
""")
"""`operator:result:operand`, where the result may lie in the operand's memory, without writing it."""

MAY_SHARE_ANY = names("""
    abs_coo_grad_sp abs_coo_sp abs_csr_grad_sp abs_csr_sp add_coo_coo_grad_sp add_coo_coo_sp add_coo_dense_grad_sp add_coo_dense_sp
    add_csr_csr_grad_sp add_csr_csr_sp array_pop array_to_tensor asin_coo_grad_sp asin_coo_sp asin_csr_grad_sp asin_csr_sp
    asinh_coo_grad_sp asinh_coo_sp asinh_csr_grad_sp asinh_csr_sp atan_coo_grad_sp atan_coo_sp atan_csr_grad_sp atan_csr_sp
    atanh_coo_grad_sp atanh_coo_sp atanh_csr_grad_sp atanh_csr_sp batch_norm_grad_sp batch_norm_sp c_split cast_coo_grad_sp cast_coo_sp
    cast_csr_grad_sp cast_csr_sp cholesky_grad cholesky_solve cholesky_solve_grad coalesce_sp conv3d_grad_sp conv3d_sp coo_to_csr_sp
    csr_to_coo_sp csr_to_dense_sp dense_to_coo_sp dense_to_csr_sp det_grad divide_coo_coo_grad_sp divide_coo_coo_sp
    divide_csr_csr_grad_sp divide_csr_csr_sp divide_double_grad divide_scalar_coo_sp divide_scalar_csr_sp eig_grad eigh_grad
    eigvalsh_grad einsum expm1_coo_grad_sp expm1_coo_sp expm1_csr_grad_sp expm1_csr_sp fused_elemwise_add_activation_grad indices_sp
    isnan_coo_sp isnan_csr_sp leaky_relu_coo_grad_sp leaky_relu_coo_sp leaky_relu_csr_grad_sp leaky_relu_csr_sp legacy_matmul_grad
    linear_v2_grad log1p_coo_grad_sp log1p_coo_sp log1p_csr_grad_sp log1p_csr_sp lrn lu lu_grad lu_solve lu_solve_grad mask_as_coo_sp
    mask_as_csr_grad_sp mask_as_csr_sp matmul_double_grad matmul_triple_grad maxpool_grad_sp maxpool_sp median_grad multi_dot
    multi_dot_grad multiply_coo_coo_grad_sp multiply_coo_coo_sp multiply_csr_csr_grad_sp multiply_csr_csr_sp multiply_double_grad
    multiply_triple_grad nanmedian_grad overlap_add overlap_add_grad pow_coo_grad_sp pow_coo_sp pow_csr_grad_sp pow_csr_sp
    pow_double_grad pow_triple_grad qr qr_grad relu6_coo_grad_sp relu6_coo_sp relu6_csr_grad_sp relu6_csr_sp relu_coo_grad_sp
    relu_coo_sp relu_csr_grad_sp relu_csr_sp reshape_coo_grad_sp reshape_coo_sp reshape_csr_grad_sp reshape_csr_sp scale_coo_sp
    scale_csr_sp set_value_with_tensor_grad sin_coo_grad_sp sin_coo_sp sin_csr_grad_sp sin_csr_sp sinh_coo_grad_sp sinh_coo_sp
    sinh_csr_grad_sp sinh_csr_sp slice_coo_grad_sp slice_coo_sp slice_csr_grad_sp slice_csr_sp softmax_coo_grad_sp softmax_coo_sp
    softmax_csr_grad_sp softmax_csr_sp solve solve_grad sparse_coo_tensor_grad_sp sparse_coo_tensor_sp spectral_norm spectral_norm_grad
    sqrt_coo_grad_sp sqrt_coo_sp sqrt_csr_grad_sp sqrt_csr_sp square_coo_grad_sp square_coo_sp square_csr_grad_sp square_csr_sp
    subtract_coo_coo_grad_sp subtract_coo_coo_sp subtract_csr_csr_grad_sp subtract_csr_csr_sp subtract_double_grad sum_coo_grad_sp
    sum_coo_sp sum_csr_grad_sp sum_csr_sp svd svdvals_grad tan_coo_grad_sp tan_coo_sp tan_csr_grad_sp tan_csr_sp tanh_coo_grad_sp
    tanh_coo_sp tanh_csr_grad_sp tanh_csr_sp tensor_to_array to_dense_grad_sp transpose_coo_grad_sp transpose_coo_sp
    transpose_csr_grad_sp transpose_csr_sp values_coo_sp values_csr_sp values_grad_sp warpctc
""")
"""Operators whose results may lie in the memory of any operand, without writing it: in their kernels some tensor shares another's memory,
and nobody has examined which. They include operators on sparse tensors, whose parts are tensors."""

MAY_WRITE = _pairs("""
    add_group_norm_silu:1:1 block_multihead_attention_xpu:1:0 block_multihead_attention_xpu:2:1 block_multihead_attention_xpu:3:2
    dgc:0:0 dgc:1:1 dgc:3:2 expand_modality_expert_id:0:0 fused_batch_norm_act:1:3 fused_batch_norm_act:2:4 fused_bn_add_activation:1:4
    fused_bn_add_activation:2:5 fused_multi_transformer_int8:0:5 fused_multi_transformer_int8_xpu:1:21 fused_multi_transformer_xpu:1:17
    moe_gate_dispatch_partial_nosoftmaxtopk:1:1 resnet_basic_block:10:9 resnet_basic_block:11:10 resnet_basic_block:15:14
    resnet_basic_block:16:15 resnet_basic_block:4:4 resnet_basic_block:5:5
""")
"""`operator:result:operand`, where the result may lie in the operand's memory and overwrite it: the wheel has no code for these operators,
and the result is named like the operand."""


def key(name: str) -> str:
    """An operator's name in these lists.

    >>> key("pd_op.add_"), key("custom_op.add_")
    ('add', 'custom_op.add')
    """
    return name.rstrip("_").removeprefix("pd_op.")
