"""What `interlace run --config`, `--plan`, `--memory-budget` and `--pool-budget` ask of its ranks, in place of what the script asks for, or
on top of it, and what else its ranks need. No Paddle here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from interlace.config import BUDGET, POOL_BUDGET, find_config, is_preset, read_yaml
from interlace.errors import ConfigError

CONFIG_VARIABLE, PLAN_VARIABLE = "INTERLACE_CONFIG", "INTERLACE_PLAN"
BUDGET_VARIABLES = {BUDGET: "INTERLACE_MEMORY_BUDGET", POOL_BUDGET: "INTERLACE_POOL_BUDGET"}
OPTIONS = {CONFIG_VARIABLE: "--config ", PLAN_VARIABLE: "--plan "}
OPTIONS |= {variable: f"--{name.replace('_', '-')} " for name, variable in BUDGET_VARIABLES.items()}
"""What the command's users typed before the value of each variable."""
TARGET_VARIABLE = "INTERLACE_TARGET"
"""`cpu`, `gpu` or a module; unset: GPUs where they are, else the CPU."""
DISABLE_VARIABLE = "INTERLACE_DISABLE"
"""`1`: Paddle alone."""
CONNECTIONS_VARIABLE, USUAL_CONNECTIONS, MOST_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", 8, 32
"""How many connections to a GPU the streams of a process share, which CUDA reads when it starts: its default and its most."""
VARIABLES = {name: f"{name}=" for name in OPTIONS}
"""What users of the environment typed."""


class Outside(NamedTuple):
    """What a command asks for.

    Attributes:
        options, source, marks: As `make_config` takes them.
        words: Of the command.
        is_whole: Whether they take the place of the script's own; budgets alone go on top.
    """

    options: dict[str, Any]
    source: str
    marks: dict[str, str]
    words: str
    is_whole: bool


def asked_outside(environment: Mapping[str, str] = os.environ, typed: Mapping[str, str] = OPTIONS) -> Outside | None:
    """What an environment asks for; None where it asks for nothing. Errors call its variables as `typed` does. Raises ConfigError where the
    configuration cannot be read, or a preset stands beside plans."""
    path, folder = environment.get(CONFIG_VARIABLE, ""), environment.get(PLAN_VARIABLE, "")
    given = {variable: environment.get(variable, "") for variable in OPTIONS}
    words = " ".join(f"{typed[name]}{value}" for name, value in given.items() if value)
    if not words:
        return None
    if folder and path and is_preset(path):
        raise ConfigError(
            f"{typed[PLAN_VARIABLE]}{folder} beside {typed[CONFIG_VARIABLE]}{Path(path).stem}: the plans there have their profile and the "
            "options of their passes; leave one of the two out"
        )
    options, marks = read_yaml(find_config(path)) if path else ({}, {})
    more = {name: variable for name, variable in {"plan": PLAN_VARIABLE, **BUDGET_VARIABLES}.items() if given[variable]}
    options = {**options, **{name: given[variable] for name, variable in more.items()}}
    marks = {**marks, **{name: typed[variable].rstrip(" =") for name, variable in more.items()}}
    return Outside(options, path or words, marks, words, bool(path or folder))


def launched(name: str, default: int, least: int = 0) -> int:
    """A number that the launcher of this process has put into the environment, or `default` without one. Raises ConfigError if it is no
    whole number, or below `least`."""
    text = os.environ.get(name, str(default))
    with suppress(ValueError):
        if int(text) >= least:
            return int(text)
    raise ConfigError(f"{name}={text}: expected a whole number from {least} on, as launchers set it; unset it if there is no launcher")


def is_disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether an environment has Paddle train alone."""
    return environment.get(DISABLE_VARIABLE) == "1"


def with_connections(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What ranks that train by our plans need beside an environment: a connection to the GPU for each of their streams, which shortens gaps
    between kernels (benchmarks/results/gpu.md). Nothing where the environment says how many, or that Paddle trains alone."""
    return {} if CONNECTIONS_VARIABLE in environment or is_disabled(environment) else {CONNECTIONS_VARIABLE: str(MOST_CONNECTIONS)}
