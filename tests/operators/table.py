"""`interlace/ir/operators.py` from the installed wheel: `python -m tests.operators.table` says what differs, `--write` writes it."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

from interlace.ir import operators
from tests.operators import wheel
from tests.operators.wheel import Definition

FILE = Path(operators.__file__)
DRAWING = re.compile(r"(^|_)(seed|rng|random|dropout|drop_out|sampler|sampling)\d*(_|$)")
"""Words in the name of an operator, of an attribute or of a result of one that draws."""
CODE = ("if", "while", "pylayer", "cuda_graph", "select_input", "select_output")
"""Control flow, and what Paddle puts into its blocks: defined by hand in Paddle, without a kernel."""
JUDGED = {
    "draws": {
        "fused_gate_attention": "phi/kernels/funcs/fused_gate_attention.h increments the generator",
        "dgc": "its GPU kernel is of a library outside of Paddle",
    },
    "acts": {
        "enable_check_model_nan_inf": "sets a flag of the process",
        "disable_check_model_nan_inf": "sets a flag of the process",
        "accuracy_check": "raises an error",
        "barrier": "lets ranks wait",
        "comm_init_all": "makes communicators",
        "sync_batch_norm": "communicates over a group that no attribute names",
        "sync_batch_norm_grad": "communicates over a group that no attribute names",
        "sync_batch_norm_sp": "communicates over a group that no attribute names",
        "sync_batch_norm_grad_sp": "communicates over a group that no attribute names",
        "tensorrt_engine": "runs what an attribute holds",
        "fusion_group": "runs what an attribute holds",
        "ap_facade": "runs what an attribute holds",
        "ap_variadic": "runs what an attribute holds",
        "ap_trivial_fusion_begin": "runs what an attribute holds",
        "ap_trivial_fusion_end": "runs what an attribute holds",
    },
    "computes": {
        "random_routing": "routes tokens by numbers that it is given",
        "roi_align": "samples at places that attributes give",
        "psroi_pool": "samples at places that attributes give",
    },
}
"""What neither machine code nor definition tells, by class, with the reason."""


def class_of(definition: Definition, drawing: set[str], acting: set[str]) -> str:
    """What an operator does beside computing its results: a name of `operators`' lists, in lower case.

    Args:
        definition: As Paddle defines it.
        drawing, acting: Kernels of the wheel that draw, and that write to the world outside.
    """
    dialect, _, kind = definition.name.rstrip("_").partition(".")
    judged = [which for which, kinds in JUDGED.items() if dialect == "pd_op" and kind in kinds]
    if judged:
        return judged[0]
    if dialect == "dist_op":
        return "acts"  # they move tensors between ranks
    if dialect == "cf" or (dialect == "pd_op" and kind in CODE):
        return "controls"
    by_name = any(DRAWING.search(word) for word in wheel.words_of(definition))
    if definition.kernel in drawing or (by_name and not is_gradient(kind)):
        return "draws"
    return "acts" if definition.kernel in acting or (definition.kernel and not definition.results and not is_send(kind)) else "computes"


def is_gradient(kind: str) -> bool:
    """Whether it is a gradient: what forward drew comes to it as an operand, and only its code says that it draws anew."""
    return "_grad" in kind


def is_send(kind: str) -> bool:
    """Whether it gives nothing because it sends: the order of communication is held by group."""
    return "send" in kind


def derived() -> dict[str, set[str]]:
    """Class -> operators, as `operators` names them."""
    drawing, acting = (set(wheel.reaching(what)) for what in (wheel.DRAWS, wheel.ACTS))
    found: dict[str, set[str]] = {name: set() for name in ("draws", "acts", "controls", "computes")}
    for definition in wheel.definitions().values():
        found[class_of(definition, drawing, acting)].add(operators.key(definition.name))
    return found


def text(classes: dict[str, set[str]]) -> str:
    """The module with these lists."""
    source = FILE.read_text()
    for name, keys in classes.items():
        rows = textwrap.fill(" ".join(sorted(keys)), 136, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        head = f'{name.upper()} = _names("""\n'
        source = re.sub(rf'^{re.escape(head)}(?:    .*\n)*"""', f'{head}{rows}\n"""', source, flags=re.M)
    return source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the module anew")
    made = text(derived())
    if parser.parse_args().write:
        FILE.write_text(made)
    elif made != FILE.read_text():
        print(f"{FILE} differs from the installed wheel; run python -m tests.operators.table --write and read the difference")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
