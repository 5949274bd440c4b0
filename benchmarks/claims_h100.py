"""Claims about plans measured on one H100, and about the same cases measured again on an H200."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence

from claiming import ROOT, Row, by_case, claim, fullest_gb, median_ms, ms_and_range, raw, span, table

sys.path.insert(0, str(ROOT))

from benchmarks.gpu import results
from benchmarks.gpu.by_kind import OTHER
from benchmarks.gpu.training import LONG_RUN, WARM_OF_LONG
from interlace.grouping import grouped
from interlace.report import accuracy

SETTLED = "h100/testbed_settled.json"
OWN_CALIBRATION = "testbed_own_calibration.json"
"""Runs of H100s with plans that were made with the profile of their host; of H200s also with that of another host."""
CALIBRATED_PLANS = "testbed_calibrated_plans.json", OWN_CALIBRATION
"""Runs of H100s with plans that were made with calibrated profiles: of another host, and of the host that trained."""
STEP_TO_STEP = "testbed_step_to_step.json"
"""Runs of H200s with plans that were chosen by the time from one step to the next, and of programs that recompute by hand."""
FEWEST_COPIES = 100
"""Steps with fewer copies to the device do not tell how much the two directions slow each other down."""
LARGE = 0.05
"""Smaller gains are left out where errors are relative to gains, as they differ too much between hosts."""
KINDS = (
    ("products", ("gemm",)),
    ("attention", ("attention",)),
    ("transposes", ("transpose",)),
    ("casts", ("cast",)),
    ("gradients of additions, products by element and means", ("add_grad", "multiply_grad", "mean")),
    ("layer norms, GELU, SiLU", ("layer_norm", "gelu", "silu")),
    ("all else", ("",)),
)
"""Name in tables -> prefixes of operation kinds; the first match counts."""
MODELS = {"gpt-2": "GPT, 2 layers", "gpt-4": "GPT, 4 layers", "llama-2": "Llama, 2 layers", "llama-4": "Llama, 4 layers"}
"""Prefix of case names -> name in tables."""
SHORT_PAUSE_US = 100
BUDGETS_ALONE = "2026-11-27 01:46, 1 H100"
"""The session of budgets on one GPU."""
SUMS_LATE = "2026-11-26 22:16"
"""A session whose plans still fetched, at the end of the step, the losses that data parallelism sums."""
BEFORE = "2026-11-23 11:40"
"""Prefix of the name of the H200's sitting of the same cases."""


def steps() -> list[Row]:
    """Runs on the H100 that were also simulated."""
    return [row for row in raw("h100/testbed_layers.json")["runs"] if "simulated" in row]


@claim
def h100_steps() -> str:
    """Errors of steps and peaks simulated for an H100, and how much runs differ."""
    every, rows = raw("h100/testbed_layers.json")["runs"], steps()
    stock, ours = ([row for row in rows if (row["plan"] == "stock") == paddles] for paddles in (True, False))
    right, pairs = accuracy.count_order(rows)
    off = max(abs(accuracy.peak_error(row)) for row in rows)
    stock_off, ours_off = ([accuracy.step_error(row) for row in found] for found in (stock, ours))
    medians = {results.run_of(row): median_ms(row) for row in every}
    again = [abs(took / medians[case, "stock", sitting] - 1) for (case, plan, sitting), took in medians.items() if plan == "stock-again"]
    within = [row["step_ms"]["max"] / row["step_ms"]["min"] - 1 for row in every]
    same = sum(row["losses_equal_stock"] and row["parameters_equal_stock"] for row in every)
    amount = statistics.median(map(abs, ours_off))
    return (
        f"simulated steps are off by {span(stock_off)} for Paddle's baseline ({len(stock)} runs) and by {span(ours_off)} for "
        f"Interlace's plans ({len(ours)}; median of the absolute errors {100 * amount:.1f} %), peaks by at most {100 * off:.2f} %; {right} "
        f"of {pairs} pairs of plans of a case are in the right order. The slowest step of a run takes "
        f"{100 * statistics.median(within):.1f} % longer than the fastest in the median, up to {100 * max(within):.1f} %; two runs of the "
        f"baseline differ by {100 * min(again):.1f} to {100 * max(again):.1f} %. {same} of {len(every)} runs have the baseline's losses "
        "of every step and all its parameters, bit for bit"
    )


