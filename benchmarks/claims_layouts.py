"""Claims about searches for layouts; every step is simulated."""

from __future__ import annotations

from claiming import Row, claim, raw, table

EVERY = "Llama 7B, 8 GPUs, all layouts of few values"
ROOMY, BOUNDED = "Llama 7B, 8 H200, all layouts of few values", "Llama 7B, 8 H200, few values"
PUBLIC = "vpp 1, pp 1, mp 1, dp 8, m 8, sharding 1, recompute none"
"""What NVIDIA's summary has for Llama 2 7B on 8 H100, with half of its batch: replicas alone, one sequence a micro-batch."""


def _cases() -> dict[str, Row]:
    return dict(raw("layouts.json")["cases"])


def _best_ns(row: Row) -> int:
    """The shortest step that keeps the memory; 0 without one."""
    return min((row[f"{whose}_step_ns"] for whose in ("paddles", "ours") if row.get(f"{whose}_fits")), default=0)


@claim
def layouts() -> str:
    """Each search: what it looked at, and what it took."""
    rows = []
    for name, case in _cases().items():
        count, best = case["counts"], case["layouts"][0]
        rows.append(
            [
                name,
                *(f"{count[each]:,}" for each in ("layouts", "excluded", "refused")),
                f"{count['drafted'] + count['planned']} / {count['planned']}",
                str(count["programs built"]),
                f"{best['layout']}: {_best_ns(best) / 1e6:.1f} ms",
                f"{100 * case['gap']:.0f} %",
                f"{case['wall_s'] / 60:.0f} min",
                f"{case['processor_s'] / 60:.1f} min",
                f"{case['peak_rss_bytes'] / 1e9:.1f} GB" if "peak_rss_bytes" in case else "-",
                f"{case['load']:.0f}",
            ]
        )
    head = ["search", "layouts", "excluded", "refused", "simulated / planned", "programs built", "best step, simulated"]
    return table([*head, "a layout not built may take less by", "wall", "CPU", "largest process", "load"], rows)


@claim
def layouts_exhaustive() -> str:
    """How far the answer of a search that builds few layouts is from that of one that builds all."""
    every, few = (min(filter(None, map(_best_ns, _cases()[name]["layouts"]))) for name in (ROOMY, BOUNDED))
    built = _cases()[BOUNDED]["counts"]
    return (
        f"of {built['layouts']} layouts of Llama 7B on 8 H200 the search built {built['drafted'] + built['planned']}; its best takes "
        f"{few / 1e6:.1f} ms, the best of all {every / 1e6:.1f} ms ({100 * (few / every - 1):+.1f} %)"
    )


@claim
def layouts_public() -> str:
    """What the simulator says of a published setting."""
    rows = _cases()[EVERY]["layouts"]
    theirs = next(_best_ns(row) for row in rows if row["layout"] == PUBLIC)
    best = min((row for row in rows if _best_ns(row)), key=_best_ns)
    ahead = f"{100 * (_best_ns(best) / theirs - 1):+.1f} %"
    return (
        f"{theirs / 1e6:.1f} ms a step; the best of the exhaustive search is {best['layout']} with {_best_ns(best) / 1e6:.1f} ms ({ahead})"
    )
