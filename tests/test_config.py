"""What a user may ask for: checked before anything is built, with the place and the choices there are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

import interlace
from interlace.config import NO_LIMIT, Beyond, Config, load_config, make_config, parse_budget, parse_bytes, require_jobs
from interlace.cost_model import GivenCosts, load_profile
from interlace.cost_model.profile import encode_profile
from interlace.errors import ConfigError, PassError, ProgramError
from interlace.ir import Op, Program
from interlace.passes import REGISTRY, Context, OffloadActivations, Pass, Pipeline, Schedule1F1B, register
from tests.default_passes import DEFAULT, NO_JOBS
from tests.strategies import World, programs

PRESETS = sorted(path.stem for path in (Path(__file__).parents[1] / "configs" / "presets").glob("*.yaml"))


def loaded(tmp_path: Path, text: str) -> Config:
    """A file with this text, loaded; its name in messages is `my.yaml`."""
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return load_config(path)


def refusal(tmp_path: Path, text: str) -> str:
    """The message of a refused file, from the file's name on."""
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/", "")


# -------------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("offload_activation: on", "my.yaml:1:1: unknown option 'offload_activation'; did you mean 'offload_activations'? there are ["),
        ("check: yes\nwhat: 3", "my.yaml:1:8: expected bool, found 'yes'"),
        ("schedule_1f1b:\n  interleaf: mixed", "my.yaml:2:3: unknown option 'interleaf' of schedule-1f1b; did you mean 'interleave'?"),
        ("schedule_1f1b:\n  max_ops_per_job: many", "my.yaml:2:20: Expected `int`, got `str` (at $.schedule_1f1b.max_ops_per_job)"),
        ("schedule_1f1b:\n  max_ops_per_job: 0", "my.yaml:2:20: Expected `int` >= 1 (at $.schedule_1f1b.max_ops_per_job)"),
        (
            "schedule_1f1b: {interleave: both}",
            "my.yaml:1:29: Invalid enum value 'both'; there are ['auto', 'dx-first', 'mixed', 'off', 'zb-h1']",
        ),
        ("schedule_1f1b: {interleave: Mixed}", "my.yaml:1:29: Invalid enum value 'Mixed'; did you mean 'mixed'? there are ["),
        ("schedule_1f1b:\n  interleave: zb-h1\n  schedule_file: here", "my.yaml:2:15: schedule_file gives every job, so interleave=zb-h1 "),
        ("schedule_1f1b: {schedule_file: nowhere.txt}", "my.yaml:1:32: schedule file nowhere.txt: cannot be read"),
        ("choose_recompute: {level: 40}", "my.yaml:1:27: Expected `float` <= 1.0"),
        (
            "schedule_1f1b: {weight_delay: 2}",
            "my.yaml:1:31: found 2 beside interleave: auto, which chooses its own; it goes with interleave dx-f",
        ),
        ("device: abacus", "my.yaml:1:9: no device profile 'abacus': expected one of cpu, h100, h200, or a path"),
        ("device: ./abacus.json", "my.yaml:1:9: abacus.json: cannot be read (No such file"),
        ("name_streams: {priority: 99}", "my.yaml:1:26: found 99, expected a stream priority from -5 (first) to 0 (normal)"),
        ("name_streams: {priority: -99}", "my.yaml:1:26: found -99, expected a stream priority"),
        ("offload_activations: on", "my.yaml:1:22: on, but nothing says what to move; choose modules (such as [mlp]) or a fraction"),
        ("offload_activations: {min_bytes: 1MB}", "my.yaml:1:22: on, but nothing says what to move"),
        (
            "schedule_1f1b: off",
            "my.yaml:1:16: schedule_1f1b is off, and allocate_on_compute, delay_transfers, extend_lifetimes, insert_events, throttle_host",
        ),
        ("insert_events: on\nschedule_1f1b: off", "my.yaml:2:16: schedule_1f1b is off, and allocate_on_compute, delay"),
        ("schedule_1f1b: sideways", "my.yaml:1:16: expected off, on or a table of options, found 'sideways'"),
        ("split_backward: 1", "my.yaml:1:17: expected off, on or a table of options, found 1"),
        ("split_backward: 0", "my.yaml:1:17: expected off, on or a table of options, found 0"),
        ("split_backward: {modules: mlp}", "my.yaml:1:27: Expected `array`, got `str`; write [mlp] (at $.split_backward.modules)"),
        ("memory_budget: eighty%", "my.yaml:1:16: found 'eighty%', expected bytes with their unit, above 0, such as 70GB, a fraction"),
        ("memory_budget: -5GB", "my.yaml:1:16: found '-5GB', expected bytes with their unit, above 0"),
        (
            "memory_budget: 80",
            "my.yaml:1:16: found 80, in bytes; expected bytes with their unit, such as 80GB, or a part of what "
            "Paddle's baseline holds, such as 80%",
        ),
        ("memory_budget: 0%", "my.yaml:1:16: found '0%', expected bytes with their unit, above 0"),
        (
            "memory_budget: 3.5",
            "my.yaml:1:16: found 3.5, 350 % of what Paddle's baseline holds; expected bytes with their unit, such as "
            "3.5GB, or, if it is meant so, '350%'",
        ),
        ("memory_budget: +0.1", "my.yaml:1:16: found '+0.1', expected bytes with their unit behind the sign, such as +8GB"),
        ("memory_budget: +10%", "my.yaml:1:16: found '+10%', expected bytes with their unit behind the sign, such as +8GB"),
        ("memory_budget: none", "my.yaml:1:16: found 'none', expected bytes with their unit, above 0, such as 70GB"),
        ("schedule_1f1b:", "my.yaml:1:15: expected off, on or a table of options, found None"),
        ("offload_activations: {modules: [mlp, 3]}", "my.yaml:1:38: Expected `str`, got `int` (at $.offload_activations.modules[1])"),
        ("offload_activations:\n  min_bytes: 3 parsecs", "my.yaml:2:14: size '3 parsecs': expected a number with B, KB"),
        ("offload_activations:\n  keep_bytes: [1MB, x]", "my.yaml:2:15: size 'x': expected a number with B, KB"),
        ("memory_budget: 1GB\noffload_activations: {fraction: 0.5}", "my.yaml:2:33: fraction=0.5 and memory_budget contradict"),
        ("offload_activations: {prefetch_slack: -1}", "my.yaml:1:39: Expected `float` >= 0.0 (at $.offload_activations.prefetch_slack)"),
        ("offload_activations: {keep_bytes: [1, -1]}", "my.yaml:1:39: Expected `int` >= 0 (at $.offload_activations.keep_bytes[1])"),
        ("offload_activations: {fraction: 2}", "my.yaml:1:33: Expected `float` <= 1.0 (at $.offload_activations.fraction)"),
        ("offload_optimizer_state: {fraction: 3}", "my.yaml:1:37: Expected `float` <= 1.0 (at $.offload_optimizer_state.fraction)"),
        ("offload_optimizer_state: {min_bytes: -1}", "my.yaml:1:38: Expected `int` >= 0 (at $.offload_optimizer_state.min_bytes)"),
        ("a: 1\nb: 2\na: 3", "my.yaml:3:1: option 'a' occurs twice"),
        ("schedule_1f1b: {schedule_file: a, schedule_file: b}", "my.yaml:1:35: option 'schedule_file' occurs twice"),
        ("[1, 2]", "my.yaml:1:1: expected a table of options, found list"),
        ("just words", "my.yaml:1:1: expected a table of options, found str"),
        ("a: [1", "my.yaml:1:6: not YAML"),
        ("a: b: c", "my.yaml:1:5: not YAML"),
        ("[a, b]: 1", "my.yaml:1:1: expected a name of an option, found a sequence"),
        ("device: 7", "my.yaml:1:9: expected str, found 7"),
        ("split_backward: off", "my.yaml:1:17: split_backward is off, and overlap_column_backward (on by default) cannot do w"),
        ("schedule_1f1b: off\noffload_activations: {fraction: 1}", "my.yaml:1:16: schedule_1f1b is off, and allocate_on_compute, delay_tr"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    """Wrong options. File, line, column, what was found and what was expected."""
    found = refusal(tmp_path, text)
    assert found.startswith(error), found


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (b"0 | 0F 1X\n", "rows.txt:1: found '1X', expected a slot such as 3F"),
        (b"0 | 0F\n0 | 0F\n", "rows.txt:2: stage 0 occurs twice"),
        (b"\n", "holds no stage; expected a line"),
        (b"\xff", "cannot be read: not UTF-8 text (byte 0)"),
    ],
)
def test_a_file_of_rows_is_read_before_anything_is_built(tmp_path: Path, rows: bytes, error: str) -> None:
    """Wrong options. File and line of the option, and of the rows."""
    (tmp_path / "rows.txt").write_bytes(rows)
    found = refusal(tmp_path, f"schedule_1f1b:\n  schedule_file: {tmp_path}/rows.txt")
    assert found.startswith("my.yaml:2:18: ")
    assert error in found


