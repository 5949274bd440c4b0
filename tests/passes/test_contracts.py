"""What each pass promises and asks for: planning, drafts and Paddle's baseline are put together by it."""

from __future__ import annotations

import re

import msgspec

from interlace.passes import REGISTRY, Pass
from interlace.passes.base import is_built_in
from interlace.passes.pipeline import built_in

OURS = {name: kind for name, kind in REGISTRY.items() if is_built_in(kind)}
ORDER = {
    "choose-recompute": (),
    "narrow-gathers": ("choose-recompute",),
    "split-backward": ("choose-recompute", "narrow-gathers"),
    "overlap-column-backward": ("split-backward",),
    "reduce-in-place": ("narrow-gathers", "overlap-column-backward"),
    "schedule-1f1b": ("split-backward", "overlap-column-backward", "reduce-in-place"),
    "offload-optimizer-state": ("schedule-1f1b",),
    "offload-activations": ("schedule-1f1b", "offload-optimizer-state"),
    "name-streams": ("offload-activations",),
    "allocate-on-compute": ("name-streams",),
    "return-memory": ("name-streams", "allocate-on-compute"),
    "delay-transfers": ("name-streams", "return-memory"),
    "extend-lifetimes": ("name-streams", "delay-transfers"),
    "insert-events": ("extend-lifetimes",),
    "throttle-host": ("insert-events",),
}
"""All passes as they run, each with those that it must follow."""
DEFAULTS = {
    "allocate-on-compute": {"min_bytes": 1 << 20},
    "choose-recompute": {"level": None, "repeat_collectives": False},
    "delay-transfers": {"margin_us": 100},
    "name-streams": {"priority": -1},
    "offload-activations": {
        "modules": (),
        "exclude_ops": (),
        "min_bytes": 1 << 20,
        "fraction": None,
        "keep_bytes": 0,
        "max_in_flight": None,
        "include_integers": False,
        "prefetch_slack": 0.25,
    },
    "offload-optimizer-state": {"modules": (), "min_bytes": 1 << 20, "fraction": None},
    "overlap-column-backward": {"min_bytes": 0, "modules": (), "only_gains": True, "borrow": True},
    "return-memory": {"min_bytes": 1 << 20, "joins": True, "at_end": "auto", "at_peak": False},
    "schedule-1f1b": {
        "interleave": "auto",
        "weight_delay": 0,
        "weight_delay_at_end": None,
        "depth": (),
        "inline_share": 0.0,
        "send_latency_weight": 0.5,
        "send_latency_weight_at_end": None,
        "join_optimizer": True,
        "reductions_first": False,
        "search": True,
        "schedule_file": "",
        "max_ops_per_job": 4000,
        "only_gains": True,
    },
    "split-backward": {"modules": (), "fold": False},
    "throttle-host": {"syncs": "auto", "run_ahead_bytes": 256 << 20},
}
"""Of all options; docs/options.md says them too."""


def those(attribute: str) -> set[str]:
    return {name for name, kind in OURS.items() if getattr(kind, attribute)}


def test_passes_run_in_one_order() -> None:
    assert [kind.name for kind in built_in()] == [*ORDER]
    assert {name: kind.after for name, kind in OURS.items()} == ORDER


def test_a_pass_has_the_words_of_its_class_and_its_file() -> None:
    for name, kind in OURS.items():
        assert kind.__module__ == f"interlace.passes.{name.replace('-', '_')}"
        assert re.sub(r"(?<=[a-z])(?=[A-Z0-9])", "-", kind.__name__).lower() == name


def test_what_a_pass_needs_and_gives() -> None:
    assert {name: kind.gives for name, kind in OURS.items() if kind.gives} == {
        "choose-recompute": {"recompute-chosen"},
        "split-backward": {"dw-split"},
        "overlap-column-backward": {"tp-overlapped"},
        "schedule-1f1b": {"scheduled"},
        "offload-activations": {"offloaded"},
        "offload-optimizer-state": {"states-offloaded"},
        "name-streams": {"streams"},
        "return-memory": {"returned"},
        "delay-transfers": {"delayed"},
        "extend-lifetimes": {"lifetimes"},
        "insert-events": {"events"},
        "throttle-host": {"throttled"},
    }
    offloads = ("offload-activations", "offload-optimizer-state")
    scheduled = (*offloads, "allocate-on-compute", "return-memory", "delay-transfers", "extend-lifetimes", "insert-events", "throttle-host")
    needs = {name: {"scheduled"} for name in scheduled} | {"overlap-column-backward": {"dw-split"}}
    assert {name: kind.needs for name, kind in OURS.items() if kind.needs} == needs


def test_when_a_pass_runs() -> None:
    """Unless it is turned off, but for offload, which must be told what to move (a budget says that too), and for what costs time."""
    offloads = {"offload-activations", "offload-optimizer-state"}
    assert set(OURS) - those("is_default") == {*offloads, "return-memory"}
    assert those("follows_budget") == {"choose-recompute", *offloads}
    assert those("instead_of_off") == {"schedule-1f1b"}
    assert set(OURS) - those("in_drafts") == {"delay-transfers", "extend-lifetimes", "insert-events"}
    assert those("in_baseline") == {"schedule-1f1b", *offloads, "extend-lifetimes", "insert-events", "throttle-host"}
    assert {name: kind.decides for name, kind in OURS.items() if kind.decides} == {
        "choose-recompute": "recomputation",
        "schedule-1f1b": "schedule",
        "offload-activations": "offload",
        "offload-optimizer-state": "states",
        "delay-transfers": "transfers",
        "return-memory": "memory-returned",
        "throttle-host": "host-waits",
    }
    assert not Pass.is_default
    assert Pass.in_baseline
    assert Pass.in_drafts


def test_what_options_are_where_nothing_is_said() -> None:
    found = {name: {field.name: field.default for field in msgspec.structs.fields(kind)} for name, kind in OURS.items()}
    assert {name: options for name, options in found.items() if options} == DEFAULTS
