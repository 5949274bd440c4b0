"""`interlace calibrate`: measure this machine through Paddle and store a device profile."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from typing import TYPE_CHECKING, Any

from interlace.cli.devices import add_target, paddle_on, started_ranks

if TYPE_CHECKING:
    from interlace.cost_model.profile import DeviceProfile, Power


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `calibrate` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "calibrate",
        help="measure this machine",
        description="Measure operations, copies, how much these slow each other down, host costs and power of this machine's device. "
        "With several ranks, also measure collectives; the first rank then writes FILE: "
        "python -m paddle.distributed.launch --devices 0,1 $(which interlace) calibrate -o FILE.",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where to write the profile (.json)")
    add_target(parser)
    parser.add_argument(
        "--base",
        metavar="NAME",
        default="",
        help="device profile, by name or path, from which to take what is not measured, such as other sizes of groups",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and shorter runs, for a first look")
    parser.add_argument("--date", default="", metavar="YYYY-MM-DD", help="date to store (default: today)")
    parser.add_argument("--json", metavar="FILE", help="write the summary to FILE; -o names the file of the profile itself")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command: measure, write the profile, and print a summary; 0, or 2 for user errors."""
    os.environ.setdefault("GLOG_minloglevel", "2")  # else Paddle's executor logs to stderr
    from interlace.cli.outputs import write_json
    from interlace.cli.progress import Alive
    from interlace.errors import ConfigError
    from interlace.outside import with_connections

    os.environ.update(with_connections())  # as in training, where streams must not share a connection either
    base, (rank, world) = _checked(args), started_ranks()
    with paddle_on(args.target) as target, Alive("calibrate", "measuring operations, copies and collectives through Paddle", _beside_bars):
        from interlace.bridge.agree import peers_of_run
        from interlace.bridge.calibrate.communication import communication_of_run
        from interlace.bridge.calibrate.measure import calibrate, completed, measure_for_first
        from interlace.bridge.probe.bench import bench_of, paddle_settings
        from interlace.bridge.profiles import known_name
        from interlace.bridge.targets.choose import choose_device, use_place
        from interlace.cost_model.profile import save_profile

        use_place(target)
        bench = bench_of(choose_device(), args.quick)
        if base and bench.is_serial and base.device != known_name(bench.device):
            raise ConfigError(f"--base {args.base}: is a profile of {base.device}, but a CPU is measured; leave --base out")
        with paddle_settings():
            communication = communication_of_run(bench, args.quick)
        peers = None if communication.why_not else peers_of_run()
        if rank:
            if peers:
                measure_for_first(bench, args.quick, peers)
            return 0
        found = calibrate(bench, communication, args.quick, args.date, _command(args, world), peers)
    measured = found.profile
    profile = completed(measured, base, args.base) if base else measured
    path = save_profile(profile, args.output)
    write_json(args.json, _summary(str(path), measured))
    rates = ", ".join(f"{dtype} {peak.per_s / 1e9:.0f} GFLOP/s" for dtype, peak in sorted(measured.matrix_flops.items()))
    counts = ", ".join(f"{len(getattr(measured, name))} {said}" for name, said in PARTS.items())
    print(f"{profile.device}: {counts}")
    print(f"  matrix products {rates}; memory {measured.memory_rate.per_s / 1e9:.1f} GB/s")
    host = profile.host
    times = (
        f"{ns / 1e3:.1f} us {of}"
        for ns, of in ((host.op_ns, "an operation"), (host.job_ns, "a job"), (host.between_steps_ns, "between steps"))
    )
    print(f"  host {', '.join(times)}")
    print("  " + _power_line(measured.power, found.no_power))
    if communication.why_not and not measured.collectives:
        print(f"  no collectives: {communication.why_not}")
    for line in found.failed:
        print(f"  not measured: {line}")
    if base:
        print(f"  not measured but taken from {args.base}: {_taken(measured, profile)}")
    print(f"  written to {path}")
    return 0


PARTS = {"ops": "operations", "collectives": "collectives", "p2p": "transfers", "copies": "copies", "interference": "rows of interference"}
"""Fields of a profile that the summary counts, with their names in it."""


def _taken(measured: DeviceProfile, profile: DeviceProfile) -> str:
    """What comes from the base profile, such as `212 operations, 20 transfers, power`."""
    more = {said: len(getattr(profile, name)) - len(getattr(measured, name)) for name, said in PARTS.items()}
    power = ["power"] if profile.power and not measured.power else []
    return ", ".join([*(f"{count} {said}" for said, count in more.items() if count), *power]) or "no samples"


def _command(args: argparse.Namespace, world: int) -> str:
    """The command without its files and date, and with the number of ranks."""
    given = [f"--{name} {value}" for name in ("target", "base") if (value := getattr(args, name))] + ["--quick"] * args.quick
    return " ".join(["interlace calibrate", *given, *([f"on {world} ranks"] if world > 1 else [])])


def _beside_bars(line: str) -> None:
    """Print a line without spoiling the progress bar of a measurement."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def _power_line(power: Power | None, why_not: str) -> str:
    """A summary of the measured power, or why there is none."""
    if power is None:
        return f"no power: {why_not}"
    return f"power {power.limit_w:.0f} W at most, {power.static_w:.0f} W at rest, {len(power.samples)} kinds and sizes of kernels"


def _checked(args: argparse.Namespace) -> DeviceProfile | None:
    """Check the options before anything is measured; returns the profile of `--base`, if given. Raises ConfigError."""
    from interlace.cli.outputs import check_apart
    from interlace.cost_model.profile import load_profile
    from interlace.errors import ConfigError

    check_apart({"-o": args.output, "--json": args.json}, [args.base])
    if not args.output.endswith(".json"):
        raise ConfigError(f"-o {args.output!r}: the name of a device profile must end in .json")
    try:
        day = args.date and date.fromisoformat(args.date).isoformat()
    except ValueError:
        day = None
    if day != args.date:
        raise ConfigError(f"--date {args.date!r}: expected a day as YYYY-MM-DD, such as 2026-01-31")
    return load_profile(args.base) if args.base else None


def _summary(path: str, profile: DeviceProfile) -> dict[str, Any]:
    counts = {name: len(getattr(profile, name)) for name in PARTS}
    rates = {dtype: peak.per_s for dtype, peak in sorted(profile.matrix_flops.items())}
    return {
        "profile": path,
        "device": profile.device,
        "provenance": profile.provenance,
        "samples": counts,
        "matrix_flops": rates,
        "memory_bytes_per_s": profile.memory_rate.per_s,
        "host_op_ns": profile.host.op_ns,
        "host_job_ns": profile.host.job_ns,
        "host_between_steps_ns": profile.host.between_steps_ns,
    }