def test_files_are_found_from_the_folder_of_the_file_that_names_them(tmp_path: Path, monkeypatch: Any) -> None:
    """YAML. The device's profile, the rows and a folder of plans, from any working directory; a profile's name is no file."""
    folder = tmp_path / "mine"
    (folder / "plans").mkdir(parents=True)
    (folder / "my.rows").write_text("0 | 0F 0B O")
    (folder / "my.json").write_bytes(encode_profile(load_profile("h200")))
    (folder / "my.yaml").write_text("device: my.json\nschedule_1f1b: {schedule_file: my.rows}")
    (folder / "loaded.yaml").write_text("plan: plans")
    (folder / "named.yaml").write_text("device: h200")
    monkeypatch.chdir(tmp_path)
    found = load_config("mine/my.yaml")
    assert (found.device, found.passes["schedule-1f1b"].schedule_file) == ("mine/my.json", "mine/my.rows")  # type: ignore[attr-defined]
    assert load_config("mine/loaded.yaml").plan == "mine/plans"
    assert load_config("mine/named.yaml").device == "h200"
    with pytest.raises(ConfigError, match=rf"schedule file {tmp_path}/my.rows: cannot be read"):
        make_config({"schedule_1f1b": {"schedule_file": "my.rows"}})


def test_jobs_are_required_where_a_step_is_to_run() -> None:
    """Wrong options. A rewrite alone is a configuration for offline plans, not for training."""
    config = make_config(NO_JOBS)
    with pytest.raises(ConfigError, match=r"schedule_1f1b is off and .*name_streams.* on: nothing"):
        require_jobs(config)
    require_jobs(make_config({}))
    require_jobs(make_config({"enable": "off", **NO_JOBS}))


