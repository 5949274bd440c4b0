"""The offline commands: `plan`, `show`, and the rules that all commands share."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlace.cli import main
from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.base import trust_text
from interlace.ir import load, save, show
from interlace.passes import REGISTRY
from interlace.planning.plan import RECORD
from tests.default_passes import DEFAULT, NO_JOBS
from tests.remarks import done_in
from tests.strategies import World, programs

pytestmark = pytest.mark.usefixtures("few_forms")
WITHOUT_JOBS = "".join(f"{name}: off\n" for name in NO_JOBS)
OWN = '''
import interlace

@interlace.passes.register
class Noisy(interlace.passes.Pass, frozen=True, kw_only=True):
    """Puts its word on every layer."""

    name = "noisy"
    after = ("split-backward",)
    word: str = "psst"

    def run(self, program, context):
        import msgspec

        context.applied("said", word=self.word)
        return program.with_ops([msgspec.structs.replace(op, layer=f"{op.layer}{self.word}") for op in program.ops])
'''


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unscheduled programs of two stages; read only."""
    folder = tmp_path_factory.mktemp("world") / "dumps"
    for program in programs(World(pp=2, mp=1, micro_batches=4)):
        save(program, folder / f"rank{program.rank}.ilp")
    return folder


@pytest.fixture(scope="module")
def plans(dumps: Path) -> Path:
    """Their plans, made with the profile of a CPU; read only."""
    assert main(["plan", str(dumps), "--device", "cpu", "-o", str(dumps.parent / "plan")]) == 0
    return dumps.parent / "plan"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file with a pass of a user's own."""
    (tmp_path / "own_pass.py").write_text(OWN)
    return tmp_path / "own_pass.py"


