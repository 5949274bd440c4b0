"""Files that are broken, or made to take all memory or time: one sentence and code 2, in a moment."""

from __future__ import annotations

import gzip
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlace.cli import main
from interlace.config import load_config, make_config
from interlace.cost_model import load_profile
from interlace.cost_model.profile import encode_profile
from interlace.errors import ConfigError, InterlaceError, PlanError
from interlace.ir import Program, load
from interlace.ir.dump import encode
from interlace.ir.schedule import parse_rows
from interlace.scheduler.jobs.legal_rows import check_rows
from tests.strategies import World, programs

pytestmark = pytest.mark.usefixtures("few_forms")
LIMIT_S = 20
SMALL = programs(World(pp=2, mp=1, micro_batches=2, layers=1))
LARGER = programs(World(pp=1, mp=2, micro_batches=2, layers=4))[0]


@pytest.fixture(autouse=True)
def in_a_moment() -> Iterator[None]:
    """Ends a test that would run for ever."""

    def late(*args: Any) -> None:
        raise AssertionError(f"still running after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def document(program: Program = SMALL[0]) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(encode(program))
    return found


def changed(where: str, value: object, program: Program = SMALL[0]) -> bytes:
    """A small dump with one thing changed: a dotted path of names and positions."""
    made = document(program)
    at: Any = made["program"]
    *path, last = (int(word) if word.isdigit() else word for word in where.split("."))
    for word in path:
        at = at[word]
    at[last] = value
    return msgspec.json.encode(made) if value != HUGE else encoded_huge(made)


HUGE = 10**40


def encoded_huge(made: object) -> bytes:
    import json

    return json.dumps(made).encode()


BOMB = gzip.compress(bytes(1 << 20), 9) * 300
"""300 MiB of nothing in as many members of a kilobyte."""
DUMPS: dict[str, tuple[Callable[[], bytes], str]] = {
    "micro-batches": (lambda: changed("pipeline.num_micro_batches", 2_000_000_000), "`int` <= 131072 - at `$.program.pipeline.num_micro"),
    "items": (lambda: changed("pipeline.num_micro_batches", 130_000, LARGER), "expected 4194304 op instances to schedule, or fewer"),
    "no micro-batch": (lambda: changed("pipeline.num_micro_batches", 0), "`int` >= 1 - at `$.program.pipeline.num_micro_batches`"),
    "chunks": (lambda: changed("pipeline.num_chunks", 10**9), "at `$.program.pipeline.num_chunks`"),
    "world": (lambda: changed("world", 10**9), "`int` <= 131072 - at `$.program.world`"),
    "op id": (lambda: changed("ops.3.0", 10**11), "`int` <= 16777215 - at `$.program.ops[3][0]`"),
    "negative id": (lambda: changed("values.3.0", -5), "`int` >= 0 - at `$.program.values[3][0]`"),
    "huge id": (lambda: changed("values.3.0", HUGE), "`int` <= 16777215"),
    "dimension": (lambda: changed("values.3.1", [10**18]), "at `$.program.values[3][1][0]`"),
    "bytes": (lambda: changed("values.3.1", [1 << 30] * 9), "bytes; expected 1152921504606846976 or fewer"),
    "attribute": (lambda: changed("ops.3.6", {"x": [HUGE]}), "attribute x has a whole number of more than 64 bits"),
    "kind of attribute": (lambda: changed("ops.3.6", {"peer": "next"}), "attribute peer is 'next'; expected int"),
    "nesting": (lambda: b'{"interlace_schema":2,"program":' + b"[" * 100_000, "not a whole Interlace dump"),
    "gzip bomb": (lambda: BOMB, "more than 256 MiB when unpacked; expected a dump that `interlace dump` wrote"),
    "cut gzip": (lambda: gzip.compress(encode(SMALL[0]))[:-9], "its compressed data end early"),
    "broken gzip": (lambda: b"\x1f\x8b" + bytes(50), "cannot be read (Error"),
    "not text": (lambda: b'{"interlace_schema":2,"interlace":"\xff"}', "not a whole Interlace dump"),
    "nothing": (lambda: b"", "not a whole Interlace dump"),
}


@pytest.mark.parametrize("name", DUMPS)
def test_hostile_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    make, told = DUMPS[name]
    (tmp_path / "rank0.ilp").write_bytes(make())
    start = time.process_time()
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"interlace check: {tmp_path / 'rank0.ilp'}: ")
    assert told in said
    assert len(said) < 1000
    assert time.process_time() - start < LIMIT_S / 2


