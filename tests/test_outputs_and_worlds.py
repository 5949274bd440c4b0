"""What commands must never do with files: overwrite what they read, mix what belongs apart, write at the same time, or fail to write
without saying where and why."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlace.cli import main
from interlace.cli.outputs import staged
from interlace.config import parse_budget
from interlace.cost_model import load_profile
from interlace.cost_model.profile import save_profile
from interlace.errors import ConfigError, OutputError
from interlace.ir import Program, load, save
from interlace.ir.dump import Script, find_dumps, script_of
from interlace.local import building
from interlace.local import launch as launching
from interlace.local.rank_report import RankReport, write_report
from interlace.planning import plan as planning
from interlace.temporary import IN_USE, claimed, hold, join, shared_folder, temporary_folder
from tests.processes import wait_until
from tests.strategies import World, plan, programs

SMALL = World(pp=2, mp=1, micro_batches=2, layers=1)
PRESET = ("--config", "baseline")


def stored(folder: Path, made: list[Program], script: Script | None = None) -> Path:
    for program in made:
        save(program, folder / f"rank{program.rank}.ilp", script)
    return folder


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two stages; read only."""
    return stored(tmp_path_factory.mktemp("files") / "dumps", programs(SMALL))


@pytest.fixture(scope="module")
def plans(dumps: Path) -> Path:
    """Of these; read only."""
    assert main(["plan", str(dumps), *PRESET, "-o", str(dumps.parent / "plan")]) == 0
    return dumps.parent / "plan"


def refused(capsys: Any, *words: object, code: int = 2) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return str(said)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what is read is not overwritten ----------------------------------------------------------------------------------------