@claim
def h100_budgets() -> str:
    """Planned and measured steps and peaks on the H100."""
    return results.budget_table(steps())


@claim
def h100_costs() -> str:
    """What budgets cost on the H100 and in the H200's sitting of 11:40, compared with Paddle's baseline of the sitting."""
    stored = [row for row in raw("h200/testbed_layers.json")["runs"] if row["sitting"].startswith(BEFORE)]
    shown = []
    for name, rows in (("H100", steps()), ("H200", stored)):
        stock = {row["case"]: row for row in rows if row["plan"] == "stock"}
        budgets = [row for row in rows if row["plan"].startswith(results.BUDGET)]
        dearer = [
            (
                median_ms(row) / median_ms(stock[row["case"]]),
                row["simulated"]["step_ms"] / stock[row["case"]]["simulated"]["step_ms"],
            )
            for row in budgets
        ]
        off = [100 * (simulated - measured) for measured, simulated in dearer]
        shown.append(f"{name} {span(measured - 1 for measured, _ in dearer)} (simulation off by {min(off):+.1f} to {max(off):+.1f} points)")
    return "; ".join(shown)


@claim
def h100_kinds() -> str:
    """Milliseconds by kind in traced steps of `auto`, measured and predicted."""
    found = {step["case"].partition("-layers")[0]: step["kinds"] for step in raw("h100/by_kind.json")["steps"] if step["plan"] == "auto"}
    sums: dict[str, list[tuple[float, ...]]] = {}
    for name, _ in KINDS:
        sums[name] = [
            tuple(
                sum(took[key] for kind, took in found[case].items() if kind != OTHER and _group(kind) == name) / 1e3
                for key in ("measured_us", "fastest_us", "predicted_us")
            )
            for case in MODELS
        ]
    sums["together"] = [tuple(map(sum, zip(*column, strict=True))) for column in zip(*sums.values(), strict=True)]
    head = ["ms per step: measured, with all of a size at the time of the fastest, profile h100", *MODELS.values()]
    return table(head, ([name, *(", ".join(f"{ms:.1f}" for ms in cell) for cell in cells)] for name, cells in sums.items()))


def _group(kind: str) -> str:
    return next(name for name, begins in KINDS if kind.startswith(begins))


@claim
def h200_at_clock() -> str:
    """Operations of traced steps on H200s compared with the profile at the clock that the GPU had."""
    apart = _apart_at_clock("h200/by_kind_at_clock.json")
    rows = ([name, str(len(found)), f"{100 * statistics.median(found):+.1f} %", span(found)] for name, found in apart.items())
    return table(["kinds", "steps", "profile against measured, median", "range"], rows)


@claim
def h100_calibrated_kinds() -> str:
    """Operations of traced steps on H100s compared with the shipped profile and with times that `interlace calibrate` measured."""
    shipped, found = (_apart_at_clock(f"h100/by_kind_{name}.json") for name in ("at_clock", "calibrated"))
    rows = (
        [name, str(len(each)), *(f"{100 * statistics.median(apart):+.1f} % ({span(apart)})" for apart in (shipped[name], each))]
        for name, each in found.items()
    )
    return table(["kinds", "steps", "h100 against measured", "calibrated against measured"], rows)


@claim
def h100_calibrated_steps() -> str:
    """Errors of steps and gains with all profiles."""
    return _steps_with("h100", "calibrated", "calibrated again")


@claim
def calibrated_plans() -> str:
    """Steps of the baseline and of plans that were made with a calibrated profile, on one or two hosts, and gains as predicted now with
    three profiles for the plan of the last host."""
    every = (accuracy.gains(found["runs"], "limited") for found in raw("h100/accuracy.json")["devices"].values())
    profiles = [{(row["file"], row["case"]): (gain, predicted) for row, gain, predicted in gains} for gains in every]
    runs, rows = [by_case(f"h100/{file}") for file in CALIBRATED_PLANS], []
    for case in sorted(runs[0] | runs[1]):
        there = [(file, case) for file, found in zip(CALIBRATED_PLANS, runs, strict=True) if case in found]
        found = runs[CALIBRATED_PLANS.index(there[-1][0])][case]
        measured = [profiles[0][file, case][0] if (file, case) in there else None for file in CALIBRATED_PLANS]
        gains = [*measured, *(now[there[-1]][1] for now in profiles)]
        took = (ms_and_range(found[plan]) for plan in ("stock", "auto"))
        shown = ("-" if gain is None else f"{100 * gain:+.1f} %" for gain in gains)
        rows.append([f"`{case}`", str(found["stock"]["world"]), *took, *shown])
    columns = ["gain, first hosts", "gain, last host", "predicted with h100", "with calibrated", "with calibrated again"]
    return table(["case", "GPUs", "baseline, ms (range)", "`auto`, ms (range)", *columns], rows)


