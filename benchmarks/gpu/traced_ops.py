"""Make a device profile with operation times from traced training steps.

`python -m benchmarks.gpu.traced_ops FOLDER [FOLDER ...] -o FILE --date DAY [--base h200]`.

FOLDER is the --out of `benchmarks.gpu.training`. Every operation of its plans that ran without work on another stream becomes a sample,
with the sizes that the cost model uses: the median over all its runs. The two timed events around a kernel add some microseconds, about as
much as the gap between two kernels of an untraced step, so neither is corrected. Samples replace those of the base profile with the same
kind and dtype, and so do the factors beside sends and receives (`benchmarks.gpu.beside_transfers`). Collectives, copies and host times are
the base's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.device_profile import with_traced
from benchmarks.gpu import beside_transfers
from interlace.cost_model import CostModel
from interlace.cost_model.base import tables_of
from interlace.cost_model.profile import DeviceProfile, OpSample, Provenance, load_profile, save_profile
from interlace.cost_model.work import Part, work_of
from interlace.ir import Program
from testbed.trace import RankTrace, align, stream_names

BESIDE = 0.02
"""Largest share of an operation's time that may overlap with other streams' work."""
FEWEST = 2
"""Least runs of an operation for a sample, and least sizes of a kind to replace all of the base profile's."""
Times = dict[Part, list[float]]


def times_of(program: Program, ranked: RankTrace) -> Times:
    """Microseconds of each run of each operation that is a single kernel of the cost model and ran without other work."""
    known, ops = align(ranked.planned, ranked.trace.issues), {op.id: op for op in program.ops}
    values, _ = tables_of(program)
    names = stream_names(ranked, known)
    beside = [each for each in ranked.trace.intervals if names[each.stream] != "compute"]
    kernels: dict[int, list[Any]] = defaultdict(list)
    for each in ranked.trace.intervals:
        if names[each.stream] == "compute" and each.op in known:
            kernels[each.op].append(each)
    found: Times = defaultdict(list)
    for number, runs in kernels.items():
        op = ops.get(beside_transfers.op_of(known[number].label))
        parts = work_of(op, values).parts if op else ()
        begin, end = min(run.begin_us for run in runs), max(run.end_us for run in runs)
        if len(parts) == 1 and beside_transfers.overlap_us(begin, end, beside) <= BESIDE * (end - begin):
            found[parts[0]].append(sum(run.end_us - run.begin_us for run in runs))
    return found


def samples(found: Times) -> Iterator[OpSample]:
    """One sample for each size that ran at least `FEWEST` times."""
    for part, times in sorted(found.items(), key=lambda item: (item[0].kind, item[0].dtype, item[0].size_bytes, item[0].dims)):
        if len(times) >= FEWEST and part.family not in ("comm", "p2p", "copy") and part.size_bytes:
            took_ns, spread_ns = (round(1e3 * each) for each in (statistics.median(times), max(times) - min(times)))
            yield OpSample(part.kind, part.dtype, dict(part.dims), part.size_bytes, took_ns, spread_ns, len(times))


def with_samples(base: DeviceProfile, found: Sequence[OpSample], provenance: Provenance) -> DeviceProfile:
    """The base profile with these samples: they replace all samples of a kind if there are several of it, else only that of the same
    size."""
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for sample in found:
        sizes[sample.kind, sample.dtype] += 1
    new = {_key(sample) for sample in found}
    kept = [each for each in base.ops if sizes[each.kind, each.dtype] < FEWEST and _key(each) not in new]
    ops = sorted([*kept, *found], key=lambda each: (each.kind, each.dtype, each.size_bytes, sorted(each.dims.items())))
    return msgspec.structs.replace(base, provenance=provenance, ops=tuple(ops))


def _key(sample: OpSample) -> tuple[str, str, tuple[tuple[str, int], ...], int]:
    return sample.kind, sample.dtype, tuple(sorted(sample.dims.items())), sample.size_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.traced_ops", description="Times of operations from traced steps.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="the --out of a run of benchmarks.gpu.training")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the profile to write (.json)")
    parser.add_argument("--base", default="h200", help="profile for all that traced steps do not say")
    parser.add_argument("--date", required=True, metavar="YYYY-MM-DD", help="when the folders were measured")
    args = parser.parse_args(argv)
    base, runs = load_profile(args.base), list(beside_transfers.runs_of(args.folders))
    if not runs:
        parser.error(beside_transfers.NO_RUNS.format(", ".join(map(str, args.folders))))
    found: Times = defaultdict(list)
    for program, ranked in runs:
        for part, times in times_of(program, ranked).items():
            found[part].extend(times)
    beside = with_traced(base.interference, {"beside": beside_transfers.summary(runs, CostModel(base))})
    note = f"operations from {len(runs)} traced steps through Paddle's executor on the testbed; "
    provenance = msgspec.structs.replace(
        base.provenance,
        date=args.date,
        command="python -m benchmarks.gpu.traced_ops",
        note=note + f"all else as in {args.base}: {base.provenance.note}",
    )
    profile = with_samples(msgspec.structs.replace(base, interference=beside), tuple(samples(found)), provenance)
    save_profile(profile, args.output)
    print(f"{args.output}: {len(found)} sizes from {len(runs)} traced steps, {len(profile.ops)} samples in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
