"""Profiles as files: whole, versioned, with clear errors, bound to a device."""

from __future__ import annotations

import json
from importlib import resources

import msgspec
import pytest

from interlace.cost_model import load_profile, profile_names, require_device, save_profile
from interlace.cost_model.profile import decode_profile, encode_profile
from interlace.errors import ConfigError


@pytest.fixture(params=["h100", "h200", "cpu"])
def name(request) -> str:
    return request.param


def raw(name: str = "h200") -> dict:
    return json.loads((resources.files("interlace.configs") / "devices" / f"{name}.json").read_text())


def test_stored_profiles_are_whole_and_written_as_we_write_them(name):
    data = (resources.files("interlace.configs") / "devices" / f"{name}.json").read_bytes()
    assert encode_profile(decode_profile(data, name)) == data
    assert name in profile_names()


def test_every_profile_says_where_it_comes_from(name):
    profile = load_profile(name)
    assert all((profile.provenance.machine, profile.provenance.date, profile.provenance.command, profile.provenance.versions))
    assert all(sample.spread_ns >= 0 and sample.source == "measured" for sample in profile.ops)
    assert {peak.source for peak in profile.matrix_flops.values()} <= {"measured", "datasheet", "derived"}


def test_save_and_load_give_the_same(tmp_path, name):
    profile = load_profile(name)
    path = save_profile(profile, tmp_path / "deep" / "mine.json")
    assert load_profile(path) == profile
    assert [item.name for item in path.parent.iterdir()] == ["mine.json"]


def test_another_device_is_an_error():
    profile = load_profile("h200")
    require_device(profile, "NVIDIA H200 ")
    with pytest.raises(ConfigError) as caught:
        require_device(profile, "NVIDIA A100")
    assert str(caught.value) == (
        "the profile was measured on 'NVIDIA H200', this device is 'NVIDIA A100'; measure this one with "
        "`interlace calibrate -o FILE`, or force the profile to plan for the other device"
    )


def test_a_device_with_a_profile_of_its_own_is_told_its_name():
    with pytest.raises(ConfigError, match=r"this device is 'NVIDIA H100 80GB HBM3'; take the profile 'h100' that comes with Interlace, or"):
        require_device(load_profile("h200"), "NVIDIA H100 80GB HBM3")


def test_an_unknown_name_lists_the_names_there_are():
    with pytest.raises(ConfigError, match=r"no device profile 'h2000': expected one of cpu, h100, h200, or a path"):
        load_profile("h2000")


def test_a_missing_file_says_what_writes_one(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read .*No such file.*`interlace calibrate -o "):
        load_profile(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("kind", "dims", "message"),
    [
        ("softmax", {"elements": 8}, r"my\.json: the dims .* softmax in float32 are elements; expected rows, cols \(at \$\.ops\[0\]\.dims"),
        ("gelu", {"rows": 2, "cols": 4}, r"of gelu in float32 are rows, cols; expected elements \("),
        ("gelu", {"elements": 8, "transpose_x": 1}, r"are elements, transpose_x; expected elements \("),
        ("gemm", {"m": 2, "n": 2, "transpose_y": 1}, r"are m, n, transpose_y; expected batch, m, n, k \("),
        ("my_own", {}, r"of my_own in float32 are none; expected elements \("),
    ],
)
def test_samples_without_the_dims_of_their_kind_are_refused(kind, dims, message):
    """A softmax of which only the number of elements is known would be taken for one of rows of one element."""
    data = raw()
    data["ops"].insert(0, {"kind": kind, "dtype": "float32", "dims": dims, "size_bytes": 64, "dur_ns": 100})
    with pytest.raises(ConfigError, match=message):
        decode_profile(msgspec.json.encode(data), "my.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["ops"][3].update(dur_ns="fast"), r"my\.json: Expected `int`, got `str` - at `\$\.ops\[3\]\.dur_ns`"),
        (lambda d: d["ops"][0].update(dur_ns=0), r"Expected `int` >= 1 - at `\$\.ops\[0\]\.dur_ns`"),
        (lambda d: d["copies"][0].update(direction="up"), r"Invalid enum value 'up' - at `\$\.copies\[0\]\.direction`"),
        (lambda d: d.update(colour="red"), r"contains unknown field `colour`"),
        (lambda d: d.pop("host"), r"missing required field `host`"),
        (lambda d: d.update(interlace_profile=99), r"my\.json: profile layout 99, this version reads 1; measure again"),
        (lambda d: d.update(interlace_profile=0), r"my\.json: profile layout 0, this version reads 1; measure again"),
    ],
)
def test_a_bad_file_is_an_error_with_file_field_and_expectation(change, message):
    data = raw()
    change(data)
    with pytest.raises(ConfigError, match=message):
        decode_profile(msgspec.json.encode(data), "my.json")


def test_a_file_cut_short_is_an_error():
    data = encode_profile(load_profile("h200"))
    with pytest.raises(ConfigError, match=r"my\.json: .*truncated"):
        decode_profile(data[: data.index(b'"ops"') + 20], "my.json")
