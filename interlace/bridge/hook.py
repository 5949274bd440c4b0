"""The hooks in Paddle's auto-parallel engine. Installed once; engines whose strategy did not ask for Interlace run as before."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static import engine as engine_module
from paddle.distributed.auto_parallel.static.pir_pass import eliminate_transpose_by_reshape

from interlace.bridge import mesh
from interlace.bridge.agree import peers_of, peers_of_run, require_agreement
from interlace.bridge.capture import Captured, capture
from interlace.bridge.feeds import matching_feed
from interlace.bridge.first_contact import changes_text, features_off, is_examined, without
from interlace.bridge.flags import Flags, final_config
from interlace.bridge.graphs import StepGraphs
from interlace.bridge.host_state import settle, state_dict_of
from interlace.bridge.layers import LayerNames
from interlace.bridge.lower import Lowered, lower
from interlace.bridge.nvml import find_gpu
from interlace.bridge.profiles import costs_for, known_name, require_own_gpu
from interlace.bridge.targets import Device, choose_device
from interlace.bridge.tokens import tokens_of
from interlace.bridge.tuning import Tuning, is_tuned
from interlace.config import Config, make_config
from interlace.cost_model import load_profile
from interlace.errors import ConfigError, InterlaceError, PlanError
from interlace.ir import Pipeline, Program
from interlace.ir.target import Target, as_graph
from interlace.notice import say, say_once
from interlace.outside import Outside, asked_outside
from interlace.passes.insert_events import fetching
from interlace.planning.baseline import BASELINE_ORDER
from interlace.planning.loaded import load_plan
from interlace.planning.peers import gather
from interlace.planning.plan import Plan, make_plan
from interlace.planning.world import LinkError
from interlace.report.measured import Measured
from interlace.report.plan import PlanReport
from interlace.scheduler.hazards import RankComm, graph_memory, kept_from_graph, refuse, require_safe, require_straight
from interlace.units import size

DISABLE_VARIABLE = "INTERLACE_DISABLE"
SEND_RECV_STREAM = {"1F1B": ("send_recv_stream", "send_recv_stream")}
"""Paddle's own stream names of sends and receives by schedule; others use `send_stream_<ring>` and `recv_stream`."""


@dataclass(slots=True)
class Mode:
    """What an engine runs in one mode: the plan with what it tells, the captured program, and the lowered plan; `to_compare` is the
    communication that the proof with the other ranks needs, until the first step. With `is_paddles` it runs Paddle's baseline, which is
    `lowered` then. `graphs` launches its steps, where they are captured."""

    report: PlanReport
    captured: Captured | None
    lowered: Any
    user_values: Any
    fetches: tuple[int, ...] = ()
    to_compare: RankComm | None = None
    is_paddles: bool = False
    graphs: StepGraphs | None = None


@dataclass(slots=True)
class State:
    """Interlace's part of one engine."""

    config: Config
    modes: dict[str, Mode] = field(default_factory=dict)
    tunings: dict[str, Tuning] = field(default_factory=dict)


LEAST_GAIN = 0.02
"""Of the step, so that it is captured where that is open: what a launch costs, and steps that no longer overlap, are not simulated."""
_building: list[tuple[Any, str, State]] = []
_last_planned: list[State] = []
"""The engine that came last to a plan of training, as Interlace knows it."""
_capture_only: list[Callable[[Program], None]] = []


def capture_only(take: Callable[[Program], None]) -> None:
    """Pass every captured training program of this process to `take`, also of engines that did not ask for Interlace."""
    _capture_only.append(take)


def enable(strategy: Any, flags: Flags) -> None:
    """See `interlace.enable`."""
    if not isinstance(strategy, (paddle.distributed.Strategy, paddle.distributed.fleet.auto.Strategy)):
        raise ConfigError(
            f"interlace.enable: expected a paddle.distributed.Strategy, found {_what(strategy)}; give the strategy that dist.to_static gets"
        )
    flags.final(strategy, say=False)
    install()
    if os.environ.get(DISABLE_VARIABLE) != "1":
        mesh.install()
    strategy.interlace = flags
    strategy.pipeline.interlace = flags


