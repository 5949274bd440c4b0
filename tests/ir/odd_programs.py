"""Programs with every field in every form."""

from __future__ import annotations

from hypothesis import strategies as st

from interlace.ir import ABSENT, Event, Group, Job, Op, Pipeline, Program, TensorType, Value

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | WORDS
PLAIN = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6)
TYPES = st.builds(
    TensorType, st.lists(st.integers(-1, 9), max_size=3).map(tuple), st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "int64"])
)


@st.composite
def odd_programs(draw: st.DrawFn) -> Program:
    """One operation after the other with every field in every form, names in any script."""
    ops: list[Op] = []
    values: list[Value] = []
    for op_id in range(draw(st.integers(0, 4))):
        known = [value.id for value in values]
        operands = tuple(draw(st.lists(st.sampled_from([ABSENT, *known]), max_size=3)))
        made = [_value(draw, len(values) + k) for k in range(draw(st.integers(0, 3)))]
        values += made
        ops.append(
            Op(
                op_id,
                draw(st.sampled_from(["pd_op.add_", "builtin.combine", "custom_op.my.kernel2", "cf.yield"])),
                operands,
                tuple(value.id for value in made),
                draw(st.sampled_from(["forward", "backward", "optimize"])),
                draw(st.integers(0, 3)),
                draw(st.dictionaries(WORDS, PLAIN, max_size=3)),
                draw(WORDS),
                -1,
                draw(WORDS),
                draw(st.integers(-5, 3)),
                draw(st.integers(-1, 9)),
                tuple(k for k in range(len(operands)) if draw(st.booleans())),
                (),
                (),
                draw(st.integers(0, 2)),
            )
        )
    groups = tuple(Group(k, tuple(draw(st.lists(st.integers(0, 9), max_size=3, unique=True)))) for k in range(draw(st.integers(0, 2))))
    count = draw(st.integers(1, 3))
    items = tuple((op.id, m) for m in range(count) for op in ops)
    waits = tuple((item, items[0]) for item in items[::4])
    jobs = (Job("all", "forward", 0, items[::2]), Job("rest", "x1", 2, items[1::2], waits)) if draw(st.booleans()) else ()
    return Program(
        tuple(ops),
        tuple(values),
        groups,
        Pipeline(0, 2, count, 3, "1F1B"),
        draw(st.integers(0, 9)),
        10,
        "eval",
        ("a-pass", "b") if draw(st.booleans()) else (),
        jobs,
        (Event("e-1", (0, 0), ((1, 0), (2, 1))), Event("e2", (1, 1), ())),
        tuple(draw(st.lists(WORDS, max_size=2))),
        draw(st.sampled_from(["", "3.3.1"])),
    )


def _value(draw: st.DrawFn, number: int) -> Value:
    form = draw(st.sampled_from(["tensor", "vector", "null"]))
    if form != "tensor":
        elements = tuple(draw(st.lists(TYPES, min_size=1, max_size=3))) if form == "vector" else ()
        return Value(number, (), form, draw(st.integers(0, 9)), elements=elements)
    kind = draw(TYPES)
    return Value(
        number,
        kind.shape,
        kind.dtype,
        draw(st.integers(0, 9)),
        draw(WORDS),
        draw(st.booleans()),
        draw(st.sampled_from(["device", "host", "pinned"])),
    )
