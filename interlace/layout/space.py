"""The layouts that can be filled into a command with placeholders: names, their values, and which combinations are possible."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec
import yaml

from interlace.errors import ConfigError
from interlace.files import MIB, read_text

Number = int | str
PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")
KNOWN = {
    "pp": "pipeline stages",
    "mp": "ranks that share each layer (tensor parallelism)",
    "dp": "replicas, what pp and mp leave of the GPUs",
    "vpp": "model chunks of a stage",
    "m": "micro-batches of a step",
    "sharding": "sharding stage",
    "recompute": "what the script recomputes",
}
"""Placeholders whose meaning is known; all others are the script's own, and the user must give their values."""
SHARDINGS = (0, 1, 2, 3)
RECOMPUTES = ("none", "full")
MOST_CHUNKS = 4
MOST_LAYOUTS = 100_000
"""More layouts than this must be a mistake."""


class Layout(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A value for each name, in the order of the names.

    >>> str(Layout((("pp", 2), ("recompute", "full"))))
    'pp 2, recompute full'
    """

    values: tuple[tuple[str, Number], ...]

    def get(self, name: str) -> Number | None:
        """The value of a name; None if it has none."""
        return dict(self.values).get(name)

    def number(self, name: str, default: int = 1) -> int:
        """The same as a number."""
        found = self.get(name)
        return found if isinstance(found, int) else default

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster and the model that layouts are for.

    Attributes:
        gpus, gpus_a_host: Number of GPUs in all, and on each host.
        layers, heads, batch: Sizes of the model: pp divides the layers, mp the heads, replicas and micro-batches the batch; 0: not known.
    """

    gpus: int
    gpus_a_host: int
    layers: int = 0
    heads: int = 0
    batch: int = 0

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_a_host"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected 1 or more")
        for name, option in (("layers", "--layers"), ("heads", "--heads"), ("batch", "--batch-size")):
            if getattr(self, name) < 0:
                raise ConfigError(f"{option} {getattr(self, name)}: expected 1 or more")
        if self.gpus > self.gpus_a_host and self.gpus % self.gpus_a_host:
            raise ConfigError(f"--gpus {self.gpus}: expected a multiple of the {self.gpus_a_host} of each host (--gpus-a-host)")


@dataclass(frozen=True, slots=True)
class Template:
    """A command with placeholders in its arguments and its environment variables."""

    script: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The placeholders without repetitions, in order of first occurrence."""
        texts = (*self.arguments, *self.environment.values())
        return tuple(dict.fromkeys(name for text in texts for name in PLACEHOLDER.findall(text)))

    def filled(self, layout: Layout) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Arguments and environment variables for a layout."""
        values = {name: str(value) for name, value in layout.values}

        def fill(text: str) -> str:
            return PLACEHOLDER.sub(lambda found: values[found[1]], text)

        return tuple(map(fill, self.arguments)), tuple((name, fill(text)) for name, text in sorted(self.environment.items()))


