"""What the plan of a script relies on, compared with what was found on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from interlace.config import Config
from interlace.cost_model import load_profile
from interlace.passes.base import option_name
from interlace.planning.limits import default_pool_budget
from interlace.planning.plan import Plan
from interlace.report.checks import (
    EVERYTHING,
    MEMORY,
    OFFLOAD,
    OVERLAP,
    PRIORITIES,
    RETURN,
    SUMS,
    THROTTLE,
    TIMES,
    TUNE,
    Check,
    Examination,
    Feature,
    Verdict,
)
from interlace.units import size


def needs_of(plans: Sequence[Plan], config: Config, found: Examination) -> list[Check]:
    """A row for each part of Interlace that the plans of all stages use, with the rules that it relies on, and one for the memory that the
    plans need."""
    rows = [_row(feature, use, [each for each in found.checks if feature in each.rests]) for feature, use in used(plans, config).items()]
    return [*rows, _memory(plans, config, found)]


def used(plans: Sequence[Plan], config: Config) -> Mapping[Feature, str]:
    """Part of Interlace that the plans use -> what they use it for."""
    changes = Counter(
        option_name(report.name) for plan in plans for report in plan.reports for each in report.remarks if each.kind == "applied"
    )
    found = {EVERYTHING: f"jobs of its own on {len(plans)} stage{'s' * (len(plans) > 1)}"}
    for feature in (OVERLAP, OFFLOAD, THROTTLE, RETURN, SUMS):
        names = [name for name in feature.option.split() if changes[name]]
        if names:
            found[feature] = ", ".join(f"{name}: {changes[name]} changes" for name in names)
    priority = next((getattr(each, "priority", 0) for each in plans[0].passes if option_name(each.name) == OVERLAP.option), 0)
    if OVERLAP in found and priority:
        found[PRIORITIES] = f"{PRIORITIES.option}: {priority}"
    if config.tune != "off":
        found[TUNE] = f"tune: {config.tune}"
    found[TIMES] = "choosing the plan"
    if plans[0].asked_budget:
        found[MEMORY] = f"memory_budget: {size(plans[0].asked_budget)}"
    return found


def _row(feature: Feature, use: str, rules: Sequence[Check]) -> Check:
    by_verdict: dict[Verdict, list[str]] = {"holds": [], "fails": [], "not checked": []}
    for each in rules:
        by_verdict[each.verdict].append(each.rule)
    verdict: Verdict = "fails" if by_verdict["fails"] else "not checked" if by_verdict["not checked"] else "holds"
    others = (f"{word}: {', '.join(by_verdict[word])}" for word in ("fails", "not checked") if by_verdict[word])
    return Check(feature.name, use, "; ".join([f"{len(by_verdict['holds'])} of {len(rules)} rules hold", *others]), verdict, (feature,))


def _memory(plans: Sequence[Plan], config: Config, found: Examination) -> Check:
    """Whether pools of the fullest rank keep their limit, and what that is: the configuration's, else that of the device's memory or, if
    that is not known, of the memory of the profile's device."""
    total_bytes = found.memory_bytes or load_profile(plans[0].profile).memory_bytes
    whose = "are free on the device" if found.memory_bytes else f"by the profile {plans[0].profile}, as the device does not report it"
    outcome = plans[0].outcome
    if not total_bytes or outcome is None:
        why = "the step cannot be simulated" if total_bytes else "neither the device nor the profile says how much there is"
        return Check("device memory", "the fullest rank", why, "not checked")
    needed, own = outcome.taken_bytes()
    default = default_pool_budget(total_bytes, own) if config.pool_budget is None else total_bytes
    most_bytes = plans[0].pool_budget or default
    baseline = f"; Paddle's baseline {size(own)}" if own else ""
    said = f"{size(needed)}, simulated{baseline}; {size(total_bytes)} {whose}"
    if needed > most_bytes:
        limit = "the default `pool_budget`" if config.pool_budget is None else "`pool_budget`" if plans[0].pool_budget else "all of it"
        return Check("device memory", "the fullest rank", f"{said}; more than {size(most_bytes)}, {limit}", "fails")
    return Check("device memory", "the fullest rank", said, "holds")
