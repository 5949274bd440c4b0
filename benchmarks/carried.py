"""Times of kernels measured on one card, carried to another card that they were not measured on.

`python benchmarks/carried.py MEASURED --from h100 --to h200 -o FILE`

MEASURED has one library's kernels on the first card; the profiles `--from` and `--to` have another library's on both, measured alike. An
operation is taken to differ between the cards by the same factor in both libraries: each time of MEASURED is multiplied by what `--to` says
of this operation over what `--from` says. All else of the profile written is as in `--to`. Of use between cards of one architecture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from interlace.cost_model import CostModel, DeviceProfile, load_profile, save_profile
from interlace.cost_model.profile import OpSample
from interlace.cost_model.work import Part, flops_of


def carried(measured: DeviceProfile, there: DeviceProfile, here: DeviceProfile) -> DeviceProfile:
    """`here` with the operations of `measured`, whose card `there` describes too."""
    on_there, on_here = CostModel(there), CostModel(here)

    def moved(sample: OpSample) -> OpSample:
        flops = flops_of(sample.kind, sample.dims)
        family = "memory" if not flops else "attention" if sample.kind.startswith("attention") else "gemm"
        part = Part(sample.kind, family, sample.dtype, tuple(sorted(sample.dims.items())), flops, sample.size_bytes)
        factor = on_here.part_time(part).dur_ns / on_there.part_time(part).dur_ns
        return msgspec.structs.replace(sample, dur_ns=max(1, round(sample.dur_ns * factor)), source="derived")

    note = f"operations of {measured.device} carried to {here.device}; all else as measured there: {here.provenance.note}"
    provenance = msgspec.structs.replace(here.provenance, command=" ".join(["python", *sys.argv]), note=note)
    return msgspec.structs.replace(here, ops=[moved(sample) for sample in measured.ops], provenance=provenance)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/carried.py", description="Carry kernel times from one card to another.")
    parser.add_argument("measured", help="profile of kernels on the first card")
    parser.add_argument("--from", dest="there", required=True, help="profile of the first card, from other kernels")
    parser.add_argument("--to", dest="here", required=True, help="profile of the second card, from those kernels too")
    parser.add_argument("-o", "--out", required=True, type=Path, help="profile to write")
    args = parser.parse_args(argv)
    profile = carried(*(load_profile(name) for name in (args.measured, args.there, args.here)))
    save_profile(profile, args.out)
    print(f"{len(profile.ops)} operations carried to {profile.device}: {args.out}")


if __name__ == "__main__":
    main()
