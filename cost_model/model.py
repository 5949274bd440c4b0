"""The cost model of a measured device: it answers from an exact sample, by interpolation, from a proxy or from a roofline, and says
which."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from statistics import median
from typing import Any

import msgspec

from interlace.cost_model.base import HOWS, Costs, Draw, Estimate, Groups, How, mean_by_time
from interlace.cost_model.comm import CommTimes, CopyTimes, Found, across_hosts
from interlace.cost_model.curves import Surface, check_error
from interlace.cost_model.interference import BothWays, InterferenceTable, Stretch
from interlace.cost_model.power import PowerSamples
from interlace.cost_model.profile import DeviceProfile, OpSample, Power
from interlace.cost_model.unaligned import LOADED, form_of, is_unaligned, rounded
from interlace.cost_model.work import TRANSPOSES, Dims, Part, Values, flops_of, transposed_of, work_of
from interlace.ir.kinds import is_comm
from interlace.ir.operation_kinds import is_free
from interlace.ir.program import ABSENT, DTYPE_BYTES, Op

SAME_BYTES = 0.01
"""A sample of equal dims counts as exact if its traffic differs by at most this share: small operands, such as scales and statistics, do
not matter."""
SAME_ERROR = 0.05
"""Least expected relative error of a sample of the very shape; between programs half of the H200's differ by 2 %, a tenth by 15 %."""
PRODUCT_ERRORS, PRODUCT_ERROR, PRODUCT_ERROR_NS = {"exact": 0.08, "interpolated": 0.11}, 0.13, 2000
"""Least expected relative error of a product, by how its time was determined and for all other ways, and least error in nanoseconds,
because libraries and clocks differ: of 1,200 products that others measured on each of H100 and H200, two thirds are within these limits,
short and long ones alike (results/external)."""
LONG_NS, LONG_ERROR = 1_000_000, 0.13
"""Products that take at least `LONG_NS`, and their least expected relative error: run without pauses they reach the power limit and take 4
to 11 % longer."""
PROXY_ERROR = 0.4
"""Least expected error of a kind or dtype answered by another (`proxy`; on the H200, kinds of one family differ by 10 to 40 %)."""
UNMEASURED_ERROR = 2.5
"""Expected error of a roofline: measured kernels on the H200 take 1 to 3.1 times as long as theirs."""
ATTENTION_ERROR = 5.0
"""Expected error of attention at the rate of matrix products: FlashAttention 2 reaches 7 to 35 % of the H200's."""
UNALIGNED_ERROR = 2.0
"""Expected error of a product of half precision whose rows are no multiple of 16 bytes, if a profile does not say what that costs: on the
H200 it takes 3 to 7 times as long."""
LAUNCH, IDLE = 5.0, 10.0
"""A sample measures a launch rather than work if it takes at most LAUNCH times the shortest kernel (a traced one includes two events), and
at least IDLE times as long as its memory traffic."""
REPRESENTATIVES = {
    "gemm": ("gemm",),
    "elementwise": ("add", "scale", "copy", "grad_accumulate"),
    "move": ("copy", "cast", "scale", "add"),
    "transpose": ("transpose", "copy"),
    "norm": ("layer_norm",),
    "norm_grad": ("layer_norm_grad", "layer_norm"),
    "softmax": ("softmax",),
    "softmax_grad": ("softmax_grad", "softmax"),
    "reduction": ("reduce", "scale"),
    "optimizer": ("adamw", "grad_accumulate"),
}
"""Sample kinds used for a family's unmeasured members, best first."""
MOST_KNOWN = 200_000
"""Number of operations whose signatures are remembered."""
FEWEST = 3
"""Least number of samples of a variant that are a group of their own. Fewer say too little about their variant, for which all samples of
the kind and dtype then answer, and belong to the groups of the other variants as well."""
Variant = tuple[int, ...]
"""What tells apart kernels of one kind and dtype: which operands of a product are transposed, and how wide heads of attention are."""
Group = tuple[str, str, Variant]
"""Kind, dtype and variant."""
ANY: Variant = ()
"""Stands for any variant: all samples of a kind and dtype."""
_ALIKE = {"float16": "bfloat16", "bfloat16": "float16"}
_ATTRS = ("transpose_x", "transpose_y", "trans_x", "trans_y", "causal", "is_causal_masking", "dst_place_type", "place", "left_out")
"""Attributes that the work of an operation depends on: exactly those that `work.py` reads."""


