"""Training steps as a graph of the device (`capture: on`): one step of all jobs is captured, later ones are one launch of it.

The first step of a plan runs normally. In the second, the executor issues all jobs to a device that records them in a graph instead of
running them. The graph is launched in that step and in all later ones, without entering the executor. Before a launch the batch is copied
to where the captured step reads it, and the learning rate is written as usual; losses are read once the launch has copied them to the host,
so that the optimizer may run while the next batch is prepared.

A graph ends with a batch of another shape, when memory is replaced (a checkpoint), or when any other program has run meanwhile: the next
step then runs normally, and the one after it is captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.base import executor as executor_module

from interlace.bridge.lower import Lowered
from interlace.bridge.targets import Device
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.ir.kinds import is_boundary
from interlace.notice import say_once
from interlace.report.measured import Measured

Issue = Callable[..., list[Any]]
_running: list[StepGraphs] = []
"""The plans whose steps are running, the innermost last."""
_launched: list[StepGraphs] = []
"""The plan whose graph ran last, if nothing has entered the executor since; empty or one entry."""


@dataclass(slots=True)
class Graph:
    """A captured step.

    Attributes:
        number: Number of the graph on the device.
        fed: Input -> the tensor from which the captured step reads it.
        addresses: Persistent variable -> its address in the captured step.
    """

    number: int
    fed: dict[str, Any]
    addresses: dict[str, int]


@dataclass(slots=True)
class StepGraphs:
    """Runs the training steps of one lowered plan.

    Attributes:
        lasting: Names of the variables that persist from step to step.
        measured: Where launches are counted.
        fits: Shapes of the batch of a step that ran normally since the last graph ended; None if there was none.
    """

    lowered: Lowered
    device: Device
    lasting: tuple[str, ...]
    measured: Measured
    graph: Graph | None = None
    fits: dict[str, tuple[int, ...]] | None = None

    @classmethod
    def of(cls, lowered: Lowered, program: Program, device: Device, measured: Measured) -> StepGraphs:
        """The graphs for the plan of a program."""
        _install()
        given = {value for op in program.ops if is_boundary(op) for value in op.results}
        kept = (value.name for value in program.values if value.id in given and value.persistable and value.name)
        return cls(lowered, device, tuple(sorted(set(kept))), measured)

    @contextmanager
    def around(self, engine: Any) -> Iterator[None]:
        """Context in which the engine's step runs as a graph."""
        executor = engine._executor
        run = executor.run

        def run_step(program: Any, feed: Any = None, fetch_list: Sequence[Any] = (), **others: Any) -> list[Any]:
            names = [self._output(value) for value in fetch_list]
            _running.append(self)
            try:
                run(program, feed=feed, fetch_list=[], **others)
            finally:
                _running.pop()
            if self.graph is None:
                self.device.synchronize()
            elif names:
                self.device.await_results(self.graph.number)
            scope = paddle.static.global_scope()
            return [np.array(scope.find_var(name).get_tensor()) for name in names]

        executor.run = run_step
        try:
            yield
        finally:
            del executor.run

    def _output(self, value: Any) -> str:
        found = next((name for name, mine in self.lowered.outputs.items() if mine.is_same(value)), None)
        if found is None:
            raise PlanError(
                "steps are captured, and a value is fetched besides the losses: its copy to the host would be inside the captured step, "
                "where the host cannot wait; fetch losses only, or write capture: off"
            )
        return found

    def issue(self, eager: Issue, feed_names: Sequence[str], *others: Any, **more: Any) -> list[Any]:
        """Run the step that the executor was called for, after the batch is fed and the learning rate set: normally, captured or
        launched."""
        scope = paddle.static.global_scope()
        fed = {name: scope.find_var(name).get_tensor() for name in feed_names}
        shapes = {name: tuple(tensor.shape()) for name, tensor in fed.items()}
        if self.graph is not None and (why := self._why_over(shapes)):
            self.end(why)
        if self.graph is None and self.fits != shapes:
            self._settle(scope)
            found = eager(feed_names, *others, **more)
            self.fits = shapes
            return found
        if self.graph is None:
            self._capture(fed, lambda: eager(feed_names, *others, **more))
        else:
            for name, tensor in fed.items():
                self.graph.fed[name]._copy_from(tensor, self.device.place)
        assert self.graph is not None
        self.device.launch(self.graph.number)
        self.measured.launches += 1
        _launched[:] = [self]
        return []

    def end(self, why: str) -> None:
        """Drop the graph."""
        _launched.clear()
        if self.graph is not None:
            say_once(f"captured step: {why}; the next step runs eagerly, and the one after it is captured anew")
            self.device.forget(self.graph.number)
        self.graph = self.fits = None

    def _why_over(self, shapes: dict[str, tuple[int, ...]]) -> str:
        assert self.graph is not None
        if shapes != self.fits:
            return f"the batch has another shape ({shapes}, captured with {self.fits})"
        now = self._addresses()
        moved = [name for name, address in self.graph.addresses.items() if now.get(name) != address]
        return f"{moved[0]} is in other memory ({len(moved)} variables are)" if moved else ""

    def _settle(self, scope: Any) -> None:
        """Move persistent variables to the device: small optimizer state may be on the host, and its value would be captured as a
        constant."""
        for name in self.lasting:
            variable = scope.find_var(name)
            if variable is None or name in self.lowered.on_host:
                continue
            tensor = variable.get_tensor()
            if tensor._is_initialized() and tensor._place().is_cpu_place():
                self.device.move_to_device(tensor)

    def _addresses(self) -> dict[str, int]:
        scope = paddle.static.global_scope()
        found = ((name, scope.find_var(name)) for name in self.lasting)
        tensors = ((name, variable.get_tensor()) for name, variable in found if variable is not None)
        return {name: tensor._ptr() for name, tensor in tensors if tensor._is_initialized()}

    def _capture(self, fed: dict[str, Any], eager: Callable[[], Any]) -> None:
        kept = {name: core.DenseTensor() for name in fed}
        for name, tensor in fed.items():
            kept[name]._share_data_with(tensor)
        try:
            self.device.begin_capture()
            try:
                eager()
            except Exception as error:
                self._give_up(error)
            number = self.device.end_capture()
        except PlanError as error:
            raise PlanError(f"capture: on: {error}; write capture: off") from error
        self.graph = Graph(number, kept, self._addresses())

    def _give_up(self, error: Exception) -> None:
        try:
            self.device.end_capture(failed=True)
        except PlanError as refused:
            raise PlanError(f"{refused} ({str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__})") from error


def _install() -> None:
    """Hook into the executor, so that it calls `StepGraphs.issue` first; a second call does nothing."""
    kind = executor_module._StandaloneExecutor
    if getattr(kind, "_interlace_installed", False):
        return
    own = kind.run

    def run(executor: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if _running:
            graphs = _running[-1]
            return graphs.issue(lambda *a, **k: own(executor, *a, **k), *args, **kwargs)
        for each in _launched[:]:  # its streams are not ordered after the launch, and its values may take the graph's memory
            each.end("another program ran")
        found: list[Any] = own(executor, *args, **kwargs)
        return found

    kind.run, kind._interlace_installed = run, True