def refusal(capsys: Any, *words: Any) -> str:
    """What a command that ends with the user's error says."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return str(said.err)


def shown(capsys: Any, *words: Any) -> tuple[list[str], dict[str, Any]]:
    """What `show` prints, and what it writes for machines."""
    capsys.readouterr()
    target = Path(words[0]).parent.parent / "shown" / "out.json"
    assert main(["show", *(str(word) for word in words), "--json", str(target)]) == 0
    return capsys.readouterr().out.splitlines(), json.loads(target.read_text())


def test_plan_writes_what_check_accepts(dumps: Path, tmp_path: Path, capsys: Any) -> None:
    """Offline. A plan, its program as captured, and a record for each rank; the same files again from a single call."""
    out, summary = tmp_path / "deep" / "plan", tmp_path / "new" / "plan.json"
    assert main(["plan", str(dumps), "--config", "overlap", "-o", str(out), "--json", str(summary)]) == 0
    said = capsys.readouterr().out
    assert f"2 plans in {out}; all reasons: `interlace show {out}/rank0.ilp --why`" in said
    assert "ranks 0-1 of 2, 2 of 2 stages, 4 micro-batches, schedule 1F1B, profile h200" in said
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        *(
            f"{folder}rank{rank}{suffix}"
            for folder, suffixes in (("captured/", (".ilp", ".json")), ("", (".ilp",)))
            for rank in (0, 1)
            for suffix in sorted(suffixes, reverse=False)
        ),
        "schedule.rows",
        "schedule.yaml",
    ]
    ranks = json.loads(summary.read_text())["ranks"]
    assert [each["rank"] for each in ranks] == [0, 1]
    assert [each["name"] for each in ranks[0]["passes"]] == DEFAULT
    assert all(sum(rank["time_by_how"].values()) == pytest.approx(1) for rank in ranks)
    costs = CostModel(load_profile("h200"))
    assert trust_text([row for rank in (0, 1) for row in costs.table(load(out / f"rank{rank}.ilp"))], " of all ranks") in said
    assert all(load(out / f"rank{rank}.ilp").jobs for rank in (0, 1))
    assert [load(out / "captured" / f"rank{rank}.ilp") for rank in (0, 1)] == [load(dumps / f"rank{rank}.ilp") for rank in (0, 1)]
    assert main(["check", str(out)]) == 0
    before = {path: path.read_bytes() for path in out.glob("*.ilp")}
    assert main(["plan", str(dumps), "--config", "overlap", "-o", str(out)]) == 0
    assert before == {path: path.read_bytes() for path in out.glob("*.ilp")}


def test_check_names_a_plan_that_was_changed_and_says_when_ranks_are_missing(dumps: Path, tmp_path: Path, capsys: Any) -> None:
    """Offline. A changed plan fails the check though it may be safe; a plan of some ranks is safe as far as they go."""
    out = tmp_path / "plan"
    assert main(["plan", str(dumps), "--config", "overlap", "-o", str(out)]) == 0
    capsys.readouterr()
    assert "nothing is given of rank 1 of 2, among them all of stage 1" in refusal(capsys, "check", out / "rank0.ilp")
    assert main(["check", str(out / "rank0.ilp"), "--partial"]) == 0
    assert "safe as far as the given ranks show: no race" in capsys.readouterr().out
    made = load(out / "rank1.ilp")
    save(made.with_ops(tuple(msgspec.structs.replace(op, attrs={**op.attrs, "changed": 1}) for op in made.ops)), out / "rank1.ilp")
    assert main(["check", str(out)]) == 1
    said = capsys.readouterr().out
    assert f"{out}/rank1.ilp: not the plan that its record in {out}/captured tells of" in said
    assert f"{out}/rank0.ilp: not the plan" not in said
    assert "safe: no race" in said
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    for words in (
        ("report", out, "-o", page),
        ("report", out / "captured", "--beside", out, "-o", page),
        ("timeline", out, "-o", trace),
        ("show", out, "--why"),
        ("show", out / "rank1.ilp", "--why"),
        ("show", out / "rank1.ilp", "--before-after", "name-streams"),
        ("show", out, "--rows"),
    ):
        assert f"{out}/rank1.ilp: not the plan that its record in {out}/captured tells of" in refusal(capsys, *words)
    assert not page.exists()
    assert not trace.exists()
    assert main(["show", str(out / "rank0.ilp"), "--why"]) == 0


def test_plan_refuses_before_it_plans(dumps: Path, tmp_path: Path, capsys: Any) -> None:
    """Wrong options, interrupts. Outputs, ranks, profiles, configurations; nothing is left."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for words, told in {
        (dumps, "-o", tmp_path / "link"): f"{tmp_path / 'link'} is a link to {tmp_path / 'gone'}, which does not exist; expected a folder",
        (dumps, "-o", tmp_path / "link" / "in"): f"{tmp_path / 'link'} is a link to {tmp_path / 'gone'}, which does not exist",
        (dumps, "-o", "/dev/null/x"): "-o '/dev/null/x': /dev/null is a file; expected a folder there",
        (dumps, "-o", tmp_path / "file"): "is a file; expected a folder there",
        (dumps, "--json", tmp_path / "file" / "x.json"): f"{tmp_path / 'file'} is a file; expected a folder there",
        (dumps, "--json", tmp_path): "is a folder; expected the name of a file",
        (dumps, "--points", "3"): "--points: is the number of budgets for --sweep; add --sweep, or leave --points out",
        (dumps, "--sweep", "--points", "1"): "--points 1: expected 2 or more",
        (dumps, dumps / "rank1.ilp"): "give one dump per rank, and one world at a time",
        (dumps, "--device", "abacus"): "no device profile 'abacus'",
        (dumps, "--config", "abacus"): "no such file, and no preset of that name",
        (tmp_path / "nothing",): "nothing: no such file or folder; expected a file, or a folder of files, that `interlace dump` or",
        (dumps, "--import", "no_such_module"): "--import no_such_module: ModuleNotFoundError: No module named 'no_such_module'",
        (dumps, "--import", "absent.py"): "--import absent.py: no such file",
    }.items():
        output = () if "-o" in words else ("-o", tmp_path / "plan")
        assert told in refusal(capsys, "plan", *words, *output)
    assert not (tmp_path / "plan").exists()


