"""How far predictions are from measured training runs: steps, gains, peaks, and the order of plans.

A run is a row of a results file (`testbed_*.json`, as `benchmarks.gpu.results` writes them): its case, plan, sitting and world, the median
of the measured steps, each rank's peaks, the prediction made when it was measured (`simulated`) and, if read, joules per step. If its plan
is stored too (`plans.json` of the device says in which archive), it is predicted again: `now`, and with the power limit `limited`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import statistics
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from interlace.cost_model import CostModel, DeviceProfile, Estimate, load_profile, profile_of, save_profile
from interlace.cost_model.base import Groups
from interlace.cost_model.profile import Accuracy, Errors, is_path
from interlace.cost_model.work import Values, work_of
from interlace.errors import ConfigError, InterlaceError
from interlace.ir import Op, Program, load
from interlace.ir.dump import find_dumps
from interlace.ir.kinds import is_comm, is_copy, is_p2p
from interlace.ir.target import GPU, IDEAL, with_paddles_jobs
from interlace.planning.baseline import baseline_plan
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate

Row = dict[str, Any]
BASELINE = "stock"
"""Plan name of runs with Paddle's baseline."""
PEAKS = "in_order_peak_bytes_by_rank"
"""Key of simulated peaks. Missing in rows of Paddle's baseline whose programs are not stored, and which were simulated before it was known
what its jobs keep."""
FLOAT32 = ("small", "moe")
"""Prefixes of cases in float32, which are not compared: the profile's float32 products use TF32, those of the testbed do not."""
HOST_BOUND = re.compile(r"captured-\w+-h(1024|2048)-")
"""Cases whose steps are bound by the host. They are not compared, as the host's time per operation differs from machine to machine."""
LAUNCHED = "-captured"
"""Suffix of plans whose steps are launched as a graph. They are not compared: a profile states errors for steps that the host issues."""
CLEAR = 0.01
"""If the measured steps of two plans differ by less than this share, their order and gain do not count: they are within the spread of
steps."""
FEW_CONNECTIONS = "8-connections"
"""Suffix of plans whose streams share only as many hardware connections as CUDA has by default."""
SWITCHED = ("no-priorities", "no-slab", "one-slab", "32-connections", FEW_CONNECTIONS)
"""Suffixes (`PLAN-SWITCH`) for the same plan on a changed testbed. Of these, only `FEW_CONNECTIONS` is simulated."""
FIRST_WITH_MOST = "2026-11-27 14:00"
"""Plans of earlier sittings also had few connections."""
ARCHIVES = "plans.json"
"""File of a device's results that says which archive has the plans of which sittings."""
PREDICTIONS = {
    "simulated": "when measured",
    "now": "now, without the power limit",
    "limited": "now, with it, as plans are judged",
}
"""Predictions of a run -> how tables call them. The first is stored with the run, `predict` makes the others."""


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the plans of a sitting are: a prefix of the sitting's name, the archive beside the file, and the folder in the archive that
    contains a folder for each case."""

    sitting: str
    archive: str
    folder: str


# -- one run ---------------------------------------------------------------------------------------------------------


def step_error(row: Row, how: str = "simulated") -> float:
    """How far a predicted step is from the median measured one, as a share; positive if it is longer."""
    return float(row[how]["step_ms"] / row["step_ms"]["median"] - 1)


def peak_error(row: Row, how: str = "simulated") -> float:
    """How far the predicted peak of tensors is off, as a share, on the rank where it is furthest off; positive if it is higher."""
    measured = [each["allocated"] + each["outside"] for each in row["peak_bytes_by_rank"]]
    return float(max((a / b - 1 for a, b in zip(row[how][PEAKS], measured, strict=True)), key=abs))


def has_peaks(row: Row, how: str = "simulated") -> bool:
    """Whether measured and predicted peaks are known. The first runs do not count, as they did not record workspaces separately."""
    return bool(row.get("peak_bytes_by_rank")) and "workspace" in row["peak_bytes_by_rank"][0] and PEAKS in row[how]


def is_compared(row: Row, how: str = "simulated") -> bool:
    """Whether a run has this prediction and can be compared with it: it is not in float32, not bound by the host, and not launched as a
    graph."""
    is_other = row["case"].startswith(FLOAT32) or HOST_BOUND.match(row["case"]) or row["plan"].endswith(LAUNCHED)
    return bool(row.get(how, {}).get("step_ms")) and "step_ms" in row and not is_other


def place_of(case: str) -> str:
    """The mesh of a case, from its name.

    >>> place_of("gpt-s2048-mp2-pp2-b2"), place_of("llama-s2048-mp1-pp2"), place_of("llama-s2048-mp1-sendrecv")
    ('mp 2, pp 2', 'pp 2', 'one GPU')
    """
    words = [f"{axis} {size}" for axis, size in re.findall(r"-(dp|mp|pp|vpp)(\d)", case) if size != "1"]
    return ", ".join(words) + (", experts in float32" if case.startswith("moe") else "") or "one GPU"


def kind_of(plan: str) -> str:
    """The kind of a plan, from its name.

    >>> [kind_of(plan) for plan in ("stock-again", "auto-8gb", "budget-0.9", "offload-0.5", "zb-h1")]
    ['stock', 'auto', 'budget', 'offload', 'one form']
    """
    kinds = ((BASELINE, BASELINE), ("auto", "auto"), ("budget", "budget"), ("offload", "offload"))
    return next((kind for word, kind in kinds if plan.startswith(word)), "one form")


# -- many runs -------------------------------------------------------------------------------------------------------


def count_order(runs: Sequence[Row], how: str = "simulated") -> tuple[int, int]:
    """Number of pairs of plans (`pairs_of`) that are predicted in the right order, and number of all pairs."""
    found = [is_right for _, is_right in pairs_of(runs, how)]
    return sum(found), len(found)


def pairs_of(runs: Sequence[Row], how: str = "simulated") -> Iterator[tuple[float, bool]]:
    """For each pair of plans with the same case and sitting, and measured steps that clearly differ (`CLEAR`): by which share of the
    second one they differ, and whether they are predicted in the right order."""
    found = [row for row in runs if is_compared(row, how)]
    for k, row in enumerate(found):
        for other in found[:k]:
            measured = other["step_ms"]["median"] - row["step_ms"]["median"]
            if (row["case"], row["sitting"]) == (other["case"], other["sitting"]) and abs(measured) > CLEAR * row["step_ms"]["median"]:
                is_right = measured * (other[how]["step_ms"] - row[how]["step_ms"]) > 0
                yield abs(measured) / row["step_ms"]["median"], is_right


def gains(runs: Sequence[Row], how: str = "simulated") -> list[tuple[Row, float, float]]:
    """`(run, measured gain, predicted gain)` for runs with a baseline: gains over Paddle's baseline of the same case and sitting."""
    found = [row for row in runs if is_compared(row, how)]
    baseline = {(row["case"], row["sitting"]): row for row in found if row["plan"] == BASELINE}
    return [
        (row, own["step_ms"]["median"] / row["step_ms"]["median"] - 1, own[how]["step_ms"] / row[how]["step_ms"] - 1)
        for row in found
        if kind_of(row["plan"]) != BASELINE and (own := baseline.get((row["case"], row["sitting"])))
    ]


