"""Our passes as Paddle's: `paddle.distributed.passes.new_pass("interlace_<pass>", {...}).apply([main], [startup], context)`.

`interlace_split_backward` and `interlace_overlap_column_backward` rewrite a plain program in place. `interlace_schedule_1f1b`
gives the executor's plan as the context's attribute `plan`; it takes Paddle's own pipeline attributes (num_micro_batches,
pp_degree, pp_stage, vpp_degree) and schedule_mode, the options of the pass, and in `interlace` the options of the others.
"""

from __future__ import annotations

from typing import Any

from paddle.distributed.passes.pass_base import PassBase

from interlace.bridge.capture import capture
from interlace.bridge.lower import lower
from interlace.bridge.places import choose_place
from interlace.bridge.rewrite import write_back
from interlace.config import Config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import ConfigError
from interlace.ir import Pipeline
from interlace.passes import REGISTRY
from interlace.plan import make_plan
from interlace.registration import PREFIX

PIPELINE = {"num_micro_batches": "num_micro_batches", "pp_degree": "num_stages", "pp_stage": "stage", "vpp_degree": "num_chunks",
            "schedule_mode": "schedule"}  # fmt: skip
"""Paddle's attribute -> field of `Pipeline`."""
NEEDS = {"split_backward": ("split_backward",), "overlap_column_backward": ("split_backward", "overlap_column_backward")}
"""Passes that run for one, so that its own needs are met."""


def make(name: str) -> PassBase:
    """An instance for Paddle's `new_pass`."""
    return SchedulePass() if name == "schedule_1f1b" else RewritePass(name)


class _Pass(PassBase):  # type: ignore[misc]
    """What Paddle asks of every pass."""

    def _check_self(self) -> bool:
        return True

    def _check_conflict(self, other_pass: Any) -> bool:
        return True

    def _options(self, name: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
        known = REGISTRY[name.replace("_", "-")].__struct_fields__
        given = {key: value for key, value in self._attrs.items() if key not in without}
        unknown = sorted(set(given) - set(known) - {"device"})
        if unknown:
            raise ConfigError(f"pass {self.name!r}: unknown attributes {unknown}; there are {sorted((*known, 'device', *without))}")
        return {key: value for key, value in given.items() if key in known}

    def _costs(self) -> tuple[CostModel, str]:
        profile = str(self._attrs.get("device") or ("cpu" if choose_place().name == "cpu" else "h200"))
        return CostModel(load_profile(profile)), profile


class RewritePass(_Pass):
    """One pass of ours on a plain program, which is changed in place."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
        self.name = PREFIX + key

    def _apply_single_impl(self, main_program: Any, startup_program: Any, context: Any) -> None:
        config = self._config()
        captured = capture(main_program)
        plan = make_plan(captured.program, config, *self._costs())
        write_back(captured, plan.program, choose_place())
        context.set_attr(self.name, plan)

    def _config(self) -> Config:
        off = dict.fromkeys(("split_backward", "overlap_column_backward", "schedule_1f1b", "assign_streams"), "off")
        on: dict[str, Any] = dict.fromkeys(NEEDS[self.key], "on")
        return make_config({**off, **on, self.key: self._options(self.key) or "on"}, f"pass {self.name}")


class SchedulePass(_Pass):
    """The whole plan of a program; the program itself stays as it is."""

    name = PREFIX + "schedule_1f1b"

    def _apply_single_impl(self, main_program: Any, startup_program: Any, context: Any) -> None:
        fields = {PIPELINE[key]: value for key, value in self._attrs.items() if key in PIPELINE}
        own = {"schedule_1f1b": self._options("schedule_1f1b", (*PIPELINE, "interlace")) or "on"}
        config = make_config({**self._attrs.get("interlace", {}), **own}, f"pass {self.name}")
        captured = capture(main_program.clone(), Pipeline(**{"schedule": "1F1B", **fields}))
        plan = make_plan(captured.program, config, *self._costs())
        context.set_attr(self.name, plan)
        context.set_attr("plan", lower(captured, plan.program, choose_place()))