def _what(given: Any) -> str:
    return f"the class {given.__qualname__}" if isinstance(given, type) else f"{type(given).__module__}.{type(given).__qualname__}"


def plan_of(model: Any, mode: str = "train") -> PlanReport:
    """See `interlace.plan_of`."""
    engine = getattr(model, "_engine", model)
    state = getattr(engine, "_interlace", None)
    if state is None:
        return PlanReport(Plan.off(_why_off(model, engine)))
    if mode not in state.modes:
        raise PlanError(f"the model has no {mode} plan; built so far: {sorted(state.modes)}; call model.{mode}() first")
    return _shown(state, mode)


def _shown(state: State, mode: str) -> PlanReport:
    """The plan of a mode that reports show."""
    found: PlanReport = state.tunings[mode].shown if mode in state.tunings else state.modes[mode].report
    return found


def _why_off(model: Any, engine: Any) -> str:
    """Why an engine has no plan although its user asked for Interlace: it was turned off. Raises PlanError for other reasons."""
    strategy = getattr(engine, "_strategy", None)
    if strategy is None:
        raise PlanError(f"interlace.plan_of: expected a model that paddle.distributed.to_static gave, found {type(model).__name__}")
    flags = getattr(strategy.pipeline, "interlace", None)
    outside = asked_outside()
    if flags is None and outside is None:
        raise PlanError("this model never asked for Interlace; call interlace.enable(strategy) before dist.to_static")
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return f"{DISABLE_VARIABLE}=1"
    flags, outside = _joined(flags, outside)
    if (off := getattr(engine, "_interlace_off", "")) and not hasattr(engine, "_interlace"):
        return str(off)
    config = make_config(*outside[:3]) if outside else flags.config() if flags is not None else None
    if config is None or not config.active:
        return f"{outside.source}: nothing is on" if outside else "enable: false, or every pass is off"
    raise PlanError("the model is not built yet: call model.train() first")


def install() -> None:
    """Install the hooks in Paddle's engine; a second call does nothing."""
    engine = engine_module.Engine
    if getattr(engine, "_interlace_installed", False):
        return
    baseline_pipeline, baseline_parallel, baseline_run = engine_module.pipeline_pass, engine._parallel_pir, engine.run

    def pipeline_pass(mains: Any, startups: Any, strategy: Any) -> Any:
        if not _building:
            return baseline_pipeline(mains, startups, strategy)
        return _plan_pipeline(mains[0], strategy, baseline_pipeline)

    def parallel_pir(self: Any, mode: str) -> None:
        state = _state(self)
        if state is None:
            baseline_parallel(self, mode)
            return
        with _build(self, mode, state):
            baseline_parallel(self, mode)
            if mode not in state.modes and (mode == "train" or self._strategy.gradient_merge.enable):
                _plan_without_pipeline(self, mode, state)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self, "_interlace", None)
        if state is None:
            return baseline_run(self, *args, **kwargs)
        if kwargs.get("mode") is not None:
            self.to_mode(kwargs["mode"])

        def step() -> Any:
            with _ready(self, state), _fed(self, state, args, kwargs), _timed(self, state), _launched(self, state):
                return baseline_run(self, *args, **kwargs)

        tuning = state.tunings.get(self._mode)
        return step() if tuning is None else tuning.run(step)

    engine_module.pipeline_pass = pipeline_pass
    engine._parallel_pir, engine.run, engine._interlace_installed = parallel_pir, run, True
    paddle.pir.Program.state_dict = state_dict_of(paddle.pir.Program.state_dict)


def _state(engine: Any) -> State | None:
    """Interlace's state of the engine; None if the engine is left to Paddle."""
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return None
    known = getattr(engine, "_interlace", None)
    if known is None and _capture_only:
        engine._interlace = known = State(Config())
    if known is None:
        flags, outside = _joined(getattr(engine._strategy.pipeline, "interlace", None), asked_outside())
        config = _override(outside, engine._strategy, flags) if outside else flags and flags.final(engine._strategy)
        if config is not None and config.active:
            config = _fitting(config, outside or flags, engine)
        if config is None or not config.active:
            return None
        config = _with_capture(config)
        _require_pipeline(config, engine._strategy)
        engine._interlace = known = State(config)
    return known


