"""Claims about power and clocks measured on H100s and H200s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log
from statistics import fmean, median

import device_profile
import power_profile
from claiming import RESULTS, Row, claim, raw, table

from benchmarks.gpu import predict
from interlace.cost_model.profile import Accuracy, Errors, Power, PowerSample, load_profile
from interlace.grouping import grouped

DEVICES = {"H100": "h100", "H200": "h200"}
"""Name of a device in tables -> folder of its results."""
SUSTAINED = ("gemm 8192x8192x8192", "gemm 4096x4096x4096", "gemm 2048x4096x4096")
LOADS = {"gemm 8192x8192x8192": "8192 x 8192 x 8192", "gemm 2048x4096x4096": "2048 x 4096 x 4096"}
"""Products that are used as a load which starts and stops."""
FALLEN, RISEN = 0.95, 1.03
"""The clock has fallen if it is below this multiple of the clock when a load starts, and has risen if it is above this multiple of the
clock when the load ends."""
AT_REST = {
    "idle": "nothing queued",
    "wait 1 thread": "one thread sleeps",
    "spin 16 blocks": "16 blocks wait for a flag",
    "spin 32 blocks": "32 blocks wait",
    "spin 132 blocks": "132 blocks wait",
}
WAITING = {"all_reduce waits": "an all_reduce waits", "recv waits": "a receive waits"}


def _files() -> dict[str, Row]:
    return {name: raw(f"{folder}/power_kinds.json") for name, folder in DEVICES.items()}


def _parts() -> dict[str, Power]:
    return {name: device_profile.power_of(folder) for name, folder in DEVICES.items()}


@claim
def power_parameters() -> str:
    """Parameters of a device as a whole."""
    said = []
    for name, part in _parts().items():
        measured = _files()[name]
        drivers, a_degree = measured["gpus"][0]["limits"]["limit_w"], power_profile.static_of(measured).a_degree
        said.append(
            f"{name}: limit {part.limit_w:.0f} W (the driver's is {drivers:.0f}), static {part.static_w:.0f} W (rises by {a_degree:.1f} W "
            f"per degree), energy of a kernel proportional to the clock to the power of {part.energy_exponent:.2f}"
        )
    beside = _parts()["H100"].beside_w
    return "; ".join(said) + f"; communication beside computation adds {beside:.0f} W (measured on H100, also used for H200)"


@claim
def power_kinds() -> str:
    """Watts above static at the highest clock, and the share of the time that depends on the clock, by kind and size."""
    found = {name: {(each.kind, each.size): each for each in part.samples} for name, part in _parts().items()}
    keys = dict.fromkeys(key for samples in found.values() for key in sorted(samples))
    rows = ([kind, _size(kind, size), *(_sample(samples.get((kind, size))) for samples in found.values())] for kind, size in keys)
    return table(["kind", "FLOPs or bytes", *(f"{name}: W, share" for name in DEVICES)], rows)


def _size(kind: str, size: int) -> str:
    products = kind == "gemm" or kind.startswith("attention")
    return f"{size / 1e9:.0f} GFLOP" if products else f"{size} B" if size < 1 << 20 else f"{size >> 20} MiB"


def _sample(each: PowerSample | None) -> str:
    return f"{each.watts:.0f}, {each.clock_share:.2f}" if each else ""


@claim
def power_sustained() -> str:
    """Products repeated for a second, without and with gaps: their time, the clock and the power, medians over the GPUs."""
    rows = []
    for kind in SUSTAINED:
        for busy in (1.0, 0.75, 0.5):
            cells = []
            for each in _files().values():
                found = [row for gpu in each["gpus"] for row in gpu["windows"] if (row["kind"], row["busy"]) == (kind, busy)]
                took, mhz, watts = (median(row[name] for row in found) for name in ("us", "mhz", "watts"))
                cells.append(f"{took:.0f} us, {mhz:.0f} MHz, {watts:.0f} W")
            rows.append([kind.removeprefix("gemm ").replace("x", " x "), f"{busy:.0%}", *cells])
    return table(["product", "busy", *DEVICES], rows)


@claim
def power_reaction() -> str:
    """When the clock falls after a load begins that draws more than the limit, and rises after it ends."""
    found = [each for file in _files().values() for gpu in file["gpus"] for each in gpu["steps"] if each["kind"] in LOADS]
    falls, rises = [_falls(each) for each in found], [_rises(each) for each in found]
    return (
        f"from idle the clock falls {min(falls):.0f} to {max(falls):.0f} ms after products begin, and begins to rise "
        f"{min(rises):.0f} to {max(rises):.0f} ms after they end ({len(found)} runs: two products, two GPUs of each kind)"
    )


def _falls(each: Row) -> float:
    """Milliseconds from the first product until the clock falls."""
    begin = median(mhz for _, mhz, _ in each["up"][:5])
    return float(next(at for at, mhz, _ in each["up"] if mhz < FALLEN * begin))


def _rises(each: Row) -> float:
    """Milliseconds from the end of the last product until the clock rises."""
    loaded = each["down"][0][1]
    return float(next(at for at, mhz in each["down"] if mhz > RISEN * loaded))


@claim
def power_waves() -> str:
    """Load for half of each period: the clock at its start and at its end, medians over the GPUs."""
    rows = []
    periods = dict.fromkeys(row["period_ms"] for file in _files().values() for gpu in file["gpus"] for row in gpu["waves"])
    for period in periods:
        cells = []
        for kind in LOADS:
            for each in _files().values():
                here = [row for gpu in each["gpus"] for row in gpu["waves"] if (row["kind"], row["period_ms"]) == (kind, period)]
                cells.append(" -> ".join(f"{median(row[name] for row in here):.0f}" for name in ("mhz_first", "mhz_last")))
        rows.append([f"{period} ms", *cells])
    return table(["period", *(f"{size}, {name}" for size in LOADS.values() for name in DEVICES)], rows)


@claim
def power_at_rest() -> str:
    """Watts of a GPU that waits, and its temperature, by GPU."""
    files = _files().values()
    rows = [[what, *(_drawn(gpu["idle"], kind) for each in files for gpu in each["gpus"])] for kind, what in AT_REST.items()]
    rows += [[what, *(cell for each in files for cell in (_drawn(each["ranks"][0], kind), ""))] for kind, what in WAITING.items()]
    return table(["", *(f"{name}, GPU {index}" for name in DEVICES for index in (0, 1))], rows)


def _drawn(rows: list[Row], kind: str) -> str:
    found = next(row for row in rows if row["kind"] == kind)
    return f"{found['watts']:.0f} W, {found['celsius']:.0f} C"


@claim
def power_beside() -> str:
    """Kernels and all_reduces at the same time: the time of a chunk of each, and their energy above static compared with running alone."""
    static, found = power_profile.static_of(raw("h100/power_kinds.json")), power_profile.beside_of(raw("h100/power_beside.json"))
    sizes, rows = sorted({each.all_reduce_mib for each in found}), []
    for kind in dict.fromkeys(each.kind for each in found):
        cells = []
        for mib in sizes:
            gpus = [each for each in found if (each.kind, each.all_reduce_mib) == (kind, mib)]
            took = [
                f"{median(getattr(each, part)[name] for each in gpus):.2f} -> {median(each.both[name] for each in gpus):.2f}"
                for part, name in (("kernels", "kernels_ms"), ("all_reduces", "all_reduces_ms"))
            ]
            more = [more / alone for more, alone in (each.more_millijoules(static) for each in gpus)]
            cells.append(f"{', '.join(took)}, {' and '.join(f'{100 * each:+.0f} %' for each in more)}")
        rows.append([kind, *cells])
    return table(["kernels", *(f"all_reduces of {mib} MiB: ms of kernels, ms of all_reduces, energy" for mib in sizes)], rows)


@claim
def energy_beside() -> str:
    """Power that communication adds in training steps, and errors of changes of a step's energy with and without it."""
    found, static = raw("h100/beside_energy.json"), power_profile.static_of(raw("h100/power_kinds.json"))
    rows = found["configurations"]
    without, with_it = _off(rows)
    others = [row["others_w"] for row in rows]
    looped = power_profile.beside_watts(raw("h100/power_beside.json"), static)
    steep = max(rows, key=lambda row: abs(row["predicted"] - row["without"]) / row["others_w"])
    return (
        f"{found['watts']:.0f} W by least squares from {len(rows)} configurations, {min(others):.0f} to {max(others):.0f} W with one "
        f"of them left out (`{steep['case']}` {steep['plan']} has the largest influence: {steep['others_w']:.0f} W without it; the table "
        f"above gives {looped:.0f} W); the median error of a plan's change of energy is {100 * with_it:.1f} points, each predicted with "
        f"the value from all others, and {100 * without:.1f} points without this power"
    )


