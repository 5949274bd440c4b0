"""What was measured on a device, and where each figure comes from; one JSON file per device.

Durations are integer nanoseconds, sizes bytes, rates per second. `source` is `measured` (on this device), `datasheet`
(the maker's figure), `derived` (computed from other figures, see the note) or `published` (measured by others on this kind of device).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from interlace.cost_model.work import TRANSPOSES, names_of_dims
from interlace.errors import ConfigError
from interlace.files import read_file

SCHEMA = 1
"""Version of the file format; raised with every change that makes old files unreadable."""

Source = Literal["measured", "datasheet", "derived", "published"]
MOST_BYTES = 64 << 20
"""Largest profile file that is read, in bytes."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e24)]
Factor = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Range = tuple[Factor, Factor]


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where, when and how a profile was made."""

    machine: str
    date: str
    command: str
    driver: str = ""
    versions: dict[str, str] = {}
    note: str = ""


class Peak(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A rate per second (FLOP or bytes), its source, and a note on what was measured."""

    per_s: Rate
    source: Source
    note: str = ""


class OpSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """One operation, alone on the device.

    Attributes:
        kind: Name of the sample's kind (`gemm`, `gemm_batched`, `attention`, `gelu`, `layer_norm`, ...; see `work.py`).
        dtype: Data type of the first operand.
        dims: For products `batch, m, n, k`, and `transpose_x` or `transpose_y` equal to 1 if that operand is transposed in memory; for
            attention `batch, heads, kv_heads, seq_q, seq_k, head_dim, causal`; for all else `rows, cols` or `elements`. A product is looked
            up among samples with the same operands transposed if there are at least three, else among all.
        size_bytes: Bytes read and written.
        dur_ns, spread_ns: Median, and largest minus smallest, over `num_runs` measurements.
    """

    kind: str
    dtype: str
    dims: dict[str, Count]
    size_bytes: Count
    dur_ns: Positive
    spread_ns: Count = 0
    num_runs: Positive = 1
    source: Source = "measured"
    note: str = ""


