"""The hooks in Paddle's auto-parallel engine. They are installed once; engines whose strategy does not use Interlace run as before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static import engine as engine_module

from interlace.bridge import mesh
from interlace.bridge.agree import peers_of_run, require_agreement
from interlace.bridge.feeds import matching_feed
from interlace.bridge.first_contact import changes_text, features_off, is_examined, without
from interlace.bridge.flags import Flags, final_config
from interlace.bridge.guard import attempt
from interlace.bridge.host_state import settle, state_dict_of
from interlace.bridge.lower import Lowered
from interlace.bridge.modes import Mode, ModeMaker, run_fused_passes
from interlace.bridge.nvml import find_gpu
from interlace.bridge.targets import choose_device
from interlace.bridge.tokens import tokens_of
from interlace.bridge.tuning import Tuning, is_tuned
from interlace.config import Config, make_config
from interlace.errors import ConfigError, PlanError
from interlace.ir import Pipeline, Program
from interlace.ir.target import as_graph
from interlace.notice import say, say_once
from interlace.outside import DISABLE_VARIABLE, Outside, asked_outside, is_disabled
from interlace.planning.peers import gather
from interlace.planning.plan import Plan
from interlace.report.measured import Measured
from interlace.report.plan import PlanReport
from interlace.scheduler.hazards import require_straight


@dataclass(slots=True)
class State:
    """Interlace's part of one engine."""

    config: Config
    modes: dict[str, Mode] = field(default_factory=dict)
    tunings: dict[str, Tuning] = field(default_factory=dict)


_building: list[tuple[Any, str, State]] = []
_last_planned: list[State] = []
"""The state of the engine that last got a training plan; empty or one entry."""
_timed_last: list[Measured] = []
"""The measurement to which the previous step belongs; empty or one entry."""
_capture_only: list[Callable[[Program], None]] = []


def capture_only(take: Callable[[Program], None]) -> None:
    """Pass every captured training program of this process to `take`, including those of engines that do not use Interlace."""
    _capture_only.append(take)


def enable(strategy: Any, flags: Flags) -> None:
    """See `interlace.enable`."""
    if not isinstance(strategy, (paddle.distributed.Strategy, paddle.distributed.fleet.auto.Strategy)):
        raise ConfigError(
            f"interlace.enable: expected a paddle.distributed.Strategy, found {_what(strategy)}; give the strategy that dist.to_static gets"
        )
    flags.final(strategy, say=False)
    install()
    if not is_disabled():
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
    """The plan report of a mode."""
    return state.tunings[mode].shown if mode in state.tunings else state.modes[mode].report


def _why_off(model: Any, engine: Any) -> str:
    """Why an engine that uses Interlace has no plan: it was turned off. Raises PlanError for other reasons."""
    strategy = getattr(engine, "_strategy", None)
    if strategy is None:
        raise PlanError(f"interlace.plan_of: expected a model that paddle.distributed.to_static gave, found {type(model).__name__}")
    flags = getattr(strategy.pipeline, "interlace", None)
    outside = asked_outside()
    if flags is None and outside is None:
        raise PlanError("this model never asked for Interlace; call interlace.enable(strategy) before dist.to_static")
    if is_disabled():
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
            mode = state.modes.get(self._mode)
            with _ready(self, mode, state.config), _fed(mode, args, kwargs), _timed(self, mode), _launched(self, mode):
                return baseline_run(self, *args, **kwargs)

        tuning = state.tunings.get(self._mode)
        return step() if tuning is None else tuning.run(step)

    engine_module.pipeline_pass = pipeline_pass
    engine._parallel_pir, engine.run, engine._interlace_installed = parallel_pir, run, True
    paddle.pir.Program.state_dict = state_dict_of(paddle.pir.Program.state_dict)


def _state(engine: Any) -> State | None:
    """Interlace's state of the engine; None if the engine is left to Paddle."""
    if is_disabled():
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
    """The configuration without features that depend on rules that do not hold on this machine."""
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
    """The script's flags, and the options from outside (such as `interlace run`) that replace them. Outside options that only add to the
    script's are merged into the flags."""
    if flags is None or outside is None or outside.is_whole:
        return flags, outside
    return flags.with_more(outside.options, outside.source, outside.marks), None


def _override(outside: Outside, strategy: Any, flags: Any) -> Config:
    """The configuration from outside (such as `interlace run`), instead of the script's own."""
    if flags is not None and paddle.distributed.ParallelEnv().rank == 0:
        say(f"{outside.words} decides; the script's own interlace.enable() is ignored")
    return final_config(outside.options, outside.source, outside.marks, strategy)


def _with_capture(config: Config) -> Config:
    """The configuration for a device that may not be able to capture steps: if it cannot, `capture: auto` issues steps, and `capture: on`
    raises ConfigError."""
    why = choose_device().cannot_capture
    if config.capture == "on" and why:
        raise ConfigError(f"{config.source}: capture: on, and {why}; write capture: off")
    if config.capture == "auto" and why:
        if paddle.distributed.ParallelEnv().rank == 0:
            say_once(f"capture: auto: steps are issued one operation at a time, as {why}")
        return config.issued()
    return config


