"""Claims about Interlace's own speed and memory on CPUs, and what was only simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from claiming import claim, raw, span, table
from measuring import NAMED_FORMS


@claim
def road() -> str:
    """Share of Paddle's own build, and where the time goes."""
    said = []
    for row, dtype in zip(raw("road.json")["rows"], ("float32", "bfloat16"), strict=True):
        took, share = {name: each["median"] for name, each in row["cpu_s"].items()}, row["share"]
        parts = ", ".join(f"{name} {took[name]:.2f}" for name in ("capture", "passes", "checks", "lowering"))
        said.append(
            f"{dtype}: share {share['min']:.2f} to {share['max']:.2f} in {share['runs']} processes, {took['interlace']:.1f} of "
            f"{took['paddle']:.1f} s ({parts})"
        )
    return "; ".join(said)


@claim
def executor() -> str:
    """Building jobs of many operations."""
    found = raw("executor.json")
    sizes, job, flagged = found["programs"], found["jobs"]["us_per_job"], found["jobs"]["us_per_job_traced"]
    numbers, built, held, issued = (
        " / ".join(words)
        for words in (
            [f"{row['ops']:,}" for row in sizes],
            [f"{row['build_cpu_s']['median']:.2g}" for row in sizes],
            [f"{row['mb']['median']:.0f}" for row in sizes],
            [f"{row['us_per_op']['median']:.1f}" for row in sizes],
        )
    )
    return (
        f"{numbers} operations build in {built} CPU seconds (exponent {found['build_grows_with_ops_to_the']}) and {held} MB. "
        f"Issuing one of these operations takes {issued} us, a job {job:.0f} us, {flagged:.0f} us with the flag"
    )


@claim
def dumps() -> str:
    """Size of the largest program, and times of its dump."""
    row = raw("dumps.json")["rows"][-1]
    took = ", ".join(f"{name} {row[f'{name}_s']['median']:.2f} s" for name in ("encode", "decode", "verify", "show", "parse"))
    return f"{row['ops']:,} operations: {row['bytes'] / 1e6:.1f} MB ({row['gzip_bytes'] / 1e6:.1f} MB gzip), {took}"


@claim
def check() -> str:
    """Seconds of the checker by size."""
    rows = raw("check.json")["rows"]
    took = " / ".join(f"{row['check_s']['median']:.3g}" for row in rows)
    sizes = " / ".join(f"{row['items_a_rank']:,}" for row in rows)
    each = [row["us_an_item"] for row in rows]
    return f"{took} CPU seconds at {sizes} operations issued on each rank: {min(each):.0f} to {max(each):.0f} us each"


@claim
def memory_model() -> str:
    """Predicted bytes compared with bytes held on the CPU."""
    found = raw("memory.json")
    return f"error {found['median_error_percent']} % in the median, {found['worst_error_percent']} % at worst"


@claim
def splitting() -> str:
    """Simulated gain of splitting products into parts."""
    rows = [row for rows in raw("splitting.json")["configurations"].values() for row in rows]
    free, slower = ([row["gain"] for row in rows if (row["overhead"] == 0) is exact] for exact in (True, False))
    return f"free parts {span(free)}, parts 5 % slower {span(slower)}"


@claim
def grid() -> str:
    """Number of points of the grid with the same bits."""
    rows = raw("grid.json")["rows"]
    return f"the same at {sum(row['same'] for row in rows)} of {len(rows)} points"


@claim
def simulator() -> str:
    """Seconds of one thread for plans of some million events, each part, and all of it for five million."""
    rows = [row for row in raw("simulator.json")["rows"] if row["events"] > 1e6]
    whole = [(row["lower_s"] + row["fast_split_memory_s"]) * 5e6 / row["events"] for row in rows]
    engine = [row["fast_5m_events_s"] for row in rows]
    said = "; ".join(
        f"{row['events'] / 1e6:.1f} million events ({row['plan']}): plans to arrays {row['lower_s']:.1f} s, events {row['fast_s']:.1f} s, "
        f"parts of the step {row['fast_split_s'] - row['fast_s']:.1f} s, memory {row['fast_split_memory_s'] - row['fast_split_s']:.1f} s"
        for row in rows
    )
    plain = [row["plain_over_fast"] for row in raw("simulator.json")["rows"] if "plain_over_fast" in row]
    return (
        f"{said}. 5 million take {min(whole):.1f} to {max(whole):.1f} s of one core in all, the events alone {min(engine):.1f} to "
        f"{max(engine):.1f}, for which the plain simulator takes {min(plain):.0f} to {max(plain):.0f} times as long"
    )


