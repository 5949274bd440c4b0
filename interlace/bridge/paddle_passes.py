"""Interlace's passes as Paddle passes: `paddle.distributed.passes.new_pass("interlace_<pass>", {...}).apply([main], [startup], context)`.

`interlace_split_backward` and `interlace_overlap_column_backward` rewrite a plain program in place, and set the context's attribute
of their own name to the plan, which has the remarks on what was done and declined. `interlace_schedule_1f1b` does not change the
program, and sets the context's attribute `plan` to the executor's plan:

    context = new_pass("interlace_schedule_1f1b", {"num_micro_batches": 4, "fetch_list": [loss]}).apply([main], [startup])
    executor._set_plan(context.get_attr("plan"))
    executor.run(main, feed=..., fetch_list=context.get_attr("fetch_list"))

It takes Paddle's own pipeline attributes (num_micro_batches, pp_degree, pp_stage, vpp_degree) and schedule_mode, the options of
the pass, and in `interlace` the options of the other passes. `interlace_offload_activations` does the same with Paddle's baseline order of
jobs and without splitting gradients; it needs a plan, because a value is copied out in one job and back in another.
Every pass takes `device`, a profile by name or path, and `force_paddle`.

If a pass fails, the user's program is unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import paddle
from paddle.distributed.passes.pass_base import PassBase

from interlace.bridge.capture import Captured, capture
from interlace.bridge.lower import lower
from interlace.bridge.profiles import costs_for
from interlace.bridge.rewrite import write_back
from interlace.bridge.roles import give_roles, require_sums
from interlace.bridge.targets import Device, choose_device
from interlace.config import Config, make_config
from interlace.cost_model import CostModel
from interlace.errors import ConfigError
from interlace.installed import unusable_paddle
from interlace.ir import Pipeline, Program
from interlace.ir.schedule import SCHEDULES
from interlace.passes import REGISTRY
from interlace.passes.base import option_name
from interlace.passes.insert_events import fetching
from interlace.planning.baseline import BASELINE_ORDER
from interlace.planning.plan import Plan, make_plan
from interlace.registration import PREFIX
from interlace.report.checks import EVERYTHING
from interlace.report.plan import PlanReport
from interlace.report.remarks import sentence
from interlace.scheduler.hazards import require_safe

LOG = logging.getLogger("interlace")
PIPELINE = {
    "num_micro_batches": "num_micro_batches",
    "pp_degree": "num_stages",
    "pp_stage": "stage",
    "vpp_degree": "num_chunks",
    "schedule_mode": "schedule",
}
"""Paddle's attribute -> field of `Pipeline`."""
LEAST = {"num_micro_batches": 1, "pp_degree": 1, "pp_stage": 0, "vpp_degree": 1}
"""Attribute -> its smallest valid value."""


def make(name: str) -> PassBase:
    """An instance for Paddle's `new_pass`. Each gets a class of its own, because Paddle silently drops a second pass of the same class."""
    kinds: dict[str, type[_Pass]] = {kind.key: kind for kind in (SplitBackwardPass, OverlapColumnBackwardPass, SchedulePass, OffloadPass)}
    return kinds[name]()