@claim
def h100_own_host() -> str:
    """Errors of a calibrated profile on the host where it was measured."""
    return _own_host("h100", CALIBRATED_PLANS[-1], "calibrated_again")


@claim
def h200_calibrated_steps() -> str:
    """The same on H200s."""
    return _steps_with("h200", "calibrated", "calibrated again", "calibrated third", "calibrated fourth")


@claim
def h200_order() -> str:
    """Pairs of plans in order by profile, and how far apart measured steps of the others are at most."""
    pairs = [list(accuracy.pairs_of(found["runs"], "limited")) for found in raw("h200/accuracy.json")["devices"].values()]
    rights = ", ".join(f"{sum(is_right for _, is_right in each)} of {len(each)}" for each in pairs)
    wrong = max((apart for each in pairs for apart, is_right in each if not is_right), default=0.0)
    order = f"{rights} pairs of plans are in order (`h200` and the calibrated profiles)"
    return f"{order}; steps of the others differ by at most {100 * wrong:.1f} %"


@claim
def h200_repeated_baselines() -> str:
    """How far apart the baseline's steps of one case are in different sessions."""
    found, *_ = raw("h200/accuracy.json")["devices"].values()
    baselines = grouped((row["case"], median_ms(row)) for row in found["runs"] if row["plan"] == accuracy.BASELINE)
    apart = [max(each) / min(each) - 1 for each in baselines.values() if len(each) > 1]
    return (
        f"the baseline's steps of one case differ between sessions by {100 * statistics.median(apart):.1f} % in the median, by up to "
        f"{100 * max(apart):.1f} % ({len(apart)} cases)"
    )


@claim
def h200_moved_activations() -> str:
    """Errors of steps that move half or all of the activations."""
    found = raw("h200/accuracy.json")["devices"]["benchmarks/results/h200/calibrated_fourth.json"]["runs"]
    moved = [
        accuracy.step_error(row, "limited")
        for row in found
        if row["file"] == OWN_CALIBRATION and accuracy.kind_of(row["plan"]) == "offload"
    ]
    return (
        f"{len(moved)} runs at pp 2 are off by {100 * statistics.median(map(abs, moved)):.1f} % in the median, "
        f"from {100 * min(moved):+.1f} to {100 * max(moved):+.1f} %"
    )


@claim
def h200_step_to_step() -> str:
    """Steps, gains with those that the profiles predict now, and memory of the baseline and of plans, all of one session."""
    return _gains_of(STEP_TO_STEP)


@claim
def h200_own_calibration() -> str:
    """The same of plans that were made with a profile of another host, and with that of the host that trained."""
    return _gains_of(OWN_CALIBRATION)


@claim
def h200_own_host() -> str:
    """Errors of a calibrated profile on the host where it was measured."""
    return _own_host("h200", OWN_CALIBRATION, "calibrated_third", "2026-11-29 15:35")


@claim
def h200_own_host_again() -> str:
    """The same on another host."""
    return _own_host("h200", OWN_CALIBRATION, "calibrated_fourth", "2026-11-29 18:16")


@claim
def h200_copies_in_steps() -> str:
    """How much longer copies to the device take than copies of the same tensors to the host, in traced steps that move activations."""
    every = (row.get("kernels_us", {}) for row in raw(f"h200/{OWN_CALIBRATION}")["runs"])
    traced = [kernels for kernels in every if "copy_h2d" in kernels and kernels["copy_h2d"]["n"] >= FEWEST_COPIES]
    slower = [kernels["copy_h2d"]["total"] / kernels["copy_d2h"]["total"] for kernels in traced]
    return f"{min(slower):.2f} to {max(slower):.2f} times as long as those to the host ({len(slower)} traced steps)"