class CostModel(Costs):
    """Times from a device profile; `comm_ctas` is the limit on CTAs that NCCL will be given, 0 for none."""

    def __init__(self, profile: DeviceProfile, comm_ctas: int = 0, is_launched: bool = False) -> None:
        self.profile, self.is_launched = profile, is_launched
        self._comm = CommTimes((*profile.collectives, *profile.p2p), comm_ctas, profile.shortest_kernel_ns)
        self._ctas = comm_ctas
        self._copies = CopyTimes(profile.copies)
        self._pairs = InterferenceTable(profile.interference, profile.copies, comm_ctas)
        self._by_devices: dict[int, CostModel] = {}
        self._of_sizes: dict[tuple[Group, Dims], list[OpSample]] = {}
        found: dict[tuple[str, str], list[OpSample]] = {}
        for sample in profile.ops:
            stands_alone = is_unaligned(sample.dtype, sample.dims) and self._knows_unaligned(sample.dtype)
            for variant in (variant_of(sample.dims), ANY):
                group = sample.kind, sample.dtype, variant
                self._of_sizes.setdefault((group, _sizes(sample.dims)), []).append(sample)
            if not stands_alone:
                found.setdefault((sample.kind, sample.dtype), []).append(sample)
        self._samples = {(*key, variant): each for key, samples in found.items() for variant, each in by_variant(samples)}
        self._dtypes: dict[str, list[str]] = {}
        for kind, dtype, variant in sorted(self._samples):
            if variant == ANY:
                self._dtypes.setdefault(kind, []).append(dtype)
        self._surfaces: dict[Group, tuple[Surface, float]] = {}
        self._numbers: dict[Any, int] = {}
        self._unused = itertools.count()
        self._number_of: dict[tuple[int, int], tuple[Op, Values, int]] = {}
        self._known: dict[int, Estimate] = {}
        self._categories: dict[int, str] = {}
        self._beside_wait: dict[int, float] = {}
        self._draws: dict[int, Draw] = {}
        self._power = PowerSamples(profile.power) if profile.power else None
        self._slowness = self._memory_slowness()

    def for_world(self, world: int) -> CostModel:
        """As in `Costs`. Without this call, copies are those with the most devices copying at once that was measured. The models do not
        share times, as their copies differ."""
        devices = max(1, min(world, self.profile.ranks_per_host))
        if devices not in self._by_devices:
            made = copy(self)
            made._copies = CopyTimes(self.profile.copies, devices)
            made._pairs = InterferenceTable(self.profile.interference, self.profile.copies, self._ctas, devices)
            made._known, made._draws = {}, {}
            self._by_devices[devices] = made
        return self._by_devices[devices]

    def host_of(self, rank: int) -> int:
        """As in `Costs`."""
        return rank // self.profile.ranks_per_host

    def both_directions(self) -> Mapping[int, BothWays]:
        """As in `Costs`."""
        return self._pairs.both_directions

    def issued(self) -> CostModel:
        """As in `Costs`."""
        return CostModel(self.profile, self._ctas) if self.is_launched else self

    def op_time(self, op: Op, values: Values, groups: Groups) -> Estimate:
        """As in `Costs`; remembered by kind, shapes, dtypes, attributes and group."""
        key = self._number(op, values, groups)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._estimate(op, values, groups)
        return found

    def category(self, op: Op, values: Values, groups: Groups) -> str:
        """As in `Costs`; a GEMM gets the category of the measured GEMM with the nearest weight size (`gemm:proj`)."""
        key = self._number(op, values, groups)
        if key not in self._categories:
            name = super().category(op, values, groups)
            if name == "gemm" and (parts := work_of(op, values).parts):
                dims = dict(parts[0].dims)
                name = self._pairs.gemm_label(max(1, dims["n"]), max(1, dims["k"]))
            self._categories[key] = name
        return self._categories[key]

    def _number(self, op: Op, values: Values, groups: Groups) -> int:
        """The number of an operation's signature (`signature_of`). Except for communication, it is remembered for each operation and table
        of values."""
        at = (id(op), id(values))
        known = self._number_of.get(at)
        if known is not None and known[0] is op and known[1] is values:
            return known[2]
        number = self._numbers.setdefault(signature_of(op, values, groups), next(self._unused))  # not `len`: ranks may be threads
        if op.group not in groups:
            if len(self._number_of) >= MOST_KNOWN:
                self._number_of.clear()
            self._number_of[at] = (op, values, number)  # keeps both alive, so that no other objects get their ids
        return number

    def stretch_between(self, category: str, beside: str) -> Stretch:
        """As in `Costs`, from the measured rows; see `InterferenceTable`."""
        return self._pairs.between(category, beside)

    def stretch_beside_wait(self, op: Op, values: Values, groups: Groups) -> float:
        """As in `Costs`. For products by the size of their result, if the profile has it, with the mean by time over several in one
        operation. The delay of each kernel's start (`late_beside_wait_ns`) counts as part of the operation's time."""
        key = self._number(op, values, groups)
        if key not in self._beside_wait:
            parts = work_of(op, values).parts
            found = [
                (self.part_time(part).dur_ns, self._pairs.product_beside_wait(part.result_elements))
                for part in parts
                if part.family == "gemm"
            ]
            known = [(dur, factor) for dur, factor in found if factor is not None]
            factor = mean_by_time(known, super().stretch_beside_wait(op, values, groups))
            late_ns = len(parts) * self.profile.late_beside_wait_ns
            self._beside_wait[key] = factor + late_ns / max(1, self.op_time(op, values, groups).dur_ns)
        return self._beside_wait[key]

    def host_ns(self, op: Op) -> int:
        """As in `Costs`; 0 for operations that launch nothing (names and vectors), and if steps are launched."""
        return 0 if is_free(op) or self.is_launched else self.profile.host.op_ns

    def job_ns(self) -> int:
        """As in `Costs`; 0 if steps are launched."""
        return 0 if self.is_launched else self.profile.host.job_ns

    def between_steps_ns(self) -> int:
        """As in `Costs`; 0 if steps are launched, as this was not measured."""
        return 0 if self.is_launched else self.profile.host.between_steps_ns

    def power(self) -> Power | None:
        """The `Power` of the profile."""
        return self.profile.power

    def draw(self, op: Op, values: Values, groups: Groups) -> Draw:
        """As in `Costs`; the mean by time over the kernels of the operation."""
        key = self._number(op, values, groups)
        if key not in self._draws:
            ranks, hosts = self._ranks(op, groups)
            parts, power = work_of(op, values).parts, self._power
            found = [(self.part_time(part, ranks, hosts).dur_ns, power.of(part)) for part in parts] if power else []
            milliwatts, share, own_mhz = (mean_by_time([(dur, each[k]) for dur, each in found]) for k in range(len(Draw._fields)))
            self._draws[key] = Draw(round(milliwatts), share, round(own_mhz))
        return self._draws[key]

    # -- one operation ----------------------------------------------------------------------------------------------

    def _estimate(self, op: Op, values: Values, groups: Groups) -> Estimate:
        work = work_of(op, values)
        if not work.parts:
            return Estimate(0, "unknown", UNMEASURED_ERROR, work.unknown) if work.unknown else Estimate(0, "free", 0.0)
        ranks, hosts = self._ranks(op, groups)
        if is_comm(op) and ranks == 0:
            return Estimate(0, "unknown", UNMEASURED_ERROR, f"group {op.group} is not in the program")
        found = [self.part_time(part, ranks, hosts) for part in work.parts]
        total = _sum(found)
        if work.assumed and not work.unknown:
            how: How = max(total.how, "proxy", key=HOWS.index)
            error, detail = max(total.rel_error, UNMEASURED_ERROR), f"{work.assumed}; {total.detail}"
            return msgspec.structs.replace(total, how=how, rel_error=error, detail=detail)
        if work.unknown or (hosts > 1 and self.profile.network is None):
            why = work.unknown or f"a group across hosts of {self.profile.ranks_per_host}: the network was not measured"
            return Estimate(total.dur_ns, "unknown", UNMEASURED_ERROR, f"lower bound, {why}")
        return total

    def _ranks(self, op: Op, groups: Groups) -> tuple[int, int]:
        """Size of the operation's group (0: not known; 1 without a group), and the number of hosts that it spans."""
        if op.group < 0:
            return 1, 1
        if op.group not in groups:
            return 0, 1
        ranks = groups[op.group].ranks
        return len(ranks), len({rank // self.profile.ranks_per_host for rank in ranks})

    def part_time(self, part: Part, ranks: int = 1, hosts: int = 1) -> Estimate:
        """Time of one kernel, or of one collective over `ranks` devices on `hosts` hosts."""
        if part.family in ("comm", "p2p"):
            if ranks < 2:
                return Estimate(0, "free", 0.0, "a group of one rank")
            if hosts > 1 and self.profile.network is not None:
                return self._carried(part, across_hosts(part.kind, ranks, hosts, part.size_bytes, self.profile.network, self._comm.time))
            return self._carried(part, self._comm.time(part.kind, 2 if part.family == "p2p" else ranks, part.size_bytes))
        if part.family == "copy":
            return self._carried(part, self._copies.time(part.kind, part.size_bytes))
        found = self._exact(part)
        if part.family != "gemm":
            return found or self._estimated(part)
        found = self._product(part, found)
        least = max(
            PRODUCT_ERRORS.get(found.how, PRODUCT_ERROR),
            LONG_ERROR if found.dur_ns >= LONG_NS else 0.0,
            PRODUCT_ERROR_NS / max(1, found.dur_ns),
        )
        return msgspec.structs.replace(found, rel_error=max(found.rel_error, least))

    def _estimated(self, part: Part) -> Estimate:
        return self._sampled(part) or self._roofline(part)

    def _product(self, part: Part, exact: Estimate | None) -> Estimate:
        """The time of a product. If its rows are no multiples of 16 bytes: that of a sample of the very shape (`exact`), or of the product
        with rounded rows, longer by what such rows cost. Operands that are transposed in a way that was not measured are taken to be the
        slowest one that was. As far as memory traffic determines the time, rows cost nothing."""
        dtype, size, transposed = form_of(part.dtype, dict(part.dims))
        if size >= LOADED or (exact is not None and not self._knows_unaligned(dtype)):
            return exact or self._estimated(part)
        whole = rounded(part)
        found = self._exact(whole) or self._estimated(whole)
        if exact is not None:
            return msgspec.structs.replace(exact, unaligned_ns=max(0, exact.dur_ns - found.dur_ns))
        known = [each for each in self.profile.unaligned if each.row_bytes == size and each.dtype in (dtype, _ALIKE.get(dtype, ""))]
        if not known:
            if DTYPE_BYTES.get(dtype, 4) > 2 and not self._knows_unaligned(dtype):
                return self._estimated(part)
            error, detail = max(found.rel_error, UNALIGNED_ERROR), f"{found.detail}; products with such unaligned rows were not measured"
            return msgspec.structs.replace(found, rel_error=error, detail=detail)
        row = max(known, key=lambda each: (each.form[2] == transposed, each.dtype == dtype, each.slowdown))
        peak, traffic_ns = self.profile.matrix_flops.get(dtype), self._traffic_ns(whole.size_bytes)
        computed_ns = whole.flops * 1e9 / peak.per_s if peak else traffic_ns
        slowdown = max(1.0, row.slowdown * min(1.0, computed_ns / traffic_ns))
        error = max(found.rel_error, row.most / row.slowdown - 1, 1 - row.least / row.slowdown)
        how: How = max(found.how, "interpolated", key=HOWS.index)
        detail = f"{found.detail}; x {slowdown:.2f}, as a row is no multiple of {2 * size} bytes"
        dur_ns = round(found.dur_ns * slowdown)
        return Estimate(dur_ns, how, error, detail, dur_ns - found.dur_ns)

    def _knows_unaligned(self, dtype: str) -> bool:
        """Whether the profile says what unaligned rows cost in this dtype, or a similar one."""
        return any(each.dtype in (dtype, _ALIKE.get(dtype, "")) for each in self.profile.unaligned)

    def _carried(self, part: Part, found: Found | None) -> Estimate:
        if found is None:
            return Estimate(
                round(self._traffic_ns(part.size_bytes)), "unknown", UNMEASURED_ERROR, f"lower bound, {part.kind} was not measured"
            )
        return Estimate(max(1, round(found.dur_ns)), found.how, found.rel_error, found.detail)

    def _exact(self, part: Part) -> Estimate | None:
        dims = dict(part.dims)
        alike = self._of_sizes.get((self._group(part, part.kind, part.dtype), _sizes(dims)), ())
        near = min(alike, key=lambda sample: (abs(sample.size_bytes - part.size_bytes), sample.dims != dims), default=None)
        if near is None or abs(near.size_bytes - part.size_bytes) > SAME_BYTES * part.size_bytes:
            return None
        error = max(near.spread_ns / near.dur_ns, SAME_ERROR)
        return Estimate(near.dur_ns, "exact", error, f"{near.source}, {near.num_runs} run(s)")

    def _group(self, part: Part, kind: str, dtype: str) -> Group:
        """The group of samples to use for a part: that of its variant, if there is one."""
        group = kind, dtype, variant_of(dict(part.dims))
        return group if group in self._samples else (kind, dtype, ANY)

    def _sampled(self, part: Part) -> Estimate | None:
        """From samples of the kind, else of a proxy for it; in this dtype, else a similar one, else (memory-bound kinds only) any other."""
        if part.family == "unknown":
            return None
        for kind in dict.fromkeys((part.kind, *REPRESENTATIVES.get(part.family, ()))):
            dtypes = (part.dtype, _ALIKE.get(part.dtype, ""), *(() if part.flops else self._dtypes.get(kind, ())))
            for dtype in dtypes:
                if (kind, dtype, ANY) in self._samples:
                    return self._from_surface(part, kind, dtype)
        return None

    def _from_surface(self, part: Part, kind: str, dtype: str) -> Estimate:
        surface, error = self._surface(self._group(part, kind, dtype))
        size = part.flops or part.size_bytes
        depth, curve = depth_of(dict(part.dims)), surface.whole
        dur_ns = max(surface.at(depth, size), self._traffic_ns(part.size_bytes) if part.flops else 0.0)
        if not part.flops and self._is_launch(longest := curve.at(curve.largest), curve.largest):
            dur_ns = min(dur_ns, longest + self._traffic_ns(size) * self._slowness)
        proxy = (kind, dtype) != (part.kind, part.dtype)
        error = max(error, PROXY_ERROR) if proxy else error
        outside = "" if surface.inside(depth, size) else ", beyond the measured sizes"
        detail = f"{len(curve)} size(s) of {kind} in {dtype}{' for ' + part.kind if proxy else ''}{outside}"
        how: How = "proxy" if proxy else "extrapolated" if outside else "interpolated"
        return Estimate(max(1, round(dur_ns)), how, error if not outside else 2 * error, detail)

    def _surface(self, group: Group) -> tuple[Surface, float]:
        """The samples' time as a function of depth and size (FLOPs of matrix products and attention, else bytes), and its expected
        error."""
        if group not in self._surfaces:
            points = tuple(
                (float(depth_of(sample.dims)), float(sample_size(sample)), float(sample.dur_ns)) for sample in self._samples[group]
            )
            floor_ns = self.profile.shortest_kernel_ns
            self._surfaces[group] = (Surface(points, floor_ns), check_error(points, floor_ns))
        return self._surfaces[group]

    def _roofline(self, part: Part) -> Estimate:
        traffic_ns = self._traffic_ns(part.size_bytes)
        if not part.flops:
            dur_ns = max(traffic_ns * self._slowness, self.profile.shortest_kernel_ns)
            detail = f"memory traffic x {self._slowness:.2f}, the median of the measured kinds"
            return Estimate(max(1, round(dur_ns)), "roofline", UNMEASURED_ERROR, detail)
        peak = self.profile.matrix_flops.get(part.dtype)
        if peak is None:
            return Estimate(round(traffic_ns), "unknown", UNMEASURED_ERROR, f"lower bound, no matrix rate for {part.dtype}")
        dur_ns = max(part.flops * 1e9 / peak.per_s, traffic_ns, self.profile.shortest_kernel_ns)
        error = ATTENTION_ERROR if part.family == "attention" else UNMEASURED_ERROR
        return Estimate(max(1, round(dur_ns)), "roofline", error, f"{peak.source} peak of {part.dtype}")

    def _is_launch(self, dur_ns: float, size_bytes: float) -> bool:
        """Whether a sample measures only a launch, and so says nothing about larger sizes."""
        return dur_ns <= LAUNCH * self.profile.shortest_kernel_ns and dur_ns >= IDLE * self._traffic_ns(size_bytes)

    def _traffic_ns(self, size_bytes: float) -> float:
        return size_bytes * 1e9 / self.profile.memory_rate.per_s

    def _memory_slowness(self) -> float:
        """Ratio of a memory-bound kernel's time to its roofline: the median over the largest sample of each measured kind and dtype."""
        largest: dict[tuple[str, str], OpSample] = {}
        for sample in self.profile.ops:
            if ("elements" in sample.dims or "rows" in sample.dims) and not self._is_launch(sample.dur_ns, sample.size_bytes):
                best = largest.get((sample.kind, sample.dtype))
                if best is None or sample.size_bytes > best.size_bytes:
                    largest[sample.kind, sample.dtype] = sample
        rate = self.profile.memory_rate.per_s
        return max(1.0, median(s.dur_ns * rate / s.size_bytes / 1e9 for s in largest.values() if s.size_bytes)) if largest else 1.0


def variant_of(dims: Mapping[str, int]) -> Variant:
    """The variant of a kernel.

    >>> variant_of({"batch": 1, "m": 8, "n": 8, "k": 64, "transpose_x": 1}), variant_of({"heads": 16, "head_dim": 64})
    ((1, 0), (64,))
    """
    return (dims["head_dim"],) if "head_dim" in dims else transposed_of(dims)


def by_variant(samples: Sequence[OpSample]) -> Iterator[tuple[Variant, Sequence[OpSample]]]:
    """The groups of the samples of a kind and dtype (see `FEWEST`): first that of all."""
    yield ANY, samples
    counts = Counter(variant_of(sample.dims) for sample in samples)
    few = {variant for variant, count in counts.items() if count < FEWEST}
    for variant in counts.keys() - few:
        yield variant, [sample for sample in samples if variant_of(sample.dims) in (few | {variant})]


def _sizes(dims: Mapping[str, int]) -> Dims:
    return tuple(sorted((name, size) for name, size in dims.items() if name not in TRANSPOSES))


def depth_of(dims: Mapping[str, int]) -> int:
    """The depth of a kernel (see `curves.py`): the contracted size of a product, the number of keys of attention, the row length; else 1.

    >>> depth_of({"batch": 1, "m": 8, "n": 8, "k": 64}), depth_of({"rows": 8, "cols": 32}), depth_of({"elements": 8})
    (64, 32, 1)
    """
    return max(1, dims.get("k", dims.get("seq_k", dims.get("cols", 1))))


def sample_size(sample: OpSample) -> int:
    """The size by which a sample is interpolated: FLOPs of a matrix product or attention, else bytes."""
    return flops_of(sample.kind, sample.dims) or sample.size_bytes


def signature_of(op: Op, values: Values, groups: Groups) -> Any:
    """Everything about an operation that an estimate depends on, as a hashable key."""
    tensors = tuple((v.shape, v.dtype, v.elements, v.memory) for v in (values[i] for i in (*op.operands, *op.results) if i != ABSENT))
    lives_on = bool(op.inplace and op.operands and op.operands[0] != ABSENT and values[op.operands[0]].persistable)
    same = tuple(op.operands.index(v) for v in op.operands)
    marks = (op.role == "backward", bool(op.views), bool(op.inplace), lives_on, op.num_blocks)
    ranks = groups[op.group].ranks if op.group in groups else op.group
    return op.name, tensors, same, op.no_buffer, marks, tuple(op.attrs.get(name) for name in _ATTRS), ranks


def _sum(found: list[Estimate]) -> Estimate:
    """The estimate of kernels that run one after the other: the sum of times, the least reliable way, and the mean error by time."""
    if len(found) == 1:
        return found[0]
    total = sum(part.dur_ns for part in found)
    how: How = max((part.how for part in found if part.how != "free"), key=HOWS.index, default="free")
    error = mean_by_time([(part.dur_ns, part.rel_error) for part in found])
    details = dict.fromkeys(part.detail for part in found if part.how == how)
    return Estimate(total, how, error, "; ".join(details), sum(part.unaligned_ns for part in found))