@pytest.mark.paddle
def test_no_output_is_an_input(dumps: Path, plans: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Of any command: under the same name, another spelling of it, or a link; and two outputs are two files."""
    stored(tmp_path / "dumps", programs(SMALL))
    (tmp_path / "link").symlink_to("dumps")
    (tmp_path / "plan").mkdir()
    for name, data in contents(plans).items():
        (tmp_path / "plan" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "plan" / name).write_bytes(data)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "schedule.yaml").write_text("schedule_1f1b: {interleave: off}\n")
    (tmp_path / "device.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    for words, told in {
        ("plan", "dumps", "-o", "dumps"): "-o: dumps/rank0.ilp would overwrite dumps/rank0.ilp, which this command reads",
        ("plan", "dumps/rank0.ilp", "dumps/rank1.ilp", "-o", "dumps/."): "would overwrite dumps/rank0.ilp",
        ("plan", "link", "-o", tmp_path / "dumps"): "would overwrite link/rank0.ilp",
        ("plan", "dumps", "--json", "dumps/rank1.ilp"): "--json: dumps/rank1.ilp would overwrite",
        ("plan", "dumps", "--config", "schedule.yaml", "-o", "."): "would overwrite schedule.yaml",
        ("plan", "dumps", "-o", "new", "--json", "new/rank0.ilp"): "--json: new/rank0.ilp is also written by -o",
        ("check", "plan", "--json", "plan/rank0.ilp"): "--json: plan/rank0.ilp would overwrite",
        ("check", "plan", "--json", "plan/captured/rank0.json"): "--json: plan/captured/rank0.json would overwrite",
        ("show", "plan/rank0.ilp", "--json", "plan/rank0.ilp"): "--json: plan/rank0.ilp would overwrite",
        (
            "show",
            "plan/rank0.ilp",
            "--json",
            "plan/rank1.ilp",
        ): "would overwrite plan/rank1.ilp, which belongs to the programs that this command reads",
        ("check", "plan/rank0.ilp", "--partial", "--json", "plan/captured/rank1.json"): "would overwrite plan/captured/rank1.json",
        ("timeline", "plan", "-o", "plan/rank1.ilp"): "-o: plan/rank1.ilp would overwrite",
        ("timeline", "plan", "--beside", "dumps", "-o", "dumps/rank1.ilp"): "-o: dumps/rank1.ilp would overwrite",
        ("timeline", "plan", "-o", "t.json", "--json", "t.json"): "--json: t.json is also written by -o",
        ("timeline", "plan", "--device", "device.json", "-o", "device.json"): "-o: device.json would overwrite",
        ("report", "plan", "-o", "plan/captured/rank0.ilp"): "would overwrite plan/captured/rank0.ilp",
        ("report", "plan", "-o", "r.html", "--json", "r.html"): "--json: r.html is also written by -o",
        ("calibrate", "-o", "p.json", "--json", "./p.json"): "--json: ./p.json is also written by -o",
        ("calibrate", "-o", "device.json", "--base", "device.json"): "-o: device.json would overwrite",
        ("doctor", "train.py", "--world", "1", "--json", "train.py"): "--json: train.py would overwrite train.py",
        ("doctor", "--device", "device.json", "--json", "device.json"): "--json: device.json would overwrite",
        ("dump", "train.py", "--world", "1", "--json", "train.py"): "--json: train.py would overwrite train.py",
        ("dump", "train.py", "--world", "1", "-o", "x", "--json", "x/rank0.ilp"): "--json: x/rank0.ilp is also written by -o",
        ("run", "train.py", "--world", "1", "--json", "train.py"): "--json: train.py would overwrite train.py",
    }.items():
        assert told in refused(capsys, *words), words
    assert contents(tmp_path) == before


def test_what_a_plan_was_made_from_may_be_planned_again_in_its_place(plans: Path, capsys: Any) -> None:
    before = contents(plans)
    assert main(["plan", str(plans / "captured"), *PRESET, "-o", str(plans)]) == 0
    assert {name: data for name, data in contents(plans).items() if name.endswith(".ilp")} == {
        name: data for name, data in before.items() if name.endswith(".ilp")
    }


def test_a_folder_holds_one_world(dumps: Path, tmp_path: Path, capsys: Any) -> None:
    """Plans of fewer ranks are not put among others, nor do figures of an earlier plan stay."""
    out = tmp_path / "plan"
    stored(out, plan(World(pp=3, mp=1, micro_batches=2, layers=1)))
    told = refused(capsys, "plan", dumps, *PRESET, "-o", out)
    assert f"-o {out}: has rank2.ilp of an earlier command, which this one would not replace; remove the folder, or" in told
    (out / "rank2.ilp").unlink()
    (out / "sweep.json").write_text("of another plan")
    assert main(["plan", str(dumps), *PRESET, "-o", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["captured", "rank0.ilp", "rank1.ilp", "schedule.rows", "schedule.yaml"]


# -- one command at a time --------------------------------------------------------------------------------------------------

BUILDER = """
import os, sys, time
rank, out = sys.argv[sys.argv.index("--rank") + 1], sys.argv[sys.argv.index("--out") + 1]
open(os.environ["STARTED"] + rank, "w").write(str(os.getpid()))
while os.path.exists(os.environ["STARTED"] + "wait"):
    time.sleep(0.01)
open(out, "w").write("x")
print('{"rank": 0, "ops": 1, "seconds": 0.1, "peak_rss_bytes": 1}')
"""


def test_nothing_else_writes_what_a_plan_is_made_from(dumps: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A plan's folder holds it in another one, which is taken as well; where that one is in use, nothing is planned."""
    out, make = tmp_path / "plan", planning.make_plans

    def meanwhile(*given: Any) -> Any:
        with pytest.raises(ConfigError, match="another command of Interlace is writing there"), staged(out / "captured"):
            pass
        return make(*given)

    monkeypatch.setattr(planning, "make_plans", meanwhile)
    assert main(["plan", str(dumps), *PRESET, "-o", str(out)]) == 0
    other = tmp_path / "other"
    with claimed(other / "captured"):
        assert "another command of Interlace is writing there" in refused(capsys, "plan", dumps, *PRESET, "-o", other)
        assert not list(other.glob("*"))[1:]
    assert main(["check", str(out)]) == 0


@pytest.mark.paddle
def test_two_dumps_at_once_into_one_folder(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """One of them is refused at once, by each command that writes there; when the first has ended, the folder is free and whole."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "wait").write_text("")
    monkeypatch.setattr(building, "BUILDER", [sys.executable, "-c", BUILDER])
    monkeypatch.setenv("STARTED", str(tmp_path) + "/")
    imports = "import sys; from interlace.cli import main; from interlace.local import building"
    code = f"{imports}; building.BUILDER = [sys.executable, '-c', {BUILDER!r}]; sys.exit(main())"
    words = ["dump", str(tmp_path / "train.py"), "--world", "1", "-o", str(tmp_path / "new" / "dumps")]
    first = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.DEVNULL)
    wait_until((tmp_path / "0").exists)
    told = f"{tmp_path}/new/dumps: another command of Interlace is writing there; wait for its end, or choose another place"
    assert told in refused(capsys, *words)
    assert told in refused(capsys, *words, "--rank", "0")
    (tmp_path / "wait").unlink()
    assert first.wait(60) == 0
    assert main(words) == 0
    assert [path.name for path in (tmp_path / "new" / "dumps").iterdir()] == ["rank0.ilp"]


def test_two_plannings_at_once_into_one_folder(dumps: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The second is refused before it plans."""
    with claimed(tmp_path / "plan"), monkeypatch.context() as patch:
        patch.setattr(planning, "make_plans", lambda *args: pytest.fail("it planned"))
        assert "plan: another command of Interlace is writing there" in refused(capsys, "plan", dumps, *PRESET, "-o", tmp_path / "plan")
    assert main(["plan", str(dumps), *PRESET, "-o", str(tmp_path / "plan")]) == 0


def test_ranks_dumped_one_by_one_share_a_folder(tmp_path: Path) -> None:
    """Not the same rank twice at once, and nothing while the whole world is written."""
    with staged(tmp_path, "rank0.ilp") as one, staged(tmp_path, "rank1.ilp") as other:
        (one / "rank0.ilp").write_text("0")
        (other / "rank1.ilp").write_text("1")
        for name in ("rank0.ilp", ""):
            with pytest.raises(ConfigError, match="is writing there"), staged(tmp_path, name):
                pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.ilp", "rank1.ilp"]


def test_a_killed_command_leaves_the_folder_free(tmp_path: Path) -> None:
    """Its lock ends with it, and what it began goes with the next command."""
    out = tmp_path / "out"
    code = (
        "import sys, time; from pathlib import Path; from interlace.cli.outputs import staged\n"
        f"with staged(Path({str(out)!r})) as folder:\n    (folder / 'rank0.ilp').write_text('half')\n"
        "    print('here', flush=True)\n    time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(ConfigError, match="is writing there"), claimed(out):
        pass
    process.kill()
    process.communicate()
    assert len(list(out.iterdir())) == 2
    with staged(out) as folder:
        (folder / "rank1.ilp").write_text("whole")
    assert [path.name for path in out.iterdir()] == ["rank1.ilp"]


def test_unfinished_files_of_killed_commands_are_no_dumps(tmp_path: Path) -> None:
    (tmp_path / "rank0.ilp").write_text("")
    (tmp_path / ".rank0.ilp.x8s").write_text("")
    assert [path.name for path in find_dumps([tmp_path])] == ["rank0.ilp"]


def test_two_runs_do_not_share_logs(tmp_path: Path) -> None:
    with claimed(tmp_path / "logs"), pytest.raises(ConfigError, match="logs: another command of Interlace is writing there"):
        launching.launch("train.py", [], 1, {}, None, tmp_path / "logs", 5.0)


# -- temporary folders ------------------------------------------------------------------------------------------------------


def killed_holder(base: Path, stays: Callable[[Path], None] = lambda path: None) -> Path:
    """The temporary folder of a process that was killed with SIGKILL; before that `stays` gets the folder."""
    code = (
        "import sys, time; from pathlib import Path; from interlace.temporary import hold\n"
        f"made = hold(within=Path({str(base)!r})); (made.path / 'rank0.sock').write_text(''); (made.path / 'in').mkdir()\n"
        "print(made.path, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    stays(path)
    process.kill()
    process.communicate()
    return path


def test_the_folder_of_a_killed_launcher_goes_at_the_next_start(tmp_path: Path) -> None:
    """And no other: not that of a process that lives, of one whose child still uses it, one that was kept, or one that is not ours."""
    (tmp_path / "interlace-of-the-user").mkdir()
    kept, living = hold(within=tmp_path), hold(within=tmp_path)
    kept.keep()
    child: list[subprocess.Popen[str]] = []

    def used_by_a_child(path: Path) -> None:
        code = f"import time; from interlace.temporary import join; join({str(path)!r}); print('in', flush=True); time.sleep(600)"
        child.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        assert child[0].stdout is not None
        child[0].stdout.readline()

    left, used = killed_holder(tmp_path), killed_holder(tmp_path, used_by_a_child)
    with temporary_folder(within=tmp_path) as mine:
        assert not left.exists()
        there = {"interlace-of-the-user", kept.path.name, living.path.name, used.name, mine.name}
        assert {path.name for path in tmp_path.iterdir()} == there
    assert not mine.exists()
    child[0].kill()
    child[0].communicate()
    hold(within=tmp_path).remove()
    living.remove()
    assert {path.name for path in tmp_path.iterdir()} == {"interlace-of-the-user", kept.path.name}
    join(tmp_path)  # none of ours: nothing happens
    assert not (tmp_path / IN_USE).exists()


def test_a_shared_folder_goes_with_its_last_user(tmp_path: Path) -> None:
    """Whoever made it; if all were killed, when the next temporary folder is made."""
    with ExitStack() as first, ExitStack() as second:
        path = first.enter_context(shared_folder(tmp_path / "interlace-ranks"))
        (path / "rank0.sock").write_text("")
        assert second.enter_context(shared_folder(path)) == path
        first.close()
        hold(within=tmp_path).remove()  # removes what nobody uses
        assert (path / "rank0.sock").exists()
    assert not path.exists()
    code = f"import os, pathlib\nfrom interlace.temporary import *\nwith shared_folder(pathlib.Path({str(path)!r})): os._exit(9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert path.exists()
    hold(within=tmp_path).remove()
    assert not path.exists()


@pytest.mark.paddle
def test_a_killed_run_leaves_nothing_for_long(tmp_path: Path) -> None:
    """`interlace run` killed with SIGKILL while its ranks sleep: its two folders are there, and go when the next run starts."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "temporary").mkdir()
    sleeper = "import os; os.read(int(os.environ['INTERLACE_PARENT_FD']), 1)"  # until its launcher has ended
    code = (
        "import sys; from interlace.local import launch; from interlace.cli import main\n"
        "launch.cpu_command = lambda script, args: [sys.executable, '-c', {}]\nsys.exit(main())"
    )
    command = ["run", str(tmp_path / "train.py"), "--world", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen([sys.executable, "-c", code.format(repr(sleeper)), *command], env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: any((tmp_path / "temporary").glob("interlace-logs-*/run/rank0.log")))
    process.kill()
    process.wait()
    assert len(list((tmp_path / "temporary").glob("interlace-*"))) == 2
    done = subprocess.run(
        [sys.executable, "-c", code.format(repr("raise SystemExit(3)")), *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (logs,) = (tmp_path / "temporary").iterdir()  # those of the run that failed stay for the user
    assert str(logs) in done.stderr


# -- one world --------------------------------------------------------------------------------------------------------------


def with_pipeline(program: Program, **changes: Any) -> Program:
    return msgspec.structs.replace(program, pipeline=msgspec.structs.replace(program.pipeline, **changes))


def widened(program: Program) -> Program:
    """The program of a model that is twice as wide."""
    wide = [msgspec.structs.replace(value, shape=tuple(2 * dim for dim in value.shape)) for value in program.values]
    return program.with_ops(program.ops, wide)


MIXTURES: dict[str, tuple[Callable[[Program], Program], str]] = {
    "world": (lambda program: msgspec.structs.replace(program, world=3), "of another world than rank 0: world is 3 there, 2 here"),
    "micro-batches": (lambda program: with_pipeline(program, num_micro_batches=3), "num micro batches is 3 there, 2 here"),
    "schedule": (lambda program: with_pipeline(program, schedule="FThenB"), "schedule is FThenB there, 1F1B here"),
    "mode": (lambda program: msgspec.structs.replace(program, mode="eval"), "mode is eval there, train here"),
    "width": (widened, "ranks 0 and 1 do not fit: call 1 between them is #"),
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("command", ["plan", "timeline", "report"])
def test_dumps_of_two_scripts_are_not_planned_together(name: str, command: str, tmp_path: Path, capsys: Any) -> None:
    """Without knowing of the scripts: by what the ranks of a world have in common, and by the calls that they share."""
    change, told = MIXTURES[name]
    first, second = programs(SMALL)
    folder = stored(tmp_path / "dumps", [first, change(second)])
    said = refused(capsys, command, folder, "-o", tmp_path / "out")
    assert told in said
    assert f"(in {folder}/rank1.ilp)" in said
    assert not (tmp_path / "out").exists()


def test_programs_that_fit_but_are_of_two_scripts_are_told_apart(tmp_path: Path, capsys: Any) -> None:
    """By the script's text and by its arguments, with the rank that differs; `check` and the others too."""
    (tmp_path / "train.py").write_text("one")
    mine = Script.of(tmp_path / "train.py", ["--layers", "4"])
    (tmp_path / "train.py").write_text("two")
    folder, (first, second) = tmp_path / "dumps", programs(SMALL)
    for other, told in (
        (Script.of(tmp_path / "train.py", ["--layers", "4"]), "rank 1 was built from another text of the script, rank 0 from `train"),
        (Script(mine.name, mine.digest, ("--layers", "8")), "rank 1 was built from `train.py -- --layers 8`, rank 0 from `train.py --"),
        (Script("other.py", "0", ()), f"from `other.py`, rank 0 from `train.py -- --layers 4` (in {folder}/rank1.ilp); give the dump"),
    ):
        stored(folder, [first], mine)
        stored(folder, [second], other)
        for command in (["plan", "-o", "plan"], ["check"], ["timeline", "-o", "t.json"], ["report", "-o", "r.html"]):
            assert told in refused(capsys, command[0], folder, *(tmp_path / word if word != "-o" else word for word in command[1:]))
    stored(folder, [first, second], mine)
    assert script_of(folder / "rank0.ilp") == mine
    assert load(folder / "rank0.ilp") == first
    assert main(["check", str(folder)]) == 0


def test_rings_may_have_other_numbers_on_other_ranks(tmp_path: Path, capsys: Any) -> None:
    """Where ranks share no number for groups of the same ranks, the order of groups says which is which, for every command."""
    made = programs(World(pp=2, mp=2, micro_batches=2, layers=1))
    others = [renumbered(program, 1000 * program.rank) for program in made]
    stored(tmp_path / "dumps", others)
    for command, words in {"plan": (*PRESET, "-o", tmp_path / "plan"), "timeline": ("-o", tmp_path / "t.json"), "check": ()}.items():
        assert main([command, str(tmp_path / "dumps"), *map(str, words)]) == 0, capsys.readouterr().err
    assert main(["check", str(tmp_path / "plan")]) == 0


def renumbered(program: Program, by: int) -> Program:
    """The program with other numbers of its groups."""
    ops = [msgspec.structs.replace(op, group=op.group + by) if op.group >= 0 else op for op in program.ops]
    groups = tuple(msgspec.structs.replace(group, id=group.id + by) for group in program.groups)
    return msgspec.structs.replace(program.with_ops(ops), groups=groups)


def test_plans_of_some_ranks_may_be_checked(tmp_path: Path, capsys: Any) -> None:
    """Without the whole world each rank is planned by itself."""
    dumps = stored(tmp_path / "dumps", programs(World(pp=2, mp=2, micro_batches=2, layers=1)))
    some = [str(dumps / f"rank{rank}.ilp") for rank in (0, 2)]
    assert main(["plan", *some, "--partial", *PRESET, "-o", str(tmp_path / "plan")]) == 0
    assert main(["check", str(tmp_path / "plan"), "--partial"]) == 0
    assert "safe as far as the given ranks show" in capsys.readouterr().out


def test_a_plan_without_its_record_among_others(plans: Path, tmp_path: Path, capsys: Any) -> None:
    """What passes changed on that rank is not known, so it cannot be compared."""
    for name, data in contents(plans).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "captured" / "rank0.json").unlink()
    told = refused(capsys, "check", tmp_path)
    assert f"{tmp_path / 'rank0.ilp'} has no record in {tmp_path / 'captured'}, but {tmp_path / 'rank1.ilp'} has one" in told
    (tmp_path / "captured" / "rank1.json").unlink()
    assert main(["check", str(tmp_path)]) == 0


def test_plans_that_were_not_made_together(dumps: Path, plans: Path, tmp_path: Path, capsys: Any) -> None:
    """A rank of another planning, and a plan among dumps; `check` proves what was planned one by one."""
    other = tmp_path / "other"
    assert main(["plan", str(dumps / "rank1.ilp"), "--partial", *PRESET, "-o", str(other)]) == 0
    for command in ("check", "timeline", "report"):
        words = [] if command == "check" else ["-o", tmp_path / "out"]
        if command != "check":
            told = refused(capsys, command, plans / "rank0.ilp", other / "rank1.ilp", *words)
            assert f"{plans / 'rank0.ilp'} and {other / 'rank1.ilp'} were not made together" in told
        told = refused(capsys, command, plans / "rank0.ilp", dumps / "rank1.ilp", *words)
        assert "rank(s) 0 have a schedule, rank(s) 1 have none" in told


@pytest.mark.parametrize("command", ["plan", "check", "timeline", "report"])
def test_a_missing_rank_is_no_small_matter(command: str, tmp_path: Path, capsys: Any) -> None:
    """An error that names the ranks, and the stages of which there is none; `--partial` goes on and tells."""
    world = World(pp=2, mp=2, micro_batches=2, layers=1)
    given = {program.rank: program for program in (programs(world) if command == "plan" else plan(world))}
    words = {"check": [], "plan": ["-o", str(tmp_path / "out"), *PRESET]}.get(command, ["-o", str(tmp_path / "out")])
    folder = stored(tmp_path / "one", [given[0], given[1]])
    told = refused(capsys, command, folder, *words)
    assert "nothing is given of ranks 2-3 of 4, among them all of stage 1; without them, the agreement of all ranks" in told
    assert "--partial" in told
    folder = stored(tmp_path / "some", [given[0], given[2], given[3]])
    assert "nothing is given of rank 1 of 4; without them" in refused(capsys, command, folder, *words)
    assert not (tmp_path / "out").exists()
    assert main([command, str(folder), "--partial", *words]) == 0
    assert "nothing is given of rank 1 of 4: they count as ready" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "check", "timeline", "report"])
def test_one_rank_for_all_of_its_stage_is_a_whole_world(command: str, tmp_path: Path, capsys: Any) -> None:
    world = World(pp=2, mp=2, micro_batches=2, layers=1)
    made = programs(world) if command == "plan" else plan(world)
    folder = stored(tmp_path / "stages", [msgspec.structs.replace(made[rank], equivalent_ranks=(rank + 1,)) for rank in (0, 2)])
    words = {"check": [], "plan": ["-o", str(tmp_path / "out"), *PRESET]}.get(command, ["-o", str(tmp_path / "out")])
    assert main([command, str(folder), *words]) == 0
    assert "nothing is given" not in capsys.readouterr().err


# -- errors of writing ------------------------------------------------------------------------------------------------------


def full() -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disk(monkeypatch: Any, step: str, name: str) -> None:
    """No room for the file of this name, where it is made, filled, or put into its place."""
    real, last = (tempfile.mkstemp, os.fdopen, os.replace), [""]

    def mkstemp(*args: Any, **more: Any) -> Any:
        last[0] = more["prefix"].strip(".")
        return full() if (step, last[0]) == ("make", name) else real[0](*args, **more)

    def fdopen(handle: int, *args: Any, **more: Any) -> Any:
        if (step, last[0]) == ("fill", name):
            os.close(handle)
            full()
        return real[1](handle, *args, **more)

    def replace(source: Any, target: Any) -> None:
        return full() if (step, Path(target).name) == ("place", name) else real[2](source, target)

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    monkeypatch.setattr(os, "fdopen", fdopen)
    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("step", ["make", "fill", "place"])
@pytest.mark.parametrize(
    "command", ["plan -o", "plan --json", "check --json", "show --json", "timeline -o", "timeline --json", "report -o", "report --json"]
)
def test_a_full_disk_is_told_with_the_path(
    command: str, step: str, dumps: Path, plans: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Each writer of each command: one line with the path as the user gave it and the reason, and no part of the file is left."""
    name, option = command.split()
    words = [name, str({"plan": dumps, "show": plans / "rank0.ilp"}.get(name, plans)), option, str(tmp_path / "out")]
    words += ["-o", str(tmp_path / "other")] if option == "--json" and name in ("plan", "timeline", "report") else []
    words += PRESET if name == "plan" else []
    written = tmp_path / "out" / "captured" / "rank0.json" if command == "plan -o" else tmp_path / "out"
    fill_disk(monkeypatch, step, written.name)
    told = refused(capsys, *words).splitlines()
    assert told[-1].startswith(f"interlace {name}: {written}: cannot be written (No space left on device); expected a place with room")
    assert [path.name for path in tmp_path.rglob("*") if path.name.startswith((".", "out"))] == []


def limited(size_bytes: int) -> Callable[[], None]:
    """No file may grow beyond that in a child, as on a full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))

    return limit


