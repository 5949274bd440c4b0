"""Checks that the profile is of this device, and compares a dozen of its times with measured ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from statistics import median

from interlace.bridge.calibrate.cases import cases, dtype_for
from interlace.bridge.calibrate.copies import DIRECTIONS, copies_ns
from interlace.bridge.guard import fault_of
from interlace.bridge.probe.bench import bench_of
from interlace.bridge.probe.lab import Lab
from interlace.bridge.profiles import known_name
from interlace.bridge.targets import Device
from interlace.cost_model import CostModel
from interlace.cost_model.profile import DeviceProfile
from interlace.cost_model.work import Part
from interlace.ir.target import GPU
from interlace.report.checks import OFFLOAD, TIMES, Check, Verdict
from interlace.report.checks import PROFILE as GROUP
from interlace.units import size

KINDS = ("gemm", "gemm_batched", "add", "multiply", "scale", "gelu", "copy", "cast", "softmax", "softmax_grad", "layer_norm")
"""Kinds of operations that are measured: of each, the largest size that a quick calibration measures."""
TOLERANCE = 0.3
"""Relative error up to which a time is accepted; or twice the error that the profile itself expects, if that is more."""
COPY_ROWS = 1024
TRIES = 3
MOST = 1.0
"""A time for which an error of this or more would be accepted is not checked, as hardly anything could contradict it."""


def check_profile(device: Device, lab: Lab | None, name: str, profile: DeviceProfile, is_asked: bool, times: bool = True) -> list[Check]:
    """Check that the profile is of this device, and, with `times`, that its times hold. `lab` measures copies; None on devices without
    pinned memory. `is_asked`: whether the user named the profile."""
    own = known_name(device)
    same = own.strip().casefold() == profile.device.casefold()
    verdict: Verdict
    if same:
        verdict, found = "holds", own
    elif device.target is GPU:
        verdict, found = "fails", f"{own or 'a GPU without a name'}; measure it with `interlace calibrate -o FILE`"
    else:
        verdict, found = "not checked", f"{own or 'this device has no name that Paddle tells'}; it may stand for others"
    rows = [Check(f"device of the profile {name}", profile.device, found, verdict, (TIMES,), GROUP)]
    if not times:
        return rows
    if not same and not (is_asked and device.target is not GPU):
        why = f"the profile is of {profile.device}"
        return [*rows, Check("its times", "as measured here", why, "not checked", (TIMES,), GROUP)]
    costs = CostModel(profile)
    return [*rows, *_operations(device, costs), *_copies(device, lab, costs)]


def _operations(device: Device, costs: CostModel) -> Iterator[Check]:
    bench = bench_of(device, quick=True)
    fast = bench.is_fast
    largest = {case.part.kind: case for case in cases(fast, quick=True) if case.part.dtype == dtype_for(fast)}
    host_ns = costs.profile.host.op_ns if device.target.serial else 0
    for name in KINDS:
        case = largest.get(name)
        if case is None:
            yield Check(name, "as the profile's", "the device builds no such operation", "not checked", (TIMES,), GROUP)
            continue
        part = case.part
        title = f"{name} {'x'.join(str(each) for _, each in part.dims)} {part.dtype}"
        expected = costs.part_time(part)
        try:
            each_ns = [bench.op_ns(case)[0] - host_ns for _ in range(TRIES)]
        except Exception as error:
            yield Check(title, _us(expected.dur_ns), f"not measured: {fault_of(error).text[:200]}", "not checked", (TIMES,), GROUP)
            continue
        yield _held(title, expected.dur_ns, each_ns, expected.rel_error)


def _copies(device: Device, lab: Lab | None, costs: CostModel) -> Iterator[Check]:
    """Checks of the times of copies, each measured with several in a row in one direction."""
    took = {} if lab is None or not costs.profile.copies else copies_ns(lab, COPY_ROWS, TRIES)
    for direction in DIRECTIONS:
        title = f"copy {'out' if direction == 'd2h' else 'in'} of {size(4 * COPY_ROWS**2)}"
        if not took:
            why = "one memory: nothing is copied" if device.target.serial else "the profile has no copies"
            yield Check(title, "as the profile's", why, "not checked", (TIMES, OFFLOAD), GROUP)
            continue
        expected = costs.part_time(Part(direction, "copy", "", (), 0, 4 * COPY_ROWS**2))
        yield _held(title, expected.dur_ns, took[direction], expected.rel_error)


def _held(title: str, expected_ns: float, each_ns: Sequence[float], rel_error: float) -> Check:
    """Compare measured times, each derived from what further repetitions add to a step, with the expected one: right if their median is,
    wrong if all of them are off, and all on one side."""
    most = max(TOLERANCE, 2 * rel_error)
    expected, found = f"{_us(expected_ns)} (+-{most:.0%})", f"{_us(min(each_ns))} to {_us(max(each_ns))}"
    low, high = (1 - most) * expected_ns, (1 + most) * expected_ns
    verdict: Verdict
    if min(each_ns) <= 0:
        verdict, found = "not checked", "steps with more of them were not longer: other work decides their length"
    elif most >= MOST:
        verdict, found = "not checked", f"{found}; the profile's time is itself uncertain"
    elif max(each_ns) - min(each_ns) > most * expected_ns and (load := _others()):
        verdict, found = "not checked", f"{found}; {load}"
    elif low <= median(each_ns) <= high:
        verdict = "holds"
    elif max(each_ns) < low or min(each_ns) > high:
        verdict = "fails"
    else:
        verdict, found = "not checked", f"{found}: measurements disagree; measure again on an idle machine"
    return Check(title, expected, found, verdict, (TIMES,), GROUP)


def _others() -> str:
    """A note on other load of this machine; empty if it has idle cores."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"others use this machine (load {load:.1f} on {cores} cores)" if load > cores else ""


def _us(dur_ns: float) -> str:
    return f"{dur_ns / 1e3:.0f} us"
