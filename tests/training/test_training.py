"""Real training on CPU ranks: unmodified Paddle and Interlace give the same bits (losses and parameters).

Each case runs twice through `interlace run --verify`, which compares every loss of every step and the digest of every
parameter. Here run those that the testbed cannot, and a few that have every kind of parallelism between them; `tests/testbed` trains
all others, with the same assertions, on asynchronous streams.
Acceptance: S5, F2, O1, O7, O8, R1, M1, M2, U1.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.cases import HALF, LONG, OFFLOAD, ON_THE_TESTBED, ROOMY
from tests.training.verified import few_layers, lines_of, passes_of, require_asked, verified

pytestmark = pytest.mark.paddle
SCALED = str(Path(__file__).with_name("scaled_script"))
"""In place of an example: an absolute path stays as it is behind a folder."""

ON_CPU_RANKS = {
    "dp2 sharding 2, clip, optimizer state on the host": (
        2,
        "gpt",
        "--dp 2 --layers 2 --sharding-stage 2 --clip-grad 1 --gradient-accumulation 2 --lr-scheduler cosine",
        {**ROOMY, "offload_optimizer_state": OFFLOAD},
    ),
    "dp2 mp2 sharding 3, optimizer state on the host": (
        4,
        "llama",
        "--dp 2 --mp 2 --sharding-stage 3 --clip-grad 1 --schedule 1F1B --micro-batches 2",
        {**ROOMY, "offload_optimizer_state": OFFLOAD},
    ),
    "dp2 sharding 1 over fused buffers, clip, optimizer state on the host": (
        2,
        "llama",
        "--dp 2 --hidden 128 --sharding-stage 1 --sharding-fusion --clip-grad 1 --schedule 1F1B --micro-batches 2",
        {**ROOMY, "offload_optimizer_state": OFFLOAD},
    ),
    "pp2 vpp2, optimizer state on the host": (
        2,
        "gpt",
        "--pp 2 --vpp 2 --micro-batches 4 --clip-grad 1 --lr-scheduler cosine",
        {**ROOMY, "offload_optimizer_state": OFFLOAD},
    ),
    "mp2 bfloat16 O2, master weights and gradients, optimizer state on the host": (
        2,
        "gpt",
        "--mp 2 --amp O2 --master-grad --schedule 1F1B --micro-batches 2",
        {**ROOMY, "offload_optimizer_state": OFFLOAD},
    ),
    "dp2 mp2 sharding 1, optimizer state on the host": (
        4,
        "llama",
        "--dp 2 --mp 2 --sharding-stage 1 --clip-grad 1 --gradient-accumulation 2",
        {**ROOMY, "offload_optimizer_state": OFFLOAD},
    ),
    "pp4, optimizer state on the host": (
        4,
        "gpt",
        "--pp 4 --micro-batches 4 --amp O2 --master-grad",
        {**ROOMY, "offload_optimizer_state": OFFLOAD},
    ),
    "pp2 bfloat16 O2, master weights and activations on the host": (
        2,
        "llama",
        "--pp 2 --layers 2 --micro-batches 4 --amp O2 --master-grad --clip-grad 1",
        {**ROOMY, "offload_activations": HALF, "offload_optimizer_state": OFFLOAD},
    ),
    "mp2, blocks that another stream reads last are returned": (
        2,
        "gpt",
        "--mp 2 --schedule 1F1B --micro-batches 2",
        {**ROOMY, "return_memory": {"min_bytes": 64}},
    ),
    "pp2 mp2, blocks that another stream reads last are returned": (
        4,
        "gpt",
        "--pp 2 --mp 2 --micro-batches 4",
        {**ROOMY, "return_memory": {"min_bytes": 64}},
    ),
    "mp2, sequence parallel, clip, all recomputed, collectives too": (
        2,
        "llama",
        "--mp 2 --kv-heads 2 --sequence-parallel --clip-grad 1 --gradient-accumulation 2",
        {**ROOMY, "choose_recompute": {"level": 1, "repeat_collectives": True}},
    ),
}
"""The executor's in-place pass, which runs on CPU ranks, puts clipped gradients into the fused buffer, and does less where blocks have a
reader more; collectives that are added."""
ALSO_ON_CPU_RANKS = ("one rank, accumulation, offload",)
LONG_ON_CPU_RANKS = (
    *LONG,
    "dp2 mp2 sharding 3, optimizer state on the host",
    "pp4, optimizer state on the host",
    "dp2 mp2 sharding 1, optimizer state on the host",
    "pp3 vpp2, shared embedding, optimizer state on the host",
    "dp2, experts, shared expert, clip, recompute and offload by module",
    "dp2 pp2, experts, pp + 1 micro-batches",
    "dp2 mp2 sharding 1, clip",
    "dp2 mp2 sharding 3, clip",
    "mp2 sequence parallel, full recompute",
    "pp2 vpp2 mp2 mixed",
    "pp2, all offload, 2 pp + 1 micro-batches",
    "mp2 bfloat16 O2, master weights and gradients, optimizer state on the host",
    "pp2 vpp2, optimizer state on the host",
    "mp2, clip, accumulation: column overlap",
    "pp2 mp2, blocks that another stream reads last are returned",
)
"""Collectives of every kind: experts, sharding, sequence parallelism; chunks, which `test_zoo.py` trains on CPU ranks too."""

ROWS = """
0 | 0F 1F 0B+2F 1B+3F 2B 3B O
1 | 0F 0I 1F 1I 0W 2F 2I 1W 3F 3I 2W 3W O
"""
"""A schedule of one's own: stage 0 in pairs, stage 1 with backward in parts."""


ON_CPU = [
    pytest.param(name, marks=[pytest.mark.long] * (name in LONG_ON_CPU_RANKS))
    for name in dict.fromkeys((*ALSO_ON_CPU_RANKS, *ON_CPU_RANKS, *LONG_ON_CPU_RANKS))
]


@pytest.mark.parametrize("name", ON_CPU)
def test_same_bits_as_baseline(name: str, tmp_path: Path) -> None:
    world, model, words, options = {**ON_THE_TESTBED, **ON_CPU_RANKS}[name]
    require_asked(passes_of(verified(tmp_path, world, model, few_layers(words), options)), options)


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        ("scaled", "--pp 2 --amp O2 --amp-dtype float16 --steps 8"),
        ("groups", "--pp 2 --tie-embeddings"),
    ],
)
def test_state_on_the_host_where_updates_are_skipped_or_parameters_are_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str, words: str
) -> None:
    """The script ends with an error where no update, or each, was skipped."""
    monkeypatch.setenv("TRAINED", trained)
    options = {**ROOMY, "offload_optimizer_state": OFFLOAD}
    report = verified(tmp_path, 2, SCALED, f"{words} --micro-batches 2 --layers 2", options)
    require_asked(passes_of(report), options)


@pytest.mark.long
def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    """Pairing, streams and offload work on any schedule that is written as rows of slots. (`tests/cpu/test_decisions.py` trains with the
    rows of another model.)"""
    rows = tmp_path / "rows.txt"
    rows.write_text(ROWS)
    options = {"memory_budget": "+1GB", "schedule_1f1b": {"schedule_file": str(rows)}, "offload_activations": OFFLOAD}
    passes = passes_of(verified(tmp_path, 2, "gpt", "--pp 2 --micro-batches 4 --layers 2", options))
    assert any("0B+2F" in line for line in lines_of(passes, "schedule-1f1b"))
    assert any("0I 1F 1I" in line for line in lines_of(passes, "schedule-1f1b"))