@pytest.mark.paddle
def test_a_dump_that_finds_no_room(tmp_path: Path) -> None:
    """From outside: what the builder of a rank could not write is told in one line, with the place where it should lie."""
    script = Path(__file__).with_name("cpu") / "tiny_gpt.py"
    out = tmp_path / "dumps"
    done = subprocess.run(
        [sys.executable, "-m", "interlace", "dump", str(script), "--world", "1", "-o", str(out)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limited(20_000),
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"{out}/rank0.ilp: cannot be written (File too large)")
    assert not out.exists()


def test_a_rank_that_cannot_report_is_told_of(tmp_path: Path, monkeypatch: Any) -> None:
    """The run directory is named where nothing fits into it; what cannot be written names its file."""
    monkeypatch.setattr(launching, "cpu_command", lambda *args: [sys.executable, "-c", "raise SystemExit(74)"])
    with pytest.raises(Exception, match=r"rank 0 failed: \S+/interlace-\S+: nothing could be written there; is its disk full\?"):
        launching.launch("train.py", [], 1, {}, None, tmp_path / "logs", 5.0)
    (tmp_path / "rank0.json").mkdir()
    with pytest.raises(OutputError, match=r"rank0\.json: cannot be written \(is a folder"):
        write_report(tmp_path, RankReport(0, 1))


def test_other_writers_name_their_file(tmp_path: Path, monkeypatch: Any) -> None:
    """A profile, a dump compressed, and a folder for temporary files."""
    fill_disk(monkeypatch, "fill", "new.json")
    with pytest.raises(OutputError, match=r"new\.json: cannot be written \(No space left on device\)"):
        save_profile(load_profile("cpu"), tmp_path / "new.json")
    fill_disk(monkeypatch, "fill", "rank0.ilp.gz")
    with pytest.raises(OutputError, match=r"rank0\.ilp\.gz: cannot be written"):
        save(programs(SMALL)[0], tmp_path / "rank0.ilp.gz")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **more: full())
    with pytest.raises(OutputError, match=f"{tmp_path}: cannot be written"), temporary_folder(within=tmp_path):
        pass