def test_what_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    """Wrong options. A missing name lists the presets."""
    (tmp_path / "my.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"my\.yaml: cannot be read: not UTF-8 text \(byte 0\)|my\.yaml.*not YAML"):
        load_config(tmp_path / "my.yaml")
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file, and no preset of that name; presets: \["):
        load_config("nothing.yaml")


def test_words_and_numbers_of_yaml(tmp_path: Path) -> None:
    """Wrong options. `on` and `off` are words, `1e9` is a number, sizes have units, quotes change nothing."""
    config = loaded(
        tmp_path,
        """
split_backward: on
overlap_column_backward: "off"
choose_recompute: off
narrow_gathers: off
reduce_in_place: off
allocate_on_compute: off
name_streams: false
extend_lifetimes: off
insert_events: off
delay_transfers: off
throttle_host: off
check: off
force_device: on
device: h200
schedule_1f1b: {max_ops_per_job: 77}
offload_activations: {min_bytes: 1.5MiB, keep_bytes: [1KB, 2000], fraction: 1, include_integers: on}
""",
    )
    assert sorted(config.passes) == ["offload-activations", "schedule-1f1b", "split-backward"]
    assert config.passes["schedule-1f1b"] == Schedule1F1B(max_ops_per_job=77)
    offload = OffloadActivations(min_bytes=3 << 19, keep_bytes=(1000, 2000), fraction=1.0, include_integers=True)
    assert config.passes["offload-activations"] == offload
    assert (config.check, config.force_device, config.device) == (False, True, "h200")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    """One line."""
    assert loaded(tmp_path, "").passes == make_config({}).passes
    assert sorted(make_config({}).passes) == sorted(DEFAULT)


def test_everything_off_asks_for_nothing() -> None:
    """One line."""
    names = [name.replace("-", "_") for name in make_config({}).passes]
    assert not make_config(dict.fromkeys(names, "off")).active
    assert not make_config({"enable": False}).active
    assert make_config({}).active


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name: str) -> None:
    """Wrong options. Each loads by its name, alone or with its suffix, and its passes stand in an order that can run."""
    config = load_config(name)
    assert config.passes == load_config(f"{name}.yaml").passes
    config.pipeline().check(programs(World())[0])


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("12", 12), ("3B", 3), ("2kb", 2000), ("1 GiB", 1 << 30), ("0.5TB", 5 * 10**11), (" 7 MB ", 7 * 10**6)]
)
def test_sizes(text: str, size: int) -> None:
    """Wrong options."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1 PB", "-3MB", "1,5GB", "1GBs"])
def test_what_is_no_size(text: str) -> None:
    """Wrong options."""
    with pytest.raises(ConfigError, match=r"expected a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "budget", "says"),
    [
        ("", None, "None"),
        ("memory_budget: null", None, "None"),
        ("memory_budget: +8GB", Beyond(8 * 10**9), "+8000000000B"),
        ("memory_budget: +1.5 GiB", Beyond(3 << 29), "+1610612736B"),
        ("memory_budget: off", NO_LIMIT, "off"),
        ("memory_budget: false", NO_LIMIT, "off"),
        ("memory_budget: 0.8", 0.8, "0.8"),
        ("memory_budget: 70GB", 70 * 10**9, "70000000000"),
    ],
)
def test_what_a_plan_may_hold(tmp_path: Path, text: str, budget: object, says: str) -> None:
    """A size or a share turns on what can keep it; beyond the baseline, as by default, planning may use that. Its text says the same."""
    config = loaded(tmp_path, text)
    assert (config.memory_budget, str(config.memory_budget)) == (budget, says)
    assert budget is None or parse_budget(says) == parse_budget(config.memory_budget) == budget
    asked = isinstance(budget, (int, float))
    assert [name in config.passes for name in ("offload-activations", "offload-optimizer-state")] == [asked, asked]
    assert sorted(config.means) == [*([] if asked else ["offload-activations", "offload-optimizer-state"]), "return-memory"]


def test_an_option_of_the_command_line_is_named_as_such(tmp_path: Path) -> None:
    """Wrong options. Not the file that it goes on top of, nor the place of the same option there."""
    (tmp_path / "my.yaml").write_text("memory_budget: 70GB\n")
    with pytest.raises(ConfigError, match=r"^--memory-budget: found 'most', expected bytes"):
        load_config(tmp_path / "my.yaml", {"memory_budget": "most"})


def test_keywords_are_named_as_such() -> None:
    """Wrong options."""
    with pytest.raises(ConfigError, match=r"keywords: schedule_1f1b\.max_ops_per_job: Expected `int` >= 1"):
        make_config({"schedule_1f1b": {"max_ops_per_job": -1}})
    with pytest.raises(ConfigError, match="keywords: schedule_1f1b: expected Schedule1F1B, found OffloadActivations"):
        make_config({"schedule_1f1b": OffloadActivations()})


# --------------------------------------------------------------------------------------------------------- a user's own pass


class Note(Pass, frozen=True, kw_only=True):
    """Writes its name into the layer of every operation."""

    level: int = 1

    def run(self, program: Program, context: Context) -> Program:
        ops = [msgspec.structs.replace(op, layer=f"{op.layer}|{self.name}") for op in program.ops]
        context.applied("levelled", level=self.level)
        return program.with_ops(ops)


def own(name: str, run: Any = None, **contract: Any) -> type[Pass]:
    """A registered pass with a name and a contract."""
    body = {"name": name, "__module__": __name__, **contract, **({"run": run} if run else {})}
    return register(type(Note)(name.title().replace("-", ""), (Note,), body, frozen=True))


def order_of(config: Config) -> list[str]:
    return [each.name for each in config.pipeline().passes]


def test_a_users_pass_runs_where_it_asks_to() -> None:
    """A user's pass. As early as its `after` and `needs` allow; ours keep their order; its options are checked like ours."""
    own("first-of-all")
    own("my-shuffle", needs=frozenset({"scheduled"}), gives=frozenset({"shuffled"}))
    own("behind-split", after=("split-backward",))
    own("needs-mine", needs=frozenset({"shuffled"}))
    config = make_config(dict.fromkeys(("needs_mine", "behind_split", "my_shuffle", "first_of_all"), "on"))
    assert order_of(config) == ["first-of-all", *DEFAULT[:3], "behind-split", *DEFAULT[3:6], "my-shuffle", "needs-mine", *DEFAULT[6:]]
    program, reports = make_config({"my_shuffle": {"level": 4}}).pipeline().run(programs(World())[0], GivenCosts({"default": 1}))
    assert program.passes == (*DEFAULT[:6], "my-shuffle", *DEFAULT[6:])
    assert [(each.rule, each.numbers) for each in reports[6].remarks] == [("levelled", {"level": 4})]
    assert program.ops[0].layer.endswith("|my-shuffle")
    assert order_of(make_config({})) == DEFAULT
    with pytest.raises(ConfigError, match=r"keywords: my_shuffle\.levl: unknown option 'levl' of my-shuffle; did you mean 'level'\?"):
        make_config({"my_shuffle": {"levl": 4}})


