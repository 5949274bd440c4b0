"""What passes, planning and lowering need to know about an operation, from its kind and its attributes.

Source: names and attributes as PaddlePaddle 3.3.1 and older versions emit them; kinds are listed in `interlace.ir.operation_kinds`.
"""

from __future__ import annotations

from interlace.ir import operators
from interlace.ir.operation_kinds import ALONE_WITHOUT_RANKS, COLLECTIVES, COPIES, NO_EVENTS, RECEIVES, SENDS, SILENT, WITHOUT_GROUP
from interlace.ir.program import Op

DATA = "pd_op.data"
PARAMETER = "builtin.parameter"
SHADOW_OUTPUT = "builtin.shadow_output"
SET_PARAMETER = "builtin.set_parameter"
COMBINE = "builtin.combine"
SPLIT = "builtin.split"
STACK_CREATE = "cf.stack_create"
"""Creates a stack and its two ends, through which control flow passes what its blocks computed to the blocks of its gradient."""
MEMORY = "pd_op.empty"
"""Takes memory without writing it."""
SHARE_VAR = "pd_op.share_var"
"""Makes two values share memory, so that a collective writes its result into a fused buffer."""
WHILE = "pd_op.while"
"""A loop. Operand 0 is the condition; each result starts as the operand one position further. After an iteration, condition and results
are what the block yields."""
INSIDE = "interlace_inside"
"""Attribute of control flow: names of the operators in its blocks that act on more than their results."""
KEYWORD = "builtin.kwarg"
"""A block argument of the captured program; Paddle passes gradient-merge buffers this way."""
BOUNDARY = frozenset({DATA, PARAMETER, KEYWORD, SHADOW_OUTPUT, SET_PARAMETER, "pd_op.fetch", "pd_op.feed"})
"""Operations that only name what enters and leaves a program; they cost nothing."""

OPAQUE = "unreadable"
"""Placeholder in a captured program for an attribute that Paddle cannot return; lowering clones the operation with the attribute."""
NO_KERNEL = BOUNDARY | {COMBINE, SPLIT, STACK_CREATE, SHARE_VAR, "pd_op.full_int_array"}
"""Names of operations that launch nothing on the device."""
HOST_PLACE = "Place(cpu)"
"""Attribute `place` of a constant that is computed on the host, such as the factor of a `scale`."""
COMPUTE_STREAMS = frozenset({"", "DefaultStream"})
"""Stream names of operations on the compute stream: the empty name, and the executor's own."""


def stream_of(op: Op) -> str:
    """An operation's stream; empty for the compute stream under either name. Control flow runs there, whichever stream it names."""
    return "" if op.stream in COMPUTE_STREAMS or op.num_blocks else op.stream


def takes_events(op: Op) -> bool:
    """Whether the executor records and awaits events at an operation: at Paddle's own kernels on the device, and at both ends of the step.

    Control flow and users' own operators ignore events, and none is recorded after a kernel on the host (docs/gpu-place.md, rule 14).
    """
    kernel = op.name.startswith("pd_op.") and op.name not in NO_KERNEL and not op.num_blocks and op.kind not in NO_EVENTS
    return is_boundary(op) or (kernel and op.attrs.get("place") != HOST_PLACE)


def views_of(op: Op) -> tuple[tuple[int, int], ...]:
    """`(result, operand)` positions where the result shares the operand's memory and nothing is written: views, `share_data_`.

    None for control flow, where a view only says that a result may lie in that operand's memory; the blocks may also have written it into
    memory of its own.

    >>> views_of(Op(1, "pd_op.fused_linear_param_grad_add", (0, 1, 2), (3,), "backward", views=((0, 2),)))
    ()
    """
    if op.num_blocks or not (op.views or op.inplace):
        return ()
    if op.kind == "share_data":
        return (*op.views, *op.inplace)
    return tuple(pair for pair in op.views if pair not in operators.WRITES.get(operators.key(op.name), ())) if op.views else ()


def is_boundary(op: Op) -> bool:
    """Whether the operation only names an input or output of the program."""
    return op.name in BOUNDARY


def is_send(op: Op) -> bool:
    """Whether the operation sends to one other rank."""
    return op.kind in SENDS


def is_receive(op: Op) -> bool:
    """Whether the operation receives from one other rank."""
    return op.kind in RECEIVES


def is_p2p(op: Op) -> bool:
    """Whether the operation sends or receives."""
    kind = op.kind
    return kind in SENDS or kind in RECEIVES


def is_collective(op: Op) -> bool:
    """Whether all ranks of a group take part: the operation has a group and is neither a send nor a receive."""
    return op.group >= 0 and not is_p2p(op)


def is_comm(op: Op) -> bool:
    """Whether the operation communicates with other ranks: every operation with a group does."""
    return op.group >= 0


def meets_others(op: Op) -> bool:
    """Whether the operation waits for other ranks: those of its group, or of a group that no attribute names."""
    return is_comm(op) or op.kind in WITHOUT_GROUP


def ring_of(op: Op) -> int:
    """The ring over which an operation communicates, from its attributes; -1 for none.

    >>> ring_of(Op(1, "pd_op.all_reduce_", (), (), "forward", attrs={"ring_id": 5}))
    5
    >>> ring_of(Op(1, "pd_op.c_identity", (), (), "forward", attrs={"ring_id": 5}))
    -1
    """
    ring = op.attrs.get("ring_id", -1)
    if ring == -1:
        return -1
    alone = op.kind in ALONE_WITHOUT_RANKS and op.attrs.get("nranks", 1) == 1
    return -1 if op.kind in SILENT or alone or not isinstance(ring, int) else ring


def is_known_comm(op: Op) -> bool:
    """Whether Interlace knows how this kind of operation communicates."""
    return is_p2p(op) or op.kind in COLLECTIVES


def is_copy(op: Op) -> bool:
    """Whether the operation copies between host and device memory."""
    return op.kind in COPIES


def layer_pattern(layer: str) -> str:
    """`blocks.3.mlp` -> `blocks.*.mlp`: the pattern that layers of one sort share."""
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))
