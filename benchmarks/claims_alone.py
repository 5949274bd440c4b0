"""Claims about operations, collectives, the host and orders of operations, each measured alone on H200s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median, quantiles

import device_profile
from claiming import Row, claim, median_ms, raw, span, table

from interlace.cost_model.curves import Curve, Surface
from interlace.cost_model.model import ANY, by_variant, depth_of, sample_size, variant_of
from interlace.cost_model.profile import OpSample
from interlace.grouping import grouped
from interlace.report.accuracy import BASELINE, kind_of

FEWEST = 5
"""Least number of operations from which a figure of a kind is computed."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")


@claim
def prefetch_slack() -> str:
    """Offload with copies back issued with and without slack."""
    runs = {(row["case"], row["plan"]): median_ms(row) for row in raw("h200/testbed_variants.json")["runs"]}
    cases = [case for case, plan in runs if plan == "offload-1, reserve 0"]
    rows = ([f"prefetch_slack {share}", *(f"{runs[case, f'offload-1, reserve {share}']:.1f}" for case in cases)] for share in ("0", "0.25"))
    return table(["offload 1, ms (medians of nine steps, one session)", *cases], rows)


@claim
def operations() -> str:
    """Operations alone."""
    found = raw("h200/testbed_ops.json")["ops"]
    rate = ((name, each, f"{each['tflops']} TFLOP/s" if "tflops" in each else f"{each['gb_per_s']} GB/s") for name, each in found.items())
    return table(["operation alone, bfloat16", "median us", ""], ([name, str(each["median_us"]), shown] for name, each, shown in rate))


@claim
def left_out() -> str:
    """Samples of the H200's profile, each predicted from all others of its kind and type: the median and the 90 % quantile of errors."""
    profile, kinds = device_profile.profiles()["h200"], dict[tuple[str, str], list[OpSample]]()
    for sample in profile.ops:
        if "elements" not in sample.dims:  # such samples have depth 1 and no operand to transpose
            kinds.setdefault((sample.kind, sample.dtype), []).append(sample)
    rows = []
    for (kind, dtype), samples in sorted(kinds.items(), key=lambda each: each[0]):
        if len(samples) >= FEWEST:
            errors = zip(*errors_left_out(samples, profile.shortest_kernel_ns), strict=True)
            rows.append([f"{kind}, {dtype} ({len(samples)})", *(_middle_and_most(each) for each in errors)])
    return table(["kind (samples)", "one curve", "by transposes", "and by depth"], rows)


def errors_left_out(samples: Sequence[OpSample], floor_ns: float) -> Iterator[tuple[float, float, float]]:
    """For each sample, relative errors of a curve through all others, of a curve through those of them that the cost model uses for its
    variant, and of the latter separated by depth too."""
    for left in samples:
        others = [each for each in samples if each is not left]
        groups = dict(by_variant(others))
        like = groups.get(variant_of(left.dims), groups[ANY])
        size, surface = sample_size(left), Surface(((depth_of(each.dims), sample_size(each), each.dur_ns) for each in like), floor_ns)
        found = (_curve(others, floor_ns).at(size), _curve(like, floor_ns).at(size), surface.at(depth_of(left.dims), size))
        one, by_transposes, by_depth = (abs(each / left.dur_ns - 1) for each in found)
        yield one, by_transposes, by_depth


def _curve(samples: Sequence[OpSample], floor_ns: float) -> Curve:
    return Curve(((sample_size(each), each.dur_ns) for each in samples), floor_ns)


def _middle_and_most(errors: Sequence[float]) -> str:
    return f"{100 * median(errors):.1f}, {100 * quantiles(errors, n=10, method='inclusive')[-1]:.0f} %"


@claim
def collectives() -> str:
    """Collectives alone: time and bus bandwidth."""
    worlds, sizes = raw("h200/testbed_collectives.json")["worlds"], (4, 16, 64, 256)
    head = ["", *(f"{world} GPUs: 4 MiB" if size == 4 else str(size) for world in worlds for size in sizes)]
    found = {kind: [worlds[world][f"{kind} {size} MiB"] for world in worlds for size in sizes] for kind in COLLECTIVES}
    return table(head, ([kind, *(f"{each['median_us']:.0f} / {each['bus_gb_per_s']:.0f}" for each in row)] for kind, row in found.items()))


@claim
def host() -> str:
    """The executor's cost per operation and per job."""
    found = raw("h200/testbed_host.json")
    fast, alone, two = found["fast"], found["fast in one thread"]["an_op_us"], found["event"]["an_op_us_two_streams"]
    return (
        f"an operation costs the executor {fast['an_op_us']:.1f} us ({alone:.1f} us from one thread), "
        f"{fast['an_op_us_two_streams']:.1f} us if two streams alternate, {two:.1f} us if memory is collected by events as well; "
        f"a job costs {fast['a_job_us']:.1f} us in addition to its operations"
    )


def oracle_of(source: str) -> dict[str, Row]:
    """The oracle's results by configuration, with times of single operations from its own file (`own`) or from the others (`left-out`)."""
    found = raw("oracle.json")["configurations"].items()
    return {key.rpartition(" ")[0].replace("_s", " seq "): each for key, each in found if key.endswith(f" {source}")}


@claim
def oracle_errors() -> str:
    """Predicted step times of the oracle's plans compared with measured ones."""
    rows = []
    for name, own in oracle_of("own").items():
        judged = [each["judged"]["simulator"] for each in (own, oracle_of("left-out")[name])]
        shown = [
            [f"{100 * each['median_abs']:.1f}" for each in judged],
            [f"{100 * each['worst'][1]:+.1f}" for each in judged],
            [f"{100 * each['order']:.0f}" for each in judged],
        ]
        rows.append([name, *(f"{' / '.join(both)} %" for both in shown)])
    return table(["", "median error own / left out", "worst own / left out", "order right own / left out"], rows)


