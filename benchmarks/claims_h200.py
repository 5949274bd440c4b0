"""Claims about plans measured on H200s, their peaks, and what was simulated of them."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from claiming import ROOT, Row, by_case, claim, fullest_gb, median_ms, ms_and_range, raw, span, table

sys.path.insert(0, str(ROOT))

from benchmarks.gpu import results
from interlace.report.accuracy import HOST_BOUND, count_order, place_of

FORMS = ("column", "dx-first", "mixed", "zb-h1", "lag-0-1", "lag-1", "lag-1-2", "lag-2", "auto", "auto-8gb", "offload-0.5", "offload-1")
PEAKS = (("hidden 4096, seq 4096", "peak-gpt-h4096-s4096-pp2"), ("hidden 2048, seq 8192", "peak-gpt-h2048-s8192-pp2"))
LATE = 1.2
"""A step that takes this many times the median, or more, counts as one of the rare late steps."""
BY_COPIES = "waits by copies out"
"""In names of sittings in which host waits were copies to the host, as they no longer are."""
HELD = ("in_use", "outside")
"""What a GPU holds, parameters included."""
KEPT = 0.02
"""A plan counts as within the baseline's memory if it exceeds it by at most this share: the limit allows 1 %, and runs of one plan differ
by as much."""


LATER = ("testbed_two_gpus", "testbed_captured", "testbed_settled", "testbed_step_to_step", "testbed_own_calibration")
"""Files of runs since 2026-11-26: layouts and layers of the 13B size; issued and launched steps; steps that follow each other without a
pause; plans chosen by the time from one step to the next, and programs that recompute by hand; plans made with a calibrated profile."""


class Pair(NamedTuple):
    """A plan's run and the baseline's run of the same case and sitting."""

    ours: Row
    stock: Row

    @property
    def gain(self) -> float:
        """Median step of the baseline over that of the plan, minus 1."""
        return median_ms(self.stock) / median_ms(self.ours) - 1

    @property
    def simulated_gain(self) -> float:
        """The same for simulated steps."""
        return float(self.stock["simulated"]["step_ms"] / self.ours["simulated"]["step_ms"] - 1)

    def limited_gain(self, when: str = "simulated") -> float:
        """The same with the power limit; `when` names the prediction."""
        return _limited_ms(self.stock, when) / _limited_ms(self.ours, when) - 1

    @property
    def held(self) -> list[float]:
        """How much more tensors and pools take on the fullest rank, as shares of the baseline's."""
        return [fullest_gb(self.ours, key) / fullest_gb(self.stock, key) - 1 for key in ("allocated", "reserved")]

    @property
    def same_bits(self) -> str:
        """Whether the run has the baseline's bits, for tables."""
        return "yes" if self.ours["bits"] == self.stock["bits"] else "no"

    def more(self, key: str) -> float:
        """How much more the first rank holds at its peak, as a share of the baseline's."""
        ours, stock = (row["peak_bytes_by_rank"][0][key] for row in self)
        return float(ours / stock - 1)


def layers() -> list[Row]:
    """Completed runs with layers of the 6.7B size, without small cases that only compare losses."""
    return [row for row in raw("h200/testbed_layers.json")["runs"] if "step_ms" in row and not row["case"].startswith("small")]


def pairs(plans: Sequence[str]) -> list[Pair]:
    """Runs of these plans that have a run of the baseline in the same sitting, without cases that only compare peaks and cases bound by the
    host."""
    rows = [*layers(), *(row for name in LATER for row in raw(f"h200/{name}.json")["runs"] if not HOST_BOUND.match(row["case"]))]
    found = {results.run_of(row): row for row in rows if "step_ms" in row and not row["case"].startswith("peak")}
    both = ((row, found.get((case, "stock", sitting))) for (case, plan, sitting), row in found.items() if plan in plans)
    return [Pair(row, stock) for row, stock in both if stock]