def _gains_of(file: str) -> str:
    """A row for each plan of a file of H200s: steps, the measured gain and those that all profiles predict, and memory."""
    devices = raw("h200/accuracy.json")["devices"].values()
    runs = {(row["case"], row["plan"], row["sitting"]): row for row in raw(f"h200/{file}")["runs"]}
    predicted = [
        {(row["case"], row["plan"], row["sitting"]): pair for row, *pair in accuracy.gains(found["runs"], "limited") if row["file"] == file}
        for found in devices
    ]
    rows = []
    for key, (gain, _) in sorted(predicted[0].items()):
        case, plan, sitting = key
        both = runs[case, "stock", sitting], runs[key]
        shown = (f"{100 * each:+.1f} %" for each in (gain, *(found[key][1] for found in predicted)))
        made = ", ".join(sitting.split(", ")[2:])
        memory = (" -> ".join(f"{fullest_gb(row, name):.2f}" for row in both) for name in ("in_use", "reserved"))
        rows.append([f"`{case}`", f"`{plan}`{made and f', {made}'}", *map(ms_and_range, both), *shown, *memory])
    names = ["predicted with h200", *(f"with calibrated{which}" for which in ("", " again", " third", " fourth")), "GB in use", "pools"]
    return table(["case", "plan", "baseline, ms (range)", "plan, ms (range)", "gain", *names], rows)


def _own_host(device: str, file: str, profile: str, sitting: str = "") -> str:
    """Errors of a profile in the runs of a file, or of one session, and of their gains that are large enough to repeat."""
    found = raw(f"{device}/accuracy.json")["devices"][f"benchmarks/results/{device}/{profile}.json"]
    own = [row for row in found["runs"] if row["file"] == file and row["sitting"].startswith(sitting)]
    off = [accuracy.step_error(row, "limited") for row in own]
    gains = [abs(predicted / gain - 1) for _, gain, predicted in accuracy.gains(own, "limited") if gain >= LARGE]
    return (
        f"steps of {len(own)} runs are off by {100 * statistics.fmean(map(abs, off)):.1f} % in the mean and "
        f"{100 * max(off, key=abs):+.1f} % at worst, {len(gains)} gains of {100 * LARGE:.0f} % or more by "
        f"{100 * statistics.median(gains):.0f} % in the median"
    )


def _steps_with(device: str, *others: str) -> str:
    devices = raw(f"{device}/accuracy.json")["devices"]
    rows = []
    for name, found in zip((device, *others), devices.values(), strict=True):
        for label, has_stages in (("all", None), ("one stage", False), ("several stages", True)):
            own = [row for row in found["runs"] if has_stages is None or ("pp" in accuracy.place_of(row["case"])) == has_stages]
            said = accuracy.errors(own, "limited")
            steps = f"{100 * said.step_bias:+.1f} %, {100 * said.step_worst:+.1f} %"
            gains = f"{said.gain_ratio:.2f}, {100 * said.gain_median:.0f} %"
            rows.append(
                [name, label, str(said.steps), steps, gains, f"{said.right_sign} of {said.gains}", f"{said.right_order} of {said.pairs}"]
            )
    return table(["profile", "runs", "steps", "median, worst", "gains: ratio, error", "sign", "order of pairs"], rows)


def _apart_at_clock(name: str) -> dict[str, list[float]]:
    """Group of kinds -> for each traced step, the profile's error at the clock that the GPU had."""
    apart: dict[str, list[float]] = {name: [] for name in (*(name for name, _ in KINDS), "together")}
    for step in raw(name)["steps"]:
        sums: dict[str, list[tuple[float, float]]] = {name: [] for name in apart}
        for kind, took in step["kinds"].items():
            if kind != OTHER and "at_clock_us" in took:
                for group in (_group(kind), "together"):
                    sums[group].append((took["measured_us"], took["at_clock_us"]))
        for group, found in sums.items():
            if found:
                measured, predicted = map(sum, zip(*found, strict=True))
                apart[group].append(predicted / measured - 1)
    return apart


@claim
def h100_products() -> str:
    """Times of products in traced steps compared with the profile, as measured and with the time of the fastest of each size."""
    tooks = [took for step in raw("h100/by_kind.json")["steps"] for kind, took in step["kinds"].items() if kind == "gemm bfloat16"]
    return (
        f"{span(took['measured_us'] / took['predicted_us'] - 1 for took in tooks)} against the profile; with all products of a size at "
        f"the time of the fastest, {span(took['fastest_us'] / took['predicted_us'] - 1 for took in tooks)}"
    )