# -- wrong words ------------------------------------------------------------------------------------------------------------


def test_what_is_no_dump_is_told_apart(plans: Path, tmp_path: Path, capsys: Any) -> None:
    """A script, or any other file, where a dump or a plan is expected, by every command that takes one."""
    (tmp_path / "train.py").write_text("import paddle\n")
    (tmp_path / "my.yaml").write_text("device: h200\n")
    for command in ("plan", "check", "timeline", "report", "show"):
        told = refused(capsys, command, tmp_path / "train.py")
        assert f"{tmp_path}/train.py: is a script, not a dump or a plan; `interlace dump {tmp_path}/train.py --world N` makes" in told
        assert f"{tmp_path}/my.yaml: is no dump and no plan of Interlace; expected" in refused(capsys, command, tmp_path / "my.yaml")
    assert "train.py: is a script" in refused(capsys, "timeline", plans, "--beside", tmp_path / "train.py", "-o", tmp_path / "t")
    for command in ("run", "dump"):
        told = refused(capsys, command, plans / "rank0.ilp", "--world", "1")
        assert f"{plans}/rank0.ilp: is a dump or a plan of Interlace; expected a training script" in told


@pytest.mark.paddle
@pytest.mark.parametrize("command", ["plan", "run"])
def test_budgets_that_are_none(command: str, dumps: Path, tmp_path: Path, capsys: Any) -> None:
    """A negative size is no unknown option; a number of gigabytes without its unit is no fraction."""
    (tmp_path / "train.py").write_text("")
    words = [dumps, "-o", tmp_path / "plan"] if command == "plan" else [tmp_path / "train.py", "--world", "1"]
    for value, told in {
        "-5GB": "--memory-budget: found '-5GB', expected bytes with their unit, above 0, such as 70GB",
        "-.5": "--memory-budget: found '-.5', expected bytes with their unit, above 0",
        "3.5": "--memory-budget: found '3.5', 350 % of what Paddle's baseline holds; expected bytes with their unit, such as 3.5GB, or, if",
        "64.": "expected bytes with their unit, such as 64GB, or, if it is meant so, '6400%'",
        "0.0": "--memory-budget: found '0.0', expected bytes with their unit, above 0",
        "2%%": "--memory-budget: found '2%%', expected bytes with their unit",
    }.items():
        assert told in refused(capsys, command, *words, "--memory-budget", value)
        assert told.replace("--memory", "--pool") in refused(capsys, command, *words, "--pool-budget", value)
    assert [parse_budget(text) for text in ("1.5", "2.0", "350%", "0.5 %")] == [1.5, 2.0, 3.5, 0.005]
