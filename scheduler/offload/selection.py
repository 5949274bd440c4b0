"""Options of offload, and matching of layers and operations by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, NamedTuple

import msgspec

from interlace.errors import ConfigError
from interlace.ir import Op, Program
from interlace.ir.kinds import is_boundary, layer_pattern
from interlace.ir.remarks import Remark, remark

Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


def mistake_of(modules: Sequence[str], fraction: float | None, has_budget: bool) -> tuple[str, str] | None:
    """What is wrong in options that say what to move: the option (empty for all of them) and why; None where nothing is."""
    if has_budget and fraction is not None:
        return "fraction", f"fraction={fraction} and memory_budget contradict each other; give the part to move, or the bytes to stay under"
    if has_budget or modules or fraction is not None:
        return None
    return "", (
        "on, but nothing says what to move; choose modules (such as [mlp]) or a fraction from 0 to 1, or write a memory_budget "
        "beside the passes"
    )


class OffloadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options. Without modules, a fraction or a memory budget nothing is moved; under a budget as little as necessary.

    Attributes:
        modules: Names or globs of layers (`mlp`, `layers.*.attn`) whose values are moved; empty means all layers, if a fraction or a
            budget is given. When: you know which layers hold the memory (see the page's memory section) and what hides their copies.
            Details: each pattern matches consecutive components of the dotted layer path of the operation that produces a value.
        exclude_ops: Values to keep on the device: patterns of operation names (`pd_op.softmax`) or of layers (`layers.0`). When: a value
            comes back too late (the page lists it), or its copy slows other work.
        min_bytes: Smaller values stay on the device. When: 1 MiB suits GPUs; small models on a CPU need a lower limit to move anything.
        fraction: Share of the eligible bytes of a micro-batch to move; by default all of them, or what the budget needs. When: to move a
            fixed share; to limit memory in bytes, set a `memory_budget` instead.
        keep_bytes: Least number of eligible bytes of a micro-batch that stay on the device; one number, or one for each stage. When: values
            of late layers would come back immediately: keep as many of them as memory allows.
        max_in_flight: Most copies in flight at a time in each direction; 0 allows no copies, none sets no limit. When: host memory or the
            PCIe link is shared with other work.
        include_integers: Move integer and bool values too. When: large index tensors or masks are among the saved values.
        prefetch_slack: Share of its duration (0 to 10) by which a copy back is issued before the latest possible time, because copies take
            longer while computation runs. When: raise it if the measured step waits for copies back, lower it if memory is short. Details:
            the planner uses less slack if there is no time for it, if the budget would be exceeded, or if less than three quarters of the
            saved bytes would remain saved; it uses none with `max_in_flight`.
    """

    modules: tuple[str, ...] = ()
    exclude_ops: tuple[str, ...] = ()
    min_bytes: Count = 1 << 20
    fraction: Share | None = None
    keep_bytes: Count | tuple[Count, ...] = 0
    max_in_flight: Count | None = None
    include_integers: bool = False
    prefetch_slack: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.25

    def asks_for_nothing(self, memory_budget: int | None) -> Remark | None:
        """Why the options, and the budget, ask for no copy at all; None if they ask for some."""
        if self.max_in_flight == 0:
            return remark("declined", "no-copy-allowed")
        if not self.modules and not self.fraction and not memory_budget:
            return remark("declined", "nothing-asked")
        return remark("declined", "fraction-zero") if self.fraction == 0 else None

    def keep_on(self, stage: int, num_stages: int) -> int:
        """Bytes to keep on a stage. Raises ConfigError if there is not one number for each stage."""
        if isinstance(self.keep_bytes, int):
            return self.keep_bytes
        if len(self.keep_bytes) != num_stages:
            raise ConfigError(
                f"offload: keep_bytes has {len(self.keep_bytes)} figures {list(self.keep_bytes)}, "
                f"expected one for each of the {num_stages} stages, or a single number"
            )
        return self.keep_bytes[stage]


def names_layer(pattern: str, layer: str) -> bool:
    """Whether a name or glob fits a run of components of a dotted layer path.

    >>> names_layer("mlp", "gpt.layers.0.mlp.fc1"), names_layer("layers.*.attn", "gpt.layers.3.attn")
    (True, True)
    >>> names_layer("ml", "mlp")
    False
    """
    wanted, parts = pattern.split("."), layer.split(".") if layer else []
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(fnmatchcase(parts[k + n], want) for n, want in enumerate(wanted)) for k in starts)


def names_op(pattern: str, op: Op) -> bool:
    """Whether a pattern fits an operation: its name, its kind, or its layer."""
    return fnmatchcase(op.name, pattern) or fnmatchcase(op.kind, pattern) or names_layer(pattern, op.layer)


class Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of layers and of operations in the forward of a rank."""

    layers: tuple[str, ...]
    ops: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> Names:
        """Of a program."""
        ops = [op for op in program.ops if op.role == "forward" and not is_boundary(op)]
        return cls(tuple(sorted({op.layer for op in ops})), tuple(sorted({op.name for op in ops})))


class Unknown(NamedTuple):
    """A pattern of an option that matches nothing, and the names of layers and operations there are."""

    option: Literal["modules", "exclude_ops"]
    pattern: str
    layers: tuple[str, ...]
    ops: tuple[str, ...] = ()

    def message(self) -> str:
        if self.option == "modules":
            return f"offload: modules: {self.pattern!r} fits no layer; there are {_list(self.layers)}"
        return (
            f"offload: exclude_ops: {self.pattern!r} fits no operation and no layer; there are {_list(self.ops)}; "
            f"layers: {_list(self.layers)}"
        )


def unknown_names(choice: OffloadOptions, there: Sequence[Names]) -> list[Unknown]:
    """Each pattern of the options that matches nothing on any rank."""
    layers = sorted({layer for names in there for layer in names.layers})
    ops = sorted({op for names in there for op in names.ops})
    short = tuple(sorted({layer_pattern(layer) for layer in layers if layer}))
    modules = [Unknown("modules", p, short) for p in choice.modules if not any(names_layer(p, layer) for layer in layers)]
    every = [*(Op(-1, op, (), (), "forward") for op in ops), *(Op(-1, "", (), (), "forward", layer=layer) for layer in layers)]
    excluded = [Unknown("exclude_ops", p, short, tuple(ops)) for p in choice.exclude_ops if not any(names_op(p, op) for op in every)]
    return modules + excluded


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:40]) + (f", ... ({len(names) - 40} more)" if len(names) > 40 else "") if names else "none"
