"""Falling back to Paddle's baseline when a plan of ours fails: how ranks agree on a failure, and how a failed step is undone.

A plan can fail before anything runs (in planning, proof, lowering, or when Paddle's executor takes the plan), which changes nothing, or in
its first step. Before that step, everything persistent that it writes is copied to host memory: parameters, optimizer state, gradient
buffers, running statistics, and the state of the random generators. After a failure this is restored on every rank, and the step runs again
with Paddle's baseline, so that nothing is lost or applied twice.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import paddle
from paddle.base import core
from paddle.base.executor import _ExecutorCache

from interlace.bridge.host_state import await_copies
from interlace.bridge.targets import choose_device
from interlace.errors import BudgetError, ConfigError, LoadError, OutputError, PlanError
from interlace.ir import Program
from interlace.ir.kinds import DATA, KEYWORD, PARAMETER, views_of
from interlace.ir.storage import Storages
from interlace.outside import launched
from interlace.planning.peers import Peers, TopicError, gather
from interlace.planning.world import LinkError
from interlace.version import VERSION

USERS = (ConfigError, BudgetError, LoadError, OutputError)
"""Errors in what the user asked for, after which no other plan is run instead."""
_PADDLES = re.compile(r"\w*Error: ")
DECLARING = (DATA, PARAMETER, KEYWORD)
MOST_OF_HOST = 0.5
"""Share of the host's free memory that the copies of all its ranks may take."""


class Fault(msgspec.Struct, frozen=True):
    """The outcome of a piece of work on a rank.

    Attributes:
        text: What failed; empty if nothing did.
        follows: Whether it failed only because another rank had failed.
        users: Whether the error is in what the user asked for (`USERS`).
    """

    text: str = ""
    follows: bool = False
    users: bool = False


def fault_of(error: Exception) -> Fault:
    """An error as reported to other ranks."""
    said = str(error) if isinstance(error, PlanError) else traceback.format_exception_only(error)[-1].strip()
    return Fault(_short(said), isinstance(error, (TopicError, LinkError)), isinstance(error, USERS))


def _short(text: str) -> str:
    """The message of an error in Paddle's C++ code, without the C++ and Python stacks; at most 600 characters."""
    told = [line.strip() for line in text.splitlines() if line.strip()]
    summary = [k for k, line in enumerate(told) if k and _PADDLES.match(line)]
    return " ".join(told[summary[-1] :] if summary else told)[:600]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ranks agree on: the first fault that does not follow from another rank's, if there is one, and the rank that has it."""

    rank: int
    fault: Fault

    def text(self, world: int) -> str:
        """The text for users."""
        return f"rank {self.rank}: {self.fault.text}" if world > 1 else self.fault.text


def agreed(peers: Peers | None, topic: str, mine: Fault) -> Verdict | None:
    """The common verdict on a piece of work that each rank has done or failed in; None if all have done it.

    A rank that failed gets here while others still wait for it in an exchange on another topic. These get a TopicError, fail too, and then
    get here as well; meanwhile this rank tries again.
    """
    while True:
        try:
            said = gather(peers, topic, mine)
        except TopicError:
            continue
        break
    failed = [(each.follows, rank) for rank, each in enumerate(said) if each.text]
    rank = min(failed)[1] if failed else -1
    return Verdict(rank, said[rank]) if failed else None


class OneBuild(_ExecutorCache):  # type: ignore[misc]
    """The executors of one plan. When the first one is built, ranks exchange whether Paddle's executor took the plan, before anything runs.

    Paddle's own cache does not distinguish plans if nothing is fetched.
    """

    def __init__(self, peers: Peers | None) -> None:
        super().__init__()
        self.peers, self.is_agreed = peers, False

    def _get_pir_program_and_executor(self, cached_data: Any) -> Any:
        build = super()._get_pir_program_and_executor
        if self.is_agreed:
            return build(cached_data)
        made, failure = attempt(lambda: build(cached_data))
        verdict = agreed(self.peers, "executor built", fault_of(failure) if failure else Fault())
        if verdict is not None:
            raise NotBuiltError(verdict) from failure
        self.is_agreed = True
        return made


