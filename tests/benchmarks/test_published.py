"""Published settings: what follows from the facts is what their sources say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from published import SETTINGS

PEAK = 989.0
"""Of an H100 in bfloat16, TFLOP/s, as the sources have it."""


@pytest.mark.parametrize(
    ("name", "a_sequence", "share"),
    [
        ("GPT-3 175B, 128 GPUs", 2.20e15, 0.5354),
        ("Nemotron-4 15B, 16 GPUs", 434.5e12, 0.6249),
        ("GPT-3 5B, 16 GPUs", 6.69e13, 0.4268),
        ("Llama 3.1 8B, 8 GPUs", 4.74e14, 0.5937),
        ("Llama 3.1 70B, 64 GPUs", 3.94e15, 0.5410),
    ],
)
def test_flops_are_those_of_the_source(name: str, a_sequence: float, share: float) -> None:
    """FLOPs of a sequence, and the share of the peak, that the readme says."""
    setting = SETTINGS[name]
    assert setting.model.flops_a_token() * setting.model.seq_len == pytest.approx(a_sequence, rel=0.003)
    assert setting.reached() / PEAK == pytest.approx(share, rel=0.005)


def test_layouts_use_all_gpus_and_the_batch() -> None:
    for name, setting in SETTINGS.items():
        for each in setting.layouts:
            assert int(each["pp"]) * int(each["mp"]) * int(each["dp"]) == setting.gpus, name
            assert setting.batch % (int(each["dp"]) * int(each["m"])) == 0, name
            assert setting.model.layers % (int(each["pp"]) * int(each["vpp"])) == 0, name
            assert sum(map(bool, (setting.step_s, setting.tflops, setting.tokens))) == 1, name
