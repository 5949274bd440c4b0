"""What `interlace doctor` found on a machine: a row for each rule that plans rely on, as a table and as data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Literal

import msgspec

from interlace.grouping import grouped

Verdict = Literal["holds", "fails", "not checked"]
WIDTHS = (11, 34, 38, 44, 40)
"""Columns of the table: verdict, rule, expected, found, what rests on it."""
HEADS = ("", "rule", "expected", "found", "rests on it")


class Feature(msgspec.Struct, frozen=True):
    """A part of Interlace that relies on rules.

    Attributes:
        name: In a user's words.
        option: The options of a configuration that do without it, `pass.option` for one of a pass; empty where there is none.
        value: What they are then.
    """

    name: str
    option: str = ""
    value: str | int | bool | None = "off"

    @property
    def off(self) -> str:
        """What a configuration says that does without it.

        >>> OFFLOAD.off, PRIORITIES.off, MEMORY.off
        ('offload_activations: off, offload_optimizer_state: off', 'name_streams: {priority: 0}', 'memory_budget: null')
        """
        value = "null" if self.value is None else "false" if self.value is False else self.value
        options = (option.partition(".") for option in self.option.split())
        return ", ".join(f"{name}: {{{inner}: {value}}}" if inner else f"{name}: {value}" for name, _, inner in options)


EVERYTHING = Feature("every plan", "enable", False)
RANKS = Feature("runs on CPU ranks")
DUMPS = Feature("dumps")
TUNE = Feature("trial and fallback", "tune")
OVERLAP = Feature("overlap on named streams", "name_streams")
OFFLOAD = Feature("offload", "offload_activations offload_optimizer_state")
THROTTLE = Feature("waits of the host", "throttle_host")
CAPTURE = Feature("captured steps", "capture")
RETURN = Feature("return-memory", "return_memory")
SUMS = Feature("sums in place", "reduce_in_place")
TIMES = Feature("predicted times", "tune", "on")
MEMORY = Feature("predicted memory", "memory_budget", None)
PRIORITIES = Feature("priority of communication", "name_streams.priority", 0)


class Check(msgspec.Struct, frozen=True):
    """A rule, held against the machine.

    Attributes:
        found: What was seen; where nothing could be seen, why.
        verdict: `not checked` is never a pass: the rule is as unknown as before.
        group: The heading that it stands under.
    """

    rule: str
    expected: str
    found: str
    verdict: Verdict
    rests: tuple[Feature, ...] = ()
    group: str = ""


DEVICE, PROFILE = "the device and the executor", "the profile"


def nothing_runs(why: str) -> Check:
    """The check of a device on which no small program can be built and run."""
    return Check("small programs", "can be built and run", why, "fails", (EVERYTHING,), DEVICE)


class Examination(msgspec.Struct, frozen=True):
    """All checks of one machine.

    Attributes:
        target: Whose rules were expected there.
        versions: Of what is installed.
        profile: Name of the device profile that its times were held against.
        memory_bytes: Of the device; 0 where it does not tell.
        needs: What the plan of a script rests on, and whether that holds.
    """

    device: str
    target: str
    versions: dict[str, str]
    checks: tuple[Check, ...]
    profile: str = ""
    memory_bytes: int = 0
    needs: tuple[Check, ...] = ()

    def of(self, verdict: Verdict) -> list[Check]:
        """Those with this verdict."""
        return [each for each in self.checks if each.verdict == verdict]

    @property
    def failed(self) -> list[Check]:
        """Rules that do not hold here."""
        return self.of("fails")

    @property
    def is_sound(self) -> bool:
        """Whether nothing fails."""
        return not self.failed and all(each.verdict != "fails" for each in self.needs)

    def features(self) -> dict[Feature, list[str]]:
        """What relies on rules that do not hold, and on which."""
        return grouped((feature, each.rule) for each in self.failed for feature in each.rests)


def table(found: Examination) -> str:
    """The examination as text.

    >>> row = Check("copies out", "asynchronous", "the host waits", "fails", (OFFLOAD,), "copies")
    >>> print(table(Examination("a GPU", "gpu", {"paddle": "3.3.1"}, (row,))).splitlines()[-1])
    offload rests on: copies out. Without it: `offload_activations: off, offload_optimizer_state: off`
    """
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    lines = [f"{found.device}, rules of the {found.target} target; {versions}", *_row(HEADS)]
    group = ""
    for each in found.checks:
        if each.group != group:
            group = each.group
            lines += ["", f"{group}:"]
        rests = ", ".join(feature.name for feature in each.rests)
        lines += _row((each.verdict, each.rule, each.expected, each.found, rests))
    lines += ["", summary(found), *consequences(found)]
    return "\n".join(lines)


def needs_table(found: Examination, script: str, in_force: str) -> str:
    """What the plan of a script rests on, as text; `in_force` is what a run of it turns off, as a configuration says it."""
    heads = ("", f"the plan of {script} needs", "for", "found", "without it")
    lines = _row(heads)
    for each in found.needs:
        lines += _row((each.verdict, each.rule, each.expected, each.found, "; ".join(feature.off for feature in each.rests if feature.off)))
    return "\n".join([*lines, "", f"what a run of {script} turns off: {in_force}"])


def summary(found: Examination) -> str:
    """How many rules hold, fail and were not checked."""
    counts = (("hold", "holds"), ("fail", "fails"), ("not checked", "not checked"))
    return f"{len(found.checks)} rules: " + ", ".join(f"{len(found.of(verdict))} {word}" for word, verdict in counts)  # type: ignore[arg-type]


def consequences(found: Examination) -> list[str]:
    """What to turn off, a line each."""
    lines = []
    for feature, rules in found.features().items():
        advice = f"Without it: `{feature.off}`" if feature.off else "No option does without it"
        lines.append(f"{feature.name} rests on: {'; '.join(rules)}. {advice}")
    return lines


def _row(cells: Sequence[str]) -> list[str]:
    """One row, its cells wrapped."""
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, WIDTHS, strict=True)]
    height = max(map(len, wrapped))
    rows = []
    for k in range(height):
        parts = [(cell[k] if k < len(cell) else "").ljust(width) for cell, width in zip(wrapped, WIDTHS, strict=True)]
        rows.append("  ".join(parts).rstrip())
    return rows
