"""Measure this machine through Paddle itself: what `interlace calibrate` writes as a device profile.

Each figure comes from small static programs that `StandaloneExecutor` runs with a `core.Plan`, like a training step. The time of an
operation is the difference between a program that has it many times and one that has it once. On a CPU, where the host executes operations
itself, the time of an operation on a tiny tensor is subtracted: it is the host's share, and is stored separately. Devices that work
asynchronously get other work first, so that the host is ahead of the device and its share does not count.

GPUs and custom devices are measured by the same code, fast ones in bfloat16. Operations were measured with it on H100s through the
testbed's custom device; it has not run on Paddle's GPU build.
"""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import paddle
from tqdm import tqdm

from interlace.bridge.calibrate.cases import cases, is_usual
from interlace.bridge.calibrate.communication import Communication
from interlace.bridge.calibrate.copies import copy_samples
from interlace.bridge.calibrate.cpu_collectives import GROUP, cpu_collectives
from interlace.bridge.calibrate.host import host_costs
from interlace.bridge.calibrate.power import ADDED_UNKNOWN, Load, of_devices, power_part
from interlace.bridge.guard import fault_of
from interlace.bridge.nvml import find_gpu
from interlace.bridge.probe.bench import MOST_OPS, Bench, Case, fill, paddle_settings
from interlace.bridge.profiles import known_name
from interlace.bridge.targets import Device
from interlace.bridge.targets.cpu import cpu_model
from interlace.cost_model.interference import COPIES
from interlace.cost_model.model import sample_size
from interlace.cost_model.profile import SCHEMA, CopySample, DeviceProfile, Interference, OpSample, Peak, Power, Provenance
from interlace.cost_model.unaligned import slowdowns
from interlace.cost_model.work import Part
from interlace.errors import ConfigError
from interlace.grouping import grouped, numbered
from interlace.installed import versions
from interlace.planning.peers import Peers, gather

MEASURABLE = 1.0
"""An operation counts as measured if its time without the host's share is at least this multiple of that share."""
CLEAR, TRIES = 2, 3
"""An operation that takes less than `CLEAR` times the least time that counts is measured `TRIES` times, and the median decides. To take the
first that is long enough would prefer times that noise lengthened."""


class Calibrated(NamedTuple):
    """The result of a calibration.

    Attributes:
        profile: Only what was measured.
        no_power: Why power was not measured; empty if it was.
        failed: What was not measured, with the reason: kinds of operations, copies and messages.
    """

    profile: DeviceProfile
    no_power: str
    failed: tuple[str, ...]


def calibrate(
    bench: Bench, communication: Communication, quick: bool = False, today: str = "", command: str = "", peers: Peers | None = None
) -> Calibrated:
    """Measure a device; operations and power also on those of the other ranks. Takes some minutes, or less than one when `quick` (fewer
    sizes, shorter runs).

    Args:
        bench: The device.
        communication: What was measured between several devices.
        quick: Whether to measure less.
        today: Date for the profile's provenance; empty for the current date.
        command: The command for the profile's provenance.
        peers: The ranks of a run, of which this is the first and the others are in `measure_for_first`; None if there is one.

    Raises:
        ConfigError: No elementwise operation could be measured, as on a busy machine, or the device stopped working.
    """
    device, is_host = bench.device, bench.is_serial
    with paddle_settings():
        failed = dict[str, str]()
        host, found = host_costs(bench, quick), cases(bench.is_fast, quick, failed)
        samples, measured = op_samples(bench, found, host.op_ns, failed)
        samples, power, no_power, devices = of_all_devices(bench, samples, measured, failed, peers)
        matrix_flops, memory_rate = _matrix_rates(samples), _memory_rate(samples, failed)
        copies = () if is_host else _copies(device, quick, failed)
    reasons = [f"{name}: {why}" for name, why in failed.items()]
    reasons += [f"{message}: its time does not differ from noise" for message in communication.noise]
    reasons += (*communication.beside.failed, *communication.copies.failed)
    told = failed.keys() | {_name(case.part) for case, _ in measured}
    if hidden := sorted({_name(case.part) for case in found} - told):
        reasons.append(f"{', '.join(hidden)}: shorter than the host's share, noise or another kernel of the operation")
    profile = DeviceProfile(
        interlace_profile=SCHEMA,
        device=known_name(device) or str(device.place),
        provenance=Provenance(
            f"{platform.system()} {platform.machine()}, {cpu_model()}, {os.cpu_count()} cores",
            today or date.today().isoformat(),
            command,
            versions=versions(),
            note=_note(is_host, communication, no_power, reasons, devices),
        ),
        ranks_per_host=max([8, *(sample.group_size for sample in communication.collectives)]),
        memory_bytes=device.total_bytes() or (_host_bytes() if is_host else 0),
        pinned_bytes=0,
        shortest_kernel_ns=0,
        matrix_flops=matrix_flops,
        vector_flops={},
        memory_rate=memory_rate,
        host=host,
        ops=tuple(samples),
        unaligned=slowdowns(samples),
        collectives=tuple(cpu_collectives(quick)) if is_host else communication.collectives,
        p2p=communication.p2p,
        copies=(*copies, *communication.copies.samples),
        interference=(*communication.beside.rows, *communication.copies.rows),
        late_beside_wait_ns=communication.beside.late_ns,
        power=power,
    )
    return Calibrated(profile, no_power, tuple(reasons))