class Unaligned(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """How much longer matrix products take if rows of their matrices in memory are no multiple of 16 bytes, as kernels then load less at a
    time. Compared with the same products with these rows rounded up.

    Attributes:
        dtype: Data type of the operands.
        row_bytes: Largest power of two of bytes, at most 8, that divides every row of the operands and of the result.
        transpose_x, transpose_y: 1 if that operand is transposed in memory.
        slowdown: Ratio of the times, the median over `num_products`.
        least, most: Its smallest and largest value.
    """

    dtype: str
    row_bytes: Positive
    slowdown: Factor
    least: Factor
    most: Factor
    transpose_x: Count = 0
    transpose_y: Count = 0
    num_products: Positive = 1
    source: Source = "measured"

    @property
    def form(self) -> tuple[str, int, tuple[int, ...]]:
        """The form of product that this is about, as `unaligned.form_of` gives it."""
        return self.dtype, self.row_bytes, (self.transpose_x, self.transpose_y)


class CommSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """One collective or exchange, alone.

    `size_bytes` is the size of the full tensor of one rank: the operand of all_reduce, reduce_scatter, all_to_all and send, the result of
    all_gather and receive. `ctas` is the limit on CTAs given to NCCL, 0 for none.
    """

    kind: str
    group_size: Annotated[int, msgspec.Meta(ge=2)]
    size_bytes: Positive
    dur_ns: Positive
    spread_ns: Count = 0
    ctas: Count = 0
    num_runs: Positive = 1
    source: Source = "measured"


class CopySample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """A copy between device and pinned memory while `ranks` devices of the host, this one included, do the same.

    `both` is one copy each way at once; `dur_ns` is then the time until the later one ends.
    """

    direction: Literal["d2h", "h2d", "both"]
    size_bytes: Positive
    dur_ns: Positive
    ranks: Positive = 1
    spread_ns: Count = 0
    num_runs: Positive = 1
    source: Source = "measured"


def nearest_count(measured: Collection[int], wanted: int | None) -> int:
    """The measured number of devices to use for `wanted`: the smallest that is not below it, else the largest; None asks for the
    largest."""
    return min((n for n in measured if wanted is not None and n >= wanted), default=max(measured))


class Interference(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """How much an operation and a collective or copy that runs beside it slow each other; 1 means not at all.

    Attributes:
        op: Category of the operation (`gemm:proj`, `memory:gelu`, `attention`), or `copy:h2d` beside `copy:d2h`: copies of both directions.
        beside: Category of the other (`comm:all_reduce`, `p2p`, `copy:d2h`), or `wait`: a communication that waits for its peers.
        group_size: Number of ranks in the other's group.
        dims: `n`, `k` of a GEMM's weight in this row; `elements` of a product's result in rows beside `wait`.
        stretch_op, stretch_beside: Factors on the two durations while both run: medians over `num_files` measured tables, or means over
            `num_files` traced steps, weighted by time.
        range_op, range_beside: Smallest and largest factor.
        holds: Whether the other begins only once the operation has ended, if the operation runs already when the other's data are ready.
            The factors are then for the case that the other began first; otherwise they hold for either order.
    """

    op: str
    beside: str
    group_size: Positive
    stretch_op: Factor
    stretch_beside: Factor
    range_op: Range
    range_beside: Range
    ctas: Count = 0
    num_files: Positive = 1
    dims: dict[str, Positive] = {}
    holds: bool = False
    source: Source = "measured"


class HostCosts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """Time that the host spends.

    Attributes:
        op_ns, job_ns: Time of the executor's thread for issuing one operation, and for one job beyond its operations.
        between_steps_ns: From the last operation of a step to the first of the next, in steps that do not end with a wait for the device;
            0: not known.
    """

    op_ns: Count
    job_ns: Count
    source: Source
    note: str = ""
    between_steps_ns: Count = 0


class PowerSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """The power that a kind of kernel, collective or copy draws.

    Attributes:
        kind: As in `OpSample`, `CommSample` (for any group size) and `CopySample`; `shortest` is a kernel that does nothing.
        size: FLOPs of a product or attention, else bytes.
        watts: Power above `Power.static_w` while it runs alone at the highest clock: its energy divided by its duration there.
        clock_share: Part of that duration that is inversely proportional to the clock.
        own_mhz: Highest clock at which the device ever runs it, even with power to spare; the profile's times of this kind were measured at
            this clock. 0: the highest clock.
    """

    kind: str
    size: Count
    watts: Annotated[float, msgspec.Meta(ge=0, le=1e5)]
    clock_share: Annotated[float, msgspec.Meta(ge=0, le=1.5)] = 0.0
    own_mhz: Count = 0
    num_runs: Positive = 1
    source: Source = "measured"


class Power(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The power limit of a device, and the power that its kernels draw.

    Attributes:
        limit_w: Mean power that the limiter enforces, measured with the same energy counter as all else here.
        static_w: Power at the highest clock while nothing computes, at the temperature of training.
        waiting_w: Power that a communication adds while it waits for its peers.
        beside_w: Power that is drawn beyond the sum of both while a communication that moves data and a computation run at the same time.
        highest_mhz, lowest_mhz, step_mhz: The clocks that the device chooses from.
        response_ns: Time constant of the limiter's average.
        energy_exponent: A kernel's energy above static is proportional to the clock to this power.
    """

    limit_w: Rate
    static_w: Rate
    waiting_w: Annotated[float, msgspec.Meta(ge=0, le=1e4)]
    highest_mhz: Positive
    lowest_mhz: Positive
    step_mhz: Positive
    response_ns: Positive
    energy_exponent: Annotated[float, msgspec.Meta(ge=0, le=4)]
    beside_w: Annotated[float, msgspec.Meta(ge=0, le=1e4)] = 0.0
    samples: tuple[PowerSample, ...] = ()
    source: Source = "measured"
    note: str = ""


class Network(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The network between hosts of `ranks_per_host` devices each. No collectives were measured on it, so times across hosts are estimates.

    Attributes:
        bytes_per_s: Rate at which one device sends and, at the same time, receives while all devices of its host do the same.
        latency_ns: Time of the shortest message.
    """

    bytes_per_s: Rate
    latency_ns: Count
    source: Source = "datasheet"
    note: str = ""


class Errors(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """How far predictions are from a set of measured runs. Errors are relative; all but `step_worst` are medians.

    Attributes:
        steps: Number of runs.
        step_bias, step_median, step_worst: Error of the step time: with its sign, absolute, and the largest with its sign. Positive if the
            predicted step is too long.
        gains: Number of runs whose plans differ from Paddle's baseline in the same session by one percent or more.
        gain_ratio: Predicted gain divided by the measured one.
        gain_median: Distance of that ratio from 1.
        gain_points: Difference of the two gains.
        right_sign: Number of predicted gains with the sign of the measured one.
        pairs, right_order: Number of pairs of plans of a case that were measured one percent or more apart, and of those predicted in the
            right order.
    """

    steps: Count
    step_bias: float
    step_median: float
    step_worst: float
    gains: Count
    gain_ratio: float
    gain_median: float
    gain_points: float
    right_sign: Count
    pairs: Count
    right_order: Count


class Accuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `interlace accuracy --write` found with this profile, for runs of GPT and Llama with one pipeline stage and with several. The
    `limited` fields are simulated with the power limit, as plans are judged, the others without it."""

    date: str
    one_stage: Errors
    stages: Errors
    one_stage_limited: Errors
    stages_limited: Errors


class DeviceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything known about a device.

    Attributes:
        interlace_profile: Version of the file format (`SCHEMA`).
        device: Name as the runtime reports it (`NVIDIA H200`).
        ranks_per_host: Number of devices connected by the links on which the collectives were measured.
        network: The network between hosts; None: the times of groups across hosts are only lower bounds.
        memory_bytes, pinned_bytes: Capacity of a device, and pinned host memory that one rank may take (0: unknown).
        shortest_kernel_ns: Lower bound of the duration of a kernel.
        late_beside_wait_ns: Delay added to the start of each kernel while a communication of its rank waits for its peers (0: not known).
        matrix_flops: FLOP/s of matrix products, by dtype.
        memory_rate: Bytes/s, read plus written, of a plain copy on the device.
        power: None if the driver does not report power, clocks and energy.
        accuracy: None if the profile was not compared with training runs.
    """

    interlace_profile: int
    device: str
    provenance: Provenance
    ranks_per_host: Positive
    memory_bytes: Count
    pinned_bytes: Count
    shortest_kernel_ns: Count
    matrix_flops: dict[str, Peak]
    vector_flops: dict[str, Peak]
    memory_rate: Peak
    host: HostCosts
    ops: tuple[OpSample, ...] = ()
    unaligned: tuple[Unaligned, ...] = ()
    collectives: tuple[CommSample, ...] = ()
    p2p: tuple[CommSample, ...] = ()
    copies: tuple[CopySample, ...] = ()
    interference: tuple[Interference, ...] = ()
    power: Power | None = None
    accuracy: Accuracy | None = None
    network: Network | None = None
    late_beside_wait_ns: Count = 0


class _Header(msgspec.Struct):
    interlace_profile: int


def profile_names() -> list[str]:
    """Names of the profiles that come with Interlace."""
    folder = resources.files("interlace.configs") / "devices"
    return sorted(item.name[: -len(".json")] for item in folder.iterdir() if item.name.endswith(".json"))


def is_path(device: str) -> bool:
    """Whether the name of a profile is a path rather than the name of one that comes with Interlace.

    >>> is_path("my-device.json"), is_path("h200")
    (True, False)
    """
    return device.endswith(".json") or os.sep in device


def load_profile(name_or_path: str | os.PathLike[str]) -> DeviceProfile:
    """Load a profile that comes with Interlace, by name, or any other by path. Raises ConfigError if the name is unknown, the file cannot
    be read, or a field is missing, unknown or of the wrong type.

    >>> load_profile("h200").device
    'NVIDIA H200'
    """
    text = os.fspath(name_or_path)
    if is_path(text):
        what = (
            f"a device profile, a .json file that `interlace calibrate -o {text}` wrote, or one of the names {', '.join(profile_names())}"
        )
        return decode_profile(read_file(text, MOST_BYTES, what, ConfigError), text)
    if text not in profile_names():
        raise ConfigError(
            f"no device profile {text!r}: expected one of {', '.join(profile_names())}, or a path to a .json file that "
            "`interlace calibrate -o FILE` wrote"
        )
    return _shipped(text)


@cache
def _shipped(name: str) -> DeviceProfile:
    """Cached, because a rank asks for its profile several times and reading one takes 8 ms."""
    return decode_profile((resources.files("interlace.configs") / "devices" / f"{name}.json").read_bytes(), f"{name}.json")


def decode_profile(data: bytes, where: str) -> DeviceProfile:
    """Decode a profile from a file's bytes. Raises ConfigError, which names `where`, if they are not a valid profile."""
    try:
        schema = msgspec.json.decode(data, type=_Header).interlace_profile
        if schema != SCHEMA:
            raise ConfigError(
                f"{where}: profile layout {schema}, this version reads {SCHEMA}; measure again with `interlace calibrate -o {where}`"
            )
        profile = msgspec.json.decode(data, type=DeviceProfile)
        json.loads(data, object_pairs_hook=lambda pairs: _require_once(pairs, where))
        _require_dims(profile, where)
        return profile
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}; the fields are described in cost_model/profile.py") from error


def encode_profile(profile: DeviceProfile) -> bytes:
    """Encode a profile as a file's bytes, with one entry per line; equal profiles give equal bytes."""
    lines = []
    for field in msgspec.structs.fields(profile):
        value = getattr(profile, field.name)
        if value is None:
            continue
        if isinstance(value, tuple) and value:
            rows = ",\n    ".join(_compact(item) for item in value)
            lines.append(f'  "{field.name}": [\n    {rows}\n  ]')
        else:
            lines.append(f'  "{field.name}": {_compact(value)}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def save_profile(profile: DeviceProfile, path: str | os.PathLike[str]) -> Path:
    """Write a profile atomically, and return its path."""
    from interlace.ir.dump import write_whole

    write_whole(Path(path), encode_profile(profile))
    return Path(path)


def require_device(profile: DeviceProfile, actual_name: str) -> None:
    """Check that a profile was measured on the kind of device in use. Raises ConfigError if it was not.

    >>> require_device(load_profile("h200"), "nvidia h200")
    """
    if not _same_name(profile.device, actual_name):
        known = profile_of(actual_name)
        advice = f"take the profile {known!r} that comes with Interlace" if known else "measure this one with `interlace calibrate -o FILE`"
        raise ConfigError(
            f"the profile was measured on {profile.device!r}, this device is {actual_name!r}; {advice}, or force the profile to plan for "
            "the other device"
        )


def profile_of(device_name: str) -> str:
    """Name of the profile that comes with Interlace for a device name as the runtime reports it; empty if there is none.

    >>> profile_of("NVIDIA H100 80GB HBM3"), profile_of("NVIDIA L4")
    ('h100', '')
    """
    return next((name for name in profile_names() if _same_name(load_profile(name).device, device_name)), "")


def _same_name(profiles: str, actual: str) -> bool:
    return profiles.casefold() == actual.strip().casefold()


def _require_once(pairs: list[tuple[str, object]], where: str) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ConfigError(f"{where}: field {twice!r} occurs twice in one object; leave one of the two out")
    return found


def _require_dims(profile: DeviceProfile, where: str) -> None:
    """Check that samples have the dims by which operations look them up; with others, their times would be used for wrong sizes."""
    for k, sample in enumerate(profile.ops):
        expected = names_of_dims(sample.kind)
        found = [name for name in sample.dims if "m" not in expected or name not in TRANSPOSES]
        if sorted(found) != sorted(expected):
            raise ConfigError(
                f"{where}: the dims of a sample of {sample.kind} in {sample.dtype} are {', '.join(sample.dims) or 'none'}; expected "
                f"{', '.join(expected)} (at $.ops[{k}].dims)"
            )


def _compact(value: object) -> str:
    return msgspec.json.encode(value, order=None).decode()
