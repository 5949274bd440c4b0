"""What `interlace run --config`, `--plan` and `--memory-budget` ask of its ranks, in place of what the script asks for, or on top of
it. No Paddle here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from interlace.config import BUDGET, command_marks, find_config, read_yaml

CONFIG_VARIABLE, PLAN_VARIABLE, BUDGET_VARIABLE = "INTERLACE_CONFIG", "INTERLACE_PLAN", "INTERLACE_MEMORY_BUDGET"


class Outside(NamedTuple):
    """What a command asks for.

    Attributes:
        options, source, marks: As `make_config` takes them.
        words: Of the command.
        is_whole: Whether they take the place of the script's own; a memory budget alone goes on top.
    """

    options: dict[str, Any]
    source: str
    marks: dict[str, str]
    words: str
    is_whole: bool


def asked_outside(environment: Mapping[str, str] = os.environ) -> Outside | None:
    """What an environment asks for; None where it asks for nothing.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    path, folder = environment.get(CONFIG_VARIABLE, ""), environment.get(PLAN_VARIABLE, "")
    budget = environment.get(BUDGET_VARIABLE, "")
    given = (("--config", path), ("--plan", folder), ("--memory-budget", budget))
    words = " ".join(f"{option} {value}" for option, value in given if value)
    if not words:
        return None
    options, marks = read_yaml(find_config(path)) if path else ({}, {})
    more = {name: value for name, value in (("plan", folder), (BUDGET, budget)) if value}
    return Outside({**options, **more}, path or words, {**marks, **command_marks(more)}, words, bool(path or folder))