def completed(profile: DeviceProfile, base: DeviceProfile, name: str) -> DeviceProfile:
    """A calibrated profile in which what was not measured is taken from the profile `base`, called `name` in the provenance: collectives,
    transfers, copies, interference with messages and copies of other kinds and group sizes, the network, kinds of operations and rates;
    other forms of unaligned rows, if the device is the same or was found to be slowed by some; the host's time between steps if it is
    longer there, as no script runs in a calibration; and, if both are of the same device, also its memory, copies of other numbers of
    devices and in both directions, and power as far as it was not measured."""
    kinds = {(sample.kind, sample.dtype) for sample in profile.ops}
    others = [sample for sample in base.ops if (sample.kind, sample.dtype) not in kinds]
    known = {(sample.kind, sample.group_size) for sample in profile.collectives}
    unknown = [sample for sample in base.collectives if (sample.kind, sample.group_size) not in known]
    beside = {_beside(row) for row in profile.interference}
    rows = [row for row in base.interference if _beside(row) not in beside]
    ways = {(sample.direction, sample.ranks) for sample in profile.copies}
    ways |= {("both", row.group_size) for row in profile.interference if row.op in COPIES}
    copies = [sample for sample in base.copies if (sample.direction, sample.ranks) not in ways]
    taken = ["p2p", "network"]
    taken += ["pinned_bytes", "shortest_kernel_ns", "late_beside_wait_ns"]
    is_same = base.device == profile.device
    forms = {row.form for row in profile.unaligned}
    slowed = [row for row in base.unaligned if row.form not in forms]
    if not is_same:  # a device without any has none, as a CPU
        slowed = [msgspec.structs.replace(row, source="derived") for row in slowed] if forms else []
    taken += ["memory_bytes", "power"] if is_same else []
    missing = {each: getattr(base, each) for each in taken if not getattr(profile, each) and getattr(base, each)}
    if copies and (is_same or not profile.copies):
        missing["copies"] = (*profile.copies, *copies)
    if is_same and profile.power is not None and base.power is not None:
        drawn = {sample.kind for sample in profile.power.samples}
        missing["power"] = msgspec.structs.replace(
            profile.power,
            samples=(*profile.power.samples, *(sample for sample in base.power.samples if sample.kind not in drawn)),
            note=profile.power.note.replace(ADDED_UNKNOWN, f"what communication adds beside computation is that of {name}"),
            **{each: getattr(base.power, each) for each in ("waiting_w", "beside_w", "response_ns", "step_mhz", "lowest_mhz")},
        )
    if rows:
        missing = {"interference": (*profile.interference, *rows), **missing}
    if unknown:
        missing = {"collectives": (*profile.collectives, *unknown), **missing}
    if slowed:
        missing["unaligned"] = (*profile.unaligned, *slowed)
    if base.host.between_steps_ns > profile.host.between_steps_ns:
        note = f"{profile.host.note}; a script's longer time between steps is that of {name}"
        missing["host"] = msgspec.structs.replace(profile.host, between_steps_ns=base.host.between_steps_ns, note=note)
    rates = {each: getattr(base, each) | getattr(profile, each) for each in ("matrix_flops", "vector_flops")}
    named = {"host": "time between steps", "unaligned": "products with unaligned rows"}
    of_base = [named.get(each, each.removesuffix("_ns").replace("_", " ")) for each in missing]
    of_base += [f"{each.replace('_', ' ')} of {dtype}" for each in rates for dtype in sorted(rates[each].keys() - getattr(profile, each))]
    of_base += ["ranks per host"] if base.ranks_per_host > profile.ranks_per_host else []
    of_base += sorted({f"{sample.kind} of {sample.dtype}" for sample in others})
    note = f"{profile.provenance.note}; of {name}: {', '.join(of_base) or 'nothing'}"
    return msgspec.structs.replace(
        profile,
        provenance=msgspec.structs.replace(profile.provenance, note=note),
        ranks_per_host=max(profile.ranks_per_host, base.ranks_per_host),
        ops=(*profile.ops, *others),
        **rates,
        **missing,
    )


