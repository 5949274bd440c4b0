"""Dotted module names for operations, from parameter names, Paddle's class paths and the data flow.

Paddle labels forward operations with a path of class names (`/GPT/Block_2/Linear_1/`), and backward operations not at all. The
dotted name of a parameter that an operation reads tells which module its path means, and so which modules the path's parents mean. A
backward operation belongs to the layer of the forward operation whose saved values it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from interlace.ir import ABSENT, Op, Value
from interlace.ir.kinds import BOUNDARY, PARAMETER, is_collective


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
    """The same operations with `layer` set if it is known; `paths` has Paddle's class path of each operation.

    In the optimizer only collectives get a layer: that of the gradient or parameter which they carry, if it belongs to one layer.
    """
    owners = _owners(ops, values, paths, names)
    modules = _modules_of_paths(ops, paths, owners)
    layers: dict[int, str] = {}
    flow = _Flow(owners)
    for op, path in zip(ops, paths, strict=True):
        layers[op.id] = modules.get(path, "") or flow.layer_of(op, layers)
        flow.add(op)
    shown = {op.id: layers[op.id] for op in ops if op.role != "optimize" or is_collective(op)}
    return [msgspec.structs.replace(op, layer=shown[op.id]) if shown.get(op.id) else op for op in ops]


def _owners(ops: Sequence[Op], values: Sequence[Value], paths: Sequence[str], names: LayerNames) -> dict[int, str]:
    """Value id -> the module that owns the parameter that it is, or that it is derived from outside of all layers (gathered in sharding
    stage 3, cast)."""
    found: dict[int, str] = {}
    constants: set[int] = {ABSENT}
    for op, path in zip(ops, paths, strict=True):
        read = set(op.operands) - constants
        if op.name == PARAMETER:
            found[op.results[0]] = names.owners.get(values[op.results[0]].name, "")
        elif op.name not in BOUNDARY and not op.operands:
            constants.update(op.results)
        elif not path and op.role != "optimize" and len(modules := {found.get(value, "") for value in read}) == 1:
            found.update(dict.fromkeys(op.results, modules.pop()))
    return {value: module for value, module in found.items() if module}


@dataclass(slots=True)
class _Flow:
    """The operations seen so far, by the values that they compute, read and write; `owners` has the modules of parameters."""

    owners: Mapping[int, str]
    made_by: dict[int, Op] = field(default_factory=dict)
    read_by: dict[int, list[Op]] = field(default_factory=dict)
    written_by: dict[int, Op] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        """Add the next operation."""
        self.made_by.update(dict.fromkeys(op.results, op))
        self.written_by.update({op.operands[operand]: op for _, operand in op.inplace})
        for value in set(op.operands) - {ABSENT}:
            self.read_by.setdefault(value, []).append(op)

    def layer_of(self, op: Op, layers: Mapping[int, str]) -> str:
        """The layer of the parameter that an operation gathers or casts, or of the forward operation that it differentiates, else of its
        first operand that has a layer. In the optimizer: the layer of its operands, if they have only one.
        """
        if op.role == "optimize":
            found = {self._last(value, layers) for value in op.operands} - {""}
            return found.pop() if len(found) == 1 else ""
        if op.name != PARAMETER and op.results and op.results[0] in self.owners:
            return self.owners[op.results[0]]
        twin = self._differentiated(op)
        near = [twin] if twin else []
        near += [self.made_by[value] for value in op.operands if value in self.made_by]
        return next((layers[other.id] for other in near if layers[other.id]), "")

    def _last(self, value: int, layers: Mapping[int, str]) -> str:
        """The layer of the operation that wrote a value last, else of the value's owner."""
        writer = self.written_by.get(value) or self.made_by.get(value)
        return (layers[writer.id] if writer else "") or self.owners.get(value, "")

    def _differentiated(self, op: Op) -> Op | None:
        if not op.kind.endswith("_grad"):
            return None
        base, mine = op.kind.removesuffix("_grad"), set(op.operands) - {ABSENT}
        near = [user for value in sorted(mine) for user in self.read_by.get(value, ()) if user.kind == base]
        near += [self.made_by[value] for value in sorted(mine) if value in self.made_by and self.made_by[value].kind == base]
        return max(near, key=lambda other: len(mine & {*other.operands, *other.results}), default=None)


def _modules_of_paths(ops: Sequence[Op], paths: Sequence[str], owners: Mapping[int, str]) -> dict[str, str]:
    """Class path -> module, from the parameters that its operations read, else from the paths below it, else the path itself, dotted."""
    votes: dict[str, Counter[str]] = {}
    for op, path in zip(ops, paths, strict=True):
        for owner in (owners[value] for value in op.operands if path and value in owners):
            votes.setdefault(path, Counter())[owner] += 1
    known = {path: min(count, key=lambda o: (-count[o], o)) for path, count in votes.items()}
    for path in sorted(known, key=lambda p: (-p.count("/"), p)):
        _learn_parents(path, known)
    return {path: known.get(path, _dotted(path)) for path in set(paths) if path}


def _learn_parents(path: str, known: dict[str, str]) -> None:
    parent, module = path.rstrip("/").rpartition("/")[0] + "/", _parent_module(known[path])
    if parent.count("/") > 2 and module:
        known.setdefault(parent, module)
        _learn_parents(parent, known)


def _parent_module(module: str) -> str:
    """The parent of a module in Paddle's class paths, which leave out containers: that of `blocks.2` is the module that has `blocks`."""
    parent, _, last = module.rpartition(".")
    return parent.rpartition(".")[0] if last.isdigit() else parent


def _dotted(path: str) -> str:
    return ".".join(part for part in path.split("/")[2:] if part)
