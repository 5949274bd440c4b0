"""Optimizer state on the host: what lowering builds, and where variables are moved to before a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from interlace.bridge import host_state  # noqa: E402
from interlace.bridge.lower import Lowered, lower  # noqa: E402
from interlace.bridge.targets.cpu import CpuDevice  # noqa: E402
from interlace.ir import Program  # noqa: E402
from interlace.passes import OffloadOptimizerState, Schedule1F1B  # noqa: E402
from interlace.passes import Pipeline as Passes  # noqa: E402
from tests.bridge.lowered import DEVICES, copies, job, ops_of  # noqa: E402
from tests.bridge.small import COSTS, captured_small  # noqa: E402
from tests.default_passes import STREAMS  # noqa: E402

pytestmark = pytest.mark.paddle
OUT = {"cpu": ("pd_op.memcpy_d2h", 0), "custom": ("pd_op.memcpy_d2h", 1), "gpu": ("pd_op.memcpy", 2), "testbed": ("pd_op.memcpy_d2h", 1)}


def lowered(target: str) -> tuple[Program, Lowered]:
    captured = captured_small(moment=True)
    passes = (Schedule1F1B(interleave="off"), OffloadOptimizerState(fraction=1.0, min_bytes=4), *STREAMS)
    program = Passes(passes).run(captured.program, COSTS)[0]
    return program, lower(captured, program, DEVICES[target])


@pytest.mark.parametrize("target", DEVICES)
def test_a_copy_out_has_the_variable_that_it_writes_into(target: str) -> None:
    """Its job has the variable as an argument, which the executor then keeps with its buffer; nothing collects it."""
    _, made = lowered(target)
    assert made.on_host == {"m"}
    assert copies(made, "optimizer")[-1] == OUT[target]
    last = job(made, "optimizer")
    (out,) = [op for op in ops_of(last, "builtin.shadow_output") if op.attrs()["output_name"] == "m"]
    assert out.operand_source(0).get_defining_op().name() == OUT[target][0]
    assert out.operand_source(0).persistable
    argument = last.program.global_block().kwargs()["m"]
    assert argument.persistable
    assert str(argument.place_attr) == str(DEVICES[target].place_attribute())
    (update, *_) = ops_of(last, "pd_op.add_")
    assert not any(source.is_same(argument) for source in update.operands_source())


@pytest.mark.parametrize("target", ["custom", "gpu", "testbed"])
def test_the_step_begins_with_a_wait_of_copies_in_for_copies_out(target: str) -> None:
    """Inside a job the executor orders streams by variables."""
    program, made = lowered(target)
    first = job(made, program.jobs[0].name)
    (mark,) = [op for op in ops_of(first, "pd_op.full") if "execution_stream" in op.attrs()]
    order, *_ = [op for op in ops_of(first, "pd_op.share_data") if "execution_stream" in op.attrs()]
    (copy_in,) = [op for each in made.jobs for op in ops_of(each, "pd_op.memcpy_h2d")]
    assert order.operand_source(0).is_same(mark.results()[0])
    assert order.attrs()["execution_stream"] == copy_in.attrs()["execution_stream"] != mark.attrs()["execution_stream"]


@pytest.mark.parametrize("target", ["custom", "gpu", "testbed"])
def test_memory_is_given_back_behind_the_copy_out(target: str) -> None:
    """The stream of copies in, which has the memory, waits for what the stream of copies out does next, and reads the value last."""
    program, made = lowered(target)
    last = job(made, program.jobs[-1].name)
    behind = [op for op in ops_of(last, "pd_op.full") if "execution_stream" in op.attrs()][-1]
    order, reader = [op for op in ops_of(last, "pd_op.share_data") if "execution_stream" in op.attrs()][-2:]
    (update, *_) = ops_of(last, "pd_op.add_")
    assert order.operand_source(0).is_same(behind.results()[0])
    assert reader.operand_source(0).is_same(update.results()[0])
    assert {op.attrs()["execution_stream"] for op in (order, reader)} != {behind.attrs()["execution_stream"]}


class Counting(CpuDevice):
    """Says of each tensor where it is, and what was moved."""

    def __init__(self) -> None:
        super().__init__(paddle.CPUPlace())
        object.__setattr__(self, "told", [])
        object.__setattr__(self, "there", set())

    __slots__ = ("there", "told")

    def is_on_host(self, tensor: Any) -> bool:
        return tensor._ptr() in self.there  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        self.told.append("wait")  # type: ignore[attr-defined]

    def move_to_host(self, tensor: Any) -> None:
        self.there.add(tensor._ptr())  # type: ignore[attr-defined]
        self.told.append("out")  # type: ignore[attr-defined]

    def release_memory(self) -> None:
        self.told.append("release")  # type: ignore[attr-defined]

    def move_to_device(self, tensor: Any) -> None:
        self.there.discard(tensor._ptr())  # type: ignore[attr-defined]
        self.told.append("back")  # type: ignore[attr-defined]


@pytest.fixture
def scope() -> Iterator[Any]:
    found = paddle.static.global_scope()
    for name in ("one", "two"):
        found.var(name).get_tensor().set(np.zeros(4, "float32"), paddle.CPUPlace())
    host_state._on_host.clear()
    yield found
    host_state._on_host.clear()
    for name in ("one", "two"):
        found.erase([name])


def test_variables_move_where_the_plan_wants_them_and_only_then(scope: Any) -> None:
    device: Any = Counting()
    host_state.settle({"one", "two"}, device)
    assert device.told == ["wait", "out", "out", "release"]
    host_state.settle({"one", "two"}, device)
    assert len(device.told) == 4
    host_state.settle({"one", "gone"}, device)
    assert device.told[4:] == ["wait", "back"]
    device.there.clear()  # a checkpoint was loaded onto the device
    host_state.settle({"one"}, device)
    assert device.told[6:] == ["wait", "out", "release"]
    host_state.settle((), device)
    assert device.told[9:] == ["wait", "back"]


def test_reading_the_state_waits_for_copies_to_the_host(scope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Counting()
    monkeypatch.setattr(host_state, "choose_device", lambda: device)
    read = host_state.state_dict_of(lambda program, mode: (program, mode, list(device.told)))
    assert read("p", "opt") == ("p", "opt", [])
    host_state.settle({"one"}, device)
    assert read("p", "opt")[2][-1] == "wait"