def test_passes_that_ask_for_a_circle_are_refused() -> None:
    """A user's pass. The circle is printed."""
    own("hen", after=("egg",))
    own("egg", after=("hen",))
    with pytest.raises(PassError, match=r"passes ask to run after each other in a circle: (hen -> egg|egg -> hen)"):
        make_config({"hen": "on", "egg": "on"}).pipeline()


def test_a_need_that_nothing_gives_is_refused_before_anything_runs() -> None:
    """A user's pass. With the passes that would give it."""
    ran: list[str] = []
    own("watcher", run=lambda self, program, context: ran.append("ran") or program)
    own("starved", needs=frozenset({"food"}))
    with pytest.raises(PassError, match=r"pass 'starved' needs \['food'\], which nothing before it gives \(ran: \['watcher'"):
        make_config({"watcher": "on", "starved": "on"}).pipeline().run(programs(World())[0], GivenCosts({"default": 1}))
    assert ran == []
    own("cook", gives=frozenset({"food"}))
    with pytest.raises(ConfigError, match=r"cook is off, and starved cannot do without; turn cook on, or turn these off too"):
        make_config({"starved": "on"})
    with pytest.raises(PassError, match=r"put 'cook' before it"):
        Pipeline((REGISTRY["starved"](),)).check(programs(World())[0])
    with pytest.raises(PassError, match=r"pass 'schedule-1f1b' must run after \['split-backward'\]"):
        Pipeline((Schedule1F1B(), REGISTRY["split-backward"]())).check(programs(World())[0])


