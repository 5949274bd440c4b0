"""Claims about steps that are launched as a graph, measured on two H200 beside the same plans as they are issued."""

from __future__ import annotations

import statistics

from claiming import Row, by_case, claim, span, table

PLANS = ("stock", "auto", "mixed", "offload-1")
LAUNCHED = "-captured"


def _runs() -> dict[str, dict[str, Row]]:
    """Case -> plan -> its run, small hidden sizes first."""
    return dict(sorted(by_case("h200/testbed_captured.json").items(), key=lambda each: int(each[0].split("-h")[1].split("-")[0])))


def _median(row: Row) -> float:
    return float(row["step_ms"]["median"])


@claim
def captured_steps() -> str:
    """Median steps, issued and launched."""
    rows = []
    for case, found in _runs().items():
        cells = [f"{_median(found['stock']):.1f}" if "stock" in found else ""]
        for plan in PLANS[1:]:
            issued, launched = (found.get(name) for name in (plan, plan + LAUNCHED))
            both = [f"{_median(each):.1f}" if each else "-" for each in (issued, launched)]
            gain = f" ({100 * (_median(issued) / _median(launched) - 1):+.0f} %)" if issued and launched else ""
            cells.append(f"{both[0]}, {both[1]}{gain}" if issued or launched else "")
        rows.append([case.removeprefix("captured-"), *cells])
    return table(["case", "baseline, issued", *(f"`{plan}`: issued, launched" for plan in PLANS[1:])], rows)


def _pairs() -> list[tuple[str, Row, Row]]:
    found = _runs().items()
    return [(case, plans[plan], plans[plan + LAUNCHED]) for case, plans in found for plan in PLANS if {plan, plan + LAUNCHED} <= set(plans)]


@claim
def captured_gains() -> str:
    """What launching brings, by hidden size."""
    told = []
    for hidden in (1024, 2048, 4096):
        gains = [_median(issued) / _median(launched) - 1 for case, issued, launched in _pairs() if f"-h{hidden}-" in case]
        told.append(f"{span(gains, 0)} at hidden {hidden} ({len(gains)} plans, median {100 * statistics.median(gains):.0f} %)")
    return "; ".join(told)


@claim
def captured_bits() -> str:
    """How many launched runs have the baseline's losses and parameters."""
    rows = [row for found in _runs().values() for name, row in found.items() if name.endswith(LAUNCHED) and "losses_equal_stock" in row]
    equal = sum(row["losses_equal_stock"] and row["parameters_equal_stock"] for row in rows)
    return f"{equal} of {len(rows)}"


@claim
def captured_memory() -> str:
    """What tensors hold on the first rank, issued and launched."""
    told = []
    for case, issued, launched in _pairs():
        if launched["plan"] == f"offload-1{LAUNCHED}":
            held = [each["peak_bytes_by_rank"][0]["allocated"] / 1e9 for each in (issued, launched)]
            told.append([case.removeprefix("captured-"), *(f"{each:.2f}" for each in held), f"{100 * (held[1] / held[0] - 1):+.0f} %"])
    return table(["offload of all, GB of tensors on the first rank", "issued", "launched", ""], told)
