"""`interlace calibrate` on the CPU: a whole profile from a few operations."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
from contextlib import nullcontext
from functools import partial
from threading import local
from types import SimpleNamespace

import msgspec
import pytest

from interlace.cli import calibrate as command
from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.profile import Interference, OpSample
from interlace.cost_model.unaligned import slowdowns
from interlace.cost_model.work import attention_part
from interlace.errors import ConfigError
from interlace.interrupts import as_interrupts
from tests.together import in_threads


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["calibrate", *words])


@pytest.mark.paddle
def test_a_measured_profile_answers_for_this_machine(tmp_path, monkeypatch, capsys):
    from interlace.bridge.calibrate import measure
    from interlace.bridge.targets.cpu import cpu_model

    wanted = {"gemm", "softmax", "add"}
    every = measure.cases

    def few(*given):
        """The largest operations, which take longer than their dispatch on a busy machine, too."""
        return list({case.part.kind: case for case in every(*given) if case.part.kind in wanted}.values())

    monkeypatch.setattr(measure, "cases", few)
    target = tmp_path / "here.json"
    words = ("-o", str(target), "--quick", "--target", "cpu", "--date", "2026-01-02", "--json", str(tmp_path / "summary.json"))
    assert command.main(parse(*words)) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["profile"], summary["provenance"]["date"]) == (str(target), "2026-01-02")
    assert summary["samples"]["ops"] > 0 < summary["matrix_flops"]["float32"]
    assert f"written to {target}" in capsys.readouterr().out
    profile = load_profile(target)
    assert profile.provenance.date == "2026-01-02"
    assert profile.provenance.command == "interlace calibrate --target cpu --quick"
    assert profile.device == cpu_model()
    assert wanted <= {sample.kind for sample in profile.ops}
    assert {sample.kind for sample in profile.collectives} == {"all_reduce"}
    host = profile.host
    assert [summary[f"host_{each}_ns"] for each in ("op", "job", "between_steps")] == [host.op_ns, host.job_ns, host.between_steps_ns]
    assert 0 < host.op_ns < 10_000_000
    assert CostModel(profile).profile.memory_rate.per_s > 1e8


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("measured", "told"),
    [
        ([(100, 5)], (90, 5)),
        ([(39, 5), (45, 1), (30, 2)], (29, 5)),
        ([(15, 1), (100, 1), (110, 1)], (90, 1)),  # other work hid it once
        ([(15, 1), (100, 1), (19, 1)], None),  # other work lengthened it once
        ([(25, 10), (15, 1), (15, 1)], None),
    ],
)
def test_what_is_not_clearly_longer_than_dispatch_is_measured_again(monkeypatch, measured, told):
    """Dispatch takes 10 ns, so 20 are needed; the median counts."""
    from interlace.bridge.calibrate import measure

    with measure.paddle_settings():
        addition = [case for case in measure.cases(False, True) if case.part.kind == "add"][:1]
    tries = iter(measured)
    monkeypatch.setattr(measure.Bench, "op_ns", lambda self, case: next(tries))
    found, _ = measure.op_samples(bench_of_cpu(), addition, 10.0, {})
    assert [(each.dur_ns, each.spread_ns) for each in found] == ([told] if told else [])
    assert next(tries, None) is None
    if not told:
        with pytest.raises(ConfigError, match="in 3 tries; if the machine is busy"):
            measure._memory_rate(found, {})


def bench_of_cpu():
    import paddle

    from interlace.bridge.probe.bench import Bench
    from interlace.bridge.targets.cpu import CpuDevice

    return Bench(CpuDevice(paddle.CPUPlace()), 0.01, 1)


@pytest.mark.paddle
def test_an_operation_that_the_device_lacks_is_named_and_the_others_are_measured(monkeypatch):
    from interlace.bridge.calibrate import measure

    def op_ns(self, case):
        if case.part.kind == "gelu":
            raise RuntimeError("line one\n  [Hint: no kernel for gelu.]")
        return 1e5, 1.0

    monkeypatch.setattr(measure.Bench, "op_ns", op_ns)
    with measure.paddle_settings():
        wanted = [case for case in measure.cases(False, True) if case.part.kind in ("gelu", "add")]
    failed: dict[str, str] = {}
    samples, measured = measure.op_samples(bench_of_cpu(), wanted, 10.0, failed)
    assert {sample.kind for sample in samples} == {case.part.kind for case, _ in measured} == {"add"}
    assert failed == {"gelu of float32": "RuntimeError: line one [Hint: no kernel for gelu.]"}
    with pytest.raises(ConfigError, match=r"was measured: 1 failed, first gelu of float32: RuntimeError: line one"):
        measure._memory_rate([], failed)


@pytest.mark.paddle
def test_sizes_that_fail_are_named_if_others_do_not(monkeypatch):
    from interlace.bridge.calibrate import measure
    from interlace.bridge.calibrate.communication import Communication

    with measure.paddle_settings():
        wanted = [case for case in measure.cases(False, False) if case.part.kind in ("add", "gelu", "softmax", "cast")]
    most = max(case.part.dims for case in wanted if case.part.kind == "gelu")

    def op_ns(self, case):
        if case.part.kind == "softmax" or (case.part.kind, case.part.dims) == ("gelu", most):
            raise RuntimeError("out of memory")
        return (0.0 if (case.part.kind, case.part.dtype) == ("cast", "float16") else 1e9), 1.0

    monkeypatch.setattr(measure.Bench, "op_ns", op_ns)
    monkeypatch.setattr(measure, "cases", lambda *given: wanted)
    monkeypatch.setattr(measure, "cpu_collectives", lambda quick: [])
    found = measure.calibrate(bench_of_cpu(), Communication(), quick=True)
    assert found.failed == (
        f"gelu of float32 {dict(most)}: RuntimeError: out of memory",
        "softmax of float32: RuntimeError: out of memory",
        "cast of float16: shorter than the host's share, noise or another kernel of the operation",
    )
    assert all(each in found.profile.provenance.note for each in found.failed)


@pytest.mark.paddle
def test_a_device_that_runs_nothing_any_more_ends_the_calibration(monkeypatch):
    from interlace.bridge.calibrate import measure

    def fails(self, *args, **named):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(measure.Bench, "seconds", fails)
    with measure.paddle_settings():
        wanted = [case for case in measure.cases(False, True) if case.part.kind == "gelu"]
        with pytest.raises(ConfigError, match=r"gelu of float32 failed, .*illegal address.*; since then the device runs nothing any more"):
            measure.op_samples(bench_of_cpu(), wanted, 10.0, {})


@pytest.mark.paddle
def test_power_is_measured_of_the_largest_of_each_kind_and_of_three_sizes_of_products(monkeypatch):
    """With the times that are known; a load that is started runs its row as often as asked."""
    from interlace.bridge.calibrate import measure
    from interlace.bridge.probe import bench
    from interlace.bridge.targets.cpu import CpuDevice

    executor_of, ran = bench.core.StandaloneExecutor, []

    def counted(*given):
        executor = executor_of(*given)
        return SimpleNamespace(run=lambda *named: ran.append(named) or executor.run(*named))

    monkeypatch.setattr(CpuDevice, "gpu_index", lambda self: 0)
    monkeypatch.setattr(measure, "find_gpu", lambda index: ("a GPU", ""))
    monkeypatch.setattr(measure, "power_part", lambda loads, gpu: (loads, gpu))
    with measure.paddle_settings():
        every = measure.cases(False, True)
        of_kind = {kind: [case for case in every if case.part.kind == kind] for kind in ("gemm", "gelu", "silu")}
        long = [(case, 4e6) for kind in ("gemm", "gelu") for case in of_kind[kind]]
        (loads, gpu), why = measure.power_of(bench_of_cpu(), [*long, *((case, 1e3) for case in of_kind["silu"])])
        assert (gpu, why) == ("a GPU", "")
        assert [load.kind for load in loads] == ["gelu", "gemm", "gemm", "gemm"]
        assert loads[0].size == max(case.part.size_bytes for case in of_kind["gelu"])
        assert loads[-1].size == max(case.part.flops for case in of_kind["gemm"])
        monkeypatch.setattr(bench.core, "StandaloneExecutor", counted)
        run = loads[0].start()
        ran.clear()  # what computed the inputs
        took_s = [run(times, lambda: None) for times in (1, 2)]
        (few, _), _ = measure.power_of(bench_of_cpu(), [each for each in long if each[0].part.kind == "gemm"][:2])
        assert len({load.size for load in few}) == len(few) == 2, "each once"
        odd = [(case, 4e6) for case in unaligned_cases()]
        (same, _), _ = measure.power_of(bench_of_cpu(), [*long, *odd])
        assert [load.size for load in same] == [load.size for load in loads]
    assert (loads[0].count, loads[0].row_s) == (2, 8e-3)
    assert (len(ran), min(took_s) > 0) == (1 + 2, True)


def unaligned_cases():
    """The product of two large matrices and its gradients, with rows of 4095 numbers of 4 bytes."""
    from interlace.bridge.calibrate.cases import _cases_of, _with_gradients

    return list(_cases_of(partial(_with_gradients, [(4096, 4095, 4096)], "float32")))


@pytest.mark.paddle
def test_what_runs_other_kernels_than_most_of_its_kind_does_not_stand_for_the_kind(monkeypatch):
    """Beside copies and messages; power has a test of its own."""
    from interlace.bridge.calibrate import communication
    from interlace.bridge.calibrate.cases import is_usual
    from interlace.bridge.probe.bench import paddle_settings

    given = []
    monkeypatch.setattr(communication, "measured_beside", lambda bench, cases, *rest: given.append(cases))
    monkeypatch.setattr(communication, "copies_of_all_ranks", lambda lab: None)
    every = communication.cases
    monkeypatch.setattr(communication, "cases", lambda *wanted: [*every(*wanted), *unaligned_cases()])
    with paddle_settings():
        communication._with_interference(communication.Communication(), bench_of_cpu(), True)
    (found,) = given
    assert {case.part.kind for case in found} >= {"gemm", "gelu"}
    assert all(dict(case.part.dims)["n"] != 4095 != dict(case.part.dims)["k"] for case in found if case.part.kind == "gemm")
    of_heads = {width: attention_part(1, 2, 2, 8, 8, width, True, "bfloat16", False) for width in (64, 128, 256)}
    assert [is_usual(each) for each in of_heads.values()] == [False, True, False]


@pytest.mark.paddle
def test_all_ranks_measure_their_gpu_at_the_same_time_and_the_first_takes_means(monkeypatch):
    """What fails on another rank only is named with its number and left out of the means. Operations of equal dimensions, but with other
    numbers of bytes, stay apart."""
    from interlace.bridge.calibrate import measure
    from interlace.bridge.targets.cpu import CpuDevice

    profile, here = load_profile("h200"), local()
    power, sample = profile.power, profile.ops[0]
    assert power is not None
    other = msgspec.structs.replace(sample, dur_ns=sample.dur_ns + 200)
    larger = msgspec.structs.replace(sample, size_bytes=2 * sample.size_bytes, dur_ns=2 * sample.dur_ns)
    drawn = [(power, ""), (msgspec.structs.replace(power, limit_w=power.limit_w + 8), ""), (None, "the driver gives no energy")]
    monkeypatch.setattr(CpuDevice, "gpu_index", lambda self: 0)
    monkeypatch.setattr(measure, "op_samples", lambda *given: given[-1].update({"gelu of float32": "no kernel"}) or ([other], []))
    monkeypatch.setattr(measure, "cases", lambda *given: [])
    monkeypatch.setattr(measure, "power_of", lambda bench, measured: drawn[here.rank])
    monkeypatch.setattr(measure, "paddle_settings", nullcontext)  # which are those of the process, not of a thread
    failed = {"silu of float32": "no kernel"}

    def act(rank, peers):
        here.rank = rank
        if rank:
            return measure.measure_for_first(bench_of_cpu(), True, peers)
        return measure.of_all_devices(bench_of_cpu(), [sample, larger, sample], [], failed, peers)

    (ops, found, why, devices), *_ = in_threads(act, range(3))
    assert (ops[0].dur_ns, ops[0].spread_ns) == (round(sample.dur_ns + 400 / 3), max(200, sample.spread_ns))
    assert (ops[0].num_runs, ops[1], ops[2]) == (3 * sample.num_runs, larger, sample)
    assert (found.limit_w, why, devices) == (round(power.limit_w + 4, 1), "", 3)
    assert found.note.startswith(f"2 devices, limits of {power.limit_w:.0f} to {power.limit_w + 8:.0f} W; ")
    assert failed == {
        "silu of float32": "no kernel",
        "gelu of float32 on rank 1": "no kernel",
        "gelu of float32 on rank 2": "no kernel",
        "power of rank 2": "the driver gives no energy",
    }
    drawn[0] = (None, "nvidia-ml-py is not installed")
    assert in_threads(act, range(3))[0][1:3] == (None, "nvidia-ml-py is not installed")
    here.rank = 1
    assert measure.of_all_devices(bench_of_cpu(), list(profile.ops), [], {}, None).ops == list(profile.ops)

    def ended(*given):
        raise ConfigError("the device runs nothing any more")

    monkeypatch.setattr(measure, "op_samples", ended)
    (ops, *_, devices), *_ = in_threads(act, range(2))
    assert (ops[0], devices) == (sample, 1)
    assert failed["operations on rank 1"] == "the device runs nothing any more"


@pytest.mark.paddle
@pytest.mark.parametrize("each_ns", [[5.0, 6e3, 7e3], [-2e3, -1.0, 3e3]])
def test_copies_that_fail_or_do_not_differ_from_noise_are_told_and_cost_nothing_else(monkeypatch, each_ns):
    from interlace.bridge.calibrate import copies, measure

    monkeypatch.setattr(copies, "copies_ns", lambda lab, rows, num_runs: {"d2h": each_ns, "h2d": [1e3] * 3})
    device, failed = bench_of_cpu().device, dict[str, str]()
    found = measure._copies(device, True, failed)
    assert [each.direction for each in found] == (["d2h", "h2d"] if each_ns[1] > 0 else ["h2d"])
    monkeypatch.setattr(copies, "copies_ns", lambda lab, rows, num_runs: {"d2h": [-1.0]})
    assert (measure._copies(device, True, failed), failed.pop("copies")) == ((), "none differed from noise; is the machine busy?")

    def fails(lab, rows, num_runs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(copies, "copies_ns", fails)
    assert measure._copies(device, True, failed) == ()
    assert "out of memory" in failed["copies"]


@pytest.mark.paddle
def test_an_interrupt_is_no_operation_that_failed():
    from interlace.bridge.calibrate import measure

    with measure.paddle_settings():
        case = next(case for case in measure.cases(False, True) if case.part.kind == "gelu")

        def prepare(given):
            os.kill(os.getpid(), signal.SIGINT)
            return case.prepare(given)

        failed: dict[str, str] = {}
        with pytest.raises(KeyboardInterrupt), as_interrupts():
            measure.op_samples(bench_of_cpu(), [dataclasses.replace(case, prepare=prepare)], 10.0, failed)
    assert failed == {}


@pytest.mark.paddle
def test_each_case_is_the_operation_that_plans_ask_for():
    """A program of one case, captured again, has the case's kernel and no other."""
    import paddle

    from interlace.bridge.calibrate.cases import cases
    from interlace.bridge.capture import capture
    from interlace.bridge.probe.bench import fill, paddle_settings
    from interlace.cost_model.base import tables_of
    from interlace.cost_model.work import work_of
    from interlace.ir.kinds import is_boundary

    kinds = set()
    with paddle_settings():
        for case in cases(False, True):
            main = paddle.static.Program()
            with paddle.static.program_guard(main, paddle.static.Program()):
                fill(case, 2)
            program = capture(main).program
            values, _ = tables_of(program)
            parts = [part for op in program.ops if not is_boundary(op) for part in work_of(op, values).parts]
            asked = case.part.dtype, case.part.dims, case.part.size_bytes
            own = [part for part in parts if (part.dtype, part.dims, part.size_bytes) == asked]
            assert len(own) == 2, case.part
            without = case.without and case.without.part
            others = [part for part in parts if part.size_bytes > 8 and part not in own]  # but for axes and rates
            assert others == ([without] * 2 if without else []), case.part
            kinds.add(case.part.kind)
    wanted = {"gemm", "gemm_batched", "softmax_grad", "layer_norm_grad", "add_grad", "sgd", "adamw", "grad_accumulate", "embedding_grad"}
    assert wanted | {"dropout", "dropout_grad"} <= kinds