@claim
def waits_at_once() -> str:
    """How much slower products run beside two waiting transfers, and the same products of the same stage beside one."""
    beside: dict[int, dict[tuple[int, float], float]] = {1: {}, 2: {}}
    for row in raw("h100/waits_at_once.json")["products"]:
        beside[row["waiting"]][row["rank"], row["apart_us"]] = row["stretch"]
    both = [(beside[1][key], two) for key, two in beside[2].items() if key in beside[1]]
    more = [two - one for one, two in both]
    return (
        f"{len(both) // 2} products on two middle stages take {_range(one for one, _ in both)} times as long beside one transfer "
        f"that waits and {_range(two for _, two in both)} times beside two, {statistics.fmean(more):.2f} more on average"
    )


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def _gains(found: dict[str, Row], plan: str) -> tuple[float, float]:
    """Measured gain of a plan over the baseline, and gain simulated with the power limit, in percent."""
    times = [(median_ms(row), row["simulated"]["limited"]["step_ms"]) for row in (found["stock"], found[plan])]
    measured, simulated = (100 * (stock / ours - 1) for stock, ours in zip(*times, strict=True))
    return measured, simulated


@claim
def back_to_back() -> str:
    """Steps of four H100 that follow each other without a pause: measured, and simulated with the power limit."""
    rows = []
    for case, found in by_case("h100/testbed_back_to_back.json").items():
        for plan, name in (("stock", "Paddle's baseline"), ("auto", "`auto`")):
            if plan in found:
                row = found[plan]
                step, expected = median_ms(row), row["simulated"]["limited"]["step_ms"]
                gains = ("", "") if plan == "stock" else (f"{gain:+.1f} %" for gain in _gains(found, plan))
                rows.append([f"`{case}`", name, ms_and_range(row), f"{expected:.1f} ({100 * (expected / step - 1):+.1f} %)", *gains])
    return table(["case", "plan", "step, ms (range)", "simulated", "gain", "gain, simulated"], rows)


@claim
def back_to_back_in_short() -> str:
    """Gains of the default in the same steps, with and without a pipeline."""
    both = {case: _gains(found, "auto") for case, found in by_case("h100/testbed_back_to_back.json").items() if "auto" in found}
    short = {
        case
        for case, found in by_case("h100/testbed_back_to_back.json").items()
        if any(len(row["steps_ms"]) < LONG_RUN for row in found.values())
    }
    told = []
    for name, pipelines in (("with a pipeline", True), ("without one", False)):
        gains = [each for case, each in both.items() if ("-pp" in case) == pipelines and case not in short]
        if not gains:
            continue
        measured, off = ([gain for gain, _ in gains], [simulated - gain for gain, simulated in gains])
        told.append(
            f"{name} {min(measured):+.1f} to {max(measured):+.1f} %, simulation off by {min(off):+.1f} to {max(off):+.1f} points "
            f"({len(gains)} cases)"
        )
    return "; ".join(told)


@claim
def settled_runs() -> str:
    """Gains of plans by sitting, in steps after memory pools have settled."""
    runs = [row for row in raw(SETTLED)["runs"] if row.get("first_step") is not None]
    baselines = {(row["case"], row["sitting"]): median_ms(row) for row in runs if row["plan"] == "stock"}
    plans = [row for row in runs if row["plan"] != "stock"]
    pairs = grouped(((row["case"], row["plan"]), (baselines[row["case"], row["sitting"]], median_ms(row))) for row in plans)
    rows = []
    for (case, plan), steps in pairs.items():
        took = ", ".join(f"{baseline:.1f} and {own:.1f}" for baseline, own in steps)
        rows.append([f"`{case}`", plan, took, ", ".join(f"{100 * (baseline / own - 1):+.1f}" for baseline, own in steps)])
    return table(["case", "plan", "baseline and plan, ms", "gain %"], rows)


@claim
def settling() -> str:
    """Steps of `dx-first` at mp 2 with dp 2 on four H100, before and after pools have settled."""
    rows = [row for row in raw(SETTLED)["runs"] if row["plan"] == "dx-first" and row.get("first_step") and "-mp2-dp2-" in row["case"]]
    (row,) = rows
    before, after = row["steps_ms"][WARM_OF_LONG : row["first_step"]], median_ms(row)
    return f"{statistics.median(before):.0f} ms in steps {WARM_OF_LONG + 1} to {row['first_step']}, {after:.0f} ms in later ones"


