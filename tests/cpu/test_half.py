"""Half precision on CPU processes: kernels against float32, mixed-precision training, dumps, and what goes wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from interlace.cli import main
from interlace.cpu.kernels import build
from interlace.cpu.reduction import bfloat16_to_float32, float32_to_bfloat16
from interlace.errors import ConfigError, ProgramError
from interlace.files import CACHE_VARIABLE
from interlace.ir import Program, load
from interlace.local.launch import LaunchResult, launch

EXAMPLES = Path(__file__).parents[2] / "examples"
HALVES = ("bfloat16", "float16")
SEED = 7
Floats = npt.NDArray[np.float32]

pytest.importorskip("paddle")
from interlace.cpu import half, ops  # noqa: E402

pytestmark = pytest.mark.paddle


def rounded(values: Floats, dtype: str) -> Floats:
    """`values` as the half-precision type holds them, by numpy alone."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return bfloat16_to_float32(float32_to_bfloat16(values))


def ulps(dtype: str) -> float:
    """One unit in the last place, relative."""
    return 2.0**-7 if dtype == "bfloat16" else 2.0**-10


@pytest.fixture(scope="module")
def paddle() -> Iterator[types.ModuleType]:
    """Paddle in static mode, with the kernels; operations run in order, as on CPU ranks."""
    module = pytest.importorskip("paddle")
    half.load()
    before = module.get_flags("FLAGS_new_executor_sequential_run")
    module.set_flags({"FLAGS_new_executor_sequential_run": True})
    module.enable_static()
    yield module
    module.disable_static()
    module.set_flags(before)


Outputs = list[Any]


def run(paddle: Any, function: Callable[..., Outputs], dtype: str, *inputs: Floats) -> list[Floats]:
    """Results of a static program that casts its inputs to `dtype`, and its results back."""
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        fed = [paddle.static.data(f"x{i}", array.shape, "float32") for i, array in enumerate(inputs)]
        results = function(*(value.astype(dtype) for value in fed))
        wanted = [value.astype("float32") for value in results]
    executor = paddle.static.Executor(paddle.CPUPlace())
    found: list[Floats] = executor.run(main, feed={f"x{i}": a for i, a in enumerate(inputs)}, fetch_list=wanted)
    return found


def gradients(paddle: Any, function: Callable[..., Any]) -> Callable[..., Outputs]:
    """`function`, and the gradients of a weighted sum of its result for all inputs."""

    def both(*inputs: Any) -> Outputs:
        for value in inputs:
            value.stop_gradient = False
        result = function(*inputs)
        weights = np.arange(np.prod(result.shape), dtype=np.float32).reshape(result.shape) % 5 / 4
        return [result, *paddle.static.gradients([result], list(inputs), [paddle.assign(weights).astype(result.dtype)])]

    return both