@claim
def stages() -> str:
    """CPU seconds of each command on large worlds."""
    names = ("dump", "plan", "check", "timeline", "report")
    head = ["ranks: pp x mp x dp", "layers", "micro-batches", "programs", *(f"`{name}` s" for name in names)]
    return table(
        head,
        [
            [
                f"{row['world']:,}: {row['pp']} x {row['mp']} x {row['dp']}",
                str(row["layers"]),
                str(row["micro_batches"]),
                str(row["programs"]),
                *("as above" if name == "dump" and row["built"] else f"{row[name]['cpu_s']:.1f}" for name in names),
            ]
            for row in raw("stages.json")["rows"]
        ],
    )


BOUNDS = ("bound_ms", "firm_bound_at_full_clock_ms", "firm_bound_ms")
"""Lower bounds of the step: without collectives and memory, with them, and with the power limit too."""


@claim
def schedules() -> str:
    """Simulated steps of every form, and the bounds."""
    return _schedules(raw("schedules.json")["rows"])


@claim
def schedules_over_bound() -> str:
    """How far `auto` is from the firm bound."""
    over = [row["auto"]["step_ms"] / row["firm_bound_ms"] - 1 for row in raw("schedules.json")["rows"]]
    return (
        f"its steps are {100 * min(over):.0f} to {100 * max(over):.0f} % above the firm bound, which leaves out offload "
        f"(median {100 * median(over):.1f}, {len(over)} cases)"
    )


def _schedules(rows: list[dict[str, Any]]) -> str:
    forms = ("stock", *NAMED_FORMS, "auto")
    return table(
        ["case (mp 2 unless stated), micro-batches", "bound, firm at the full clock, firm", *forms, "auto over these"],
        [
            [
                f"{row['case']}, {row['micro_batches']}",
                ", ".join(f"{row[name]:.0f}" for name in BOUNDS),
                *(_schedule(row[form], row["stock"]) for form in forms),
                ", ".join(f"{row['auto']['step_ms'] / row[name] - 1:+.0%}" for name in BOUNDS),
            ]
            for row in rows
        ],
    )


def _schedule(form: dict[str, Any], stock: dict[str, Any]) -> str:
    """Step, gain, exposed communication and bubble of the busiest stage, and the worst stage's peak."""
    if "why_not" in form:
        return "-"
    over = " over" if form["peak_bytes"] > 1.01 * stock["peak_bytes"] else ""
    gain = "" if form is stock else f" ({stock['step_ms'] / form['step_ms'] - 1:+.1%})"
    return f"{form['step_ms']:.0f}{gain}, {form['exposed_ms']:.0f} + {form['bubble_ms']:.0f}, {form['peak_bytes'] / 2**30:.1f}{over}"


@claim
def schedules_in_short() -> str:
    """Gains of `auto`, and how far it is ahead of the best form that needs no more memory."""
    gains, ahead = [], []
    rows = raw("schedules.json")["rows"]
    for row in rows:
        stock = row["stock"]
        others = [
            row[form]["step_ms"]
            for form in ("stock", *NAMED_FORMS)
            if "why_not" not in row[form] and row[form]["peak_bytes"] <= 1.01 * stock["peak_bytes"]
        ]
        gains.append(stock["step_ms"] / row["auto"]["step_ms"] - 1)
        ahead.append(stock["step_ms"] / row["auto"]["step_ms"] - stock["step_ms"] / min(others))
    return (
        f"`auto` gains {span(gains)} over Paddle's baseline in {len(gains)} cases, "
        f"{100 * min(ahead):.1f} to {100 * max(ahead):.1f} points more than the best other form that needs no more memory"
    )


