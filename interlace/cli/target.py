"""How `check`, `timeline` and `report` choose the device profile and target with which they simulate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from interlace.cli.plans import PlanFile
    from interlace.cost_model import CostModel
    from interlace.ir import Program
    from interlace.ir.target import Target
    from interlace.scheduler.simulate.simulator import Result

DEFAULT_PROFILE = "h200"


def add_options(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add `--device` and `--target` to a command; `more` is appended to the help of `--target`."""
    parser.add_argument(
        "--device", default="", metavar="NAME", help=f"device profile, by name or path (default: that of the plan, else {DEFAULT_PROFILE})"
    )
    parser.add_argument(
        "--target",
        metavar="T",
        default="",
        help="; ".join(
            ["rules of execution: gpu, cpu, custom, or a module with your own device (default: cpu for the profile cpu, else gpu)", *more]
        ),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """The times and rules with which to simulate steps that the host issues; `of_plans` also covers captured steps.

    Attributes:
        profile: Name or path of the device profile.
        why: Where that name comes from, in a few words.
        costs: The cost model of that profile.
        target: The rules of execution.
    """

    profile: str
    why: str
    costs: CostModel
    target: Target

    @classmethod
    def of(cls, files: Sequence[PlanFile], args: argparse.Namespace, *more: Target) -> Setting:
        """The setting that the options request; `more` are targets that they may name besides the real ones. By default the profile with
        which the plans were made, and the target that belongs to it.

        Raises ConfigError if there is no such profile or target, or if the plans were made with several profiles.
        """
        from interlace.cost_model import CostModel, load_profile
        from interlace.errors import ConfigError
        from interlace.ir.target import TARGETS, target_of
        from interlace.local.own_target import find_own

        name, why = (args.device, "--device") if args.device else profile_of(files)
        try:
            costs = CostModel(load_profile(name))
        except ConfigError as error:
            raise error if args.device else ConfigError(f"{error} (the plan was made with it; choose another with --device)") from error
        known = {**TARGETS, **{target.name: target for target in more}}
        asked = args.target or target_of(name).name
        return cls(name, why, costs, known[asked] if asked in known else find_own(asked).rules)

    def of_plans(self, files: Sequence[PlanFile]) -> Setting:
        """The setting for the steps of these plans, which may be captured and launched as a graph."""
        from interlace.ir.target import as_graph
        from interlace.planning.plan import costs_of

        if not any(file.record and file.record.is_launched for file in files):
            return self
        return replace(self, costs=costs_of(self.profile, is_launched=True), target=as_graph(self.target))

    def __str__(self) -> str:
        return f"simulated with the profile {Path(self.profile).stem} ({self.why}), rules of the {self.target.name} target"

    def simulate(self, programs: Sequence[Program], p2p: Literal["rendezvous", "buffered"] | None = None) -> Result:
        """Simulate a step of these ranks and of those that they represent; all others count as always ready. `p2p` replaces the rule of the
        target. Raises PlanError and Stall like the simulator."""
        from interlace.ir.equivalent_ranks import missing_ranks, representatives
        from interlace.scheduler.simulate.arrays import Options
        from interlace.scheduler.simulate.simulator import simulate

        others: dict[str, Any] = {"p2p": p2p} if p2p else {}
        options = Options.of(self.target, peers_ready=bool(missing_ranks(programs)), representative=representatives(programs), **others)
        return simulate(programs, self.costs, options, target=self.target)


def profile_of(files: Sequence[PlanFile]) -> tuple[str, str]:
    """The profile with which plans were made, or the default for dumps, and a text that says which of the two it is. Raises ConfigError if
    plans were made with several."""
    from interlace.errors import ConfigError

    found: dict[str, Path] = {}
    for file in files:
        if file.record and file.record.profile:
            found.setdefault(file.record.profile, file.path)
    if len(found) > 1:
        named = ", ".join(f"{path} with {name}" for name, path in found.items())
        raise ConfigError(f"plans made with different device profiles: {named}; choose one with --device")
    return (next(iter(found)), "the plan's own") if found else (DEFAULT_PROFILE, "the default, as no plan names one")
