"""`docs/options.md`: every option of every pass, written from the records themselves."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

import msgspec
import yaml

from interlace.config import PLAIN_FIELDS, Config
from interlace.passes import Pass
from interlace.passes.base import option_name
from interlace.passes.pipeline import built_in

HEAD = """\
# Options

Written by `python -m interlace.report.options` from the passes' own records; a test compares the two. An option is set in YAML
(`schedule_1f1b: {interleave: mixed}`), as a keyword (`interlace.enable(strategy, schedule_1f1b={"interleave": "mixed"})`) or as a flag
(`strategy.interlace.schedule_1f1b.interleave = "mixed"`). A pass is `on`, `off` or a table of its options; sizes are bytes, or text such
as `64MiB` and `1.5GB`. Files that a YAML file names are found from its own folder, those of keywords from the working directory.

Later calls of `interlace.enable` go on top of earlier ones, keywords on top of a file. Refused before anything is built:
`schedule_1f1b: off` while passes are on that need a schedule (`{interleave: off}` keeps Paddle's own order of jobs),
`overlap_column_backward` without `split_backward`, `schedule_file` together with another `interleave`, an offload that is on without
anything to move. Flags of Paddle that do nothing there (`FLAGS_1f1b_backward_forward_overlap`,
`FLAGS_mp_async_allreduce_in_backward`, `allreduce_matmul_grad_overlapping`, `enable_send_recv_overlap`) are read when the model is
built and count as asked for, unless an option of ours says otherwise; the log tells.
"""
WHEN = " When: "
"""What an option does ends here in a docstring; when to set it follows."""
_ENTRY = re.compile(r"^ {8}(\w+): (.*)$")
_SECTION = re.compile(r"^ {4}(Options|Attributes):$")
_WORDS = {"bool": "on/off", "str": "text", "int": "number", "float": "number", "NoneType": "none", "tuple": "list"}


def reference() -> str:
    """The whole text."""
    parts = [HEAD, "## Interlace itself\n", _table(Config, PLAIN_FIELDS)]
    for kind in built_in():
        switch = "on by default" if kind.is_default else "off by default"
        first = (inspect.getdoc(kind) or "").partition("\n")[0]
        parts += [f"## `{option_name(kind.name)}` ({switch})\n", first + "\n", _table(kind, kind.__struct_fields__)]
    return "\n".join([*parts, "## Presets\n", _presets()])


def _table(kind: type[msgspec.Struct], names: typing.Collection[str]) -> str:
    if not names:
        return "No options.\n"
    told, hints = meanings(kind), typing.get_type_hints(kind)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    rows = []
    for name in names:
        meaning, _, when = map(_cell, told.get(name, "").partition(WHEN))
        rows.append(f"| `{name}` | {_type(hints[name], name)} | {_default(defaults[name])} | {meaning} | {when} |")
    return "\n".join(["| option | type | default | meaning | when to set it |", "| --- | --- | --- | --- | --- |", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def meanings(kind: type) -> dict[str, str]:
    """What the docstrings of a record and of its bases say of each field, on one line.

    >>> from interlace.passes.base import REGISTRY
    >>> meanings(REGISTRY["name-streams"])["priority"].partition(WHEN)[0]
    'Stream priority of communication; 0 is normal, lower runs first.'
    """
    found: dict[str, str] = {}
    for each in reversed([base for base in kind.__mro__ if base not in (Pass, msgspec.Struct, object)]):
        inside, name = False, ""
        for line in (each.__doc__ or "").splitlines():
            entry = _ENTRY.match(line)
            if _SECTION.match(line):
                inside, name = True, ""
            elif inside and entry:
                name, found[entry[1]] = entry[1], entry[2]
            elif inside and name and line.startswith(" " * 12):
                found[name] += " " + line.strip()
            elif line.strip():
                inside = False
    return found


def _type(hint: typing.Any, name: str) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    kinds = [kind for kind in typing.get_args(hint) if kind is not Ellipsis]
    if typing.get_origin(hint) is tuple:
        return "list of " + _type(kinds[0], name) + ("s" if kinds[0] in (int, float) else "")
    if kinds:
        return " or ".join(_type(kind, name) for kind in kinds)
    if hint is int and name.endswith(("_bytes", "_budget")):
        return "size"
    return _WORDS.get(getattr(hint, "__name__", ""), str(hint))


def _default(value: object) -> str:
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return "`on`" if value else "`off`"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"`{value >> 20}MiB`"
    return f"`{value}`"


def _presets() -> str:
    import importlib.resources

    folder = Path(str(importlib.resources.files("interlace.configs"))) / "presets"
    lines = ["A preset is named where a file could stand: `--config overlap`, `interlace.enable(strategy, \"overlap\")`.\n"]
    for path in sorted(folder.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        told = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
        options = ", ".join(f"`{key}: {_flow(value)}`" for key, value in yaml.load(text, yaml.BaseLoader).items())
        lines.append(f"- `{path.stem}`: {told} {options}")
    return "\n".join([*lines, ""])


def _flow(value: object) -> str:
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False).strip().replace("'", "")


if __name__ == "__main__":
    print(reference(), end="")