@claim
def calibrated_energy() -> str:
    """By how much a kernel's energy differs between three runs of calibration, and its power above that at rest against the profile's."""
    runs = [_by_load(run["loads"]) for run in raw("h100/power_readings.json")["runs"]]
    found = [[run[key] for run in runs] for key in runs[0] if key in HELD_BY_CALIBRATE]
    held, paused = ([_apart(load[how]["joules"] for load in loads) for loads in found] for how in ("full", "paused"))
    return (
        f"the energy of {len(found)} kernels without pauses differs by {100 * min(held):.0f} to {100 * max(held):.0f} % between the three, "
        f"with equal pauses by {100 * min(paused):.0f} to {100 * max(paused):.0f} %; watts above rest with constant inputs (in the "
        f"profile `h100`, of PyTorch's kernels, with random ones): {_above_rest('h100', runs, 'pace')}"
    )


HELD_BY_CALIBRATE = {
    ("attention", 1 << 36),
    ("attention", 1 << 37),
    ("attention_grad", 343_597_383_680),
    ("gemm", 1 << 37),
    ("gemm", 369_367_187_456),
    ("gemm", 1 << 41),
}
"""Kind and FLOPs of the kernels that reached the limit in all three runs, without batched products, of which there are several sizes."""
ATTENTION = ("attention", "attention_grad")
CONSTANT = ("gelu", "add", "softmax", "layer_norm")


