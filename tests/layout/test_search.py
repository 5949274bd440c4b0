"""A search over programs that Paddle builds: bounds exclude nothing that is better, and what is recommended trains."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.layout.answer import Answer, Row

pytestmark = [pytest.mark.paddle, pytest.mark.usefixtures("few_forms")]
ROOT = Path(__file__).parents[2]
TEN = 10
"""Layouts that are trained by both plans, of four ranks and of eight; each takes two runs of all ranks."""
MODEL = ["--layers", "2", "--hidden", "256", "--heads", "4", "--seq-len", "64", "--batch-size", "8"]
VARIES = ["--pp", "{pp}", "--mp", "{mp}", "--dp", "{dp}", "--micro-batches", "{m}", "--sharding-stage", "{sharding}"]
COMMAND = ["choose", str(ROOT / "examples" / "gpt.py"), "--memory", "70GB", "--device", "h100"]
RANGES = ["--layers", "2", "--heads", "4", "--batch-size", "8", "--try", "sharding=0,1", "--try", "m=1,2", "--finalists", "1"]


def choose(folder: Path, *words: str, model: Sequence[str] = MODEL) -> Answer:
    """Of as many GPUs as the folder is called."""
    import msgspec

    path = folder / "answer.json"
    gpus = ["--gpus", folder.name, "--gpus-a-host", folder.name]
    assert main([*COMMAND, *RANGES, *gpus, *words, "-o", str(folder / "kept"), "--json", str(path), "--", *VARIES, *model]) == 0
    return msgspec.json.decode(path.read_bytes(), type=Answer)


@pytest.fixture(scope="module", params=["2", pytest.param("4", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("choose") / str(request.param)
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def everything(forked_ranks: None, few_forms: None, folder: Path) -> Answer:
    """Every layout built and simulated, none excluded."""
    return choose(folder, "--all")


def figures(answer: Answer) -> dict[str, Row]:
    return {row.layout: row for row in answer.rows}


def test_every_layout_is_told_of(everything: Answer) -> None:
    assert everything.counts["layouts"] == len(everything.rows) > 7
    assert everything.counts["waiting"] == everything.counts["excluded"] == 0
    assert everything.tokens == 8 * 64
    assert all(row.paddles or row.why for row in everything.rows)
    few = [row for row in everything.rows if row.values["m"] < row.values["pp"]]  # type: ignore[operator]
    assert few
    assert all(row.state == "refused" and "Paddle runs 1F1B of 2 stages with as many micro-batches or more" in row.why for row in few)
    steps = [row.best()[1].step_ns for row in everything.rows if row.best()]  # type: ignore[index]
    assert steps == sorted(steps)
    assert {row.values["pp"] for row in everything.rows if row.paddles} == {1, 2}


def test_bounds_are_bounds(everything: Answer, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of every layout, those of a search that asks for them, against the steps and peaks of all; the search finds the same fastest one."""
    bounded = choose(folder, "--layouts", "100")
    known = figures(everything)
    checked = 0
    for row in bounded.rows:
        for found in (known[row.layout].paddles, known[row.layout].ours):
            if found:
                assert row.least_ns <= found.step_ns, row.layout
                assert row.least_bytes <= found.peak_bytes, row.layout
                checked += 1
    assert checked >= sum(row.paddles is not None for row in everything.rows)
    assert all(row.least_ns > 0 and row.least_bytes > 0 for row in bounded.rows if row.state != "refused")
    best = everything.rows[0].best()
    assert best is not None
    for row in bounded.rows:
        if row.state == "excluded":
            found = known[row.layout].best()
            assert found is None or found[1].step_ns >= best[1].step_ns, row.layout
    assert bounded.rows[0].layout == everything.rows[0].layout
    assert bounded.counts["programs built"] <= 1  # all are kept; the model on one GPU is none of the layouts