def _spoils(self: Pass, program: Program, context: Context) -> Program:
    return program.with_ops([*program.ops, Op(10_000, "pd_op.relu", (9_999,), (), "forward")])


def _fails(self: Pass, program: Program, context: Context) -> Program:
    return {}["no such key"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("run", "kind", "words"),
    [
        (_spoils, ProgramError, r"pass 'broken': rank 0: .*#10000 pd_op\.relu reads %9999, which is not declared"),
        (_fails, PassError, r"pass 'broken' failed with KeyError: 'no such key'; the program is as it was"),
        (lambda self, program, context: None, PassError, r"pass 'broken': run\(\) gave NoneType, expected a Program"),
    ],
)
def test_a_broken_pass_is_named_and_the_program_stays(run: Any, kind: type[Exception], words: str) -> None:
    """A user's pass, interrupts. What does not verify, an exception, and what is no program."""
    own("broken", run=run)
    program = programs(World())[0]
    before = msgspec.json.encode(program)
    with pytest.raises(kind, match=f"(?s){words}"):
        make_config({"broken": "on"}).pipeline().run(program, GivenCosts({"default": 1}))
    assert msgspec.json.encode(program) == before


def test_what_cannot_be_registered() -> None:
    """A user's pass."""
    with pytest.raises(PassError, match=r"is registered already by interlace\.passes\.split_backward\.SplitBackward; choose another name"):
        own("split-backward")
    with pytest.raises(PassError, match="has no name"):
        register(type(Note)("Nameless", (Pass,), {"__module__": __name__}, frozen=True))
    with pytest.raises(PassError, match=r"expected a subclass of interlace\.passes\.Pass"):
        register(int)  # type: ignore[type-var]