@pytest.mark.paddle
@pytest.mark.parametrize("dtype", ["uint8", "bool"])
def test_masks_keep_most_elements(dtype):
    """The gradient of a dropout does not read what its mask leaves out."""
    import numpy as np

    from interlace.bridge.probe.bench import Case, Inputs, paddle_settings
    from interlace.cost_model.work import Part

    with paddle_settings():
        inputs: Inputs = bench_of_cpu().inputs(
            Case(Part("dropout_grad", "elementwise", dtype, (), 0, 0), [((4, 50), dtype)], lambda given: print)
        )
        mask = np.asarray(inputs.scope.find_var(inputs.names[0]).get_tensor())
    assert mask.shape == (4, 50)
    assert (mask != 0).mean() == 0.9


@pytest.mark.paddle
@pytest.mark.parametrize("quick", [False, True])
def test_products_with_unaligned_rows_are_measured_in_all_forms(quick):
    """On GPUs: forward and both gradients, of rows that are multiples of 8, 4 and 2 bytes, and those that they are compared with."""
    from interlace.bridge.calibrate.cases import _cases_of, _with_gradients, sizes_for
    from interlace.bridge.probe.bench import paddle_settings

    sizes = sizes_for(True, quick).unaligned
    with paddle_settings():
        found = [case.part for case in _cases_of(partial(_with_gradients, sizes, "bfloat16"))]
    assert {part.kind for part in found} == {"gemm"}
    assert len(found) == 3 * len(sizes)
    times = [OpSample("gemm", part.dtype, dict(part.dims), part.size_bytes, 100) for part in found]
    forms = {(row.row_bytes, row.transpose_x, row.transpose_y): row.num_products for row in slowdowns(times)}
    each = len(sizes) // 4
    assert forms == {(size, *transposed): each for size in (2, 4, 8) for transposed in ((0, 0), (0, 1), (1, 0))}
    assert sizes_for(False, quick).unaligned == []  # of 4 bytes a CPU loads as many at a time as it likes


