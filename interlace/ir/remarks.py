"""Remarks: what passes and the search did and declined, as data. `interlace/report/remarks.py` turns them into sentences."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Literal

import msgspec

from interlace.ir.program import Op

Kind = Literal["applied", "declined", "decided", "analysis"]
"""Whether a pass changed the program, left it as it was, or the search chose among forms; `analysis` only reports figures."""
Number = int | float
Fact = Number | str | Op | Sequence[Number] | Sequence[str] | Sequence[Op]


class Place(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """What a remark is about.

    Attributes:
        op, name, layer: Id of an operation, with its name and its layer.
        value: Id of a value.
        job: A kind of job by its parts, such as `B+F`; with chunks `B.1+F.0`.
        stage: Pipeline stage. Here and in `op` and `value`, -1 is none.
    """

    op: int = -1
    name: str = ""
    layer: str = ""
    value: int = -1
    job: str = ""
    stage: int = -1

    @classmethod
    def of(cls, op: Op, value: int = -1) -> Place:
        """The place of an operation, and of a value that it reads or gives."""
        return cls(op.id, op.name, op.layer, value)


NOWHERE = Place()


class Remark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that was done, declined, decided or found.

    Attributes:
        rule: What happened, as a name in kebab-case that does not depend on place and figures.
        pass_name: The pass whose report contains it; `pass` in JSON.
        numbers: Figures by name. The name ends with the unit (`_ns`, `_bytes`); otherwise it is a count or a ratio.
        names: Options, streams, forms and other words, by name.
        ops: Other operations that are mentioned, by name.
    """

    rule: str
    kind: Kind
    pass_name: str = msgspec.field(default="", name="pass")
    place: Place = NOWHERE
    numbers: dict[str, Number | tuple[Number, ...]] = {}
    names: dict[str, str | tuple[str, ...]] = {}
    ops: dict[str, tuple[Place, ...]] = {}

    def of(self, pass_name: str) -> Remark:
        """The same remark with the name of its pass, which `Pipeline` fills in."""
        return msgspec.structs.replace(self, pass_name=pass_name)


def remark(kind: Kind, rule: str, at: Op | Place | None = None, /, **facts: Fact) -> Remark:
    """A remark about a place. Each fact is a number, a word or an operation, or a sequence of one of them, and goes into the field for its
    type. Facts are not sentences: these are in `interlace/report/remarks.py`. Raises TypeError for any other type."""
    numbers, names, ops = dict[str, Number | tuple[Number, ...]](), dict[str, str | tuple[str, ...]](), dict[str, tuple[Place, ...]]()
    for name, fact in facts.items():
        each = (fact,) if isinstance(fact, str | Op) or not isinstance(fact, Sequence) else tuple(fact)
        several = isinstance(fact, Sequence) and not isinstance(fact, str)
        if each and all(isinstance(one, Op) for one in each):
            ops[name] = tuple(Place.of(one) for one in each if isinstance(one, Op))
        elif each and all(isinstance(one, str) for one in each):
            words = tuple(one for one in each if isinstance(one, str))
            names[name] = words if several else words[0]
        else:
            figures = tuple(_plain(name, one) for one in each)
            numbers[name] = figures if several else figures[0]
    place = Place.of(at) if isinstance(at, Op) else at or NOWHERE
    return Remark(rule, kind, "", place, numbers, names, ops)


def _plain(name: str, figure: object) -> Number:
    """A figure as Python's int or float; NumPy's numbers cannot be encoded as JSON."""
    if type(figure) in (int, float):
        return figure  # type: ignore[return-value]
    if isinstance(figure, Integral):
        return int(figure)
    if isinstance(figure, Real):
        return float(figure)
    raise TypeError(f"remark: {name}={figure!r}; expected a number, a string, an operation, or a sequence of one of them")