@claim
def losses_late() -> str:
    """Gains of the default in consecutive steps of two H100, with plans that fetched their losses at the end of the step."""
    runs = raw("h100/testbed_losses_late.json")["runs"]
    return "; ".join(f"{name} {_range_of_gains(runs, has)}" for name, has in (("with a pipeline", True), ("without one", False)))


def _of_losses_early() -> dict[str, list[Row]]:
    """Runs without a pipeline, by GPU and mesh: plans that fetch their losses early, and the baselines of the same sittings."""
    found: dict[str, list[Row]] = {}
    for name, folder in (("H100", "h100"), ("H200", "h200")):
        for row in raw(f"{folder}/testbed_losses_early.json")["runs"]:
            mesh = "dp 2" if "-dp2" in row["case"] else "mp 2"
            if "-pp2" not in row["case"] and (mesh == "mp 2" or not row["sitting"].startswith(SUMS_LATE)):
                found.setdefault(f"{name}, {mesh}", []).append(row)
    return found


@claim
def losses_early() -> str:
    """Gains of the default without a pipeline, with plans that fetch their losses early."""
    return "; ".join(f"{name}: {_range_of_gains(runs, has_stages=False)}" for name, runs in _of_losses_early().items())


@claim
def sums_late_and_early() -> str:
    """Steps of plans at dp 2 that fetch sums of losses late and early, and of the baseline in the same sittings."""
    steps: dict[tuple[str, str], list[str]] = {}
    for row in raw("h200/testbed_losses_early.json")["runs"]:
        if "-dp2" in row["case"]:
            steps.setdefault((row["case"].partition("-")[0], row["plan"]), []).append(f"{median_ms(row):.1f}")
    told = {"gpt": "GPT", "llama": "Llama", "stock": "baseline"}
    return "; ".join(f"{told[model]} {told.get(plan, plan)} {' and '.join(each)} ms" for (model, plan), each in sorted(steps.items()))


@claim
def pauses_between_steps() -> str:
    """How long computation idled between traced steps without a pipeline, in plans that fetch their losses early."""
    runs = [row for runs in _of_losses_early().values() for row in runs if not row["plan"].startswith("stock")]
    pauses = sorted(each for row in runs for each in row["traced_step"]["still_between_us"])
    short = [each for each in pauses if each < SHORT_PAUSE_US]
    others = " and ".join(f"{each / 1e3:.1f}" for each in pauses[len(short) :])
    return (
        f"{len(short)} of {len(pauses)} pauses between their traced steps took {short[0]:.0f} to {short[-1]:.0f} us, the others {others} ms"
    )


@claim
def budgets_on_one_gpu() -> str:
    """Plans under memory budgets and the baseline: what tensors hold, and the step, planned and measured."""
    runs = [row for row in raw("h100/testbed_between_steps.json")["runs"] if row["sitting"] == BUDGETS_ALONE]
    own, rows = {row["case"]: row for row in runs if row["plan"] == "stock"}, []
    for row in runs:
        if row["plan"] == "stock":
            continue
        base, sim = own[row["case"]], row["simulated"]
        held = [sum(each["peak_bytes_by_rank"][0][part] for part in ("allocated", "outside")) / 1e9 for each in (base, row)]
        steps = [
            100 * (one / other - 1)
            for one, other in (
                (sim["limited"]["step_ms"], base["simulated"]["limited"]["step_ms"]),
                (median_ms(row), median_ms(base)),
            )
        ]
        planned = max(sim["in_order_peak_bytes_by_rank"]) / 1e9
        rows.append(
            [row["case"].partition("-s2048")[0], row["plan"], f"{held[0]:.2f}", f"{planned:.2f}, {held[1]:.2f}", f"{median_ms(row):.1f}"]
            + [f"{each:+.1f}" for each in steps]
        )
    heads = ["case", "plan", "baseline GB", "tensors GB, planned and measured", "step ms", "over the baseline %, simulated", "measured"]
    return table(heads, sorted(rows))


@claim
def beside_collectives() -> str:
    """How much computation and collectives slow each other in traced steps, by which of them began first."""
    rows = []
    for collective, kinds in raw("h100/beside_collectives.json")["beside"].items():
        for kind, row in kinds.items():
            name, _, first = kind.partition(" ")
            cells = [f"{row['op']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})"]
            rows.append([collective, name, "computation" if first else "collective", *cells, f"{row['beside']:.2f}", f"{row['ms']:.0f}"])
    return table(["collective", "beside", "began first", "slowdown of computation", "of the collective", "ms together"], rows)