def _fitting(config: Config, asked: Outside | Flags, engine: Any) -> Config:
    """The configuration without what this machine does not bear."""
    device = choose_device()
    if not is_examined(config, device):
        return config
    features = features_off(device, peers_of_run())
    if not features:
        return config
    options, source, marks = asked.asked() if isinstance(asked, Flags) else asked[:3]
    left, names, why = without(options, features), ", ".join(each.name for each in features), ""
    engine._interlace_off = f"{source}: rules of this machine do not hold ({names})"
    try:
        found = final_config(left, source, marks, engine._strategy, say=False)
    except ConfigError as error:
        left, why = {"enable": False}, f"; without them this configuration cannot run: {error}"
        found = make_config(left, source)
    if paddle.distributed.ParallelEnv().rank == 0:
        say_once(f"rules that do not hold: what rests on them is {names}; in force: {changes_text(options, left)}{why}")
    return found


def _joined(flags: Any, outside: Outside | None) -> tuple[Any, Outside | None]:
    """What the script asked for and what `interlace run` gave in its place; what goes on top of the script's own is among the former."""
    if flags is None or outside is None or outside.is_whole:
        return flags, outside
    return flags.with_more(outside.options, outside.source, outside.marks), None


def _override(outside: Outside, strategy: Any, flags: Any) -> Config:
    """The configuration that `interlace run` gave, instead of what the script asked for."""
    if flags is not None and paddle.distributed.ParallelEnv().rank == 0:
        say(f"{outside.words} decides; the script's own interlace.enable() is ignored")
    return final_config(outside.options, outside.source, outside.marks, strategy)


def _with_capture(config: Config) -> Config:
    """Where the device cannot capture a step: refuse `capture: on`, and issue steps where it is open."""
    why = choose_device().cannot_capture
    if config.capture == "on" and why:
        raise ConfigError(f"{config.source}: capture: on, and {why}; write capture: off")
    if config.capture == "auto" and why:
        if paddle.distributed.ParallelEnv().rank == 0:
            say_once(f"capture: auto: steps are issued one operation at a time, as {why}")
        return config.issued()
    return config


def _require_pipeline(config: Config, strategy: Any) -> None:
    """Refuse forms of the schedule that need a pipeline or an accumulation of micro-batches."""
    asked = getattr(config.passes.get("schedule-1f1b"), "interleave", "off")
    form = "mixed" if "mixed" in asked else asked  # of all stages, or of one in a list
    if form in ("mixed", "zb-h1") and not (strategy.pipeline.enable or strategy.gradient_merge.enable):
        raise ConfigError(
            f"{config.source}: schedule_1f1b.interleave: {form} without a pipeline; "
            "set strategy.pipeline.enable (or gradient_merge), or interleave: dx-first"
        )


@contextmanager
def _build(engine: Any, mode: str, state: State) -> Iterator[None]:
    _building.append((engine, mode, state))
    try:
        yield
    finally:
        _building.pop()


def _plan_pipeline(dense: Any, strategy: Any, baseline_pipeline: Callable[..., Any]) -> Any:
    """Plan and lower a program; runs in place of Paddle's pipeline pass."""
    from paddle.distributed.auto_parallel.static.pir_pass import get_pp_stage_by_pp_degree

    engine, mode, state = _building[-1]
    pipeline = Pipeline(
        stage=get_pp_stage_by_pp_degree(strategy.pp_degree),
        num_stages=strategy.pp_degree,
        num_micro_batches=strategy.accumulate_steps,
        num_chunks=strategy.vpp_degree if strategy.schedule_mode == "VPP" else 1,
        schedule=strategy.schedule_mode,
    )
    given = state.config.plan or getattr(state.config.passes.get("schedule-1f1b"), "schedule_file", "")
    if state.config.check and not given:
        require_straight(pipeline)

    def paddles(program: Any) -> Any:
        return baseline_pipeline([program], [program], strategy)

    return _plan_mode(engine, mode, state, _Making(engine, mode, state, dense, pipeline, paddles))


