"""What an operation does besides computing its results, and so whether it may be repeated, left out, or run in another order.

Nothing is known of operators that Paddle's wheel does not have (custom ones, those written in Python, those of another version): they
count as operators that draw random numbers and act on more than their results.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from interlace.ir import operators
from interlace.ir.kinds import BOUNDARY, INSIDE, OPAQUE, WHILE, is_boundary, is_p2p, views_of
from interlace.ir.program import ABSENT, Op, Program

Effect = Literal["draws", "acts", "controls", "computes", "unknown"]
"""`draws`: draws random numbers. `acts`: acts on more than its results, or depends on more than its operands. `controls`: does what its
blocks do. `computes`: only computes its results. `unknown`: may do any of these."""
ONLY_ABOVE_0 = {
    "flash_attn": "dropout",
    "flash_attn_qkvpacked": "dropout",
    "flash_attn_unpadded": "dropout",
    "flash_attn_varlen_qkvpacked": "dropout",
    "flashmask_attention": "dropout",
    "rnn": "dropout_prob",
}
"""Operators that draw only if this attribute is above 0 (phi/kernels/gpu/flash_attn_utils.h; at 0 the kernels of `rnn` drop nothing)."""
ONLY_AT_0 = {"fractional_max_pool2d": "random_u", "fractional_max_pool3d": "random_u"}
"""Operators that draw only if this attribute is 0; any other value is used instead of a random number."""
DRAWS, ACTS = "draws random numbers", "acts on more than its results"
UNKNOWN = "is unknown to Interlace, so that it may draw random numbers or act on more than its results"


def effect_of(op: Op) -> Effect:
    """What the operation does besides computing its results.

    >>> effect_of(Op(1, "pd_op.flash_attn", (), (), "forward", attrs={"dropout": 0.0}))
    'computes'
    >>> effect_of(Op(1, "custom_op.flash_attn", (), (), "forward", attrs={"dropout": 0.0}))
    'unknown'
    """
    effect = "computes" if is_boundary(op) else _of_operator(op.name)
    if effect == "controls" and INSIDE in op.attrs:
        return "acts"
    return "computes" if effect == "draws" and _is_set_not_to_draw(op) else effect


def is_random(op: Op) -> bool:
    """Whether the operation draws random numbers, or may because it is unknown."""
    return effect_of(op) in ("draws", "unknown")


def is_ordered(op: Op) -> bool:
    """Whether such operations must keep their order within a step: they draw from the device's only generator, or act on more than their
    results."""
    return effect_of(op) in ("draws", "acts", "unknown")


def why_ordered(op: Op) -> str:
    """What an ordered operation does, as a verb phrase for messages; empty for any other."""
    return {"draws": DRAWS, "acts": ACTS, "unknown": UNKNOWN}.get(effect_of(op), "")


def is_constant(op: Op) -> bool:
    """Whether the operation reads no values and always gives the same results."""
    return not op.operands and op.group < 0 and is_repeatable(op)


def is_repeatable(op: Op) -> bool:
    """Whether the same operands and attributes always give the same results, and nothing else happens, so that the operation may run once
    more, or not at all if nothing reads its results. Collectives can be repeatable; all their ranks must then do the same."""
    known = effect_of(op) == "computes" and OPAQUE not in op.attrs.values()
    return known and bool(op.results) and not (written_positions(op) or op.inplace or op.num_blocks or is_p2p(op) or is_boundary(op))


def written_positions(op: Op) -> tuple[int, ...]:
    """Positions of operands that the operation overwrites, or may overwrite: all that are given for an unknown operation; for a loop also
    the condition.

    >>> written_positions(Op(1, "pd_op.fused_linear_param_grad_add", (0, 1, 2), (3,), "backward", views=((0, 2),)))
    (2,)
    >>> written_positions(Op(1, "custom_op.mine", (0, -1, 2), (3,), "backward"))
    (0, 2)
    >>> written_positions(Op(1, "pd_op.share_data_", (0,), (1,), "forward", inplace=((0, 0),)))
    ()
    """
    lists = _lists_of(op.name)
    if not lists.are_known:
        return tuple(k for k, value in enumerate(op.operands) if value != ABSENT)
    listed = lists.writes
    if not (op.inplace or op.views or op.num_blocks or listed):
        return ()
    in_memory_of = op.inplace if op.num_blocks else (*op.inplace, *op.views)
    written = (*(pair for pair in in_memory_of if pair not in views_of(op)), *_given(op, listed))
    return tuple(dict.fromkeys((*(operand for _, operand in written), *((0,) if op.name == WHILE else ()))))


def may_lie_in(op: Op, result: int) -> tuple[int, ...]:
    """Positions of operands in whose memory a result may lie, if it is not in memory of its own: for control flow those that capture found,
    for an unknown operation all. `Op.inplace` and `Op.views` say where a result certainly lies.

    >>> may_lie_in(Op(1, "pd_op.if", (0, 1, 2), (3,), "forward", views=((0, 1), (0, 2)), num_blocks=2), 0)
    (1, 2)
    >>> may_lie_in(Op(1, "pd_op.values_coo_sp", (0,), (1,), "forward"), 0)
    (0,)
    """
    if op.num_blocks:
        return tuple(dict.fromkeys(o for r, o in (*op.views, *op.inplace) if r == result))
    lists = _lists_of(op.name)
    if lists.are_known and not (lists.shares or lists.shares_any):
        return ()
    said = [o for r, o in (*op.inplace, *op.views) if r == result]
    if said or (lists.are_known and not lists.shares_any):
        return tuple(o for k, o in _given(op, lists.shares) if k == result and o not in said)
    return tuple(k for k, value in enumerate(op.operands) if value != ABSENT)


def draws_twice(program: Program) -> bool:
    """Whether forward and backward both have ordered operations (`is_ordered`), whose order another number of micro-batches in flight would
    change."""
    return {"forward", "backward"} <= {op.role for op in program.ops if is_ordered(op)}


class _Lists(NamedTuple):
    """An operator's `(result, operand)` positions, where the result may overwrite the operand's memory (`writes`), or may lie in it
    (`shares`, these included); whether a result may lie in any operand's memory (`shares_any`); and whether all this is known."""

    writes: tuple[tuple[int, int], ...]
    shares: tuple[tuple[int, int], ...]
    shares_any: bool
    are_known: bool