class _Pass(PassBase):  # type: ignore[misc]
    """The methods that Paddle requires of every pass."""

    key: ClassVar[str]

    def _check_self(self) -> bool:
        return True

    def _check_conflict(self, other_pass: Any) -> bool:
        return True

    def _options(self, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """The options of the pass among the attributes. Raises ConfigError for an unknown attribute."""
        kind = REGISTRY[self.key.replace("_", "-")]
        known = kind.__struct_fields__
        given = {key: value for key, value in self._attrs.items() if key not in without}
        every = ("device", "force_paddle")
        unknown = sorted(set(given) - {*known, *every})
        if unknown:
            raise ConfigError(f"pass {self.name!r}: unknown attributes {unknown}; there are {sorted((*known, *every, *without))}")
        return {key: value for key, value in given.items() if key in known}

    def _require_version(self) -> None:
        """Raise ConfigError if this Paddle is untested and lacks what plans need, unless the attribute `force_paddle` is set."""
        unusable = "" if self._attrs.get("force_paddle") is True else unusable_paddle(EVERYTHING)
        if unusable:
            raise ConfigError(f"pass {self.name!r}: {unusable}; the attribute force_paddle: True tries all the same")

    def _wrong(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"pass {self.name!r}: attribute {key}: found {self._attrs[key]!r}, expected {expected}")

    def _costs(self, config: Config, device: Device) -> tuple[CostModel, str]:
        profile = self._attrs.get("device", "")
        if not isinstance(profile, str):
            raise self._wrong("device", "the name or path of a device profile")
        return costs_for(config, device, profile)

    def _warn(self, plan: Plan, keys: Sequence[str] = ()) -> None:
        """Log a warning if neither this pass nor those in `keys` changed anything."""
        asked = {key.replace("_", "-") for key in (self.key, *keys)}
        reports = [report for report in plan.reports if report.name in asked]
        if not any(report.done for report in reports):
            why = "; ".join(sentence(each) for report in reports for each in report.declined[:3])
            LOG.warning("%s changed nothing: %s", self.name, why or "found nothing to do")

    def _keep(self, plan: Plan, program: Program, config: Config, device: Device) -> None:
        """Write the plan to a folder, and prove that the program is safe, if the configuration asks for it."""
        if config.dump:
            plan.dump(config.dump)
        if config.check:
            require_safe([program], device.target)


class RewritePass(_Pass):
    """One of our passes on a plain program, which is changed in place."""

    on: ClassVar[tuple[str, ...]]
    """The passes that run, so that this pass's needs are met."""

    def _apply_single_impl(self, main_program: Any, startup_program: Any, context: Any) -> None:
        self._require_version()
        config, device = self._config(), choose_device()
        copy = main_program.clone()
        derived = give_roles(copy)
        found = capture(copy).program
        plan = make_plan(found, config, *self._costs(config, device))
        self._keep(plan, plan.program, config, device)
        ops = list(main_program.global_block().ops)
        write_back(Captured(found, main_program, ops, {}), plan.program, device, roles=not derived)
        self._warn(plan, self.on)
        context.set_attr(self.name, PlanReport(plan))

    def _config(self) -> Config:
        off = {option_name(name): "off" for name, kind in REGISTRY.items() if kind.is_default}
        on: dict[str, Any] = dict.fromkeys(self.on, "on")
        return make_config({**off, **on, self.key: self._options() or "on"}, f"pass {self.name}")


class SplitBackwardPass(RewritePass):
    """`interlace_split_backward`."""

    key = "split_backward"
    name = PREFIX + key
    on = ("split_backward",)


class OverlapColumnBackwardPass(RewritePass):
    """`interlace_overlap_column_backward`; splits gradients that are not split yet."""

    key = "overlap_column_backward"
    name = PREFIX + key
    on = ("split_backward", "overlap_column_backward")


class SchedulePass(_Pass):
    """`interlace_schedule_1f1b`: the whole plan of a program, which itself is not changed."""

    key = "schedule_1f1b"
    name = PREFIX + key
    others: ClassVar[Mapping[str, Any]] = {}
    """Options of the other passes, unless the attribute `interlace` has them."""

    def _apply_single_impl(self, main_program: Any, startup_program: Any, context: Any) -> None:
        self._require_version()
        config, pipeline, device = self._config(), self._pipeline(), choose_device()
        mapping = paddle.base.libpaddle.pir.IrMapping()
        copy = main_program.clone(mapping)
        derived = give_roles(copy)
        captured = capture(copy, pipeline)
        require_sums(captured.program, derived)
        fetches = [self._value_id(captured, mapping, value) for value in self._fetch_list()]
        plan = make_plan(captured.program, config, *self._costs(config, device))
        program = fetching(plan.program, fetches)
        self._keep(plan, program, config, device)
        device.prepare()
        lowered = lower(captured, program, device)
        self._warn(plan)
        context.set_attr(self.name, PlanReport(plan))
        context.set_attr("plan", lowered)
        context.set_attr("fetch_list", [lowered.fetched[value] for value in fetches])

    def _config(self) -> Config:
        others = self._attrs.get("interlace", {})
        if not isinstance(others, Mapping):
            raise self._wrong("interlace", "a table of options of other passes, such as {'throttle_host': 'off'}")
        if self.key in others or "enable" in others:
            raise self._wrong("interlace", f"options of other passes only: {self.key}'s are attributes of this one")
        own = {self.key: self._options((*PIPELINE, "interlace", "fetch_list")) or "on"}
        return make_config({**self.others, **others, **own}, f"pass {self.name}")

    def _pipeline(self) -> Pipeline:
        """The pipeline from Paddle's attributes. Raises ConfigError for an invalid one."""
        found = {"schedule_mode": "1F1B", **{key: self._attrs[key] for key in PIPELINE if key in self._attrs}}
        for key, least in LEAST.items():
            value = found.get(key, least)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self._wrong(key, f"a whole number, {least} or more")
        if found["schedule_mode"] not in SCHEDULES:
            raise self._wrong("schedule_mode", f"one of {sorted(SCHEDULES)}")
        stages, chunks = found.get("pp_degree", 1), found.get("vpp_degree", 1)
        if found.get("pp_stage", 0) >= stages:
            raise self._wrong("pp_stage", f"a stage below pp_degree, which is {stages}")
        if chunks > 1 and found["schedule_mode"] != "VPP":
            raise self._wrong("vpp_degree", f"1, because schedule_mode is {found['schedule_mode']!r}; only VPP has chunks")
        return Pipeline(**{PIPELINE[key]: value for key, value in found.items()})

    def _fetch_list(self) -> list[Any]:
        given = self._attrs.get("fetch_list", [])
        if not isinstance(given, (list, tuple)):
            raise self._wrong("fetch_list", "a list of values of the program")
        return list(given)

    def _value_id(self, captured: Captured, mapping: Any, value: Any) -> int:
        known = isinstance(value, paddle.pir.Value) and mapping.has(value)
        found = captured.value_ids.get(mapping.look_up(value).id) if known else None
        if found is None:
            raise self._wrong("fetch_list", f"values of the program's main block only, not {value}")
        return found


class OffloadPass(SchedulePass):
    """`interlace_offload_activations`: as `interlace_schedule_1f1b`, in Paddle's baseline order, with offload alone."""

    key = "offload_activations"
    name = PREFIX + key
    others = BASELINE_ORDER
