"""The plugin from Python: load it, set its switches, read its memory numbers and its record of what ran.

testbed.device.load()            # before Paddle is imported
import paddle
paddle.set_device("testbed:0")
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from testbed.build import library

NAME = "testbed"
VARIANT_VARIABLE, SWITCHES_VARIABLE = "TESTBED_VARIANT", "TESTBED_SWITCHES"
RESULT = 2
"""`memcpy_d2h`'s destination number of pinned memory that the host reads while the step goes on (`await_results`)."""
MEMORY_VARIABLE = "TESTBED_MEMORY"  # bytes that the device says it has, where a test plays a smaller one
ROOT_VARIABLE = "CUSTOM_DEVICE_ROOT"  # Paddle loads every library in this folder when it is imported


class TestbedError(Exception):
    """The plugin is missing or was asked for something it does not have."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, on this process's device.

    Attributes:
        allocated: What live tensors of programs hold; falls when a tensor is freed.
        workspace: What kernels take for themselves, attention's backward above all; not in `allocated`.
        in_use: Both, and freed blocks that another stream still read when their own stream last asked: nothing else could have them.
        reserved: What was taken from the device for them: free blocks, and blocks a stream still reads, included.
        outside: What Paddle's own allocators took: parameters and feeds.
        pinned: Pinned host memory in use; `pinned_buffers` counts the buffers ever made in memory that none had before.
        pinned_free: Pinned memory that no buffer in use has, of `pinned_reserved` bytes in `pinned_allocations` allocations of the host.
    """

    allocated: int
    allocated_peak: int
    workspace: int
    workspace_peak: int
    in_use: int
    in_use_peak: int
    reserved: int
    reserved_peak: int
    outside: int
    outside_peak: int
    pinned: int
    pinned_peak: int
    pinned_buffers: int
    pinned_free: int
    pinned_reserved: int
    pinned_allocations: int


class Call(NamedTuple):
    """Something the host asked the device for."""

    at_us: float
    what: str
    stream: int
    address: str
    size: int


class Interval(NamedTuple):
    """A piece of work as it ran on a stream; `op` is the number of the operation that asked for it, 0 for none."""

    begin_us: float
    end_us: float
    name: str
    stream: int
    op: int


class Issue(NamedTuple):
    """An operation as the host came to it; numbers count up in host order."""

    at_us: float
    name: str
    stream: int
    number: int


@dataclass(slots=True)
class Trace:
    """The records of a traced part of a run."""

    calls: list[Call]
    intervals: list[Interval]
    issues: list[Issue]


def variant() -> str:
    """`threads` or `cuda`."""
    return os.environ.get(VARIANT_VARIABLE, "threads")


def load() -> None:
    """Let Paddle find the plugin, and set the switches named in `TESTBED_SWITCHES`.

    Raises:
        TestbedError: The plugin is not built, or Paddle was imported before.
    """
    target = library(variant())
    if not target.exists():
        flag = " --cuda" if variant() == "cuda" else ""
        raise TestbedError(f"{target} is not there; build it with `python -m testbed.build{flag}`")
    if "paddle" in sys.modules and os.environ.get(ROOT_VARIABLE) != str(target.parent):
        raise TestbedError("Paddle was imported before the testbed was loaded; call testbed.device.load() first")
    os.environ[ROOT_VARIABLE] = str(target.parent)
    os.environ.setdefault(f"FLAGS_selected_{NAME}s", "0")
    import paddle

    paddle.set_flags({"FLAGS_enable_api_kernel_fallback": False})
    set_switches(parse_switches(os.environ.get(SWITCHES_VARIABLE, "")))


@cache
def plugin() -> ctypes.CDLL:
    """The loaded library."""
    loaded = ctypes.CDLL(str(library(variant())))
    loaded.tb_switch_name.restype = ctypes.c_char_p
    loaded.tb_switch_meaning.restype = ctypes.c_char_p
    loaded.tb_total_memory.restype = ctypes.c_size_t
    loaded.tb_capture_reason.restype = ctypes.c_char_p
    for name in ("begin", "end"):
        getattr(loaded, f"tb_capture_{name}").restype = ctypes.c_size_t
    for name, gives in (("launch", ctypes.c_size_t), ("await", ctypes.c_size_t), ("destroy", None)):
        call = getattr(loaded, f"tb_graph_{name}")
        call.argtypes, call.restype = [ctypes.c_size_t], gives
    return loaded


def switch_meanings() -> dict[str, str]:
    """Every switch and what it does, as the plugin says it."""
    lib = plugin()
    return {lib.tb_switch_name(k).decode(): lib.tb_switch_meaning(k).decode() for k in range(lib.tb_switch_count())}


def get_switch(name: str) -> int:
    value = ctypes.c_int()
    if not plugin().tb_switch_get(name.encode(), ctypes.byref(value)):
        raise TestbedError(f"no switch {name!r}; there are {sorted(switch_meanings())}")
    return value.value


