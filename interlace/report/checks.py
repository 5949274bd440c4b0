"""What `interlace doctor` found on a machine: a row for each rule that plans rely on, as a table and as data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Literal

import msgspec

from interlace.grouping import grouped

Verdict = Literal["holds", "fails", "not checked"]
WIDTHS = (11, 34, 38, 44, 40)
"""Widths of the table's columns: verdict, rule, expected, found, what relies on it."""
HEADS = ("", "rule", "expected", "found", "rests on it")


class Feature(msgspec.Struct, frozen=True):
    """A part of Interlace that relies on rules.

    Attributes:
        name: Name for users.
        option: The options that turn it off, separated by blanks, `pass.option` for one of a pass; empty if there is none.
        value: The value of these options that turns it off.
    """

    name: str
    option: str = ""
    value: str | int | bool | None = "off"

    @property
    def off(self) -> str:
        """The text of a configuration that turns it off.

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
    """A rule, and what was found on the machine.

    Attributes:
        found: What was found, or why nothing could be.
        verdict: `not checked` does not mean that the rule holds: nothing is known about it.
        rests: The parts of Interlace that rely on it.
        group: The heading above it in the table.
    """

    rule: str
    expected: str
    found: str
    verdict: Verdict
    rests: tuple[Feature, ...] = ()
    group: str = ""


DEVICE, PROFILE = "the device and the executor", "the profile"


def nothing_runs(why: str) -> Check:
    """The failed check of a device on which no small program can be built and run."""
    return Check("small programs", "can be built and run", why, "fails", (EVERYTHING,), DEVICE)


class Examination(msgspec.Struct, frozen=True):
    """All checks of one machine.

    Attributes:
        target: Name of the target whose rules were expected.
        versions: Installed package -> version.
        profile: Name of the device profile whose times were compared.
        memory_bytes: Memory of the device that was available before the checks; 0 if the device does not report it.
        needs: What the plan of a script relies on, and whether that holds.
    """

    device: str
    target: str
    versions: dict[str, str]
    checks: tuple[Check, ...]
    profile: str = ""
    memory_bytes: int = 0
    needs: tuple[Check, ...] = ()

    def of(self, verdict: Verdict) -> list[Check]:
        """The checks with this verdict."""
        return [each for each in self.checks if each.verdict == verdict]

    @property
    def failed(self) -> list[Check]:
        """The checks of rules that do not hold."""
        return self.of("fails")

    @property
    def is_sound(self) -> bool:
        """Whether neither a check nor a need of the script fails."""
        return not self.failed and all(each.verdict != "fails" for each in self.needs)

    def features(self) -> dict[Feature, list[str]]:
        """Part of Interlace -> the rules that it relies on and that do not hold."""
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
    """What the plan of a script relies on, as text; `in_force` is what a run of the script turns off, as text of a configuration."""
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
    """A line for each part of Interlace that relies on a rule that does not hold, with the options that turn it off."""
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
