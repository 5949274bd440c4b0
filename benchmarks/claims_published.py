"""Claims about published layouts: rates that the sources report, and rates simulated for the programs that Paddle builds."""

from __future__ import annotations

from claiming import Row, claim, raw, span, table

PADDLES, OURS = "paddles", "ours"
BESIDE = "GPT-3 175B, 1,024 GPUs, as searched"
"""Setting that compares the published layout with the one that a search recommends; it has no row in the table."""


def _settings() -> dict[str, Row]:
    return dict(raw("published.json")["settings"])


def _rate(setting: Row, row: Row, whose: str) -> float:
    """Model TFLOP/s per GPU; 0 if unknown."""
    step_ns = row.get(f"{whose}_step_ns", 0)
    return float(setting["tokens"] * setting["flops_a_token"] / step_ns / setting["gpus"] / 1e3) if step_ns else 0.0


def _shown(setting: Row) -> Row:
    """The layout with the fastest plan that fits in memory; if none fits, with the fastest plan of all."""
    fit = [(row[f"{whose}_fits"], _rate(setting, row, whose), k) for k, row in enumerate(setting["layouts"]) for whose in _plans(row)]
    found: Row = setting["layouts"][max(fit)[2]]
    return found


def _plans(row: Row) -> list[str]:
    return [whose for whose in (PADDLES, OURS) if f"{whose}_step_ns" in row]


def _cell(setting: Row, row: Row, whose: str) -> str:
    if whose not in _plans(row):
        return "not planned"
    rate, star = _rate(setting, row, whose), "" if row[f"{whose}_fits"] else "\\*"
    return f"{rate:.0f} ({100 * (rate / setting['published_tflops'] - 1):+.0f} %), {row[f'{whose}_peak_bytes'] / 1e9:.0f} GB{star}"


def _parts(row: Row, whose: str) -> str:
    """Shares of a step: computation of the stage that computes most, and means over ranks of exposed communication and waiting."""
    names = [f"{whose}_{part}_ns" for part in ("compute", "exposed", "bubble")]
    return ", ".join(f"{100 * row[name] / row[f'{whose}_step_ns']:.0f}" for name in names) + " %" if names[0] in row else ""


@claim
def published() -> str:
    """Each setting: the rate that its source reports, and the simulated ones."""
    rows = []
    for name, setting in _settings().items():
        if name == BESIDE:
            continue
        row, gpus = _shown(setting), f"{setting['gpus']:,}"
        words = dict(word.rsplit(" ", 1) for word in row["layout"].split(", "))
        flags = ["sequence split"] if "sequence-parallel" in setting.get("flags", "") else []
        sharded = [f"sharding {words['sharding']}"] if words["sharding"] != "1" else []
        told = ", ".join([*(f"{key} {words[key]}" for key in ("pp", "mp", "dp", "vpp", "m") if words[key] != "1"), *sharded, *flags])
        precision = f" ({setting['precision']})" if setting["precision"] != "bfloat16" else ""
        rows.append(
            [
                name if "," in name else f"{name}, {gpus} GPUs",
                told,
                f"[{setting['published_tflops']:.0f}]({setting['source']}){precision}",
                _cell(setting, row, PADDLES),
                _parts(row, PADDLES),
                _cell(setting, row, OURS),
                setting.get("differs", ""),
            ]
        )
    parts = "its step: computation, exposed communication, waiting"
    return table(["model", "layout", "published", "Paddle's plan", parts, "Interlace's plan", "differs"], rows)


@claim
def published_in_short() -> str:
    """How far simulated rates are from those that the sources report."""
    told = []
    known = [(each, _shown(each)) for name, each in _settings().items() if each["precision"] == "bfloat16" and name != BESIDE]
    for whose, name in ((PADDLES, "Paddle's plan"), (OURS, "Interlace's")):
        off = [_rate(each, row, whose) / each["published_tflops"] - 1 for each, row in known if whose in _plans(row)]
        told.append(f"{span(off, 0)} with {name} ({len(off)} settings)")
    errors = sorted(row[f"{whose}_rel_error"] for _, row in known for whose in _plans(row))
    share = f"{100 * errors[0]:.0f} to {100 * errors[-1]:.0f} %"
    return (
        f"in bfloat16, simulated rates differ from those of the sources by {' and by '.join(told)}; the cost model expects errors of "
        f"{share} for these steps"
    )


@claim
def published_ahead() -> str:
    """How much faster the published layout is than the recommended one, each with the faster of both plans that fits in memory."""
    chosen = raw("layouts.json")["cases"]["GPT-3 175B, 1,024 GPUs"]["layouts"][0]
    theirs, mine = (
        min(row[f"{whose}_step_ns"] for whose in _plans(row) if row[f"{whose}_fits"]) for row in (_shown(_settings()[BESIDE]), chosen)
    )
    return f"the published layout takes {100 * (1 - theirs / mine):.0f} % less time than the recommended one"


@claim
def published_and_chosen() -> str:
    """The published layout of 175B on 1,024 GPUs and the one that a search recommends, with the batch of the search."""
    setting = _settings()[BESIDE]
    chosen = raw("layouts.json")["cases"]["GPT-3 175B, 1,024 GPUs"]["layouts"][0]
    rows = []
    for told, row in (("recommended", chosen), *(("published", row) for row in setting["layouts"])):
        steps = [f"{row[f'{whose}_step_ns'] / 1e6:,.0f} ms: {_cell(setting, row, whose)}" for whose in _plans(row)]
        rows.append([told, row["layout"], *steps, *["not planned"] * (2 - len(steps))])
    return table(["", "layout", "Paddle's plan", "Interlace's plan"], rows)