def _beside(row: Interference) -> tuple[bool, str, int]:
    """What is measured together: all operations beside a message or copy, or copies of both directions."""
    return row.op in COPIES, "" if row.op in COPIES else row.beside, row.group_size


ROW_S = 0.0025
"""Seconds that a row of kernels takes whose power is measured: a row and the pause after it are far shorter than the times over which the
limiter and the energy counter average, and take longer than the host needs to issue the row. Of products in rows of 10 ms with pauses, the
counter of an H200 missed 10 to 15 % of the energy (benchmarks/results/power.md)."""
PRODUCT_SIZES = (0.3, 0.6)
"""Products and attention draw less power at small sizes. Besides the largest, these sizes are measured, as fractions of the sorted list."""
LEAST_LOAD_NS = 30_000
"""The shortest kernel whose power is measured: with shorter ones the gaps between kernels dominate."""


class _Own(msgspec.Struct, frozen=True):
    """What a rank measured on its device: operations, its power or why that was not measured, and the failures."""

    ops: list[OpSample]
    power: Power | None
    why_not: str
    failed: dict[str, str]


class Common(NamedTuple):
    """Operations and power, as means over `devices` devices, and why power was not measured."""

    ops: list[OpSample]
    power: Power | None
    no_power: str
    devices: int


def measure_for_first(bench: Bench, quick: bool, peers: Peers) -> None:
    """What all ranks but the first do while that one is in `calibrate`: measure operations and power of their own GPU and send them. Does
    nothing on other devices. If the device fails for good, the first rank gets the reason."""
    if bench.device.gpu_index() is None:
        return
    failed, samples, measured = dict[str, str](), list[OpSample](), list[tuple[Case, float]]()
    with paddle_settings():
        try:
            samples, measured = op_samples(bench, cases(bench.is_fast, quick, failed), 0.0, failed)
        except ConfigError as error:
            failed["operations"] = str(error)
        of_all_devices(bench, samples, measured, failed, peers)


def of_all_devices(
    bench: Bench, samples: list[OpSample], measured: Sequence[tuple[Case, float]], failed: dict[str, str], peers: Peers | None
) -> Common:
    """The means over the GPUs of all ranks, which differ by some percent; of devices that are no GPUs, the first rank's. Adds to `failed`
    what failed on other ranks only."""
    own = _Own(samples, *power_of(bench, measured), failed)
    every = gather(peers, "operations and power", own) if bench.device.gpu_index() is not None else [own]
    for rank, each in enumerate(every):
        failed.update({f"{name} on rank {rank}": why for name, why in each.failed.items() if name not in own.failed})
        if own.power and not each.power:
            failed[f"power of rank {rank}"] = each.why_not
    found = grouped(pair for each in every for pair in numbered(each.ops, _case_of).items())
    means = [_mean_of(found[key]) for key in numbered(samples, _case_of)]
    power = of_devices([each.power for each in every if each.power]) if own.power else None
    return Common(means, power, own.why_not, sum(bool(each.ops) for each in every))


