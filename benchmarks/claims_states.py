"""Claims about optimizer state that leaves the device between updates, measured on two GPUs and simulated."""

from __future__ import annotations

from claiming import Row, by_case, claim, fullest_gb, raw, table

NAMES = {
    "stock": "Paddle's baseline",
    "auto": "`auto`",
    "budget-0.8": "`memory_budget: 0.8`",
    "budget-0.6": "`memory_budget: 0.6`",
    "state-1": "all state leaves",
}

SHARES = (0.8, 0.7, 0.6, 0.5)
"""Budgets, of what Paddle's baseline holds."""


@claim
def states_on_h100() -> str:
    """Steps and peaks of plans that move optimizer state, measured and simulated."""
    return _table("h100")


@claim
def states_on_h200() -> str:
    """The same with plans that held what moved for longer."""
    return _table("h200")


def _table(card: str) -> str:
    rows = []
    for case, found in by_case(f"{card}/testbed_states.json").items():
        stock = found["stock"]
        for plan, name in ((plan, name) for plan, name in NAMES.items() if plan in found):
            row, simulated = found[plan], found[plan]["simulated"]
            step, expected = row["step_ms"]["median"], simulated["step_ms"]
            held = max(simulated["held_peak_bytes_by_rank"]) / 1e9
            in_use = fullest_gb(row, "in_use", "outside")
            share = in_use / fullest_gb(stock, "in_use", "outside")
            rows.append(
                [
                    case.partition("-")[0],
                    name,
                    f"{step:.1f} ({row['step_ms']['min']:.1f} to {row['step_ms']['max']:.1f})",
                    f"{expected:.1f} ({100 * (expected / step - 1):+.1f} %)",
                    f"{fullest_gb(row, 'allocated', 'outside'):.2f}",
                    f"{in_use:.2f} ({100 * share:.0f} %)",
                    f"{held:.2f} ({100 * (held / in_use - 1):+.0f} %)",
                    f"{fullest_gb(row, 'reserved', 'outside'):.2f}",
                    f"{fullest_gb(row, 'pinned'):.2f}",
                    "yes" if row["losses_equal_stock"] and row["parameters_equal_stock"] else "no",
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
    """Steps within budgets and least feasible budgets, with and without state that leaves the device, simulated."""
    rows = []
    for each in raw("optimizer_state.json")["models"]:
        known = [row["leaves"] for row in each["budgets"] if "stock_ms" in row["leaves"]]
        stock_ms, held = known[0]["stock_ms"], known[0]["stock_peak_bytes"]
        by_share = {row["fraction"]: _simulated(row) for row in each["budgets"]}
        cells = [f"{stock_ms:.1f}", *(by_share.get(share, "not simulated") for share in SHARES)]
        floors = [f"{100 * each['floor_bytes'][name] / held:.0f} %" for name in ("stays", "leaves")]
        rows.append([each["model"], each["device"], *cells, *floors])
    heads = [f"{share} of its peak" for share in SHARES]
    return table(["model", "profile", "baseline, ms", *heads, "least feasible, state stays", "state may leave"], rows)


def _simulated(row: Row) -> str:
    stays, leaves = row["stays"], row["leaves"]
    before = f"{stays['step_ms']:.1f}" if "step_ms" in stays else "-"
    return f"{before}, {leaves['step_ms']:.1f}" if "step_ms" in leaves else f"{before}, -"


@claim
def states_largest() -> str:
    """How many layers of GPT-3 175B eight GPUs hold, with and without state that leaves the device."""
    found = raw("optimizer_state.json")["largest"]
    stays, leaves = found["stays"], found["leaves"]

    def told(row: Row) -> str:
        layers, held = row["layers"], {int(each): size for each, size in row["least_bytes_by_layers"].items()}
        over = f"{layers + 4} need {held[layers + 4] / 1e9:.1f} GB" if layers + 4 in held else f"{layers + 4} were not looked at"
        return f"{layers} layers ({row['parameters'] / 1e9:.1f} billion parameters) in {held[layers] / 1e9:.1f} GB, {over}"

    return f"with all state on the device {told(stays)}; where it may leave {told(leaves)}"
