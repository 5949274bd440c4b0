"""The configuration: a record of options for each pass, from keywords, a dict or a YAML file, checked before anything is built.

    device: h200
    memory_budget: 70GB
    overlap_column_backward: {min_bytes: 1MB}
    schedule_1f1b: {interleave: dx-first}
    offload_activations: {modules: [mlp], fraction: 0.5}

A pass is named in snake case and is `off`, `on` or a table of its options. Sizes may be text such as `60GB` or `64MiB`. The memory
budget is bytes of device memory a rank, or, as a number with a point, a fraction of what Paddle's baseline holds on its fullest rank; with
a plus sign (`+8GB`), so much more than the baseline holds.

Files that a YAML file names (`device`, `plan`, options that end in `_file`) are found from its own folder; given as keywords or in a dict,
from the working directory.

A pass that needs what another gives (`offload_activations` needs a schedule) cannot stay on where that one is off: this is refused
rather than guessed. `schedule_1f1b: {interleave: off}` keeps Paddle's baseline order of jobs.
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import yaml

from interlace.cost_model import CostModel
from interlace.cost_model.profile import DeviceProfile, is_path, load_profile, profile_names
from interlace.errors import ConfigError
from interlace.files import read_text
from interlace.passes import REGISTRY, Pass, Pipeline, ReturnMemory, ThrottleHost, ordered
from interlace.passes.base import option_name
from interlace.user_passes import imported

MOST_BYTES = 1 << 20
"""Limit of a configuration file."""
MOST_NODES = 10_000
MOST_SIZE = 1 << 60
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>\$[^`]*)`)?$", re.DOTALL)
_FRACTION = re.compile(r"\d*\.\d*")
MOST_FRACTION, MOST_SHARE = 2.0, 100.0
"""Of what Paddle's baseline holds: a larger number with a point is more likely bytes without their unit; in percent more may be asked."""
LEAST_BARE = 1000
"""Bytes of a budget without a unit: a smaller number more likely lacks its GB or its percent sign."""
_PERCENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%")
KEY = "#"
"""Suffix of a dotted path in the marks of a file: the position of the option's name, without it that of its value."""