# -------------------------------------------------------------------------------------------------------------- strategy flags


@pytest.fixture
def strategy() -> Any:
    """A strategy of Paddle's auto-parallel."""
    dist = pytest.importorskip("paddle.distributed")
    return dist.Strategy()


@pytest.mark.paddle
def test_flags_are_attributes(strategy: Any) -> None:
    """Wrong options. Read, set, switched; setting an option turns its pass on."""
    interlace.enable(strategy, schedule_1f1b={"interleave": "off"})
    flags = strategy.interlace
    assert flags.schedule_1f1b.interleave == "off"
    assert not flags.offload_activations.enable
    assert flags.offload_activations.min_bytes == OffloadActivations().min_bytes
    flags.offload_activations.fraction = 0.5
    flags.offload_activations.min_bytes = "2MB"
    flags.device = "h200"
    flags.name_streams.enable = False
    config = flags.config()
    assert config.passes["offload-activations"] == OffloadActivations(fraction=0.5, min_bytes=2_000_000)
    assert (config.device, "name-streams" in config.passes, config.passes["schedule-1f1b"].interleave) == ("h200", False, "off")
    assert strategy.pipeline.interlace is flags


@pytest.mark.paddle
def test_options_of_a_given_pass_stay_when_one_is_changed(strategy: Any) -> None:
    """Wrong options."""
    interlace.enable(strategy, offload_activations=OffloadActivations(fraction=0.25, modules=("mlp",)))
    strategy.interlace.offload_activations.min_bytes = 5
    assert strategy.interlace.config().passes["offload-activations"] == OffloadActivations(fraction=0.25, modules=("mlp",), min_bytes=5)


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda f: setattr(f, "nonsense", 3), ConfigError, "unknown option 'nonsense'"),
        (lambda f: setattr(f, "check", 3), ConfigError, "expected bool, found 3"),
        (lambda f: setattr(f.schedule_1f1b, "interleave", "both"), ConfigError, "Invalid enum value 'both'"),
        (lambda f: setattr(f.schedule_1f1b, "colour", 3), ConfigError, "unknown option 'colour'"),
        (lambda f: setattr(f.split_backward, "enable", False), ConfigError, "split_backward is off, and overlap_column_backward"),
        (lambda f: setattr(f.split_backward, "enable", "no"), ConfigError, "expected bool, found 'no'"),
        (lambda f: f.schedule_1f1b.colour, AttributeError, "unknown option 'colour' of schedule-1f1b; there are ["),
        (lambda f: f.nonsense, AttributeError, "has no option 'nonsense'"),
    ],
)
def test_a_wrong_change_leaves_the_flags_as_they_were(strategy: Any, change: Any, kind: type[Exception], words: str) -> None:
    """Wrong options."""
    interlace.enable(strategy, offload_activations={"fraction": 0.5})
    before = strategy.interlace.config()
    with pytest.raises(kind) as caught:
        change(strategy.interlace)
    assert words in str(caught.value)
    assert strategy.interlace.config() == before