def _plan_without_pipeline(engine: Any, mode: str, state: State) -> None:
    strategy = engine._strategy.gradient_merge
    steps = strategy.k_steps if strategy.enable else 1
    pipeline = Pipeline(num_micro_batches=steps, schedule="accumulate" if steps > 1 else "none")
    # with accumulation Paddle builds evaluation for a micro-batch too, so it needs a plan as training does
    own = engine._job_plan if strategy.enable and mode == "train" else None
    making = _Making(engine, mode, state, engine._pir_dense_main_progs[mode], pipeline, lambda program: own)
    lowered = _plan_mode(engine, mode, state, making)
    if isinstance(lowered, Lowered):
        _run_fused_passes(engine, lowered)
    engine._job_plan = lowered


def _run_fused_passes(engine: Any, own: Any) -> None:
    """Run the fused passes of the strategy on the jobs of a plan, as Paddle does on those that it builds an engine with."""
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


@dataclass(slots=True)
class _Making:
    """How the plans of one mode are made.

    Attributes:
        dense: The program that Paddle built.
        pipeline: The step that it belongs to.
        baseline: Gives Paddle's baseline of such a program; None where Paddle runs it without one.
    """

    engine: Any
    mode: str
    state: State
    dense: Any
    pipeline: Pipeline
    baseline: Callable[[Any], Any]
    captured: Captured | None = None
    mapping: Any = None
    unchanged: Any = None

    def capture(self) -> Captured:
        """See `tuning.Making`."""
        self.mapping = paddle.base.libpaddle.pir.IrMapping()
        private = self.dense.clone(self.mapping)
        self.unchanged = self.dense.clone()
        _name_p2p_streams(private, self.pipeline.schedule)
        self.captured = capture(private, self.pipeline, mode=self.mode, layers=LayerNames.of(self.engine._model))
        for take in _capture_only if self.mode == "train" else ():
            take(self.captured.program)
        return self.captured

    def build(self, config: Config, is_first: bool = True) -> Mode:
        """See `tuning.Making`."""
        assert self.captured is not None
        device = choose_device()
        plan, comm = self._planned(config, device)
        target = as_graph(device.target) if plan.is_launched else device.target
        if config.dump and is_first:  # of several plans the one that is taken follows (`Tuning`)
            plan.dump(Path(config.dump) if self.mode == "train" else Path(config.dump) / self.mode)
        comm = comm or _proof(plan, config, target)
        refuse(kept_from_graph(plan.program, target), "the step cannot be captured")  # of which the device would notice a part only
        if plan.is_launched and (why := _over(plan, plan.asked_budget)):
            raise PlanError(f"{config.source}: {why}; raise the budget, or write capture: off")
        device.prepare()
        lowered = lower(self.captured, plan.program, device, is_graph=plan.is_launched)
        if not is_first:
            _run_fused_passes(self.engine, lowered)
        report = PlanReport(plan, Measured(known_name(device), load_profile(plan.profile).device))
        if self.mode == "train" and is_first:
            say_once(report.sentence())
        graphs = StepGraphs.of(lowered, plan.program, device, report.measured) if plan.is_launched else None
        return Mode(report, self.captured, lowered, self.mapping, to_compare=comm, graphs=graphs)

    def _planned(self, config: Config, device: Device) -> tuple[Plan, RankComm | None]:
        """The plan, of steps that are captured where that is asked, or where they are simulated as shorter than issued ones, and what its
        proof gave where that was asked for to decide so."""
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
        """See `tuning.Making`."""
        own = self.baseline(self.dense if is_first else self.unchanged)
        if not is_first:
            if self.engine._strategy.pipeline.enable:
                _run_fused_passes(self.engine, own)
            _prepare(choose_device(), own, self.dense, self.mode)
        return Mode(report, None, own, None, is_paddles=True)


def _proof(plan: Plan, config: Config, target: Target) -> RankComm | None:
    """What the proof of a plan gives to compare with other ranks; None where it is left out."""
    return require_safe([plan.program], target)[0] if config.check else None


