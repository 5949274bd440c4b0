"""An encoder-decoder of two unequal stages: the imbalance is told first, and every command says the same of a wait and of a site."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from interlace.cli import main
from tests.report.pages import data_in

pytestmark = pytest.mark.paddle
SCRIPT = Path(__file__).parents[1] / "training" / "encoder_decoder.py"
WORDS = "--pp 2 --mp 2 --layers 2 --hidden 2048 --heads 16 --vocab 8192 --seq-len 1024 --micro-batches 4 --batch-size 8 --split-qkv"


def test_imbalance_comes_first_and_is_the_cause(forked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumps, plan, page = (str(tmp_path / name) for name in ("dumps", "plan", "page.html"))
    assert main(["dump", str(SCRIPT), "--world", "4", "--stages", "-o", dumps, "--", *WORDS.split()]) == 0
    capsys.readouterr()
    (tmp_path / "form.yaml").write_text("schedule_1f1b: {interleave: dx-first}\n")
    assert main(["plan", dumps, "--config", str(tmp_path / "form.yaml"), "-o", plan]) == 0
    planned = capsys.readouterr().out.splitlines()
    said = next(line for line in planned if line.startswith("Stages are unbalanced: stage 1 computes "))
    assert planned.index(said) < planned.index("done:")
    assert main(["report", plan, "-o", page]) == 0
    assert data_in(Path(page))["imbalance"] == said
    capsys.readouterr()
    assert main(["show", plan, "--why"]) == 0
    why = capsys.readouterr().out
    assert why.splitlines().count(said) == 1
    assert not re.search(r"done beside|[\d.]+ of its [\d.]+ ms|saves \d|,,", why)
    assert main(["check", plan, "--json", str(tmp_path / "check.json")]) == 0
    checked = capsys.readouterr().out.splitlines()
    assert said in checked
    ranks = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))["ranks"]
    first, last = ranks[0], ranks[-1]
    assert last["compute_ns"] > 1.2 * first["compute_ns"]
    longest = first["waits_for"][0]
    assert (longest["kind"], longest["why"]) == ("recv_v2", "stage 1 comes later")
    assert longest["wait_ns"] > 0.5 * first["bubble_ns"]
    figures = [float(each) for each in re.findall(r"[\d.]+(?= ms)", said)]
    own, other, even, step = figures
    assert even == pytest.approx((own + other) / 2, abs=2e-3)
    assert step == pytest.approx(last["step_ns"] / 1e6 - (own - even), abs=2e-3)
