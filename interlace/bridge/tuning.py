"""The plans of one mode of an engine: those of a trial in training, else one; and Paddle's baseline if one of ours fails."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import paddle

from interlace.bridge.agree import require_agreement
from interlace.bridge.capture import Captured
from interlace.bridge.guard import Fault, Lasting, NotBuiltError, OneBuild, Verdict, agreed, attempt, fault_of, report_fault
from interlace.bridge.modes import Mode, ModeMaker
from interlace.bridge.profiles import known_name, memory_for_plans
from interlace.bridge.targets import Device
from interlace.config import BUDGET, Config, parse_budget
from interlace.errors import PlanError
from interlace.files import cache_folder
from interlace.notice import say, say_once
from interlace.passes import REGISTRY, Schedule1F1B
from interlace.passes.base import option_name
from interlace.planning.choice import Kept, Store, TrialOutcome, key_of
from interlace.planning.limits import ROOM
from interlace.planning.peers import Peers, gather
from interlace.planning.plan import Plan, options_text
from interlace.planning.room import is_room_for, more_bytes, roomier
from interlace.planning.trial import PADDLES, Contender, Trial, Watch, options_of, told_of
from interlace.planning.variants import is_open
from interlace.planning.worker import digest_of
from interlace.report.measured import trial_lines
from interlace.report.plan import PlanReport
from interlace.units import ms, size
from interlace.version import VERSION

VARIABLE = "INTERLACE_TUNE"
"""Environment variable that sets what the option's default, `auto`, means: `on` or `off`."""
CONFIGURED = "Interlace's plan"
TWIN = "the same plan as"
"""Text for the reason why a plan is not tried that equals another one."""


def is_tuned(config: Config, device: Device) -> bool:
    """Whether plans are measured, with a fallback to Paddle's baseline on failure."""
    asked = os.environ.get(VARIABLE, "") if config.tune == "auto" else config.tune
    return config.capture == "off" and (asked == "on" or (asked != "off" and device.tunes))


def proposed(config: Config, plan: Plan) -> list[Contender]:
    """Alternatives to the first plan: a form by name, and a plan with more memory; none if the user chose the form."""
    asked = cast("Schedule1F1B | None", config.passes.get(Schedule1F1B.name))
    if config.plan or asked is None or not is_open(asked):
        return []
    name, pipe = option_name(Schedule1F1B.name), plan.program.pipeline
    found: list[dict[str, dict[str, Any] | str]] = [{name: {"interleave": "mixed" if pipe.num_micro_batches > 1 else "dx-first"}}]
    if (budget := roomier(config, plan.outcome)) is not None:
        found.append({BUDGET: str(budget)})
    return [Contender(f"the plan with {options_of(each)}", each) for each in found]


def changed(config: Config, options: dict[str, dict[str, Any] | str]) -> Config:
    """The configuration with the options of a contender added."""
    passes, budget = dict(config.passes), config.memory_budget
    for key, given in options.items():
        name = key.replace("_", "-")
        if isinstance(given, str):
            budget = parse_budget(given)
        else:
            passes[name] = msgspec.structs.replace(passes.get(name) or REGISTRY[name](), **given)
    return msgspec.structs.replace(config, passes=passes, memory_budget=budget)


@dataclass(slots=True)
class Entrant:
    """A plan that can run.

    Attributes:
        executors: Paddle's executors, for this plan only.
        has_run: Whether its first step succeeded.
    """

    contender: Contender
    mode: Mode
    executors: OneBuild
    has_run: bool = False