@pytest.mark.paddle
def test_what_one_device_cannot_measure_is_that_of_another_profile():
    from interlace.bridge.calibrate.measure import completed

    base = load_profile("h200")
    gemms = tuple(sample for sample in base.ops if (sample.kind, sample.dtype) == ("gemm", "bfloat16"))
    assert base.power is not None
    power = msgspec.structs.replace(base.power, limit_w=500.0, beside_w=0.0, samples=base.power.samples[:1])
    own = msgspec.structs.replace(
        base, ops=gemms[:1], collectives=(), p2p=(), copies=(), interference=(), late_beside_wait_ns=0, power=power
    )
    found = completed(own, base, "h200")
    assert [sample for sample in found.ops if sample.kind == "gemm" and sample.dtype == "bfloat16"] == list(gemms[:1])
    assert {sample.kind for sample in found.ops} == {sample.kind for sample in base.ops}
    assert (found.collectives, found.p2p, found.interference) == (base.collectives, base.p2p, base.interference)
    pairs = tuple(sample for sample in base.collectives if sample.group_size == 2)[:1]
    of_two = completed(msgspec.structs.replace(own, collectives=pairs), base, "h200").collectives
    assert set(of_two) == {*pairs, *(each for each in base.collectives if (each.kind, each.group_size) != (pairs[0].kind, 2))}
    assert (found.copies, found.late_beside_wait_ns) == (base.copies, base.late_beside_wait_ns)
    assert found.power is not None
    assert (found.power.limit_w, found.power.beside_w) == (500.0, base.power.beside_w)
    assert {sample.kind for sample in found.power.samples} == {sample.kind for sample in base.power.samples}
    assert "of h200: collectives, interference, p2p" in found.provenance.note
    row = next(row for row in base.interference if (row.beside, row.group_size, row.ctas) == ("comm:all_reduce", 2, 0))
    beside = completed(msgspec.structs.replace(own, interference=(row,)), base, "h200").interference
    assert beside == (row, *(each for each in base.interference if (each.beside, each.group_size) != ("comm:all_reduce", 2)))
    measured = tuple(sample for sample in base.copies if sample.ranks == 1 and sample.direction != "both")
    ways = [sample for sample in base.copies if sample not in measured]
    assert completed(msgspec.structs.replace(own, copies=measured[:2]), base, "h200").copies == (
        *measured[:2],
        *(each for each in base.copies if each.direction != measured[0].direction or each.ranks != 1),
    )
    both = Interference("copy:h2d", "copy:d2h", 2, 1.4, 1.05, (1.4, 1.4), (1.05, 1.05))
    told = completed(msgspec.structs.replace(own, copies=measured, interference=(both,)), base, "h200")
    assert told.copies == (*measured, *(each for each in ways if each.direction != "both" or each.ranks != 2))
    assert told.interference == (both, *base.interference)  # also operations beside copies to the host
    assert "network" not in found.provenance.note  # which it does not have
    assert "flops" not in found.provenance.note
    fewer = completed(msgspec.structs.replace(own, matrix_flops={}, vector_flops={}, ranks_per_host=1), base, "h200")
    assert (fewer.matrix_flops, fewer.vector_flops, fewer.ranks_per_host) == (base.matrix_flops, base.vector_flops, base.ranks_per_host)
    for each in (*(f"matrix flops of {dtype}" for dtype in base.matrix_flops), "ranks per host"):
        assert each in fewer.provenance.note
    assert completed(base, base, "h200").provenance.note.endswith("; of h200: power")
    brief = msgspec.structs.replace(own, unaligned=(), host=msgspec.structs.replace(base.host, op_ns=1, between_steps_ns=40_000))
    loop = completed(brief, base, "h200")  # a calibration runs no script, whose own time between steps hosts have to make up for
    assert (loop.host.op_ns, loop.host.between_steps_ns) == (1, base.host.between_steps_ns)
    assert loop.unaligned == base.unaligned
    bf16 = tuple(row for row in base.unaligned if row.dtype == "bfloat16")
    halves = completed(msgspec.structs.replace(own, unaligned=bf16[1:]), base, "h200")
    assert set(halves.unaligned) == set(base.unaligned)
    another = completed(msgspec.structs.replace(own, device="Another GPU", power=None, unaligned=bf16[1:]), base, "h200")
    assert {row.source for row in another.unaligned if row not in bf16[1:]} == {"derived"}
    assert completed(msgspec.structs.replace(own, device="A CPU", power=None, unaligned=()), base, "h200").unaligned == ()
    assert all(each in loop.provenance.note for each in ("time between steps", "products with unaligned rows"))
    slow = msgspec.structs.replace(own, host=msgspec.structs.replace(base.host, between_steps_ns=10 * base.host.between_steps_ns))
    assert completed(slow, base, "h200").host == slow.host
    assert completed(msgspec.structs.replace(own, ranks_per_host=16), base, "h200").ranks_per_host == 16
    other = completed(msgspec.structs.replace(own, device="Another GPU", power=None), base, "h200")
    assert other.power is None
    assert completed(msgspec.structs.replace(own, device="Another GPU", copies=measured[:2]), base, "h200").copies == measured[:2]