NOT_FORMS = ("case", "ranks", "stages", "ops", "stock", *BOUNDS, "least_slowed_ms")
"""Fields of a row of the zoo that are not plans."""
MORE = "auto, budget 1.3"
"""Plans that may hold 30 % more than the baseline; they show what the limit costs."""


@claim
def zoo() -> str:
    """Plans of programs that no option was tuned for."""
    return zoo_table(raw("zoo.json")["rows"])


@claim
def zoo_in_short() -> str:
    """What plans gain there, how far they are from the firm bound, and their memory compared with the baseline's."""
    rows = raw("zoo.json")["rows"]
    return "; ".join(
        f"`{form}` ({len(found)} programs): {span(row['stock']['step_ms'] / row[form]['step_ms'] - 1 for row in found)} over the baseline, "
        f"{span(row[form]['step_ms'] / row['firm_bound_ms'] - 1 for row in found)} above the firm bound "
        f"(median {_median_over(found, form, 'firm_bound_ms'):.1f}; at the full clock {_median_over(found, form, BOUNDS[1]):.1f}), "
        f"memory {span(_held(row, form) for row in found)} compared with the baseline, with free blocks in pools "
        f"{span(_pools(row, form) for row in found)} (median {100 * median(_pools(row, form) for row in found):+.1f}); "
        f"number of programs on which a named form that needs no more memory is faster: "
        f"{sum(_best_named(row, form) < row[form]['step_ms'] for row in found)}"
        for form in ("auto",)
        if (found := [row for row in rows if row.get(form, {}).get("step_ms")])
    )


@claim
def zoo_pools() -> str:
    """What plans gain whose pools take no more than the baseline's, beside plans of the default."""
    form = "auto, pools 1.0"
    rows = [row for row in raw("zoo.json")["rows"] if row.get(form, {}).get("step_ms")]
    gains = {each: [row["stock"]["step_ms"] / row[each]["step_ms"] - 1 for row in rows] for each in ("auto", form)}
    longer = [row[form]["cpu_s"] / row["auto"]["cpu_s"] for row in rows if _pools(row, "auto") > 0]
    fit = sum(row[form]["pools_gib"] <= row["stock"]["pools_gib"] + 0.001 for row in rows)  # figures are rounded
    return (
        f"{span(gains[form])} over the baseline (median {100 * median(gains[form]):.1f}; by default {100 * median(gains['auto']):.1f}), in "
        f"{fit} of {len(rows)} programs with pools that take no more than the baseline's; for {sum(gain <= 0 for gain in gains[form])} "
        f"nothing faster than the baseline was found; planning takes {min(longer):.1f} to {max(longer):.1f} times as long where pools of "
        "the default do not fit"
    )


@claim
def zoo_distance() -> str:
    """Where the time of `auto`'s step goes on the stage that computes longest, beside the distance to the firm bound, and how far plans
    with more memory are from it."""
    lines = []
    for row in sorted(raw("zoo.json")["rows"], key=lambda row: row["firm_bound_ms"] / row["auto"]["step_ms"]):
        auto, parts = row["auto"], row["auto"]["busiest"]
        over, alone = auto["step_ms"] - row["firm_bound_ms"], parts["alone_ms"]
        slowed = f"{parts['beside_ms']:.1f} ({row['least_slowed_ms'][parts['stage']]:.1f})"
        figures = (f"{alone:.1f}", slowed, f"{parts['clock_ms']:.1f}", f"{parts['waits_ms']:.1f}")
        more = f"{row[MORE]['step_ms'] / row['firm_bound_ms'] - 1:+.1%}"
        lines.append([row["case"], f"{over / row['firm_bound_ms']:+.1%}, {over:.1f}", *figures, more])
    heads = ("computes alone", "slowed by what runs beside it (least by collectives)", "by the clock", "computes nothing")
    return table(["program", "`auto` over the firm bound, ms", *heads, "over the bound with 30 % more memory"], lines)


