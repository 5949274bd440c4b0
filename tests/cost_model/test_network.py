"""Times across hosts: estimates from a network's bandwidth and latency, which say so."""

from __future__ import annotations

import msgspec
import pytest

from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.profile import Network, decode_profile, encode_profile
from tests.cost_model.programs import collective

PROFILE = msgspec.structs.replace(load_profile("h100"), network=Network(50e9, 10_000))
COSTS = CostModel(PROFILE)
WORLD = ",".join(map(str, range(16)))
ONE_HOST = ",".join(map(str, range(8)))


def test_a_profile_with_a_network_comes_back() -> None:
    assert decode_profile(encode_profile(PROFILE), "x") == PROFILE


def test_within_a_host_nothing_changes() -> None:
    asked = collective("pd_op.all_reduce_", "1,2048,4096", ranks=ONE_HOST)
    assert COSTS.op_time(*asked) == CostModel(load_profile("h100")).op_time(*asked)


@pytest.mark.parametrize(("name", "shapes"), [("pd_op.all_reduce_", ("16384,4096",)), ("pd_op.all_gather", ("1024,4096", "16384,4096"))])
def test_a_group_over_two_hosts_takes_longer_than_over_one_and_longer_than_its_network(name: str, shapes: tuple[str, ...]) -> None:
    apart = COSTS.op_time(*collective(name, *shapes, ranks=WORLD))
    within = COSTS.op_time(*collective(name, *shapes, ranks=ONE_HOST))
    share_bytes = 16384 * 4096 * 2 / 8  # what each device of a host exchanges with its like
    assert apart.dur_ns > within.dur_ns
    assert apart.dur_ns >= share_bytes / 2 / 50e9 * 1e9
    assert (apart.how, apart.rel_error >= 0.5) == ("roofline", True)
    assert apart.detail.startswith("estimated: ")
    assert "2 hosts of 8" in apart.detail


def test_one_device_of_each_host_has_the_network_alone() -> None:
    found = COSTS.op_time(*collective("pd_op.all_reduce_", "1,2048,4096", ranks="0,8,16,24"))
    size = 2048 * 4096 * 2
    assert found.dur_ns == pytest.approx(2 * size * 3 / 4 / 50e9 * 1e9 + 4 * 10_000, rel=1e-6)


def test_twice_the_bandwidth_and_half_the_latency_take_half_the_time() -> None:
    faster = CostModel(msgspec.structs.replace(PROFILE, network=Network(100e9, 5_000)))
    asked = collective("pd_op.all_reduce_", "1,2048,4096", ranks="0,8")
    assert 2 * faster.op_time(*asked).dur_ns == pytest.approx(COSTS.op_time(*asked).dur_ns, abs=2)


def test_without_a_network_it_is_a_lower_bound() -> None:
    found = CostModel(load_profile("h100")).op_time(*collective("pd_op.all_reduce_", "1,2048,4096", ranks="0,8"))
    assert found.how == "unknown"
