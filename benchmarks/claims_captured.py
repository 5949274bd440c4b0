"""Claims about steps that are launched as a graph, measured on two H200 and on four H100, compared with the same plans issued."""

from __future__ import annotations

import statistics

from claiming import Row, by_case, claim, median_ms, span, table

PLANS = ("stock", "auto", "mixed", "offload-1")
LAUNCHED = "-captured"
CARDS = ("h200", "h100")


def _runs(card: str) -> dict[str, dict[str, Row]]:
    """Case -> plan -> its run, small hidden sizes first."""
    return dict(sorted(by_case(f"{card}/testbed_captured.json").items(), key=lambda each: int(each[0].split("-h")[1].split("-")[0])))


@claim
def captured_steps() -> str:
    """Median steps on H200, issued and launched."""
    return _steps("h200")


@claim
def captured_steps_h100() -> str:
    """Median steps on H100, issued and launched."""
    return _steps("h100")


def _steps(card: str) -> str:
    rows = []
    for case, found in _runs(card).items():
        cells = [f"{median_ms(found['stock']):.1f}" if "stock" in found else ""]
        for plan in PLANS[1:]:
            issued, launched = (found.get(name) for name in (plan, plan + LAUNCHED))
            both = [f"{median_ms(each):.1f}" if each else "-" for each in (issued, launched)]
            gain = f" ({100 * (median_ms(issued) / median_ms(launched) - 1):+.0f} %)" if issued and launched else ""
            cells.append(f"{both[0]}, {both[1]}{gain}" if issued or launched else "")
        rows.append([case.removeprefix("captured-"), *cells])
    return table(["case", "baseline, issued", *(f"`{plan}`: issued, launched" for plan in PLANS[1:])], rows)


def _pairs(card: str) -> list[tuple[str, Row, Row]]:
    found = _runs(card).items()
    return [(case, plans[plan], plans[plan + LAUNCHED]) for case, plans in found for plan in PLANS if {plan, plan + LAUNCHED} <= set(plans)]


@claim
def captured_gains() -> str:
    """Gain of launching, by hidden size."""
    told = []
    for card in CARDS:
        for hidden in (1024, 2048, 4096):
            gains = [median_ms(issued) / median_ms(launched) - 1 for case, issued, launched in _pairs(card) if f"-h{hidden}-" in case]
            median = f"{len(gains)} plans, median {100 * statistics.median(gains):.0f} %"
            told.append(f"{span(gains, 0)} at hidden {hidden} on {card.upper()} ({median})")
    return "; ".join(told)


@claim
def captured_bits() -> str:
    """How many launched runs have the baseline's losses and parameters."""
    runs = [each for card in CARDS for found in _runs(card).values() for each in found.items()]
    rows = [row for name, row in runs if name.endswith(LAUNCHED) and "losses_equal_stock" in row]
    equal = sum(row["losses_equal_stock"] and row["parameters_equal_stock"] for row in rows)
    return f"{equal} of {len(rows)}"


@claim
def captured_memory() -> str:
    """What tensors hold on the first rank, issued and launched."""
    told = []
    for card in CARDS:
        for case, issued, launched in _pairs(card):
            if launched["plan"] == f"offload-1{LAUNCHED}":
                ranks = [each["peak_bytes_by_rank"] for each in (issued, launched)]
                held = [max((rank["in_use"] + rank["outside"]) / 1e9 for rank in each) for each in ranks]
                change = f"{100 * (held[1] / held[0] - 1):+.0f} %"
                told.append([card.upper(), case.removeprefix("captured-"), *(f"{each:.2f}" for each in held), change])
    return table(["", "offload of all, GB in use on the fullest rank", "issued", "launched", ""], told)