@claim
def zoo_more_memory() -> str:
    """How far plans that may hold more than the baseline are from the firm bound, and from plans of the default."""
    rows = raw("zoo.json")["rows"]
    shorter = [row["auto"]["step_ms"] / row[MORE]["step_ms"] - 1 for row in rows]
    return (
        f"{span(row[MORE]['step_ms'] / row['firm_bound_ms'] - 1 for row in rows)} above the firm bound (median "
        f"{_median_over(rows, MORE, 'firm_bound_ms'):.1f}), and {span(shorter)} faster than by default"
    )


def _median_over(rows: Sequence[Mapping[str, Any]], form: str, bound: str) -> float:
    """Median percentage by which steps exceed a bound."""
    return 100 * float(median(row[form]["step_ms"] / row[bound] - 1 for row in rows))


def zoo_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the zoo: gains over Paddle's baseline and, in brackets, memory compared with it; then `auto` over the firm bounds, and
    what allocator pools take."""
    forms = list(dict.fromkeys(name for row in rows for name in row if name not in (*NOT_FORMS, MORE)))
    lines = []
    for row in rows:
        stock, auto = row["stock"], row.get("auto", {})
        over = ", ".join(f"{auto['step_ms'] / row[bound] - 1:+.1%}" for bound in BOUNDS[1:]) if auto.get("step_ms") else ""
        cells = [_zoo_cell(row, form) if form in row else "" for form in forms]
        pools = [f"{stock['pools_gib']:.1f} GiB", *(_pools_cell(row, form) for form in forms if form.startswith("auto"))]
        ends = over, ", ".join(pools), f"{auto.get('cpu_s', '')}"
        lines.append([row["case"], f"{stock['step_ms']:.1f} ms, {stock['peak_gib']:.1f} GiB", *cells, *ends])
    heads = ("`auto` over the firm bound at the full clock, with the power limit", "pools: baseline, `auto`, budget, limited", "CPU s")
    return table(["program", "baseline", *forms, *heads], lines)


def _pools_cell(row: Mapping[str, Any], form: str) -> str:
    return f"{_pools(row, form):+.1%}" if row.get(form, {}).get("pools_gib") else "none"


def _pools(row: Mapping[str, Any], form: str) -> float:
    """How much more than the baseline's the pools of a plan take."""
    return float(row[form]["pools_gib"] / row["stock"]["pools_gib"] - 1)


def _zoo_cell(row: Mapping[str, Any], form: str) -> str:
    if row[form].get("step_ms") is None:
        return "none"
    return f"{row['stock']['step_ms'] / row[form]['step_ms'] - 1:+.1%} ({_held(row, form):+.1%})"


def _held(row: Mapping[str, Any], form: str) -> float:
    """How much more than the baseline a plan holds, alone or in the step of all."""
    held = max(row[form]["peak_gib"], row[form]["step_peak_gib"])
    return float(held / row["stock"]["peak_gib"] - 1)


def _best_named(row: Mapping[str, Any], form: str) -> float:
    """Step of the fastest named form that needs no more memory than a plan or the baseline, plus the thousandth that counts as equal."""
    most = max(_held(row, form), 0.0)
    steps = [row[each]["step_ms"] for each in NAMED_FORMS if row.get(each, {}).get("step_ms") and _held(row, each) <= most]
    return 1.001 * min(steps, default=float("inf"))


@claim
def budgets() -> str:
    """Steps under memory budgets, by what saves memory; recomputation by hand with Paddle's plan and with Interlace's."""
    rows = []
    for model in raw("budgets.json")["models"]:
        peak = model["by_hand"]["none"]["stock_peak_bytes"]
        for row in model["budgets"]:
            hand = [_by_hand(model["by_hand"][name], row["fraction"] * peak) for name in BY_HAND]
            budget = f"{row['fraction']:.0%}, {row['fraction'] * peak / 2**30:.1f} GiB"
            rows.append([model["model"], budget, *hand, *(_planned(row[name]) for name in OURS)])
    return table(["", "budget", *(f"recompute {name} by hand" for name in BY_HAND), *OURS], rows)