def test_what_is_no_regular_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pipes and devices would never end, links lead in circles."""
    os.mkfifo(tmp_path / "pipe.ilp")
    (tmp_path / "loop.ilp").symlink_to(tmp_path / "loop.ilp")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "rank0.ilp").write_bytes(encode(SMALL[0]))
    for words, told in {
        ("check", "/dev/zero"): "/dev/zero: a device; expected a file, or a folder of files",
        ("check", tmp_path / "pipe.ilp"): "pipe.ilp: a pipe; expected a file, or a folder of files",
        ("check", tmp_path / "loop.ilp"): "loop.ilp: a link that leads to no file; expected",
        ("timeline", tmp_path / "loop.ilp", "-o", tmp_path / "x.json"): "a link that leads to no file; expected",
        ("check", tmp_path / "dumps", "--device", tmp_path / "folder.json"): "cannot be read, it is a folder; expected a device profile",
        ("check", tmp_path / "dumps", "--device", tmp_path / "loop.json"): "cannot be read (No such file or directory); expected a device",
        ("plan", tmp_path, "--config", tmp_path / "pipe.ilp"): "no such file, and no preset of that name",
    }.items():
        assert main([str(word) for word in words]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(InterlaceError, match="it is a device; expected a dump"):
        load("/dev/zero")
    with pytest.raises(InterlaceError, match=r"pipe\.ilp: cannot be read, it is a pipe"):
        load(tmp_path / "pipe.ilp")


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, levels)]
    return "\n".join(lines)


CONFIGS = {
    "aliases": (bomb(9).encode(), r"my\.yaml: aliases \(\*name\) spell out more than 10000 entries"),
    "self": (b"offload_activations: &a {modules: [*a]}", r"my\.yaml:1:22: an alias \(\*name\) is inside the node that it names"),
    "nesting": (b"dump: " + b"[" * 5000, r"my\.yaml.*(nested too deeply|not YAML)"),
    "large": (b"# " + b"x" * (2 << 20), r"my\.yaml: more than 1 MiB; expected a YAML file"),
    "not text": (b"dump: \xff", r"my\.yaml: cannot be read: not UTF-8 text \(byte 6\)"),
    "twice": (b"check: on\ncheck: off", r"my\.yaml:2:1: option 'check' occurs twice"),
    "size": (f"memory_budget: +{'9' * 400}GB".encode(), "expected 1 EiB or less"),
    "number": (f"schedule_1f1b: {{max_ops_per_job: {'9' * 5000}}}".encode(), "max_ops_per_job"),
    "endless": (b"offload_activations: {fraction: 1e999}", "fraction"),
    "no number": (b"offload_activations: {fraction: nan}", "fraction"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_hostile_configurations(tmp_path: Path, name: str) -> None:
    data, told = CONFIGS[name]
    (tmp_path / "my.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=told):
        load_config(tmp_path / "my.yaml")


def test_a_shared_list_may_have_a_name(tmp_path: Path) -> None:
    """Aliases as such are YAML's own and stay."""
    (tmp_path / "my.yaml").write_text("split_backward: {modules: &m [mlp]}\noverlap_column_backward: {modules: *m}\n")
    assert load_config(tmp_path / "my.yaml").passes["overlap-column-backward"].modules == ("mlp",)  # type: ignore[attr-defined]


