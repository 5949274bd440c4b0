"""PaddleNLP's `AutoTrainer`, which makes the Strategy itself: examples/paddlenlp_llama.py trains with Interlace unchanged. Acceptance: U7.

`make test-nlp` runs this; elsewhere PaddleNLP is not installed.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from interlace.cli import main
from tests.remarks import done_in

pytestmark = [
    pytest.mark.paddle,
    pytest.mark.skipif(importlib.util.find_spec("paddlenlp") is None, reason="PaddleNLP, the extra [nlp], is not installed: make test-nlp"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "paddlenlp_llama.py"
WORLD = 4


def test_trains_and_saves_checkpoints_with_the_same_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two stages of two tensor-parallel ranks: every rank runs a plan that changes something, and gives the bits of unmodified Paddle."""
    result, out = tmp_path / "result.json", tmp_path / "out"
    words = ["run", str(EXAMPLE), "--world", str(WORLD), "--config", "overlap", "--verify", "--json", str(result)]
    assert main([*words, "--", "--output_dir", str(out), "--save_steps", "2"]) == 0
    assert "SAME: 8 losses, 42 parameters" in capfd.readouterr().out
    for rank in json.loads(result.read_text())["runs"]["interlace"]["ranks"]:
        changed = {each["name"]: len(done_in(each)) for each in rank["plan"]["passes"]}
        assert changed["overlap-column-backward"]
        assert changed["schedule-1f1b"]
    for step in (2, 4):
        saved = {path.name for path in (out / f"checkpoint-{step}" / "dist_ckpt").iterdir()}
        assert saved == {"0.metadata", *(f"{rank}_0.distcp" for rank in range(WORLD))}