@pytest.mark.paddle
def test_a_wrong_enable_changes_nothing(strategy: Any) -> None:
    """Wrong options. Nor does a file of another kind."""
    for wrong in ({"splitbackward": "on"}, 7, "no-such-preset"):
        with pytest.raises(ConfigError):
            interlace.enable(strategy, wrong)  # type: ignore[arg-type]
    assert not hasattr(strategy, "interlace")
    assert not hasattr(strategy.pipeline, "interlace")


@pytest.mark.paddle
def test_a_second_enable_goes_on_top_of_the_first(strategy: Any, tmp_path: Path) -> None:
    """One line, wrong options. And of flags set in between; messages name the file that gave an option."""
    (tmp_path / "my.yaml").write_text("schedule_1f1b: {interleave: off}\nname_streams: {priority: -2}\n")
    interlace.enable(strategy, tmp_path / "my.yaml", dump="plans")
    strategy.interlace.offload_activations.fraction = 0.5
    interlace.enable(strategy, {"name_streams": {"priority": -3}}, device="h200")
    config = strategy.interlace.config()
    assert (config.dump, config.device, config.passes["schedule-1f1b"].interleave) == ("plans", "h200", "off")
    assert (config.passes["offload-activations"].fraction, config.passes["name-streams"].priority) == (0.5, -3)
    with pytest.raises(ConfigError, match=r"my\.yaml:1:29: schedule_file gives every job"):
        strategy.interlace.schedule_1f1b.schedule_file = "x"
    with pytest.raises(ConfigError, match=r"interlace\.enable: name_streams\.priority: found 7"):
        strategy.interlace.name_streams.priority = 7
    assert strategy.interlace.config() == config


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("given", "found"), [(None, "builtins.NoneType"), ("h200", "builtins.str"), (Config, "the class Config"), ({}, "builtins.dict")]
)
def test_only_strategies_of_auto_parallel_are_enabled(given: Any, found: str) -> None:
    """Wrong options."""
    pytest.importorskip("paddle")
    with pytest.raises(ConfigError, match=rf"interlace\.enable: expected a paddle\.distributed\.Strategy, found {found}; give"):
        interlace.enable(given)


@pytest.mark.paddle
def test_offload_may_be_switched_on_before_it_is_told_what_to_move(strategy: Any) -> None:
    """Wrong options. One flag after the other; what is missing is said when the model is built, or with the next enable()."""
    interlace.enable(strategy)
    strategy.interlace.offload_activations.enable = True
    strategy.interlace.offload_activations.min_bytes = "1MB"
    with pytest.raises(ConfigError, match="on, but nothing says what to move"):
        strategy.interlace.final(strategy)
    with pytest.raises(ConfigError, match="on, but nothing says what to move"):
        interlace.enable(strategy, device="h200")
    strategy.interlace.offload_activations.fraction = 0
    assert strategy.interlace.final(strategy).passes["offload-activations"].fraction == 0


@pytest.mark.paddle
def test_keywords_go_on_top_of_a_preset(strategy: Any) -> None:
    """One line."""
    interlace.enable(strategy, "demo", offload_activations="off")
    assert "offload-activations" not in strategy.interlace.config().passes
    assert strategy.interlace.device == "h200"


@pytest.mark.paddle
def test_a_copied_strategy_has_flags_of_its_own(strategy: Any) -> None:
    """Wrong options. Paddle copies strategies."""
    import copy

    interlace.enable(strategy)
    other = copy.deepcopy(strategy)
    other.interlace.schedule_1f1b.interleave = "off"
    assert strategy.interlace.schedule_1f1b.interleave == "auto"


DEAD = [("FLAGS_1f1b_backward_forward_overlap", "schedule_1f1b"), ("FLAGS_mp_async_allreduce_in_backward", "overlap_column_backward")]


@pytest.mark.paddle
@pytest.mark.parametrize(("name", "key"), DEAD)
def test_dead_environment_flags_work_or_say_who_decides(strategy: Any, monkeypatch: Any, caplog: Any, name: str, key: str) -> None:
    """Dead flags."""
    from interlace.bridge.flags import with_dead_flags

    monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.INFO, logger="interlace"):
        assert key in with_dead_flags(strategy, {})
        assert with_dead_flags(strategy, {key: "off"}) == {key: "off"}
    assert f"{name}: done by interlace's {key}=" in caplog.text
    assert f"{name} is set, but interlace's {key}='off' decides" in caplog.text
    monkeypatch.setenv(name, "0")
    assert with_dead_flags(strategy, {}) == {}


