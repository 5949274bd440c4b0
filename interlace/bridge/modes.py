"""What an engine runs in one mode, and how that is made: captured, planned, proved and lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static.pir_pass import eliminate_transpose_by_reshape

from interlace.bridge.agree import peers_of
from interlace.bridge.capture import Captured, capture
from interlace.bridge.graphs import StepGraphs
from interlace.bridge.layers import LayerNames
from interlace.bridge.lower import lower
from interlace.bridge.profiles import costs_for, known_name, memory_for_plans, require_own_gpu
from interlace.bridge.targets import Device, choose_device
from interlace.config import Config, make_config
from interlace.cost_model import load_profile
from interlace.errors import InterlaceError, PlanError
from interlace.ir import Pipeline, Program
from interlace.ir.target import Target, as_graph
from interlace.notice import say_once
from interlace.passes.insert_events import fetching
from interlace.planning.baseline import BASELINE_ORDER
from interlace.planning.loaded import load_plan
from interlace.planning.peers import gather
from interlace.planning.plan import Plan, make_plan
from interlace.planning.world import LinkError
from interlace.report.measured import Measured
from interlace.report.plan import PlanReport
from interlace.scheduler.hazards import RankComm, graph_memory, kept_from_graph, refuse, require_safe
from interlace.units import size

SEND_RECV_STREAM = {"1F1B": ("send_recv_stream", "send_recv_stream")}
"""Paddle's own stream names of sends and receives by schedule; others use `send_stream_<ring>` and `recv_stream`."""
LEAST_GAIN = 0.02
"""With `capture: auto`, steps are captured if that shortens the simulated step by at least this share: the cost of a launch, and the lost
overlap between steps, are not simulated."""


@dataclass(slots=True)
class Mode:
    """What an engine runs in one mode.

    Attributes:
        lowered: The lowered plan; with `is_paddles` Paddle's own plan, or None if Paddle runs without one.
        user_values: Maps values of the program that the user sees to captured ones.
        fetches: Ids of the values that the user fetches besides outputs.
        to_compare: This rank's communication, for the proof with the other ranks; until the first step.
        graphs: Launches the steps, if they are captured.
    """

    report: PlanReport
    captured: Captured | None
    lowered: Any
    user_values: Any
    fetches: tuple[int, ...] = ()
    to_compare: RankComm | None = None
    is_paddles: bool = False
    graphs: StepGraphs | None = None

    def fetched(self, asked: Sequence[Any], check: bool) -> list[Any]:
        """The values of the collecting program for those that the user fetches. If these have changed, the plan is lowered again. Raises
        PlanError for a value that cannot be fetched."""
        ids = tuple(self._value_id(value) for value in asked)
        if ids and self.graphs is not None:
            raise PlanError(
                f"steps are captured, and {len(ids)} value(s) are fetched besides the losses: their copies to the host would be inside the "
                "captured step, where the host cannot wait; fetch losses only, or write capture: off"
            )
        if ids != self.fetches and self.captured is not None:
            device, program = choose_device(), fetching(self.report.plan.program, ids)
            if check:
                require_safe([program], device.target)
            measured = self.report.measured
            has_lead = self.lowered.is_read_early or measured.late_fetches > 0  # without extra fetches
            self.lowered = lower(self.captured, program, device)
            self.fetches = ids
            measured.late_fetches = len(ids) if has_lead and not self.lowered.is_read_early else 0
            if measured.late_fetches:
                say_once(measured.late_line())
        return [self.lowered.fetched[value] for value in ids]

    def _value_id(self, value: Any) -> int:
        if self.captured is not None and self.user_values.has(value):
            found = self.captured.value_ids.get(self.user_values.look_up(value).id)
            if found is not None:
                return found
        raise PlanError(
            f"fetch of {value}: it is no value of the rank's dense program; fetch one of "
            "model._engine._pir_dense_main_progs[mode].global_block()"
        )


