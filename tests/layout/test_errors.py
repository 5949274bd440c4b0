"""What `interlace choose` refuses before it builds anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.cli import main

pytestmark = pytest.mark.paddle


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('was built')")
    (tmp_path / "off.yaml").write_text("pp: [1]")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "0"], "--gpus 0: expected 1 or more"),
        (["--gpus", "12", "--gpus-a-host", "8"], "--gpus 12: expected a multiple of the 8 of each host"),
        (["--gpus", "4", "--layouts", "-1"], "--layouts -1: expected 0 or more"),
        (["--gpus", "4", "--memory", "0.8"], "--memory 0.8: expected bytes with their unit, such as 70GB"),
        (["--gpus", "4", "--memory", "70"], "--memory: found '70', in bytes; expected bytes with their unit"),
        (["--gpus", "4", "--network", "50GB"], "--network: all 4 GPUs are on one host"),
        (["--gpus", "16", "--network", "fast"], "--network: size 'fast'"),
        (["--gpus", "16", "--latency-us", "-1"], "a latency of 0 or more"),
        (["--gpus", "4", "--device", "h1000"], "no device profile 'h1000'"),
        (["--gpus", "4", "--try", "width=1"], "width has values and no place"),
        (["--gpus", "4", "--try", "pp"], "--try pp: expected a name and its values"),
        (["--gpus", "4", "--alternatives", "off.yaml"], "off.yaml: Object contains unknown field"),
        (["--gpus", "4", "--alternatives", "no.yaml"], "no.yaml: cannot be read"),
        (["--gpus", "4", "--json", "train.py"], "would overwrite train.py"),
        (["--gpus", "4", "-o", "train.py"], "train.py is a file"),
    ],
)
def test_errors(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", "train.py", *words, "--", "--pp", "{pp}", "--mp", "{mp}"]) == 2
    assert told in (said := capsys.readouterr().err)
    assert "was built" not in said


def test_scripts_that_are_not_there_or_have_nothing_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", "no.py", "--gpus", "4", "--", "{pp}"]) == 2
    assert "no.py: no such script" in capsys.readouterr().err
    assert main(["choose", "train.py", "--gpus", "4", "--", "--pp", "2"]) == 2
    assert "there is nothing to choose" in capsys.readouterr().err


def test_a_script_that_refuses_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Its words are told, and nothing is recommended."""
    assert main(["choose", "train.py", "--gpus", "1", "--memory", "70GB", "--try", "m=1,2", "--", "--m", "{m}"]) == 2
    error = capsys.readouterr().err
    assert "no layout can be simulated:\nm 1: the script ended: was built\nm 2: the script ended: was built\n" in error
