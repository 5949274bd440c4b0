"""`narrow-gathers`: an all_gather from whose result every rank keeps one part becomes an all_to_all, which moves only that part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from interlace.ir import Edit, Graph, Op, Program, TensorType, Value
from interlace.ir.kinds import is_collective
from interlace.passes.base import Context, Pass, check_unscheduled, register

Place = tuple[tuple[int, ...], int, int]
"""A name for an all_gather that all ranks of its group agree on: these ranks, the number of their collectives before it, and the dim that
is cut."""


class GatherFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank sends to the others: the all_gathers that it would replace."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """An all_gather along dim 0, and the operations that take this rank's part of its result.

    Attributes:
        gone: Operations after the all_gather that are replaced; the last one is the slice.
        cut: Dim of which each rank keeps one part.
        joined: Dim along which the ranks' tensors are concatenated; 0 if they stay as gathered.
    """

    gather: Op
    gone: tuple[Op, ...]
    cut: int
    joined: int
    num_ranks: int


@register
class NarrowGathers(Pass, frozen=True, kw_only=True):
    """Replace an all_gather of whose result each rank keeps only its own part by an all_to_all, which moves 1/n as much on n ranks.

    Contract: keeps the rank's part and every value computed from it, bit for bit: elements are moved, not computed with. Keeps the order
    of the group's collectives, and its communicator. An all_gather is replaced on all ranks of its group or on none.

    On a mesh of one dimension Paddle changes the dim over which a tensor is sharded with one all_to_all. On other meshes it gathers the
    whole tensor and slices it: for example when tokens go to their experts and back with both `dp` and `mp`, or between a sharded hidden
    dim and sequence parallelism.

    Before / After, two ranks, of which this is the second:
        %1[8,3] = pd_op.all_gather(%0[4,3])                %6[4,3] = pd_op.all_to_all(%0)
        %2 = pd_op.split_with_num(%1, 0) {"num":2}         %7[2,2,3] = pd_op.reshape(%6)
        %3[4,6] = pd_op.concat(%2, 1)                      %8[2,2,3] = pd_op.transpose(%7) {"perm":[1,0,2]}
        %4[2,6] = pd_op.slice(%3, 2, 4) {"axes":[0]}       %4[2,6] = pd_op.reshape(%8)

    Steps: 1 find all_gathers whose only reader is a slice, possibly after the ranks' tensors are concatenated along another dim, and whose
    slice takes the part with this rank's index in the group; 2 keep those that all ranks of the group have found; 3 bring the parts of the
    dim that is cut to the front, exchange them, and join what came from each rank along the other dim.
    """

    name = "narrow-gathers"
    after = ("choose-recompute",)
    is_default = True
    in_baseline = False

    def facts(self, program: Program, context: Context) -> GatherFacts:
        """The all_gathers that this rank would replace."""
        check_unscheduled(program)
        return GatherFacts(tuple(sites(Graph(program))))

    def run(self, program: Program, context: Context) -> Program:
        graph, edit = Graph(program), Edit(program)
        everyone: Sequence[GatherFacts] = context.facts
        for place, site in sites(graph).items():
            if not context.is_whole:
                context.declined("peers-not-known", site.gather)
            elif any(place not in everyone[rank].places for rank in place[0]):
                context.declined("peers-keep-more", site.gather)
            else:
                _replace(site, graph, edit)
                whole, own = (graph.values[value].size_bytes for value in (*site.gather.results, site.gather.operands[0]))
                context.applied("gather-narrowed", site.gather, ranks=site.num_ranks, own_bytes=own, whole_bytes=whole)
        return edit.build() if any(each.kind == "applied" for each in context.remarks) else program


def sites(graph: Graph) -> dict[Place, Site]:
    """The all_gathers from whose results this rank keeps only its own part, by name."""
    members = {group.id: group.ranks for group in graph.program.groups}
    before: Counter[tuple[int, ...]] = Counter()
    found: dict[Place, Site] = {}
    for op in graph.program.ops:
        if not is_collective(op):
            continue
        ranks = members.get(op.group, ())
        if op.kind == "all_gather" and "ring_id" in op.attrs and graph.program.rank in ranks and (site := _site(graph, op, ranks)):
            found[ranks, before[ranks], site.cut] = site
        before[ranks] += 1
    return found


def narrowed(program: Program) -> Program:
    """The program with every all_gather of `sites` replaced, as if all ranks of its group did."""
    graph, edit = Graph(program), Edit(program)
    found = sites(graph)
    for site in found.values():
        _replace(site, graph, edit)
    return edit.build() if found else program


def _site(graph: Graph, gather: Op, ranks: Sequence[int]) -> Site | None:
    count, joined = len(ranks), 0
    gone: list[Op] = []
    reader = _only_reader(graph, gather)
    if reader and reader.kind == "split_with_num" and (reader.attrs.get("num"), _number(graph, reader, 1)) == (count, 0):
        concat = _only_reader(graph, reader)
        if concat is None or concat.kind != "concat" or (at := _number(graph, concat, 1)) is None:
            return None
        joined = at % len(graph.values[gather.results[0]].shape)
        gone += [reader, concat]
        reader = _only_reader(graph, concat) if joined else None
    cut = _own_part(graph, reader, ranks.index(graph.program.rank), count) if reader and reader.kind == "slice" else None
    return Site(gather, (*gone, reader), cut, joined, count) if reader and cut is not None and cut != joined else None


def _only_reader(graph: Graph, op: Op) -> Op | None:
    """The only reader of an operation's only result; None if there are others, or the result is persistable, or the roles differ."""
    readers = graph.user_ops(op.results[0])
    if len(op.results) != 1 or len(readers) != 1 or graph.values[op.results[0]].persistable:
        return None
    return readers[0] if readers[0].role == op.role else None


