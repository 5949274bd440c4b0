"""Half precision on CPU processes: kernels for Paddle's CPU wheel, which has few, and mixed precision it refuses there.

The kernels compute in float32 and round each output once, to nearest even (`kernels/half_kernels.cc`). They are compiled
for the installed Paddle at the first use, kept in a cache, and registered when an engine is about to build a program in
half precision; a process that never does needs no compiler and keeps Paddle as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from interlace.errors import ConfigError

CACHE_VARIABLE = "INTERLACE_CACHE"
_SOURCE = Path(__file__).with_name("kernels") / "half_kernels.cc"
_FLAGS = ("-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-shared", "-w")
_COMPILERS = ("g++", "c++", "clang++")
_DTYPES = {"bfloat16": 16, "float16": 15}  # phi::DataType
_FLOAT32 = 10
_LOG_TAIL_LINES = 12
_NO_ROOM = -2

_GRADIENTS = ("", "_grad", "_double_grad", "_triple_grad", "_raw")
_COMPUTED = """
    add subtract multiply divide maximum minimum fmax fmin remainder floor_divide elementwise_pow atan2 heaviside grad_add
    abs acos acosh asin asinh atan atanh cos cosh digamma erf erfinv exp expm1 increment lerp lgamma log log10 log1p log2
    logit negative pow reciprocal round rsqrt scale sign sin sinh sqrt square tan tanh trunc clip
    celu elu gelu hard_shrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish prelu relu relu6 rrelu selu sigmoid
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
""".split()
"""Kernels that calculate. Those the wheel does have are replaced: some of them add up in half precision."""
_SUMMED = """
    embedding_grad expand_grad expand_as_grad gather_grad gather_nd_grad index_select_grad index_add_grad
    repeat_interleave_grad tile_grad broadcast_tensors_grad index_sample_grad take_along_axis_grad c_embedding_grad
""".split()
"""Gradients of kernels that only move elements; they add up."""
_MOVED = """
    all any allclose isclose equal_all argmax argmin is_empty shape
    bernoulli exponential multinomial uniform uniform_inplace gaussian gaussian_inplace truncated_gaussian_random
    arange range linspace eye full full_like full_batch_size_like empty empty_like fill
    argsort kthvalue topk mode median
    assign broadcast_tensors c_embedding concat crop diag diag_embed diagonal embedding expand expand_as flatten flip gather
    gather_nd index_add index_sample index_select masked_fill masked_select meshgrid multiplex nonzero pad pad3d pixel_shuffle
    put_along_axis repeat_interleave reshape reverse roll scatter scatter_nd_add set_value set_value_with_tensor slice split
    split_with_num squeeze stack strided_slice take_along_axis tile tril triu tril_triu unbind unfold unsqueeze unstack where
    transpose equal not_equal less_than less_equal greater_than greater_equal isfinite isinf isnan
""".split()
"""Kernels that move, choose or make elements; those the wheel does have stay."""
_GPU_FLAGS = {"FLAGS_cudnn_deterministic": False, "FLAGS_flash_attn_version": 2}
_UNTOUCHED = ("share_data", "nop", "depend", "coalesce_tensor")
"""Kernels that never look at an element: the float32 one serves any type."""
_COMMUNICATION = """
    all_gather all_reduce all_to_all broadcast reduce reduce_scatter mp_allreduce_sum c_identity c_concat c_split c_scatter
    p_send p_recv c_softmax_with_cross_entropy c_softmax_with_cross_entropy_grad
""".split()
"""Rewritten before a program runs (`ops.py`); they have to exist for it to build."""
_GPU_ONLY = """
    flash_attn flash_attn_grad flash_attn_unpadded flash_attn_unpadded_grad flash_attn_varlen_qkvpacked flash_attn_qkvpacked
    flash_attn_qkvpacked_grad flashmask_attention flashmask_attention_grad memory_efficient_attention
    memory_efficient_attention_grad variable_length_memory_efficient_attention fused_attention fused_attention_grad
    fused_feedforward fused_feedforward_grad fused_rotary_position_embedding fused_rotary_position_embedding_grad
    fused_rms_norm_ext fused_rms_norm_ext_grad fused_rms_norm_quant fused_rms_norm_quant_grad rms_norm rms_norm_grad
    fused_layernorm fused_bias_residual_layernorm fused_bias_act fused_bias_dropout_residual_layer_norm
    fused_bias_dropout_residual_layer_norm_grad fused_dropout_add fused_dropout_add_grad fused_gemm_epilogue
    fused_gemm_epilogue_grad fused_linear_param_grad_add moe_permute moe_unpermute number_count assign_pos
    limit_by_capacity prune_gate_by_capacity
