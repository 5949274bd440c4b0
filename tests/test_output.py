"""What commands print: one unit for each kind of figure, alike ranks once, many findings summed up, hints, signs of life."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import msgspec
import pytest

from interlace.cli import main, run
from interlace.cli.progress import Alive
from interlace.errors import PlanError
from interlace.ir import Program, load, save
from interlace.ir.target import GPU
from interlace.local.rank_report import Progress, RankReport, StepLoss
from interlace.local.verdict import first_difference
from interlace.scheduler.hazards import Finding, findings_text, require_safe
from tests.strategies import World, programs

pytestmark = pytest.mark.usefixtures("few_forms")

HALF = "device: h200\nmemory_budget: +1GB\noffload_activations: {fraction: 0.5}\n"
OTHER_UNITS = re.compile(r"\d (?:ns|us|s|bytes|KB|KiB|kB|MB|GB)\b")
POOLS = re.compile(r"(?:free blocks in allocator pools \d\.\d KiB -> |of which Paddle's baseline takes )\d\.\d KiB")
"""Blocks of allocators are larger than the tensors here, which take less than one KiB."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps and plans of two stages of two ranks."""
    folder = tmp_path_factory.mktemp("world")
    for program in programs(World(pp=2, mp=2, micro_batches=4)):
        save(program, folder / "dumps" / f"rank{program.rank}.ilp")
    (folder / "half.yaml").write_text(HALF)
    assert main(["plan", str(folder / "dumps"), "--config", str(folder / "half.yaml"), "-o", str(folder / "plan")]) == 0
    return folder


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) in (0, 1)
    return capsys.readouterr().out