def _own_part(graph: Graph, op: Op, number: int, count: int) -> int | None:
    """The dim along which a slice takes part `number` of `count` equal parts; None if it takes anything else."""
    whole, part = (graph.values[value].shape for value in (op.operands[0], op.results[0]))
    axes, bounds = op.attrs.get("axes"), [_numbers(graph, value) for value in op.operands[1:]]
    if op.attrs.get("decrease_axis") or not isinstance(axes, (list, tuple)) or len(axes) != 1 or len(whole) != len(part) or min(whole) < 0:
        return None
    dim = axes[0] % len(whole)
    length = whole[dim] // count
    return dim if whole[dim] == count * length and bounds == [[number * length], [(number + 1) * length]] else None


def _number(graph: Graph, op: Op, operand: int) -> int | None:
    """The value of a constant operand; None if it is computed."""
    made = graph.producer_op(op.operands[operand])
    return int(made.attrs["value"]) if made is not None and made.kind == "full" and "value" in made.attrs else None


def _numbers(graph: Graph, value: int) -> list[int] | None:
    made = graph.producer_op(value)
    return list(made.attrs["value"]) if made is not None and made.kind == "full_int_array" and "value" in made.attrs else None


def _replace(site: Site, graph: Graph, edit: Edit) -> None:
    gather, last = site.gather, site.gone[-1]
    source, result = graph.values[gather.operands[0]], graph.values[last.results[0]]
    here = _Moves(edit, gather, source)
    if site.cut:
        here.to_front(site.cut, site.num_ranks)
    here.exchange(None if site.joined else result)
    edit.replace(gather.id, here.ops)
    there = _Moves(edit, last, here.at)
    if site.joined:
        there.from_front(site.joined, site.num_ranks, result)
    edit.replace(last.id, there.ops)
    for op in (*site.gone[:-1], *_constants(graph, site.gone)):
        edit.replace(op.id, [])


def _constants(graph: Graph, gone: Iterable[Op]) -> list[Op]:
    """Constants that are operands of these operations only."""
    numbers = {op.id for op in gone}
    made = {found.id: found for op in gone for value in op.operands if (found := graph.producer_op(value)) and not found.operands}
    return [op for op in made.values() if op.kind in ("full", "full_int_array") and numbers.issuperset(graph.users[op.results[0]])]


class _Moves:
    """Operations that move the elements of one tensor, in the place of `like`."""

    def __init__(self, edit: Edit, like: Op, at: Value) -> None:
        self.edit, self.like, self.at = edit, like, at
        self.ops: list[Op] = []

    def to_front(self, dim: int, count: int) -> None:
        """Stack `count` equal parts of a dim along dim 0."""
        shape = self.at.shape
        self._reshape((*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]))
        self._transpose([dim, *(k for k in range(len(shape) + 1) if k != dim)])
        self._reshape((count * shape[0], *shape[1:dim], shape[dim] // count, *shape[dim + 1 :]))

    def from_front(self, dim: int, count: int, result: Value) -> None:
        """Concatenate `count` equal parts of dim 0 along another dim instead; the inverse of `to_front`."""
        shape = self.at.shape
        self._reshape((count, shape[0] // count, *shape[1:]))
        self._transpose([*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)])
        self._reshape(result.shape, result)

    def exchange(self, result: Value | None) -> None:
        """Send each part of dim 0 to its rank."""
        self._add("pd_op.all_to_all", (), result or self._value(self.at.shape), {"ring_id": self.like.attrs["ring_id"]}, self.like.group)

    def _reshape(self, shape: Sequence[int], result: Value | None = None) -> None:
        attrs = {"value": list(shape), "dtype": "int64", "place": "cpu"}
        self.ops.append(self.edit.op("pd_op.full_int_array", (), [TensorType((len(shape),), "int64")], like=self.like, attrs=attrs))
        self._add("pd_op.reshape", self.ops[-1].results, result or self._value(shape), {})

    def _transpose(self, perm: list[int]) -> None:
        self._add("pd_op.transpose", (), self._value([self.at.shape[k] for k in perm]), {"perm": perm})

    def _add(self, name: str, others: Sequence[int], result: Value, attrs: dict[str, object], group: int = -1) -> None:
        self.ops.append(self.edit.op(name, (self.at.id, *others), [result], like=self.like, attrs=attrs, group=group))
        self.at = result

    def _value(self, shape: Sequence[int]) -> Value:
        return self.edit.value(TensorType(tuple(shape), self.at.dtype))
