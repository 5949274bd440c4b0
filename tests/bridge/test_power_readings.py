"""Energy and clocks by NVML, with a driver that is played: which GPU is read, what calibration makes of it, and what training tells."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pytest

pytest.importorskip("paddle")
import paddle

from interlace.bridge import hook, nvml
from interlace.bridge.calibrate.power import Load, of_devices, power_part
from interlace.bridge.nvml import MODULE, find_gpu
from interlace.bridge.tokens import tokens_of
from interlace.cost_model.profile import Power, PowerSample
from interlace.report.measured import COUNTED, WARM_UP, Measured

pytestmark = pytest.mark.paddle
STATIC_W, LIMIT_W, HIGHEST = 150.0, 700.0, 1980
SHARE, EXPONENT = 0.6, 1.2
"""Of the played product's time, and of all energy."""


HOST_S, ROW, ONCE_S, RESPONSE_S, TICK_S = 0.0005, 50, 200e-6, 0.04, 0.0001
"""The host's start of programs; kernels in a row, and what one takes at the highest clock; how fast the limiter reacts."""
COUNT_S, SAMPLED_S = 0.1, 0.025
"""How often the driver counts energy, and from which part of that time it takes the power of the whole."""


@dataclass
class Machine:
    """A GPU that draws `STATIC_W` at rest, and changes its clock slowly so that no load exceeds the limit in the mean."""

    now: float = 0.0
    joules: float = 0.0
    ratio: float = 1.0
    mean_w: float = STATIC_W
    pending_s: float = 0.0
    watts: float = 0.0
    share: float = 0.0
    top: float = 1.0
    highest: float = 1.0
    counted: int = 0
    count_at: float = 0.0
    refuses: int = 0
    asked: list[Any] = field(default_factory=list)

    @property
    def mhz(self) -> int:
        return round(HIGHEST * self.ratio)

    def sleep(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def tick(self) -> None:
        """What is pending goes on."""
        watts = STATIC_W
        if self.pending_s > 0:
            ratio = min(self.ratio, self.top)
            slower = 1 + self.share * (1 / ratio - 1)
            self.pending_s -= TICK_S / slower
            watts += self.watts * ratio**EXPONENT / slower
        self.now += TICK_S
        if (self.now - TICK_S) % COUNT_S < SAMPLED_S:
            self.joules += watts * TICK_S * COUNT_S / SAMPLED_S
        if self.now >= self.count_at:
            self.counted, self.count_at = int(1000 * self.joules), self.now + COUNT_S
        change_w = (watts - self.mean_w) * TICK_S / RESPONSE_S
        self.mean_w += change_w
        self.ratio = min(self.highest, max(0.4, self.ratio + 0.002 * (1 - self.mean_w / LIMIT_W) - 0.1 * change_w / LIMIT_W))

    def run(self, times: int, meanwhile: Callable[[], object], watts: float, share: float, top: float) -> float:
        """Rows of kernels; their energy and time at the highest clock are known. Above `top` of it they do not run, whatever is told."""
        begin = self.now
        self.sleep(HOST_S)
        self.pending_s, self.watts, self.share, self.top = times * ROW * ONCE_S, watts, share, top
        meanwhile()
        while self.pending_s > 0:
            self.tick()
        return self.now - begin

    def clock(self) -> int:
        """As the driver tells it; it refuses now and then."""
        self.refuses += 1
        if self.refuses % 7 == 0:
            raise RuntimeError("Not Supported")
        return self.mhz

    def module(self) -> Any:
        """What `nvidia-ml-py` would give."""
        return SimpleNamespace(
            NVML_CLOCK_SM=1,
            NVMLError=RuntimeError,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda name: self.asked.append(name) or name,
            nvmlDeviceGetTotalEnergyConsumption=lambda gpu: self.counted,
            nvmlDeviceGetClockInfo=lambda gpu, kind: self.clock(),
            nvmlDeviceGetMaxClockInfo=lambda gpu, kind: HIGHEST,
            nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 1000 * LIMIT_W,
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setitem(sys.modules, MODULE, made.module())
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: Driver)
    return made


class Driver:
    """CUDA's driver of a process that sees two GPUs, in an order that NVML does not know."""

    UUIDS = (UUID(int=0xB0 << 120), UUID(int=0xA0 << 120))

    @staticmethod
    def cuInit(flags: int) -> int:
        return 0

    @classmethod
    def cuDeviceGet(cls, device: Any, number: int) -> int:
        device._obj.value = number
        return 0 if number < len(cls.UUIDS) else 101

    @classmethod
    def cuDeviceGetUuid_v2(cls, uuid: Any, device: Any) -> int:
        uuid._obj[:] = cls.UUIDS[device.value].bytes
        return 0


def load(machine: Machine, kind: str, watts: float, share: float, top: float = 1.0) -> Load:
    return Load(kind, 1 << 37, ROW, ROW * ONCE_S, lambda: lambda *given: machine.run(*given, watts, share, top))


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2, 0.0])
@pytest.mark.parametrize("top", [1.0, 0.85])
def test_calibration_finds_limit_watts_share_and_exponent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, share: float, top: float
) -> None:
    """Of a product and attention that are held at the limit in a row, and of an addition and an activation that are not, whose clock a
    product lowers. Attention, in short rows, has the clock that the driver tells, which says how energy follows it; a product may not."""
    monkeypatch.setattr(nvml.time, "sleep", machine.sleep)
    gpu, why = find_gpu(0)
    assert gpu is not None, why
    loads = [
        load(machine, "add", 380.0, 0.0),
        load(machine, "attention", 800.0, 0.9),
        load(machine, "attention_grad", 790.0, 0.9),
        load(machine, "gelu", 300.0, share),
        load(machine, "gemm", 1000.0, SHARE, top),
    ]
    found = power_part(loads, gpu, lambda: machine.now, machine.sleep)
    assert found.limit_w == pytest.approx(LIMIT_W, rel=0.02)
    assert found.highest_mhz == HIGHEST
    assert found.static_w == pytest.approx(STATIC_W, abs=1.0)
    assert found.energy_exponent == pytest.approx(EXPONENT, abs=0.2)
    assert [each.kind for each in found.samples] == [each.kind for each in loads]
    assert [each.watts for each in found.samples[:4]] == pytest.approx([380, 800, 790, 300], rel=0.05)
    assert found.samples[4].watts == pytest.approx(1000, rel=0.1)  # from a clock that follows from its energy
    assert [each.clock_share for each in found.samples[:4]] == pytest.approx([0, 0.9, 0.9, share], abs=0.12)
    assert found.samples[4].clock_share == pytest.approx(SHARE, abs=0.12 if top == 1 else 0.25)  # the two clocks lie close to each other
    assert found.samples[-1].own_mhz == (0 if top == 1 else pytest.approx(top * HIGHEST, rel=0.05))