def _case_of(sample: OpSample) -> tuple[Any, ...]:
    return sample.kind, sample.dtype, sample.size_bytes, tuple(sorted(sample.dims.items()))


def _mean_of(found: Sequence[OpSample]) -> OpSample:
    """The mean time of an operation on several devices; its spread is at least the difference between them."""
    times = [each.dur_ns for each in found]
    spread_ns = max(max(times) - min(times), *(each.spread_ns for each in found))
    return msgspec.structs.replace(found[0], dur_ns=round(fmean(times)), spread_ns=spread_ns, num_runs=sum(each.num_runs for each in found))


def power_of(bench: Bench, measured: Sequence[tuple[Case, float]]) -> tuple[Power | None, str]:
    """The power that kernels draw, from loads of all kinds in `measured` (pairs of a case and its time in nanoseconds), of cases that stand
    for their kind (`is_usual`); or None and the reason, if this is not a GPU or the driver does not report it."""
    index = bench.device.gpu_index()
    if index is None:
        return None, "it is only measured on GPUs"
    gpu, why = find_gpu(index)
    if gpu is None:
        return None, why
    loads = []
    whole = [(case, once_ns) for case, once_ns in measured if case.without is None and once_ns >= LEAST_LOAD_NS and is_usual(case.part)]
    for _, found in sorted(grouped((case.part.kind, (case, once_ns)) for case, once_ns in whole).items()):
        ordered = sorted(found, key=lambda each: each[0].part.flops or each[0].part.size_bytes)
        places = [int(share * len(ordered)) for share in PRODUCT_SIZES] if ordered[0][0].part.flops else []
        loads += [_load(bench, *ordered[at]) for at in dict.fromkeys([*places, len(ordered) - 1])]
    try:
        return power_part(loads, gpu), ""
    except Exception as error:  # from Paddle or NVML
        return None, f"it could not be measured: {fault_of(error).text}"


def _load(bench: Bench, case: Case, once_ns: float) -> Load:
    count = min(MOST_OPS, max(2, int(ROW_S * 1e9 / once_ns)))
    return Load(
        case.part.kind,
        case.part.flops or case.part.size_bytes,
        count,
        count * once_ns / 1e9,
        lambda: bench.runner(lambda: fill(case, count), inputs=bench.inputs(case)),
    )


def op_samples(
    bench: Bench, wanted: Sequence[Case], op_ns: float, failed: dict[str, str]
) -> tuple[list[OpSample], list[tuple[Case, float]]]:
    """Samples of the cases that could be measured, sorted, and these cases with their times in nanoseconds, dispatch included.

    Args:
        bench: The device; on a serial one, operations that are not longer than dispatch are left out.
        wanted: What to measure.
        op_ns: The host's time for an operation, which is subtracted on a serial device.
        failed: Gets the reasons of failures, by kind and dtype, and by size if not all sizes failed.

    Raises:
        ConfigError: The device runs nothing any more after a failure.
    """
    samples, measured, op_ns = list[OpSample](), list[tuple[Case, float]](), op_ns if bench.is_serial else 0.0
    failures = defaultdict[str, list[tuple[Part, str]]](list)
    for case in tqdm(wanted, desc="operations", unit="op", leave=False, disable=None):
        part = case.part
        try:
            own_ns = bench.op_ns(case.without)[0] if case.without else op_ns
            dur_ns, spread_ns = _measured(bench, case, own_ns + max(MEASURABLE * op_ns, 1.0))
        except Exception as error:  # Paddle raises many classes: the device may lack this kernel
            failures[_name(part)].append((part, fault_of(error).text))
            _require_working(bench, part, error)
            continue
        if dur_ns:
            times = round(dur_ns - own_ns), round(spread_ns)
            samples.append(OpSample(part.kind, part.dtype, dict(part.dims), part.size_bytes, *times, bench.num_runs))
            measured.append((case, dur_ns))
    sizes = Counter(_name(case.part) for case in wanted)
    for name, parts in failures.items():
        of_all = len(parts) == sizes[name]
        failed.update({name: parts[0][1]} if of_all else {f"{name} {dict(part.dims)}": why for part, why in parts})
    return sorted(samples, key=lambda s: (s.kind, s.dtype, s.size_bytes, sorted(s.dims.items()))), measured