def errors(runs: Sequence[Row], how: str = "simulated") -> Errors:
    """Errors of a prediction, over the runs that can be compared with it (`is_compared`); gains below `CLEAR` are left out."""
    found = [row for row in runs if is_compared(row, how)]
    steps: list[float] = [step_error(row, how) for row in found]
    large = [(measured, predicted) for _, measured, predicted in gains(found, how) if abs(measured) >= CLEAR]
    right, pairs = count_order(found, how)
    return Errors(
        steps=len(steps),
        step_bias=_median(steps),
        step_median=_median(map(abs, steps)),
        step_worst=_worst(steps),
        gains=len(large),
        gain_ratio=_median(predicted / measured for measured, predicted in large),
        gain_median=_median(abs(predicted / measured - 1) for measured, predicted in large),
        gain_points=_median(abs(predicted - measured) for measured, predicted in large),
        right_sign=sum(predicted * measured > 0 for measured, predicted in large),
        pairs=pairs,
        right_order=right,
    )


def accuracy_of(runs: Sequence[Row], day: str) -> Accuracy:
    """The errors that a profile states. Errors of gains differ most between steps with and without pipeline stages, so these are
    separate."""

    def of(how: str, has_stages: bool) -> Errors:
        return errors([row for row in runs if ("pp" in place_of(row["case"])) == has_stages], how)

    return Accuracy(
        date=day,
        one_stage=of("now", False),
        stages=of("now", True),
        one_stage_limited=of("limited", False),
        stages_limited=of("limited", True),
    )


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return round(statistics.median(found), 4) if found else 0.0


def _worst(values: Sequence[float]) -> float:
    """The value farthest from 0."""
    least, most = min(values, default=0.0), max(values, default=0.0)
    return round(most if most >= -least else least, 4)


# -- stored runs -----------------------------------------------------------------------------------------------------