PROFILES = {
    "twice": (lambda text: text.replace('"ranks_per_host"', '"device": "x", "ranks_per_host"', 1), "field 'device' occurs twice"),
    "negative": (lambda text: text.replace('"op_ns":', '"op_ns":-', 1), r"Expected `int` >= 0 - at `\$\.host\.op_ns`"),
    "endless": (lambda text: text.replace('"per_s":', '"per_s":1e999, "x":', 1), "out of range"),
    "not a number": (lambda text: text.replace('"per_s":', '"per_s":NaN, "x":', 1), "malformed"),
    "too fast": (lambda text: text.replace('"per_s":', '"per_s":1e300, "x":', 1), r"`float` <= 1e\+24"),
    "nesting": (lambda text: '{"interlace_profile":1,"x":' + "[" * 100_000, "my.json: "),
    "not text": (lambda text: text.replace('"device"', '"devic\udcff"', 1), "my.json: "),
    "nothing": (lambda text: "", "my.json: "),
}


@pytest.mark.parametrize("name", PROFILES)
def test_hostile_profiles(tmp_path: Path, name: str) -> None:
    change, told = PROFILES[name]
    text = encode_profile(load_profile("cpu")).decode().replace(": ", ":")
    assert change(text) != text
    (tmp_path / "my.json").write_bytes(change(text).encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=told):
        load_profile(str(tmp_path / "my.json"))


def test_hostile_rows(tmp_path: Path) -> None:
    for line in (f"{'9' * 5000} | 0F", "² | 0F", f"0 | {'9' * 5000}F", "0 | 0F.99999999999"):
        with pytest.raises(PlanError, match="expected") as caught:
            parse_rows(line)
        assert len(str(caught.value)) < 300
    rows = parse_rows("0 | " + "0F " * 100_000)
    with pytest.raises(PlanError, match="must occur once"):
        check_rows(rows, 1, 1, 1, "rows")
    with pytest.raises(ConfigError, match=r"schedule file /dev/zero: cannot be read, it is a device"):
        make_config({"schedule_1f1b": {"schedule_file": "/dev/zero"}})


def test_a_hostile_record_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program in SMALL:
        (tmp_path / f"rank{program.rank}.ilp").write_bytes(encode(program))
    assert main(["plan", str(tmp_path), "--device", "cpu", "-o", str(tmp_path / "plan")]) == 0
    record = tmp_path / "plan" / "captured" / "rank0.json"
    good = msgspec.json.decode(record.read_bytes())
    for change in ({"options": {}}, {"options": {key: {"modules": 5} for key in good["options"]}}, {"order": "x"}):
        record.write_bytes(msgspec.json.encode({**good, **change}))
        assert main(["show", str(tmp_path / "plan" / "rank0.ilp"), "--before-after", "split-backward"]) == 2
        assert f"interlace show: {tmp_path / 'plan' / 'rank0.ilp'}: " in capsys.readouterr().err


HOSTILE = (-1, 10**6, 10**11, 1 << 63, HUGE, 1e308, "", "x" * 1000, None, [], {}, [[]], "vector", True)


@pytest.mark.parametrize("seed", range(12))
def test_any_change_of_a_dump_is_planned_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """Random places of a dump with random contents: no error but ours, from any command."""
    draw = random.Random(seed)
    for _ in range(8):
        made = [document(program) for program in SMALL]
        at: Any = made[0]["program"]
        while True:
            places = list(at) if isinstance(at, dict) else list(range(len(at)))
            place = draw.choice(places)
            if not isinstance(at[place], (dict, list)) or not at[place] or draw.random() < 0.1:
                break
            at = at[place]
        at[place] = draw.choice(HOSTILE)
        for rank, each in enumerate(made):
            (tmp_path / f"rank{rank}.ilp").write_bytes(encoded_huge(each))
        for words in (("check", "--device", "cpu"), ("show", "--costs")):
            assert main([words[0], str(tmp_path / "rank0.ilp") if words[0] == "show" else str(tmp_path), *words[1:]]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err
