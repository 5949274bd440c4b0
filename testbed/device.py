"""The plugin's Python interface: load it, set its switches, read its memory numbers and its traces.

testbed.device.load()            # before Paddle is imported
import paddle
paddle.set_device("testbed:0")
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from testbed.build import library

NAME = "testbed"
VARIANT_VARIABLE, SWITCHES_VARIABLE = "TESTBED_VARIANT", "TESTBED_SWITCHES"
RESULT = 2
"""Destination number of `memcpy_d2h` for pinned memory that the host reads while the step continues (`await_results`)."""
MEMORY_VARIABLE = "TESTBED_MEMORY"  # bytes of memory that the device reports, for tests of a smaller device
ROOT_VARIABLE = "CUSTOM_DEVICE_ROOT"  # Paddle loads every library in this folder when it is imported


class TestbedError(Exception):
    """The plugin is missing, or does not have what was asked for."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of this process's device, in bytes.

    Attributes:
        allocated: Held by live tensors of programs; falls as soon as a tensor is freed.
        workspace: Used by kernels internally, mostly by attention's backward; not in `allocated`.
        in_use: Both, and freed blocks that cannot be reused because another stream was still reading them when their own stream last
            checked.
        reserved: Allocated from the device for all of these, including free blocks.
        outside: Allocated by Paddle's own allocators: parameters and feeds.
        pinned: Pinned host memory in use; `pinned_buffers` counts the buffers created so far in memory that no buffer had before.
        pinned_free: Pinned memory not in use, out of `pinned_reserved` bytes in `pinned_allocations` host allocations.
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
    """A call of the device interface by the host."""

    at_us: float
    what: str
    stream: int
    address: str
    size: int


class Interval(NamedTuple):
    """When a piece of work ran on a stream; `op` is the number of the operation that issued it, 0 for none."""

    begin_us: float
    end_us: float
    name: str
    stream: int
    op: int


