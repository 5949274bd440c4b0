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


def _best(row: Row) -> str:
    """The shortest step that keeps the memory; where none does, what is held least."""
    best = row["layouts"][0]
    if _best_ns(best):
        return f"{best['layout']}: {_best_ns(best) / 1e6:.1f} ms"
    least = min(row["layouts"], key=lambda each: each["paddles_peak_bytes"])
    return f"none fits; the least, {least['layout']}, holds {least['paddles_peak_bytes'] / 1e9:.0f} GB by Paddle's plan"


@claim
def layouts() -> str:
    """Each search: what it looked at, and what it took."""
    rows = []
    for name, case in _cases().items():
        count, ended = case["counts"], not case.get("interrupted")
        rows.append(
            [
                name if ended else f"{name} (not ended)",
                *(f"{count[each]:,}" for each in ("layouts", "excluded", "refused")),
                f"{count['drafted'] + count['planned']} / {count['planned']}",
                str(count["programs built"] if ended else case["programs"]),
                _best(case),
                f"{100 * case['gap']:.0f} %" if _best_ns(case["layouts"][0]) else "-",
                f"{case['wall_s'] / 60:.0f} min" if ended else "-",
                f"{case['processor_s'] / 60:.1f} min" if ended else "-",
                f"{case['peak_rss_bytes'] / 1e9:.1f} GB" if "peak_rss_bytes" in case and ended else "-",
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