class Beyond(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As many bytes more than Paddle's baseline holds as a plan may hold; `NO_LIMIT`: as many as it likes.

    >>> str(Beyond(8 * 10**9)), str(NO_LIMIT)
    ('+8000000000B', 'off')
    """

    more_bytes: int

    def __str__(self) -> str:
        return "off" if self == NO_LIMIT else f"+{self.more_bytes}B"


NO_LIMIT = Beyond(MOST_SIZE)
MemoryBudget = int | float | Beyond | None
"""Bytes or a fraction, which every plan keeps; more than the baseline holds; None for what it holds."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A checked configuration.

    Attributes:
        enable: False leaves Paddle's plan and programs untouched. When: to compare with unmodified Paddle, or to rule out Interlace while
            you look for a fault.
        device: Name of a device profile in `interlace.configs`, or a path to one; empty means the device in use. When: to plan without
            the GPU, or for a GPU that you made a profile for.
        force_device: Allow planning with the profile of another device than the GPU in use, which is an error otherwise. When: the GPU in
            use is similar to that of the profile, and you accept inaccurate predictions.
        force_paddle: Plan even with an untested Paddle that lacks names which plans use; otherwise models keep Paddle's plan there. When:
            to port Interlace to another Paddle; begin with `interlace run --verify`.
        memory_budget: Device memory that a rank's tensors may hold at any time: a size (`70GB`), a share of what Paddle's baseline holds on
            its fullest rank (`0.8`, `80%`), `+8GB` for that much more, or `off` for no limit; by default what the baseline holds. When: the
            step must fit into a given memory, the baseline leaves device memory free, or the script recomputes more than necessary.
            Details: with a size or a share, planning chooses the schedule and what is kept, recomputed and offloaded for the
            fastest step within the budget; if nothing fits, the error names the smallest feasible budget. The other values limit only
            `interleave: auto`, which falls back to Paddle's baseline if nothing else fits; a form given by name is used whatever it
            holds. The order of operations within a job holds no more than its parts one after another (1 % is ignored), with `+8GB` that
            much more, with `off` any amount. A few GB more let more communication be hidden. Planning then takes up to twice as long: the
            default plan is also made, and taken if it is faster.
        pool_budget: Device memory that a rank's parameters and allocator pools may take, free blocks included, written as `memory_budget`;
            by default nine tenths of the device, or all but 2.5 GB if that is less, or what Paddle's baseline takes if that is more. When:
            the GPU is shared with work that starts later, or plans are made offline for one with less memory than the profile's, or
            workspaces of kernels, which are not counted, need more. Details: a share is of what pools take with Paddle's baseline. The
            device is that of the profile; in a run, what counts is the memory of the GPU in use that is free for this process before the
            first plan, on the rank that has the least; of a very small device half is left free. If pools of the plan would take more,
            planning takes the fastest plan that it has looked at whose pools do not, or makes plans that hold less; it then takes up to
            three times as long. A limit that you set is kept, or the command fails; in place of a form given by name, Paddle's order of
            jobs may be taken. The default does not apply to a form given by name, and if no plan keeps it, the one with the smallest pools
            is taken. Only with profiles of GPUs, and not in captured steps, are pools limited.
        passes: Options by pass name, a user's registered passes among them; passes that are off are missing.
        means: Passes that the configuration does not mention, which planning may use to keep a plan within its memory, or to do so in less
            time. Under a memory budget only those that do not follow one (`return-memory`): the others are on already.
        check: Prove every plan before it is lowered. When: leave it on; off saves the time of the proof if the same plan was proved
            before.
        dump: Folder for the dumps of every rank; empty for none. When: to inspect the plan of a training run, or to load it in later runs.
        tune: Measure plans, including Paddle's baseline, on the run's own first training steps, and continue with the fastest; if a plan
            fails, continue with Paddle's baseline. `auto`: on GPUs, not on CPUs. When: leave it on; off if every run must use the same
            plan from its first step. Details: all plans give the same bits, so no step is lost. Plans that hold more than the baseline are
            tried if their pools take at most nine tenths of the device's memory, and within a `memory_budget` that is a size or a share;
            with `off`, plans keep to the memory of the baseline. With `on`, `interlace plan` also considers them, judging by simulated
            steps and by the device memory in the profile. The choice is stored in the folder of `dump` or `plan`, otherwise in
            `INTERLACE_CACHE` (default `~/.cache/interlace`); later runs of the same program, device, configuration and versions, with about
            as much free memory, use it without measuring.
        capture: Capture a training step as a graph of the device (a CUDA graph) and launch it in later steps instead of issuing each
            operation, so that the host's time no longer bounds the step. `auto`: if the launched step is faster in simulation. When: small
            or host-bound steps, on a device that supports it; Paddle's GPU place does not (docs/paddle-limits.md), so it is off by
            default. Details: the first step runs normally, the second is captured; all bits stay the same. A batch of another shape is
            captured anew. Random operations, control flow, host waits and fetched values other than the losses are refused.
            `throttle_host` is off, as a launched step has no host that could wait, and `return_memory` is on with `at_peak` unless you turn
            it off, as memory in a captured step is reused only in stream order. `auto` plans both kinds of step, and issues steps that
            cannot be captured or that would exceed the memory limit if captured. With `on`, only a `memory_budget` limits memory. Captured
            steps, and with `auto` all steps, are not measured (`tune`). `interlace plan` with `auto` plans issued steps. A plan that is
            loaded (`plan`) determines itself whether its steps are captured.
        examine: Before the first plan, test the rules that plans assume of this machine and its Paddle, as `interlace doctor` does, and
            turn off what relies on rules that do not hold. `auto`: on GPUs, and with an untested Paddle. When: leave it on; off if the
            machine is known. Details: the first rank of each host examines its GPU in a separate process for some seconds; the result is
            kept in `INTERLACE_CACHE` for later runs with the same device, versions and flags.
        plan: Folder of plans written by `interlace plan` or `dump`, from which each rank loads its own instead of planning; empty for
            none. When: many runs of one job: planning is done once, and all runs have the same plan. Details: plans contain the options of
            passes and the profile, so none of these can be given together with `plan`.
        source: Where the options came from, for messages.
    """

    enable: bool = True
    device: str = ""
    force_device: bool = False
    force_paddle: bool = False
    memory_budget: MemoryBudget = None
    pool_budget: MemoryBudget = None
    passes: dict[str, Pass] = {}
    means: dict[str, Pass] = {}
    in_graph: dict[str, Pass] = {}
    check: bool = True
    dump: str = ""
    tune: typing.Literal["auto", "on", "off"] = "auto"
    capture: typing.Literal["auto", "on", "off"] = "off"
    examine: typing.Literal["auto", "on", "off"] = "auto"
    plan: str = ""
    source: str = "defaults"

    @property
    def active(self) -> bool:
        """Whether anything is asked for at all."""
        return self.enable and bool(self.plan or self.passes)

    def pipeline(self) -> Pipeline:
        """The passes in order."""
        return ordered(tuple(self.passes.values()))

    def issued(self) -> Config:
        """The same with steps that are issued."""
        return msgspec.structs.replace(self, capture="off", in_graph={})

    def launched(self) -> Config:
        """The same with steps that are captured, where it is open whether they are (`capture: auto`)."""
        return msgspec.structs.replace(self, capture="on", passes=self.in_graph, means={}, in_graph={})

    def costs(self, profile: DeviceProfile) -> CostModel:
        """The cost model to plan with."""
        return CostModel(profile, is_launched=self.capture == "on")

    @property
    def has_budget(self) -> bool:
        """Whether a memory budget is asked for that every plan must keep."""
        return isinstance(self.memory_budget, (int, float))


BUDGET, POOL_BUDGET = "memory_budget", "pool_budget"
_NOT_PLAIN = (BUDGET, POOL_BUDGET, "passes", "means", "in_graph", "source")
_HINTS = {name: hint for name, hint in typing.get_type_hints(Config).items() if name not in _NOT_PLAIN}
PLAIN_CHOICES = {name: typing.get_args(hint) for name, hint in _HINTS.items() if typing.get_origin(hint) is typing.Literal}
"""Options of their own that take one of a few words."""
PLAIN_KINDS: dict[str, type] = {name: str if name in PLAIN_CHOICES else hint for name, hint in _HINTS.items()}
PLAIN_FIELDS = (*PLAIN_KINDS, BUDGET, POOL_BUDGET)


def make_config(
    options: Mapping[str, Any],
    source: str = "keywords",
    marks: Mapping[str, str] | None = None,
    *,
    whole: bool = True,
    strange: list[str] | None = None,
) -> Config:
    """Check options and build the record.

    Args:
        options: Field or pass name (snake case) -> value.
        source: Names the origin in messages.
        marks: Dotted path -> `file:line:column` of the value, and with the suffix `KEY` of the name, if the options are from a file.
        strange: If given, unknown names that resemble no known one are added here and are no error: a script may still register them.
        whole: Whether the options are complete; false while flags are set one by one, when a required option may still be missing.

    Raises:
        ConfigError: Unknown name, wrong type, a contradiction, or a file or profile that is missing or cannot be read; with
            the place and the choices there are.
    """
    where = _Where(source, marks or {})
    plain = {key: _switch(value, PLAIN_KINDS[key]) for key, value in options.items() if key in PLAIN_KINDS}
    _check_plain(plain, where)
    with where.named(BUDGET):
        budget = parse_budget(options.get(BUDGET))
    with where.named(POOL_BUDGET):
        pools = parse_budget(options.get(POOL_BUDGET))
    plain |= {name: each for name, each in ((BUDGET, budget), (POOL_BUDGET, pools)) if each is not None}
    if plain.get("device", "") not in ("", *profile_names()):
        with where.named("device"):
            load_profile(plain["device"])
    if plain.get("plan"):
        _check_plan(plain["plan"], options, where)
        return Config(**plain, source=source)
    names = {option_name(name): name for name in REGISTRY}
    follow = [name for name, kind in REGISTRY.items() if kind.follows_budget and not kind.is_default]
    has_budget = budget is not None and not isinstance(budget, Beyond)
    default = [name for name, kind in REGISTRY.items() if kind.is_default or (name in follow and has_budget)]
    chosen: dict[str, Pass] = {name: REGISTRY[name]() for name in default}
    chosen |= {name: _imported(name, where) for name in imported if name in REGISTRY and option_name(name) not in options}
    for key, value in options.items():
        if key in PLAIN_FIELDS:
            continue
        if key not in names:
            if strange is not None and not difflib.get_close_matches(key, [*PLAIN_FIELDS, *names], 1):
                strange.append(key)
                continue
            raise ConfigError(
                f"{where.key(key)}: unknown option {key!r}; {_suggest(key, [*PLAIN_FIELDS, *names])}; "
                "a pass of your own must be registered first (--import MODULE on the command line)"
            )
        made = _pass(names[key], value, where, key)
        chosen.pop(names[key], None)
        if made is not None:
            chosen[names[key]] = made
    in_graph: dict[str, Pass] = {}
    if plain.get("capture", "off") != "off":
        _check_capture(options, where)
        in_graph = _in_graph(chosen, options)
        if plain["capture"] == "on":
            chosen, in_graph = in_graph, {}
    _check_names(chosen, where)
    _check_together(chosen, options, where)
    _check_values(chosen, where, whole, has_budget)
    open_ = (*(() if has_budget else follow), ReturnMemory.name) if plain.get("capture") != "on" else ()
    means = {name: REGISTRY[name]() for name in open_ if option_name(name) not in options}
    return Config(**plain, passes=chosen, means=means, in_graph=in_graph, source=source)


def require_jobs(config: Config) -> None:
    """Refuse what leaves a training step without jobs. Raises ConfigError where passes are on, but none that gives a schedule."""
    every = config.passes.values()
    if config.active and not config.plan and not any("scheduled" in each.gives for each in every):
        names = ", ".join(option_name(each.name) for each in every)
        raise ConfigError(
            f"{config.source}: schedule_1f1b is off and {names} on: nothing would run the step; turn schedule_1f1b "
            "on, with {interleave: off} for Paddle's baseline order, or write enable: off"
        )


def load_config(path: str | Path, more: Mapping[str, Any] | None = None) -> Config:
    """Read a YAML file; a name without a folder may be one of our presets; `more` are options of the command line, which go on top. Raises
    ConfigError, with file, line and column, where the file is missing, is no YAML, or holds something `make_config` refuses."""
    options, marks = read_yaml(find_config(path))
    return make_config({**options, **(more or {})}, str(path), {**marks, **command_marks(more or {})})


def command_marks(options: Iterable[str]) -> dict[str, str]:
    """The places of options that a command line gave.

    >>> command_marks(["memory_budget"])
    {'memory_budget': '--memory-budget'}
    """
    return {name: f"--{name.replace('_', '-')}" for name in options}


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A YAML mapping and the place of each key: dotted path -> `file:line:column`.

    `on`, `off`, `yes` and `no` stay words, and `1e9` is a number. Relative names of files and folders are taken from its folder.
    """
    text = read_text(path, MOST_BYTES, "a YAML file of options", ConfigError)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise ConfigError(f"{path}: lists or tables nested too deeply; expected a YAML file of options") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: not YAML ({getattr(error, 'problem', error)})") from error
    marks: dict[str, str] = {}
    data = {} if node is None else _plain(node, "", path, marks, [])
    if not isinstance(data, dict):
        raise ConfigError(f"{path}:1:1: expected a table of options, found {type(data).__name__}")
    return data, marks


def _plain(node: yaml.Node, at: str, path: Path, marks: dict[str, str], around: Sequence[yaml.Node]) -> Any:
    """The data of a node; `around` are the nodes that contain it."""
    marks[at] = _mark(node, path)
    if len(marks) > MOST_NODES:
        raise ConfigError(f"{path}: aliases (*name) spell out more than {MOST_NODES} entries; write options plainly")
    if any(node is each for each in around):
        raise ConfigError(f"{_mark(node, path)}: an alias (*name) is inside the node that it names; write options plainly")
    around = [*around, node]
    if isinstance(node, yaml.MappingNode):
        table: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{_mark(key, path)}: expected a name of an option, found a {key.id}")
            if key.value in table:
                raise ConfigError(f"{_mark(key, path)}: option {key.value!r} occurs twice")
            marks[(f"{at}.{key.value}" if at else str(key.value)) + KEY] = _mark(key, path)
            table[key.value] = _plain(value, f"{at}.{key.value}" if at else str(key.value), path, marks, around)
        return table
    if isinstance(node, yaml.SequenceNode):
        return [_plain(value, f"{at}[{k}]", path, marks, around) for k, value in enumerate(node.value)]
    is_bare = isinstance(node, yaml.ScalarNode) and node.style is None and not (at in (BUDGET, POOL_BUDGET) and node.value.startswith("+"))
    value = _scalar(node.value) if is_bare else node.value
    if not value or not isinstance(value, str):
        return value
    names_a_file = at == "plan" or at.endswith("_file") or (at == "device" and is_path(value))
    return str(path.parent / value) if names_a_file else value


def _mark(node: yaml.Node, path: Path) -> str:
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _scalar(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text in ("null", "~", ""):
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text else number


class _Where:
    """Names the place of an option in messages."""

    def __init__(self, source: str, marks: Mapping[str, str]) -> None:
        self.source, self.marks = source, marks

    def at(self, path: str) -> str:
        """Of its value."""
        return self.marks.get(path, f"{self.source}: {path}")

    def key(self, path: str) -> str:
        """Of its name."""
        return self.marks.get(path + KEY, f"{self.source}: {path}")

    @contextmanager
    def named(self, path: str, more: str = "") -> Iterator[None]:
        """Name it in errors about its value."""
        try:
            yield
        except (ConfigError, msgspec.ValidationError) as error:
            raise ConfigError(f"{self.at(path)}: {error}{more}") from error


def _check_plain(plain: Mapping[str, Any], where: _Where) -> None:
    for key, value in plain.items():
        if not isinstance(value, PLAIN_KINDS[key]):
            hint = "; write on or off" if PLAIN_KINDS[key] is bool else ""
            raise ConfigError(f"{where.at(key)}: expected {PLAIN_KINDS[key].__name__}, found {value!r}{hint}")
        if key in PLAIN_CHOICES and value not in PLAIN_CHOICES[key]:
            raise ConfigError(f"{where.at(key)}: found {value!r}; {_suggest(str(value), PLAIN_CHOICES[key])}")


def parse_budget(value: Any) -> MemoryBudget:
    """Bytes, as a whole number, or a fraction of what Paddle's baseline holds, as a number with a point or in percent; with a plus sign
    bytes beyond that; `off` for no limit; None for the default. Raises ConfigError on anything else.

    >>> [parse_budget(each) for each in ("70GB", "1.5GiB", "0.8", 0.8, "80%", "350 %", 1 << 30, None)]
    [70000000000, 1610612736, 0.8, 0.8, 0.8, 3.5, 1073741824, None]
    >>> [parse_budget(each) for each in ("+8GB", "off")] == [Beyond(8 * 10**9), NO_LIMIT]
    True
    """
    if value is None or isinstance(value, Beyond):
        return value
    if value == "off" or value is False:
        return NO_LIMIT
    if isinstance(value, str) and value.strip().startswith("+"):
        return _beyond(value)
    found, most = value, MOST_FRACTION
    if isinstance(value, str):
        text = value.strip()
        percent = _PERCENT.fullmatch(text)
        with suppress(ConfigError):
            if percent:
                found, most = float(percent[1]) / 100, MOST_SHARE
            else:
                found = float(text) if _FRACTION.fullmatch(text) and text != "." else parse_bytes(text)
    if isinstance(found, float) and MOST_FRACTION < found <= MOST_SHARE and most == MOST_FRACTION:
        raise ConfigError(
            f"found {value!r}, {found * 100:g} % of what Paddle's baseline holds; expected bytes with their unit, such as "
            f"{found:g}GB, or, if it is meant so, '{found * 100:g}%'"
        )
    if isinstance(found, int) and not isinstance(found, bool) and 0 < found < LEAST_BARE and str(value).strip() == str(found):
        raise ConfigError(
            f"found {value!r}, in bytes; expected bytes with their unit, such as {found}GB, or a part of what "
            f"Paddle's baseline holds, such as {min(found, 80)}%"
        )
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found <= (most if isinstance(found, float) else MOST_SIZE):
        raise ConfigError(
            f"found {value!r}, expected bytes with their unit, above 0, such as 70GB, a fraction of what Paddle's baseline holds, such as "
            "0.8 or 80%, bytes beyond what it holds, such as +8GB, or off, for no limit"
        )
    return found


def _beyond(text: str) -> Beyond:
    """Bytes beyond what Paddle's baseline holds."""
    more = text.strip().removeprefix("+").strip()
    found = _SIZE.fullmatch(more)
    if not found or not found[2]:
        raise ConfigError(
            f"found {text!r}, expected bytes with their unit behind the sign, such as +8GB, as much beyond what the baseline holds"
        )
    return Beyond(parse_bytes(more))


def _check_plan(folder: str, options: Mapping[str, Any], where: _Where) -> None:
    """That the folder is there, and that nothing is asked for that its plans say already."""
    beside = [key for key in options if key in ("device", BUDGET, POOL_BUDGET) or key not in PLAIN_FIELDS]
    if beside:
        raise ConfigError(
            f"{where.key(beside[0])}: beside plan: {folder}, {beside[0]} would do nothing: the plans there have their "
            "profile and the options of their passes; leave one of the two out"
        )
    if options.get("capture") == "auto":
        raise ConfigError(
            f"{where.key('capture')}: beside plan: {folder}, capture: auto has nothing to choose from: the plans there say whether their "
            "steps are captured; leave it out, or write capture: on to capture steps of any plan"
        )
    if not Path(folder).is_dir():
        raise ConfigError(
            f"{where.at('plan')}: no folder {os.path.abspath(folder)}; expected one with a plan of each rank, as `interlace plan` writes it"
        )


def _check_capture(options: Mapping[str, Any], where: _Where) -> None:
    """That nothing is asked for that a captured step cannot have."""
    wrong = {
        option_name(ThrottleHost.name): "a captured step has no host that could wait",
        "tune": "the plans would be measured as they are issued, and the one that is taken would run otherwise",
        POOL_BUDGET: "what pools take in a captured step is not simulated",
    }
    for key, why in wrong.items():
        if options.get(key, "off") not in ("off", False) and not (key == "tune" and options[key] == "auto"):
            asked = options["capture"]
            raise ConfigError(f"{where.key(key)}: beside capture: {asked}: {why}; leave {key} out, or write capture: off")


def _in_graph(chosen: Mapping[str, Pass], options: Mapping[str, Any]) -> dict[str, Pass]:
    """The passes of a captured step: none that lets the host wait, and memory given back in the order of streams."""
    found = {name: each for name, each in chosen.items() if name != ThrottleHost.name}
    if options.get(option_name(ReturnMemory.name), "on") not in ("off", False):
        found[ReturnMemory.name] = msgspec.structs.replace(found.get(ReturnMemory.name, ReturnMemory()), joins=True, at_peak=True)
    return found


def _switch(value: Any, kind: Any) -> Any:
    """`on` and `off` where a switch is expected."""
    return value == "on" if kind is bool and value in ("on", "off") else value


def _pass(name: str, value: Any, where: _Where, key: str) -> Pass | None:
    kind = REGISTRY[name]
    if isinstance(value, Pass):
        return _same_kind(value, kind, where, key)
    if value == "off" or value is False:
        return None
    if value == "on" or value is True:
        return kind()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where.at(key)}: expected off, on or a table of options, found {value!r}")
    unknown = [option for option in value if option not in kind.__struct_fields__]
    if unknown:
        raise ConfigError(f"{where.key(f'{key}.{unknown[0]}')}: {unknown_option(kind, unknown[0])}")
    kinds = typing.get_type_hints(kind)
    table = {option: _switch(_size(f"{key}.{option}", given, where), kinds[option]) for option, given in value.items()}
    try:
        return msgspec.convert(table, kind)
    except ConfigError as error:  # options that contradict each other, found by the pass's own record
        raise ConfigError(f"{where.at(key)}: {error}") from error
    except msgspec.ValidationError as error:
        found = _PATH.match(str(error))
        path = (found["path"] or "$").removeprefix("$").lstrip(".") if found else ""
        full = f"{key}.{path}" if path else key
        what = (found["what"] if found else str(error)) + _choices(kinds.get(path), table.get(path))
        raise ConfigError(f"{where.at(full)}: {what} (at $.{full})") from error


def unknown_option(kind: type[Pass], option: str) -> str:
    """The message for an option that a pass does not have, with the names there are."""
    return f"unknown option {option!r} of {kind.name}; {_suggest(option, kind.__struct_fields__)}"


def _choices(kind: Any, given: Any) -> str:
    """What a word may be, where an option takes one of a few; how one is written where it takes a list."""
    if typing.get_origin(kind) is tuple and isinstance(given, str):
        return f"; write [{given}]"
    known = [each for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is typing.Literal for each in typing.get_args(part)]
    return f"; {_suggest(str(given), known)}" if known else ""


def _imported(name: str, where: _Where) -> Pass:
    """A pass of a module given with --import that the configuration does not name."""
    try:
        return REGISTRY[name]()
    except TypeError as error:
        key = option_name(name)
        raise ConfigError(
            f"{where.source}: pass {name!r} has options without defaults ({error}); name it here: {key}: {{...}}, "
            f"or turn it off: {key}: off"
        ) from error


def _same_kind(value: Pass, kind: type[Pass], where: _Where, key: str) -> Pass:
    if not isinstance(value, kind):
        raise ConfigError(f"{where.at(key)}: expected {kind.__name__}, found {type(value).__name__}")
    with where.named(key):
        msgspec.convert(msgspec.structs.asdict(value), type(value), strict=True)  # ranges, which a record does not check itself
    return value


def _size(path: str, value: Any, where: _Where) -> Any:
    """Bytes of a size in words, also inside a list, where the option counts bytes."""
    if not path.endswith(("_bytes", "_budget")):
        return value
    if isinstance(value, (list, tuple)):
        return [_size(path, each, where) for each in value]
    if isinstance(value, str):
        with where.named(path, f" (at $.{path})"):
            return parse_bytes(value)
    return value


def parse_bytes(text: str) -> int:
    """Bytes of a size in words.

    >>> parse_bytes("60GB"), parse_bytes("1.5 MiB")
    (60000000000, 1572864)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or found[2].upper() not in _UNITS:
        raise ConfigError(f"size {text!r}: expected a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    size = float(found[1]) * _UNITS[found[2].upper()]
    if size > MOST_SIZE:
        raise ConfigError(f"size {text[:40]!r}: expected {MOST_SIZE >> 60} EiB or less")
    return int(size)


def _check_names(chosen: Mapping[str, Pass], where: _Where) -> None:
    """That passes run after others that exist."""
    for each in chosen.values():
        for name in each.after:
            if name not in REGISTRY:
                key = where.key(option_name(each.name))
                raise ConfigError(f"{key}: pass {each.name!r} is to run after {name!r}, which is no pass; {_suggest(name, REGISTRY)}")


def _check_together(chosen: Mapping[str, Pass], options: Mapping[str, Any], where: _Where) -> None:
    """That no pass needs what only passes give that are off."""
    given = {tag for each in chosen.values() for tag in each.gives}
    for tag in sorted({tag for each in chosen.values() for tag in each.needs} - given):
        givers = [kind for kind in REGISTRY.values() if tag in kind.gives]
        if givers:
            names = sorted(option_name(each.name) for each in chosen.values() if tag in each.needs)
            default = "" if set(names) & set(options) else " (on by default)"
            giver, instead = option_name(givers[0].name), givers[0].instead_of_off
            raise ConfigError(
                f"{where.at(giver)}: {giver} is off, and {', '.join(names)}{default} cannot do without; turn {giver} on"
                f"{f' ({instead})' if instead else ''}, or turn these off too"
            )


def _check_values(chosen: Mapping[str, Pass], where: _Where, whole: bool, has_budget: bool) -> None:
    """Checks that the record of a pass cannot make: files, and options that have no effect or contradict each other."""
    for name, each in chosen.items():
        option, why = each.mistake(has_budget) or ("", "")
        if why and (option or whole):
            raise ConfigError(f"{where.at('.'.join(filter(None, [option_name(name), option])))}: {why}")


def _suggest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"there are {sorted(known)}"


def presets_folder() -> Path:
    """Where the configurations are that come with Interlace."""
    return Path(str(importlib.resources.files("interlace.configs"))) / "presets"


def is_preset(path: str | Path) -> bool:
    """Whether a configuration is one that comes with Interlace, by its name or path. Raises ConfigError where there is none."""
    return find_config(path).absolute().parent == presets_folder().absolute()


def find_config(path: str | Path) -> Path:
    """The file of a path or of a preset's name. Raises ConfigError, with the list of presets, where there is neither."""
    presets = presets_folder()
    for candidate in (Path(path), presets / Path(path).name, presets / f"{Path(path).name}.yaml"):
        if candidate.is_file():
            return candidate
    raise ConfigError(f"{path}: no such file, and no preset of that name; presets: {sorted(p.stem for p in presets.glob('*.yaml'))}")
