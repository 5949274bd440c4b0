"""Scale times of kernels that were measured on one GPU to another GPU.

`python benchmarks/carried.py MEASURED --from h100 --to h200 -o FILE`

MEASURED has the kernels of one library on the first GPU; the profiles `--from` and `--to` have those of another library on both GPUs,
measured in the same way. An operation is assumed to differ between the GPUs by the same factor in both libraries: each time of MEASURED is
multiplied by the ratio of its times in `--to` and `--from`. Everything else in the result is as in `--to`. Meant for GPUs of one
architecture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from interlace.cost_model import CostModel, DeviceProfile, load_profile, save_profile
from interlace.cost_model.profile import OpSample
from interlace.cost_model.work import Part, dims_of, flops_of
from interlace.ir.operation_kinds import memory_family


def carried(measured: DeviceProfile, there: DeviceProfile, here: DeviceProfile) -> DeviceProfile:
    """`here` with the operations of `measured`, scaled from the GPU of `measured` and `there` to that of `here`."""
    on_there, on_here = CostModel(there), CostModel(here)

    def moved(sample: OpSample) -> OpSample:
        dims, flops = dims_of(**sample.dims), flops_of(sample.kind, sample.dims)
        product = "attention" if sample.kind.startswith("attention") else "gemm"
        family = product if flops else memory_family(sample.kind) or "elementwise"  # kinds of samples alone: copies and sums
        part = Part(sample.kind, family, sample.dtype, dims, flops, sample.size_bytes)
        factor = on_here.part_time(part).dur_ns / on_there.part_time(part).dur_ns
        return msgspec.structs.replace(sample, dur_ns=max(1, round(sample.dur_ns * factor)), source="derived")

    note = f"operations of {measured.device} carried to {here.device}; all else as measured there: {here.provenance.note}"
    provenance = msgspec.structs.replace(here.provenance, command=" ".join(["python", *sys.argv]), note=note)
    return msgspec.structs.replace(here, ops=[moved(sample) for sample in measured.ops], provenance=provenance)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/carried.py", description="Scale kernel times from one GPU to another.")
    parser.add_argument("measured", help="profile of kernels on the first GPU")
    parser.add_argument("--from", dest="there", required=True, help="profile of the first GPU, from other kernels")
    parser.add_argument("--to", dest="here", required=True, help="profile of the second GPU, from those kernels too")
    parser.add_argument("-o", "--out", required=True, type=Path, help="profile to write")
    args = parser.parse_args(argv)
    profile = carried(*(load_profile(name) for name in (args.measured, args.there, args.here)))
    save_profile(profile, args.out)
    print(f"{len(profile.ops)} operations carried to {profile.device}: {args.out}")


if __name__ == "__main__":
    main()