def results_folder(given: str = "") -> Path:
    """The folder of stored runs: the one given, else that of the checkout that Interlace runs from. Raises ConfigError if there is none."""
    import interlace

    here = Path(given) if given else Path(interlace.__file__).resolve().parent.parent / "benchmarks" / "results"
    if not here.is_dir():
        raise ConfigError(
            f"{here}: no folder of measured runs; the installed package holds none: name a folder that has DEVICE/testbed_*.json, such as "
            "benchmarks/results of a checkout of Interlace"
        )
    return here


def folder_of(name: str, profile: DeviceProfile) -> str:
    """Name of the folder with the runs of a profile's device: the name of the shipped profile or, for a profile in a file, that of the
    shipped profile of the same device, or else the stem of the file's name."""
    return (profile_of(profile.device) or Path(name).stem) if is_path(name) else name


def stored_runs(folder: Path, device: str, since: str = "") -> list[Row]:
    """All finished runs in the folder `device` of `folder`, each once; with `since`, only of sittings from that day or time on
    (`2026-11-27 14:00`). Raises ConfigError if a file is not as `benchmarks.gpu.results` writes it."""
    found: dict[tuple[str, ...], Row] = {}
    for path in sorted((folder / device).glob("testbed_*.json")):
        try:
            data = json.loads(path.read_bytes())
            if not isinstance(data, dict) or "sittings" not in data:
                continue
            for row in data["runs"]:
                if "step_ms" in row:
                    float(row["step_ms"]["median"])
                    found[path.name, row["case"], row["plan"], row["sitting"]] = {**row, "device": device, "file": path.name}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: {error!r}; expected a file of `python -m benchmarks.gpu.results --into`: sittings, and runs that each have case, "
                "plan, sitting and step_ms"
            ) from error
    return [row for row in found.values() if row["sitting"] >= since]


@contextmanager
def stored_plans(folder: Path, device: str) -> Iterator[Callable[[Row], list[Path]]]:
    """Context with a function from a run to the files of its programs (none if they are not stored). Unpacked archives are deleted at the
    end. Raises ConfigError if the list of archives, or an archive, cannot be read."""
    where = folder / device / ARCHIVES
    try:
        known = msgspec.json.decode(where.read_bytes(), type=list[Stored]) if where.is_file() else []
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}; expected a list of objects with sitting, archive and folder") from error
    with ExitStack() as stack:
        unpacked: dict[str, Path] = {}

        def files(row: Row) -> list[Path]:
            for each in known:
                if row["sitting"].startswith(each.sitting):
                    if each.archive not in unpacked:
                        room = stack.enter_context(tempfile.TemporaryDirectory(prefix="interlace-plans-"))
                        unpacked[each.archive] = _unpack(folder / device / each.archive, Path(room))
                    found = _files(unpacked[each.archive] / each.folder / row["case"], row["plan"], row["world"])
                    if found:
                        return found
            return []

        yield files


