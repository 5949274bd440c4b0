"""Which layouts a command with placeholders may be given."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.errors import ConfigError
from interlace.layout.space import (
    Cluster,
    Layout,
    Template,
    command_line,
    contradiction,
    layouts_of,
    parse_tries,
    read_alternatives,
)

ALL = (
    "--pp",
    "{pp}",
    "--mp",
    "{mp}",
    "--dp",
    "{dp}",
    "--vpp",
    "{vpp}",
    "--m",
    "{m}",
    "--sharding",
    "{sharding}",
    "--recompute={recompute}",
)
WHOLE = Template("train.py", ALL)
TWO_HOSTS = Cluster(gpus=16, gpus_a_host=8, layers=12, heads=8, batch=96)


def test_every_layout_is_one_of_the_cluster_and_the_model() -> None:
    found = layouts_of(WHOLE, TWO_HOSTS, {})
    assert len(found) == len(set(found)) > 50
    for each in found:
        pp, mp, dp, vpp, m = (each.number(name) for name in ("pp", "mp", "dp", "vpp", "m"))
        assert (pp * mp * dp, 12 % (pp * vpp), 8 % mp, 96 % (dp * m), m % pp) == (16, 0, 0, 0, 0)
        assert mp <= 8
        assert vpp == 1 or pp > 1
        assert each.get("sharding") == 0 or dp > 1
    assert {each.get("recompute") for each in found} == {"none", "full"}


def test_ranges_miss_no_layout_of_powers_of_two() -> None:
    """Against a plain enumeration of all numbers."""
    template = Template("train.py", ("{pp}", "{mp}", "{dp}", "{m}"))
    found = {tuple(value for _, value in each.values) for each in layouts_of(template, Cluster(8, 8, 8, 8, 32), {})}
    numbers = (1, 2, 4, 8, 16, 32)
    plain = {
        (pp, mp, dp, m)
        for pp in numbers
        for mp in numbers
        for dp in numbers
        for m in numbers
        if pp * mp * dp == 8 and not m % pp and not 32 % (dp * m)
    }
    assert found == plain


def test_given_values_take_the_place_of_ranges() -> None:
    found = layouts_of(
        WHOLE, Cluster(16, 8, 12, 6, 24), parse_tries(["pp=2", "mp=1,2", "m=6", "vpp=1", "sharding=0", "recompute=attention"])
    )
    assert [str(each) for each in found] == [
        "pp 2, mp 2, dp 4, vpp 1, m 6, sharding 0, recompute attention",
    ]  # with mp 1 there are 8 replicas, and 8 x 6 micro-batches of 24 sequences are too many


def test_a_filled_command() -> None:
    template = Template("my train.py", ("--pp={pp}", "--keep", "{not me}"), {"RECOMPUTE": "{recompute}"})
    layout = Layout((("pp", 2), ("recompute", "full")))
    assert template.names == ("pp", "recompute")
    assert template.filled(layout) == (("--pp=2", "--keep", "{not me}"), (("RECOMPUTE", "full"),))
    assert command_line(template, layout) == "RECOMPUTE=full 'my train.py' --pp=2 --keep '{not me}'"


def test_one_gpu_and_thousands() -> None:
    alone = Template("train.py", ("{m}", "{recompute}"))
    assert [str(each) for each in layouts_of(alone, Cluster(1, 8, batch=4), {"recompute": ["none"]})] == [
        "m 1, recompute none",
        "m 2, recompute none",
        "m 4, recompute none",
    ]
    many = layouts_of(WHOLE, Cluster(2048, 8, 96, 96, 4096), {})
    assert max(each.number("dp") for each in many) == 2048
    assert all(each.number("mp") <= 8 for each in many)


@pytest.mark.parametrize(
    ("names", "tries", "told"),
    [
        ((), {}, "there is nothing to choose"),
        (("{width}",), {}, "{width}: what may it be? expected --try width=..."),
        (("{pp}",), {"mp": [1]}, "mp has values and no place"),
        (("{m}",), {}, "--batch-size N, or --try m=..."),
        (("{pp}", "{mp}"), {"pp": [3], "mp": [1]}, "no layout of 16 GPUs is left"),
    ],
)
def test_what_cannot_be_enumerated(names: tuple[str, ...], tries: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("{", r"\{").replace(".", r"\.").replace("?", r"\?")):
        layouts_of(Template("train.py", names), Cluster(16, 8), tries)


@pytest.mark.parametrize(
    ("cluster", "told"),
    [((0, 8), "--gpus 0"), ((8, 0), "--gpus-a-host 0"), ((12, 8), "a multiple of the 8"), ((8, 8, -1), "--layers -1")],
)
def test_clusters_that_are_none(cluster: tuple[int, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Cluster(*cluster)


@pytest.mark.parametrize("text", ["pp", "pp=", "pp=1,,2", "Pp=1", "=1"])
def test_values_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a name and its values"):
        parse_tries([text])


def test_a_name_has_its_values_once() -> None:
    with pytest.raises(ConfigError, match="each name once"):
        parse_tries(["pp=1", "pp=2"])


def test_alternatives(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("try: {pp: [1, 2], recompute: [none, full]}\nenvironment: {PP: '{pp}', RECOMPUTE: '{recompute}'}\n")
    found = read_alternatives(str(path))
    template = Template("train.py", (), found.environment)
    assert [str(each) for each in layouts_of(template, Cluster(2, 2), found.values)] == [
        "pp 1, recompute none",
        "pp 1, recompute full",
        "pp 2, recompute none",
        "pp 2, recompute full",
    ]
    path.write_text("layouts: [{pp: 1, mp: 2}, {pp: 2, mp: 1}]\n")
    pair = Template("train.py", ("{pp}", "{mp}"))
    assert [str(each) for each in layouts_of(pair, Cluster(2, 2), {}, read_alternatives(str(path)).layouts)] == ["pp 1, mp 2", "pp 2, mp 1"]
    for text, told in (
        ("layouts: [{pp: 1}]", "has no value for mp"),
        ("layouts: [{pp: 3, mp: 1}]", "does not divide 2 GPUs"),
        ("layouts: [{pp: 1, mp: 1, dp: 2}]", "dp has values and no place"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            layouts_of(pair, Cluster(2, 2), {}, read_alternatives(str(path)).layouts)
    for text in ("tries: {}", "try: [1]", "a: [", "try: {pp: [1.5]}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"my\.yaml"):
            read_alternatives(str(path))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"pp": "two"}, "expected a number"),
        ({"pp": 0}, "expected a number"),
        ({"pp": 2, "mp": 2, "dp": 2}, "pp x mp x dp is 8, expected 4"),
        ({"pp": 1, "vpp": 2}, "vpp is for pipelines"),
        ({"pp": 2, "vpp": 2, "m": 3}, "a multiple of pp 2"),
        ({"pp": 2, "mp": 2, "sharding": 1}, "sharding needs replicas"),
        ({"pp": 2, "mp": 1, "dp": 2, "vpp": 2, "m": 4, "sharding": 2}, ""),
    ],
)
def test_contradictions(values: dict, told: str) -> None:
    found = contradiction(Layout(tuple(values.items())), Cluster(4, 4))
    assert told in found
    assert bool(told) == bool(found)
