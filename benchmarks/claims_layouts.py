"""Claims about searches for layouts; every step is simulated."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from claiming import Row, by_case, claim, raw, table

from interlace.report.accuracy import CLEAR

MEASURED = {
    "h200/testbed_two_gpus.json": "GPT-3 6.7B layers, 4 of them, 2 GPUs, listed",
    "h100/testbed_four_gpus.json": "GPT-3 6.7B layers, 4 of them, 4 GPUs, listed",
}
"""File of measured runs -> the search of these layouts, with times of the testbed's kernels on an H200."""
EVERY = "Llama 7B, 8 GPUs, all layouts of few values"
ROOMY, BOUNDED = "Llama 7B, 8 H200, all layouts of few values", "Llama 7B, 8 H200, few values"
PUBLIC = "vpp 1, pp 1, mp 1, dp 8, m 8, sharding 1, recompute none"
"""The layout of NVIDIA's summary for Llama 2 7B on 8 H100, with half of its batch: data parallelism only, one sequence per micro-batch."""


def _cases() -> dict[str, Row]:
    return dict(raw("layouts.json")["cases"])


def _best_ns(row: Row) -> int:
    """The shortest step that fits in memory; 0 if there is none."""
    return min((row[f"{whose}_step_ns"] for whose in ("paddles", "ours") if row.get(f"{whose}_fits")), default=0)


def _best(row: Row) -> str:
    """The shortest step that fits in memory; if there is none, the layout that holds the least."""
    best = row["layouts"][0]
    if _best_ns(best):
        return f"{best['layout']}: {_best_ns(best) / 1e6:.1f} ms"
    least = min(row["layouts"], key=lambda each: each["paddles_peak_bytes"])
    return f"none fits; the least, {least['layout']}, holds {least['paddles_peak_bytes'] / 1e9:.0f} GB by Paddle's plan"


@claim
def layouts() -> str:
    """Each search: what it considered, its result, and its cost."""
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
    return table([*head, "a layout that was not built may be faster by", "wall", "CPU", "largest process", "load"], rows)


@claim
def layouts_exhaustive() -> str:
    """How far the result of a search that builds few layouts is from that of one that builds all."""
    every, few = (min(filter(None, map(_best_ns, _cases()[name]["layouts"]))) for name in (ROOMY, BOUNDED))
    built = _cases()[BOUNDED]["counts"]
    return (
        f"of {built['layouts']} layouts of Llama 7B on 8 H200 the search built {built['drafted'] + built['planned']}; its best takes "
        f"{few / 1e6:.1f} ms, the best of all {every / 1e6:.1f} ms ({100 * (few / every - 1):+.1f} %)"
    )


@claim
def layouts_public() -> str:
    """Simulated step of a published setting."""
    rows = _cases()[EVERY]["layouts"]
    theirs = next(_best_ns(row) for row in rows if row["layout"] == PUBLIC)
    best = min((row for row in rows if _best_ns(row)), key=_best_ns)
    ahead = f"{100 * (_best_ns(best) / theirs - 1):+.1f} %"
    return (
        f"{theirs / 1e6:.1f} ms a step; the best of the exhaustive search is {best['layout']} with {_best_ns(best) / 1e6:.1f} ms ({ahead})"
    )


class Ran(NamedTuple):
    """A run of a layout: whose plan it used, and its step in ms as found by the search, simulated for the GPU in use, and measured."""

    layout: str
    whose: str
    searched: float
    planned: float
    measured: float


def _ran(file: str) -> list[Ran]:
    """The runs of a file, shortest measured step first."""
    runs = by_case(file)
    found = []
    for row in _cases()[MEASURED[file]]["layouts"]:
        words = [word.split() for word in row["layout"].split(", ")]
        name = "-".join(["layout-gpt", *(f"{key}{value}" for key, value in words if value != "1" or key == "sharding")])
        for whose, plan in (("paddles", "stock"), ("ours", "auto")):
            if "step_ms" in (run := runs.get(name, {}).get(plan, {})):
                planned = run["simulated"].get("limited", run["simulated"])["step_ms"]
                found.append(Ran(row["layout"], whose, row[f"{whose}_step_ns"] / 1e6, planned, run["step_ms"]["median"]))
    return sorted(found, key=lambda each: each.measured)


def _steps(file: str, how: str) -> str:
    found = {(each.layout, each.whose): f"{getattr(each, how):.1f}, {each.measured:.1f}" for each in _ran(file)}
    layouts = dict.fromkeys(layout for layout, _ in found)
    return table(
        ["layout", "Paddle's plan, ms: simulated, measured", "Interlace's plan"],
        [[each, found.get((each, "paddles"), ""), found.get((each, "ours"), "")] for each in layouts],
    )


def _order(file: str, how: str) -> str:
    told = []
    for whose, name in (("paddles", "Paddle's plan"), ("ours", "Interlace's")):
        rows = [(getattr(each, how), each.measured) for each in _ran(file) if each.whose == whose]
        pairs = [(one, other) for one, other in combinations(rows, 2) if abs(one[1] / other[1] - 1) > CLEAR]
        right = sum((one[0] - other[0]) * (one[1] - other[1]) > 0 for one, other in pairs)
        off = [simulated / measured - 1 for simulated, measured in rows]
        told.append(f"{right} of {len(pairs)} pairs with {name} (steps off by {100 * min(off):+.1f} to {100 * max(off):+.1f} %)")
    return ", ".join(told)


@claim
def layouts_measured() -> str:
    """Steps of two H200 in each layout with Paddle's plan and with Interlace's, as found by the search and measured."""
    return _steps("h200/testbed_two_gpus.json", "searched")


@claim
def layouts_order() -> str:
    """How many pairs of these are in the right order."""
    return _order("h200/testbed_two_gpus.json", "searched")


@claim
def layouts_measured_four() -> str:
    """Steps of four H100, measured and simulated for the plans that ran."""
    return _steps("h100/testbed_four_gpus.json", "planned")


@claim
def layouts_order_four() -> str:
    """How many pairs of these are in the right order, simulated with the plans that ran."""
    return _order("h100/testbed_four_gpus.json", "planned")


@claim
def layouts_searched_four() -> str:
    """The same with steps of the search that was stored before the runs, for H200."""
    return _order("h100/testbed_four_gpus.json", "searched")
