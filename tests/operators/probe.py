"""Operators of the wheel, called with guessed operands and attributes: whose memory results are in, and what they write over.

Most guesses are refused by the operator, some end the process: each operator runs in a process of its own.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from tests.operators import wheel
from tests.operators.wheel import Definition

SHAPES = [(4,), (2, 3), (4, 4), (2, 4, 4), (1, 2, 4, 4), (2, 2, 2, 4, 4), (1,), (), (2, 4), (8,)]
DTYPES = ["float32"] * 6 + ["int64", "bool", "float64", "complex64", "int32"]
INTEGERS = re.compile("index|indices|label|ids|length|num$|lod|row|seq|offset|step|shape|len|pos")
"""Operands that are mostly integers."""
WORDS = {
    "data_format": ["NCHW", "NCL", "NCDHW"],
    "data_layout": ["NCHW", "NHWC"],
    "padding_algorithm": ["EXPLICIT"],
    "mode": ["constant", "reflect", "LSTM", "reduced"],
    "reduction": ["none", "mean", "sum"],
    "reduce_op": ["SUM", "MEAN"],
    "equation": ["ij->ij", "ij,jk->ik", "ij->ji"],
}
"""Values of attributes that are words."""
LISTS = {
    "strides": [[1], [1, 1], [1, 1, 1]],
    "dilations": [[1], [1, 1], [1, 1, 1]],
    "kernel_size": [[1], [1, 1], [1, 1, 1]],
    "paddings": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    "perm": [[0], [0, 1], [1, 0], [0, 1, 2], [0, 2, 1, 3]],
    "shape": [[4], [2, 3], [4, 4], [-1], [1], []],
    "starts": [[0], [1], [0, 0]],
    "ends": [[2], [4], [2, 2]],
    "steps": [[1], [1, 1]],
    "sections": [[2, 2], [1, 1], [4]],
}
"""Values of attributes that are lists of integers."""
APART = ("save", "load", "read_file", "barrier", "print", "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter")
RUNS_ALONE = re.compile(rf"pd_op\.(c_|mp_|p_|partial_|send_v2|recv_v2|comm_|global_|({'|'.join(APART)})_?(combine)?$)")
"""Operators that communicate, or use files: they are not called."""
ENDS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """What was seen of an operator.

    Attributes:
        calls: Number of calls that it did not refuse.
        shared: Results and operands with common memory.
        written: Operands that have other contents afterwards.
    """

    calls: int
    shared: list[tuple[str, str]]
    written: list[str]


def callable_operators() -> list[str]:
    """Names of operators that take and give dense tensors and can be called."""
    import paddle

    dense = ("DenseTensorType", "DenseTensorType>", "IntArrayAttribute", "ScalarAttribute")
    return sorted(
        name
        for name, made in wheel.definitions().items()
        if name.startswith("pd_op.") and made.kernel in wheel.kernels() and hasattr(paddle._C_ops, name[6:])
        if all(kind.rpartition(":")[2] in dense for kind in made.operand_types) and not RUNS_ALONE.match(name)
    )


def seen(names: Sequence[str], tries: int, calls: int) -> dict[str, Seen]:
    """Call operators, each up to so many times, or until it was not refused so many times; from a process that has called none."""
    command = [sys.executable, "-c", f"from tests.operators.probe import say; say({tries}, {calls})"]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheel.SOURCE.parents[2]), os.environ.get("PYTHONPATH", "")])}
    asked = msgspec.json.encode([wheel.definitions()[name] for name in names])
    with tempfile.TemporaryDirectory() as folder:  # operators that save write there
        said = subprocess.run(command, check=True, capture_output=True, cwd=folder, env=here, input=asked).stdout
    return msgspec.json.decode(said.splitlines()[-1], type=dict[str, Seen])


def say(tries: int, calls: int) -> None:
    """Print what is seen of the operators whose definitions come on standard input."""
    import paddle

    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Definition])
    warnings.filterwarnings("ignore")
    paddle.set_flags({"FLAGS_use_stride_kernel": False, "FLAGS_call_stack_level": 0})
    found = {each.name: _in_processes(each, tries, calls) for each in asked}
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(found) + b"\n")


def _in_processes(made: Definition, tries: int, calls: int) -> Seen:
    """Call it in a process, and in another one behind the call that ended it."""
    first, count = 0, 0
    shared, written = set[tuple[str, str]](), set[str]()
    for _ in range(12):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            _call(made, range(first, tries), calls - count, write)
        os.close(write)
        with os.fdopen(read, "rb") as told:
            rows = [msgspec.json.decode(line) for line in told if line.endswith(b"\n")]
        os.waitpid(child, 0)
        for row in rows:
            if isinstance(row, list):
                count += 1
                shared |= {(result, operand) for result, operand in row[0]}
                written |= set(row[1])
        first = 1 + max((row for row in rows if isinstance(row, int)), default=tries)
        if first >= tries or count >= calls:
            break
    return Seen(count, sorted(shared), sorted(written))


def _call(made: Definition, tries: Iterable[int], calls: int, write: int) -> None:
    """Call it with one guess after another, in a process that ends here: the number of each, and behind it what was seen."""
    import paddle

    for end in ENDS:
        signal.signal(end, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        for k in tries:
            os.write(write, b"%d\n" % k)
            signal.alarm(2)
            guess = _Guess(random.Random(f"{made.name} {k}"))
            arguments = guess.arguments(made)
            before = [tensor.numpy().tobytes() for _, tensor in guess.tensors]
            try:
                given = getattr(paddle._C_ops, made.name[6:])(*arguments)
            except Exception:
                continue  # refused
            results = list(given) if isinstance(given, (tuple, list)) else [given]
            shared = [(made.results[r], operand) for r, result in enumerate(results) for operand in guess.sharing(result)]
            after = [tensor.numpy().tobytes() for _, tensor in guess.tensors]
            written = [name for (name, _), old, new in zip(guess.tensors, before, after, strict=True) if old != new]
            os.write(write, msgspec.json.encode((shared, written)) + b"\n")
            calls -= 1
            if not calls:
                break
    finally:
        os._exit(0)


class _Guess:
    """Operands and attributes of one call.

    Attributes:
        tensors: Names of operands, and tensors among them.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tensors: list[tuple[str, Any]] = []
        self.shape, self.dtype, self.alike = rng.choice(SHAPES), rng.choice(DTYPES), rng.random() < 0.55

    def arguments(self, made: Definition) -> list[Any]:
        """Tensors first, then attributes in their order; those that may be tensors too stand before the others, or among them."""
        operands, movable = list[Any](), list[Any]()
        for name, kind, optional in zip(made.operands, made.operand_types, made.optional, strict=True):
            if "Attribute" in kind:
                movable.append(self.attribute(name, "Array<Int" if "IntArray" in kind else kind))
            elif optional and self.rng.random() < 0.5:
                operands.append(None)
            elif "Vector" in kind:
                operands.append([self.tensor(name) for _ in range(self.rng.choice((1, 1, 2, 3)))])
            else:
                operands.append(self.tensor(name))
        attributes = [self.attribute(name, kind) for name, kind in zip(made.attributes, made.attribute_types, strict=True)]
        places = sorted(self.rng.randint(0, len(attributes)) if self.rng.random() < 0.4 else 0 for _ in movable)
        for place, each in reversed(list(zip(places, movable, strict=True))):
            attributes.insert(place, each)
        return [*operands, *attributes]

    def tensor(self, name: str) -> Any:
        """A tensor of the shape of the others, or of another one."""
        import paddle

        shape = self.shape if self.alike or self.rng.random() < 0.5 else self.rng.choice(SHAPES)
        dtype = self.rng.choice(("int64", "int32")) if INTEGERS.search(name) and self.rng.random() < 0.8 else self.dtype
        dtype = "bool" if "mask" in name and self.rng.random() < 0.6 else dtype
        draw = np.random.default_rng(self.rng.randrange(1 << 30))
        made = paddle.to_tensor((draw.integers(0, 2, shape) if "int" in dtype else draw.random(shape) + 0.1).astype(dtype))
        self.tensors.append((name, made))
        return made

    def attribute(self, name: str, kind: str) -> Any:
        """A value of an attribute's type."""
        import paddle

        if "Int" in kind and "Array" in kind:
            return self.rng.choice(LISTS.get(name, [[0], [1], [], [1, 1], [2, 2], [0, 1], [-1]]))
        if "Array" in kind:
            return self.rng.choice(([], [1.0])) if "Str" not in kind else []
        if "Int" in kind:
            return self.rng.choice((0, 1, -1, 1, 2)) if name not in ("group", "groups", "nranks") else 1
        if "Bool" in kind:
            return self.rng.random() < 0.4
        if "Str" in kind:
            return self.rng.choice(WORDS.get(name, ["", "sum", "NCHW", "none"]))
        if "DataType" in kind:
            return self.rng.choice((paddle.float32, paddle.float32, paddle.int64, paddle.float64))
        if "Place" in kind:
            return paddle.CPUPlace()
        return self.rng.choice((0.5, 1.0, 0, 1, 2) if "Scalar" in kind else (0.5, 1.0, 0.1, 0.0))

    def sharing(self, result: Any) -> list[str]:
        """Operands with which a result, or one of a vector's tensors, has memory in common."""
        found = []
        for each in result if isinstance(result, (tuple, list)) else [result]:
            mine = _span(each)
            for name, tensor in self.tensors:
                other = _span(tensor)
                if max(mine.start, other.start) < min(mine.stop, other.stop):
                    found.append(name)
        return found


def _span(tensor: Any) -> range:
    """Addresses of a tensor."""
    import paddle

    if not isinstance(tensor, paddle.Tensor) or not tensor._is_initialized() or not tensor.size:
        return range(0)
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.element_size() * tensor.size)
