"""The printed form of a program and its parser; `parse(show(p)) == p` for every verified program.

    program rank=0 world=2 mode=train
    pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=1F1B
    group 17 = 0,1
    #0 %0:float32[4,4]!"w" = builtin.parameter() forward
    #1 %1:float32[2,4]"x" = pd_op.data() forward
    #2 %2:float32[2,4] = pd_op.matmul(%1, %0) forward layer="fc1" {"transpose_x":false}
    #3 %3:float32[2,4]~2 = pd_op.all_reduce_(%2) forward group=17 inplace=0:0
    job forward_0 forward 0: 2-3@0
    job forward_1 forward 1: 2-3@1 | 3@1<2@1

A value is `%id:dtype[shape]`, then `~storage` if it shares another value's memory, `!` if it is persistable, `^memory` if
it is not on the device, and its name. `_` is an absent operand. An operation's line ends with its attributes as JSON. A job lists
its op instances; after `|` follow the waits of the host: `3@1<2@1` waits for operation 2 of micro-batch 1 after operation 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec

from interlace.errors import ProgramError
from interlace.ir.program import ABSENT, Event, Group, Job, Memory, Op, OpInstance, Pipeline, Program, Role, TensorType, Value

_VALUE = re.compile(
    r"%(?P<id>\d+):(?P<dtype>[a-z0-9_]+)(?P<shape>\[[-\d,]*\])?(?P<elements><[^>]*>)?"
    r"(?:~(?P<storage>\d+))?(?P<persistable>!)?(?:\^(?P<memory>\w+))?(?P<name>\"(?:[^\"\\]|\\.)*\")?"
)
_OP = re.compile(
    r'#(?P<id>\d+) (?:(?P<results>%(?:"(?:[^"\\]|\\.)*"|[^"=])*) = )?'
    r"(?P<name>[\w.]+)\((?P<operands>[^)]*)\) (?P<role>\w+)(?P<rest>.*)"
)
_FIELD = re.compile(r'\s*(?:(?P<key>[a-z_]+)=(?P<value>"(?:[^"\\]|\\.)*"|[^\s{]+)|(?P<attrs>\{.*\})$)')
_TYPE = re.compile(r"([a-z0-9_]+)\[([-\d,]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?@(\d+)")
_PAIRS = ("inplace", "views")
_TEXTS = ("layer", "stream")
_NUMBERS = ("chunk", "group", "priority", "origin", "num_blocks")


def show(program: Program) -> str:
    """The program as text, one operation per line."""
    values = {value.id: value for value in program.values}
    pipe = program.pipeline
    lines = [
        f"program rank={program.rank} world={program.world} mode={program.mode}" + (f" paddle={program.paddle}" if program.paddle else "")
    ]
    lines.append(
        f"pipeline stage={pipe.stage} of {pipe.num_stages} micro_batches={pipe.num_micro_batches} "
        f"chunks={pipe.num_chunks} schedule={pipe.schedule}"
    )
    lines += [f"alike {','.join(map(str, program.equivalent_ranks))}"] if program.equivalent_ranks else []
    lines += [f"passes {' '.join(program.passes)}"] if program.passes else []
    lines += [f"refusal {_quote(why)}" for why in program.refusals]
    lines += [f"group {group.id} = {','.join(map(str, group.ranks))}" for group in program.groups]
    lines += [show_op(op, values) for op in program.ops]
    lines += [show_job(job) for job in program.jobs]
    lines += [f"event {e.name} {_item(e.record)} -> {' '.join(map(_item, e.waits))}" for e in program.events]
    return "\n".join(lines) + "\n"


def show_op(op: Op, values: dict[int, Value]) -> str:
    """The line of one operation."""
    results = ", ".join(show_value(values[value]) for value in op.results)
    operands = ", ".join("_" if value == ABSENT else f"%{value}" for value in op.operands)
    text = f"#{op.id} " + (f"{results} = " if results else "") + f"{op.name}({operands}) {op.role}"
    for key, default in (("chunk", 0), ("layer", ""), ("group", -1), ("stream", ""), ("priority", 0), ("origin", -1), ("num_blocks", 0)):
        field = getattr(op, key)
        if field != default:
            text += f" {key}={_quote(field) if isinstance(field, str) else field}"
    text += f" no_buffer={','.join(map(str, op.no_buffer))}" if op.no_buffer else ""
    for key in _PAIRS:
        pairs = getattr(op, key)
        text += f" {key}={','.join(f'{a}:{b}' for a, b in pairs)}" if pairs else ""
    return text + (" " + msgspec.json.encode(op.attrs, order="deterministic").decode() if op.attrs else "")


def show_value(value: Value) -> str:
    """A value where it is defined: type, storage, name."""
    text = f"%{value.id}:{value.dtype}"
    if value.dtype == "vector":
        text += "<" + ";".join(f"{e.dtype}{_shape(e.shape)}" for e in value.elements) + ">"
    elif value.dtype != "null":
        text += _shape(value.shape)
    text += f"~{value.storage}" if value.storage != value.id else ""
    text += "!" if value.persistable else ""
    text += f"^{value.memory}" if value.memory != "device" else ""
    return text + (_quote(value.name) if value.name else "")


def show_job(job: Job) -> str:
    """The line of a job; consecutive op ids of one micro-batch are printed as ranges."""
    parts: list[str] = []
    run: list[int] = []
    for op_id, micro_batch in job.items:
        if run and run[2] == micro_batch and run[1] + 1 == op_id:
            run[1] = op_id
            continue
        parts += [_run(run)] if run else []
        run = [op_id, op_id, micro_batch]
    parts += [_run(run)] if run else []
    parts += ["|", *(f"{_item(after)}<{_item(awaited)}" for after, awaited in job.host_waits)] if job.host_waits else []
    return f"job {job.name} {job.kind} {job.micro_batch}: {' '.join(parts)}".rstrip()


def parse(text: str, where: str = "program text") -> Program:
    """Read the printed form; blank lines and lines that start with `//` are skipped. Raises ProgramError, which names `where` and the line,
    if a line cannot be read."""
    ops: list[Op] = []
    values: dict[int, Value] = {}
    fields: dict[str, Any] = {"groups": [], "jobs": [], "events": [], "refusals": []}
    for number, line in _lines(text):
        try:
            if line.startswith("#"):
                ops.append(_parse_op(line, values))
            else:
                _parse_head(line, fields)
        except (ValueError, KeyError, msgspec.DecodeError) as error:
            raise ProgramError(f"{where}:{number}: cannot read {line[:80]!r} ({error}); the form is in interlace/ir/text.py") from error
    head: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Program(ops=tuple(ops), values=tuple(values[key] for key in sorted(values)), **head)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if line and not line.startswith("//"):
            yield number, line


def _parse_head(line: str, fields: dict[str, Any]) -> None:
    word, _, rest = line.partition(" ")
    if word == "program":
        pairs = dict(part.split("=", 1) for part in rest.split())
        fields.update(rank=int(pairs["rank"]), world=int(pairs["world"]), mode=pairs["mode"], paddle=pairs.get("paddle", ""))
    elif word == "pipeline":
        found = re.fullmatch(r"stage=(\d+) of (\d+) micro_batches=(\d+) chunks=(\d+) schedule=(\S+)", rest)
        if not found:
            raise ValueError("expected stage=.. of .. micro_batches=.. chunks=.. schedule=..")
        stage, stages, count, chunks, schedule = found.groups()
        fields["pipeline"] = Pipeline(int(stage), int(stages), int(count), int(chunks), schedule)
    elif word == "alike":
        fields["equivalent_ranks"] = tuple(int(rank) for rank in rest.split(","))
    elif word == "passes":
        fields["passes"] = tuple(rest.split())
    elif word == "refusal":
        fields["refusals"].append(_text(rest))
    elif word == "group":
        number, _, ranks = rest.partition("=")
        fields["groups"].append(Group(int(number), tuple(int(r) for r in ranks.split(",") if r.strip())))
    elif word == "job":
        head, _, body = rest.partition(":")
        items, _, waits = body.partition("|")
        name, kind, micro_batch = head.split()
        fields["jobs"].append(Job(name, kind, int(micro_batch), tuple(_items(items)), tuple(map(_wait, waits.split()))))
    elif word == "event":
        name, record, _, *waiting = rest.split()
        fields["events"].append(Event(name, next(_items(record)), tuple(_items(" ".join(waiting)))))
    else:
        raise ValueError("expected program, pipeline, alike, passes, refusal, group, #op, job or event")


def _parse_op(line: str, values: dict[int, Value]) -> Op:
    found = _OP.fullmatch(line)
    if not found:
        raise ValueError("expected `#id %results = name(operands) role fields`")
    if found["role"] not in get_args(Role):
        raise ValueError(f"role {found['role']!r}, expected one of {get_args(Role)}")
    parts = list(_VALUE.finditer(found["results"] or ""))
    if ", ".join(part[0] for part in parts) != (found["results"] or "").strip():
        raise ValueError(f"results {found['results']!r}, expected `%id:dtype[shape], ...`")
    results = [_parse_value(part) for part in parts]
    values.update({value.id: value for value in results})
    operands = tuple(ABSENT if part == "_" else int(part[1:]) for part in found["operands"].replace(",", " ").split())
    more = _fields(found["rest"])
    return Op(int(found["id"]), found["name"], operands, tuple(v.id for v in results), found["role"], **more)  # type: ignore[arg-type]


def _fields(rest: str) -> dict[str, Any]:
    more: dict[str, Any] = {}
    at = 0
    rest = rest.rstrip()
    while at < len(rest):
        part = _FIELD.match(rest, at)
        if not part:
            raise ValueError(f"field at {rest[at : at + 30]!r}")
        at = part.end()
        if part["attrs"]:
            more["attrs"] = msgspec.json.decode(part["attrs"])
        else:
            more[part["key"]] = _field(part["key"], part["value"])
    return more


def _field(key: str, text: str) -> Any:
    if key in _PAIRS:
        return tuple((int(a), int(b)) for a, b in (pair.split(":") for pair in text.split(",")))
    if key == "no_buffer":
        return tuple(int(k) for k in text.split(","))
    if key in _TEXTS:
        return _text(text)
    if key in _NUMBERS:
        return int(text)
    raise ValueError(f"field {key!r}, expected one of {sorted((*_PAIRS, *_TEXTS, *_NUMBERS, 'no_buffer'))}")


def _text(quoted: str) -> str:
    return msgspec.json.decode(quoted, type=str)


def _parse_value(part: re.Match[str]) -> Value:
    number, dtype = int(part["id"]), part["dtype"]
    written = {"vector": ("<...>", "elements"), "null": ("", "")}.get(dtype, ("[...]", "shape"))
    for what in ("shape", "elements"):
        if (part[what] is not None) != (what == written[1]):
            raise ValueError(f"type {dtype}{part['shape'] or ''}{part['elements'] or ''}, expected {dtype}{written[0]}")
    elements = tuple(map(_parse_type, part["elements"][1:-1].split(";"))) if (part["elements"] or "<>") != "<>" else ()
    name = _text(part["name"]) if part["name"] else ""
    memory = part["memory"] or "device"
    if memory not in get_args(Memory):
        raise ValueError(f"memory {memory!r}, expected one of {get_args(Memory)}")
    storage = int(part["storage"]) if part["storage"] else number
    return Value(number, _dims((part["shape"] or "[]")[1:-1]), dtype, storage, name, bool(part["persistable"]), memory, elements)  # type: ignore[arg-type]


def _parse_type(text: str) -> TensorType:
    part = _TYPE.fullmatch(text)
    if part is None:
        raise ValueError(f"element type {text!r}, expected one such as float32[2,3]")
    return TensorType(_dims(part[2]), part[1])


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(dim) for dim in text.split(",") if dim)


def _shape(dims: Iterable[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"


def _quote(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _item(item: OpInstance) -> str:
    return f"{item[0]}@{item[1]}"


def _run(run: list[int]) -> str:
    return f"{run[0]}-{run[1]}@{run[2]}" if run[1] > run[0] else f"{run[0]}@{run[2]}"


def _wait(text: str) -> tuple[OpInstance, OpInstance]:
    found = tuple(_items(text.replace("<", " ")))
    if "<" not in text or len(found) != 2:
        raise ValueError(f"wait {text!r}, expected 7@0<3@0")
    return found[0], found[1]


def _items(text: str) -> Iterator[OpInstance]:
    for part in text.split():
        found = _RANGE.fullmatch(part)
        if not found:
            raise ValueError(f"item {part!r}, expected 3@0 or 3-7@0")
        first, last, micro_batch = int(found[1]), int(found[2] or found[1]), int(found[3])
        yield from ((op_id, micro_batch) for op_id in range(first, last + 1))
