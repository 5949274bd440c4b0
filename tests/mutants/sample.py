"""`python -m tests.mutants.sample`: plants random one-line faults and lists those that the tests beside the file do not find.

`--seed` and `--count` say which faults and how many, `--only` which files. A survivor is a test that is missing, or a fault that changes
nothing (read it); the share that is found says how well the tests hold the files. It belongs to no `make` target: what is drawn is
judged by hand. Take a seed that was never used, for the tests that were written after a draw find its faults:

    python -m tests.mutants.sample --seed 52003 --count 40 --only passes/ scheduler/hazards scheduler/memory bridge/lower.py

docs/evidence.md has what the draws so far found. Faults that a reader writes at lines drawn at random are harder to find than these.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.faults import Fault, faults
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.run import PASSED, Task, load_libraries, run_all

SECONDS = 60.0
"""What a fault may take at least before it counts as found because it never ends; or ten times what its tests take without it."""
STREAMS = ("tests/passes/test_streams.py", "tests/passes/test_stream_names.py")
ORDERS = ("tests/scheduler/test_orders_by_hand.py", "tests/scheduler/test_orders.py")
SPLIT = ("tests/passes/test_overlap_column_backward.py", "tests/passes/test_split_backward.py")
FIXTURES = ("tests/passes/test_fixtures.py",)
PIPELINE = ("tests/passes/test_pipeline.py",)
TOGETHER = ("tests/planning/test_processes.py",)
IDENTITY = ("tests/scheduler/test_call_identity.py", "tests/planning/test_pass_orders.py")
HISTORIES = ("tests/scheduler/test_histories.py",)
STRAYS = ("tests/scheduler/test_strays.py",)
BESIDE: Mapping[str, tuple[str, ...]] = {
    "passes/base.py": PIPELINE,
    "passes/choose_recompute.py": ("tests/passes/test_choose_recompute.py",),
    "passes/delay_transfers.py": ORDERS,
    "passes/extend_lifetimes.py": STREAMS,
    "passes/insert_events.py": (*STREAMS, "tests/scheduler/test_crossing.py"),
    "passes/name_streams.py": STREAMS[::-1],
    "passes/kept.py": ("tests/passes/test_facts.py",),
    "passes/narrow_gathers.py": ("tests/passes/test_narrow_gathers.py",),
    "passes/offload_optimizer_state.py": ("tests/scheduler/test_optimizer_state.py",),
    "passes/offload_activations.py": ("tests/passes/test_offload_activations.py",),
    "passes/overlap_column_backward.py": SPLIT[:1],
    "interlace/planning/peers.py": TOGETHER,
    "passes/pipeline.py": PIPELINE,
    "passes/return_memory.py": ("tests/passes/test_return_memory.py",),
    "passes/schedule_1f1b.py": (
        "tests/passes/test_schedule_1f1b.py",
        "tests/scheduler/test_schedule.py",
        "tests/scheduler/test_interleave.py",
    ),
    "scheduler/jobs/making.py": (
        "tests/passes/test_schedule_1f1b.py",
        "tests/scheduler/test_schedule.py",
        "tests/scheduler/test_interleave.py",
    ),
    "scheduler/jobs/options.py": (
        "tests/passes/test_schedule_1f1b.py",
        "tests/scheduler/test_schedule.py",
        "tests/scheduler/test_interleave.py",
    ),
    "passes/split_backward.py": SPLIT[1:],
    "passes/streams.py": STREAMS[::-1],
    "passes/throttle_host.py": ("tests/scheduler/test_throttle.py",),
    "passes/weight_gradients.py": (*SPLIT, "tests/passes/test_choose_recompute.py"),
    "passes": (
        "tests/test_records.py",
        "tests/passes/test_contracts.py",
        "tests/passes/test_fixtures.py",
        "tests/passes/test_options_count.py",
    ),
    "scheduler/hazards/captured_calls.py": (*STRAYS, *IDENTITY),
    "scheduler/hazards/channels.py": IDENTITY[:1],
    "scheduler/hazards/graph_memory.py": ("tests/scheduler/test_graph_memory.py",),
    "scheduler/hazards/pass_orders.py": (*HISTORIES, *IDENTITY[::-1]),
    "scheduler/hazards/skeleton.py": IDENTITY[:1],
    "scheduler/hazards": (
        "tests/test_records.py",
        "tests/scheduler/test_findings.py",
        "tests/scheduler/test_hazards_by_hand.py",
        "tests/scheduler/test_crossing.py",
        STREAMS[0],
        "tests/scheduler/test_together.py",
        "tests/scheduler/test_hazards.py",
    ),
    "scheduler/host_waits/throttle.py": ("tests/scheduler/test_throttle.py", *FIXTURES),
    "scheduler/host_waits/waits_at_peaks.py": ("tests/scheduler/test_throttle.py", *FIXTURES),
    "scheduler/hazards/missing_orders.py": (STREAMS[0], "tests/scheduler/test_optimizer_state.py", *FIXTURES),
    "scheduler/memory": (
        "tests/test_records.py",
        "tests/scheduler/test_memory_in_full.py",
        "tests/scheduler/test_executor_memory.py",
        "tests/scheduler/test_memory.py",
    ),
    "scheduler/recompute/early_repeats.py": ("tests/scheduler/test_recompute_choices.py",),
    "scheduler/whole_step/orders.py": ORDERS,
    "scheduler/whole_step/search.py": ("tests/scheduler/test_whole_step.py",),
    "interlace/planning/levels.py": ("tests/planning/test_memory_choice.py",),
    "interlace/planning/making.py": ("tests/planning/test_memory_choice.py", "tests/passes/test_budget.py"),
    "interlace/planning/search.py": ("tests/planning/test_memory_choice.py", "tests/passes/test_budget.py"),
    "interlace/planning/finishing.py": ("tests/planning/test_finishing.py", "tests/planning/test_pool_budget.py"),
    "interlace/bridge/lower.py": (
        "tests/bridge/test_lowered_in_full.py",
        "tests/bridge/test_lower.py",
        "tests/bridge/test_host_state.py",
        "tests/bridge/test_targets.py",
        "tests/bridge/test_feeds.py",
        "tests/bridge/test_paddle_passes.py",
    ),
    "interlace/bridge/feeds.py": ("tests/bridge/test_feeds.py",),
    "interlace/bridge/newops.py": ("tests/bridge/test_targets.py", "tests/bridge/test_paddle_passes.py"),
    "interlace/bridge/rewrite.py": ("tests/bridge/test_paddle_passes.py",),
}
"""Tests beside each file, or each folder; the fast ones first."""


def beside(path: str) -> tuple[str, ...]:
    """The tests of a file: its own, then its folder's."""
    folder = str(Path(path).parent)
    return tuple(dict.fromkeys((*BESIDE.get(path, ()), *BESIDE.get(folder, ()))))


