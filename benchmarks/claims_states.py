"""Claims about optimizer state that is kept on the host between updates, measured on two GPUs and simulated."""

from __future__ import annotations

from claiming import Row, by_case, claim, fullest_gb, ms_and_range, raw, table

NAMES = {
    "stock": "Paddle's baseline",
    "auto": "`auto`",
    **{f"budget-{share}": f"`memory_budget: {share}`" for share in (0.9, 0.8, 0.7, 0.6)},
    "state-1": "all state leaves",
}

SHARES = (0.8, 0.7, 0.6, 0.5)
"""Budgets as shares of what Paddle's baseline holds."""


@claim
def states_on_h100() -> str:
    """Steps and peaks of plans that move optimizer state, measured and simulated."""
    return _table("h100")


@claim
def states_back_to_back() -> str:
    """One job on a host with four H100, with steps that follow each other without a pause."""
    return _table("h100", "testbed_back_to_back")


@claim
def states_on_h200() -> str:
    """The same with earlier plans, which held the moved state for longer."""
    return _table("h200")


@claim
def states_beside_another_job() -> str:
    """Two jobs at the same time on a host with four H100, each on two GPUs."""
    return _table("h100", "shared_host")


def _has_baselines_bits(row: Row) -> bool | None:
    equal = [row.get(f"{what}_equal_stock") for what in ("losses", "parameters")]
    return None if None in equal else all(equal)


def _table(card: str, file: str = "testbed_states") -> str:
    rows = []
    for case, found in by_case(f"{card}/{file}.json").items():
        if "adamw" not in case:
            continue
        stock = found.get("stock")
        for plan, name in ((plan, name) for plan, name in NAMES.items() if plan in found):
            row, simulated = found[plan], found[plan]["simulated"]
            step, expected = row["step_ms"]["median"], simulated.get("limited", simulated)["step_ms"]
            held = max(simulated["held_peak_bytes_by_rank"]) / 1e9
            in_use = fullest_gb(row, "in_use", "outside")
            of_stock = f" ({100 * in_use / fullest_gb(stock, 'in_use', 'outside'):.0f} %)" if stock else ""
            rows.append(
                [
                    case.partition("-")[0],
                    name,
                    ms_and_range(row),
                    f"{expected:.1f} ({100 * (expected / step - 1):+.1f} %)",
                    f"{fullest_gb(row, 'allocated', 'outside'):.2f}",
                    f"{in_use:.2f}{of_stock}",
                    f"{held:.2f} ({100 * (held / in_use - 1):+.0f} %)",
                    f"{fullest_gb(row, 'reserved', 'outside'):.2f}",
                    f"{fullest_gb(row, 'pinned'):.2f}",
                    {True: "yes", False: "no", None: "no baseline with as many steps"}[_has_baselines_bits(row)],
                ]
            )
    head = [
        "model",
        "plan",
        "step, ms (range)",
        "simulated",
        "tensors, GB",
        "in use, GB (of baseline)",
        "planned",
        "pools, GB",
        "pinned, GB",
    ]
    return table([*head, "same bits"], rows)


@claim
def states_simulated() -> str:
    """Simulated steps within budgets, and least feasible budgets, with optimizer state on the device and with state that may move."""
    rows = []
    for each in raw("optimizer_state.json")["models"]:
        known = [row["leaves"] for row in each["budgets"] if "stock_ms" in row["leaves"]]
        stock_ms, held = known[0]["stock_ms"], known[0]["stock_peak_bytes"]
        by_share = {row["fraction"]: _simulated(row) for row in each["budgets"]}
        cells = [f"{stock_ms:.1f}", *(by_share.get(share, "not simulated") for share in SHARES)]
        floors = [f"{100 * each['floor_bytes'][name] / held:.0f} %" for name in ("stays", "leaves")]
        rows.append([each["model"], each["device"], *cells, *floors])
    heads = [f"{share} of its peak" for share in SHARES]
    return table(["model", "profile", "baseline, ms", *heads, "least feasible, state on the device", "state may move"], rows)


def _simulated(row: Row) -> str:
    stays, leaves = row["stays"], row["leaves"]
    before = f"{stays['step_ms']:.1f}" if "step_ms" in stays else "-"
    return f"{before}, {leaves['step_ms']:.1f}" if "step_ms" in leaves else f"{before}, -"


@claim
def states_largest() -> str:
    """How many layers of GPT-3 175B fit on eight GPUs, with all optimizer state on the device and with state that may move."""
    found = raw("optimizer_state.json")["largest"]
    stays, leaves = found["stays"], found["leaves"]

    def told(row: Row) -> str:
        layers, held = row["layers"], {int(each): size for each, size in row["least_bytes_by_layers"].items()}
        over = f"{layers + 4} need {held[layers + 4] / 1e9:.1f} GB" if layers + 4 in held else f"{layers + 4} were not tried"
        return f"{layers} layers ({row['parameters'] / 1e9:.1f} billion parameters) in {held[layers] / 1e9:.1f} GB, {over}"

    return f"with all state on the device {told(stays)}; if it may move {told(leaves)}"