@claim
def oracle_orders() -> str:
    """Interlace's orders (simulated) and the best known ones (measured)."""
    rows = []
    for name, found in oracle_of("own").items():
        row = [name]
        for form in ("dx-first", "mixed"):
            ours = {each["memory"]: each for each in found["planner"] if each["form"] == form}
            best = ours["free"]["best_known"]
            row += [
                " / ".join(f"{100 * each['gain']:+.1f} % ({100 * each['comm_saved']:.0f} %)" for each in ours.values()),
                f"{100 * best['measured_gain']:+.1f} % ({100 * best['measured_comm_saved']:.0f} %)",
            ]
        rows.append(row)
    return table(
        [
            "gain over serial (of communication's time saved)",
            "dx-first, free / plain order's memory",
            "best known, measured",
            "mixed, free / plain order's memory",
            "best known, measured",
        ],
        rows,
    )


@claim
def oracle_distance() -> str:
    """How far the simulated time of Interlace's orders is from that of the best known ones, and the host time needed to find them."""
    rows = [row for found in oracle_of("own").values() for row in found["planner"]]
    over, spent = [row["over_best_known"] for row in rows], [row["plan_cpu_s"] for row in rows]
    return f"{span(over)} off the best known orders' time, and finding them takes {min(spent):.1f} to {max(spent):.1f} s of host time"


@claim
def beside_transfers() -> str:
    """How much slower computation is beside a send or receive that waits, and beside one that moves data."""
    found = raw("h200/beside_transfers.json")["beside"]
    waits, moves = found["wait"], found["p2p"]
    sizes = sorted((int(name.partition(" of ")[2]), row["stretch"]) for name, row in waits.items() if " of " in name)
    products = ", ".join(f"{stretch:.2f} ({elements / 1e6:.1f} million)" for elements, stretch in sizes)
    kinds = ("attention", "attention_grad", "gelu_tanh", "layer_norm", "add", "cast")
    beside = [
        ", ".join(f"{name} {rows[name]['stretch']:.2f}" for name in kinds if rows.get(name, {"n": 0})["n"] >= FEWEST)
        for rows in (waits, moves)
    ]
    return (
        f"products take {products} times as long, by number of elements of their result; {beside[0]}. Beside a transfer that moves "
        f"data, products take {moves['gemm']['stretch']:.2f} times as long; {beside[1]}"
    )


def _by_connections() -> dict[tuple[str, ...], list[Row]]:
    """GPUs, case, plan and number of connections -> runs."""
    runs = grouped(
        (
            (
                row["sitting"].split(", ")[1],
                row["case"],
                "baseline" if kind_of(row["plan"]) == BASELINE else row["plan"],
                str(row["connections"]),
            ),
            row,
        )
        for device in ("h100", "h200")
        for row in raw(f"{device}/connections.json")["rows"]
    )
    return dict(sorted(runs.items()))


@claim
def connections() -> str:
    """Steps, and gaps between kernels of computation, by the number of hardware connections that streams share."""
    rows = [
        (
            *key,
            ", ".join(f"{row['step_ms'][0]:.1f}" for row in found),
            ", ".join(f"{row['gap_us']['else']['median_us']:.1f}" for row in found),
        )
        for key, found in _by_connections().items()
    ]
    return table(["GPUs", "case", "plan", "connections", "step ms, each run", "gap us, median of each run"], rows)


@claim
def connections_in_short() -> str:
    """Steps with 32 connections compared with the same plans with 8."""
    steps = {key: [row["step_ms"][0] for row in found] for key, found in _by_connections().items()}
    pairs = {key: (eight, steps[more]) for key, eight in steps.items() if key[3] == "8" and (more := (*key[:3], "32")) in steps}
    of_baseline, of_one = [[key for key in pairs if key[at] == name] for at, name in ((2, "baseline"), (0, "1 H100"))]
    of_several = [key for key in pairs if key not in (*of_baseline, *of_one)]
    several, one, baseline = (
        span(median(pairs[key][1]) / median(pairs[key][0]) - 1 for key in keys) for keys in (of_several, of_one, of_baseline)
    )
    apart = sum(max(pairs[key][1]) < min(pairs[key][0]) for key in of_several)
    return (
        f"steps of Interlace's plans change by {several} on several GPUs ({len(of_several)} cases; in {apart}, every run with 32 is "
        f"faster than every run with 8) and by {one} on one GPU ({len(of_one)} cases), those of the baseline by {baseline} "
        f"({len(of_baseline)} cases)"
    )


@claim
def gaps_beside_communication() -> str:
    """Gaps between kernels beside communication on another stream and without it, with the baseline and with Interlace's plans."""
    found: dict[str, list[tuple[float, float]]] = {"baseline": [], "ours": []}
    for (_, _, plan, connections), rows in _by_connections().items():
        if plan == "baseline" or connections == "32":
            gaps = [row["gap_us"] for row in rows if "beside communication" in row["gap_us"]]
            found["baseline" if plan == "baseline" else "ours"] += [
                (each["beside communication"]["median_us"], each["with nothing beside"]["median_us"]) for each in gaps
            ]
    told = []
    for name, shown in (("baseline", "the baseline has"), ("ours", "Interlace's plans with 32 connections have")):
        beside, apart = zip(*found[name], strict=True)
        told.append(
            f"{shown} {min(beside):.1f} to {max(beside):.1f} us beside communication and {min(apart):.1f} to {max(apart):.1f} otherwise "
            f"({len(beside)} runs)"
        )
    return ", ".join(told)