CASES: dict[str, tuple[Callable[[Any], Callable[..., Any]], list[tuple[int, ...]]]] = {
    "add": (lambda p: lambda x, y: x + y, [(4, 6), (6,)]),
    "multiply": (lambda p: lambda x, y: x * y, [(4, 6), (6,)]),
    "divide": (lambda p: lambda x, y: x / (y * y + 1.0), [(4, 6), (4, 6)]),
    "matmul": (lambda p: lambda x, y: p.matmul(x, y, transpose_y=True), [(4, 6), (5, 6)]),
    "batched matmul": (lambda p: lambda x, y: p.matmul(x, y), [(2, 3, 4), (2, 4, 5)]),
    "layer_norm": (lambda p: lambda x, w: p.nn.functional.layer_norm(x, [6], weight=w), [(4, 6), (6,)]),
    "softmax": (lambda p: lambda x: p.nn.functional.softmax(x), [(4, 6)]),
    "gelu": (lambda p: lambda x: p.nn.functional.gelu(x), [(4, 6)]),
    "silu": (lambda p: lambda x: p.nn.functional.silu(x), [(4, 6)]),
    "swiglu": (lambda p: lambda x: p.nn.functional.swiglu(x), [(4, 6)]),
    "tanh": (lambda p: lambda x: p.tanh(x), [(4, 6)]),
    "mean": (lambda p: lambda x: x.mean(axis=1), [(4, 6)]),
    "sum": (lambda p: lambda x: x.sum(axis=0), [(40, 6)]),
    "max": (lambda p: lambda x: x.max(axis=1), [(4, 6)]),
    "concat": (lambda p: lambda x, y: p.concat([x, y], axis=1), [(4, 2), (4, 3)]),
    "transpose": (lambda p: lambda x: x.transpose([1, 0]), [(4, 6)]),
    "tile": (lambda p: lambda x: p.tile(x, [3, 1]), [(4, 6)]),
    "where": (lambda p: lambda x, y: p.where(x > y, x, y), [(4, 6), (4, 6)]),
    "rsqrt": (lambda p: lambda x: p.rsqrt(x * x + 1.0), [(4, 6)]),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_kernel_and_its_gradients_agree_with_float32(paddle: Any, name: str, dtype: str) -> None:
    """Several operations in a row round more than once: a few units in the last place are left to them."""
    make, shapes = CASES[name]
    generator = np.random.default_rng(SEED)
    inputs = [rounded(generator.standard_normal(shape).astype(np.float32), dtype) for shape in shapes]
    function = gradients(paddle, make(paddle))
    found, exact = run(paddle, function, dtype, *inputs), run(paddle, function, "float32", *inputs)
    assert len(found) == 1 + len(shapes)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_array_equal(one, rounded(one, dtype))
        np.testing.assert_allclose(one, other, rtol=4 * ulps(dtype), atol=4 * ulps(dtype) * np.abs(other).max())


ROUNDED_ONCE: dict[str, tuple[Callable[[Any], Callable[..., Outputs]], list[tuple[int, ...]]]] = {
    "add": (lambda p: lambda x, y: [x + y], [(64, 64), (64, 64)]),
    "matmul": (lambda p: lambda x, y: [p.matmul(x, y)], [(32, 48), (48, 32)]),
    "matmul and gradients": (lambda p: gradients(p, p.matmul), [(32, 48), (48, 32)]),
    "sum of many": (lambda p: lambda x: [x.sum(axis=0)], [(5000, 3)]),
    "mean": (lambda p: lambda x: [x.mean()], [(5000, 3)]),
    "add_n": (lambda p: lambda x, y, z: [p.add_n([x, y, z])], [(8, 8), (8, 8), (8, 8)]),
    "exp": (lambda p: lambda x: [p.exp(x)], [(64, 64)]),
    "squared_l2_norm": (lambda p: lambda x: [p._C_ops.squared_l2_norm(x)], [(64, 64)]),
    "gelu": (lambda p: lambda x: [p.nn.functional.gelu(x)], [(64, 64)]),
    "layer_norm": (lambda p: lambda x: [p.nn.functional.layer_norm(x, [64])], [(64, 64)]),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", sorted(ROUNDED_ONCE))
def test_one_kernel_is_float32_rounded_once(paddle: Any, name: str, dtype: str) -> None:
    make, shapes = ROUNDED_ONCE[name]
    generator = np.random.default_rng(SEED)
    inputs = [rounded(generator.standard_normal(shape).astype(np.float32), dtype) for shape in shapes]
    found, exact = run(paddle, make(paddle), dtype, *inputs), run(paddle, make(paddle), "float32", *inputs)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_array_equal(one, rounded(other, dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_of_every_kind_of_number(paddle: Any, dtype: str) -> None:
    """Ties, numbers too large or too small, zeros, infinities and NaN, through a kernel that changes no value."""
    bits = np.random.default_rng(SEED).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 6e-8, 2.98e-8, 1e-45], np.float32)
    values = np.concatenate([bits.view(np.float32), special, np.float32(1) + np.arange(64, dtype=np.float32) / 4096])
    found = run(paddle, lambda x: [paddle.nn.functional.relu(x), paddle.nn.functional.relu(-x)], dtype, values)
    expected = rounded(values, dtype)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(found[0][number], np.maximum(expected, 0)[number])
    np.testing.assert_array_equal(found[1][number], np.maximum(-expected, 0)[number])


@pytest.mark.parametrize("dtype", HALVES)
def test_results_are_rounded_to_nearest_even(paddle: Any, dtype: str) -> None:
    """Halving a subnormal or adding a quarter of the last place makes ties and subnormal results inside the kernel."""
    generator = np.random.default_rng(SEED)
    small = 2.0 ** (-133 if dtype == "bfloat16" else -24)
    x = np.concatenate([generator.integers(-64, 64, 512) * small, generator.standard_normal(512)]).astype(np.float32)
    y = np.concatenate([np.full(512, 0.5), generator.standard_normal(512)]).astype(np.float32)
    x, y = rounded(x, dtype), rounded(y, dtype)
    assert np.count_nonzero(x[:512]) > 400
    (product,) = run(paddle, lambda a, b: [a * b], dtype, x, y)
    np.testing.assert_array_equal(product, rounded(x * y, dtype))


def adamw_of(paddle: Any, dtype: str, master: bool) -> Callable[..., Outputs]:
    """One AdamW step of `x` with gradient `y`: the new parameter, and the master copy where there is one."""

    def step(x: Any, y: Any) -> Outputs:
        moment = [paddle.zeros(x.shape, "float32") for _ in range(2)]
        powers = [paddle.full([1], value, "float32") for value in (0.9, 0.999)]
        copy = x.astype("float32") if master else None
        given = (x, y, paddle.full([1], 0.01, "float32"), *moment, None, *powers, copy, None)
        found = paddle._C_ops.adamw_(*given, 0.9, 0.999, 1e-8, 1.0, 0.01, True, False, 1000, master, False, False)
        return [found[0], paddle.assign(copy)] if master else [found[0]]

    return step


@pytest.mark.parametrize("dtype", HALVES)
def test_adamw_updates_the_master_copy_and_rounds_the_parameter(paddle: Any, dtype: str) -> None:
    generator = np.random.default_rng(SEED)
    x, y = (rounded(generator.standard_normal((8, 8)).astype(np.float32), dtype) for _ in range(2))
    parameter, master = run(paddle, adamw_of(paddle, dtype, True), dtype, x, y)
    (exact,) = run(paddle, adamw_of(paddle, "float32", False), "float32", x, y)
    assert np.abs(exact - x).max() > 1e-3
    np.testing.assert_array_equal(master, exact)
    np.testing.assert_array_equal(parameter, rounded(exact, dtype))


@pytest.mark.parametrize("last", [3.0, np.inf])
def test_loss_scaling_unscales_in_place_and_finds_infinity(paddle: Any, last: float) -> None:
    def step(x: Any) -> Outputs:
        found, infinite = paddle._C_ops.check_finite_and_unscale_([x], paddle.full([1], 2.0, "float32"))
        good, bad = paddle.zeros([1], "int32"), paddle.zeros([1], "int32")
        options = (1000, 2, 2.0, 0.5, False)
        kept = paddle._C_ops.update_loss_scaling_([found[0]], infinite, paddle.full([1], 8.0), good, bad, *options)
        return [kept[0][0], infinite]

    x = np.array([*range(-4, 3), last], dtype=np.float32)
    kept, infinite = run(paddle, step, "float16", x)
    assert bool(infinite[0]) is (last == np.inf)
    np.testing.assert_array_equal(kept, np.zeros(8) if last == np.inf else x / 2)


def test_a_kernel_that_is_not_ours_keeps_paddles_error(paddle: Any) -> None:
    with pytest.raises(Exception, match="cholesky"):
        run(paddle, lambda x: [paddle.linalg.cholesky(x)], "bfloat16", np.eye(3, dtype=np.float32))


def test_dynamic_mode_says_that_kernels_are_for_programs(paddle: Any) -> None:
    paddle.disable_static()
    try:
        x = paddle.ones([2, 2]).astype("bfloat16")
        with pytest.raises(NotImplementedError, match="'matmul' runs in bfloat16 only inside of programs on a CPU"):
            paddle.matmul(x, x)
        assert float((x * 2.0).astype("float32").sum()) == 8.0  # Paddle's own kernels stay
    finally:
        paddle.enable_static()


def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paddle")
    monkeypatch.setenv(CACHE_VARIABLE, os.fspath(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs a C\+\+17 compiler once.*looked for no-such-compiler.*CXX"):
        build.library_path()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ConfigError, match=r"ended with code 1 on .*half_kernels\.cc"):
        build.library_path()
    assert not list(tmp_path.rglob("*.so"))


def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    log = tmp_path / "compiled"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho once >> {log}\nsleep 1\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    compiler.chmod(0o755)
    code = "from interlace.cpu.kernels.build import library_path; print(library_path().read_text())"
    env = {**os.environ, "CXX": os.fspath(compiler), CACHE_VARIABLE: os.fspath(tmp_path / "cache")}
    started = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert ["made" in process.communicate()[0] for process in started] == [True, True]
    assert log.read_text() == "once\n"


# -- whole programs --------------------------------------------------------------------------------------------------


def train(tmp_path: Path, name: str, *words: str, env: dict[str, str] | None = None, world: int = 2) -> LaunchResult:
    script = EXAMPLES / f"{name}.py"
    arguments = ["--steps", "3", "--layers", "2", "--batch-size", "4", *words]
    return launch(script, arguments, world, env or {}, None, tmp_path / "logs", 120.0)


def losses(result: LaunchResult) -> list[str]:
    return [loss.raw_hex for loss in result.reports[-1].losses]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("words", [["--pp", "2", "--amp-dtype", "bfloat16"], ["--mp", "2", "--amp-dtype", "float16"]])
def test_half_precision_trains_nearly_as_float32(tmp_path: Path, words: list[str]) -> None:
    """With Paddle alone, whose bits `tests/training` compares with a plan's."""
    half.load()  # compiled before the ranks start
    found, full = (
        train(tmp_path, "gpt", *options, *words, env={"INTERLACE_DISABLE": "1"}) for options in (["--amp", "O2", "--master-grad"], [])
    )
    assert losses(found) != losses(full)
    for one, other in zip(found.reports[-1].losses, full.reports[-1].losses, strict=True):
        np.testing.assert_allclose(one.values, other.values, rtol=0.02)


def dump(tmp_path: Path, script: Path, *words: str, world: int = 1) -> Program:
    target = tmp_path / "rank0.ilp"
    assert main(["dump", os.fspath(script), "--rank", "0", "--world", str(world), "-o", os.fspath(target), "--", *words]) == 0
    return load(target)


def dtypes_of(program: Program, name: str) -> set[str]:
    values = {value.id: value.dtype for value in program.values}
    return {values[op.results[0]] for op in program.ops if op.name == f"pd_op.{name}"}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_dump_holds_half_precision_and_gpu_kernels(tmp_path: Path, level: str) -> None:
    words = ["--layers", "1", "--amp", level, "--attention", "flash", *(["--master-grad"] if level == "O2" else [])]
    program = dump(tmp_path, EXAMPLES / "llama.py", *words)
    for name in ("matmul", "matmul_grad", "flash_attn", "flash_attn_grad"):
        assert dtypes_of(program, name) == {"bfloat16"}
    assert dtypes_of(program, "adamw_") == {"bfloat16" if level == "O2" else "float32"}
    assert dtypes_of(program, "cross_entropy_with_softmax") == {"float32"}
    values = {value.id: value for value in program.values}
    attention = [op for op in program.ops if op.kind == "flash_attn"]  # its matrix of heads x rows x columns is not asked for
    assert [values[op.results[1]].size_bytes for op in attention] == [0] * len(attention) != []


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_stages_exchange_half_precision(tmp_path: Path, model: str) -> None:
    """What is sent, received and added from block to block is in the type that mixed precision asks for, as in users' models."""
    words = ["--layers", "2", "--pp", "2", "--amp", "O2", "--attention", "flash", "--batch-size", "4"]
    program = dump(tmp_path, EXAMPLES / f"{model}.py", *words, world=2)
    values = {value.id: value.dtype for value in program.values}
    sent = {values[op.operands[0]] for op in program.ops if op.kind == "send_v2"}
    assert sent == dtypes_of(program, "recv_v2") == {"bfloat16"}


def test_every_communication_of_paddle_is_known() -> None:
    """All operations with a ring, by Paddle's own header: what is not replaced on CPU ranks is refused by name, never run there."""
    paddle = pytest.importorskip("paddle")
    header = Path(paddle.sysconfig.get_include()) / "paddle/fluid/pir/dialect/operator/ir/pd_op.h"
    classes = re.split(r"\nclass ", header.read_text())
    names = {found[1] for each in classes if (found := re.search(r'name\(\) { return "pd_op\.(\w+?)_?"', each)) and "int ring_id" in each}
    inference = {name for name in names if name.startswith("fused_multi_transformer")}
    assert len(names) > 30
    assert names - inference <= set(ops.communication_names())


def test_all_communication_builds_in_half_precision(paddle: Any) -> None:
    library = half._loaded[0].library
    assert [name for name in ops.communication_names() for number in half._DTYPES.values() if not library.has(name, number)] == []


@pytest.mark.parametrize(("name", "dtype"), [("fused_rms_norm_ext", "bfloat16"), ("fast_rms_norm", "float32")])
def test_kernels_that_only_build_raise_when_run(name: str, dtype: str) -> None:
    """Any operation of Paddle builds in a dump, whether or not this wheel has a kernel; handed to an executor it is named."""
    script = f"""
        import paddle
        from interlace.cpu import half
        half.load(gpu_only=True)
        paddle.enable_static()
        x, w = paddle.ones([2, 8], "{dtype}"), paddle.ones([8], "{dtype}")
        y = paddle._C_ops.{name}(x, w, 1e-5)[0].astype("float32")
        paddle.static.Executor(paddle.CPUPlace()).run(fetch_list=[y])
    """
    env = {**os.environ, "MALLOC_PERTURB_": "111"}  # what Paddle reads of a kernel is written before, or is no backend
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    expected = f"job default: pd_op.{name}: no kernel on the CPU, and this process builds programs for a dump"
    assert expected in done.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            "(PreconditionNotMet) op [pd_op.fused_rms_norm_ext] kernel output args (0) defs should equal op outputs (2)",
            "job b: pd_op.fused_rms_norm_ext: no kernel on the CPU",
        ),
        ("(ResourceExhausted) Out of memory", "(ResourceExhausted) Out of memory"),
        ("op [pd_op.mine] kernel output args (0) defs should equal op outputs (1)", "op [pd_op.mine] kernel output args (0)"),
    ],
    ids=["ours", "another failure", "a kernel that is not ours"],
)
def test_only_the_failure_of_a_kernel_that_only_builds_is_blamed_on_it(
    paddle: Any, monkeypatch: pytest.MonkeyPatch, error: str, told: str
) -> None:
    """An executor that fails for another reason says so itself, also where the program holds operations with refused types."""
    from paddle.base import executor

    def fail(*_: Any) -> None:
        raise RuntimeError(error)

    def program(*names: str) -> Any:
        ops = [types.SimpleNamespace(name=lambda name=name: f"pd_op.{name}") for name in names]
        return types.SimpleNamespace(global_block=lambda: types.SimpleNamespace(ops=ops))

    programs = {"a": program("matmul", "mine"), "b": program("matmul", "fused_rms_norm_ext")}
    plan = types.SimpleNamespace(job_types=lambda: list(programs), ir_program=programs.get)
    monkeypatch.setattr(executor._StandaloneExecutor, "__init__", fail)
    half._name_before_running({"matmul", "fused_rms_norm_ext"})
    with pytest.raises((RuntimeError, ProgramError)) as caught:
        executor._StandaloneExecutor(None, plan, None)
    assert str(caught.value).startswith(told)


def test_attention_of_paddle_3_2_is_chosen_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the device where it chooses; elsewhere the device stays what it is."""
    paddle = pytest.importorskip("paddle")
    before = paddle.get_device()
    names = "_select_sdp", "_select_sdp_for_sdpa"
    fused = types.SimpleNamespace(**{name: lambda *_: paddle.get_device() for name in names}, _get_arch_info=lambda: 1 // 0)
    half._choose_by_device(fused)
    assert [getattr(fused, name)(128) for name in names] == ["gpu:0"] * 2
    assert fused._get_arch_info() == 90
    assert paddle.get_device() == before
