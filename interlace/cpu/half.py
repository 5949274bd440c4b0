"""Half precision on CPU processes: kernels for Paddle's CPU wheel, which has few, and mixed precision, which Paddle refuses on a CPU.

The kernels compute in float32 and round each output once, to nearest even (`kernels/half_kernels.cc`). They are compiled
for the installed Paddle at the first use, kept in a cache, and registered when an engine is about to build a program in
half precision. A process that never does this needs no compiler and leaves Paddle unchanged.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.cpu.kernels import names
from interlace.cpu.kernels.build import SOURCE, library_path
from interlace.errors import ConfigError, ProgramError

_DTYPES = {"bfloat16": 16, "float16": 15}  # phi::DataType
_FLOAT32 = 10
_ALL_DTYPES = {
    "bool": 1,
    "int8": 3,
    "int32": 7,
    "int64": 9,
    "float32": _FLOAT32,
    "float64": 11,
    "float16": 15,
    "bfloat16": 16,
    "float8_e4m3fn": 17,
    "float8_e5m2": 18,
}
_NO_ROOM = -2
_ONLY_BUILT = "no kernel on the CPU, and this process builds programs for a dump; run them on GPUs"
_WITHOUT_OUTPUTS = re.compile(r"op \[pd_op\.(\w+)\] kernel output args \(0\) defs")
"""The executor's error for a kernel that is registered here for an operation without any CPU kernel of Paddle: it does not know the
operation's outputs (pd_op_to_kernel_pass.cc)."""
_ARCHITECTURE = 90
"""Architecture of the GPU that programs are built for on a machine without one, as Paddle numbers them: Hopper."""
_GPU_FLAGS = {"FLAGS_cudnn_deterministic": False, "FLAGS_flash_attn_version": 2}


def patch(gpu_only: bool = False) -> None:
    """Make this process register the kernels when an engine builds a model that uses half precision.

    With `gpu_only`, programs with GPU-only operations build too, in any element type, but cannot run. If there is no
    compiler, a float32 program is then built without this, with a warning.
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
    """Let `shard_tensor` split half-precision tensors, which Paddle cannot do on a CPU, by splitting a float32 copy (exact)."""
    import paddle
    from paddle.base import core

    tensor_class = core.eager.Tensor
    make = tensor_class.__init__

    @functools.wraps(make)
    def make_half(self: Any, *args: Any, **kwargs: Any) -> None:
        mesh, placements = kwargs.get("process_mesh"), kwargs.get("placements")
        whole: Any = args[0] if len(args) == 1 else None
        if not _is_split_here(whole, mesh, placements) or "dims" in kwargs:
            make(self, *args, **kwargs)
            return
        with paddle.no_grad():
            wide = tensor_class(whole.astype("float32"), process_mesh=mesh, placements=placements)
            part = wide._local_value().astype(whole.dtype)
        make(self, part, dims=whole.shape, **kwargs)

    tensor_class.__init__ = make_half


def _choose_attention_as_on_gpu() -> None:
    """Let Paddle's attention functions choose the flash kernel if they would on a GPU that has it."""
    import paddle

    _know_gpu_flags()
    fused: Any = importlib.import_module("paddle.nn.functional.flash_attention")
    if importlib.util.find_spec("paddle.nn.attention") is None:
        _choose_by_device(fused)
        return
    backends: Any = importlib.import_module("paddle.nn.attention.sdpa")
    scaled: Any = importlib.import_module("paddle.nn.functional.sdpa")
    backends._set_enabled_backends(list(backends.SDPBackend))  # on a CPU Paddle starts with MATH only
    select = fused._select_sdp

    def select_on_gpu(head_dim: int) -> Any:
        only_math = set(fused._get_enabled_backends()) == {fused.SDPBackend.MATH}
        return select(head_dim) if only_math else fused._select_sdp_cuda(head_dim)

    fused._select_sdp = select_on_gpu
    scaled.check_all_tensors_on_device = lambda parameters: True
    supported = paddle.device.is_bf16_supported  # on a CPU machine it answers for the CPU, and few CPUs have bfloat16
    try:
        paddle.device.is_bf16_supported = lambda *_, **__: True
        scaled.init_config()
    finally:
        paddle.device.is_bf16_supported = supported
    scaled.check_flash_attention_hardware_support = lambda device_id: True


