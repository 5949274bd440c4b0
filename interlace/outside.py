"""What `interlace run --config` and `--plan` ask of its ranks, in the place of what the script asks for. No Paddle here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from interlace.config import find_config, read_yaml

CONFIG_VARIABLE, PLAN_VARIABLE = "INTERLACE_CONFIG", "INTERLACE_PLAN"


class Outside(NamedTuple):
    """Options, where they come from, the places of each (as `make_config` takes them), and the words of the command that gave them."""

    options: dict[str, Any]
    source: str
    marks: dict[str, str]
    words: str


def asked_outside(environment: Mapping[str, str] = os.environ) -> Outside | None:
    """What an environment asks for; None where it asks for nothing.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    path, folder = environment.get(CONFIG_VARIABLE, ""), environment.get(PLAN_VARIABLE, "")
    words = " ".join(([f"--config {path}"] if path else []) + ([f"--plan {folder}"] if folder else []))
    if not words:
        return None
    options, marks = read_yaml(find_config(path)) if path else ({}, {})
    return Outside({**options, "plan": folder} if folder else options, path or words, marks, words)