class Tuning:
    """The plans of one mode of an engine.

    Args:
        config: The user's configuration.
        peers: The ranks of the run, which do the same at the same time.
        use: Callback that gets what the engine must run next.
    """

    def __init__(self, maker: ModeMaker, config: Config, device: Device, peers: Peers | None, use: Callable[[Mode], None]) -> None:
        self.maker, self.config, self.device, self.peers, self.use = maker, config, device, peers, use
        self.engine, self.mode = maker.engine, maker.mode
        self.env = paddle.distributed.ParallelEnv()
        self.folder = Path(config.dump or config.plan or cache_folder())
        self.store: Store | None = None
        self.known, self.reserved_bytes, self.memory_bytes = "", 0, 0
        self.trial = Trial([PADDLES])
        self.captured: Captured | None = None
        self.entrants: dict[str, Entrant] = {}
        self.digests: dict[str, str] = {}
        self.watch = Watch()
        self.is_again, self.failed = False, set[str]()
        self.shown = PlanReport(Plan.off("no plan was made"))
        """The plan that reports show: the first one, until another is chosen."""

    # ------------------------------------------------------------------------------------------------------------- building

    def begin(self) -> Any:
        """Make the first plan; returns what the engine runs first."""
        captured, failure = attempt(self.maker.capture)
        verdict = agreed(self.peers, "program captured", fault_of(failure) if failure else Fault())
        if verdict is None:
            self.captured = captured
            self.trial = Trial(self._contenders())
        else:
            self._require_ours(verdict, failure)
            self.shown = PlanReport(Plan.off(f"the program could not be captured: {verdict.text(self.env.world_size)}"))
            self._say_fault(CONFIGURED, "capturing the program", failure, verdict)
        while (entrant := self._entrant(is_first=True)) is None:
            pass
        self.use(entrant.mode)
        return entrant.mode.lowered

    def _contenders(self) -> list[Contender]:
        """The plans to try at first; only one if nothing is to be measured. More may be proposed once the first is made."""
        configured = Contender(CONFIGURED, {})
        if self.mode != "train":
            return [configured]
        assert self.captured is not None
        program = self.captured.program
        passes = (*self.config.pipeline().passes, *self.config.means.values())
        budgets = str(self.config.memory_budget), str(self.config.pool_budget)
        options = options_text(self.config.device, passes), *budgets, self.config.plan
        digests = gather(self.peers, "programs", [digest_of(program), known_name(self.device), self.device.target.name])
        key = key_of([*(text for each in digests for text in each), *options, VERSION, paddle.__version__])
        self.store = Store(self.folder, key) if self.env.rank == 0 else None
        kept = gather(self.peers, "choices of earlier runs", self.store.read() if self.store else Kept())[0]
        self.memory_bytes = memory_for_plans(self.device, self.peers)
        self.failed |= set(kept.ended)
        for name in kept.ended:
            say_once(
                f"an earlier run ended in the first step of {name}, without a word: it is not tried again; delete "
                f"{self.folder / f'tuned-{key}.first-step.json'} to try it"
            )
        choice = kept.choice
        if choice is not None and not choice.holds_in(self.memory_bytes):
            say_once(
                f"plans are measured again: there are {size(self.memory_bytes)} of device memory for them, and there were "
                f"{size(choice.memory_bytes)} in the run that measured them ({kept.path})"
            )
            choice = None
        if choice is not None and choice.taken.name not in kept.ended:
            self.known = kept.path
            if choice.taken.is_paddles:
                self.shown = PlanReport(Plan.off("Paddle's baseline was the fastest that an earlier run measured"))
            say_once(f"{choice.taken.name} is taken, the fastest of {len(choice.results)} that an earlier run measured ({kept.path})")
            return [choice.taken]
        return [each for each in (configured, PADDLES) if each.is_paddles or each.name not in kept.ended]

    def _entrant(self, is_first: bool = False) -> Entrant | None:
        """The plan of the next step, built if it is new; None if building failed, so that another plan is next."""
        contender = self.trial.now
        if contender.name in self.entrants:
            return self.entrants[contender.name]
        is_alone = len(self.trial.held) == 1
        if contender.is_paddles and not is_alone and (why := self._why_too_large()):
            self._leave_out(why)
            return None
        start_ns = time.perf_counter_ns()
        self.reserved_bytes = self.device.reserved_bytes()
        if contender.is_paddles and is_alone:
            mode = self.maker.paddles(self.shown, is_first)
        else:
            mode, failure = attempt(lambda: self._built(contender, is_first))
            verdict = agreed(self.peers, "plan built", fault_of(failure) if failure else Fault())
            if verdict is not None:
                if not contender.is_paddles:
                    self._require_ours(verdict, failure)
                self._drop(contender, "building it" if contender.is_paddles else "planning, proving and lowering it", failure, verdict)
                return None
        if not contender.is_paddles:
            if twin := self._twin(contender, mode.report.plan):
                self._leave_out(f"{TWIN} {twin}")
                return None
            if contender.name != CONFIGURED and (why := self._why_no_room(mode.report.plan)):
                self._leave_out(why)
                return None
            if self.shown.plan.why_off:
                self.shown = mode.report
        took_ns = gather(self.peers, "time to build", time.perf_counter_ns() - start_ns)
        account = self.trial.account
        account.build_ns = 0 if contender.is_paddles and is_first else max(took_ns)
        if mode.report.plan.outcome is not None:
            outcome = mode.report.plan.outcome
            account.predicted_ns = (outcome.before.step_ns if outcome.before else 0) if contender.is_paddles else outcome.plan.step_ns
        entrant = self.entrants[contender.name] = Entrant(contender, mode, OneBuild(self.peers))
        if contender.name == CONFIGURED and not self.known and self.mode == "train":
            known = {*self.trial.accounts, *self.failed}
            self.trial.propose([each for each in proposed(self.config, mode.report.plan) if each.name not in known])
        self._tell()
        return entrant

    def _leave_out(self, why: str) -> None:
        """Continue without the current plan, which has not run."""
        self.trial.drop(why)
        self._settle_if_taken()

    def _built(self, contender: Contender, is_first: bool) -> Mode:
        if contender.is_paddles:
            return self.maker.paddles(self.shown, is_first)
        made = self.maker.build(changed(self.config, contender.options or {}), is_first)
        if made.to_compare is not None:
            require_agreement(made.report.plan, made.to_compare, self.device.target)
            made.to_compare = None
        return made

    def _why_too_large(self) -> str:
        """Why Paddle's baseline is not tried: its simulated peak exceeds the memory budget or the device's memory; empty if it may be
        tried."""
        outcome, budget = self.shown.plan.outcome, self.shown.plan.asked_budget
        if outcome is None or outcome.before is None:
            return ""
        held_bytes = outcome.before.peak_bytes
        if 0 < budget < held_bytes:
            return f"it holds {size(held_bytes)}, more than the memory budget of {size(budget)}"
        return self._lacks(-more_bytes(outcome), "this plan")

    def _why_no_room(self, plan: Plan) -> str:
        """Why a plan that holds more than Paddle's baseline is not tried: some rank's device has too little memory left; empty if it may
        be."""
        outcome = plan.outcome
        if outcome is None:
            return ""
        more, first = more_bytes(outcome), self.shown.plan.outcome
        ran = max(0, more_bytes(first)) if first is not None else 0  # more than the baseline's, and taken already
        return self._lacks(more - ran, "the plans that ran")

    def _lacks(self, more: int, than: str) -> str:
        """Why some rank's device has no room for `more` bytes beyond what `than` takes, which ran before; empty if all have."""
        for reserved, available in gather(self.peers, "device memory", (self.device.reserved_bytes(), self.device.available_bytes())):
            if not is_room_for(more, reserved, int(ROOM * available)):
                taken = f"of {size(available)} of device memory {size(reserved)} are in use"
                return f"its pools take about {size(more)} more than those of {than}; {taken}"
        return ""

    def _twin(self, contender: Contender, plan: Plan) -> str:
        """The name of an earlier plan that equals `plan` on every rank; empty if there is none."""
        digest = key_of(gather(self.peers, "plans", digest_of(plan.program)))
        twin = next((name for name, each in self.digests.items() if each == digest), "")
        self.digests[contender.name] = digest
        return twin

    # -------------------------------------------------------------------------------------------------------------- running

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step with the current plan."""
        while True:
            entrant = self._entrant()
            if entrant is None:
                continue
            self.use(entrant.mode)
            if self.trial.taken is not None and entrant.has_run:
                if self._has_become_slow():
                    self._try_again()
                    continue
                with self._executors(entrant):
                    return step()
            self.device.synchronize()
            start_ns = time.perf_counter_ns()
            result, is_done = self._tried(entrant, step)
            if is_done:
                self.device.synchronize()
                self._count(time.perf_counter_ns() - start_ns)
                return result

    def _tried(self, entrant: Entrant, step: Callable[[], Any]) -> tuple[Any, bool]:
        """Run a step; returns its result and whether it succeeded. If the first step of a plan fails, the plan is dropped and the step
        undone."""
        with self._executors(entrant):
            if entrant.has_run:
                return step(), True
            if entrant.contender.is_paddles and (self.captured is None or len(self.trial.held) == 1):
                result = self._paddles_first(step)
                entrant.has_run = True
                return result, True
            assert self.captured is not None
            lasting = Lasting(self.captured.program)
            if self.store is not None:
                self.store.begin(entrant.contender.name)
            result, failure = self._first(step)
            verdict = failure.verdict if isinstance(failure, NotBuiltError) else None
            if verdict is None:
                verdict = agreed(self.peers, "first step", fault_of(failure) if failure else Fault())
            if verdict is None:
                entrant.has_run = True
            elif not isinstance(failure, NotBuiltError):
                self._restore(lasting, entrant.contender, failure, verdict)
            if self.store is not None:
                self.store.end()
        if verdict is not None:
            where = "Paddle's executor took it" if isinstance(failure, NotBuiltError) else "its first step"
            self.entrants.pop(entrant.contender.name)
            self._drop(entrant.contender, where, failure, verdict)
        return result, verdict is None

    def _first(self, step: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            result, failure = attempt(step)
            if failure is None:
                _, failure = attempt(self.device.synchronize)
        except BaseException:  # the user ends the run
            if self.store is not None:
                self.store.end()
            raise
        return result, failure

    def _paddles_first(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except NotBuiltError as error:
            raise error.__cause__ or PlanError(f"Paddle's baseline cannot run: {error.verdict.text(self.env.world_size)}") from error

    def _restore(self, lasting: Lasting, contender: Contender, failure: Exception | None, verdict: Verdict) -> None:
        """Undo a failed step on every rank. Raises PlanError if that is not possible on one of them."""
        if not lasting.why_none:
            lasting.restore()
        why = next((each for each in gather(self.peers, "copies", lasting.why_none) if each), "")
        if why:
            said = verdict.text(self.env.world_size)
            raise PlanError(
                f"{contender.name} failed in its first step ({said}), which may have changed parameters: there was no room on the host "
                f"for a copy of them ({why}). Start the run again: this plan is not tried then"
            ) from failure
        self.device.forget_failure()

    @contextlib.contextmanager
    def _executors(self, entrant: Entrant) -> Iterator[None]:
        executor = self.engine._executor
        own, job_plan = executor._executor_cache, self.engine._job_plan
        executor._executor_cache = entrant.executors
        try:
            yield
        finally:
            executor._executor_cache, self.engine._job_plan = own, job_plan

    # ------------------------------------------------------------------------------------------------------------- deciding

    def _has_become_slow(self) -> bool:
        """Whether the chosen plan has become slower; to be called at the start of each step."""
        if self.mode != "train" or self.captured is None or not self.watch.starts(time.perf_counter_ns()):
            return False
        return self.watch.turn(gather(self.peers, "steps of the plan that was taken", self.watch.mine()))

    def _try_again(self) -> None:
        """Begin another trial, of the chosen plan against all others that can run."""
        assert self.trial.taken is not None
        before_this = self.trial.accounts
        self.failed |= {name for name, each in before_this.items() if each.fault and not each.fault.startswith(TWIN)}
        own = self.entrants.get(CONFIGURED)
        others = [each.contender for each in self.trial.accounts.values()] + (proposed(self.config, own.mode.report.plan) if own else [])
        known = [self.trial.taken, PADDLES, Contender(CONFIGURED, {}), *others]
        again = {each.name: each for each in known if each.name not in self.failed}
        before, now = ms(self.watch.before_ns), ms(self.watch.now_ns)
        self.watch.restart()
        if self.env.rank == 0:
            tried = f"{len(again)} plans are tried again" if len(again) > 1 else "there is no other plan that can run"
            say(f"with {self.trial.taken.name} steps take {now} from start to start where they took {before}: {tried}")
        if len(again) == 1:
            return
        self.trial, self.known, self.is_again = Trial(list(again.values())), "", True
        for name in self.entrants:
            self.trial.accounts[name].predicted_ns = before_this[name].predicted_ns
        self.digests = {name: each for name, each in self.digests.items() if name in self.entrants}
        self.reserved_bytes = self.device.reserved_bytes()

    def _count(self, took_ns: int) -> None:
        """Count a step; at the end of a turn all ranks exchange their times."""
        trial = self.trial
        if trial.taken is not None:
            return
        if not trial.account.has_run:
            trial.account.device_bytes = max(0, self.device.reserved_bytes() - self.reserved_bytes)
        if trial.took(took_ns):
            trial.turn(gather(self.peers, "times of steps", trial.mine()))
            self._settle_if_taken()
            self._tell()

    def _settle_if_taken(self) -> None:
        """Release plans that are out of the trial; once it is decided, store and log the choice."""
        trial = self.trial
        held = {each.name for each in trial.held}
        gone = [name for name in self.entrants if name not in held]
        for name in gone:
            del self.entrants[name]
        if gone:
            self.device.release_memory()
        if trial.taken is not None:
            self.watch.restart()
            self._tell()
            self._dump_taken()
        if trial.taken is None or self.mode != "train" or self.known or self.store is None:
            return
        for line in trial_lines(told_of(trial)):
            say(line)
        if self.is_again:
            return
        is_kept = self.store.write(TrialOutcome(trial.taken, tuple(trial.results()), trial.steps, self.memory_bytes))
        where = f"; kept in {self.store.choice_path}" if is_kept else f"; {self.folder} cannot be written, so it is not kept"
        say(f"the next run of the same programs takes it without a trial{where}")

    def _dump_taken(self) -> None:
        """Write the chosen plan to the folder of dumps, if others were built after it."""
        assert self.trial.taken is not None
        entrant = self.entrants.get(self.trial.taken.name)
        if self.config.dump and len(self.trial.accounts) > 1 and entrant is not None and not entrant.contender.is_paddles:
            _, failure = attempt(lambda: entrant.mode.report.plan.dump(Path(self.config.dump)))
            if failure is not None:
                say(f"the plan that was taken is not in {self.config.dump}: {failure}")

    def _tell(self) -> None:
        """Add the state of the trial to the reports of plans."""
        told = told_of(self.trial, self.known) if len(self.trial.accounts) > 1 or self.known else None
        if self.trial.taken is not None and self.trial.taken.name in self.entrants and not self.trial.taken.is_paddles:
            self.shown = self.entrants[self.trial.taken.name].mode.report
        for report in (self.shown, *(each.mode.report for each in self.entrants.values())):
            report.measured.trial = told

    def _drop(self, contender: Contender, where: str, failure: Exception | None, verdict: Verdict) -> None:
        self._say_fault(contender.name, where, failure, verdict)
        self.trial.drop(f"{where}: {verdict.text(self.env.world_size)}")
        if self.shown.plan.why_off:
            self.shown = PlanReport(Plan.off(f"{contender.name} failed: {where}: {verdict.text(self.env.world_size)}"))
        self._settle_if_taken()
        self._tell()

    def _say_fault(self, name: str, where: str, failure: Exception | None, verdict: Verdict) -> None:
        path = report_fault(self.folder, name, where, failure, verdict)
        if self.env.rank == verdict.rank:
            say(
                f"{name} failed ({where}): {verdict.text(self.env.world_size)}. Training goes on with another plan, in the end Paddle's "
                f"baseline; nothing of the step is lost. Please report it with {path or 'the log of this rank'} and the dump of the script "
                "(`interlace dump`)"
            )

    def _require_ours(self, verdict: Verdict, failure: Exception | None) -> None:
        """Raise an error in the user's own configuration instead of falling back to another plan; but never once the run trains."""
        if not verdict.fault.users or self.is_again:
            return
        if failure is not None:
            raise failure
        raise PlanError(verdict.text(self.env.world_size))