def by_place(found: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Pairs by the mesh axes of their case and whether it recomputes by hand, small worlds first."""
    groups: dict[str, list[Pair]] = {}
    for pair in found:
        by_hand = ", recomputation by hand" if "-recomputed" in pair.ours["case"] else ""
        groups.setdefault(place_of(pair.ours["case"]) + by_hand, []).append(pair)
    return dict(sorted(groups.items(), key=lambda item: (item[1][0].ours["world"], "pp" in item[0], item[0])))


@claim
def step_times() -> str:
    """Step times of every case and plan, and the gain over the baseline of the same sitting."""
    return results.step_table(layers())


@claim
def gains() -> str:
    """Smallest and largest gain of each form, by mesh axes."""
    found = {form: by_place(pairs([form])) for form in FORMS}
    places = by_place(pairs(FORMS))
    return table(
        ["gain over the baseline (cases)", *FORMS],
        (
            [
                place,
                *(
                    f"{span(pair.gain for pair in found[form][place])} ({len(found[form][place])})" if place in found[form] else ""
                    for form in FORMS
                ),
            ]
            for place in places
        ),
    )


@claim
def gains_in_readme() -> str:
    """Smallest and largest gain of the default and of the main forms, by mesh axes, with the latest sitting of each case."""
    forms = ("auto", "dx-first", "mixed")
    found = {form: by_place(_newest(pairs([form]))) for form in forms}
    rows = by_place(pairs(forms))
    cells = {(form, place): f"{span(pair.gain for pair in here)} ({len(here)})" for form in forms for place, here in found[form].items()}
    return table(
        ["gain over the baseline (cases)", *(f"`{form}`" for form in forms)],
        ([place, *(cells.get((form, place), "not measured") for form in forms)] for place in rows),
    )


def _newest(found: Iterable[Pair]) -> list[Pair]:
    """The pair of the latest sitting for each case and plan; the end of a case's name may say how sittings differ."""
    by_case: dict[tuple[str, str], Pair] = {}
    for pair in sorted(found, key=lambda pair: pair.ours["sitting"]):
        by_case[re.sub(r"-(auto|slabs|unthrottled|sendrecv)$", "", pair.ours["case"]), pair.ours["plan"]] = pair
    return list(by_case.values())


@claim
def gains_in_short() -> str:
    """The gains of the main forms in one sentence."""
    said = []
    for form in ("auto", "auto-8gb", "mixed", "dx-first", "zb-h1", "lag-1"):
        ranges = "; ".join(f"{place} {span(pair.gain for pair in here)}" for place, here in by_place(pairs([form])).items())
        said.append(f"`{form}`: {ranges}")
    now = [pair.gain for pair in pairs(["offload-1"]) if BY_COPIES not in pair.ours["sitting"]]
    return (
        f"the gain over the baseline, smallest to largest of all cases: {'. '.join(said)}. Offload of everything that can move, "
        f"with today's host waits: {span(now)}"
    )


@claim
def memory() -> str:
    """How much more than with the baseline the first rank holds."""
    rows = []
    for form in ("auto", "auto-8gb", "dx-first", "mixed", "zb-h1", "lag-1", "lag-1-2", "offload-1"):
        found = pairs([form])
        if not found:
            continue
        more = [[pair.more(key) for pair in found] for key in ("allocated", "reserved")]
        rows.append([form, str(len(found)), *(f"{span(each, 0)}, {sum(share <= 0.005 for share in each)}" for each in more)])
    head = ["first rank's peak against the baseline's", "cases"]
    return table([*head, *(f"{what}: range, cases within the baseline's" for what in ("tensors", "pools reserve"))], rows)


@claim
def comm_alone() -> str:
    """Communication while no computation runs, in a traced step of GPT, mp 4."""
    found = {row["plan"]: row["traced_step"] for row in layers() if row["case"] == "gpt-s4096-mp4-b2"}
    names = {"stock": "baseline", "column": "column", "dx-first": "dx-first", "mixed": "mixed"}
    return ", ".join(f"{name} {found[plan]['comm_alone_us'] / 1e3:.1f} ms" for plan, name in names.items())


@claim
def stretched() -> str:
    """Times of collectives and products in the traced steps of the baseline and of `mixed`."""
    found = {row["plan"]: row["kernels_us"] for row in layers() if row["case"] == "gpt-s2048-mp4-b4"}
    took = {kernel: [found[plan][kernel]["total"] / 1e3 for plan in ("stock", "mixed")] for kernel in ("gemm", "all_reduce")}
    products, reduces = took["gemm"], took["all_reduce"]
    return f"products {products[0]:.1f} -> {products[1]:.1f} ms, all_reduces {reduces[0]:.1f} -> {reduces[1]:.1f}"


@claim
def repeated() -> str:
    """How far two runs of the baseline are apart, and how far the steps of a run are."""
    again = [abs(pair.gain) for pair in pairs(["stock-again"])]
    runs = [[step / median_ms(row) for step in row["steps_ms"][2:-1]] for row in layers()]
    steps = [step for run in runs for step in run]
    kept = [[step for step in run if step <= LATE] for run in runs]
    late = sum(step > LATE for step in steps)
    within = [max(run) / min(run) - 1 for run in kept]
    return (
        f"two runs of the baseline in one session differ by {100 * min(again):.1f} to {100 * max(again):.1f} % ({len(again)} pairs). "
        f"The slowest step of a run takes {100 * statistics.median(within):.1f} % longer than the fastest in the median, up to "
        f"{100 * max(within):.0f} %, without the {late} of {len(steps)} steps that took {LATE} to {max(steps):.1f} times the median"
    )


@claim
def traced() -> str:
    """How much longer the traced step is than the median of the others."""
    longer = [row["traced_step"]["device_us"] / 1e3 / median_ms(row) - 1 for row in layers()]
    return f"{100 * min(longer):.0f} to {100 * max(longer):.0f} %"


@claim
def offload_cost() -> str:
    """Step of plans with offload over the same plans without it, in sittings with today's host waits."""
    runs = {results.run_of(row): median_ms(row) for row in layers() if BY_COPIES not in row["sitting"]}
    groups: dict[str, list[tuple[float, str]]] = {}
    for (case, plan, sitting), took in runs.items():
        if plan == "offload-1" and (case, "dx-first", sitting) in runs:
            groups.setdefault(place_of(case), []).append((took / runs[case, "dx-first", sitting] - 1, case))
    said = {place: ", ".join(f"{100 * share:+.1f} % ({case})" for share, case in sorted(found)) for place, found in groups.items()}
    return "; ".join(f"{place} {each}" for place, each in said.items())


@claim
def host_waits() -> str:
    """Plans with and without host waits."""
    runs = {results.run_of(row): row for row in layers()}
    rows = []
    for (case, plan, sitting), free in runs.items():
        if plan.endswith("-free") and (held := runs.get((case, plan.removesuffix("-free"), sitting))):
            times = (f"{row['step_ms']['median']:.1f} ms, {row['peak_bytes_by_rank'][0]['reserved'] / 1e9:.1f} GB" for row in (held, free))
            rows.append([case, plan.removesuffix("-free"), *times])
    return table(["case", "plan", "with waits: step, reserved", "free host"], rows)


@claim
def bits() -> str:
    """Which runs were compared with the baseline, and whose last loss the others have."""
    data = raw("h200/testbed_layers.json")
    runs, args = data["runs"], data["args"]
    compared = [row for row in runs if "losses_equal_stock" in row]
    same = sum(row["losses_equal_stock"] and row["parameters_equal_stock"] for row in compared)
    others = [row for row in runs if "losses" in row and "losses_equal_stock" not in row]
    stocks: dict[str, set[float]] = {}
    for row in runs:
        if row["plan"].startswith("stock"):
            stocks.setdefault(args[row["case"]], set()).add(row["losses"][-1])
    like = [row for row in others if row["losses"][-1] in stocks.get(args[row["case"]], ())]
    lone = [row for row in others if args[row["case"]] not in stocks]
    unlike = [row for row in others if row not in like and row not in lone]
    two = sum(len(each) > 1 for each in stocks.values())
    failed = sum("failed" in row for row in runs)
    names = ", ".join(f"`{row['case']}` {row['plan']}" for row in unlike)
    return (
        f"of {len(runs)} runs ({failed} failed), {len(compared)} have a baseline in the same session, and {same} of these have its "
        "losses of every step and its parameters after the last step, bit for bit. "
        f"Of {len(others)} runs without one, {len(like)} have the last loss of a baseline with the same arguments in another session; "
        f"number of runs for which there is no such baseline: {len(lone)}; number whose last loss differs from all of them: "
        f"{len(unlike)}{f' ({names})' * bool(unlike)}. The baseline's own last loss differs between sessions in {two} cases"
    )


# -- peaks -----------------------------------------------------------------------------------------------------------


def peak_rows() -> dict[tuple[str, str], Row]:
    """The runs of the peak cases."""
    return {(row["case"], row["plan"]): row for row in layers() if row["case"].startswith("peak")}


@claim
def peaks() -> str:
    """Bytes held by tensors, measured and planned."""
    found = peak_rows()

    def held(plan: str) -> list[int]:
        return [each["allocated"] for _, case in PEAKS for each in found[case, plan]["peak_bytes_by_rank"]]

    def planned(plan: str) -> list[int]:
        return [size for _, case in PEAKS for size in found[case, plan]["simulated"]["in_order_peak_bytes_by_rank"]]

    rows = [
        ("plain, measured", held("plain")),
        ("offload, measured", held("offload")),
        ("saved, measured", [a - b for a, b in zip(held("plain"), held("offload"), strict=True)]),
        ("saved, planned (in issue order)", [a - b for a, b in zip(planned("plain"), planned("offload"), strict=True)]),
    ]
    head = ["bytes held by tensors, stage", *(word for name, _ in PEAKS for word in (f"{name}: first", "last"))]
    return table(head, ([name, *(f"{size:,}" for size in sizes)] for name, sizes in rows))


@claim
def peaks_held() -> str:
    """What streams hold and pools reserve without and with offload, and the steps."""
    found = peak_rows()

    def said(key: str, rank: int) -> str:
        sizes = ([found[case, plan]["peak_bytes_by_rank"][rank][key] / 1e9 for plan in ("plain", "offload")] for _, case in PEAKS)
        return " and ".join(f"{plain:.2f} -> {offload:.2f}" for plain, offload in sizes)

    took = ([median_ms(found[case, plan]) for plan in ("plain", "offload")] for _, case in PEAKS)
    steps = " and ".join(f"{plain:.1f} -> {offload:.1f}" for plain, offload in took)
    return (
        "with what side streams hold (`in_use`, workspaces included): "
        f"first stages {said('in_use', 0)} GB, last {said('in_use', 1)}. "
        f"Pools reserve {said('reserved', 0)} GB on first stages, {said('reserved', 1)} on last ones. Steps: {steps} ms"
    )


# -- simulated -------------------------------------------------------------------------------------------------------


@claim
def accuracy() -> str:
    """Errors of simulated steps and peaks, and how many pairs of plans are in the right order, of all runs."""
    return results.accuracy_table(layers())


@claim
def order() -> str:
    """How many pairs of plans come in the right order, of all runs and without offload."""
    every, without = (count_order(rows) for rows in (layers(), [row for row in layers() if "offload" not in row["plan"]]))
    return f"{every[0]} of {every[1]} pairs of plans (without offload {without[0]} of {without[1]})"


@claim
def gains_simulated() -> str:
    """Simulated gains against measured ones."""
    found = [pair for pair in pairs(["dx-first", "mixed"]) if "step_ms" in pair.ours.get("simulated", {})]
    more = sum(pair.simulated_gain > pair.gain for pair in found)
    ratio = statistics.median(pair.simulated_gain / pair.gain for pair in found)
    return f"simulated gains of `dx-first` and `mixed` exceed measured ones in {more} of {len(found)} runs; median ratio {ratio:.1f}"


@claim
def measured_budgets() -> str:
    """Steps and peaks under memory budgets, planned and measured, of each case in its newest sitting with budgets."""
    newest: dict[str, str] = {}
    for row in layers():
        if row["plan"].startswith(results.BUDGET):
            newest[row["case"]] = max(row["sitting"], newest.get(row["case"], ""))
    return results.budget_table([row for row in layers() if row["sitting"] == newest.get(row["case"])])


@claim
def delays() -> str:
    """Plans with delayed transfers, without, and with transfers that wait but are issued where they were; and their sitting's baseline."""
    compared = {row["sitting"] for row in layers() if row["plan"] == "auto-in-place"}
    runs = {
        results.run_of(row): row
        for row in layers()
        if "step_ms" in row and ("transfers delayed" in row["sitting"] or row["sitting"] in compared)
    }
    plans = ("zb-h1-undelayed", "zb-h1", "auto-undelayed", "auto-in-place", "auto", "mixed", "lag-1")
    rows = []
    for case, sitting in dict.fromkeys((case, sitting) for case, _, sitting in runs):
        stock = runs.get((case, "stock", sitting))
        if stock is None or not any((case, plan, sitting) in runs for plan in plans):
            continue
        ran = (runs.get((case, plan, sitting)) for plan in plans)
        base, took = median_ms(stock), [median_ms(row) if row else 0.0 for row in ran]
        cells = (f"{each:.1f} ({100 * (base / each - 1):+.1f} %)" if each else "" for each in took)
        rows.append([f"{case}, {sitting.split(',')[0]}", f"{base:.1f}", *cells])
    return table(["case, day and time of the session", "baseline", *plans], rows)


def _defaults() -> list[tuple[str, Row, Row]]:
    """Case -> the baseline's run and the default's, of the latest session."""
    found = by_case(*(f"h200/{name}.json" for name in LATER))
    both = ((case, plans["stock"], plans["auto"]) for case, plans in found.items() if {"stock", "auto"} <= set(plans))
    return [each for each in both if "step_ms" in each[2]]


@claim
def default_memory() -> str:
    """What the fullest GPU holds with the default and with the baseline, planned and measured."""
    rows = []
    for case, stock, auto in _defaults():
        planned = [max(row["simulated"]["held_peak_bytes_by_rank"]) / 1e9 for row in (stock, auto)]
        held, pools = ([fullest_gb(row, key, "outside") for row in (stock, auto)] for key in ("in_use", "reserved"))
        cells = [f"{one:.2f}, {other:.2f}" for one, other in zip(planned, held, strict=True)]
        rows.append(
            [
                case,
                *cells,
                f"{100 * (held[1] / held[0] - 1):+.1f} %",
                f"{pools[0]:.2f}, {pools[1]:.2f} ({100 * (pools[1] / pools[0] - 1):+.1f} %)",
            ]
        )
    return table(
        ["GB of the fullest GPU", "baseline: planned, measured", "default", "measured, against the baseline's", "pools reserve"], rows
    )


@claim
def default_memory_kept() -> str:
    """How often the default keeps to the baseline's memory."""
    shares = [fullest_gb(auto, *HELD) / fullest_gb(stock, *HELD) - 1 for _, stock, auto in _defaults()]
    kept = sum(share <= KEPT for share in shares)
    return (
        f"{kept} of {len(shares)} cases hold at most {100 * KEPT:.0f} % more than the baseline, the others up to {100 * max(shares):.1f} %"
    )


@claim
def default_memory_beyond() -> str:
    """Where the default holds more than the baseline: compared with what was planned, and the workspace of kernels, which is in no plan."""
    beyond = [(stock, auto) for _, stock, auto in _defaults() if fullest_gb(auto, *HELD) > (1 + KEPT) * fullest_gb(stock, *HELD)]
    planned_gb = [tuple(max(row["simulated"]["held_peak_bytes_by_rank"]) / 1e9 for row in pair) for pair in beyond]
    workspaces = [fullest_gb(auto, "workspace") for _, auto in beyond]
    more = [fullest_gb(auto, *HELD) - plan for (_, auto), (_, plan) in zip(beyond, planned_gb, strict=True)]
    explained = sum(gb <= workspace for gb, workspace in zip(more, workspaces, strict=True))
    less = sum(fullest_gb(stock, *HELD) < 0.99 * plan for (stock, _), (plan, _) in zip(beyond, planned_gb, strict=True))
    return (
        f"in {explained} of these {len(beyond)} cases, the default holds at most what was planned and the workspace of its kernels, "
        f"{min(workspaces):.2f} to {max(workspaces):.2f} GB; in {less} the baseline holds at least 1 % less than planned"
    )


def _pools() -> dict[tuple[str, str, str], Row]:
    """Runs with pools as Paddle's: (case, plan, before or now) -> the latest run."""
    return {(row["case"], row["plan"], row["code"]): row for row in sorted(raw("h200/pools.json")["rows"], key=lambda row: row["when"])}


def _moved_all() -> Iterable[tuple[Row, Row, Row]]:
    """Cases in which activations are moved: the baseline of the same time, the run before decision 027, and the run with it."""
    found = _pools()
    for (case, plan, code), row in found.items():
        if plan.startswith("offload") and code == "now":
            yield found[case, "stock", "now"], found[case, plan, "before"], row


@claim
def pools_of_copies_back() -> str:
    """Tensors, pools and steps of runs that move activations, and the same before copies back used the compute stream's pool."""
    rows = []
    for stock, before, now in _moved_all():
        tensors, *pools = (f"{max(gb):.2f}" for gb in (now["tensors_gb"], stock["pools_gb"], before["pools_gb"], now["pools_gb"]))
        steps = [f"{r['step_ms']['median']:.1f} ({r['step_ms']['min']:.1f} to {r['step_ms']['max']:.1f})" for r in (stock, before, now)]
        rows.append([f"{now['case']} {now['plan']}", f"{max(stock['tensors_gb']):.2f}", tensors, *pools, *steps])
    head = [
        "plan (fullest rank; GB, ms)",
        "tensors: baseline",
        "plan",
        "pools: baseline",
        "before",
        "now",
        "step: baseline",
        "before",
        "now",
    ]
    return table(head, rows)


@claim
def pools_of_copies_back_in_short() -> str:
    """The range of what decision 027 changed."""
    changes = [
        (max(now["pools_gb"]) / max(before["pools_gb"]) - 1, median_ms(now) / median_ms(before) - 1) for _, before, now in _moved_all()
    ]
    pools, steps = ([change[k] for change in changes] for k in (0, 1))
    return f"Pools take {span(pools)}, steps {span(steps)} ({len(changes)} plans, the latest run of each)"


@claim
def pools_of_state() -> str:
    """Tensors and pools of plans that move optimizer state, and of plans of the default that move none or replace recomputation."""
    found = _pools()
    rows = []
    for (case, plan, code), row in found.items():
        if code == "now" and (plan.startswith("budget") or plan == "auto"):
            stock = found[case, "stock", "now"]
            shares = [max(row[key]) / max(stock[key]) - 1 for key in ("tensors_gb", "pools_gb")]
            gain = median_ms(stock) / median_ms(row) - 1
            rows.append([f"{case} {plan}", *(f"{100 * share:+.0f} %" for share in shares), f"{100 * gain:+.1f} %"])
    return table(["plan against the baseline", "tensors", "pools", "gain"], rows)


@claim
def returned_memory() -> str:
    """Steps, gains, tensors and pools of plans of decision 029 against the baseline of the same session, and their simulated gains. Each
    plan is of the code of its date."""
    return _against_baselines([row for row in raw("h200/returned_memory.json")["runs"] if "bits" in row])


@claim
def budgets_on_one_h200() -> str:
    """The same of plans under memory budgets on one GPU."""
    return _against_baselines(raw("h200/budgets_one_gpu.json")["runs"])


@claim
def limited_pools() -> str:
    """The same of plans with the default limit and of plans whose simulated pools take no more than the baseline's."""
    return _against_baselines(raw("h200/limited_pools.json")["runs"])


SLOW_KERNELS = ("zoo-vision-pp2", "zoo-diffusion-pp2")
"""Networks whose convolutions, or products and sums over broadcast dims, take several times as long on the testbed as with libraries."""
ZOO_PROFILES = ("simulated", "simulated_now")
"""Predictions with the profile with which plans were made, and with what it has got since."""


def _pairs_of(runs: Sequence[Row]) -> list[Pair]:
    """The runs of plans, each with the baseline of its sitting."""
    stock = {(row["case"], row["sitting"]): row for row in runs if row["plan"] == "stock"}
    ordered = sorted(runs, key=lambda row: (row["case"], row["plan"], row["sitting"]))
    return [Pair(row, stock[row["case"], row["sitting"]]) for row in ordered if row["plan"] != "stock"]


def _zoo() -> list[Pair]:
    return _pairs_of(raw("h200/zoo.json")["runs"])


def _networks() -> list[Pair]:
    """Those of networks that had not run before."""
    return [pair for pair in _zoo() if pair.ours["case"].startswith("zoo-")]


def _limited_ms(row: Row, when: str) -> float:
    return float(row[when]["limited"]["step_ms"])


def _error(row: Row, when: str) -> float:
    return _limited_ms(row, when) / median_ms(row) - 1


@claim
def zoo_measured() -> str:
    """Networks of the zoo on two GPUs: steps, gains, errors of predictions then and now, tensors and pools, bits."""
    rows = []
    for pair in _zoo():
        row, own = pair
        gains = [pair.gain, *map(pair.limited_gain, ZOO_PROFILES)]
        errors = [f"{100 * _error(own, when):+.1f}, {100 * _error(row, when):+.1f} %" for when in ZOO_PROFILES]
        shares = [f"{100 * each:+.1f} %" for each in (*gains, *pair.held)]
        steps = ms_and_range(own), ms_and_range(row)
        rows.append([f"{row['case']} {row['plan']}", *steps, *shares[:3], *errors, *shares[3:], pair.same_bits])
    head = ["plan", "baseline, ms", "plan, ms", "gain", "simulated then", "now", "errors of steps then", "now", "tensors", "pools"]
    return table([*head, "the baseline's bits"], rows)


@claim
def zoo_measured_in_short() -> str:
    """The range of gains of the default, and errors of steps with today's profile."""
    every = _networks()
    found = [pair for pair in every if pair.ours["plan"] == "auto"]
    gains = [pair.gain for pair in found]
    usual = [row for pair in found if pair.ours["case"] not in SLOW_KERNELS for row in pair]
    then, now = (sorted(abs(_error(row, when)) for row in usual) for when in ZOO_PROFILES)
    same, losses = sum(pair.same_bits == "yes" for pair in every), sum(gain < 0 for gain in gains)
    (middle_then, most_then), (middle_now, most_now) = (
        (f"{100 * statistics.median(each):.1f}", f"{100 * each[-1]:.1f}") for each in (then, now)
    )
    return (
        f"{len(found)} networks, gains of {span(gains)}, {losses} of them a loss, the baseline's bits in {same} of {len(every)} runs; "
        f"simulated steps were off by {middle_then} % in the median and {most_then} % at most when plans were made, and are by "
        f"{middle_now} and {most_now} % with today's profile ({len(usual)} runs, without {' and '.join(SLOW_KERNELS)}, "
        "whose kernels are the testbed's own)"
    )


@claim
def zoo_gains_in_short() -> str:
    """The range of gains of the default, and how many are losses."""
    gains = [pair.gain for pair in _networks() if pair.ours["plan"] == "auto"]
    return f"{span(gains)} in {len(gains)} cases, {sum(gain < 0 for gain in gains)} of them a loss"


def _of_one_gpu() -> list[list[Row]]:
    """Runs of single GPUs that had calibrated themselves just before, by sitting."""
    runs = list(raw("h200/own_calibration_one_gpu.json")["runs"])
    return [[row for row in runs if row["sitting"] == sitting] for sitting in sorted({row["sitting"] for row in runs})]


@claim
def padded_vocabulary() -> str:
    """Steps of BERT with and without a padded vocabulary on two GPUs, and what each GPU's own profile predicts to be saved."""
    told = []
    for sitting in _of_one_gpu():
        words, padded = ([row for row in sitting if row["case"] == f"bert-{count}"] for count in (30522, 30528))
        steps = [[median_ms(row) for row in runs] for runs in (words, padded)]
        ranges = (f"{min(each):.1f} to {max(each):.1f} ms ({len(each)} runs)" for each in steps)
        plain, shorter = map(statistics.median, steps)
        before, after = ({row["plan"]: row for row in runs if "simulated" in row} for runs in (words, padded))
        at_full = [before[plan]["simulated"]["step_ms"] - after[plan]["simulated"]["step_ms"] for plan in before]
        limited = [_limited_ms(before[plan], "simulated") - _limited_ms(after[plan], "simulated") for plan in before]
        told.append(
            f"{' and '.join(ranges)}, {plain - shorter:.1f} ms or {100 * (plain - shorter) / plain:.1f} % less in the median "
            f"(predicted: {min(at_full):.1f} to {max(at_full):.1f} ms at full clock, "
            f"{min(limited):.1f} to {max(limited):.1f} with the power limit)"
        )
    return "; ".join(told)


@claim
def own_calibration_of_one_gpu() -> str:
    """Errors of steps of plans made with the profile of the GPU itself, by sitting."""
    told = []
    for sitting in _of_one_gpu():
        runs = [row for row in sitting if "simulated" in row]
        bert, usual = ([row for row in runs if row["case"].startswith("bert-") == is_bert] for is_bert in (True, False))
        errors, of_bert = (span([_error(row, "simulated") for row in each]) for each in (usual, bert))
        full = span([float(row["simulated"]["step_ms"]) / median_ms(row) - 1 for row in bert])
        told.append(f"GPT and Llama {errors} ({len(usual)} runs), BERT {of_bert} ({len(bert)}; at full clock {full})")
    return "; ".join(told)


@claim
def idle_in_steps_of_bert() -> str:
    """Of BERT's traced steps in the last sitting: gradients of embeddings, and for how long no kernel runs within and between steps."""
    traced = [row for row in _of_one_gpu()[-1] if row["case"].startswith("bert-")]
    steps = [row["traced_step"] for row in traced]
    gradients = [row["kernels_us"]["embedding_grad"]["total"] / 1e3 for row in traced]
    within = [(step["device_us"] - step["busy_us"]["compute"]) / 1e3 for step in steps]
    between = [each / 1e3 for step in steps for each in step["still_between_us"]]
    told = zip(
        ("gradients of embeddings", "no kernel runs within a step for", "and between two for"), (gradients, within, between), strict=True
    )
    return f"{', '.join(f'{what} {min(each):.1f} to {max(each):.1f} ms' for what, each in told)} ({len(traced)} runs)"


@claim
def allocated_on_compute() -> str:
    """What collectives that write into the compute stream's pool change, against plans without that."""
    plans = {(row["case"], row["plan"]): row for row, _ in _zoo()}
    pairs = [(row, plans[case, "auto"]) for (case, plan), row in plans.items() if plan == "auto-own-pools"]
    pools = [fullest_gb(now, "reserved") / fullest_gb(before, "reserved") - 1 for before, now in pairs]
    steps = [median_ms(now) / median_ms(before) - 1 for before, now in pairs]
    return f"pools {span(pools)}, steps {span(steps)} ({len(pairs)} plans)"


@claim
def little_memory() -> str:
    """Steps with little memory free on each GPU, and what pools had taken; or why the run ended."""
    runs = raw("h200/little_memory_pp2.json")["runs"]
    bits = {tuple(row["bits"].values()) for row in runs if "bits" in row}
    rows = []
    for row in runs:
        step, pools, same = "out of memory", "", ""
        if "failed" not in row:
            times = row["step_ms"]
            step = f"{times['median']:.1f} ({times['min']:.1f} to {times['max']:.1f})"
            pools, same = f"{max(row['reserved_peak_gb']):.2f}", "yes" if len(bits) == 1 else "no"
        rows.append([f"{row['free_bytes'] / 1e9:.1f}", row["plan"], step, pools, same])
    return table(["GB free", "plan", "step, ms", "pools, GB", "the baseline's bits"], rows)


def _against_baselines(runs: Sequence[Row]) -> str:
    """A row for each plan: its step and that of the baseline of the same session; gain, simulated gain, tensors and pools; bits."""
    rows = []
    for pair in _pairs_of(runs):
        row, own = pair
        shares = [f"{100 * share:+.1f} %" for share in (pair.gain, pair.limited_gain(), *pair.held)]
        steps = ms_and_range(own), ms_and_range(row)
        rows.append([f"{row['case']} {row['plan']}", row["sitting"][5:16], *steps, *shares, pair.same_bits])
    return table(["plan", "date", "baseline, ms", "plan, ms", "gain", "simulated", "tensors", "pools", "the baseline's bits"], rows)