""".split()
"""Kernels without a float32 form on the CPU; in a dump they exist, so that a program with them builds."""


def patch(gpu_only: bool = False) -> None:
    """Make half precision ready in this process as soon as an engine builds a model that uses it.

    With `gpu_only`, programs with GPU-only operations build too, in any element type; they cannot run. A program in
    float32 then does without if there is no compiler.
    """
    from paddle.distributed.auto_parallel.static.engine import Engine

    _patch_sharding()
    if gpu_only:
        _choose_attention_as_on_gpu()
    build = Engine._build

    def build_half(self: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        amp = self._strategy.amp
        if amp.enable or _has_half_parameters(self._model):
            load(gpu_only)
        elif gpu_only:
            _load_if_possible()
        with auto_cast(amp) if amp.enable else contextlib.nullcontext():
            return build(self, mode, *args, **kwargs)

    Engine._build = build_half


def _patch_sharding() -> None:
    """Let `shard_tensor` split half-precision tensors, which Paddle cannot on a CPU: it splits a float32 copy (exact)."""
    import paddle
    from paddle.base import core

    tensor_class = core.eager.Tensor
    make = tensor_class.__init__

    def make_half(self: Any, *args: Any, **kwargs: Any) -> None:
        mesh, placements = kwargs.get("process_mesh"), kwargs.get("placements")
        whole = args[0] if len(args) == 1 else None
        if not _is_split_here(whole, mesh, placements) or "dims" in kwargs:
            make(self, *args, **kwargs)
            return
        with paddle.no_grad():
            wide = tensor_class(whole.astype("float32"), process_mesh=mesh, placements=placements)
            part = wide._local_value().astype(whole.dtype)
        make(self, part, dims=whole.shape, **kwargs)

    tensor_class.__init__ = make_half


def _choose_attention_as_on_gpu() -> None:
    """Let Paddle's attention functions take the flash kernel where they would on a GPU that has it."""
    fused = importlib.import_module("paddle.nn.functional.flash_attention")
    scaled = importlib.import_module("paddle.nn.functional.sdpa")
    select = fused._select_sdp

    def select_on_gpu(head_dim: int) -> Any:
        only_math = set(fused._get_enabled_backends()) == {fused.SDPBackend.MATH}
        return select(head_dim) if only_math else fused._select_sdp_cuda(head_dim)

    backends = importlib.import_module("paddle.nn.attention.sdpa")
    backends._set_enabled_backends(list(backends.SDPBackend))  # on a CPU Paddle starts with MATH alone
    fused._select_sdp = select_on_gpu
    _know_gpu_flags()
    scaled.check_all_tensors_on_device = lambda parameters: True
    scaled.check_flash_attention_hardware_support = lambda device_id: True


def _know_gpu_flags() -> None:
    """Answer for flags that only GPU builds have, with their defaults there."""
    import paddle
    from paddle.base import framework

    get_flags = framework.get_flags

    def get_flags_of_gpu(flags: Any) -> dict[str, Any]:
        names = [flags] if isinstance(flags, str) else list(flags)
        known = get_flags([name for name in names if name not in _GPU_FLAGS])
        return {name: _GPU_FLAGS.get(name, known.get(name)) for name in names}

    framework.get_flags = paddle.get_flags = get_flags_of_gpu


def _is_split_here(tensor: Any, mesh: Any, placements: Any) -> bool:
    """Whether making a distributed tensor of this local one splits half-precision data on this rank."""
    from paddle import distributed
    from paddle.base import core

    if mesh is None or placements is None or not isinstance(tensor, core.eager.Tensor):
        return False
    split = any(not placement.is_replicated() for placement in placements)
    local = not tensor.is_dist() and tensor._is_initialized()
    return split and local and _is_half(tensor) and distributed.get_rank() in mesh.process_ids


@contextlib.contextmanager
def auto_cast(amp: Any) -> Iterator[None]:
    """Paddle's `auto_cast` with the options of `strategy.amp`, on a CPU too.

    The engine enters it in dynamic mode, where it does nothing on a CPU but warn; entered in static mode it sets the
    same state on any device.
    """
    import paddle

    dynamic = paddle.in_dynamic_mode()
    paddle.enable_static()
    with paddle.amp.auto_cast(
        enable=amp.enable,
        custom_white_list=amp.custom_white_list,
        custom_black_list=amp.custom_black_list,
        level=amp.level,
        dtype=amp.dtype,
        use_promote=amp.use_promote,
    ):
        if dynamic:
            paddle.disable_static()
        yield


