"""`interlace dump`: one rank's program from a script, built alone; outputs and options checked before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.ir import load, save
from interlace.local import processes
from tests.strategies import World, programs

TINY = Path(__file__).with_name("tiny_gpt.py")


@pytest.mark.paddle
def test_one_rank_is_dumped_planned_and_shown(tmp_path: Path, capsys: Any) -> None:
    """Offline. The last stage of two, into a file, with its figures for machines; then offline as any dump."""
    dump, figures = tmp_path / "new" / "last.ilp", tmp_path / "figures" / "out.json"
    words = ["--world", "2", "--rank", "1", "-o", str(dump), "--json", str(figures)]
    assert main(["dump", str(TINY), *words, "--", "--pp", "2", "--micro-batches", "4", "--schedule", "1F1B"]) == 0
    program = load(dump)
    assert (program.rank, program.world, program.jobs) == (1, 2, ())
    assert (program.pipeline.stage, program.pipeline.num_stages, program.pipeline.num_micro_batches) == (1, 2, 4)
    found = json.loads(figures.read_text())["ranks"]
    assert [(each["rank"], each["ops"], each["path"]) for each in found] == [(1, len(program.ops), str(dump))]
    assert found[0]["seconds"] > 0 < found[0]["peak_rss_bytes"]
    assert f"[1/1] rank 1: {len(program.ops)} ops" in capsys.readouterr().out
    assert main(["plan", str(dump), "--partial", "-o", str(tmp_path / "plan")]) == 0
    assert "rank 1 of 2, stage 1 of 2, 4 micro-batches" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "plan" / "rank1.ilp"), "--before-after", "split-backward"]) == 0
    assert capsys.readouterr().out.startswith("split-backward: operations ")


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["absent.py", "--world", "2"], "absent.py: no such script"),
        ([TINY, "--world", "0"], "expected a world of at least 1 and a rank inside it"),
        ([TINY, "--world", "2", "--rank", "2"], "--world 2 --rank 2: expected a world of at least 1 and a rank inside it"),
        ([TINY, "--world", "2", "--compare"], "--compare: compares ranks with those that --stages builds; add --stages"),
        ([TINY, "--world", "2", "--jobs", "0"], "--jobs 0: expected a number of ranks, 1 or more"),
        ([TINY, "--world", "2", "--json", "/dev/null/x.json"], "--json '/dev/null/x.json': /dev/null is a file; expected a folder there"),
        ([TINY, "--world", "2", "-o", "/dev/null/dumps"], "-o '/dev/null/dumps': /dev/null is a file; expected a folder there"),
        ([TINY, "--world", "2", "--rank", "0", "-o", "/dev/null/x.ilp"], "/dev/null is a file; expected a folder there"),
    ],
)
def test_wrong_options_build_nothing(monkeypatch: Any, capsys: Any, words: list[Any], told: str) -> None:
    """Wrong options, interrupts."""
    monkeypatch.setattr(processes, "start", lambda *args, **more: pytest.fail("a rank was built"))
    assert main(["dump", *map(str, words)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.paddle
def test_one_rank_of_each_stage_is_the_whole_world(forked: None, few_forms: None, tmp_path: Path, capsys: Any) -> None:
    """Two ranks are built for eight, and are planned, proved, timed and drawn as all of them; a run needs every rank's plan."""
    folder, figures = tmp_path / "stages", tmp_path / "out.json"
    model = ["--pp", "2", "--mp", "2", "--dp", "2", "--micro-batches", "4", "--schedule", "1F1B"]
    assert main(["dump", str(TINY), "--world", "8", "--stages", "-o", str(folder), "--json", str(figures), "--", *model]) == 0
    assert [each["rank"] for each in json.loads(figures.read_text())["ranks"]] == [0, 4]
    assert main(["plan", str(folder), "-o", str(tmp_path / "plan")]) == 0
    assert "ranks 0-7 of 8, 2 of 2 stages" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "plan")]) == 0
    told = capsys.readouterr().out
    assert "8 of 8 ranks" in told
    assert "the 2 given ranks represent 6 more of their stages" in told
    assert main(["timeline", str(tmp_path / "plan"), "-o", str(tmp_path / "trace.json")]) == 0
    assert "  4-7  plan " in capsys.readouterr().out
    assert '"ranks 4-7 (stage 1)"' in (tmp_path / "trace.json").read_text()


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("kept", "told"),
    [([0, 1, 2, 3], "has rank1.ilp, rank3.ilp of an earlier"), ([0, 2], ""), ([2], ""), ([1], "has rank1.ilp of an earlier")],
)
def test_stages_among_other_ranks_are_refused_before_rank_0_is_built(
    tmp_path: Path, monkeypatch: Any, capsys: Any, kept: list[int], told: str
) -> None:
    """Dumps of all ranks of two stages lie there, or those of `--stages`, which are replaced."""
    made = programs(World(pp=2, mp=2))
    for rank in kept:
        save(made[rank], tmp_path / f"rank{rank}.ilp")
    started = list[Any]()
    monkeypatch.setattr(processes, "start", lambda *args, **more: started.append(args) or pytest.fail("built"))
    words = ["dump", str(TINY), "--world", "4", "--stages", "-o", str(tmp_path)]
    if told:
        assert main(words) == 2
        assert f"-o {tmp_path}: {told}" in capsys.readouterr().err
    else:
        with pytest.raises(pytest.fail.Exception):
            main(words)
    assert len(started) == (not told)


@pytest.mark.paddle
def test_what_cannot_be_read_among_stages_is_told_by_its_name(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Nothing says how many stages there are; a world of 6 has no rank 7 in any case."""
    monkeypatch.setattr(processes, "start", lambda *args, **more: pytest.fail("built"))
    (tmp_path / "rank1.ilp").write_text("")
    (tmp_path / "rank7.ilp").write_text("")
    assert main(["dump", str(TINY), "--world", "6", "--stages", "-o", str(tmp_path)]) == 2
    assert f"-o {tmp_path}: has rank7.ilp of an earlier" in capsys.readouterr().err


@pytest.mark.paddle
def test_sharding_stage_3_needs_no_memory(forked: None, tmp_path: Path) -> None:
    """Parameters that are described only are placed as those with contents are: the same program."""
    words = ["--world", "2", "--rank", "1", "--", "--layers", "1", "--dp", "2", "--sharding-stage", "3"]
    example = str(TINY.parents[2] / "examples" / "gpt.py")
    stored = []
    for kind in ([], ["--materialize"]):
        assert main(["dump", example, "-o", str(tmp_path / "rank1.ilp"), *kind, *words]) == 0
        stored.append(load(tmp_path / "rank1.ilp"))
    assert stored[0] == stored[1]
    assert any(op.kind == "all_gather" for op in stored[0].ops)


@pytest.mark.paddle
def test_a_script_that_needs_values_is_told_of_materialize(forked: None, tmp_path: Path, capfd: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text("import paddle\nlayer = paddle.nn.Linear(2, 2)\nlayer(paddle.ones([1, 2]))\n")
    assert main(["dump", str(script), "--world", "1", "-o", str(tmp_path)]) != 0
    assert "dumped with --materialize" in capfd.readouterr().err
