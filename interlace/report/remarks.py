"""The sentences of remarks: the only place where what passes and the search did and declined is put into words.

A sentence is a list of clauses, templates of `str.format` that are filled with the facts of a remark. A clause is left out if the remark
lacks a fact that it names. Format specifications of numbers are `ms`, `size`, `percent`, `list` and `ranges`; any other word is a noun that
is counted. For operations, `name` leaves out the layer and `ids` shows only ids; for words, `words` separates them by blanks instead of
commas, and `why` looks them up in `REASONS`.

>>> from interlace.ir.remarks import remark
>>> sentence(remark("applied", "transfers-delayed", delayed=2, transfers=8, step_ns=5_000_000, before_ns=6_000_000))
'2 of 8 transfers are posted when their peer is about to be ready: whole step simulated 5.000 ms, 6.000 ms with all as early as possible'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import NamedTuple

from interlace.ir.kinds import layer_pattern
from interlace.ir.program import kind_of
from interlace.ir.remarks import Number, Place, Remark
from interlace.units import ms, ranges, size


class If(NamedTuple):
    """A clause for remarks that have a fact, which the clause itself need not name."""

    fact: str
    text: str


class Unless(NamedTuple):
    """A clause for remarks that lack a fact."""

    fact: str
    text: str


Clause = str | If | Unless
_FORM = ("{form}", "Paddle's order of jobs with the other passes (interleave: {jobs})", ", recomputed {recomputed:list}", ", {others}")
"""A form of the schedule that was compared."""
_BASELINE = (Unless("baseline_passes", "Paddle's baseline"), "Paddle's order with {baseline_passes}")
_COUNTED = If("counted", " (live memory with operations in turn: on a GPU, what other streams still read comes on top)")
_BEYOND = " and {beyond_bytes:size}"
_PEAKS = "{free_bytes:size} -> {throttled_bytes:size} at most on a GPU, however fast its host ({serial_bytes:size} if it never ran ahead)"
_BORROWED = " ({borrowed:matmul} borrowed from other layers)"

SENTENCES: dict[str, tuple[Clause, ...]] = {
    # what is recomputed
    "nothing-recomputed": ("the program recomputes nothing that repeats forward exactly",),
    "ranks-differ": ("ranks of this stage differ in what they recompute: what is read is recomputed on all of them",),
    "unread-dropped": (
        "{operations} of {repeated} repeated operations are not recomputed: {dropped_ns:ms} of {repeated_ns:ms} a micro-batch; for this "
        "{kept} of {groups} groups of values stay in memory, {kept_bytes:size} a micro-batch",
    ),
    "every-copy-read": ("every copy is read; interleave: auto and a memory_budget would keep originals where there is room",),
    "recomputation-added": ("computed again in backward: frees {freed_bytes:size} a micro-batch for {took_ns:ms}",),
    "recomputation-dropped": ("kept, and not computed again in backward: {kept_bytes:size} a micro-batch for {took_ns:ms}",),
    "recomputed-as-before": ("computed again, as the program has it: {freed_bytes:size} a micro-batch, {took_ns:ms} to compute again",),
    "kept-as-before": ("kept: {kept_bytes:size} a micro-batch, {took_ns:ms} to compute again",),
    "recomputation-chosen": (
        "of {groups} groups of values that backward can compute again, {recomputed} are recomputed, {recomputed_bytes:size} and "
        "{recomputed_ns:ms} a micro-batch (the program as it was: {before_ns:ms}); {kept} are kept, {kept_bytes:size}",
    ),
    # narrow-gathers
    "peers-not-known": ("it is not known here whether the other ranks of its group also keep their part of it",),
    "peers-keep-more": ("other ranks of its group keep another part of it, or all",),
    "gather-narrowed": ("each of {ranks} ranks keeps its part: all_to_all of {own_bytes:size} instead of {whole_bytes:size}",),
    # reduce-in-place
    "reduced-in-place": ("{collectives} all_reduce(s) write over what they sum: {size_bytes:size} of results need no memory of their own",),
    # allocate-on-compute
    "allocated-on-compute": (
        "{collectives} collective(s) write into memory from the compute stream's pool: {size_bytes:size} of results need none from the "
        "pools of their streams",
    ),
    "starts-during-computation": (
        "{collectives} collective(s), with {size_bytes:size} of results, keep the pools of their streams: they start while computation of "
        "earlier jobs runs, behind which memory would be taken",
    ),
    "starts-not-simulated": (
        "{collectives} collective(s) keep the pools of their streams: when they start is not known, the rank cannot be simulated ({error})",
    ),
    "would-hold-more": (
        "{collectives} collective(s), with {size_bytes:size} of results, keep the pools of their streams: memory taken behind computation "
        "that ends before they start would be held too long",
    ),
    # dX and dW
    "no-such-layer": ("modules: '{pattern}' matches no layer of stage {stage}; there are {layers}; the other stages are not known here",),
    "other-module": ("layer is not among the modules asked for ({modules})",),
    "one-gradient": ("gives one gradient only: nothing to split",),
    "no-weight": ("{operations} matmul(s) without a weight (attention scores): their gradients stay one operation",),
    "split-already": ("{operations} {operation}: dW is an operation of its own already",),
    "no-one-sided-form": ("computes dX, dW and dbias in one kernel that has no one-sided form",),
    "one-result": ("computes only one result already",),
    "results-not-read": ("no operation reads its results",),
    "gradient-split": (
        "; dX is {dx:name}",
        "; dX is {dx_alone:name} for dX alone",
        "; dW is {dw:name}",
        "; dW is {dw_alone:name} for dW alone",
    ),
    # overlap-column-backward
    "below-min-bytes": ("moves {size_bytes:size}, less than min_bytes, {min_bytes:size}",),
    "not-tensor-parallel": ("no dX passes over group {group}: it is not a tensor-parallel group",),
    "gradient-not-split": ("dX and dW of {gradient} are one operation, which 'split-backward' left whole",),
    "overwrites-operand": ("{writer} comes before it and overwrites{value:id}, which {reader} reads",),
    "communication-keeps-order": ("{first} must come first: communication keeps its order within group {group}",),
    "needs-moved": ("{between} comes before it and needs {first}",),
    "feeds-more": ("{first} must come first: it feeds more than its gradient's sum",),
    "no-weight-gradient": ("no weight gradient comes before it",),
    "no-weight-product": ("no weight gradient comes before it, and no matmul with a weight feeds it",),
    "overlap-slower": (
        "overlapped with other operations, they would take {overlapped_ns:ms} together, one after the other {serial_ns:ms}",
    ),
    "started-after-dx": ("put right after dX{dx:ids}; {moved:operation} moved after it", _BORROWED),
    "started-before-others": ("put before work of other layers; {moved:operation} moved after it", _BORROWED),
    # the schedule
    "jobs-cut": ("{jobs} jobs: {slots:words}", " and {more} more"),
    "auto-not-simulated": ("auto: the whole step was not simulated, the other stages' plans are not known here; dx-first instead",),
    "never-alternates": ("interleaving: schedule {schedule} never alternates them; the order of its jobs stays",),
    "random-draws": (
        "mixed: forward and backward both draw random numbers, or have operations that may, and another depth would change their order; "
        "dx-first instead",
    ),
    "mixed-would-stall": ("mixed: stages would wait for each other at this depth, dx-first instead:\n{grid}",),
    "more-in-flight": (
        "mixed has {depth} micro-batches in flight on stage {stage}, {more} more than 1F1B: {each_bytes:size} of activations each",
    ),
    "job-ordered": (
        "jobs of {job}",
        ", {when}",
        ": {operations} ops, one alone simulated {serial_ns:ms} -> {planned_ns:ms} ({change:percent}); live memory "
        "{plain_peak_bytes:size} -> {peak_bytes:size}",
    ),
    "job-too-large": (
        "jobs of {job}",
        ", {when}",
        ": {operations} ops are more than max_ops_per_job {most_operations}: the parts stay in jobs of their own",
    ),
    "job-in-plain-order": (
        "jobs of {job}",
        ", {when}",
        ": operations stay in their plain order: no faster one was found within the memory that they may take",
    ),
    # the search
    "stages-not-known": ("the whole step was not simulated: the other stages' plans are not known here",),
    "step-would-stall": ("the whole step was not simulated: the ranks would wait for each other in a cycle; `interlace check` shows it",),
    "form-faster": (
        "{form}: whole step simulated {step_ns:ms}, with {other} {other_ns:ms}",
        ", which is {over_bytes:size} over the memory that it may hold",
    ),
    "form-slower": (
        "{form}: whole step simulated {step_ns:ms}, with {other} {other_ns:ms}; it would be slower (only_gains: false keeps it)",
    ),
    "without-budget-slower": (
        "planned as if there were no budget: whole step simulated {step_ns:ms}; planned for the budget {within_ns:ms}",
    ),
    "without-budget-too-large": (
        "planned as if there were no budget: whole step simulated {step_ns:ms}, {over_bytes:size} more memory than the budget",
    ),
    "without-budget-faster": (
        "planned as if there were no budget: whole step simulated {step_ns:ms}, within the budget; planned for the budget {within_ns:ms}",
    ),
    "default-faster": (
        "planned in {limit_bytes:size}, as by default: whole step simulated {step_ns:ms}; planned in more memory {within_ns:ms}",
    ),
    "memory-returned-faster": (
        "with memory given back in the order of streams the host waits less: whole step simulated {step_ns:ms}, {without_ns:ms} without",
    ),
    "memory-not-returned-faster": (
        "nothing is given back in the order of streams: whole step simulated {step_ns:ms}, {with_ns:ms} with `return-memory`",
    ),
    "made-again": ("made again with less room: the plan held {over_bytes:size} more than the limit",),
    "no-form-judged": ("auto: no form could be judged, the simulated ranks wait for each other in a cycle; `interlace check` shows it",),
    "baseline-kept": (
        "auto: ",
        *_BASELINE,
        ", whole step simulated {baseline_step_ns:ms}",
        ", {baseline_peak_bytes:size} on the fullest stage",
        _COUNTED,
    ),
    "form-taken": (
        "auto: ",
        *_FORM,
        ": whole step simulated {step_ns:ms}, ",
        *_BASELINE,
        " {baseline_step_ns:ms}",
        Unless("baseline_step_ns", ": stages wait for each other"),
        ", {baseline_peak_bytes:size} on the fullest stage",
        "; no stage may hold more than {limit_bytes:size}",
        _COUNTED,
    ),
    "baseline-memory-kept": (
        "auto: {step_ns:ms} within {limit_bytes:size}, the peak of Paddle's baseline on a GPU plus 1 %",
        _BEYOND,
        "; {other_ns:ms} with {over_bytes:size} more",
    ),
    "more-than-the-baseline": (
        "auto: {other_ns:ms} would take {over_bytes:size} more than {limit_bytes:size}, the peak of Paddle's baseline on a GPU plus 1 %",
        _BEYOND,
        "; nothing faster than the baseline was found within that",
    ),
    "pools-fit": (
        "{step_ns:ms}, allocator pools take {pools_bytes:size} of {limit_bytes:size}; {other_ns:ms} would take {other_bytes:size}",
    ),
    "pools-do-not-fit": ("allocator pools take {pools_bytes:size}; no plan was found in which they take {limit_bytes:size} or less",),
    "searched-inside-jobs": ("a local search inside jobs: {step_ns:ms}, {without_ns:ms} without it",),
    "searched-run-faster": (
        "local search inside jobs of several plans: {step_ns:ms} with this one, {other_ns:ms} with the one that was the fastest before",
    ),
    "within-baseline-faster": (
        "auto: {step_ns:ms} within {limit_bytes:size}, the peak of Paddle's baseline on a GPU plus 1 %",
        _BEYOND,
        ", as a budget; {other_ns:ms} without one",
    ),
    "long-step-within-baseline": (
        "auto: {step_ns:ms} within {limit_bytes:size}, the peak of Paddle's baseline on a GPU plus 1 %",
        _BEYOND,
        ", as a budget; as the step is long, plans without a budget were not looked at",
    ),
    "form-not-taken": (
        *_FORM,
        ": {step_ns:ms}, {peak_bytes:size} on the fullest stage",
        ", {over_bytes:size} more than it may hold",
    ),
    "form-would-stall": (
        *_FORM,
        ": stages wait for each other, {peak_bytes:size} on the fullest stage",
        ", {over_bytes:size} more than it may hold",
    ),
    "budget-kept": ("within {budget_bytes:size}: on a GPU the plan holds {peak_bytes:size} at most, however fast its host",),
    "peak-not-known": (
        "within {budget_bytes:size}: what a GPU holds is not known, the rank cannot be simulated; `interlace check` says where it stands",
    ),
    # offload
    "value-moved": (
        "its result{value:id} ({size_bytes:size}) of micro-batches {micro_batches:ranges}",
        ", its view(s){view_ids:ids} remade",
        "; back {ahead_ns:ms} or more of computation ahead",
        ", up to {late_ns:ms} late",
        "; back just in time (copies were {copies})",
    ),
    "values-moved": (
        "moves {values} value(s) of {micro_batches} micro-batch(es), {out_bytes:size} out and back; live memory "
        "{before_peak_bytes:size} -> {peak_bytes:size}, pinned {pinned_peak_bytes:size}",
        "; readers wait {stall_ns:ms}",
        "; copies {copies}: back just in time",
    ),
    "nothing-moved": ("moves nothing; live memory {before_peak_bytes:size} at most",),
    "no-copy-allowed": ("max_in_flight=0 allows no copies",),
    "nothing-asked": ("neither modules nor a fraction nor a memory_budget asks for copies",),
    "fraction-zero": ("fraction=0 asks for no copies",),
    "no-match-on-stage": (
        "{option}: '{pattern}' ",
        Unless("operations", "fits no layer of stage {stage} of {stages}, it may fit one of another stage; there are "),
        If("operations", "fits no operation and no layer of stage {stage} of {stages}, it may fit one of another stage; there are "),
        "{operations}; layers: ",
        "{layers}",
    ),
    "under-budget": ("the peak is already under the budget of {budget_bytes:size}",),
    "everything-moved": (
        "everything that can move does: {peak_bytes:size} stay live, the aim was {budget_bytes:size}; recomputation and the schedule "
        "decide whether the budget is kept",
    ),
    "kept-on-device": ("{values} value(s)", "{transfers} transfer(s)", ", {size_bytes:size}: {reason}: {reason:why}"),
    # optimizer state
    "state-moved": (
        "keeps {values} value(s) of optimizer state in host memory: {in_bytes:size} in and {out_bytes:size} out a step; live memory "
        "{before_peak_bytes:size} -> {peak_bytes:size}",
        "; updates wait {stall_ns:ms}",
        "; copies {copies}: in right before updates",
    ),
    "states-stay": ("keeps optimizer state on the device: the step takes {step_ns:ms}, {leaving_ns:ms} where some leaves it",),
    "states-leave": ("optimizer state leaves the device: the step takes {step_ns:ms}, {staying_ns:ms} where all stays",),
    "no-state-moved": ("moves no optimizer state; live memory {before_peak_bytes:size} at most",),
    "state-kept": ("{values} value(s), {size_bytes:size}: {reason}: {reason:why}",),
    # streams and transfers
    "stream-named": ("stream {stream}: {operations} operations, priority {priority}",),
    "one-rank": ("one rank alone communicates with nobody",),
    "no-stream-of-its-own": ("no communication of forward or backward may have a stream of its own",),
    "no-transfers": ("nothing is sent or received between stages",),
    "peers-not-simulated": ("when peers are ready is not known: the other stages' plans are not known here, or cannot be simulated",),
    "no-transfer-waits-long": (
        "no transfer waits for its peer beside computation so long that posting it later shortens the step of {step_ns:ms}",
    ),
    "transfers-delayed": (
        "{delayed} of {transfers} transfers are posted when their peer is about to be ready: whole step simulated {step_ns:ms}, "
        "{before_ns:ms} with all as early as possible",
    ),
    "transfers-delayed-elsewhere": (
        "none of this stage's {transfers} transfers is posted later; with those of other stages that are, whole step simulated "
        "{step_ns:ms}, {before_ns:ms} with all as early as possible",
    ),
    # lifetimes, events, waits of the host
    "lifetime-extended": ("its value{value:id} is kept alive", " until {waiter} has waited for it", " after {last}"),
    "lifetime-not-extended": (
        "its value{value:id} would be freed while it is read, even after {rounds} rounds of added readers; {last}, the last of them, "
        "waits for it instead",
    ),
    "memory-returned": ("{blocks} blocks a step are given back in the order of their own stream",),
    "streams-joined": ("{waits} of them after an added wait for their last reader, after its simulated end or at the end of their stream",),
    "returned-by-the-host": (
        "{blocks} blocks a step, {size_bytes:size}, are given back when another stream's reader has completed: their own "
        "stream does not wait for it in time, or so late that operations in turn would hold more",
    ),
    "returned-by-the-optimizer": ("it is read last by the optimizer, which runs once for all micro-batches",),
    "returned-in-order-elsewhere": (
        "some of its micro-batches are given back in the order of their own stream already, which is not its producer's",
    ),
    "not-in-all-micro-batches": ("some micro-batches do not have it",),
    "joined-at-end": ("computation waits for its value{value:id} at the end of the step",),
    "events-inserted": ("{events} events between jobs", ", {known} of them from earlier passes"),
    "no-order-missing": ("no order between jobs is missing",),
    "waits-for-outputs": ("the host waits for outputs in {waits} of {jobs} jobs",),
    "no-outputs": ("the host waits nowhere: no job computes an output",),
    "waits-at-job-ends": ("the host waits at the end of {waits} of {jobs} jobs, as asked",),
    "waits-inside-jobs": ("the host waits {waits:time} a step: " + _PEAKS,),
    "waits-not-simulated": (
        "the host waits {waits:time} a step, at the end of every job with work on side streams: the rank cannot be simulated ({error})",
    ),
    "no-side-work": ("the host waits nowhere: no job has work beside computation that uses memory",),
    "few-side-bytes": (
        "the host waits nowhere: side streams use {side_bytes:size} at most, run_ahead_bytes allows {run_ahead_bytes:size}",
    ),
    "run-ahead-allowed": ("the host waits nowhere, as run_ahead_bytes allows {run_ahead_bytes:size}: " + _PEAKS,),
    "no-wait-helps": ("the host waits nowhere, as no wait lowers the peak: " + _PEAKS,),
}
"""Rule -> clauses."""
PARTS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients", "O": "the optimizer"}
"""Parts of kinds of jobs (`Place.job`)."""
REASONS = {
    "parameter": "shares the memory of a parameter",
    "persistable": "lives across steps (optimizer state, buffers)",
    "input": "shares the memory of an input, which stays for the step",
    "output": "is an output of the program",
    "on-host": "is in host memory already",
    "vector": "is a vector of tensors, or an element of one",
    "unknown-size": "has a size that is unknown before run time",
    "may-share": "may be in the memory of another value",
    "no-buffer": "only its shape is read in backward, so it is freed in forward anyway",
    "recomputed": "is recomputed in backward",
    "optimizer-read": "is read by the optimizer",
    "overwritten": "is overwritten in place after the value that backward reads was computed",
    "alias": "shares memory with another saved value that no view operation can rebuild",
    "nested-block": "the program has nested blocks, whose reads are not known",
    "integer": "is no floating-point value (include_integers moves them)",
    "below-floor": "is smaller than min_bytes",
    "other-module": "is of a module that was not chosen",
    "opted-out": "was opted out",
    "kept": "is kept by choice (fraction or keep_bytes), or the budget does not need it moved",
    "shared": "shares memory with another value",
    "communicated": "is sent or gathered by an operation of communication",
    "at-once": "backward reads it before it could be copied out and back",
    "one-job": "its last forward reader and its first backward reader are in one job",
    "congested": "earlier copies leave no time to copy it out and back",
    "capped": "max_in_flight does not allow its copies in time",
}
"""Reasons to keep a value on the device (`scheduler/offload/saved_values.py`, `optimizer_state.py`)."""
MOST_WORDS = 40
"""Most words of one fact that a sentence shows."""


def sentence(each: Remark) -> str:
    """The sentence of a remark, with its place; operations and values are named by their ids.

    >>> from interlace.ir.remarks import Place, remark
    >>> sentence(remark("applied", "joined-at-end", Place(op=7, name="pd_op.all_gather", value=9)))
    '#7 pd_op.all_gather: computation waits for its value %9 at the end of the step'
    """
    where = _Ops([(each.place,)], False).text() + ": " if each.place.name else ""
    return where + _text([each], _facts([each], has_ids=True))


def summary(alike: Sequence[Remark]) -> str:
    """One sentence for remarks with the same `key_of`: figures become ranges, and ids are left out.

    >>> from interlace.ir.remarks import remark
    >>> summary([remark("declined", "overlap-slower", overlapped_ns=ns, serial_ns=3_000_000) for ns in (4_000_000, 5_000_000)])
    'overlapped with other operations, they would take 4.000 to 5.000 ms together, one after the other 3.000 ms'
    """
    return _kind_of(alike[0]) + _text(alike, _facts(alike, has_ids=False))


def key_of(each: Remark) -> str:
    """The sentence without its figures and ids: equal for remarks that one sentence can summarize."""
    return _kind_of(each) + _text([each], _facts([each], has_ids=False, is_masked=True))


def _kind_of(each: Remark) -> str:
    return f"{kind_of(each.place.name)}: " if each.place.name else ""


# --------------------------------------------------------------------------------------------------------------- facts as text


@dataclass(frozen=True, slots=True)
class _Figures:
    """A number, or several, of one or more remarks."""

    values: Sequence[Number | tuple[Number, ...]]
    is_masked: bool

    def __format__(self, spec: str) -> str:
        if spec == "list":
            return " to ".join(
                dict.fromkeys(f"[{', '.join(f'{one:g}' for one in each)}]" for each in self.values if isinstance(each, tuple))
            )
        if self.is_masked:
            return "\0"
        flat = sorted({one for each in self.values for one in (each if isinstance(each, tuple) else (each,))})
        if spec == "ranges":
            return ranges([int(one) for one in flat])
        low, high = (_figure(one, spec) for one in (flat[0], flat[-1])) if flat else ("none", "none")
        noun = f" {spec}{'s' * (flat != [1])}" if spec and spec not in _UNITS else ""
        (first, _, unit), (_, _, other) = low.partition(" "), high.partition(" ")
        return (low if low == high else f"{first if unit == other else low} to {high}") + noun


_UNITS: dict[str, Callable[[Number], str]] = {
    "ms": ms,
    "size": lambda number: size(int(number)),
    "percent": lambda ratio: f"{100 * ratio:+.1f} %",
}


def _figure(number: Number, spec: str) -> str:
    return _UNITS[spec](number) if spec in _UNITS else f"{number:g}" if isinstance(number, float) else str(number)


@dataclass(frozen=True, slots=True)
class _Words:
    words: str | tuple[str, ...]

    def __format__(self, spec: str) -> str:
        if spec == "why":
            return REASONS.get(str(self.words), str(self.words))
        if isinstance(self.words, str):
            return self.words
        more = [f"... ({len(self.words) - MOST_WORDS} more)"] if len(self.words) > MOST_WORDS else []
        return (" " if spec == "words" else ", ").join([*self.words[:MOST_WORDS], *more])


@dataclass(frozen=True, slots=True)
class _Ids:
    """Ids of values, with a blank in front; nothing without `has_ids`."""

    ids: Sequence[Number]
    has_ids: bool

    def __format__(self, _: str) -> str:
        return " " + ", ".join(f"%{number}" for number in self.ids) if self.has_ids else ""


@dataclass(frozen=True, slots=True)
class _Ops:
    """Operations of one or more remarks."""

    ops: Sequence[tuple[Place, ...]]
    is_short: bool

    def __format__(self, spec: str) -> str:
        if spec == "ids":
            return "" if self.is_short else " " + ", ".join(f"#{each.op}" for each in self.ops[0])
        return self.text(has_layer=spec != "name")

    def text(self, has_layer: bool = True) -> str:
        """The operations as messages name them; if `is_short`, without ids and with `*` for numbers of layers."""
        return ", ".join(dict.fromkeys(self._one(each, has_layer) for several in self.ops for each in several))

    def _one(self, op: Place, has_layer: bool) -> str:
        layer = layer_pattern(op.layer) if self.is_short else op.layer
        return (kind_of(op.name) if self.is_short else f"#{op.op} {op.name}") + (f" ({layer})" if layer and has_layer else "")


Facts = dict[str, _Figures | _Words | _Ids | _Ops]


def _facts(alike: Sequence[Remark], has_ids: bool, is_masked: bool = False) -> Facts:
    """The facts of these remarks by name, for the clauses of their sentence."""
    one = alike[0]
    found: Facts = {name: _Words(words) for name, words in one.names.items()}
    found |= {name: _Ops([each.ops.get(name, ()) for each in alike], not has_ids) for name in one.ops}
    for name in one.numbers:
        numbers = [each.numbers[name] for each in alike if name in each.numbers]
        found[name] = _Figures(numbers, is_masked)
        if name.endswith("_ids") and isinstance(numbers[0], tuple):
            found[name] = _Ids(numbers[0], has_ids)
    if one.place.value >= 0:
        found["value"] = _Ids([one.place.value], has_ids)
    if one.place.stage >= 0:
        found["stage"] = _Figures([each.place.stage for each in alike], is_masked)
    if one.place.job:
        found["job"] = _Words(_job_text(one.place.job))
    return found


def _job_text(job: str) -> str:
    """A kind of job in words.

    >>> _job_text("I.1+F.0")
    'input gradients of chunk 1 and forward of chunk 0'
    """
    parts = (part.partition(".") for part in job.split("+"))
    return " and ".join(PARTS.get(kind, kind) + (f" of chunk {chunk}" if chunk else "") for kind, _, chunk in parts)


def _text(alike: Sequence[Remark], facts: Facts) -> str:
    clauses = SENTENCES.get(alike[0].rule, ())
    return "".join(_clause(each, facts) for each in clauses).removeprefix("; ") or _plain_text(alike[0], facts)


def _clause(clause: Clause, facts: Facts) -> str:
    if isinstance(clause, If | Unless):
        text, holds = clause.text, (clause.fact in facts) == isinstance(clause, If)
    else:
        text, holds = clause, True
    return text.format_map(facts) if holds and names_in(text) <= facts.keys() else ""


@cache
def names_in(text: str) -> frozenset[str]:
    """The facts that a clause names."""
    return frozenset(name for _, name, _, _ in Formatter().parse(text) if name)


def _plain_text(one: Remark, facts: Facts) -> str:
    """The text for a rule without a sentence, such as one of a user's pass: its name and its facts.

    >>> from interlace.ir.remarks import remark
    >>> sentence(remark("applied", "priority-changed", before=0, after=-1))
    'priority changed: before 0, after -1'
    """
    units = {"_ns": "ms", "_bytes": "size"}
    told = []
    for name, fact in facts.items():
        suffix = next((unit for unit in units if name.endswith(unit)), "")
        several = isinstance(fact, _Figures) and any(isinstance(each, tuple) for each in fact.values)
        text = format(fact, "list" if several else units.get(suffix, ""))
        told.append(f"{name.removesuffix(suffix).replace('_', ' ')} {text.strip()}" if text else "")
    return one.rule.replace("-", " ") + ": " * any(told) + ", ".join(filter(None, told))