def _require_pipeline(config: Config, strategy: Any) -> None:
    """Raise ConfigError for forms of the schedule that need a pipeline, or gradient accumulation, if there is neither."""
    asked = getattr(config.passes.get("schedule-1f1b"), "interleave", "off")
    form = "mixed" if "mixed" in asked else asked  # one form for all stages, or a list with one for each
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
    """Plan and lower a program; runs instead of Paddle's pipeline pass."""
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

    return _plan_mode(state, ModeMaker(engine, mode, dense, pipeline, paddles, _capture_only))


def _plan_without_pipeline(engine: Any, mode: str, state: State) -> None:
    strategy = engine._strategy.gradient_merge
    steps = strategy.k_steps if strategy.enable else 1
    pipeline = Pipeline(num_micro_batches=steps, schedule="accumulate" if steps > 1 else "none")
    # with accumulation Paddle builds evaluation for a micro-batch too, so it needs a plan as training does
    own = engine._job_plan if strategy.enable and mode == "train" else None
    maker = ModeMaker(engine, mode, engine._pir_dense_main_progs[mode], pipeline, lambda program: own, _capture_only)
    lowered = _plan_mode(state, maker)
    if isinstance(lowered, Lowered):
        run_fused_passes(engine, lowered)
    engine._job_plan = lowered


def _plan_mode(state: State, maker: ModeMaker) -> Any:
    """Plan and lower a program; returns the lowered plan, or Paddle's own if the program is left to it."""
    device, mode = choose_device(), maker.mode
    if mode == "train":
        _last_planned[:] = [state]
    if not is_tuned(state.config, device):
        maker.capture()
        state.modes[mode] = made = maker.build(state.config)
        return made.lowered

    def use(found: Mode) -> None:
        state.modes[mode] = found

    state.tunings[mode] = tuning = Tuning(maker, state.config, device, peers_of_run(), use)
    return tuning.begin()


@contextmanager
def _ready(engine: Any, mode: Mode | None, config: Config) -> Iterator[None]:
    """Context for a step with the plan of the engine's mode, and with the user's fetches replaced by values of the collecting program."""
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
            engine._pir_fetch_values = mode.fetched(asked, config.check)
            engine._job_plan = mode.lowered
        engine._executor._set_plan(engine._job_plan)
        if engine._mode == "train":
            settle(mode.lowered.on_host if mode is not None and isinstance(mode.lowered, Lowered) else (), choose_device())
        yield
    finally:
        engine._pir_fetch_values = asked


def _fed(mode: Mode | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Context for a step that checks that the fed batch fits the plan."""
    given = [*args[:2], kwargs.get("data"), kwargs.get("feed")]
    feeds = [each for item in given for each in (item if isinstance(item, (list, tuple)) else [item])]
    return matching_feed(mode.lowered, feeds) if mode is not None and not mode.is_paddles else nullcontext()


@contextmanager
def _timed(engine: Any, mode: Mode | None) -> Iterator[None]:
    """Context that measures a step if it is one of the first in training; after the last of these, the result is logged. The host waits for
    the device only before the first and after the last step that counts. Waiting after each step would end the host's lead, and lengthen
    the step by what the device does meanwhile.
    """
    if mode is None or mode.is_paddles or engine._mode != "train" or not mode.report.measured.is_open:
        _timed_last.clear()
        yield
        return
    measured = mode.report.measured
    if not _timed_last or _timed_last[0] is not measured:  # the previous step had another plan, or failed
        measured.returned_ns = 0
    _timed_last.clear()
    if measured.is_edge:
        choose_device().synchronize()
        _read_energy(measured)
    start_ns = time.perf_counter_ns()
    yield
    if measured.is_last:
        choose_device().synchronize()
    measured.returned(start_ns, time.perf_counter_ns())
    _timed_last[:] = [measured]
    if not measured.is_open:
        _read_energy(measured)
        _add_up(engine, mode.report)
        say_once(mode.report.measured_line())


def _launched(engine: Any, mode: Mode | None) -> AbstractContextManager[None]:
    """Context for a step that runs it as a graph, if the mode captures steps."""
    return nullcontext() if mode is None or mode.graphs is None else mode.graphs.around(engine)


def _read_energy(measured: Measured) -> None:
    """Record the device's energy counter, before the first and after the last step that counts, when the device is idle. A driver that
    refuses does not end training."""
    index = choose_device().gpu_index()
    gpu = find_gpu(index)[0] if index is not None else None
    if gpu is not None:
        attempt(lambda: measured.energy_mj.append(gpu.millijoules()))


def _add_up(engine: Any, report: PlanReport) -> None:
    """On GPUs, exchange energy and tokens between all ranks, and store the sum of the energy and the tokens of a step."""
    if choose_device().gpu_index() is None:
        return
    measured, count = report.measured, report.plan.program.pipeline.num_micro_batches
    mine = (measured.joules or 0.0, tokens_of(engine._pir_dist_main_progs["train"], count))
    joules, tokens = zip(*gather(peers_of_run(), "energy of steps", mine), strict=True)
    measured.run_joules, measured.tokens = sum(joules) if all(joules) else 0.0, max(tokens)


def last_plan_summary() -> dict[str, Any] | None:
    """Machine-readable summary of the training plan of the engine that was planned last in this process (after a trial, of the chosen
    plan); None if there is no plan yet."""
    if not _last_planned or "train" not in _last_planned[-1].modes:
        return None
    report = _shown(_last_planned[-1], "train")
    return {**report.summary(), "is_paddles_order": bool(report.plan.why_off) or report.plan.is_paddles_order()}