def test_devices_of_a_host_are_averaged() -> None:
    """A kernel that only one of them measured counts by itself; the highest clock of a kind is one of all devices."""
    first = Power(690.0, 120.0, 0.0, 1980, 345, 15, 40_000_000, 1.0, samples=(PowerSample("add", 8, 400.0, 0.1),), note="the same")
    second = msgspec.structs.replace(
        first,
        limit_w=698.0,
        static_w=130.0,
        energy_exponent=1.1,
        samples=(PowerSample("add", 8, 420.0, 0.2, own_mhz=1700), PowerSample("gemm", 8, 900.0)),
    )
    twice = msgspec.structs.replace(first, samples=(first.samples[0], PowerSample("add", 8, 410.0)))  # kernels of equal size
    assert of_devices([first]) == msgspec.structs.replace(first, note="one device; the same")
    assert of_devices([twice]) == msgspec.structs.replace(twice, note="one device; the same")
    assert [each.watts for each in of_devices([twice, twice]).samples] == [400.0, 410.0]
    assert of_devices([first, second]) == msgspec.structs.replace(
        first,
        limit_w=694.0,
        static_w=125.0,
        energy_exponent=1.05,
        samples=(PowerSample("add", 8, 410.0, 0.15, own_mhz=1840, num_runs=2), PowerSample("gemm", 8, 900.0)),
        note="2 devices, limits of 690 to 698 W; the same",
    )


