"""Reading the plans that a command simulates, and whether two of them can be compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from interlace.cli.target import Setting
    from interlace.ir import Program
    from interlace.scheduler.simulate.simulator import Result


def simulated(paths: Sequence[str], setting: Setting, p2p: Literal["rendezvous", "buffered"] | None = None) -> Result:
    """A step of these plans; programs without jobs run in Paddle's own order.

    Raises:
        PlanError, Stall: A rank is there twice, or as the simulator.
    """
    from interlace.planning.stock import stock_plan

    return setting.simulate([stock_plan(program, setting.costs) for program in read_plans(paths)], p2p)


def read_plans(paths: Sequence[str]) -> list[Program]:
    """The programs of files and folders, by rank; what is missing is told.

    Raises:
        PlanError: A rank is there twice.
    """
    from interlace.errors import PlanError
    from interlace.ir import load
    from interlace.ir.dump import find_dumps
    from interlace.ir.stand_ins import missing_ranks
    from interlace.units import ranks_text

    programs = sorted((load(path) for path in find_dumps(paths)), key=lambda program: program.rank)
    ranks = [program.rank for program in programs]
    if len(set(ranks)) < len(ranks):
        raise PlanError(f"{list(paths)}: rank {next(r for r in ranks if ranks.count(r) > 1)} is there twice; give one dump a rank")
    missing = missing_ranks(programs)
    if missing:
        print(f"no dump of {ranks_text(missing)}: assumed to be ready whenever they are needed", file=sys.stderr)
    return programs


def require_same_model(plan: Sequence[Program], beside: Sequence[Program]) -> None:
    """Times can be compared where the same model runs on the same world with the same micro-batches.

    Raises:
        PlanError: They differ; it says in what.
    """
    from interlace.errors import PlanError

    for name, find in (("world", _world), ("number of micro-batches", _micro_batches), ("list of forward operations", _forward)):
        mine, other = {p.rank: find(p) for p in plan}, {p.rank: find(p) for p in beside}
        rank = next((rank for rank in mine if rank in other and mine[rank] != other[rank]), None)
        if rank is not None:
            found = "" if isinstance(mine[rank], dict) else f" ({mine[rank]} and {other[rank]})"
            raise PlanError(f"--beside: rank {rank} has another {name}{found}; expected plans of the same model, layout and batch")


def _world(program: Program) -> object:
    return program.world


def _micro_batches(program: Program) -> object:
    return program.pipeline.num_micro_batches


def _forward(program: Program) -> object:
    """What no pass changes: names and shapes of the model's own forward operations, and how many of each."""
    from collections import Counter

    from interlace.ir.kinds import is_copy

    shapes = {value.id: value.shape for value in program.values}
    return Counter((op.name, tuple(shapes.get(value) for value in op.results))
                   for op in program.ops if op.role == "forward" and not is_copy(op))  # fmt: skip
