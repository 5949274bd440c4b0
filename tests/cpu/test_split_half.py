"""split-backward in half precision: the same bits as the whole gradient, also behind the cast of master gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from interlace.cpu import half
from interlace.cpu.reduction import float32_to_bfloat16
from interlace.ir import Program
from tests.passes.splits import CASES, SETTINGS, case, outputs_of, split

pytestmark = pytest.mark.paddle


@pytest.fixture(scope="module")
def paddle() -> Iterator[Any]:
    """Paddle in static mode, with kernels for half precision."""
    module = pytest.importorskip("paddle")
    half.load()
    module.enable_static()
    yield module
    module.disable_static()


def run(paddle: Any, programs: list[Program], feed: dict[str, Any], master: Any) -> list[list[Any]]:
    """dx, dy and `master + float32(dy)` of every program, in one run."""
    main = paddle.static.Program()
    fetched: list[Any] = []
    with paddle.static.program_guard(main):
        inputs = {name: paddle.static.data(name, list(array.shape), "bfloat16") for name, array in feed.items()}
        buffer = paddle.static.data("master", list(master.shape), "float32")
        for program in programs:
            dx, dy = outputs_of(paddle, program, inputs)
            fetched += [dx, dy, paddle._C_ops.add(buffer, paddle._C_ops.cast(dy, paddle.float32))]
    flat = paddle.static.Executor(paddle.CPUPlace()).run(main, feed={**feed, "master": master}, fetch_list=fetched)
    return [list(flat[k : k + 3]) for k in range(0, len(flat), 3)]


@pytest.mark.parametrize(("x", "y"), CASES)
@pytest.mark.parametrize(("tx", "ty"), SETTINGS)
def test_same_bits_in_bfloat16(paddle: Any, x: tuple[int, ...], y: tuple[int, ...], tx: bool, ty: bool) -> None:
    program = case(x, y, tx, ty, "bfloat16")
    splits = [split(program, fold=fold)[0] for fold in (False, True)]
    random = np.random.default_rng(7)
    given = {v.name: random.standard_normal(v.shape).astype(np.float32) for v in program.values if v.name}
    feed = {name: float32_to_bfloat16(array) for name, array in given.items()}
    whole, *parts = run(paddle, [program, *splits], feed, given["y"])
    assert whole[0].dtype == np.uint16
    for fold, made in zip((False, True), parts, strict=True):
        for name, a, b in zip(("dx", "dy", "master gradient"), whole, made, strict=True):
            assert a.tobytes() == b.tobytes(), f"{name} (fold={fold}) differs"