@claim
def h200_calibrated_energy() -> str:
    """Energy of products with pauses on an H200 in long rows and in short ones, and the power of other kernels against the profile's."""
    loads = raw("h200/power_readings.json")["loads"]
    long = [load["paused"]["joules"] / load["full"]["joules"] - 1 for load in loads if load["kind"] == "gemm" and load["paused"]]
    held = [(load["full"], load["paused"]) for load in loads if load["kind"] != "gemm" and load["paused"]]
    exponents = [
        log(full["joules"] / paused["joules"]) / log(full["mhz"] / paused["mhz"])
        for full, paused in held
        if paused["mhz"] > 1.05 * full["mhz"]  # as in `interlace.bridge.calibrate.power`
    ]
    profile = load_profile("h200").power
    short = list[float]()
    for gpu in raw("h200/power_kinds.json")["gpus"]:
        windows = {(row["kind"], row["busy"]): row for row in gpu["windows"]}
        spent = {key: (row["watts"] - profile.static_w) * row["every_ms"] / row["count"] for key, row in windows.items()}
        short += [spent[kind, busy] / spent[kind, 1.0] - 1 for kind, busy in spent if busy == 0.5 and kind.startswith("gemm")]
    return (
        f"the energy of products at the high clock is {100 * min(long):.0f} to {100 * max(long):.0f} % above that at the limit "
        f"({len(long)} sizes), in windows of 2 to 4 ms (`power_kinds.json`) {100 * min(short):.0f} to {100 * max(short):.0f} % "
        f"({len(short)}), and the exponent of energy over clock is {median(exponents):.2f} instead of {profile.energy_exponent}; "
        f"watts above rest (in the profile `h200`): {_above_rest('h200', [_by_load(loads)], 'full')}"
    )


@claim
def short_rows_energy() -> str:
    """Energy of kernels in rows of 2.5 ms on H100s, of products also at the high clock, and their power against the profile's."""
    every = [run["loads"] for run in raw("h100/power_readings_short.json")["runs"]]
    runs = [_by_load(loads) for loads in every]
    shared = [key for key in runs[0] if key[0] not in ("reduce", "gemm_batched") and all(key in run for run in runs)]
    apart = [_apart(run[key]["full"]["joules"] for run in runs) for key in shared]
    return (
        f"the energy of {len(apart)} kernels (without batched products, of which two are of one size, and a reduction, of which one takes "
        f"longer than a row) differs by {100 * median(apart):.0f} % in the median between GPUs, by {100 * max(apart):.0f} % at most; at "
        f"the high clock it differs from that at the limit by: {_at_high_clock(every)}; watts above rest (in the profile `h100`): "
        f"{_above_rest('h100', runs, 'full')}"
    )