def load(gpu_only: bool = False) -> None:
    """Compile the kernels if that was not done yet, and register them in this process; a second call does nothing.

    Raises:
        ConfigError: There is no C++ compiler, or it fails.
    """
    if _loaded and (_loaded[0].gpu_only or not gpu_only):
        return
    library = _loaded[0].library if _loaded else _Library(library_path())
    _loaded[:] = [_Registered(library, gpu_only)]
    for dtype in _DTYPES:
        library.wrap([name + suffix for name in _COMPUTED for suffix in _GRADIENTS], dtype, replace=True)
        library.wrap(_SUMMED, dtype, replace=True)
        library.wrap([name + suffix for name in _MOVED for suffix in _GRADIENTS], dtype, replace=False)
        library.reuse(_UNTOUCHED, dtype)
        library.refuse(_COMMUNICATION, dtype, "communicates, and was not rewritten for CPU processes before it ran")
    if gpu_only:
        for dtype in (*_DTYPES, "float32"):
            library.refuse(_GPU_ONLY, dtype, "has GPU kernels only; this process builds programs and does not run them")


def _load_if_possible() -> None:
    try:
        load(gpu_only=True)
    except ConfigError as error:
        warnings.warn(f"programs with GPU-only operations will not build: {error}", stacklevel=2)


class _Library:
    """The compiled kernels."""

    def __init__(self, path: Path) -> None:
        self._calls = ctypes.CDLL(os.fspath(path))

    def has(self, name: str, dtype: int) -> bool:
        return bool(self._calls.interlace_has(name.encode(), dtype))

    def wrap(self, names: Iterable[str], dtype: str, replace: bool) -> None:
        """Register kernels that compute in float32; names without a float32 CPU kernel stay without."""
        message = "runs in {1} inside of programs only on a CPU; use float32 in dynamic mode, or build it with dist.to_static"
        for name in names:
            text = _message(name, message.format(name, dtype))
            _check(name, self._calls.interlace_wrap(name.encode(), _DTYPES[dtype], int(replace), text))

    def reuse(self, names: Iterable[str], dtype: str) -> None:
        """Register the float32 kernels for another type."""
        for name in names:
            _check(name, self._calls.interlace_reuse(name.encode(), _DTYPES[dtype]))

    def refuse(self, names: Iterable[str], dtype: str, reason: str) -> None:
        """Register kernels that raise when run."""
        number = _DTYPES.get(dtype, _FLOAT32)
        for name in names:
            _check(name, self._calls.interlace_refuse(name.encode(), number, _message(name, f"({dtype}) {reason}")))


class _Registered:
    """What this process has registered."""

    def __init__(self, library: _Library, gpu_only: bool) -> None:
        self.library, self.gpu_only = library, gpu_only


_loaded: list[_Registered] = []


def _message(name: str, reason: str) -> bytes:
    return f"interlace: kernel '{name}' {reason}".encode()


def _check(name: str, status: int) -> None:
    assert status != _NO_ROOM, f"kernel {name!r}: more than kMostKernels registered; raise it in {_SOURCE.name}"


def _has_half_parameters(model: Any) -> bool:
    if model is None:
        return False
    return any(_is_half(parameter) for parameter in model.parameters())


def _is_half(tensor: Any) -> bool:
    return str(tensor.dtype).rpartition(".")[2].lower() in _DTYPES


# -- compiling -------------------------------------------------------------------------------------------------------


def library_path() -> Path:
    """The compiled kernels for the installed Paddle; compiled now (about 15 s) if they are not there.

    Several processes may ask at once: one compiles, the others wait for it.
    """
    source = _SOURCE.read_bytes()
    folder = cache_folder() / hashlib.sha256(source + _identity().encode()).hexdigest()[:16]
    made = folder / "half_kernels.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(made)
    return made


def cache_folder() -> Path:
    """Where compiled kernels are kept: $INTERLACE_CACHE, else `interlace` in the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interlace"


def _identity() -> str:
    """What the compiled kernels depend on besides their source."""
    import paddle

    return f"{paddle.__version__} {paddle.version.commit} {paddle.sysconfig.get_lib()} {platform.machine()} {_FLAGS}"


def _compile(target: Path) -> None:
    """Compile into a temporary file beside `target`, and move it there."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        done = subprocess.run([compiler, *_arguments(made)], capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            tail = "\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()[-_LOG_TAIL_LINES:])
            raise ConfigError(
                f"half precision on a CPU: {compiler} ended with code {done.returncode} on {_SOURCE}; its last lines:\n{tail}\n"
                "Expected a compiler for C++17; name another one in the variable CXX, or train with amp off"
            )
        os.replace(made, target)


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(_COMPILERS)
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise ConfigError(
        f"half precision on a CPU needs a C++17 compiler once, to compile {_SOURCE.name} for the installed Paddle; looked for "
        f"{', '.join(names)}. Install one (for example g++), name it in the variable CXX, or train with amp off"
    )


def _arguments(target: Path) -> list[str]:
    import paddle

    libraries = [f"-l:lib{name}.so" for name in ("phi", "phi_core", "common")]
    include, folder = paddle.sysconfig.get_include(), paddle.sysconfig.get_lib()
    return [*_FLAGS, f"-I{include}", os.fspath(_SOURCE), "-o", os.fspath(target), f"-L{folder}", *libraries]