@claim
def exact() -> str:
    """Recomputation per micro-batch on the first stage: as plans choose it, and the least within the same peak."""
    rows = []
    for model in raw("budgets.json")["models"]:
        for row in model.get("exact", []):
            least = row.get("exact_ms")
            found = [f"{least:.2f}", f"{100 * (row['greedy_ms'] / least - 1):.0f} %"] if least else ["not proved", "-"]
            rows.append([model["model"], f"{row['groups']}", f"{row['part']:.0%}", f"{row['greedy_ms']:.2f}", *found])
    if not rows:
        raise ValueError("budgets.json has no rows of `exact`; run benchmarks/budgets.py")
    return table(["", "groups", "freed", "chosen, ms", "exact, ms", "gap"], rows)


BY_HAND, OURS = ("none", "attention", "full"), ("offload alone", "both")


def _by_hand(found: dict[str, Any], budget: float) -> str:
    """Recomputation by hand with Paddle's baseline, then with Interlace's plan without a budget."""
    return ", ".join("-" if step is None else f"{step:.0f}" for step in _steps_by_hand(found, budget))


def _steps_by_hand(found: dict[str, Any], budget: float) -> list[float | None]:
    """As `_by_hand`, in ms; None for steps that exceed the budget by more than 1 %, by which allocators round."""
    sides = (("stock_ms", "stock_peak_bytes"), ("step_ms", "peak_bytes"))
    return [found[ms] if found[held] <= 1.01 * budget else None for ms, held in sides]


@claim
def budget_aims() -> str:
    """What a budget costs: at 80 %, at the peak of full recomputation by hand, and compared with other means in the same memory."""
    rows = []
    for model in raw("budgets.json")["models"]:
        hand, row_of = model["by_hand"], {row["fraction"]: row for row in model["budgets"]}
        none, full, peak = hand["none"], hand["full"], hand["none"]["stock_peak_bytes"]
        free = min(none["step_ms"], row_of[1.0]["both"]["step_ms"])
        at_full = row_of[full["stock_peak_bytes"] / peak]["both"]["step_ms"]
        price, ours = full["stock_ms"] - none["stock_ms"], {at: row["both"] for at, row in row_of.items() if "step_ms" in row["both"]}
        over = {at: each["step_ms"] / fastest - 1 for at, each in ours.items() if (fastest := _fastest_other(hand, row_of[at], at * peak))}
        worst = max(over, key=lambda at: over[at])
        rows.append(
            [
                model["model"],
                f"{100 * (ours[0.8]['step_ms'] / free - 1):.1f} %" if 0.8 in ours else "cannot be kept",
                f"{full['stock_ms'] - at_full:.0f} of {price:.0f} ms ({(full['stock_ms'] - at_full) / price:.0%})",
                f"{100 * over[worst]:+.1f} % (at {worst:.0%})",
            ]
        )
    return table(
        [
            "",
            "80 % compared with no limit",
            "cost of full recomputation by hand that is won back, within its peak",
            "both compared with the fastest other in the same memory, at worst",
        ],
        rows,
    )


@claim
def budgets_in_short() -> str:
    """What 80 % of the baseline's peak costs, and what is won back of full recomputation by hand, over all models."""
    dearer, won, cannot = [], [], 0
    for model in raw("budgets.json")["models"]:
        hand, row_of = model["by_hand"], {row["fraction"]: row["both"] for row in model["budgets"]}
        none, full = hand["none"], hand["full"]
        free = min(none["step_ms"], row_of[1.0]["step_ms"])
        at_full = row_of[full["stock_peak_bytes"] / none["stock_peak_bytes"]]["step_ms"]
        won.append((full["stock_ms"] - at_full) / (full["stock_ms"] - none["stock_ms"]))
        if "step_ms" in row_of[0.8]:
            dearer.append(row_of[0.8]["step_ms"] / free - 1)
        else:
            cannot += 1
    kept = f"{cannot} cannot keep it" if cannot else "all keep it"
    return (
        f"a budget of 0.8 of the baseline's peak costs {100 * min(dearer):.1f} to {100 * max(dearer):.1f} % of the step ({len(dearer)} "
        f"models; {kept}); at the peak of full recomputation by hand {100 * min(won):.0f} to {100 * max(won):.0f} % of its cost is won back"
    )


