"""Side effects of control-flow blocks: outer values that they write or pass on, and other effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle

from interlace.bridge.attributes import attributes
from interlace.errors import ProgramError
from interlace.ir import Op, operators
from interlace.ir.effects import effect_of, is_random, why_ordered
from interlace.ir.kinds import COMBINE, SPLIT, WHILE, ring_of
from interlace.ir.operation_kinds import WITHOUT_GROUP

Pairs = tuple[tuple[int, int], ...]
YIELD = "cf.yield"
GROUPING = frozenset({COMBINE, SPLIT, "builtin.slice"})
"""Operations that only group or ungroup their operands."""


@dataclass(slots=True)
class Inside:
    """What was found in the blocks of one operation.

    Attributes:
        written: Pairs of a result and an operand in whose memory the result may be, and which the blocks write.
        shared: The same, for operands that the blocks do not write.
        acting: Names of operations with effects beyond their results.
    """

    written: Pairs = ()
    shared: Pairs = ()
    acting: tuple[str, ...] = ()


def blocks_of(source: Any) -> list[Any]:
    """The blocks of an operation. Few have some, and `blocks()` takes longer than everything else asked of an operation, so `num_regions()`
    is asked first."""
    return list(source.blocks()) if source.num_regions() else []


def inplace_pairs(source: Any) -> Pairs:
    """Pairs of a result and the operand in whose place Paddle declares it to be written, for operands that are given."""
    info = paddle.base.libpaddle.pir.get_op_inplace_info(source)
    fake = paddle.pir.is_fake_value
    pairs = sorted(info.items())
    return tuple((r, o) for r, o in pairs if not fake(source.operand_source(o)) and not fake(source.result(r)))


def inside(source: Any, outer: Sequence[Any], op_id: int) -> Inside:
    """Analyse the blocks of a control-flow operation. `outer` are its operands and the other outer values that its blocks read; `op_id`
    names it in errors.

    Raises ProgramError if a block communicates, draws random numbers or may, or writes an outer value that is not a loop variable.
    """
    walk = _Walk()
    for k, value in enumerate(outer):
        if not paddle.pir.is_fake_value(value):
            walk.places[value.id] = walk.places.get(value.id, frozenset()) | {k}
    results = walk.until_stable(source)
    own = range(1, 1 + len(source.results())) if source.name() == WHILE else range(0)
    for name, wrong, places in walk.found:
        if wrong or not places <= set(own):
            raise ProgramError(
                f"op #{op_id} {source.name()} has a nested block in which {name} {wrong or 'writes a value of the block around it'}; "
                "it cannot be captured, move that operation out of the control flow"
            )
    written = {place for _, _, places in walk.found for place in places}
    pairs = {(k, place) for k, places in enumerate(results) for place in places} | {(place - 1, place) for place in written}
    return Inside(
        tuple(sorted(pair for pair in pairs if pair[1] in written)),
        tuple(sorted(pair for pair in pairs if pair[1] not in written)),
        tuple(sorted(walk.acting)),
    )


@dataclass(slots=True)
class _Walk:
    """Tracks in the memory of which outer values, given by their indices (*places*), inner values may be. `found` has inner operations that
    are refused, with the reason, or that write, with the places of what they write."""

    places: dict[str, frozenset[int]] = field(default_factory=dict)
    found: list[tuple[str, str, frozenset[int]]] = field(default_factory=list)
    acting: set[str] = field(default_factory=set)

    def until_stable(self, source: Any) -> list[frozenset[int]]:
        """Walk through the blocks until another iteration adds nothing; returns the places of the operation's results."""
        while True:
            known, self.found = dict(self.places), []
            results = self._blocks(source)
            if self.places == known:
                return results

    def _of(self, values: Iterable[Any]) -> frozenset[int]:
        return frozenset().union(*(self.places.get(value.id, frozenset()) for value in values if not paddle.pir.is_fake_value(value)))

    def _add(self, value: Any, places: frozenset[int]) -> None:
        if places and not paddle.pir.is_fake_value(value):
            self.places[value.id] = self.places.get(value.id, frozenset()) | places

    def _blocks(self, source: Any) -> list[frozenset[int]]:
        """Places of the operation's results, from what the blocks yield and from loop variables."""
        blocks, given, loop = blocks_of(source), list(source.operands_source()), source.name() == WHILE
        for block in blocks:
            for k, argument in enumerate(block.args()):
                self._add(argument, self._of(given[k + 1 : k + 2] if loop else given))
            for inner in block.ops:
                self._op(inner)
        yields = [block.ops[-1].operands_source() for block in blocks if block.ops and block.ops[-1].name() == YIELD]
        results = []
        for k in range(len(source.results())):
            at = k + 1 if loop else k
            places = self._of([each[at] for each in yields if at < len(each)] + given[k + 1 : k + 2] * loop)
            results.append(places)
            for block in blocks if loop else ():
                self._add(block.args()[k], places)
        return results

    def _op(self, inner: Any) -> None:
        name, attrs = inner.name(), attributes(inner)
        seen = Op(0, name, (), (), "forward", attrs=attrs)
        if blocks_of(inner):
            for k, places in enumerate(self._blocks(inner)):
                self._add(inner.result(k), places)
            return
        meets = ring_of(seen) >= 0 or seen.kind in WITHOUT_GROUP
        wrong = "communicates" if meets else why_ordered(seen) if is_random(seen) else ""
        if wrong:
            self.found.append((name, wrong, frozenset()))
        elif effect_of(seen) == "acts":
            self.acting.add(name)
        self._hand_on(inner, operators.key(name))

    def _hand_on(self, inner: Any, key: str) -> None:
        given, results = inner.operands_source(), inner.results()
        if inner.name() in GROUPING:
            for result in results:
                self._add(result, self._of(given))
        declared, hidden = inplace_pairs(inner), operators.WRITES.get(key, ())
        for result, operand in (*declared, *hidden, *operators.VIEWS.get(key, ())):
            self._add(results[result], self._of([given[operand]]))
        for _, operand in (*(declared if key != "share_data" else ()), *hidden):
            if places := self._of([given[operand]]):
                self.found.append((inner.name(), "", places))