class NotBuiltError(Exception):
    """Paddle's executor did not take a plan on some rank; raised on all ranks."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.fault.text)
        self.verdict = verdict


class Lasting:
    """A copy of everything persistent that a step writes, or the reason why there is none (`why_none`)."""

    def __init__(self, program: Program) -> None:
        scope = paddle.static.global_scope()
        self.tensors: dict[str, tuple[Any, Any]] = {}
        found = {name: variable.get_tensor() for name in written_names(program) if (variable := scope.find_var(name)) is not None}
        found = {name: tensor for name, tensor in found.items() if tensor._is_initialized()}
        self.why_none = _why_too_much(sum(map(_size_bytes, found.values())))
        if self.why_none:
            return
        await_copies(choose_device())
        for name, tensor in found.items():
            kept = core.DenseTensor()
            kept._copy_from(tensor, core.CPUPlace())
            self.tensors[name] = tensor, kept
        self.random = _random_states()

    def restore(self) -> None:
        """Restore everything in the same memory, which others may share."""
        for tensor, kept in self.tensors.values():
            tensor._copy_from(kept, tensor._place())
        for generator, state in self.random:
            generator.set_state(state)


def written_names(program: Program) -> list[str]:
    """Names of the persistent variables that a step writes."""
    storages, written = Storages(program), set[int]()
    for op in program.ops:
        if op.name not in DECLARING:
            views = {result for result, _ in views_of(op)}
            written.update(number for k, value in enumerate(op.results) if k not in views for number in storages.numbers(value))
    return sorted(
        {value.name for value in program.values if value.persistable and value.name and written.intersection(storages.numbers(value.id))}
    )


def _size_bytes(tensor: Any) -> int:
    return int(tensor._numel()) * int(core.size_of_dtype(tensor._dtype()))


def _why_too_much(size_bytes: int) -> str:
    """Why copies of this size are not made: the host has too little memory for those of all its ranks; empty if it has enough."""
    free_bytes = next(
        (int(line.split()[1]) << 10 for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")), size_bytes * 1000
    )
    ranks = launched("PADDLE_LOCAL_SIZE", 0) or paddle.distributed.ParallelEnv().world_size
    if size_bytes * ranks <= MOST_OF_HOST * free_bytes:
        return ""
    return f"{size_bytes >> 20} MiB on each of {ranks} rank(s) of this host, which has {free_bytes >> 20} MiB free"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _random_states() -> list[tuple[Any, Any]]:
    """Paddle's generators and their states."""
    place = paddle.base.framework._current_expected_place_()
    found = [core.default_cpu_generator()]
    if isinstance(place, paddle.CustomPlace):
        found.append(core.default_custom_device_generator(place))
    elif isinstance(place, paddle.CUDAPlace):
        found.append(core.default_cuda_generator(place.get_device_id()))
    return [(each, each.get_state()) for each in found]


def report_fault(folder: Path, plan: str, where: str, error: Exception | None, verdict: Verdict) -> str:
    """Write what is needed to diagnose a failure to a file of this rank; returns its path, empty if it could not be written."""
    text = "".join(traceback.format_exception(error)) if error is not None else f"{verdict.fault.text} (on rank {verdict.rank})\n"
    head = f"interlace {VERSION}, paddle {paddle.__version__}, {paddle.base.framework._current_expected_place_()}\n{plan}: {where}\n\n"
    path = folder / f"fault-rank{paddle.distributed.ParallelEnv().rank}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(head + text, encoding="utf-8")
    except OSError:
        return ""
    return os.fspath(path)


def attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of a piece of work and None, or None and the exception that it raised."""
    try:
        return work(), None
    except Exception as error:
        return None, error