def set_switches(values: Mapping[str, int]) -> None:
    """Set switches by name."""
    for name, value in values.items():
        if not plugin().tb_switch_set(name.encode(), ctypes.c_int(int(value))):
            raise TestbedError(f"no switch {name!r}; there are {sorted(switch_meanings())}")


def parse_switches(text: str) -> dict[str, int]:
    """Switches in words.

    >>> parse_switches("record=2,nosync=0")
    {'record': 2, 'nosync': 0}
    """
    pairs = [word.partition("=") for word in text.split(",") if word.strip()]
    return {name.strip(): int(value) for name, _, value in pairs}


@contextmanager
def switched(**values: int) -> Iterator[None]:
    """Switches set for a while."""
    before = {name: get_switch(name) for name in values}
    set_switches(values)
    try:
        yield
    finally:
        set_switches(before)


def synchronize() -> None:
    """Wait for all streams."""
    plugin().tb_sync()


def begin_capture() -> None:
    """Let the device take down what it is asked for from here on, on all streams, instead of doing it.

    Raises:
        TestbedError: It cannot.
    """
    synchronize()
    if plugin().tb_capture_begin():
        raise TestbedError(_capture_reason())


def end_capture(failed: bool = False) -> int:
    """The number of what was taken down, for `launch`; with `failed` nothing is kept.

    Raises:
        TestbedError: It cannot be launched again; with the first reason.
    """
    found = int(plugin().tb_capture_end(int(failed)))
    if not found:
        raise TestbedError(_capture_reason())
    return found


def launch(graph: int) -> None:
    """Do what was taken down, on the compute stream behind all that it was given before.

    Raises:
        TestbedError: Memory that it uses was freed.
    """
    if plugin().tb_graph_launch(graph):
        raise TestbedError(_capture_reason())


def await_results(graph: int) -> None:
    """Wait until the last launch has copied its results (`memcpy_d2h` with destination `RESULT`) to the host; its other work may go on.

    Raises:
        TestbedError: The launch failed.
    """
    if plugin().tb_graph_await(graph):
        raise TestbedError(_capture_reason())


def destroy_graph(graph: int) -> None:
    """Forget what was taken down; its memory serves other steps."""
    synchronize()
    plugin().tb_graph_destroy(graph)


def _capture_reason() -> str:
    return str(plugin().tb_capture_reason().decode())


@contextmanager
def new_streams(priority: int) -> Iterator[None]:
    """Streams that Paddle makes meanwhile have this priority: 0 is normal, lower runs first. Its own device table hands none on."""
    plugin().tb_next_priority(priority)
    try:
        yield
    finally:
        plugin().tb_next_priority(0)


def stream_priorities() -> list[int]:
    """Of every stream, by number."""
    return [plugin().tb_stream_priority(number) for number in range(plugin().tb_stream_count())]


@contextmanager
def fresh_memory() -> Iterator[None]:
    """Copies to the device wait for nothing: what they fill must be new, and stay until the device is idle."""
    plugin().tb_fresh(1)
    try:
        yield
    finally:
        plugin().tb_fresh(0)


def memory() -> Memory:
    """Bytes held now, and the most held since `reset_peaks`."""
    numbers = (ctypes.c_size_t * 16)()
    plugin().tb_memory(numbers)
    return Memory(*numbers)


def total_bytes() -> int:
    """Memory of the device, or what `MEMORY_VARIABLE` says that it were."""
    return int(os.environ.get(MEMORY_VARIABLE, "0")) or int(plugin().tb_total_memory())


def reset_peaks() -> None:
    """Let peaks start from what is held now."""
    plugin().tb_memory_reset()


@contextmanager
def traced() -> Iterator[Trace]:
    """Record what the host asks for and what runs when; filled when the block ends."""
    found = Trace([], [], [])
    start_trace()
    try:
        yield found
    finally:
        end_trace(found)


def start_trace() -> None:
    """Record from here on, with the device idle."""
    synchronize()
    plugin().tb_trace(1)


def end_trace(into: Trace) -> None:
    """Wait for the device, stop recording and read what was recorded."""
    synchronize()
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        plugin().tb_trace_write(file.name.encode())
        plugin().tb_trace(0)
        read_trace(Path(file.name).read_text(), into)


def read_trace(text: str, into: Trace) -> None:
    """Parse what the plugin wrote."""
    for line in text.splitlines():
        kind, *words = line.split("\t")
        if kind == "op":
            into.issues.append(Issue(float(words[0]), words[1], int(words[2]), int(words[3])))
        elif kind == "host":
            into.calls.append(Call(float(words[0]), words[1], int(words[2]), words[3], int(words[4])))
        else:
            into.intervals.append(Interval(float(words[0]), float(words[1]), words[2], int(words[3]), int(words[4])))