@claim
def short_rows_energy_of_h200() -> str:
    """The same on two H200s."""
    every = [run["loads"] for run in raw("h200/power_readings_short.json")["runs"]]
    runs = [_by_load(loads) for loads in every]
    apart = [_apart(run[key]["full"]["joules"] for run in runs) for key in runs[0] if all(key in run for run in runs)]
    profile, found = load_profile("h200").power, load_profile(str(RESULTS / "h200" / "calibrated_again.json")).power
    held = " and ".join(str(sum(load["paused"] is not None for load in loads)) for loads in every)
    return (
        f"the energy of {len(apart)} kernels differs by {100 * median(apart):.0f} % in the median between the two, by "
        f"{100 * max(apart):.0f} % at most; at the high clock it differs from that at the limit by: {_at_high_clock(every)}; watts above "
        f"rest (in the profile `h200`): {_above_rest('h200', runs, 'full')}; {held} of {len(every[0])} kernels reach the limit; on the "
        f"first, the exponent of energy over clock is {found.energy_exponent} instead of {profile.energy_exponent}, the limit "
        f"{found.limit_w} W instead of {profile.limit_w}"
    )


def _at_high_clock(runs: Iterable[Iterable[Row]]) -> str:
    """By how much kernels need more energy at the high clock than at the limit, by kind."""
    held = [load for loads in runs for load in loads if load["paused"]]
    more = {
        name: [100 * (load["paused"]["joules"] / load["full"]["joules"] - 1) for load in held if load["kind"] in kinds]
        for name, kinds in {"products": ("gemm",), "batched ones": ("gemm_batched",), "attention and its gradient": ATTENTION}.items()
    }
    return ", ".join(f"{name} {min(found):+.0f} to {max(found):+.0f} % ({len(found)})" for name, found in more.items())


KERNELS = 5
"""Kernels of each of two rounds of readings at the limit."""


@claim
def limit_by_readings() -> str:
    """The power limit of H200s as kernels by themselves show it, and as kernels that alternate do."""
    gpus = raw("h200/power_turns.json")["gpus"]
    alone = [median(each["watts"] for each in gpu["single"][at : at + KERNELS]) for gpu in gpus for at in (0, KERNELS)]
    turns = grouped((each["turn_s"], fmean(row[2] for row in each["watts"])) for gpu in gpus for each in gpu["mixed"])
    said = ", ".join(f"{1e3 * turn_s:.0f} ms {min(watts):.0f} to {max(watts):.0f} W" for turn_s, watts in sorted(turns.items()))
    return (
        f"the median of {KERNELS} kernels by themselves is {min(alone):.1f} to {max(alone):.1f} W (profile `h200`: "
        f"{load_profile('h200').power.limit_w:.1f}); with turns of {said}"
    )


def _by_load(loads: Iterable[Row]) -> dict[tuple[str, int], Row]:
    """Readings by kind and size of the kernel."""
    return {(load["kind"], load["size"]): load for load in loads}


def _above_rest(device: str, runs: Sequence[Mapping[tuple[str, int], Row]], took: str) -> str:
    """Watts above rest in runs, and in brackets in the profile: energy by the time in the same rows (`full`) or alone (`pace`)."""
    said = []
    for kind in CONSTANT:
        drawn = [load["full"]["joules"] / load[took]["took_s"] for run in runs for (name, _), load in run.items() if name == kind]
        known = max((sample for sample in load_profile(device).power.samples if sample.kind == kind), key=lambda sample: sample.size)
        said.append(f"{kind} {' to '.join(dict.fromkeys(f'{watts:.0f}' for watts in (min(drawn), max(drawn))))} ({known.watts:.0f})")
    return ", ".join(said)


def _apart(values: Iterable[float]) -> float:
    found = list(values)
    return max(found) / min(found) - 1