@dataclass(slots=True)
class ModeMaker:
    """Makes the plans of one mode of an engine.

    Attributes:
        mode: `train`, `eval` or `predict`.
        dense: The program that Paddle built.
        baseline: Gives Paddle's own plan of such a program; None if Paddle runs it without one.
        takers: Callbacks that get the captured program in training.
    """

    engine: Any
    mode: str
    dense: Any
    pipeline: Pipeline
    baseline: Callable[[Any], Any]
    takers: Sequence[Callable[[Program], None]] = ()
    captured: Captured | None = None
    mapping: Any = None
    unchanged: Any = None

    def capture(self) -> Captured:
        """Capture the program that Paddle built."""
        self.mapping = paddle.base.libpaddle.pir.IrMapping()
        private = self.dense.clone(self.mapping)
        self.unchanged = self.dense.clone()
        _name_p2p_streams(private, self.pipeline.schedule)
        self.captured = capture(private, self.pipeline, mode=self.mode, layers=LayerNames.of(self.engine._model))
        for take in self.takers if self.mode == "train" else ():
            take(self.captured.program)
        return self.captured

    def build(self, config: Config, is_first: bool = True) -> Mode:
        """Plan the program, prove the plan and lower it. `is_first`: it is the engine's first plan, whose programs Paddle's engine
        processes further before anything runs."""
        assert self.captured is not None
        device = choose_device()
        plan, comm = self._planned(config, device)
        target = as_graph(device.target) if plan.is_launched else device.target
        if config.dump and is_first:  # with several plans, `Tuning` writes the chosen one later
            plan.dump(Path(config.dump) if self.mode == "train" else Path(config.dump) / self.mode)
        comm = comm or _proof(plan, config, target)
        refuse(kept_from_graph(plan.program, target), "the step cannot be captured")  # the device itself would notice only some of these
        if plan.is_launched and (why := _over(plan, plan.asked_budget)):
            raise PlanError(f"{config.source}: {why}; raise the budget, or write capture: off")
        device.prepare()
        lowered = lower(self.captured, plan.program, device, is_graph=plan.is_launched)
        if not is_first:
            run_fused_passes(self.engine, lowered)
        report = PlanReport(plan, Measured(known_name(device), load_profile(plan.profile).device))
        if self.mode == "train" and is_first:
            say_once(report.sentence())
        graphs = StepGraphs.of(lowered, plan.program, device, report.measured) if plan.is_launched else None
        return Mode(report, self.captured, lowered, self.mapping, to_compare=comm, graphs=graphs)

    def _planned(self, config: Config, device: Device) -> tuple[Plan, RankComm | None]:
        """The plan, for captured steps if the user asks for them, or if `capture` is `auto` and their simulation is shorter than that of
        issued steps; and the communication from its proof, if the decision needed one."""
        assert self.captured is not None
        program = self.captured.program
        if self.mode != "train":
            return _plan(program, config.issued(), device), None
        if config.plan or config.capture != "auto":
            return _plan(program, config, device), None
        issued = _plan(program, config.issued(), device)
        launched, comm, mine = _plan_to_capture(program, config, device, issued)
        why = next(filter(None, gather(peers_of(program), "captured steps", mine)), "")
        if not why and launched is not None and issued.outcome and launched.outcome:
            launched_ms, issued_ms = launched.outcome.plan.step_ns / 1e6, issued.outcome.plan.step_ns / 1e6
            why = f"a launched step is simulated with {launched_ms:.1f} ms, an issued one with {issued_ms:.1f} ms"
            if launched_ms < (1 - LEAST_GAIN) * issued_ms:
                say_once(f"capture: auto: steps are captured: {why}")
                return launched, comm
        say_once(f"capture: auto: steps are issued: {why or 'not all stages can be simulated here'}")
        return issued, None

    def paddles(self, report: PlanReport, is_first: bool) -> Mode:
        """Paddle's own plan, with our report that says why; `is_first`: it is the engine's first plan of the mode."""
        own = self.baseline(self.dense if is_first else self.unchanged)
        if not is_first:  # Paddle's engine and our hooks do this for the first plan
            if self.engine._strategy.pipeline.enable:
                run_fused_passes(self.engine, own)
            programs = [(self.dense, self.mode)] if own is None else [(own.ir_program(job), job) for job in own.job_types()]
            for program, name in programs:
                choose_device().finish(program, name)
        return Mode(report, None, own, None, is_paddles=True)