def test_where_no_kernel_reaches_the_limit_calibration_says_so(machine: Machine) -> None:
    gpu, _ = find_gpu(0)
    assert gpu is not None
    found = power_part([load(machine, "add", 380.0, 0.0)], gpu, lambda: machine.now, machine.sleep)
    assert "no kernel reached the limit" in found.note
    assert (found.limit_w, found.samples[0].clock_share) == (LIMIT_W, 0.0)


def test_a_low_clock_far_from_the_limit_is_no_limit(machine: Machine) -> None:
    """As with a clock that somebody has fixed: a light kernel says nothing of the limit, which is then the driver's."""
    gpu, _ = find_gpu(0)
    assert gpu is not None
    machine.highest = 0.8
    found = power_part([load(machine, "add", 380.0, 0.0)], gpu, lambda: machine.now, machine.sleep)
    assert "no kernel reached the limit" in found.note
    assert found.limit_w == LIMIT_W


def test_the_gpu_is_that_which_cuda_shows(machine: Machine) -> None:
    """Found by its UUID, as NVML numbers GPUs otherwise."""
    assert [find_gpu(index)[1] for index in range(2)] == ["", ""]
    assert machine.asked == ["GPU-b0000000-0000-0000-0000-000000000000", "GPU-a0000000-0000-0000-0000-000000000000"]
    assert find_gpu(2) == (None, "the driver gives no energy of GPU 2: OSError: cuDeviceGet returns 101")
    assert len(machine.asked) == 2


def test_a_driver_without_energy_and_a_missing_module_are_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gpu: Any) -> int:
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(sys.modules[MODULE], "nvmlDeviceGetTotalEnergyConsumption", refuse)
    assert find_gpu(0) == (None, "the driver gives no energy of GPU-b0000000-0000-0000-0000-000000000000: RuntimeError: Not Supported")
    monkeypatch.setitem(sys.modules, MODULE, None)
    gpu, why = find_gpu(0)
    assert gpu is None
    assert "pip install nvidia-ml-py" in why


class Steps:
    """Steps of plans on a device that says when the host waits for it; each takes the host 1 s, and what lies between two of them 10 s. A
    GPU that is given has spent the energy of a step, 150 J, when the host has waited for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: Machine | None = None) -> None:
        self.now, self.waits, self.said, self.gpu = 0, list[int](), list[str](), gpu
        device = SimpleNamespace(gpu_index=lambda: None if gpu is None else 0, synchronize=self.wait)
        monkeypatch.setattr(hook, "choose_device", lambda: device)
        monkeypatch.setattr(hook, "say_once", self.said.append)
        monkeypatch.setattr(hook.time, "perf_counter_ns", lambda: self.now)
        self.count = 0

    def wait(self) -> None:
        self.waits.append(self.count)
        if self.gpu is not None:
            self.gpu.counted = 150_000 * self.count

    def run(self, measured: Measured, fails: bool = False) -> None:
        program = SimpleNamespace(pipeline=SimpleNamespace(num_micro_batches=1))
        report = SimpleNamespace(measured=measured, measured_line=lambda: "took a while", plan=SimpleNamespace(program=program))
        engine = SimpleNamespace(_mode="train", _pir_dist_main_progs={"train": None})
        self.now += 10
        with suppress(OSError), hook._timed(engine, SimpleNamespace(is_paddles=False, report=report)):  # type: ignore[arg-type]
            self.now += 1
            self.count += 1
            if fails:
                raise OSError


def test_the_host_waits_for_the_device_before_the_steps_that_count_and_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not behind each; the first that counts begins with the wait, all others where the one before returned."""
    steps, measured = Steps(monkeypatch), Measured()
    for _ in range(WARM_UP + COUNTED + 1):
        steps.run(measured)
    assert steps.waits == [WARM_UP, WARM_UP + COUNTED]
    assert measured.took_ns == [1, *[11] * (WARM_UP - 1), 1, *[11] * (COUNTED - 1)]
    assert steps.said == ["took a while"]


def test_a_step_behind_another_plans_or_behind_one_that_failed_counts_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, ours, others = Steps(monkeypatch), Measured(), Measured()
    for measured, fails in ((ours, False), (ours, False), (others, False), (ours, False), (ours, True), (ours, False)):
        steps.run(measured, fails)
    assert (ours.took_ns, others.took_ns) == ([1, 11, 1, 1], [1])


