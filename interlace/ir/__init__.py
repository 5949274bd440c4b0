"""The IR: the program of one rank, which passes read and rewrite."""

from interlace.ir.dump import load, save
from interlace.ir.edit import Edit
from interlace.ir.graph import Graph, dependencies
from interlace.ir.program import (
    ABSENT,
    Event,
    Group,
    Job,
    Op,
    OpInstance,
    Pipeline,
    Program,
    TensorType,
    Value,
)
from interlace.ir.text import parse, show
from interlace.ir.verify import describe, verify

__all__ = [
    "ABSENT",
    "Edit",
    "Event",
    "Graph",
    "Group",
    "Job",
    "Op",
    "OpInstance",
    "Pipeline",
    "Program",
    "TensorType",
    "Value",
    "dependencies",
    "describe",
    "load",
    "parse",
    "save",
    "show",
    "verify",
]
