"""One-line faults of a file, found in its syntax tree: what a hurried change might get wrong."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
SWAPPED = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "bisect_left": "bisect_right",
    "bisect_right": "bisect_left",
    "union": "intersection",
    "issubset": "issuperset",
    "update": "clear",
    "flatnonzero": "nonzero",
}
SWAPPED |= {SWAPPED[name]: name for name in list(SWAPPED)}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.FloorDiv: ast.Mult,
    ast.Mult: ast.FloorDiv,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A part of a file's text, and what stands there instead.

    Attributes:
        kind: Of the fault, such as `comparison`.
        function: In which it is; empty outside of all.
        line: Of its beginning.
        begin, end: Of the part, in bytes.
        put: The text instead.
    """

    kind: str
    function: str
    line: int
    begin: int
    end: int
    put: str

    def planted_in(self, text: str) -> str:
        """The text with the fault. Offsets count bytes, as the syntax tree's do."""
        raw = text.encode()
        return (raw[: self.begin] + self.put.encode() + raw[self.end :]).decode()


def faults(text: str, rng: random.Random) -> list[Fault]:
    """The faults that a file may have; which variable stands in the place of another is drawn.

    Messages, annotations, docstrings, imports and what is raised are left alone.
    """
    finder = _Finder(text, rng)
    finder.visit(ast.parse(text))
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, text: str, rng: random.Random) -> None:
        self.rng, self.found = rng, list[Fault]()
        self.text, self.starts = text.encode(), [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.local: list[str] = []
        self.function = ""

    def put(self, kind: str, node: ast.expr | ast.stmt, new: ast.AST | str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        put = new if isinstance(new, str) else ast.unparse(new)
        put = f"({put})" if isinstance(node, ast.expr) and not isinstance(new, (str, ast.Tuple)) else put
        begin, end = (self.starts[line - 1] + at for line, at in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))
        if self.text[begin:end].decode() not in (put, put[1:-1]):
            self.found.append(Fault(kind, self.function, node.lineno, begin, end, put))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
            return
        for new in _changed(node):
            self.put(new[0], node, new[1])  # type: ignore[arg-type]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.local and len(self.local) > 1:
            self.put("wrong variable", node, self.rng.choice([name for name in self.local if name != node.id]))
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside, arguments = (self.local, self.function), node.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        names += [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        self.local, self.function = list(dict.fromkeys(names)), node.name
        for each in (*node.body, *arguments.defaults, *filter(None, arguments.kw_defaults)):
            self.visit(each)
        self.local, self.function = outside

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        if not isinstance(node.slice, ast.Tuple):
            self.visit(node.slice)


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    """The faults of one node: their kinds, and what stands in its place."""
    if isinstance(node, ast.Compare):
        if type(node.ops[0]) in FLIPPED:
            yield "comparison", ast.Compare(node.left, [FLIPPED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield "and / or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for k in range(len(node.values)):
            yield "condition dropped", ast.BoolOp(node.op, [*node.values[:k], *node.values[k + 1 :]])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield "negation", node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield "constant", repr(not node.value if isinstance(node.value, bool) else node.value + 1)
        if type(node.value) is int and node.value:
            yield "constant", repr(node.value - 1)
    elif isinstance(node, ast.IfExp):
        yield "negation", ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        yield from _filters(node)
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)) and len(node.elts) > 1 and not isinstance(getattr(node, "ctx", None), ast.Store):
        for k in range(len(node.elts)):
            yield "element dropped", type(node)(**{**dict(ast.iter_fields(node)), "elts": [*node.elts[:k], *node.elts[k + 1 :]]})
    elif isinstance(node, ast.Name) and node.id in SWAPPED and isinstance(node.ctx, ast.Load):
        yield "swapped function", SWAPPED[node.id]
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield from _other_end(node)
    elif isinstance(node, ast.Call):
        yield from _call(node)
    else:
        yield from _statement(node)


def _filters(node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Iterator[tuple[str, ast.AST | str]]:
    for k, inner in enumerate(node.generators):
        for n in range(len(inner.ifs)):
            kept = ast.comprehension(inner.target, inner.iter, [*inner.ifs[:n], *inner.ifs[n + 1 :]], inner.is_async)
            fields = dict(ast.iter_fields(node)) | {"generators": [*node.generators[:k], kept, *node.generators[k + 1 :]]}
            yield "condition dropped", ast.unparse(type(node)(**fields))


def _call(node: ast.Call) -> Iterator[tuple[str, ast.AST | str]]:
    """Other arguments: the first two in each other's place, or without the key that decides on an order."""
    in_any_order = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
    if len(node.args) > 1 and not in_any_order and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
        yield "arguments swapped", ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
    for k, each in enumerate(node.keywords):
        if each.arg == "key":
            yield "key dropped", ast.Call(node.func, node.args, [*node.keywords[:k], *node.keywords[k + 1 :]])


def _other_end(node: ast.Subscript) -> Iterator[tuple[str, ast.AST | str]]:
    """The first one for the last one, and the reverse."""
    at = ast.unparse(node.slice)
    if at in ("0", "-1"):
        yield "first / last", ast.Subscript(node.value, ast.Constant(-1 if at == "0" else 0), ast.Load())


def _statement(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    acts = isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield, ast.YieldFrom)) and not _tells(node.value)
    if acts or isinstance(node, (ast.AugAssign, ast.Delete)):
        yield "statement dropped", "pass"
    elif isinstance(node, (ast.Continue, ast.Break)):
        yield "early end", "break" if isinstance(node, ast.Continue) else "continue"
    elif isinstance(node, ast.If) and len(node.body) == 1 and not node.orelse and isinstance(node.body[0], (ast.Return, ast.Continue)):
        yield "condition dropped", "pass"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "early return", "return None"


def _tells(node: ast.expr) -> bool:
    """Whether a call only reports something."""
    name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    return name in ("decline", "change") or any(isinstance(each, ast.JoinedStr) for each in ast.walk(node))
