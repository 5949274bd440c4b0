"""Without Paddle, and with one that nobody has tested: a sentence, and models are left to Paddle where names are missing."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import interlace
from interlace import installed
from interlace import notice as say
from interlace.cli import main
from interlace.config import make_config
from interlace.errors import BudgetError, ConfigError, PlanError
from interlace.installed import other_paddle, stands_back, unusable_paddle
from interlace.local.rank import failure_of
from interlace.report.checks import DUMPS, EVERYTHING, RANKS


@pytest.fixture
def no_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it was never installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "paddle" else find(name, *args))
    monkeypatch.delitem(sys.modules, "paddle", raising=False)


@pytest.mark.parametrize("words", [("run", "--world", "2"), ("dump", "--world", "2"), ("calibrate",)])
def test_commands_without_paddle(no_paddle: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text("")
    script = [str(tmp_path / "script.py")] if words[0] != "calibrate" else ["-o", str(tmp_path / "x.json")]
    assert main([words[0], *script, *words[1:]]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"interlace {words[0]}: PaddlePaddle is not installed for {sys.executable}; pip install paddlepaddle==3.3.1")
    assert len(said.splitlines()) == 1


def test_calls_without_paddle(no_paddle: None) -> None:
    for call in (lambda: interlace.enable(object()), lambda: interlace.plan_of(object())):
        with pytest.raises(ConfigError, match="PaddlePaddle is not installed"):
            call()


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("3.3.0", ""),
        ("3.3.1", ""),
        ("3.3.1.post126", ""),
        ("3.3.1+cu129", ""),
        ("3.3.10", "Paddle 3.3.10 is"),
        ("3.2.0", "Paddle 3.2.0 is"),
        ("0.0.0", "Paddle 0.0.0 is"),
        ("", "Paddle of unknown version is"),
    ],
)
def test_which_paddle_is_tested(monkeypatch: pytest.MonkeyPatch, version: str, told: str) -> None:
    monkeypatch.setattr(installed, "paddle_version", lambda: version)
    assert other_paddle() == (f"{told} installed, and Interlace is tested with 3.3.0 and 3.3.1 only" if told else "")


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed Paddle, as if nobody had tested it."""
    monkeypatch.setattr(installed, "TESTED", ("3.2.0",))
    monkeypatch.setattr(say, "SAID", set())


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another Paddle is installed. Gives an empty strategy."""
    for name in [each for each in sys.modules if each.startswith("paddle.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "paddle", SimpleNamespace(__version__="3.2.0"))
    monkeypatch.setattr(say, "SAID", set())
    monkeypatch.delitem(sys.modules, "interlace.bridge.hook", raising=False)
    return SimpleNamespace(pipeline=SimpleNamespace())


def test_a_paddle_without_what_plans_need_stays_baseline_and_says_so_once(other: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Flags can be set, and do nothing; nothing of Paddle's engine is touched, or even imported."""
    for _ in range(2):
        interlace.enable(other, schedule_1f1b={"interleave": "off"})
    other.interlace.offload_activations.fraction = 0.5
    said = capfd.readouterr().err
    (line,) = said.splitlines()
    assert line.startswith(
        "interlace: Paddle 3.2.0 is installed, and Interlace is tested with 3.3.0 and 3.3.1 only; this one lacks what is"
    )
    assert "no attribute 'distributed'" in line
    assert ". Models are left to Paddle; " in line
    assert not hasattr(other.pipeline, "interlace")
    assert "interlace.bridge.hook" not in sys.modules
    told = interlace.plan_of(other).explain()
    assert told.startswith("Interlace is off (Paddle 3.2.0 is installed")
    with pytest.raises(ConfigError, match="unknown option 'fold_paddle'"):
        interlace.enable(other, fold_paddle=True)


def test_a_forced_paddle_is_used(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setitem(sys.modules, "interlace.bridge.hook", SimpleNamespace(enable=lambda *args: taken.append(args)))
    interlace.enable(other, force_paddle=True)
    assert taken[0][0] is other
    assert taken[0][1].force_paddle


def test_only_the_first_rank_says_it(other: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    assert stands_back(False)
    assert not stands_back(True)
    assert capfd.readouterr().err == ""


@pytest.mark.paddle
def test_an_untested_paddle_with_all_that_plans_need_is_used_and_examined(untested: None, capfd: pytest.CaptureFixture[str]) -> None:
    import paddle

    from interlace.bridge.first_contact import is_examined
    from interlace.bridge.targets import choose_device

    assert [stands_back(False) for _ in range(2)] == [False, False]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"interlace: Paddle {paddle.__version__} is installed, and Interlace is tested with 3.2.0 only: it is used as")
    assert is_examined(make_config({}), choose_device())
    assert not is_examined(make_config({"examine": "off"}), choose_device())


@pytest.mark.paddle
def test_features_of_an_untested_paddle_whose_names_are_missing(untested: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what CPU ranks need, dumps and plans can be had all the same."""
    monkeypatch.delattr("paddle.static.python_op")
    monkeypatch.setitem(sys.modules, "paddle.static.python_op", None)
    assert unusable_paddle(EVERYTHING, DUMPS) == ""
    said = unusable_paddle(RANKS)
    assert "this one lacks what is needed for runs on CPU ranks: paddle.static.python_op: " in said
    assert not stands_back(False)


@pytest.mark.paddle
def test_a_dump_with_a_paddle_that_lacks_what_it_needs(untested: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from interlace.local import build_rank as dump

    monkeypatch.delattr("paddle.distributed.auto_parallel.api.ShardingStage3._shard_parameter")
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=r"needed for every plan and dumps: no \S*_shard_parameter; --force-paddle tries all the same"):
        dump.build_program("x.py", [], 0, 1)
    assert dict(os.environ) == before


def test_a_budget_that_cannot_hold_is_the_users_error() -> None:
    """In a rank: the sentence alone, exit code 2; other plans that cannot be made keep their log."""
    assert failure_of(BudgetError("the least feasible one is 5 bytes"), "x.py").users
    assert failure_of(BudgetError("the least feasible one is 5 bytes"), "x.py").text == "the least feasible one is 5 bytes"
    assert not failure_of(PlanError("no"), "x.py").users