def test_one_unit_for_each_kind_of_figure(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times are ms, memory is KiB, MiB and GiB (single bytes below one KiB)."""
    text = printed(capsys, "plan", world / "dumps", "--config", world / "half.yaml", "-o", world / "again")
    text += printed(capsys, "check", world / "plan")
    text += printed(capsys, "show", world / "plan" / "rank0.ilp", "--why")
    text += printed(capsys, "show", world / "plan" / "rank0.ilp", "--costs")
    assert " ms" in text
    text, count = POOLS.subn("", text)
    assert count == 2
    assert OTHER_UNITS.findall(text) == []


@pytest.mark.parametrize("words", [("plan", "dumps", "-o", "sized"), ("check", "plan"), ("timeline", "plan", "-o", "sized.json")])
def test_tables_show_memory_in_a_unit_that_fits(words: tuple[str, ...], world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model of some KiB no peak is 0.000 GiB."""
    command, *rest = words
    lines = printed(capsys, command, *(word if word == "-o" else world / word for word in rest)).splitlines()
    at, unit = next((k, found[1]) for k, line in enumerate(lines) if (found := re.search(r" peak (\w+)", line)))
    assert unit in ("B", "KiB")
    behind = len(lines[at]) - lines[at].index(f"peak {unit}") - len(f"peak {unit}")  # the columns are flush right
    for line in lines[at + 1 : at + 3]:
        assert float(line[: len(lines[at]) - behind].split()[-1]) > 0


def test_a_plan_is_one_screen(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alike ranks once with the split of their step, Paddle's own under it; what was done is told by rule, in names of layers."""
    text = printed(capsys, "plan", world / "dumps", "--config", world / "half.yaml", "-o", world / "once", "--json", world / "once.json")
    lines = text.splitlines()
    assert len(lines) <= 50
    assert lines[0].startswith("ranks 0-3 of 4, 2 of 2 stages, 4 micro-batches, schedule 1F1B, profile h200")
    assert [line.split("  ")[0] for line in lines[2:6:2]] == ["stage 0, ranks 0-1", "stage 1, ranks 2-3"]
    outcome = json.loads((world / "once.json").read_text(encoding="utf-8"))["ranks"][0]["outcome"]
    for side, offset in (("plan", 2), ("before", 3)):
        for place, stage in enumerate(outcome[side]["stages"]):
            cells = lines[offset + 2 * place].split()[-10:]  # the step, its parts, peak and pinned memory, energy, clock
            found = [float(cell) for cell in cells]
            names = ("compute_ns", "exposed_ns", "bubble_ns", "host_ns", "hidden_ns")
            assert found[:6] == pytest.approx([outcome[side]["step_ns"] / 1e6, *(stage[name] / 1e6 for name in names)], abs=1e-3)
            assert all(re.fullmatch(r"\d+\.\d{3}", cell) for cell in cells[:6])  # as all of a column
            assert sum(stage[name] for name in names[:4]) == outcome[side]["step_ns"]
    assert not re.search(r"(?<!\w)[#%]\d", text)
    assert "split-backward          matmul_grad: dX is matmul" in text


def reversed_jobs(program: Program) -> Program:
    """Every job's operations in the opposite order."""
    jobs = tuple(msgspec.structs.replace(job, items=job.items[::-1]) for job in program.jobs)
    return msgspec.structs.replace(program, jobs=jobs)


def test_many_findings_are_summed_up_by_class(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (world / "plan").glob("*.ilp"):
        save(reversed_jobs(load(path)), tmp_path / path.name)
    found = tmp_path / "found.json"
    short = printed(capsys, "check", tmp_path, "--json", found).splitlines()
    number = int(next(line for line in short if line.endswith("finding(s):")).split()[0])
    every = json.loads(found.read_text())["findings"]
    assert number == len(every) > 20
    lines = [line for line in short if line.startswith("- ")]
    assert len(lines) == len({each["kind"] for each in every})
    of_kind = [each for each in every if each["kind"] == "read-before-write"]
    shown = next(line for line in lines if line.startswith("- read-before-write"))
    assert shown.startswith(f"- read-before-write, {len(of_kind)} findings on ranks 0-3; the first: read-before-write: ")
    assert of_kind[0]["message"] in shown
    assert any("--all" in line for line in short)
    full = printed(capsys, "check", tmp_path, "--all").splitlines()
    assert len([line for line in full if line.startswith("- ")]) == number
    with pytest.raises(PlanError) as refused:
        require_safe([load(path) for path in sorted(tmp_path.glob("*.ilp"))], GPU)
    assert len(str(refused.value).splitlines()) == 1 + len(lines)


def test_few_findings_stay_whole() -> None:
    few = [Finding("race", (0,), (), f"rank 0: {k}", "order them") for k in range(5)]
    assert findings_text(few) == [str(each) for each in few]
    assert len(findings_text([*few, few[0]])) == 1


@pytest.mark.parametrize("command", [["run"], ["dump"]])
def test_the_separator_is_hinted_at(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "gpt.py"
    script.write_text("")
    with pytest.raises(SystemExit) as ended:
        main([*command, str(script), "--world", "4", "--pp", "2", "--w"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{command[0]} does not know --pp 2 --w; arguments of {script} follow --" in said
    assert f"interlace {command[0]} {script} --world 4 -- --pp 2 --w" in said


def test_other_commands_have_no_such_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "dumps", "--pp", "2"])
    said = capsys.readouterr().err
    assert "plan does not know --pp 2" in said
    assert "behind --" not in said


def test_a_silent_command_gives_signs_of_life() -> None:
    lines: list[str] = []
    with Alive("plan", "planning ranks 0-3", lines.append, wait_s=(0.02, 0.02)) as alive:
        time.sleep(0.2)
        alive.now("writing")
        time.sleep(0.1)
    assert len(lines) > 2
    assert lines[0].startswith("interlace plan: planning ranks 0-3, ")
    assert lines[-1].startswith("interlace plan: writing, ")
    count = len(lines)
    time.sleep(0.05)
    assert len(lines) == count
    with Alive("plan", "planning", lines.append, wait_s=(60, 60)):
        pass
    assert len(lines) == count


def test_losses_are_shown_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 prints none; ranks 2 and 3, of the last stage, both do: rank 2's are shown, those from before the first loss too."""
    with run._Display("run", 4) as display:
        for rank in range(4):
            display.say(rank, "built")
        display.say(1, "nothing to see")
        display.say(2, "step 1 loss 4.5")
        display.show(Progress(0, "train", 1, 2_000_000))
        display.show(Progress(2, "train", 1, 2_000_000, 4.5))
        display.say(3, "step 1 loss 4.5")
        display.say(2, "step 2 loss 4.4")
        display.say(0, "done")
        display.say(2, "done")
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "run | built",
        "run rank 2 | built",
        "run rank 2 | step 1 loss 4.5",
        "run rank 2 | step 2 loss 4.4",
        "run | done",
        "run rank 2 | done",
    ]
    assert said.err.splitlines() == ["run: train step 1: loss 4.5 (2.000 ms)"]


def test_one_rank_s_losses_are_shown_throughout(capsys: pytest.CaptureFixture[str]) -> None:
    """Data parallelism: ranks 2 and 3 have losses of their own. Whichever is done first, the steps of one run, and of those that are
    compared with it, are of the same rank."""
    with run._Display("baseline", 4) as baseline:
        for rank, step, loss in ((2, 1, 4.5), (3, 1, 7.5), (3, 2, 7.4), (2, 2, 4.4)):
            baseline.show(Progress(rank, "train", step, 2_000_000, loss))
    with run._Display("interlace", 4, baseline.loss_rank) as planned:
        planned.say(2, "early")
        for rank, loss in ((3, 7.5), (2, 4.5)):
            planned.show(Progress(rank, "train", 1, 2_000_000, loss))
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "baseline: train step 1: loss 4.5 (2.000 ms)",
        "baseline: train step 2: loss 4.4 (2.000 ms)",
        "interlace: train step 1: loss 4.5 (2.000 ms)",
    ]
    assert said.out.splitlines() == ["interlace rank 2 | early"]


def test_losses_of_alike_ranks_share_their_lines() -> None:
    loss = StepLoss("train", 1, "float32", (1,), "00009040", (4.5,), 5)
    reports = tuple(RankReport(rank, 4, (loss if rank > 1 else StepLoss("train", 1),)) for rank in range(4))
    assert run._losses_text(reports).splitlines() == [
        "ranks  mode     step  loss",
        "  2-3  train       1  4.5",
        "ranks 0-1: no losses (only the last pipeline stage has them)",
    ]
    assert run._table_text(reports, reports).splitlines()[1].startswith("  2-3  train       1  4.5             4.5")


def test_a_loss_that_is_not_finite_is_told_as_one() -> None:
    """Not as one that was not fetched, nor as nothing before its bits."""
    lost, found = (StepLoss("train", 1, "float32", (1,), bits, values) for bits, values in (("0000c07f", ()), ("00009040", (4.5,))))
    one, other = ((RankReport(0, 1, (loss,)),) for loss in (lost, found))
    assert run._table_text(one, other).splitlines()[1].split()[3:] == ["not", "finite", "4.5", "<--", "differs"]
    assert "baseline not finite (float32[1], bits 0000c07f), interlace 4.5 (float32[1], bits 00009040)" in str(first_difference(one, other))


def test_options_are_not_guessed_from_their_beginnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script's `--log` is no `--log-dir` of ours."""
    (tmp_path / "gpt.py").write_text("")
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "gpt.py"), "--world", "1", "--log", "x"])
    assert "run does not know --log x" in capsys.readouterr().err