def _proof(plan: Plan, config: Config, target: Target) -> RankComm | None:
    """Prove a plan; returns this rank's communication, to compare with other ranks, or None if `check` is off."""
    return require_safe([plan.program], target)[0] if config.check else None


def _plan_to_capture(program: Program, config: Config, device: Device, issued: Plan) -> tuple[Plan | None, RankComm | None, str]:
    """The plan for captured steps, as an alternative to `issued`; the communication from its proof; and why it cannot be taken, empty if it
    can."""
    target = as_graph(device.target)
    try:
        plan = _plan(program, config.launched(), device)
        if kept := kept_from_graph(plan.program, target):
            return None, None, str(kept[0])
        comm = _proof(plan, config, target)
    except LinkError:
        raise
    except InterlaceError as error:  # all ranks raise it, or get it from the caller's gather
        return None, None, str(error)
    limit_bytes = issued.outcome.memory.limit_bytes if issued.outcome and issued.outcome.memory else issued.asked_budget
    return plan, comm, _over(plan, limit_bytes)


def _over(plan: Plan, limit_bytes: int) -> str:
    """A text that a captured step exceeds its memory limit; empty if it does not. In a captured step blocks are reused only in the order of
    streams, which the search does not account for."""
    if not limit_bytes or (held := graph_memory(plan.program).peak()) <= limit_bytes:
        return ""
    return (
        f"the memory limit is {size(limit_bytes)} a rank, and rank {plan.program.rank} holds {size(held)} inside a captured step, "
        "where memory is given back in the order of streams only"
    )


def run_fused_passes(engine: Any, own: Any) -> None:
    """Run the strategy's fused passes on the jobs of a plan, as Paddle does for the plan with which it builds an engine."""
    names = engine._strategy.fused_passes.fused_passes_list
    if own is None or not names or not (engine._strategy.pipeline.enable or engine._strategy.gradient_merge.enable):
        return
    manager = paddle.base.libpaddle.pir.PassManager()
    for name in names:
        if name == "eliminate_transpose":
            for job in own.job_types():
                eliminate_transpose_by_reshape(own.ir_program(job))
        else:
            manager.add_pass(name, {})
    for job in own.job_types():
        manager.run(own.ir_program(job))


def _plan(program: Program, config: Config, device: Device) -> Plan:
    """The plan of a captured program: loaded if the configuration names a folder of plans, else made now.

    Evaluation and prediction keep Paddle's baseline order if the folder has no plans for them; it has some only if a run dumped them.
    """
    peers = peers_of(program)
    if config.plan:
        folder = Path(config.plan) if program.mode == "train" else Path(config.plan) / program.mode
        if program.mode == "train" or all(gather(peers, "plans to load", folder.is_dir())):
            plan = load_plan(folder, program, peers)
            require_own_gpu(load_profile(plan.profile), config, device, f"{folder} was planned with {plan.profile!r}")
            if plan.is_launched and device.cannot_capture:
                raise PlanError(
                    f"{folder}: steps of its plans are launched as a graph, and {device.cannot_capture}; plan with capture: off"
                )
            return replace(plan, is_launched=plan.is_launched or (program.mode == "train" and config.capture == "on"))
        config = make_config(BASELINE_ORDER)
    return make_plan(program, config, *costs_for(config, device, memory_bytes=memory_for_plans(device, peers)), peers)


def _name_p2p_streams(program: Any, schedule: str) -> None:
    """Set the attributes that Paddle's pipeline passes set on sends and receives."""
    for op in program.global_block().ops:
        if op.name() in ("pd_op.send_v2", "pd_op.recv_v2"):
            send, receive = SEND_RECV_STREAM.get(schedule, (f"send_stream_{op.attrs()['ring_id']}", "recv_stream"))
            op.set_bool_attr("dynamic_shape", False)
            op.set_bool_attr("use_calc_stream", True)
            op.set_execution_stream(send if op.name() == "pd_op.send_v2" else receive)
            op.set_scheduling_priority(0)
