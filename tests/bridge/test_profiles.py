"""Profiles. A profile of another device than the one in use is an error unless forced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

paddle = pytest.importorskip("paddle")

import interlace.bridge.paddle_passes  # noqa: E402
from interlace.bridge import modes, profiles  # noqa: E402
from interlace.bridge.profiles import costs_for, memory_for_plans  # noqa: E402
from interlace.bridge.targets.cpu import CpuDevice  # noqa: E402
from interlace.bridge.targets.gpu import GpuDevice  # noqa: E402
from interlace.config import make_config  # noqa: E402
from interlace.cost_model import load_profile  # noqa: E402
from interlace.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.paddle
GPU = GpuDevice(None)


@pytest.fixture
def name(monkeypatch: Any) -> Any:
    """Lets the GPU in use have a name."""
    return lambda text: monkeypatch.setattr(paddle.device.cuda, "get_device_name", lambda device: text)


@pytest.mark.parametrize(
    ("options", "device", "what"),
    [({}, "", "no device is chosen, so 'h200'"), ({"device": "h200"}, "", "device 'h200'"), ({}, "cpu", "device 'cpu'")],
)
def test_a_profile_of_another_gpu_is_refused_unless_forced(name: Any, options: Any, device: str, what: str) -> None:
    """Where it was chosen, what it is of, what the GPU is, and what to do."""
    name("NVIDIA A100-SXM4-80GB")
    wrong = rf"keywords: {what}: the profile was measured on .*, this device is 'NVIDIA A100-SXM4-80GB'; .*force_device: on"
    with pytest.raises(ConfigError, match=wrong):
        costs_for(make_config(options), GPU, device)
    assert costs_for(make_config({**options, "force_device": True}), GPU, device)[1] == (device or "h200")


def test_the_profile_of_the_gpu_in_use_is_taken(name: Any) -> None:
    """Without asking for anything."""
    for gpu, profile in (("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100")):
        name(gpu)
        assert costs_for(make_config({}), GPU)[1] == profile


def test_a_gpu_without_a_name_needs_force() -> None:
    """This build of Paddle cannot ask one."""
    with pytest.raises(ConfigError, match=r"this GPU has no name that Paddle could read .*force_device: on"):
        costs_for(make_config({}), GPU)
    assert costs_for(make_config({"force_device": "on"}), GPU)[1] == "h200"


def test_cpu_ranks_may_stand_for_any_device() -> None:
    """They plan as for an H200 in the demo; by themselves they are a CPU."""
    assert costs_for(make_config({"device": "h200"}), CpuDevice(paddle.CPUPlace()))[1] == "h200"
    assert costs_for(make_config({}), CpuDevice(paddle.CPUPlace()))[1] == "cpu"


class Gathering:
    """Ranks of a run, of which the others say `others`."""

    def __init__(self, *others: int) -> None:
        self.others = others

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        assert topic == "memory for plans"
        return [mine, *map(msgspec.msgpack.encode, self.others)]


@pytest.mark.parametrize(("mine", "others", "least"), [(70, (), 70), (70, (60, 80), 60), (0, (60,), 60), (0, (0,), 0)])
def test_plans_count_on_what_every_rank_had_at_first(mine: int, others: tuple[int, ...], least: int, monkeypatch: Any) -> None:
    """Libraries and communicators take some later, for which limits leave room already."""
    monkeypatch.setattr(profiles, "FIRST", {})
    device, peers = CpuDevice(paddle.CPUPlace()), Gathering(*others)
    for available in (mine, 50):
        monkeypatch.setattr(CpuDevice, "available_bytes", lambda _, now=available: now)
        assert memory_for_plans(device, peers) == least
    assert memory_for_plans(device, None) == mine


def test_a_device_that_does_not_tell_has_the_profiles_memory(monkeypatch: Any) -> None:
    """And each plan of a run is made for the memory that all ranks have."""

    def refuses(_: CpuDevice) -> int:
        raise ValueError("a build without GPUs")

    monkeypatch.setattr(profiles, "FIRST", {})
    monkeypatch.setattr(CpuDevice, "available_bytes", refuses)
    device, config = CpuDevice(paddle.CPUPlace()), make_config({"device": "h200"})
    assert memory_for_plans(device, Gathering(0)) == 0
    assert costs_for(config, device)[0].profile == load_profile("h200")
    assert costs_for(config, device, memory_bytes=60)[0].profile == msgspec.structs.replace(load_profile("h200"), memory_bytes=60)
    made = list[tuple[int, str]]()
    monkeypatch.setattr(modes, "peers_of", lambda _: Gathering(60))
    monkeypatch.setattr(modes, "make_plan", lambda program, config, cost, name, peers: made.append((cost.profile.memory_bytes, name)))
    modes._plan(None, config, device)
    assert made == [(60, "h200")]


def test_what_a_gpu_has_for_this_process(monkeypatch: Any) -> None:
    """What the allocator holds and what is free, as other processes may use the GPU; its memory if Paddle does not tell."""
    device = GpuDevice(SimpleNamespace(get_device_id=lambda: 0))
    monkeypatch.setattr(paddle.device.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(paddle.device.cuda, "memory_reserved", lambda _: 30)
    assert device.available_bytes() == 100
    monkeypatch.setattr(paddle.cuda, "mem_get_info", lambda index: {0: (50, 100)}[index])
    assert device.available_bytes() == 80
    monkeypatch.setattr(paddle.cuda, "mem_get_info", lambda _: (90, 100))
    assert device.available_bytes() == 100
    monkeypatch.delattr(paddle.cuda, "mem_get_info")
    assert device.available_bytes() == 100


def test_passes_on_plain_programs_check_it_too(name: Any, monkeypatch: Any) -> None:
    """The second door, and nothing is changed."""
    from paddle.distributed.passes import new_pass

    name("NVIDIA L4")
    monkeypatch.setattr(interlace.bridge.paddle_passes, "choose_device", lambda: GPU)
    paddle.enable_static()
    with pytest.raises(ConfigError, match=r"pass interlace_split_backward: no device is chosen, so 'h200': .*'NVIDIA L4'"):
        new_pass("interlace_split_backward", {}).apply([paddle.static.Program()], [paddle.static.Program()])