@claim
def energy_waiting() -> str:
    """Power that waiting communication adds in training steps, by device."""
    said = []
    for name, folder in DEVICES.items():
        found = raw(f"{folder}/waiting_energy.json")
        rows = found["configurations"]
        without, with_it = _off(rows)
        others = [row["others_w"] for row in rows]
        spans = f"{min(others):.0f} to {max(others):.0f} W with one left out"
        off = f"{100 * with_it:.1f} points, each predicted with the value from all others, and {100 * without:.1f} points without it"
        said.append(f"{name} {found['watts']:.0f} W from {len(rows)} configurations ({spans}; median error of the change of energy {off})")
    return "; ".join(said)


def _off(rows: Sequence[Row]) -> tuple[float, float]:
    """Median errors of changes of a step's energy, without and with the fitted watts."""
    without, with_it = (median(abs(row[key] - row["measured"]) for row in rows) for key in ("without", "predicted"))
    return without, with_it


@claim
def power_mixes() -> str:
    """Energy of a kernel at lower clocks over that at the highest clock, in turns with products whose energy at that clock is known."""
    cells: dict[str, dict[str, str]] = {}
    for name, folder in DEVICES.items():
        static, by_kind = power_profile.static_of(_files()[name]), {}
        for gpu in raw(f"{folder}/power_mixes.json")["gpus"]:
            for kind, ratios in power_profile.energy_ratios(gpu["mixes"], static).items():
                by_kind.setdefault(kind, []).extend(ratios)
        for kind, ratios in by_kind.items():
            cells.setdefault(kind, {})[name] = ", ".join(
                f"{mhz:.0f} MHz {100 * ratio:.0f} %" for mhz, ratio in sorted(ratios, reverse=True)
            )
    return table(["kind", *DEVICES], ([kind, *(found.get(name, "") for name in DEVICES)] for kind, found in cells.items()))


@claim
def predicted_gains() -> str:
    """Predicted gains compared with measured ones, as stored in the profiles."""
    return _accuracies(
        lambda found: (
            f"{found.gains}: {found.gain_ratio:.2f}, {100 * found.gain_median:.0f} %, {100 * found.gain_points:.1f}" if found.gains else ""
        ),
        "gains: predicted over measured, error, points",
    )


@claim
def predicted_steps() -> str:
    """Predicted steps compared with measured ones, as stored in the profiles."""
    return _accuracies(
        lambda found: (
            f"{found.steps}: {100 * found.step_bias:+.1f}, {100 * found.step_median:.1f}, {100 * found.step_worst:+.1f} %; "
            f"{found.right_order} of {found.pairs}"
            if found.steps
            else ""
        ),
        "steps: bias, error, worst; pairs in order",
    )


@claim
def gains_now() -> str:
    """Gains predicted with the power limit, as planning does, compared with measured ones."""
    said = []
    for name, device in DEVICES.items():
        found = _errors(device)
        for what, each in (("several stages", found.stages_limited), ("one stage", found.one_stage_limited)):
            said.append(
                f"{name}, {what}: {each.gain_ratio:.2f} times the measured gain in the median, median error "
                f"{100 * each.gain_median:.0f} % of the gain ({each.gains} gains), "
                f"{each.right_order} of {each.pairs} pairs of plans in order"
            )
    return "; ".join(said)


def _errors(device: str) -> Accuracy:
    found = load_profile(device).accuracy
    if found is None:
        raise SystemExit(f"{device}: no errors of predictions; run `interlace accuracy --write`")
    return found


def _accuracies(cell: Callable[[Errors], str], what: str) -> str:
    """A row for each device, without and with pipeline stages."""
    rows = []
    for name, device in DEVICES.items():
        found = _errors(device)
        rows.append([f"{name}, one stage", cell(found.one_stage), cell(found.one_stage_limited)])
        rows.append([f"{name}, several stages", cell(found.stages), cell(found.stages_limited)])
    return table([what, "without the power limit", "with it"], rows)


@claim
def two_gpus_predicted() -> str:
    """Steps, gains, clocks, energy and peaks of two H100, predicted before they were measured."""
    return predict.table(raw("two_gpus_predictions.json")["predictions"], raw("h100/testbed_two_gpus.json"))


@claim
def two_h200_predicted() -> str:
    """The same for two H200."""
    return predict.table(raw("two_gpus_predictions.json")["predictions"], raw("h200/testbed_two_gpus.json"))
