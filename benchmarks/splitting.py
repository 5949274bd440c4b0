"""Simulated gains of splitting matrix products into parts; docs/decisions/007.

Programs and times are those of `oracle`. Products are split into two or four parts, which run in sequence but may be separated in the
order. A part takes its share of the time, or 5 % more (joining two halves of 2048 x 16384 in bfloat16 takes 9 % of the product's time at
the memory bandwidth of the GPU). The planner orders the original and the split programs; the simulator judges both.

    python benchmarks/splitting.py [--quick] [-o FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle
from measuring import meta, store
from msgspec.structs import replace

from interlace.cost_model import Costs, Estimate
from interlace.ir import Op, Program, Value, verify
from interlace.scheduler.interleave.planner import SEARCH_WORK, Pair, plan_pair

CUTS = {"every product": "", "MLP products": ".fc", "weight gradients": "_dw"}
"""What is split -> a part of the names of these operations."""
PARTS, OVERHEADS = (2, 4), (0.0, 0.05)
FREE = 1 << 40


class PartCosts(oracle.OwnTimes):
    """Costs in which a part takes its share of the product's time, plus the cost of splitting; everything else is unchanged."""

    def __init__(self, whole: Costs, parts: int, overhead: float) -> None:
        super().__init__(whole, {})
        self.factor = (1 + overhead) / parts

    def op_time(self, op: Op, values: Any, groups: Any) -> Estimate:
        """The time of an operation; for a part, its share."""
        found = super().op_time(op, values, groups)
        return Estimate(round(found.dur_ns * self.factor), "given", 0.0) if "part" in op.attrs else found


def cut(program: Program, parts: int, name: str) -> Program:
    """The program with its products of that name split into parts, all of which write into the memory of the first."""
    values, ops = list(program.values), []
    next_id = max(op.id for op in program.ops) + 1
    for op in program.ops:
        if op.kind != "matmul" or name not in op.layer:
            ops.append(op)
            continue
        given = values[op.results[0]]
        made = [Value(len(values) + k, given.shape, given.dtype, given.storage) for k in range(parts - 1)]
        values += made
        results = [*(value.id for value in made), given.id]
        for k, result in enumerate(results):
            joined: dict[str, Any] = {"operands": (*op.operands, results[k - 1]), "inplace": ((0, len(op.operands)),)} if k else {}
            last = k == parts - 1
            ops.append(replace(op, id=op.id if last else next_id, results=(result,), attrs={**op.attrs, "part": k}, **joined))
            next_id += not last
    done = replace(program, ops=tuple(ops), values=_stored(values, ops))
    verify(done)
    return done


def _stored(values: list[Value], ops: Sequence[Op]) -> tuple[Value, ...]:
    """The values, with first parts as the storage of those whose memory they now provide."""
    first = {op.results[0] for op in ops if op.attrs.get("part") == 0}
    moved = {values[value].storage: value for value in first}
    return tuple(replace(value, storage=moved.get(value.storage, value.storage)) for value in values)


def gains(setting: oracle.Setting, counts: Sequence[int] = PARTS) -> list[dict[str, Any]]:
    """A row for each way of splitting: the simulated time relative to that of whole products."""
    cost = oracle.costs(setting, "own", 0)
    whole = {form: _took(setting, cost, form) for form in ("dx-first", "mixed")}
    rows = []
    for what, name in CUTS.items():
        for parts in counts:
            made = oracle.Setting(setting.name, cut(setting.program, parts, name), setting.raws)
            for overhead in OVERHEADS:
                for form in whole:
                    took = _took(made, PartCosts(cost, parts, overhead), form)
                    rows.append(
                        {
                            "cut": what,
                            "parts": parts,
                            "overhead": overhead,
                            "form": form,
                            "whole_ms": round(whole[form], 4),
                            "simulated_ms": round(took, 4),
                            "gain": round(whole[form] / took - 1, 4),
                        }
                    )
    return rows


def _took(setting: oracle.Setting, cost: Costs, form: Any) -> float:
    plan = plan_pair(Pair(setting.program, setting.parts(), cost, work=SEARCH_WORK), form, FREE)
    return oracle.simulated_ms(setting, list(plan.order), "overlap", cost, probe=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one configuration, products in halves")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args(argv)
    found = {}
    for setting in oracle.settings()[: 1 if args.quick else None]:
        found[setting.name] = rows = gains(setting, PARTS[:1] if args.quick else PARTS)
        for overhead in OVERHEADS:
            some = [row["gain"] for row in rows if row["overhead"] == overhead]
            print(f"{setting.name}, parts {overhead:.0%} slower: {min(some):+.1%} to {max(some):+.1%} over whole products, simulated")
    note = "simulated with times measured on H200s, results/h200/README.md"
    store("splitting", {**meta(), "note": note, "configurations": found}, args.out)


if __name__ == "__main__":
    main()