def _plan_to_capture(program: Program, config: Config, device: Device, issued: Plan) -> tuple[Plan | None, RankComm | None, str]:
    """The plan of a step that is captured, beside that of one that is issued; what its proof gave; and why it cannot be taken, empty where
    it can."""
    target = as_graph(device.target)
    try:
        plan = _plan(program, config.launched(), device)
        if kept := kept_from_graph(plan.program, target):
            return None, None, str(kept[0])
        comm = _proof(plan, config, target)
    except LinkError:
        raise
    except InterlaceError as error:  # raised alike on all ranks, or gathered
        return None, None, str(error)
    limit_bytes = issued.outcome.memory.limit_bytes if issued.outcome and issued.outcome.memory else issued.asked_budget
    return plan, comm, _over(plan, limit_bytes)


def _over(plan: Plan, limit_bytes: int) -> str:
    """That a captured step holds more than its limit: its memory is given back by order only, which the search does not know."""
    if not limit_bytes or (held := graph_memory(plan.program).peak()) <= limit_bytes:
        return ""
    return (
        f"the limit of memory is {size(limit_bytes)} a rank, and rank {plan.program.rank} holds {size(held)} inside a captured step, "
        "where memory is given back in the order of streams only"
    )


def _prepare(device: Device, own: Any, dense: Any, mode: str) -> None:
    """Rewrite the programs of Paddle's baseline as the device needs it; where one is an engine's first plan, others do that."""
    if own is None:
        device.finish(dense, mode)
        return
    for job in own.job_types():
        device.finish(own.ir_program(job), job)


def _plan_mode(engine: Any, mode: str, state: State, making: _Making) -> Any:
    """Plan and lower a program, or leave it to Paddle's baseline, which is given then."""
    device = choose_device()
    if mode == "train":
        _last_planned[:] = [state]
    if not is_tuned(state.config, device):
        making.capture()
        state.modes[mode] = made = making.build(state.config)
        return made.lowered

    def use(found: Mode) -> None:
        state.modes[mode] = found

    state.tunings[mode] = tuning = Tuning(engine, mode, state.config, device, peers_of_run(), making, use)
    return tuning.begin()


def _plan(program: Program, config: Config, device: Device) -> Plan:
    """The plan of a captured program: loaded where plans are given, else made here and now.

    Evaluation, of which the folder holds no plans unless a run dumped them there, keeps Paddle's baseline order then.
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
    return make_plan(program, config, *costs_for(config, device), peers)


def _name_p2p_streams(program: Any, schedule: str) -> None:
    """Set the attributes that Paddle's pipeline passes set on sends and receives."""
    for op in program.global_block().ops:
        if op.name() in ("pd_op.send_v2", "pd_op.recv_v2"):
            send, receive = SEND_RECV_STREAM.get(schedule, (f"send_stream_{op.attrs()['ring_id']}", "recv_stream"))
            op.set_bool_attr("dynamic_shape", False)
            op.set_bool_attr("use_calc_stream", True)
            op.set_execution_stream(send if op.name() == "pd_op.send_v2" else receive)
            op.set_scheduling_priority(0)


@contextmanager
def _ready(engine: Any, state: State) -> Iterator[None]:
    """Set the plan of the engine's mode, and its fetches as values of the collecting program, while a step runs."""
    mode = state.modes.get(engine._mode)
    asked = engine._pir_fetch_values
    engine._job_plan = mode.lowered if mode else None
    try:
        if mode is not None and mode.is_paddles:
            if asked and mode.lowered is not None:
                raise PlanError("values are fetched, which Paddle's baseline cannot give with several micro-batches; set tune: off")
        elif mode is not None:
            if mode.to_compare is not None:
                target = choose_device().target
                require_agreement(mode.report.plan, mode.to_compare, as_graph(target) if mode.graphs is not None else target)
                mode.to_compare = None
            engine._pir_fetch_values = _translate(engine, mode, asked, state.config.check)
            engine._job_plan = mode.lowered
        engine._executor._set_plan(engine._job_plan)
        if engine._mode == "train":
            settle(mode.lowered.on_host if mode is not None and isinstance(mode.lowered, Lowered) else (), choose_device())
        yield
    finally:
        engine._pir_fetch_values = asked