@pytest.mark.paddle
def test_the_summary_tells_what_is_measured_from_what_is_taken(tmp_path, monkeypatch, capsys):
    from interlace.bridge import profiles
    from interlace.bridge.calibrate import measure

    own = msgspec.structs.replace(load_profile("h200"), p2p=(), power=None)
    monkeypatch.setattr(profiles, "known_name", lambda device: own.device)
    monkeypatch.setattr(measure, "calibrate", lambda *given: measure.Calibrated(own, "the driver gives no energy", ()))
    assert command.main(parse("-o", str(tmp_path / "x.json"), "--target", "cpu", "--quick", "--base", "h200")) == 0
    printed = capsys.readouterr().out
    assert "no power: the driver gives no energy" in printed
    assert f"not measured but taken from h200: {len(load_profile('h200').p2p)} transfers, power\n" in printed
    assert load_profile(tmp_path / "x.json").power == load_profile("h200").power


@pytest.mark.paddle
def test_a_device_that_is_not_there_is_an_error(tmp_path):
    import paddle

    if paddle.is_compiled_with_cuda():
        pytest.skip("this build has CUDA")
    with pytest.raises(ConfigError, match=r"--target gpu: this Paddle sees no such device; it sees .*cpu"):
        command.main(parse("-o", str(tmp_path / "x.json"), "--target", "gpu"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.paddle
def test_a_cpu_is_not_completed_from_a_gpu(tmp_path):
    with pytest.raises(ConfigError, match="--base h200: is a profile of NVIDIA H200, but a CPU is measured; leave --base out"):
        command.main(parse("-o", str(tmp_path / "x.json"), "--target", "cpu", "--quick", "--base", "h200"))


@pytest.mark.paddle
def test_of_several_ranks_the_others_write_nothing(tmp_path, monkeypatch):
    from interlace.bridge.calibrate.communication import communication_of_run

    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    assert command.main(parse("-o", str(tmp_path / "x.json"), "--target", "cpu", "--quick")) == 0
    assert list(tmp_path.iterdir()) == []
    assert communication_of_run(bench_of_cpu(), True).why_not == "on CPUs one rank measures alone"
    monkeypatch.setenv("PADDLE_NNODES", "2")
    assert (
        communication_of_run(bench_of_cpu(), True).why_not
        == "ranks were started on several hosts (PADDLE_NNODES=2); start those of one host"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--date", "banana"), "--date 'banana': expected a day as YYYY-MM-DD"),
        (("--date", "2026-02-30"), "--date '2026-02-30': expected a day as YYYY-MM-DD"),
        (("--date", "20260102"), "--date '20260102': expected a day as YYYY-MM-DD"),
        (("-o", "x.txt"), "-o 'x.txt': the name of a device profile must end in .json"),
        (("--json", "/dev/null/x.json"), "--json '/dev/null/x.json': /dev/null is a file; expected a folder there"),
    ],
)
def test_wrong_options_are_found_before_anything_is_measured(tmp_path, words, told):
    with pytest.raises(ConfigError, match=told):
        command.main(parse("-o", str(tmp_path / "x.json"), *words))
    with pytest.raises(ConfigError, match=r"-o .*: is a folder; expected the name of a file"):
        command.main(parse("-o", str(tmp_path)))


def test_the_command_needs_a_file(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--quick")
    assert caught.value.code == 2
    assert "-o/--output" in capsys.readouterr().err


@pytest.mark.paddle
@pytest.mark.parametrize(("is_serial", "expected_ns"), [(False, 5_000), (True, 20_000)])
def test_on_a_device_behind_the_host_the_hosts_share_does_not_show(monkeypatch, is_serial: bool, expected_ns: int) -> None:
    """The host needs 20 us an operation, the device 5, and for a large product 2 ms: what is longer decides, step by step."""
    import paddle

    from interlace.bridge.calibrate.cases import cases
    from interlace.bridge.probe import bench

    def seconds(self, build, num_jobs: int = 1, num_runs: int = 0, inputs=None) -> list[float]:
        program = paddle.static.Program()
        with paddle.static.program_guard(program, paddle.static.Program()):
            build()
        host, device = 0.0, 0.0
        for op in program.global_block().ops:
            host += 20e-6
            device = max(device, host) + (2e-3 if op.name() == "pd_op.matmul" else 5e-6)
        return [host if is_serial else device] * (num_runs or self.num_runs)

    with bench.paddle_settings():
        case = next(case for case in cases(fast=False, quick=True) if case.part.kind == "add")
    monkeypatch.setattr(bench.Bench, "seconds", seconds)
    monkeypatch.setattr(bench.Bench, "is_serial", is_serial)
    with bench.paddle_settings():
        dur_ns, _ = bench_of_cpu().op_ns(case)
    assert dur_ns == pytest.approx(expected_ns, rel=0.01)


@pytest.mark.paddle
@pytest.mark.parametrize(("is_serial", "expected_ns"), [(False, 30_000), (True, 40_000)])
def test_the_hosts_cost_of_an_operation_is_that_of_training_steps_where_it_runs_ahead(
    monkeypatch, is_serial: bool, expected_ns: int
) -> None:
    """The host needs 20 us for an operation, 30 for one of a program that has a backward, 100 for a job and 250 for a run; a job begins
    with a constant, and each scale has one."""
    import paddle

    from interlace.bridge.calibrate.host import host_costs
    from interlace.bridge.probe import bench
    from interlace.ir.kinds import NO_KERNEL

    def seconds(self, build, num_jobs: int = 1, num_runs: int = 0, inputs=None) -> list[float]:
        program = paddle.static.Program()
        with paddle.static.program_guard(program, paddle.static.Program()):
            build()
        names = [op.name() for op in program.global_block().ops if op.name() not in NO_KERNEL]
        each = 30e-6 if "pd_op.layer_norm_grad" in names else 20e-6
        return [250e-6 + num_jobs * (100e-6 + each * len(names))] * (num_runs or self.num_runs)

    monkeypatch.setattr(bench.Bench, "seconds", seconds)
    monkeypatch.setattr(bench.Bench, "is_serial", is_serial)
    with bench.paddle_settings():
        host = host_costs(bench_of_cpu(), True)
    assert host.op_ns == pytest.approx(expected_ns, rel=0.01)
    assert host.job_ns == pytest.approx(120_000, rel=0.01)
    assert host.between_steps_ns == pytest.approx(250_000, rel=0.01)
