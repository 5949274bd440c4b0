"""`interlace calibrate`: measure this machine through Paddle and store a device profile."""

from __future__ import annotations

import argparse
import os
from typing import Any


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "calibrate",
        help="measure this machine",
        description="Measure operations, host costs and collectives of this machine.",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where to write the profile (.json)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="", help="default: the GPU where Paddle has one")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and shorter runs, for a first look")
    parser.add_argument("--date", default="", metavar="YYYY-MM-DD", help="date to store (default: today)")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of a summary")
    return parser


def main(args: argparse.Namespace) -> int:
    """Measure, write, and say what was found."""
    os.environ.setdefault("GLOG_minloglevel", "1")  # Paddle's executor tells of itself on stderr
    from interlace.bridge.calibrate import calibrate
    from interlace.cost_model.profile import encode_profile, save_profile

    command = "interlace calibrate" + (" --quick" if args.quick else "")
    profile = calibrate(args.device, args.quick, args.date, command)
    path = save_profile(profile, args.output)
    if args.json:
        print(encode_profile(profile).decode(), end="")
        return 0
    rates = ", ".join(f"{dtype} {peak.per_s / 1e9:.0f} GFLOP/s" for dtype, peak in sorted(profile.matrix_flops.items()))
    counts = f"{len(profile.ops)} operations, {len(profile.collectives)} collectives, {len(profile.copies)} copies"
    print(f"{profile.device}: {counts}")
    print(f"  matrix products {rates}; memory {profile.memory_rate.per_s / 1e9:.1f} GB/s")
    print(f"  host {profile.host.op_ns / 1e3:.1f} us an operation, {profile.host.job_ns / 1e3:.1f} us a job")
    print(f"  written to {path}")
    return 0