@claim
def gains_of_long_runs() -> str:
    """Paddle's baseline and `auto` in runs of 20 steps on two and four H100, with simulated and measured gains."""
    rows = []
    for base, own in _long_runs():
        steps = [f"{median_ms(row):.1f}, {_limited(row):.1f}" for row in (base, own)]
        rows.append([own["case"], *steps, *(f"{gain:+.1f}" for gain in _measured_and_simulated(base, own))])
    return table(["case", "baseline ms, measured and simulated", "`auto` ms", "gain %, measured", "simulated"], rows)


@claim
def gains_of_long_runs_in_short() -> str:
    """The range of these gains for each mesh."""
    found = grouped((accuracy.place_of(own["case"]), _measured_and_simulated(base, own)) for base, own in _long_runs())
    said = []
    for place, gains in sorted(found.items()):
        ranges = [f"{min(each):+.1f} to {max(each):+.1f} %" if len(each) > 1 else f"{each[0]:+.1f} %" for each in zip(*gains, strict=True)]
        said.append(f"{place} {ranges[0]}, {ranges[1]} simulated ({len(gains)})")
    return "; ".join(said)


def _long_runs() -> list[tuple[Row, Row]]:
    """Paddle's baseline and `auto` of each case in runs of 20 steps."""
    pairs = []
    for file, sitting in (("between_steps", "2026-11-27 03:40"), ("four_gpus", "2026-11-27 03:19")):
        found: dict[str, dict[str, Row]] = {}
        for row in raw(f"h100/testbed_{file}.json")["runs"]:
            if row["sitting"].startswith(sitting) and "step_ms" in row:
                found.setdefault(row["case"], {})[row["plan"]] = row
        pairs += [(plans["stock"], plans["auto"]) for _, plans in sorted(found.items()) if {"stock", "auto"} <= plans.keys()]
    return pairs


def _measured_and_simulated(base: Row, own: Row) -> tuple[float, float]:
    """Measured and simulated gain, in percent."""
    return 100 * (1 - median_ms(own) / median_ms(base)), 100 * (1 - _limited(own) / _limited(base))


def _limited(row: Row) -> float:
    return float(row["simulated"]["limited"]["step_ms"])


def _range_of_gains(runs: Sequence[Row], has_stages: bool) -> str:
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in runs:
        if ("-pp2" in row["case"]) == has_stages:
            found.setdefault((row["case"], row["sitting"]), {})[row["plan"]] = row
    gains = [_gains(plans, "auto") for plans in found.values() if {"stock", "auto"} <= plans.keys()]
    ranges = (f"{min(each):+.1f} to {max(each):+.1f} %" for each in zip(*gains, strict=True))
    return f"{', '.join(ranges)} simulated ({len(gains)})"


@claim
def power() -> str:
    """Clocks and power while steps were measured."""
    found = raw("h100/power.json")["machines"]
    said = []
    for name, each in found.items():
        low, middle, high = (f"{each['sm_mhz'][key]:.0f}" for key in ("one_in_20_below", "median", "one_in_20_above"))
        said.append(f"{name.split()[1]} {middle} MHz (nine in ten samples {low} to {high}) at {each['watts']['median']:.0f} W")
    return "; ".join(said)


@claim
def h200_again() -> str:
    """The cases of 11:40 on an H200, planned and measured again."""
    before = {(row["case"], row["plan"]): row for row in raw("h200/testbed_layers.json")["runs"] if row["sitting"].startswith(BEFORE)}
    pairs = [(row, before[row["case"], row["plan"]]) for row in raw("h200/testbed_repeat.json")["runs"]]
    took = (median_ms(row) / median_ms(old) - 1 for row, old in pairs)
    held = (row["peak_bytes_by_rank"][0]["allocated"] / old["peak_bytes_by_rank"][0]["allocated"] - 1 for row, old in pairs)
    bits = sum(row["bits"] == old["bits"] and row["losses_equal_stock"] and row["parameters_equal_stock"] for row, old in pairs)
    return (
        f"{len(pairs)} of the 20 runs: steps changed by {span(took)}, peaks of tensors by {span(held, 2)}, and losses and parameters "
        f"are the same, bit for bit, in {bits}"
    )