def test_show_prints_a_program_or_a_job(plans: Path, dumps: Path, capsys: Any) -> None:
    """Offline."""
    program = load(plans / "rank0.ilp")
    lines, data = shown(capsys, plans / "rank0.ilp")
    assert lines == show(program).splitlines()
    assert data["program"]["jobs"]
    assert data["file"] == str(plans / "rank0.ilp")
    job = program.jobs[2]
    lines, data = shown(capsys, plans / "rank0.ilp", "--job", job.name)
    assert lines[0] == f"job {job.name} {job.kind}"
    assert [line.split()[1] for line in lines[1:]] == [f"#{op_id}" for op_id, _ in job.items]
    assert lines[1].startswith(f"  mb{job.items[0][1]} #")
    assert len(data["ops"]) == len(job.items)
    assert f"no job 'nowhere'; there are {program.jobs[0].name}" in refusal(capsys, "show", plans / "rank0.ilp", "--job", "nowhere")
    assert "there are none, as this program has no schedule" in refusal(capsys, "show", dumps / "rank0.ilp", "--job", "forward_0")


def test_show_tells_why_and_what_a_pass_changed(plans: Path, dumps: Path, capsys: Any) -> None:
    """Offline, sites reported. The record of the plan, and the program before and after one pass."""
    lines, data = shown(capsys, plans / "rank1.ilp", "--why")
    heads = [line for line in lines if not line.startswith(" ")]
    told = " ".join(line.strip() for line in lines)
    assert [name for name in data["record"]["order"] if name not in told] == []
    changed = [report["name"] for report in data["record"]["reports"] if done_in(report)]
    assert [head.partition(":")[0] for head in heads if " changed, " in head] == changed
    assert any(line.startswith("  + ") for line in lines)
    every = shown(capsys, plans / "rank1.ilp", "--why", "--all")[0]
    reports = data["record"]["reports"]
    assert len(every) == sum(1 + len(report["remarks"]) for report in reports)
    assert not any("#" in line for line in lines)
    lines, data = shown(capsys, plans / "rank1.ilp", "--before-after", "split-backward")
    counts = len(data["before"]["ops"]), len(data["after"]["ops"])
    assert lines[0] == f"split-backward: operations {counts[0]} -> {counts[1]}, jobs 0 -> 0"
    assert counts[1] > counts[0]
    assert any(line.startswith("  + ") and "matmul" in line for line in lines)
    assert [line for each in data["changes"] for line in each["lines"]] == [line[2:] for line in lines if line.startswith("  ")]
    lines, data = shown(capsys, plans / "rank1.ilp", "--before-after", "split-backward", "--all")
    assert lines[:2] == ["--- before split-backward", "+++ after split-backward"]
    assert [line for line in lines if line.startswith("+#")]
    assert "pass 'offload-activations' did not run; those that did: " in refusal(
        capsys, "show", plans / "rank1.ilp", "--before-after", "offload-activations"
    )
    for words in (("--why",), ("--before-after", "split-backward")):
        assert "a captured program, not a plan" in refusal(capsys, "show", dumps / "rank0.ilp", *words)


def test_why_selects_by_rule(plans: Path, capsys: Any) -> None:
    """Of one plan and of a folder: the remarks of the rule as data, with their lines; a rule that there is none of is an error."""
    lines, data = shown(capsys, plans / "rank1.ilp", "--why", "--rule", "jobs-cut", "--rule", "gradient-split")
    kept = {each["name"]: {one["rule"] for one in each["remarks"]} for each in data["record"]["reports"]}
    assert kept == {"split-backward": {"gradient-split"}, "schedule-1f1b": {"jobs-cut"}}
    assert [line.rpartition(" ")[2] for line in lines if line.startswith("  ")] == ["[gradient-split]", "[jobs-cut]"]
    every = shown(capsys, plans, "--why", "--all", "--rule", "jobs-cut")[1]["records"]
    assert all({one["rule"] for each in record["reports"] for one in each["remarks"]} == {"jobs-cut"} for record in every.values())
    assert len(every) == 2
    told = refusal(capsys, "show", plans, "--why", "--rule", "jobs-cuts")
    assert "--rule jobs-cuts: the plan has no remark of this rule; its rules are " in told
    assert "jobs-cut, " in told
    assert "--rule jobs-cut: selects remarks of --why" in refusal(capsys, "show", plans / "rank1.ilp", "--rule", "jobs-cut")