def test_training_reads_energy_around_the_steps_that_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time behind the wait for the device."""
    steps, measured = Steps(monkeypatch, machine), Measured()
    monkeypatch.setattr(hook, "tokens_of", lambda *_: 204)
    monkeypatch.setattr(hook, "gather", lambda peers, topic, mine: [mine])
    for _ in range(WARM_UP + COUNTED):
        steps.run(measured)
    assert steps.waits == [WARM_UP, WARM_UP + COUNTED]
    assert (measured.joules, measured.run_joules, measured.tokens) == (150.0, 150.0, 204)
    assert measured.energy_line(100.0).startswith("this rank's device: 150.0 J a step, predicted 100.0 J (measured +50.0 %); all devices: ")


def embedding(ids: Callable[[Any], Any], shape: Sequence[int]) -> Any:
    """A program that looks up what is made of fed ids of that shape."""
    paddle.enable_static()
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        fed, table = paddle.static.data("ids", shape, "int64"), paddle.static.data("table", [32, 8], "float32")
        paddle._C_ops.embedding(ids(fed), table, -1, False)
    return main


@pytest.mark.parametrize(
    ("ids", "shape", "tokens"),
    [
        (lambda fed: fed[:, :-1], (4, 17), 3 * 4 * 16),
        (lambda fed: fed.cast("int32").reshape([-1]), (4, 17), 3 * 4 * 17),
        (lambda fed: paddle.arange(17), (4, 17), 0),
        (lambda fed: fed, (-1, 17), 0),
    ],
)
def test_tokens_are_fed_ids_that_are_looked_up(ids: Callable[[Any], Any], shape: Sequence[int], tokens: int) -> None:
    """Also parts of what is fed; not positions that the program counts itself, nor where the batch's size is not known."""
    assert tokens_of(embedding(ids, shape), 3) == tokens


@pytest.mark.parametrize(("others", "run_joules"), [((150.0, 250.0), 400.0), ((150.0, 0.0), 0.0)])
def test_tokens_per_joule_are_of_all_ranks(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, others: tuple[float, ...], run_joules: float
) -> None:
    """The stage that looks up ids knows how many there are; where one device was not read nothing is said of all."""
    asked = list[str]()

    def gathered(peers: Any, topic: str, mine: tuple[float, int]) -> list[tuple[float, int]]:
        asked.append(topic)
        assert mine == (150.0, 3 * 4 * 17)
        return [(others[0], mine[1]), (others[1], 0)]

    monkeypatch.setattr(hook, "choose_device", lambda: SimpleNamespace(gpu_index=lambda: 0, synchronize=lambda: None))
    monkeypatch.setattr(hook, "gather", gathered)
    measured = Measured(energy_mj=[0, 1000 * 150 * COUNTED], took_ns=[1] * (WARM_UP + COUNTED))
    program = SimpleNamespace(pipeline=SimpleNamespace(num_micro_batches=3))
    engine = SimpleNamespace(_pir_dist_main_progs={"train": embedding(lambda fed: fed, (4, 17))})
    hook._add_up(engine, SimpleNamespace(plan=SimpleNamespace(program=program), measured=measured))  # type: ignore[arg-type]
    assert asked == ["energy of steps"]
    assert (measured.run_joules, measured.tokens) == (run_joules, 204)
    told = "; all devices: 400.0 J a step, predicted 500.0 J (measured -20.0 %); 204 tokens a step, 0.51 tokens per joule, predicted 0.41"
    assert measured.energy_line(150.0, 500.0) == "this rank's device: 150.0 J a step, predicted 150.0 J (measured +0.0 %)" + (
        told if run_joules else ""
    )


def test_devices_that_are_no_gpus_are_not_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "choose_device", lambda: SimpleNamespace(gpu_index=lambda: None, synchronize=lambda: None))
    measured = Measured(took_ns=[1] * WARM_UP)
    hook._read_energy(measured)
    hook._add_up(SimpleNamespace(), SimpleNamespace(measured=measured))  # type: ignore[arg-type]
    assert (measured.energy_mj, measured.joules, measured.energy_line(5.0)) == ([], None, "")
    assert (measured.run_joules, measured.tokens_per_joule) == (0.0, None)
