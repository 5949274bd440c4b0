"""What a pass is, and the registry that names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec

from interlace.errors import PassError
from interlace.ir import Op, Program
from interlace.ir.remarks import Fact, Place, Remark, remark

if TYPE_CHECKING:
    from interlace.cost_model import Costs

Decides = Literal["", "recomputation", "schedule", "states", "offload", "memory-returned", "transfers", "host-waits"]
"""Decisions that planning searches, comparing the alternatives by the simulated whole step (`planning/variants.py`)."""


@dataclass(slots=True)
class Context:
    """What a pass may use, and where it reports.

    Attributes:
        cost: The cost model.
        remarks: The reports of the pass.
        facts: Results of `Pass.facts`, indexed by rank; only this rank's if the others are unknown; empty if the pass gathers none.
        is_whole: Whether `facts` covers every rank of the world.
        memo: Cache of results for the same programs, shared by the plans that are compared.
        memory_limit: Live device bytes that the rank may hold if operations run one after the other: its memory budget, less what side
            streams hold on a GPU; None without a budget.
        extra_bytes: Live bytes by which the order chosen for a job may exceed running its parts one after another
            (`memory_budget: +8GB`).
    """

    cost: Costs
    remarks: list[Remark] = field(default_factory=list)
    facts: Sequence[Any] = ()
    is_whole: bool = False
    memory_limit: int | None = None
    extra_bytes: int = 0
    memo: dict[Any, Any] = field(default_factory=dict)

    def applied(self, rule: str, at: Op | Place | None = None, /, **facts: Fact) -> None:
        """Report something done; see `Remark` and `remark`."""
        self.remarks.append(remark("applied", rule, at, **facts))

    def declined(self, rule: str, at: Op | Place | None = None, /, **facts: Fact) -> None:
        """Report something not done; the rule gives the reason."""
        self.remarks.append(remark("declined", rule, at, **facts))

    def found(self, rule: str, at: Op | Place | None = None, /, **facts: Fact) -> None:
        """Report figures."""
        self.remarks.append(remark("analysis", rule, at, **facts))


class Pass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rewrite of a program: options are fields, the contract is in class attributes, and `run` returns a new program.

    A pass runs in three phases: `facts` returns what this rank knows, the facts of all ranks are gathered, and `run` decides from them
    and rewrites. Ranks do not communicate in `run`: the same facts lead to the same decision everywhere.

    Attributes:
        name: Kebab-case name, the same words as the file and the class.
        needs: Capabilities that earlier passes must give.
        gives: Capabilities that hold once it has run.
        after: Names of passes that must come before it, if they run at all.
        is_default: Whether it runs unless it is turned off.
        instead_of_off: What to write in place of `off` where other passes need what it gives.
        follows_budget: Whether it runs whenever a `memory_budget` is given, unless it is turned off; the budget then decides what it does.
        decides: The decision of this pass that planning searches, if any; no two passes of a pipeline have the same one.
        in_baseline: Whether it also runs for Paddle's baseline, which everything is compared with.
        in_drafts: Whether it affects the simulated step; other passes are left out of plans that are only compared.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()
    after: ClassVar[tuple[str, ...]] = ()
    is_default: ClassVar[bool] = False
    instead_of_off: ClassVar[str] = ""
    follows_budget: ClassVar[bool] = False
    decides: ClassVar[Decides] = ""
    in_baseline: ClassVar[bool] = True
    in_drafts: ClassVar[bool] = True

    def mistake(self, has_budget: bool = False) -> tuple[str, str] | None:
        """An invalid option (empty: the combination is invalid), and what was found and expected; None if all are valid.
        `has_budget`: whether the configuration also sets a `memory_budget`."""
        return None

    @property
    def asks_ranks(self) -> bool:
        """Whether it gathers facts, so that all ranks must run it together."""
        return type(self).facts is not Pass.facts

    def facts(self, program: Program, context: Context) -> Any:
        """What the decision needs to know about this rank, as a record that msgspec can encode; None if it needs no other ranks."""
        return None

    def run(self, program: Program, context: Context) -> Program:
        """Return a new program; the given one is untouched."""
        raise NotImplementedError(f"pass {self.name!r} has no run()")


def check_unscheduled(program: Program) -> None:
    """Raise PassError if the program has jobs already."""
    if program.jobs:
        count = len(program.jobs)
        raise PassError(f"the program has a schedule already ({count} jobs); put this pass before 'schedule-1f1b'")


REGISTRY: dict[str, type[Pass]] = {}
"""Passes by name."""
P = TypeVar("P", bound=type[Pass])


def is_built_in(kind: type[Pass]) -> bool:
    """Whether a pass comes with Interlace rather than from a user."""
    return kind.__module__.startswith(f"{__package__}.")


def option_name(name: str) -> str:
    """A pass's name as options spell it.

    >>> option_name("split-backward")
    'split_backward'
    """
    return name.replace("-", "_")


def register(kind: P) -> P:
    """Class decorator that registers a pass, built-in or a user's own, under its name. Raises PassError if the class is not a pass, has
    no name, or has the name of another class."""
    if not (isinstance(kind, type) and issubclass(kind, Pass)):
        raise PassError(f"register() got {kind!r}; expected a subclass of interlace.passes.Pass")
    if not kind.name:
        raise PassError(f'pass class {kind.__qualname__} has no name; give it `name = "kebab-case"`')
    known = REGISTRY.get(kind.name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise PassError(f"pass {kind.name!r} is registered already by {known.__module__}.{known.__qualname__}; choose another name")
    REGISTRY[kind.name] = kind
    return kind


def find_pass(name: str) -> Callable[..., Pass]:
    """The pass class with this name. Raises PassError, which lists the known names, if there is none."""
    if name not in REGISTRY:
        raise PassError(f"no pass {name!r}; there are {sorted(REGISTRY)}; a pass of your own needs @interlace.passes.register")
    return REGISTRY[name]