@pytest.mark.paddle
def test_dead_fields_of_the_strategy_work(strategy: Any) -> None:
    """Dead flags."""
    from interlace.bridge.flags import with_dead_flags

    assert with_dead_flags(strategy, {}) == {}
    strategy._mp_optimization.allreduce_matmul_grad_overlapping = True
    strategy.pipeline.enable_send_recv_overlap = True
    assert with_dead_flags(strategy, {}) == {"overlap_column_backward": "on", "name_streams": "on"}


@pytest.mark.paddle
def test_dead_flags_are_read_when_the_model_is_built(strategy: Any, monkeypatch: Any, caplog: Any) -> None:
    """Dead flags. Also those set after enable(); said once, then; what is not said of an option, a flag may say."""
    from types import SimpleNamespace

    from interlace.bridge.hook import _state

    with caplog.at_level(logging.INFO, logger="interlace"):
        interlace.enable(strategy, schedule_1f1b={"max_ops_per_job": 5}, split_backward="off", overlap_column_backward="off")
        strategy._mp_optimization.allreduce_matmul_grad_overlapping = True
        monkeypatch.setenv("FLAGS_1f1b_backward_forward_overlap", "1")
        assert not caplog.records
        state = _state(SimpleNamespace(_strategy=strategy))
    assert state is not None
    assert state.config.passes["schedule-1f1b"] == Schedule1F1B(interleave="dx-first", max_ops_per_job=5)
    assert "overlap-column-backward" not in state.config.passes
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "allreduce_matmul_grad_overlapping is set, but interlace's overlap_column_backward='off' decides" in caplog.text


@pytest.mark.paddle
def test_the_engines_own_kind_of_strategy_is_known() -> None:
    """One line, dead flags. Paddle makes one of the user's; there the field has another name."""
    from interlace.bridge.flags import with_dead_flags

    strategy = pytest.importorskip("paddle").distributed.fleet.auto.Strategy()
    interlace.enable(strategy)
    strategy.mp_optimization.allreduce_matmul_grad_overlapping = True
    assert with_dead_flags(strategy, {}) == {"overlap_column_backward": "on"}


@pytest.mark.paddle
def test_what_was_asked_of_a_trainers_strategy_reaches_the_one_that_the_trainer_makes_of_it() -> None:
    """As PaddleNLP's AutoTrainer does with the strategy of its arguments. Acceptance: U7."""
    from types import SimpleNamespace

    from interlace.bridge.hook import _state

    distributed = pytest.importorskip("paddle").distributed
    given, made = distributed.fleet.auto.Strategy(), distributed.Strategy()
    interlace.enable(given, schedule_1f1b={"max_ops_per_job": 5})
    made._from_legacy_strategy(given)
    state = _state(SimpleNamespace(_strategy=made))
    assert state is not None
    assert state.config.passes["schedule-1f1b"].max_ops_per_job == 5


@pytest.mark.paddle
@pytest.mark.parametrize("form", ["mixed", "zb-h1", ["mixed"]])
def test_forms_of_a_pipeline_without_one_are_refused_before_anything_is_built(strategy: Any, form: str | list[str]) -> None:
    """Wrong options. Interleaving that needs micro-batches, and there are none."""
    from types import SimpleNamespace

    from interlace.bridge.hook import _state

    interlace.enable(strategy, schedule_1f1b={"interleave": form})
    engine = SimpleNamespace(_strategy=strategy)
    name = form if isinstance(form, str) else form[0]
    with pytest.raises(ConfigError, match=rf"schedule_1f1b.interleave: {name} without a pipeline; set strategy.pipeline.enable"):
        _state(engine)
    strategy.pipeline.enable = True
    assert _state(engine) is not None