def _unpack(archive: Path, room: Path) -> Path:
    try:
        with tarfile.open(archive) as file:
            file.extractall(room, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{archive}: {error}; expected the archive of plans that {ARCHIVES} names") from error
    return room


def _files(case: Path, plan: str, world: int) -> list[Path]:
    """The files of a plan. If Paddle's baseline has no folder, these are the captured programs of any other plan of the case."""
    own = case / plan
    if own.is_dir():
        files = find_dumps([own])
        return files if len(files) == world else []
    if kind_of(plan) == BASELINE:
        if plan != BASELINE:
            return _files(case, BASELINE, world)
        for captured in sorted(case.glob("*/captured")):
            files = find_dumps([captured])
            if len(files) == world:
                return files
    return []


def as_run(captured: Program, costs: CostModel) -> Program:
    """Paddle's baseline of a captured program as the testbed runs it, where sends and receives have a stream for each ring."""
    replace = msgspec.structs.replace
    ops = tuple(replace(op, stream=f"{op.stream or 'p2p'}.{op.group}") if is_p2p(op) else op for op in captured.ops)
    return baseline_plan(replace(captured, ops=ops), costs)


def runnable(programs: Sequence[Program], costs: CostModel) -> list[Program]:
    """Programs that can be simulated: plans unchanged, and Paddle's baseline for captured programs."""
    return [program if program.jobs else as_run(program, costs) for program in programs]


def _runs_as(row: Row) -> tuple[bool, bool, bool]:
    """All that a prediction depends on besides programs: whether the run is of Paddle's baseline, whether its steps are launched as a
    graph, and whether it is of another plan on several GPUs whose streams share few connections."""
    is_baseline = kind_of(row["plan"]) == BASELINE
    has_few = row["sitting"] < FIRST_WITH_MOST or row["plan"].endswith(FEW_CONNECTIONS)
    return is_baseline, row["plan"].endswith(LAUNCHED), has_few and not is_baseline and row["world"] > 1


class FewConnections(CostModel):
    """Costs for a plan on several GPUs whose streams share few connections. Each computation kernel starts later after the one before it,
    by the time that the profile has for the baseline's kernels beside a waiting communication (`late_beside_wait_ns`; both were measured
    as 1.2 us or more, `benchmarks/results/gpu.md`)."""

    def __init__(self, profile: DeviceProfile) -> None:
        super().__init__(msgspec.structs.replace(profile, late_beside_wait_ns=0))
        self._late_ns = profile.late_beside_wait_ns

    def op_time(self, op: Op, values: Values, groups: Groups) -> Estimate:
        """As in `CostModel`, with the delay of each kernel."""
        found = super().op_time(op, values, groups)
        if not found.dur_ns or is_comm(op) or is_copy(op):
            return found
        return msgspec.structs.replace(found, dur_ns=found.dur_ns + self._late_ns * len(work_of(op, values).parts))


@functools.lru_cache(maxsize=2)
def _with_few(costs: CostModel) -> FewConnections:
    """One cost model for all runs, as a model caches its results."""
    return FewConnections(costs.profile)


def predict(row: Row, programs: Sequence[Program], costs: CostModel) -> Row:
    """The run with new predictions: `now`, without the power limit, and `limited`, with it (empty if the profile has no power). Raises
    PlanError if the step would never end."""
    is_baseline, is_launched, has_few = _runs_as(row)
    if is_launched:
        costs = CostModel(costs.profile, is_launched=True)
    elif has_few:
        costs = _with_few(costs)
    programs = runnable(programs, costs)
    limited, free = (simulate(programs, costs, Options.of(GPU, power=power), with_memory=False) for power in (True, False))
    place = with_paddles_jobs(IDEAL) if is_baseline else IDEAL
    peaks = [in_order(program, target=place).peak() for program in programs]
    now, whole = ({"step_ms": round(result.step_ns / 1e6, 2), PEAKS: peaks} for result in (free, limited))
    if not costs.power():
        return {**row, "now": now, "limited": {}}
    drawn = {"mhz": [round(limited.mean_mhz(at)) for at in range(len(programs))], "joules": round(sum(limited.joules), 1)}
    return {**row, "now": now, "limited": whole | drawn}


def predicted_runs(
    folder: Path, device: str, profile: DeviceProfile, tell: Callable[[str], None] = lambda line: None, since: str = ""
) -> list[Row]:
    """Every stored run of a device (`stored_runs`), with new predictions if its plan is stored and can be simulated (see `FLOAT32` and
    `SWITCHED`); otherwise unchanged. `tell` gets a line for each prediction that fails. Runs of the same programs are predicted once."""
    costs, found, known = CostModel(profile), list[Row](), dict[tuple[Any, ...], Row]()
    with stored_plans(folder, device) as plans:
        for row in stored_runs(folder, device, since):
            is_other_testbed = row["plan"].endswith(SWITCHED) and not row["plan"].endswith(FEW_CONNECTIONS)
            if is_other_testbed or row["case"].startswith(FLOAT32):
                found.append(row)
                continue
            try:
                files = plans(row)
                key = (*_runs_as(row), *(hashlib.sha256(file.read_bytes()).digest() for file in files))
                if files and key not in known:
                    predicted = predict(row, [load(file) for file in files], costs)
                    known[key] = {how: predicted[how] for how in tuple(PREDICTIONS)[1:]}
                found.append({**row, **known[key]} if files else row)
            except InterlaceError as error:
                tell(f"{row['case']} {row['plan']} ({row['sitting']}): not predicted: {error}")
                found.append(row)
    return found


def of_other_networks(runs: Iterable[Row]) -> list[str]:
    """Cases of compared runs that are neither of GPT nor of Llama, as far as their names tell."""
    return sorted({row["case"] for row in runs if is_compared(row) and not {"gpt", "llama"} & {*row["case"].split("-")}})


def write_into(name: str, found: Accuracy) -> Path:
    """Store the errors in a shipped profile, or in a profile's file; returns its path. Raises OutputError if it cannot be written."""
    import interlace

    path = Path(name) if is_path(name) else Path(interlace.__file__).resolve().parent / "configs" / "devices" / f"{name}.json"
    return save_profile(msgspec.structs.replace(load_profile(name), accuracy=found), path.resolve())