def test_the_record_of_another_version_is_refused(plans: Path, tmp_path: Path, capsys: Any) -> None:
    """It had lines of text where there are remarks now; the message says what to do."""
    folder = tmp_path / "old"
    shutil.copytree(plans, folder)
    record = folder / "captured" / "rank0.json"
    old = json.loads(record.read_text())
    assert old.pop("version") == RECORD
    for report in old["reports"]:
        report |= {"changed": ["one line"], "declined": []}
        del report["remarks"]
    record.write_text(json.dumps(old))
    told = refusal(capsys, "show", folder / "rank0.ilp", "--why")
    assert f"{record}: layout 1 of a plan's record, this version of Interlace reads 3, 4, 5, {RECORD}; plan again with this version" in told


def test_show_asks_the_profile_of_the_plan(plans: Path, dumps: Path, capsys: Any) -> None:
    """Times of ops. Times of a plan by its own profile, of a dump by h200's, and by any other where asked for."""
    lines, data = shown(capsys, plans / "rank0.ilp", "--costs")
    assert (lines[0], data["device"]) == ("device profile cpu", "cpu")
    assert not any(line.startswith("#") for line in lines)
    every = shown(capsys, plans / "rank0.ilp", "--costs", "--all")[0]
    assert len(data["ops"]) == sum(line.startswith("#") for line in every) > 0
    assert shown(capsys, plans / "rank0.ilp", "--costs", "--device", "h200")[0][0] == "device profile h200"
    assert shown(capsys, dumps / "rank0.ilp", "--costs")[0][0] == "device profile h200"
    assert "only --costs uses a device profile" in refusal(capsys, "show", plans / "rank0.ilp", "--device", "h200")
    assert "--all: goes with --why, --costs or --before-after" in refusal(capsys, "show", plans / "rank0.ilp", "--all")


@pytest.mark.parametrize("words", [("--why", "--costs"), ("--job", "x", "--why"), ("--before-after", "x", "--costs")])
def test_show_does_one_thing(plans: Path, capsys: Any, words: tuple[str, ...]) -> None:
    """Wrong options. None of two options is dropped in silence."""
    with pytest.raises(SystemExit) as caught:
        main(["show", str(plans / "rank0.ilp"), *words])
    assert caught.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_show_wants_one_file(plans: Path, capsys: Any) -> None:
    assert "has 2 dumps, expected one" in refusal(capsys, "show", plans)


def test_reasons_of_a_folder_are_those_of_each_stage(plans: Path, capsys: Any) -> None:
    lines, data = shown(capsys, plans, "--why")
    heads = [line for line in lines if line.startswith("stage ")]
    assert heads == [f"stage {stage} ({plans}/rank{stage}.ilp):" for stage in (0, 1)]
    alone = shown(capsys, plans / "rank1.ilp", "--why")[0]
    assert lines[lines.index(heads[1]) + 1 :] == [line for line in alone if not line.startswith("Stages are unbalanced")]
    assert list(data["records"]) == ["0", "1"]


def test_a_plan_is_not_planned_again(plans: Path, dumps: Path, tmp_path: Path, capsys: Any) -> None:
    """Wrong files. The message names the folder of what it was made from, which can be planned."""
    told = refusal(capsys, "plan", plans, "-o", tmp_path / "plan")
    assert f"{plans}/rank0.ilp: is a plan already" in told
    assert f"the dumps that it was made from are in {plans}/captured" in told


def test_the_folder_for_dumps_of_runs_is_not_dropped_in_silence(dumps: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "my.yaml").write_text(f"dump: {tmp_path}/plans\n")
    assert main(["plan", str(dumps), "--config", str(tmp_path / "my.yaml"), "-o", str(tmp_path / "plan")]) == 0
    assert f"dump: {tmp_path}/plans is for runs; -o says where these plans go" in capsys.readouterr().err


def test_a_users_own_pass_plans_offline(dumps: Path, own: Path, capsys: Any) -> None:
    """A user's pass, offline. With --import; without it the message says so."""
    config, out = own.with_name("own.yaml"), own.parent / "plan"
    config.write_text("noisy: {word: hush}\n")
    told = refusal(capsys, "plan", dumps, "--config", config, "-o", out)
    assert f"{config}:1:1: unknown option 'noisy'" in told
    assert "a pass of your own must be registered first (--import MODULE" in told
    assert main(["plan", str(dumps), "--config", str(config), "--import", str(own), "-o", str(out)]) == 0
    assert "said: word hush" in capsys.readouterr().out
    lines, _ = shown(capsys, out / "rank0.ilp", "--before-after", "noisy", "--import", str(own))
    assert any("~ " in line and "layer layers.0 -> layers.0hush" in line for line in lines)


