"""What a pass is, and the registry that names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from interlace.errors import PassError
from interlace.ir import Op, Program
from interlace.ir.verify import describe
from interlace.passes.peers import gather

if TYPE_CHECKING:
    from interlace.cost_model import Costs
    from interlace.passes.peers import Peers

Told = TypeVar("Told")


@dataclass(slots=True)
class Context:
    """What a pass may ask and where it reports.

    Attributes:
        cost: Times of operations, collectives and copies.
        peers: The other ranks, where they plan at the same time.
        later: Names of the passes that run after this one.
        memo: Results for the same programs, where several forms of a plan are compared.
        reserve_bytes: Device bytes that passes with a memory budget leave free for what later passes add.
        changed: What was moved or made, one line each.
        declined: What was left as it was, with the reason.
    """

    cost: Costs
    changed: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    peers: Peers | None = None
    reserve_bytes: int = 0
    later: tuple[str, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict)

    def gather(self, topic: str, mine: Told) -> list[Told]:
        """What every rank says on a topic, by rank; only this one's own where nobody else plans at the same time."""
        return gather(self.peers, topic, mine)

    def change(self, op: Op, what: str) -> None:
        """Report something done at an operation."""
        self.changed.append(f"{describe(op)}: {what}")

    def decline(self, op: Op, why: str) -> None:
        """Report something not done at an operation, and why."""
        self.declined.append(f"{describe(op)}: {why}")


class Pass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rewrite of a program: options as fields, a contract as class attributes, `run` gives a new program.

    Attributes:
        name: Kebab-case name, the same words as the file and the class.
        needs: Capabilities that passes before it must give.
        gives: Capabilities that hold after it.
        after: Names of passes that it must run after, if they run at all.
        renamed: Former names of options -> the names they have now; the error for a former name says the new one.
        asks_ranks: Whether it gathers from other ranks while it runs, so that all must run it.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()
    after: ClassVar[tuple[str, ...]] = ()
    renamed: ClassVar[Mapping[str, str]] = {}
    asks_ranks: ClassVar[bool] = True

    def run(self, program: Program, context: Context) -> Program:
        """A new program; the given one is untouched."""
        raise NotImplementedError(f"pass {self.name!r} has no run()")

    def fallbacks(self) -> tuple[Pass, ...]:
        """Milder forms of this pass, the plainest last, to take where the step would be slower than with the plainest."""
        return ()

    def draft(self) -> Pass:
        """This pass without what takes time and hardly changes the step's, where a plan is only made to be judged."""
        return self

    def label(self) -> str:
        """This form in a few words, where reports compare it with another."""
        return self.name


REGISTRY: dict[str, type[Pass]] = {}
"""Passes by name."""
P = TypeVar("P", bound=type[Pass])


def register(kind: P) -> P:
    """Class decorator that makes a pass known under its name, ours and a user's own alike.

    Raises:
        PassError: It is no pass, has no name, or the name is taken by another class.
    """
    if not (isinstance(kind, type) and issubclass(kind, Pass)):
        raise PassError(f"register() got {kind!r}; expected a subclass of interlace.passes.Pass")
    if not kind.name:
        raise PassError(f"pass class {kind.__qualname__} has no name; give it `name = \"kebab-case\"`")
    known = REGISTRY.get(kind.name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise PassError(f"pass {kind.name!r} is registered already by {known.__module__}.{known.__qualname__}; choose another name")
    REGISTRY[kind.name] = kind
    return kind


def find_pass(name: str) -> Callable[..., Pass]:
    """The pass class of a name.

    Raises:
        PassError: No such pass; the message lists those there are.
    """
    if name not in REGISTRY:
        raise PassError(f"no pass {name!r}; there are {sorted(REGISTRY)}; a pass of your own needs @interlace.passes.register")
    return REGISTRY[name]