def _fastest_other(hand: dict[str, Any], row: dict[str, Any], budget: float) -> float | None:
    """The fastest step in ms by recomputation by hand or offload alone; None where neither keeps the budget."""
    steps = [row["offload alone"].get("step_ms"), *(step for found in hand.values() for step in _steps_by_hand(found, budget))]
    return min((step for step in steps if step is not None), default=None)


def _planned(found: dict[str, Any]) -> str:
    return f"{found['step_ms']:.0f}" if "step_ms" in found else "-"


@claim
def recompute() -> str:
    """Steps and peaks of a program with full recomputation, by how much of it is left out; gains over the same order with all of it."""
    found = raw("recompute.json")
    lowered = found["lowered"]
    rows = [("Paddle's baseline", found["stock"]), ("Paddle's order as Interlace lowers it", lowered)]
    rows += [("without what nothing reads", found["unread"])]
    rows += [(f"budget {each['budget_bytes'] / 2**30:.1f} GiB", each) for each in found["budgets"] if "why_not" not in each]
    rows += [("the program built without recomputation, lowered alike", found["without"])]
    return table(
        ["simulated", "step ms", "gain", "live peak GiB", "peak on a GPU GiB"],
        [
            [
                name,
                f"{each['step_ms']:.1f}",
                f"{lowered['step_ms'] / each['step_ms'] - 1:+.1%}" if k > 1 else "",
                f"{each['peak_bytes'] / 2**30:.1f}",
                f"{each['gpu_peak_bytes'] / 2**30:.1f}",
            ]
            for k, (name, each) in enumerate(rows)
        ],
    )


@claim
def recompute_in_short() -> str:
    """The first and last rows of that table."""
    found = raw("recompute.json")
    lowered, unread, without = (found[name]["step_ms"] for name in ("lowered", "unread", "without"))
    return (
        f"{lowered:.1f} ms in Paddle's order as Interlace lowers it, {unread:.1f} ms without recomputing results that nothing reads, at "
        f"the same peak, and {without:.1f} ms without recomputation, which a budget of its peak also reaches"
    )


@claim
def exposed_in_short() -> str:
    """The share of the baseline's exposed communication that stays exposed, and the gain of the step."""
    rows = raw("collectives.json")["rows"]
    left, gains = zip(
        *((row["auto"]["exposed_ms"] / row["paddle"]["exposed_ms"], row["paddle"]["step_ms"] / row["auto"]["step_ms"] - 1) for row in rows),
        strict=True,
    )
    return (
        f"{100 * min(left):.0f} to {100 * max(left):.0f} % of the communication that the baseline exposes stays exposed, and steps "
        f"gain {span(gains)} ({len(rows)} cases of sequence, data and expert parallelism)"
    )


@claim
def exposed_collectives() -> str:
    """Exposed communication by case and kind, with Paddle's baseline and with Interlace's plan."""
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
    rows = []
    for row in raw("collectives.json")["rows"]:
        stock, ours = row["paddle"], row["auto"]
        share = f"{ours['exposed_ms']:.1f} ({ours['exposed_ms'] / stock['exposed_ms']:.0%})"
        of_kinds = ", ".join(f"{ours['exposed_by_kind_ms'].get(kind, 0.0):.1f}" for kind in kinds)
        rows.append([row["case"], f"{stock['step_ms']:.1f}, {ours['step_ms']:.1f}", f"{stock['exposed_ms']:.1f}", share, of_kinds])
    return table(
        ["simulated, H200; exposed ms (share of Paddle's baseline)", "step: Paddle, ours", "Paddle", "ours", f"{', '.join(kinds)}, ours"],
        rows,
    )
