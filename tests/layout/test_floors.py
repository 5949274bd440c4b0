"""Bounds of layouts that are not built are bounds."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.work import Part, dims_of
from interlace.layout.floors import Reference, best_rates
from interlace.layout.space import Layout


@cache
def costs_of(device: str) -> CostModel:
    return CostModel(load_profile(device))


sizes = st.integers(4, 16).map(lambda k: 1 << k) | st.integers(1, 60_000)


@pytest.mark.parametrize("device", ["h100", "h200", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@settings(deadline=None)  # the first call reads a profile
@given(m=sizes, n=sizes, k=sizes, batch=st.sampled_from([1, 8, 64]), transposed=st.sampled_from([(), ("transpose_x",), ("transpose_y",)]))
def test_no_product_is_faster_than_the_best_rate(
    device: str, dtype: str, m: int, n: int, k: int, batch: int, transposed: tuple[str, ...]
) -> None:
    """What the cost model says of any shape, measured or not."""
    costs = costs_of(device)
    kind = "gemm" if batch == 1 else "gemm_batched"
    dims = dims_of(batch=batch, m=m, n=n, k=k, **dict.fromkeys(transposed, 1))
    part = Part(kind, "gemm", dtype, dims, 2 * batch * m * n * k, 4 * batch * (m * n + n * k + m * k))
    rates = best_rates(costs.profile)
    found = costs.part_time(part)
    assert found.how == "unknown" or found.dur_ns + 1 >= part.flops * 1e9 / rates.get(dtype, max(rates.values()))


@pytest.mark.parametrize("device", ["h100", "h200"])
@settings(deadline=None)
@given(
    batch=st.integers(1, 64),
    heads=st.integers(1, 128),
    seq=sizes,
    head_dim=st.sampled_from([64, 128]),
    back=st.booleans(),
    causal=st.booleans(),
)
def test_no_attention_is_faster_than_the_best_rate(
    device: str, batch: int, heads: int, seq: int, head_dim: int, back: bool, causal: bool
) -> None:
    costs = costs_of(device)
    pairs = batch * heads * seq * seq // (2 if causal else 1)
    dims = dims_of(batch=batch, heads=heads, kv_heads=heads, seq_q=seq, seq_k=seq, head_dim=head_dim, causal=int(causal))
    flops = (10 if back else 4) * pairs * head_dim
    part = Part("attention_grad" if back else "attention", "attention", "bfloat16", dims, flops, 8 * batch * heads * seq * head_dim)
    assert costs.part_time(part).dur_ns + 1 >= flops * 1e9 / best_rates(costs.profile)["bfloat16"]


@given(shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8), work=st.floats(1.0, 1e9))
def test_no_split_of_the_work_beats_equal_shares(shares: list[float], work: float) -> None:
    assert Reference(len(shares), work, 0).least_ns <= work * max(shares) / sum(shares) * (1 + 1e-9)


def test_state_lies_on_ranks_that_share_it() -> None:
    reference = Reference(16, 0.0, 160)
    assert [reference.least_bytes(Layout(tuple(each.items()))) for each in ({"pp": 2, "mp": 2}, {"pp": 2, "mp": 2, "sharding": 1}, {})] == [
        40,
        10,
        160,
    ]