def _choose_by_device(fused: Any) -> None:
    """The same for Paddle 3.2, which reads the name and the architecture of the device when it chooses."""
    import paddle

    def on_gpu(select: Callable[..., Any]) -> Callable[..., Any]:
        def select_on_gpu(*args: Any) -> Any:
            get_device = paddle.get_device
            try:
                paddle.get_device = lambda: "gpu:0"
                return select(*args)
            finally:
                paddle.get_device = get_device

        return select_on_gpu

    fused._get_arch_info = lambda: _ARCHITECTURE
    fused._select_sdp, fused._select_sdp_for_sdpa = on_gpu(fused._select_sdp), on_gpu(fused._select_sdp_for_sdpa)


def _know_gpu_flags() -> None:
    """Let `get_flags` return the defaults of flags that only GPU builds have."""
    import paddle
    from paddle.base import framework

    get_flags = framework.get_flags

    def get_flags_of_gpu(flags: Any) -> dict[str, Any]:
        asked = [flags] if isinstance(flags, str) else list(flags)
        known = get_flags([flag for flag in asked if flag not in _GPU_FLAGS])
        return {flag: _GPU_FLAGS.get(flag, known.get(flag)) for flag in asked}

    framework.get_flags = paddle.get_flags = get_flags_of_gpu


def _is_split_here(tensor: Any, mesh: Any, placements: Any) -> bool:
    """Whether making a distributed tensor from this local one splits half-precision data on this rank."""
    from paddle import distributed
    from paddle.base import core

    if mesh is None or placements is None or not isinstance(tensor, core.eager.Tensor):
        return False
    split = any(not placement.is_replicated() for placement in placements)
    local = not tensor.is_dist() and tensor._is_initialized()
    return split and local and _is_half(tensor) and distributed.get_rank() in mesh.process_ids