@lru_cache(maxsize=4096)
def _lists_of(name: str) -> _Lists:
    key = operators.key(name)
    writes = operators.MAY_WRITE.get(key, ())
    are_known = name in BOUNDARY or _of_operator(name) != "unknown"
    return _Lists(writes, (*operators.MAY_SHARE.get(key, ()), *writes), key in operators.MAY_SHARE_ANY, are_known)


def _given(op: Op, pairs: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """The pairs of an operator's result and operand positions that an operation has, with the operand given."""
    return [(r, o) for r, o in pairs if r < len(op.results) and o < len(op.operands) and op.operands[o] != ABSENT]


@lru_cache(maxsize=4096)
def _of_operator(name: str) -> Effect:
    key = operators.key(name)
    lists: dict[Effect, frozenset[str]] = {
        "draws": operators.DRAWS,
        "acts": operators.ACTS,
        "controls": operators.CONTROLS,
        "computes": operators.COMPUTES,
    }
    return next((effect for effect, names in lists.items() if key in names), "unknown")


def _is_set_not_to_draw(op: Op) -> bool:
    """Whether an attribute keeps an operator that can draw from drawing; not if the attribute is missing or unreadable."""
    key = operators.key(op.name)
    above, at = (op.attrs.get(names.get(key, "")) for names in (ONLY_ABOVE_0, ONLY_AT_0))
    return (isinstance(above, (int, float)) and above <= 0) or (isinstance(at, (int, float)) and at != 0)
