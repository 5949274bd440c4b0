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

Decides = Literal["", "recomputation", "schedule", "states", "offload", "transfers", "host-waits"]
"""What a pass decides that planning looks for an answer to, and compares answers by the whole step (`planning/variants.py`)."""


@dataclass(slots=True)
class Context:
    """What a pass may ask and where it reports.

    Attributes:
        facts: What `Pass.facts` gave on every rank, by rank; this rank's alone where the others are not known; empty without facts.
        is_whole: Whether `facts` are of every rank of the world.
        memo: Results for the same programs, where several forms of a plan are compared.
        memory_limit: Live device bytes that the rank may hold if operations run one after the other: its memory budget, less what side
            streams hold on a GPU; None without a budget.
        extra_bytes: Live bytes by which the order of a job may exceed its parts one after another (`memory_budget: +8GB`).
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
        """Report something not done: the rule says why."""
        self.remarks.append(remark("declined", rule, at, **facts))

    def found(self, rule: str, at: Op | Place | None = None, /, **facts: Fact) -> None:
        """Report figures."""
        self.remarks.append(remark("analysis", rule, at, **facts))


class Pass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rewrite of a program: options as fields, a contract as class attributes, `run` gives a new program.

    A pass runs in three phases: `facts` says what this rank knows, facts of all ranks are gathered, and `run` decides with them and
    rewrites. In `run` ranks do not talk: the same facts give the same decision everywhere.

    Attributes:
        name: Kebab-case name, the same words as the file and the class.
        needs: Capabilities that passes before it must give.
        gives: Capabilities that hold after it.
        after: Names of passes that it must run after, if they run at all.
        is_default: Whether it runs unless it is turned off.
        instead_of_off: What to write in place of `off` where other passes need what it gives.
        follows_budget: Whether it runs wherever a `memory_budget` is given, unless it is turned off; the budget says what it does.
        decides: What planning chooses of it, where it chooses something; at most one pass of a pipeline decides the same.
        in_baseline: Whether Paddle's baseline, which everything is compared with, has it too.
        in_drafts: Whether it matters for the simulated step, so that plans that are only compared have it.
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
        """An option that cannot be as it is (empty: the options together), and what was found and expected; None where all is well.
        `has_budget`: whether a `memory_budget` stands beside the passes."""
        return None

    @property
    def asks_ranks(self) -> bool:
        """Whether it has facts to gather, so that all ranks must run it together."""
        return type(self).facts is not Pass.facts

    def facts(self, program: Program, context: Context) -> Any:
        """What the decision needs of this rank, as a record that msgspec encodes; None where it needs nothing of other ranks."""
        return None

    def run(self, program: Program, context: Context) -> Program:
        """A new program; the given one is untouched."""
        raise NotImplementedError(f"pass {self.name!r} has no run()")


def check_unscheduled(program: Program) -> None:
    """Refuse a program with jobs. Raises PassError where it has some."""
    if program.jobs:
        count = len(program.jobs)
        raise PassError(f"the program has a schedule already ({count} jobs); put this pass before 'schedule-1f1b'")


REGISTRY: dict[str, type[Pass]] = {}
"""Passes by name."""
P = TypeVar("P", bound=type[Pass])


def is_built_in(kind: type[Pass]) -> bool:
    """Whether a pass is one of ours, and not a user's."""
    return kind.__module__.startswith(f"{__package__}.")


def option_name(name: str) -> str:
    """A pass's name as options spell it.

    >>> option_name("split-backward")
    'split_backward'
    """
    return name.replace("-", "_")


def register(kind: P) -> P:
    """Class decorator that makes a pass known under its name, ours and a user's own alike. Raises PassError where it is no pass, has no
    name, or the name is taken by another class."""
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
    """The pass class of a name. Raises PassError, with the list of those there are, where there is no such pass."""
    if name not in REGISTRY:
        raise PassError(f"no pass {name!r}; there are {sorted(REGISTRY)}; a pass of your own needs @interlace.passes.register")
    return REGISTRY[name]