def _measured(bench: Bench, case: Case, least_ns: float) -> tuple[float, float]:
    """Time of an operation, dispatch included, and its spread, in nanoseconds; zeros if it takes less than `least_ns`."""
    found = [bench.op_ns(case)]
    if found[0][0] < CLEAR * least_ns:
        found += [bench.op_ns(case) for _ in range(TRIES - 1)]
    once = sorted(found)[len(found) // 2]
    return once if once[0] >= least_ns else (0.0, 0.0)


def _name(part: Part) -> str:
    return f"{part.kind} of {part.dtype}"


def _copies(device: Device, quick: bool, failed: dict[str, str]) -> tuple[CopySample, ...]:
    """Samples of copies; an error is recorded in `failed`, so that it does not cost what was measured before."""
    try:
        found = tuple(copy_samples(device, quick))
    except Exception as error:  # Paddle raises many classes
        failed["copies"] = fault_of(error).text
        return ()
    if not found:
        failed["copies"] = "none differed from noise; is the machine busy?"
    return found


def _require_working(bench: Bench, part: Part, failure: Exception) -> None:
    """Raises ConfigError if the device runs nothing any more after a failure."""
    try:
        bench.seconds(lambda: paddle.full([1], 1.0, "float32"), num_runs=1)
    except Exception as error:
        raise ConfigError(
            f"calibrate: {_name(part)} failed, {dict(part.dims)}: {fault_of(failure).text}; since then the device runs "
            f"nothing any more: {fault_of(error).text}; start again, and report it if it fails again"
        ) from failure


def _matrix_rates(samples: Collection[OpSample]) -> dict[str, Peak]:
    """FLOP/s of the largest product of each dtype. The best of all rates would be the one that noise favours most."""
    largest: dict[str, OpSample] = {}
    for sample in sorted((s for s in samples if s.kind == "gemm"), key=sample_size):
        largest[sample.dtype] = sample
    return {
        dtype: Peak(float(f"{sample_size(sample) * 1e9 / sample.dur_ns:.4g}"), "measured", "the largest gemm sample")
        for dtype, sample in largest.items()
    }


def _memory_rate(samples: Collection[OpSample], failed: Mapping[str, str]) -> Peak:
    """Median bytes per second of the largest elementwise samples, of which caches hold only a small part.

    Raises ConfigError if there is no elementwise sample; the message says why, from `failed`.
    """
    plain = [s for s in samples if s.kind in ("add", "copy", "scale", "multiply")]
    if not plain:
        why = f"none took longer than its dispatch in {TRIES} tries"
        if failed:
            why = f"{len(failed)} failed, first {': '.join(next(iter(failed.items())))}"
        raise ConfigError(f"calibrate: no elementwise operation was measured: {why}; if the machine is busy, measure again when it is idle")
    largest = max(s.dims["elements"] for s in plain)
    rate = median(s.size_bytes * 1e9 / s.dur_ns for s in plain if s.dims["elements"] == largest)
    return Peak(float(f"{rate:.4g}"), "measured", f"read plus written, {largest} elements")


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _note(is_host: bool, communication: Communication, no_power: str, failed: Sequence[str], devices: int) -> str:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f"; other processes used this machine meanwhile (load {load:.1f} on {cores} cores)" if load > cores + 1 else ""
    what = (
        f"operations without the host's share; collectives between {GROUP} CPU processes; no copies, as there is one memory"
        if is_host
        else f"no collectives: {communication.why_not}"
        if communication.why_not
        else "collectives with all groups of a size running at once"
    )
    lacks = [*([f"no power: {no_power}"] if no_power else []), *(f"not measured: {each}" for each in failed)]
    means = f"; times of operations are means over {devices} devices" if devices > 1 else ""
    return "; ".join([what + means + busy, *lacks])