def test_an_imported_pass_runs_unless_it_is_turned_off(dumps: Path, own: Path, capsys: Any) -> None:
    """A user's pass. No configuration need name it; a module without passes is said to have none; one of unknown neighbours is refused."""
    config, out = own.with_name("own.yaml"), own.parent / "plan"
    assert main(["plan", str(dumps), "--import", str(own), "-o", str(out)]) == 0
    assert "said: word psst" in capsys.readouterr().out
    config.write_text("noisy: off\n")
    assert main(["plan", str(dumps), "--config", str(config), "--import", str(own), "-o", str(out)]) == 0
    assert "psst" not in capsys.readouterr().out
    assert main(["plan", str(dumps), "--config", str(config), "--import", "json", "-o", str(out)]) == 0
    assert "interlace: --import json: it registers no pass (@interlace.passes.register)\n" in capsys.readouterr().err
    (own.with_name("bare_pass.py")).write_text(OWN.replace("noisy", "bare").replace('word: str = "psst"', "word: str"))
    told = refusal(capsys, "plan", dumps, "--import", own.with_name("bare_pass.py"), "-o", out)
    assert "pass 'bare' has options without defaults (Missing required argument 'word'); name it here: bare: {...}" in told
    REGISTRY.pop("bare")
    (own.with_name("lost_pass.py")).write_text(OWN.replace("noisy", "lost").replace('"split-backward"', '"split-backwards"'))
    told = refusal(capsys, "plan", dumps, "--import", own.with_name("lost_pass.py"), "-o", out)
    assert "pass 'lost' is to run after 'split-backwards', which is no pass; did you mean 'split-backward'?" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plan: .", " is for runs, which load what this command writes; leave it out"),
        ("enable: off", "enable is off, or every pass is, so Paddle's plan stays and there is nothing to plan"),
        (
            "choose_recompute: off\nnarrow_gathers: off\nsplit_backward: off\noverlap_column_backward: off\nreduce_in_place: off\n"
            "name_streams: off\n" + WITHOUT_JOBS,
            "enable is off, or every pass",
        ),
        (WITHOUT_JOBS, "nothing would run the step; turn schedule_1f1b on"),
        ("memory_budget: 1B", "the least feasible one is "),
    ],
)
def test_what_plans_nothing_is_refused(dumps: Path, tmp_path: Path, capsys: Any, text: str, told: str) -> None:
    """As in training: nothing that is asked for is left out without a word."""
    (tmp_path / "off.yaml").write_text(text)
    assert told in refusal(capsys, "plan", dumps, "--config", tmp_path / "off.yaml", "-o", tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("command", ["check", "timeline"])
def test_outputs_follow_one_rule(plans: Path, tmp_path: Path, capsys: Any, command: str) -> None:
    """Interrupts. Folders are made; what cannot be is refused before the work."""
    (tmp_path / "file").write_text("")
    more = ["-o", str(tmp_path / "a" / "b" / "trace.json")] if command == "timeline" else []
    assert main([command, str(plans), *more, "--json", str(tmp_path / "c" / "d" / "out.json")]) == 0
    assert json.loads((tmp_path / "c" / "d" / "out.json").read_text())["ranks"]
    assert not more or Path(more[1]).is_file()
    capsys.readouterr()
    told = f"{tmp_path / 'file'} is a file; expected a folder there"
    assert told in refusal(capsys, command, plans, "--json", tmp_path / "file" / "x.json", *more)
    if more:
        assert f"-o '{tmp_path}/file/x.json': {told}" in refusal(capsys, command, plans, "-o", tmp_path / "file" / "x.json")


def test_passes_are_there_behind_import_interlace_alone() -> None:
    """A user's pass. And Paddle is not imported for them."""
    code = "import sys, interlace; interlace.passes.register, interlace.passes.Pass; assert 'paddle' not in sys.modules; interlace.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "AttributeError: module 'interlace' has no attribute 'nothing'" in done.stderr.splitlines()[-1]