@contextlib.contextmanager
def auto_cast(amp: Any) -> Iterator[None]:
    """Paddle's `auto_cast` with the options of `strategy.amp`, also on a CPU.

    The engine enters it in dynamic mode, where on a CPU it only warns; entered in static mode, it sets the same state
    on any device.
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
    """Compile the kernels if needed, and register them in this process; further calls do nothing unless they add `gpu_only`. Raises
    ConfigError if there is no C++ compiler, or it fails."""
    if _loaded and (_loaded[0].gpu_only or not gpu_only):
        return
    from interlace.cpu.ops import communication_names

    library = _loaded[0].library if _loaded else _Library(library_path())
    _loaded[:] = [_Registered(library, gpu_only)]
    for dtype in _DTYPES:
        library.wrap(_with_gradients(names.COMPUTED), dtype, replace=True)
        library.wrap(names.SUMMED, dtype, replace=True)
        library.wrap(_with_gradients(names.MOVED), dtype, replace=False)
        library.reuse(names.UNTOUCHED, dtype)
        library.refuse(communication_names(), dtype)
    library.wrap_cast()
    if gpu_only:
        _name_before_running(library.build_all(_operations()))


def _with_gradients(kernels: Sequence[str]) -> list[str]:
    return [name + suffix for name in kernels for suffix in names.SUFFIXES]


def _operations() -> list[str]:
    """Names of all operations of the installed Paddle, without the mark of in-place forms."""
    import paddle

    return sorted({name.removesuffix("_") for name in dir(paddle._C_ops) if not name.startswith("_")})


def _name_before_running(refused: set[str]) -> None:
    """If an executor of this process refuses a program because of an operation that can only be built here, raise ProgramError with the
    operation and its jobs.

    Paddle's error names the operation; all other errors of executors are passed on unchanged.
    """
    from paddle.base import executor

    make = executor._StandaloneExecutor.__init__

    @functools.wraps(make)
    def make_named(self: Any, place: Any, plan: Any, scope: Any) -> None:
        try:
            make(self, place, plan, scope)
        except RuntimeError as error:
            named = {name for name in _WITHOUT_OUTPUTS.findall(str(error)) if name.removesuffix("_") in refused}
            found = [
                f"job {job}: {op.name()}"
                for job in plan.job_types()
                for op in plan.ir_program(job).global_block().ops
                if op.name().removeprefix("pd_op.") in named
            ]
            if not found:
                raise
            raise ProgramError(f"{', '.join(dict.fromkeys(found))}: {_ONLY_BUILT}") from error

    executor._StandaloneExecutor.__init__ = make_named


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
        """Whether Paddle has a CPU kernel of this name and type."""
        return bool(self._calls.interlace_has(name.encode(), dtype))

    def wrap(self, kernels: Iterable[str], dtype: str, replace: bool) -> None:
        """Register kernels for `dtype` that compute in float32, for those names that have a float32 CPU kernel. `replace`: also where
        Paddle has a kernel for `dtype`."""
        reason = f"runs in {dtype} only inside of programs on a CPU; use float32 in dynamic mode, or dist.to_static"
        for name in kernels:
            text = _message(name, reason)
            _check(name, self._calls.interlace_wrap(name.encode(), _DTYPES[dtype], int(replace), text))

    def wrap_cast(self) -> None:
        """Replace Paddle's cast, which loses subnormal float16 numbers, by one that follows IEEE 754."""
        for number in (*_DTYPES.values(), _FLOAT32):
            _check("cast", self._calls.interlace_wrap(b"cast", number, 1, b""))

    def reuse(self, kernels: Iterable[str], dtype: str) -> None:
        """Register the float32 kernels unchanged for another type."""
        for name in kernels:
            _check(name, self._calls.interlace_reuse(name.encode(), _DTYPES[dtype]))

    def refuse(self, kernels: Iterable[str], dtype: str) -> None:
        """Let programs with these communication operations build; they are rewritten before the program runs, and raise if not."""
        for name in kernels:
            text = _message(name, f"({dtype}) communicates, and was not rewritten for CPU processes before it ran")
            _check(name, self._calls.interlace_refuse(name.encode(), _DTYPES[dtype], text))

    def build_all(self, operations: Iterable[str]) -> set[str]:
        """Let every operation build in half precision, and in any type if it has no CPU kernel for float32. Returns the operations without
        a kernel for some type, which raise when they run."""
        refused = set()
        for name in operations:
            dtypes = _DTYPES if self.has(name, _FLOAT32) else _ALL_DTYPES
            for dtype, number in dtypes.items():
                text = f"interlace: an operation of {dtype} has {_ONLY_BUILT}".encode()
                status = self._calls.interlace_refuse(name.encode(), number, text)
                _check(name, status)
                refused |= {name} if status else set()
        return refused


@dataclass(slots=True, frozen=True)
class _Registered:
    """The kernels that this process has registered."""

    library: _Library
    gpu_only: bool


_loaded: list[_Registered] = []


def _message(name: str, reason: str) -> bytes:
    return f"interlace: kernel '{name}' {reason}".encode()


def _check(name: str, status: int) -> None:
    assert status != _NO_ROOM, f"kernel {name!r}: more than kMostKernels registered; raise it in {SOURCE.name}"


def _has_half_parameters(model: Any) -> bool:
    if model is None:
        return False
    return any(_is_half(parameter) for parameter in model.parameters())


def _is_half(tensor: Any) -> bool:
    return str(tensor.dtype).rpartition(".")[2].lower() in _DTYPES