def test_less_memory_than_a_model_needs(everything: Answer, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What lives through the step does not fit where it is not split; the reason tells how much it is."""
    memory = {"2": 20, "4": 12}[folder.name]
    bounded = choose(folder, "--layouts", "100", "--memory", f"{memory}MB")
    excluded = [row for row in bounded.rows if row.state == "excluded" and "holds" in row.why]
    assert excluded
    for row in excluded:
        found = figures(everything)[row.layout].paddles
        assert found is None or found.peak_bytes > memory * 1_000_000
    assert all(best[1].peak_bytes <= memory * 1_000_000 for row in bounded.rows if (best := row.best()))
    assert re.search(r"excluded by a bound: \d+ such as .*: holds .* or more on some rank", capfd.readouterr().out)


def test_equal_commands_give_equal_answers_and_a_page(everything: Answer, folder: Path) -> None:
    page = folder / "kept" / "choose.html"
    first = [choose(folder, "--layouts", "5"), page.read_bytes()]
    second = [choose(folder, "--layouts", "5", "--jobs", "3"), page.read_bytes()]
    assert first == second
    text = page.read_text()
    data = json.loads(re.search(r"^const data = (.*);$", text, re.MULTILINE)[1].replace("\\u003c", "<"))  # type: ignore[index]
    assert data["rows"][0]["layout"] == first[0].rows[0].layout  # type: ignore[union-attr]
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)


def test_what_is_refused_is_told_in_the_scripts_words(everything: Answer, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without --heads a layout is built that the script refuses."""
    words = [*COMMAND, "--gpus", "4", "--gpus-a-host", "4", "--batch-size", "8", "--finalists", "0"]
    words += ["--try", "mp=2,4", "--try", "pp=1", "--try", "m=1", "--try", "sharding=0"]
    model = [*MODEL[:4], "--heads", "2", *MODEL[6:]]
    assert main([*words, "-o", str(folder / "kept"), "--", *VARIES, *model]) == 0
    assert "refused: 1 such as pp 1, mp 4, dp 1, m 1, sharding 0" in (out := capfd.readouterr().out)
    assert "--heads 2 must be a multiple of mp = 4" in out
    assert "1 simulated, of these 0 planned in full" in out
    assert "recommended: pp 1, mp 2, dp 2, m 1, sharding 0, Paddle's plan" in out


@pytest.mark.parametrize("place", [0, *(pytest.param(k, marks=pytest.mark.long) for k in range(1, TEN))])
def test_the_ten_best_train_with_the_losses_of_paddles_own_plan(
    everything: Answer, folder: Path, capfd: pytest.CaptureFixture[str], place: int
) -> None:
    """On CPU ranks; for two there are fewer that differ."""
    if place and folder.name == "2":
        pytest.skip("four ranks train all")
    trains_as_paddle(everything, place, int(folder.name), capfd)


@pytest.fixture(scope="module")
def of_eight(forked_ranks: None, few_forms: None, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """For eight ranks, with three pipeline degrees."""
    folder = tmp_path_factory.mktemp("choose") / "8"
    folder.mkdir()
    words = ["--layers", "4", "--layouts", "12", "--finalists", "1"]
    return choose(folder, *words, model=["--layers", "4", *MODEL[2:]])


@pytest.mark.long
@pytest.mark.parametrize("place", range(TEN))
def test_the_ten_best_of_eight_ranks_train_with_the_losses_of_paddles_own_plan(
    of_eight: Answer, capfd: pytest.CaptureFixture[str], place: int
) -> None:
    trains_as_paddle(of_eight, place, 8, capfd)


def trains_as_paddle(answer: Answer, place: int, world: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A layout of an answer, by the command line that is told, with Paddle's plan and with one of Interlace: every bit is compared."""
    best = [each for each in answer.rows if each.best()]
    words = best[place].command.split()[1:]
    assert main(["run", str(ROOT / "examples" / "gpt.py"), "--world", str(world), "--verify", "--", *words]) == 0, best[place].layout
    assert "SAME: " in capfd.readouterr().out, best[place].layout


def test_hosts_make_times_that_are_estimated(everything: Answer, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same programs on two hosts: no layout whose groups cross them is faster for it, and the share that rests on it is told."""
    words = ["--gpus-a-host", str(int(folder.name) // 2), "--network", "10GB", "--latency-us", "2000"]
    words += ["--try", "mp=1,2", "--layouts", "3", "--finalists", "1"]
    apart = [row for row in choose(folder, *words).rows if row.paddles]
    out = capfd.readouterr().out
    known = figures(everything)
    assert len(apart) == 3
    for row in apart:
        within = known[row.layout].paddles
        assert within is not None
        assert row.paddles is not None
        assert row.paddles.step_ns > within.step_ns
        assert 0 < row.across_hosts < 1
        assert row.paddles.rel_error >= 0.5 * row.across_hosts - 1e-3
    assert "10 GB/s and 2000 us per GPU between hosts (as given); times across hosts are estimated" in out
    assert "of its device time crosses hosts and is estimated, not measured" in out


def test_what_paddle_refuses_to_run_has_a_plan_of_ours_alone(tmp_path: Path, forked_ranks: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Chunks with master gradients: Paddle's VPP misses a role of their casts."""
    folder = tmp_path / "2"
    folder.mkdir()
    words = ["--layers", "4", "--try", "pp=2", "--try", "mp=1", "--try", "vpp=1,2", "--finalists", "2"]
    model = ["--vpp", "{vpp}", "--amp", "O2", "--master-grad", "--layers", "4", *MODEL[2:]]
    rows = [row for row in choose(folder, *words, model=model).rows if row.values["m"] == 2]
    plain, chunks = sorted(rows, key=lambda row: str(row.values["vpp"]))
    assert (plain.state, chunks.state) == ("planned", "planned")
    assert plain.paddles
    assert not plain.refusal
    assert chunks.paddles is None
    assert chunks.ours
    assert re.match(r"Paddle's VPP refuses \d+ operations without a role, such as pd_op.cast", chunks.refusal)
    assert "without a plan of Paddle's: 1 such as pp 2, mp 1, dp 1, m 2, sharding 0, vpp 2: Paddle's VPP" in capfd.readouterr().out


def test_changed_sources_are_built_again(forked_ranks: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A module that the script imports decides on what is built, and so does a file that is named in its arguments."""
    for name in ("gpt.py", "common.py"):
        (tmp_path / name).write_text((ROOT / "examples" / name).read_text())
    own: list[Any] = ["choose", str(tmp_path / "gpt.py"), "--gpus", "1", "--memory", "70GB", "--device", "h100", "--batch-size", "8"]
    words = [*own, "--try", "m=1", "--finalists", "1", "-o", str(tmp_path / "kept"), "--", "--micro-batches", "{m}", *MODEL]
    assert main(words) == 0
    assert "1 programs built now" in capfd.readouterr().out
    assert main(words) == 0
    assert "0 programs built now" in capfd.readouterr().out
    with open(tmp_path / "common.py", "a") as file:
        file.write("# changed\n")
    assert main(words) == 0
    assert "1 programs built now" in capfd.readouterr().out
    record = json.loads(next((tmp_path / "kept" / "programs").glob("*.json")).read_text())
    assert {str(tmp_path / "common.py"), str(tmp_path / "gpt.py")} <= record["sources"].keys()
