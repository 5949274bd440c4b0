"""Digests of every plan of the stored programs: `python -m tests.captured.goldens` says which differ, `--write` stores them anew.

A digest is of what runs (jobs, items, streams and priorities, events, waits of the host) and of the simulated times and peaks. A
change that is to leave plans alone leaves the digests alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from interlace.config import Config, load_config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import InterlaceError
from interlace.ir import Program
from interlace.ir.target import GPU
from interlace.planning.plan import make_plans
from interlace.scheduler.interleave import planner as interleave
from interlace.scheduler.simulate.simulator import Options, simulate
from tests.captured.build import CASES
from tests.captured.stored import programs_of
from tests.searches import WHOLE

FILE = Path(__file__).with_name("goldens.json")
OFFLOAD = {"fraction": 1.0, "min_bytes": 64}
CONFIGS: dict[str, Config] = {
    **{name: load_config(name) for name in ("baseline", "demo")},
    "dx-first": make_config({"memory_budget": "+1GB", "schedule_1f1b": {"interleave": "dx-first"}}),
    "dx-first, half offloaded": make_config(
        {
            "memory_budget": "+1GB",
            "schedule_1f1b": {"interleave": "dx-first"},
            "offload_activations": {"fraction": 0.5, "min_bytes": "1MiB"},
        }
    ),
    "mixed": make_config({"schedule_1f1b": {"interleave": "mixed"}}),
    "mixed, offload, held": make_config(
        {
            "schedule_1f1b": {"interleave": "mixed", "only_gains": False},
            "offload_activations": OFFLOAD,
            "throttle_host": {"syncs": "job-ends"},
        }
    ),
    "zb-h1, offload": make_config({"schedule_1f1b": {"interleave": "zb-h1"}, "offload_activations": OFFLOAD}),
    "weight_delay 1": make_config({"schedule_1f1b": {"interleave": "dx-first", "weight_delay": 1, "only_gains": False}}),
}
SEARCHED = ("mixed",)
"""The search takes nine tenths of the time; all others keep a pair's first order."""


def digest_of_plan(program: Program) -> list[Any]:
    """What a rank runs, in a form that no name of a field is part of."""
    return [
        [[job.name, job.kind, job.micro_batch, job.items] for job in program.jobs],
        [[op.id, op.name, op.operands, op.results, op.stream, op.priority, op.origin] for op in program.ops],
        [[event.name, event.record, event.waits] for event in program.events],
        [[job.host_waits] for job in program.jobs],
        [[value.id, value.memory, value.storage, value.persistable] for value in program.values],
    ]


def digest_of_times(plans: Sequence[Program], cost: CostModel) -> list[Any]:
    """Simulated steps and peaks of all ranks; a world that is not whole has none."""
    if len(plans) != plans[0].world:
        return []
    result = simulate(plans, cost, Options(), target=GPU)
    return [[rank.step_ns, rank.peak_bytes] for rank in result.ranks]


def digest(name: str, title: str) -> list[str]:
    """Of a case under a configuration: its plans and its times, or why there is no plan."""
    cost, config = CostModel(load_profile("h200")), CONFIGS[title]
    work, interleave.SEARCH_WORK = interleave.SEARCH_WORK, WHOLE if title in SEARCHED else 0
    try:
        plans = [plan.program for plan in make_plans(programs_of(name), config, cost, "h200")]
        found = [[digest_of_plan(plan) for plan in plans], digest_of_times(plans, cost)]
    except InterlaceError as error:
        return [type(error).__name__]
    finally:
        interleave.SEARCH_WORK = work
    return [hashlib.blake2b(json.dumps(each).encode(), digest_size=8).hexdigest() for each in found]


def digests(names: Sequence[str], titles: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Case, configuration and digest, on all cores."""
    pairs = [(name, title) for name in names for title in titles]
    with ProcessPoolExecutor() as pool:
        yield from ((name, title, found) for (name, title), found in zip(pairs, pool.map(digest, *zip(*pairs, strict=True)), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the digests of what is planned now")
    parser.add_argument("--config", action="append", choices=CONFIGS, help="only these")
    parser.add_argument("--case", action="append", choices=CASES, help="only these")
    args = parser.parse_args()
    known: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    different = 0
    for name, title, found in digests(args.case or list(CASES), args.config or list(CONFIGS)):
        before = known.setdefault(name, {}).get(title, [])
        if found != before:
            different += 1
            print(f"{time.strftime('%X')} {name}: {title}: {before} -> {found}", flush=True)
        known[name][title] = found
    if args.write:
        FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{different} plans differ")
    return int(bool(different) and not args.write)


if __name__ == "__main__":
    raise SystemExit(main())
