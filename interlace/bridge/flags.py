"""`strategy.interlace`: flags that a user may read and change until the model is built."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from interlace.config import KEY, PLAIN_FIELDS, Config, find_config, make_config, read_yaml, require_jobs, unknown_option
from interlace.errors import ConfigError
from interlace.passes import REGISTRY, Pass

LOG = logging.getLogger("interlace")
DEAD_FLAGS = {
    "FLAGS_1f1b_backward_forward_overlap": ("schedule_1f1b", {"interleave": "dx-first"}),
    "FLAGS_mp_async_allreduce_in_backward": ("overlap_column_backward", "on"),
}
"""Environment flags that Paddle 3.3.1 reads but never uses -> our option that does what they promise."""


class Flags:
    """Options as attributes: `strategy.interlace.offload_activations.fraction = 0.5`. Each change is checked at once, except for what
    depends on all options (such as offload that is on but moves nothing), which is checked when the model is built.
    """

    def __init__(self, options: dict[str, Any], source: str, marks: dict[str, str] | None = None) -> None:
        object.__setattr__(self, "_options", options)
        object.__setattr__(self, "_origin", (source, marks or {}))
        self.config()

    def config(self) -> Config:
        """The configuration that the flags now give."""
        return make_config(*self.asked(), whole=False)

    def asked(self) -> tuple[dict[str, Any], str, dict[str, str]]:
        """Options, source and marks, as `make_config` takes them."""
        return self._options, *self._origin

    def final(self, strategy: Any, say: bool = True) -> Config:
        """The configuration to build with: the flags, plus flags of Paddle's in the strategy and the environment (`DEAD_FLAGS`). With
        `say`, log which of our options does what a flag of Paddle's promises. Raises ConfigError if something cannot run as configured."""
        return final_config(*self.asked(), strategy, say)

    def with_more(self, options: Mapping[str, Any], source: str, marks: Mapping[str, str]) -> Flags:
        """New flags: these options, overridden by others."""
        known = self._origin[1]
        kept = {path: mark for path, mark in known.items() if path.partition(".")[0].rstrip(KEY) not in options}
        return Flags({**self._options, **options}, source, {**kept, **marks})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in PLAIN_FIELDS:
            return getattr(self.config(), name)
        if name.replace("_", "-") in REGISTRY:
            return _PassFlags(self, name)
        raise AttributeError(f"strategy.interlace has no option {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._change({**self._options, name: value})

    def _change(self, options: dict[str, Any]) -> None:
        make_config(options, *self._origin, whole=False)
        object.__setattr__(self, "_options", options)

    def __repr__(self) -> str:
        config = self.config()
        passes = {each.name.replace("-", "_"): each for each in config.passes.values()}
        plain = [f"{name}={getattr(config, name)!r}" for name in PLAIN_FIELDS]
        return f"Flags({', '.join([*plain, *(f'{name}={each!r}' for name, each in passes.items())])})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Flags:
        return Flags(dict(self._options), *self._origin)


def flags_on(before: Any, config: Any, options: Mapping[str, Any]) -> Flags:
    """The flags of a strategy after one more `enable`. Raises ConfigError for invalid options."""
    given, source, marks = _read(config)
    given = {**given, **options}
    return before.with_more(given, source, marks) if isinstance(before, Flags) else Flags(given, source, marks)


def _read(config: Any) -> tuple[dict[str, Any], str, dict[str, str]]:
    if config is None:
        return {}, "interlace.enable", {}
    if isinstance(config, Mapping):
        return dict(config), "interlace.enable", {}
    if isinstance(config, (str, os.PathLike)):
        options, marks = read_yaml(find_config(os.fspath(config)))
        return options, str(config), marks
    raise ConfigError(f"interlace.enable: expected a file, a preset, a dict or keywords, found {type(config).__name__}")


class _PassFlags:
    """The options of one pass; setting one turns the pass on."""

    def __init__(self, flags: Flags, key: str) -> None:
        object.__setattr__(self, "_flags", flags)
        object.__setattr__(self, "_key", key)

    def __getattr__(self, name: str) -> Any:
        kind = REGISTRY[self._key.replace("_", "-")]
        found = self._flags.config().passes.get(kind.name)
        if name == "enable":
            return found is not None
        if name not in kind.__struct_fields__:
            raise AttributeError(f"strategy.interlace.{self._key}: {unknown_option(kind, name)}")
        return getattr(found if found is not None else kind(), name)

    def __repr__(self) -> str:
        found = self._flags.config().passes.get(self._key.replace("_", "-"))
        return repr(found) if found is not None else f"{self._key}: off"

    def __setattr__(self, name: str, value: Any) -> None:
        options = self._flags._options
        given = options.get(self._key)
        table = msgspec.to_builtins(given) if isinstance(given, Pass) else dict(given) if isinstance(given, Mapping) else {}
        if name == "enable":
            if not isinstance(value, bool):
                raise ConfigError(f"strategy.interlace.{self._key}.enable: expected bool, found {value!r}")
            self._flags._change({**options, self._key: (table or "on") if value else "off"})
        else:
            self._flags._change({**options, self._key: {**table, name: value}})


def final_config(options: Mapping[str, Any], source: str, marks: Mapping[str, str], strategy: Any, say: bool = True) -> Config:
    """The configuration to build with: these options, plus flags of Paddle's in the strategy and the environment (`DEAD_FLAGS`). Raises
    ConfigError if something cannot run as configured."""
    config = make_config(with_dead_flags(strategy, dict(options), say), source, marks)
    require_jobs(config)
    return config


def with_dead_flags(strategy: Any, options: dict[str, Any], say: bool = True) -> dict[str, Any]:
    """The options, plus ours that do what Paddle's unused flags promise (`DEAD_FLAGS`), unless the option is set already."""
    asked = [(name, *DEAD_FLAGS[name]) for name in DEAD_FLAGS if os.environ.get(name, "0").lower() in ("1", "true")]
    parallel = getattr(strategy, "_mp_optimization", None) or getattr(strategy, "mp_optimization", None)  # the user's, the engine's own
    if getattr(parallel, "allreduce_matmul_grad_overlapping", False):
        asked.append(("mp_optimization.allreduce_matmul_grad_overlapping", "overlap_column_backward", "on"))
    if getattr(strategy.pipeline, "enable_send_recv_overlap", False):
        asked.append(("pipeline.enable_send_recv_overlap", "name_streams", "on"))
    for name, key, value in asked:
        key = "plan" if options.get("plan") else key
        given = options.get(key)
        free = isinstance(value, dict) and isinstance(given, Mapping) and not set(value) & set(given)
        if given is not None and not free:
            LOG.log(logging.WARNING if say else logging.DEBUG, "%s is set, but interlace's %s=%r decides", name, key, given)
        else:
            LOG.log(logging.INFO if say else logging.DEBUG, "%s: done by interlace's %s=%r", name, key, value)
            options = {**options, key: {**value, **given} if free else value}  # type: ignore[dict-item]
    return options