class Issue(NamedTuple):
    """When the host issued an operation; numbers increase in host order."""

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
    """Load the plugin into Paddle, and set the switches in `TESTBED_SWITCHES`.

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
    loaded.tb_total_memory.restype = loaded.tb_free_memory.restype = ctypes.c_size_t
    loaded.tb_capture_reason.restype = ctypes.c_char_p
    for name in ("begin", "end"):
        getattr(loaded, f"tb_capture_{name}").restype = ctypes.c_size_t
    for name, gives in (("launch", ctypes.c_size_t), ("await", ctypes.c_size_t), ("destroy", None)):
        call = getattr(loaded, f"tb_graph_{name}")
        call.argtypes, call.restype = [ctypes.c_size_t], gives
    return loaded


def switch_meanings() -> dict[str, str]:
    """Switch -> what it does, as the plugin describes it."""
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
    """Parse switches.

    >>> parse_switches("record=2,nosync=0")
    {'record': 2, 'nosync': 0}
    """
    pairs = [word.partition("=") for word in text.split(",") if word.strip()]
    return {name.strip(): int(value) for name, _, value in pairs}


@contextmanager
def switched(**values: int) -> Iterator[None]:
    """Context in which switches have other values."""
    before = {name: get_switch(name) for name in values}
    set_switches(values)
    try:
        yield
    finally:
        set_switches(before)


def synchronize() -> None:
    """Wait until all streams have completed their work."""
    plugin().tb_sync()


def begin_capture() -> None:
    """Start a capture: from now on the device records work on all streams instead of running it.

    Raises:
        TestbedError: A capture cannot start.
    """
    synchronize()
    if plugin().tb_capture_begin():
        raise TestbedError(_capture_reason())


def end_capture(failed: bool = False) -> int:
    """End the capture and return the number of the graph, for `launch`; with `failed`, discard it.

    Raises:
        TestbedError: What was captured cannot be launched; the message gives the first reason.
    """
    found = int(plugin().tb_capture_end(int(failed)))
    if not found:
        raise TestbedError(_capture_reason())
    return found


def launch(graph: int) -> None:
    """Run a graph on the compute stream, after all work issued there before.

    Raises:
        TestbedError: Memory that the graph uses was freed.
    """
    if plugin().tb_graph_launch(graph):
        raise TestbedError(_capture_reason())


def await_results(graph: int) -> None:
    """Wait until the last launch has copied its results to the host (`memcpy_d2h` with destination `RESULT`); its other work may continue.

    Raises:
        TestbedError: The launch failed.
    """
    if plugin().tb_graph_await(graph):
        raise TestbedError(_capture_reason())


def destroy_graph(graph: int) -> None:
    """Destroy a graph; its memory can be used by other steps."""
    synchronize()
    plugin().tb_graph_destroy(graph)


def _capture_reason() -> str:
    return str(plugin().tb_capture_reason().decode())


@contextmanager
def new_streams(priority: int) -> Iterator[None]:
    """Context in which streams that Paddle creates get this priority: 0 is normal, lower runs first. Paddle's own device interface does not
    pass priorities on."""
    plugin().tb_next_priority(priority)
    try:
        yield
    finally:
        plugin().tb_next_priority(0)


def stream_priorities() -> list[int]:
    """The priority of each stream, by stream number."""
    return [plugin().tb_stream_priority(number) for number in range(plugin().tb_stream_count())]


@contextmanager
def fresh_memory() -> Iterator[None]:
    """Context in which copies to the device wait for nothing: they must fill new memory that stays allocated until the device is idle."""
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


def best_fit(order: Sequence[int], size: Sequence[int], pool: Sequence[int], num_pools: int, num_steps: int, own: bool) -> list[int]:
    """What Paddle's allocator, or the testbed's `own`, takes from a device; see `best_fit` of `interlace/scheduler/memory/pools.py`."""
    taken = (ctypes.c_int64 * num_pools)()
    arrays = ((ctypes.c_int64 * len(each))(*map(int, each)) for each in (order, size, pool))
    plugin().tb_best_fit(*arrays, *map(ctypes.c_int64, (len(size), num_pools, num_steps)), ctypes.c_bool(own), taken)
    return [*taken]


def total_bytes() -> int:
    """Memory of the device, or the size given by `MEMORY_VARIABLE`."""
    return int(os.environ.get(MEMORY_VARIABLE, "0")) or int(plugin().tb_total_memory())


def free_bytes() -> int:
    """Memory of the device that no process has taken."""
    return int(plugin().tb_free_memory())


def reset_peaks() -> None:
    """Restart the peaks from what is held now."""
    plugin().tb_memory_reset()


@contextmanager
def traced() -> Iterator[Trace]:
    """Context that records the host's calls and the work on the device; the trace is filled when it ends."""
    found = Trace([], [], [])
    start_trace()
    try:
        yield found
    finally:
        end_trace(found)


def start_trace() -> None:
    """Wait until the device is idle, and start recording."""
    synchronize()
    plugin().tb_trace(1)


def end_trace(into: Trace) -> None:
    """Wait until the device is idle, stop recording, and add the records to a trace."""
    synchronize()
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        plugin().tb_trace_write(file.name.encode())
        plugin().tb_trace(0)
        read_trace(Path(file.name).read_text(), into)


def read_trace(text: str, into: Trace) -> None:
    """Parse records that the plugin wrote, and add them to a trace."""
    for line in text.splitlines():
        kind, *words = line.split("\t")
        if kind == "op":
            into.issues.append(Issue(float(words[0]), words[1], int(words[2]), int(words[3])))
        elif kind == "host":
            into.calls.append(Call(float(words[0]), words[1], int(words[2]), words[3], int(words[4])))
        else:
            into.intervals.append(Interval(float(words[0]), float(words[1]), words[2], int(words[3]), int(words[4])))
