"""Time of two operations that run beside each other."""

from __future__ import annotations


def pair_time(op_ns: float, beside_ns: float, stretch_op: float, stretch_beside: float) -> float:
    """Time until both of two operations started together have ended; the longer runs on alone.

    >>> pair_time(100, 100, 1.5, 1.5), pair_time(100, 300, 1.0, 2.0)
    (150.0, 350.0)
    """
    first = min(op_ns * stretch_op, beside_ns * stretch_beside)
    return first + max(op_ns - first / stretch_op, beside_ns - first / stretch_beside)
