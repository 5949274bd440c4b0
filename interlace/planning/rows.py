"""Decisions as small text files: a row of slots for each stage, and a configuration that plans these rows again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from interlace.config import BUDGET, POOL_BUDGET, Beyond
from interlace.cost_model.profile import is_path
from interlace.errors import PlanError
from interlace.files import read_file
from interlace.ir import Program, load
from interlace.ir.dump import MOST_BYTES, find_dumps, write_whole
from interlace.ir.schedule import Slot, parse_rows, show_row
from interlace.passes import Schedule1F1B
from interlace.passes.base import REGISTRY, Pass, option_name
from interlace.planning.plan import Plan
from interlace.scheduler.jobs.parts import slot_text

ROWS, CONFIG = "schedule.rows", "schedule.yaml"
"""Names of the two files in a folder of plans."""


def rows_of(programs: Sequence[Program]) -> dict[int, list[Slot]]:
    """Stage -> its slots, read from the jobs of its first program in `programs`. Raises PlanError if a program has no jobs."""
    found: dict[int, list[Slot]] = {}
    for program in sorted(programs, key=lambda program: program.rank):
        if not program.jobs:
            raise PlanError(f"rank {program.rank}: no jobs, so no rows; expected a plan, as `interlace plan` makes it")
        stage = program.pipeline.stage
        if stage not in found:
            found |= parse_rows(f"{stage} | {' '.join(slot_text(job.name) for job in program.jobs)}")
    return dict(sorted(found.items()))


def rows_text(rows: dict[int, list[Slot]]) -> str:
    """The text of a schedule file."""
    return "".join(show_row(stage, slots) + "\n" for stage, slots in rows.items())


def write_rows(plans: Sequence[Plan], folder: Path, shown_as: Path) -> bool:
    """Write `schedule.rows` to a folder, and `schedule.yaml`, a configuration that plans these rows with all other options again; its first
    line names the folder as `shown_as`. Returns whether it did: if a stage is missing, nothing is written, as the schedule file would be
    refused."""
    rows = rows_of([plan.program for plan in plans])
    if len(rows) < plans[0].program.pipeline.num_stages:
        return False
    write_whole(folder / ROWS, rows_text(rows).encode())
    beyond = str(Beyond(plans[0].extra_bytes)) if plans[0].extra_bytes else None
    own = f"{plans[0].memory_budget}B" if plans[0].memory_budget else None
    held = beyond if plans[0].beside_baseline and beyond else own or beyond
    budget = {BUDGET: held} if held else {}
    budget |= {POOL_BUDGET: f"{plans[0].pool_budget}B"} if plans[0].pool_budget else {}
    device = os.path.abspath(plans[0].profile) if is_path(plans[0].profile) else plans[0].profile
    options = {"device": device, **budget, **_options(plans[0].passes)}
    text = f"# The schedule in {shown_as / ROWS}, and all other options as they were decided; edit the rows and plan with this file.\n"
    write_whole(folder / CONFIG, (text + yaml.safe_dump(options, sort_keys=False, default_flow_style=None, width=120)).encode())
    return True


FORCED: dict[str, dict[str, Any]] = {
    "overlap-column-backward": {"only_gains": False},
    "offload-activations": {"min_bytes": 1},
}
"""Options, by pass, that make decisions for a large model apply to a small one, where they gain nothing and values are small."""


def forced(folder: Path) -> dict[str, Any]:
    """Options that apply the decisions of a folder of plans to another model, whether or not it gains from them: the rows, the form of
    jobs, what is split, overlapped and recomputed. If the plans move activations to the host, all activations that can move do.

    Raises PlanError if the folder does not have both files, or one of its plans cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file() or not (folder / ROWS).is_file():
        raise PlanError(
            f"{folder}: no {ROWS} with {CONFIG}; expected the folder of the plans of all stages, as `interlace plan -o` writes it"
        )
    options: dict[str, Any] = yaml.safe_load(read_file(path, MOST_BYTES, f"what `interlace plan` wrote as {CONFIG}", PlanError))
    options[BUDGET] = options[POOL_BUDGET] = "off"
    for name, given in FORCED.items():
        mine = options.get(option_name(name), "off")
        if mine not in ("off", False):  # YAML has `off` as a boolean
            options[option_name(name)] = {**(mine if isinstance(mine, dict) else {}), **given}
    options["schedule_1f1b"]["schedule_file"] = os.path.abspath(folder / ROWS)
    moves = any(value.memory == "pinned" for file in find_dumps([folder]) for value in load(file).values)
    options["offload_activations"] = {"fraction": 1.0, **FORCED["offload-activations"]} if moves else "off"
    return options


def _options(passes: Sequence[Pass]) -> dict[str, Any]:
    """The passes as entries of a configuration; passes that are on by default but did not run are `off`."""
    options: dict[str, Any] = {option_name(kind.name): "off" for kind in REGISTRY.values() if kind.is_default}
    for each in passes:
        if each.decides == "schedule":
            each = _given(cast("Schedule1F1B", each))
        defaults = {field.name: _default(field) for field in msgspec.structs.fields(each)}
        differ = {name: value for name, value in msgspec.to_builtins(each).items() if value != defaults[name]}
        options[option_name(each.name)] = _plain(differ) or "on"
    return options


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """An option's default as plain data; `NODEFAULT`, which equals no value, if it has none."""
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.to_builtins(field.default_factory())
    return field.default if field.default is msgspec.NODEFAULT else msgspec.to_builtins(field.default)


def _given(schedule: Schedule1F1B) -> Schedule1F1B:
    """The schedule with a schedule file in place of the options that determine the rows; options for the order inside jobs stay."""
    form = schedule.interleave if schedule.mixes() else "auto"
    return msgspec.structs.replace(
        schedule, schedule_file=ROWS, interleave=form, weight_delay=0, weight_delay_at_end=None, depth=(), only_gains=True
    )


def _plain(value: Any) -> Any:
    """The value as YAML represents it: tuples become lists."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