def files() -> list[str]:
    """Files with tests beside them."""
    inside = [str(file.relative_to(ROOT)) for place in BESIDE for file in [ROOT / place, *sorted((ROOT / place).glob("*.py"))]]
    return [path for path in dict.fromkeys(inside) if path.endswith(".py")]


def draw(words: Sequence[str], seed: int, count: int) -> list[tuple[str, Fault]]:
    """Faults where path or function hold one of these words, each of a kind that is drawn first: a file has many names and few bounds."""
    rng = random.Random(seed)
    by_kind: dict[str, list[tuple[str, Fault]]] = {}
    for path in files():
        text = (ROOT / path).read_text(encoding="utf-8")
        if words and not any(word in path or word.rpartition(":")[2] in text for word in words):
            continue
        for fault in faults(text, random.Random(f"{seed} {path}")):
            if not words or any(word in f"{path}:{fault.function}" for word in words):
                by_kind.setdefault(fault.kind, []).append((path, fault))
    drawn: list[tuple[str, Fault]] = []
    while by_kind and len(drawn) < count:
        kind = rng.choice(sorted(by_kind))
        drawn.append(by_kind[kind].pop(rng.randrange(len(by_kind[kind]))))
        if not by_kind[kind]:
            del by_kind[kind]
    return drawn


def mutant(path: str, fault: Fault) -> Mutant | None:
    """The fault as an entry of the table; None where what comes out is no Python."""
    text = (ROOT / path).read_text(encoding="utf-8")
    made = Mutant(path, text, fault.planted_in(text), f"{fault.kind} in line {fault.line}", beside(path))
    try:
        made.source()
    except ValueError:
        return None
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every fault is found."""
    options = _parser().parse_args(argv)
    drawn = draw(options.only, options.seed, options.count)
    chosen = {made: fault for path, fault in drawn if (made := mutant(path, fault)) is not None}
    load_libraries(options.paddle)
    tests = {test for made in chosen for test in made.tests}
    baseline = {test: Task((test,)) for test in sorted(tests)}
    run_all(baseline.values(), options.jobs, lambda task: None)
    failed = [task for task in baseline.values() if task.code != PASSED]
    if failed:
        print("\n".join(f"{task.output}\nwithout any fault these do not pass: {' '.join(task.tests)}" for task in failed))
        return 2
    counts: Counter[str] = Counter()

    def tell(task: Task) -> None:
        made = task.mutant
        assert made is not None
        # a fault with which the tests cannot even be loaded, or the process crashes, is found
        verdict = "killed" if task.code in (1, 2, 3, 4, None) or task.code < 0 else task.verdict()
        counts[verdict] += 1
        if verdict != "killed" or options.verbose:
            print(f"{verdict} ({task.took:.0f} s): {made.path}: {made.breaks}\n{_difference(made, chosen[made])}", flush=True)

    tasks = [Task(made.tests, made, max(SECONDS, 10 * sum(baseline[test].took for test in made.tests))) for made in chosen]
    run_all(tasks, options.jobs, tell)
    print(f"seed {options.seed}: {sum(counts.values())} faults, {', '.join(f'{many} {what}' for what, many in counts.most_common())}")
    return int(set(counts) != {"killed"})


def _difference(made: Mutant, fault: Fault) -> str:
    """The lines with the fault, without and with it."""
    was, now = made.find.splitlines(), made.put.splitlines()
    last = made.find.encode()[: fault.end].decode().count("\n") + 1
    shrunk = len(was) - len(now)
    lines = (*(f"    - {line}" for line in was[fault.line - 1 : last]), *(f"    + {line}" for line in now[fault.line - 1 : last - shrunk]))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.sample", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument("--count", type=int, default=20, help="how many faults (default 20)")
    parser.add_argument("--only", nargs="+", default=(), metavar="WORD", help="only where file:function has one of these words")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: one a core)")
    parser.add_argument("--paddle", action="store_true", help="load Paddle once, in front of all tests")
    parser.add_argument("-v", "--verbose", action="store_true", help="list the faults that are found too")
    return parser


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
