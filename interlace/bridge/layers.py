"""Dotted module names for operations, from parameter names, Paddle's class paths and the data flow.

Paddle labels forward operations with a path of class names (`/GPT/Block_2/Linear_1/`) and backward ones not at all. A
parameter's dotted name says which module a path stands for; a path's parents are then its parents' modules, and a backward
operation belongs to the forward operation whose saved values it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from interlace.ir import ABSENT, Op, Value
from interlace.ir.kinds import PARAMETER


class LayerNames(msgspec.Struct, frozen=True):
    """Parameter name in Paddle's scope (`linear_3.w_0`) -> dotted module path of its owner (`layers.1.attn.proj`)."""

    owners: Mapping[str, str] = {}

    @classmethod
    def of(cls, model: Any) -> LayerNames:
        """From a `paddle.nn.Layer`."""
        owners: dict[str, str] = {}
        for prefix, layer in model.named_sublayers(include_self=True):
            for param in layer._parameters.values():
                if param is not None:
                    owners.setdefault(param.name, prefix)
        return cls(owners)


def name_layers(ops: Sequence[Op], values: Sequence[Value], paths: Sequence[str], names: LayerNames) -> list[Op]:
    """The same operations with `layer` set where it is known; `paths` has Paddle's class path of each operation."""
    modules = _modules_of_paths(ops, values, paths, names)
    layers: dict[int, str] = {}
    flow = _Flow()
    for op, path in zip(ops, paths, strict=True):
        layers[op.id] = modules.get(path, "") or flow.layer_of(op, layers)
        flow.add(op)
    return [msgspec.structs.replace(op, layer=layers[op.id]) if layers[op.id] else op for op in ops]


@dataclass(slots=True)
class _Flow:
    """The operations seen so far, by the values that they compute and read."""

    made_by: dict[int, Op] = field(default_factory=dict)
    read_by: dict[int, list[Op]] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        """Add the next operation."""
        self.made_by.update(dict.fromkeys(op.results, op))
        for value in set(op.operands) - {ABSENT}:
            self.read_by.setdefault(value, []).append(op)

    def layer_of(self, op: Op, layers: Mapping[int, str]) -> str:
        """Of the forward operation it differentiates, else of the first operand that has one."""
        if op.role == "optimize":
            return ""
        twin = self._differentiated(op)
        near = [twin] if twin else []
        near += [self.made_by[value] for value in op.operands if value in self.made_by]
        return next((layers[other.id] for other in near if layers[other.id]), "")

    def _differentiated(self, op: Op) -> Op | None:
        if not op.kind.endswith("_grad"):
            return None
        base, mine = op.kind.removesuffix("_grad"), set(op.operands) - {ABSENT}
        near = [user for value in sorted(mine) for user in self.read_by.get(value, ()) if user.kind == base]
        near += [self.made_by[value] for value in sorted(mine) if value in self.made_by and self.made_by[value].kind == base]
        return max(near, key=lambda other: len(mine & {*other.operands, *other.results}), default=None)


def _modules_of_paths(ops: Sequence[Op], values: Sequence[Value], paths: Sequence[str], names: LayerNames) -> dict[str, str]:
    """Class path -> module: by the parameters its operations read, then by the paths below it, else the path itself."""
    parameter = {op.results[0]: values[op.results[0]].name for op in ops if op.name == PARAMETER}
    votes: dict[str, Counter[str]] = {}
    for op, path in zip(ops, paths, strict=True):
        for value in op.operands:
            owner = names.owners.get(parameter.get(value, ""), "")
            if path and owner:
                votes.setdefault(path, Counter())[owner] += 1
    known = {path: min(count, key=lambda o: (-count[o], o)) for path, count in votes.items()}
    for path in sorted(known, key=lambda p: (-p.count("/"), p)):
        _learn_parents(path, known)
    return {path: known.get(path, _dotted(path)) for path in set(paths) if path}


def _learn_parents(path: str, known: dict[str, str]) -> None:
    parent, module = _parent_path(path), _parent_module(known[path])
    if parent.count("/") > 2 and module:
        known.setdefault(parent, module)
        _learn_parents(parent, known)


def _parent_path(path: str) -> str:
    return path.rstrip("/").rpartition("/")[0] + "/"


def _parent_module(module: str) -> str:
    """Paddle's class paths leave out containers, so the parent of `blocks.2` is the module that has `blocks`."""
    parent, _, last = module.rpartition(".")
    return parent.rpartition(".")[0] if last.isdigit() else parent


def _dotted(path: str) -> str:
    return ".".join(part for part in path.split("/")[2:] if part)