class Alternatives(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of alternatives (YAML), for scripts without options.

    Attributes:
        values: Name -> its possible values, as with `--try`.
        environment: Variable -> its text, with placeholders.
        layouts: Whole layouts, instead of all combinations of values.
    """

    values: dict[str, list[Number]] = msgspec.field(default_factory=dict, name="try")
    environment: dict[str, str] = {}
    layouts: list[dict[str, Number]] = []


def read_alternatives(path: str) -> Alternatives:
    """Read a file of alternatives. Raises ConfigError if it cannot be read or is not valid."""
    text = read_text(path, MIB, "alternatives (YAML with try, environment or layouts)", ConfigError)
    try:
        return msgspec.convert(yaml.safe_load(text) or {}, Alternatives)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}; expected try, environment or layouts, as docs/guide-choose.md shows them") from error


def parse_tries(texts: Sequence[str]) -> dict[str, list[Number]]:
    """Name -> values, from texts such as `name=1,2,4`. Raises ConfigError for other texts.

    >>> parse_tries(["pp=1,2", "recompute=none,full"])
    {'pp': [1, 2], 'recompute': ['none', 'full']}
    """
    found: dict[str, list[Number]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        words = [word.strip() for word in values.split(",")]
        if not equals or not PLACEHOLDER.fullmatch(f"{{{name}}}") or not all(words):
            raise ConfigError(f"--try {text}: expected a name and its values, such as pp=1,2,4")
        if name in found:
            raise ConfigError(f"--try {text}: {name} has its values already; expected each name once")
        found[name] = [int(word) if word.isdigit() else word for word in dict.fromkeys(words)]
    return found


def layouts_of(
    template: Template, cluster: Cluster, tries: Mapping[str, list[Number]], whole: Sequence[Mapping[str, Any]] = ()
) -> list[Layout]:
    """All layouts for a command, in a fixed order: those in `whole` if there are any, else all possible combinations of the values in
    `tries` and, for other names, of the values that fit the cluster.

    Raises ConfigError if an unknown placeholder has no values, a name has values but is not in the command, or no layout is possible.
    """
    names = template.names
    if not names:
        raise ConfigError(
            "there is nothing to choose: expected placeholders in the arguments of the script, such as -- --pp {pp} --mp {mp}, or in "
            "the environment of --alternatives"
        )
    given = {*tries, *(name for each in whole for name in each)}
    if unused := sorted(given - {*names}):
        raise ConfigError(f"{unused[0]} has values and no place: expected {{{unused[0]}}} in the arguments of the script")
    if whole:
        found = [_whole(names, each, cluster) for each in whole]
    else:
        found = list(dict.fromkeys(_combined(names, cluster, tries)))
    if not found:
        raise ConfigError(f"no layout of {cluster.gpus} GPUs is left: {_why_none(names, cluster, tries)}")
    return found


def _whole(names: Sequence[str], values: Mapping[str, Any], cluster: Cluster) -> Layout:
    if missing := [name for name in names if name not in values]:
        raise ConfigError(f"layouts: {dict(values)} has no value for {missing[0]}; expected one for each of {', '.join(names)}")
    made = Layout(tuple((name, values[name]) for name in names))
    if why := contradiction(made, cluster):
        raise ConfigError(f"layouts: {made}: {why}")
    return made


def _combined(names: Sequence[str], cluster: Cluster, tries: Mapping[str, list[Number]]) -> Iterator[Layout]:
    ranges = {name: _values(name, cluster, tries) for name in names if name not in ("dp", "m")}
    count = 0
    for values in itertools.product(*ranges.values()):
        chosen: dict[str, Number] = dict(zip(ranges, values, strict=True))
        ways = _number(chosen, "pp") * _number(chosen, "mp")
        if cluster.gpus % ways:
            continue
        shape = {"pp", "mp", "dp"} & {*names}
        replicas = cluster.gpus // ways if shape else 1
        if "dp" in names:
            if "dp" in tries and replicas not in tries["dp"]:
                continue
            chosen["dp"] = replicas
        for batches in _micro_batches(chosen, replicas, cluster, tries) if "m" in names else (None,):
            both = chosen if batches is None else {**chosen, "m": batches}
            made = Layout(tuple((name, both[name]) for name in names))
            if not contradiction(made, cluster) and _fits(both, cluster, tries):
                count += 1
                if count > MOST_LAYOUTS:
                    raise ConfigError(f"more than {MOST_LAYOUTS} layouts; give fewer values with --try")
                yield made


def _values(name: str, cluster: Cluster, tries: Mapping[str, list[Number]]) -> Sequence[Number]:
    if name in tries:
        return tries[name]
    within = min(cluster.gpus, cluster.gpus_a_host)
    ranges: dict[str, Sequence[Number]] = {
        "pp": [each for each in divisors(cluster.gpus) if each <= (cluster.layers or inf)],
        "mp": [each for each in divisors(within) if not cluster.gpus % each],
        "vpp": [1 << k for k in range(MOST_CHUNKS.bit_length()) if 1 << k <= MOST_CHUNKS],
        "sharding": SHARDINGS,
        "recompute": RECOMPUTES,
    }
    if name not in ranges:
        raise ConfigError(f"{{{name}}}: what may it be? expected --try {name}=...; known by themselves are {', '.join(KNOWN)}")
    return ranges[name]


def _micro_batches(chosen: Mapping[str, Number], replicas: int, cluster: Cluster, tries: Mapping[str, list[Number]]) -> Iterator[Number]:
    """Numbers of micro-batches of a step: those given, else the number of stages times 1, 2, 4, ..."""
    if "m" in tries:
        yield from tries["m"]
        return
    if not cluster.batch:
        raise ConfigError("{m}: how many sequences has a step? expected --batch-size N, or --try m=...")
    count = _number(chosen, "pp")
    while count * replicas <= cluster.batch:
        yield count
        count *= 2


def _fits(chosen: Mapping[str, Number], cluster: Cluster, tries: Mapping[str, list[Number]]) -> bool:
    """Whether pp, mp, replicas and micro-batches divide the known sizes of the model."""
    pp, mp, batches = (_number(chosen, name) for name in ("pp", "mp", "m"))
    chunks = pp * _number(chosen, "vpp")
    replicas = max(1, cluster.gpus // (pp * mp))
    return not (cluster.layers % chunks or cluster.heads % mp or cluster.batch % (replicas * batches))


def contradiction(layout: Layout, cluster: Cluster) -> str:
    """Why no script could run the layout; empty if nothing speaks against it."""
    for name in ("pp", "mp", "dp", "vpp", "m"):
        value = layout.get(name)
        if value is not None and (not isinstance(value, int) or value < 1):
            return f"{name} is {value}, expected a number, 1 or more"
    pp, mp, vpp, batches = (layout.number(name) for name in ("pp", "mp", "vpp", "m"))
    if cluster.gpus % (pp * mp):
        return f"pp x mp is {pp * mp}, which does not divide {cluster.gpus} GPUs"
    dp = cluster.gpus // (pp * mp)
    if layout.number("dp", dp) != dp and {"pp", "mp"} <= {name for name, _ in layout.values}:
        return f"pp x mp x dp is {pp * mp * layout.number('dp')}, expected {cluster.gpus}"
    if vpp > 1 and pp == 1:
        return "vpp is for pipelines: expected 1 where pp is 1"
    if vpp > 1 and layout.get("m") is not None and batches % pp:
        return f"with vpp {vpp} Paddle needs a multiple of pp {pp} micro-batches"
    if layout.number("sharding", 0) > 0 and dp == 1:
        return "sharding needs replicas: expected 0 where dp is 1"
    return ""


def _why_none(names: Sequence[str], cluster: Cluster, tries: Mapping[str, list[Number]]) -> str:
    given = ", ".join(f"{name}={','.join(map(str, tries[name]))}" for name in names if name in tries)
    model = ", ".join(
        f"{value} {name}"
        for name, value in (("layers", cluster.layers), ("heads", cluster.heads), ("sequences a step", cluster.batch))
        if value
    )
    return (
        f"pp x mp x dp must be the number of GPUs, and what is given ({'; '.join(filter(None, (given, model))) or 'nothing'}) must divide"
    )


def divisors(number: int) -> list[int]:
    """The divisors of a number, in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [each for each in range(1, number + 1) if not number % each]


def _number(values: Mapping[str, Number], name: str) -> int:
    found = values.get(name, 1)
    return found if isinstance(found, int) and found > 0 else 1


def command_line(template: Template, layout: Layout) -> str:
    """The command line that starts the script with a layout."""
    arguments, environment = template.filled(layout)
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment), shlex.join([template.script, *arguments])])