def _fed(engine: Any, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Check that the fed batch fits the plan."""
    mode = state.modes.get(engine._mode)
    given = [*args[:2], kwargs.get("data"), kwargs.get("feed")]
    feeds = [each for item in given for each in (item if isinstance(item, (list, tuple)) else [item])]
    return matching_feed(mode.lowered, feeds) if mode is not None and not mode.is_paddles else nullcontext()


@contextmanager
def _timed(engine: Any, state: State) -> Iterator[None]:
    """Measure the step, if it is one of the first of training; after the last of them the log says what a step took."""
    mode = state.modes.get(engine._mode)
    if mode is None or mode.is_paddles or engine._mode != "train" or not mode.report.measured.is_open:
        yield
        return
    measured = mode.report.measured
    _read_energy(measured)
    start_ns = time.perf_counter_ns()
    yield
    choose_device().synchronize()
    measured.took_ns.append(time.perf_counter_ns() - start_ns)
    if not measured.is_open:
        _read_energy(measured)
        _add_up(engine, mode.report)
        say_once(mode.report.measured_line())


def _launched(engine: Any, state: State) -> AbstractContextManager[None]:
    """Run the step as a graph, if it is to be one."""
    mode = state.modes.get(engine._mode)
    return nullcontext() if mode is None or mode.graphs is None else mode.graphs.around(engine)


def _read_energy(measured: Measured) -> None:
    """Where the driver of the device in use counts energy, and the steps that count are about to begin or have ended."""
    if not measured.reads_energy:
        return
    index = choose_device().gpu_index()
    gpu = find_gpu(index)[0] if index is not None else None
    if gpu is not None:
        measured.energy_mj.append(gpu.millijoules())


def _add_up(engine: Any, report: PlanReport) -> None:
    """Energy and tokens of all ranks, which they tell each other once, where devices are GPUs."""
    if choose_device().gpu_index() is None:
        return
    measured, count = report.measured, report.plan.program.pipeline.num_micro_batches
    mine = (measured.joules or 0.0, tokens_of(engine._pir_dist_main_progs["train"], count))
    joules, tokens = zip(*gather(peers_of_run(), "energy of steps", mine), strict=True)
    measured.run_joules, measured.tokens = sum(joules) if all(joules) else 0.0, max(tokens)


def _translate(engine: Any, mode: Mode, asked: list[Any], check: bool) -> list[Any]:
    ids = tuple(_value_id(mode, value) for value in asked)
    if ids and mode.graphs is not None:
        raise PlanError(
            f"steps are captured, and {len(ids)} value(s) are fetched besides the losses: their copies to the host would be inside the "
            "captured step, where the host cannot wait; fetch losses only, or write capture: off"
        )
    if ids != mode.fetches and mode.captured is not None:
        device, program = choose_device(), fetching(mode.report.plan.program, ids)
        if check:
            require_safe([program], device.target)
        measured = mode.report.measured
        has_lead = mode.lowered.is_read_early or measured.late_fetches > 0  # without fetches
        mode.lowered = lower(mode.captured, program, device)
        mode.fetches = ids
        measured.late_fetches = len(ids) if has_lead and not mode.lowered.is_read_early else 0
        if measured.late_fetches:
            say_once(measured.late_line())
    return [mode.lowered.fetched[value] for value in ids]


def _value_id(mode: Mode, value: Any) -> int:
    if mode.captured is not None and mode.user_values.has(value):
        found = mode.captured.value_ids.get(mode.user_values.look_up(value).id)
        if found is not None:
            return found
    raise PlanError(
        f"fetch of {value}: it is no value of the rank's dense program; fetch one of "
        "model._engine._pir_dense_main_progs[mode].global_block()"
    )


def last_plan_summary() -> dict[str, Any] | None:
    """Machine-readable summary of the training plan of the engine that was planned last in this process: after a trial of the plan that was
    taken; None before one is made."""
    if not _last_planned or "train" not in _last_planned[-1].modes:
        return None
    report = _shown(_last_planned[-1], "train")
    return {**report.summary(), "is_paddles_order": bool(report.plan.why_off) or report.plan.is_paddles_order()}
