"""Checks of installed versions, and of flags that change the behaviour that other checks examine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle

from interlace.bridge.probe.bench import SET, flag
from interlace.bridge.targets import Device
from interlace.cost_model.profile import DeviceProfile
from interlace.installed import other_paddle, paddle_version, versions
from interlace.ir.target import GPU
from interlace.outside import CONNECTIONS_VARIABLE, MOST_CONNECTIONS, USUAL_CONNECTIONS
from interlace.report.checks import EVERYTHING, MEMORY, OFFLOAD, OVERLAP, RETURN, TIMES, Check, Feature, Verdict
from interlace.version import TESTED

VERSIONS, FLAGS = "versions", "flags"
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of Paddle, or an environment variable, and the value that it must have.

    Attributes:
        value: The required value, which is the default.
        why: What other values do.
        rests: Features that depend on it.
        on_gpus: Whether it matters only on GPUs.
    """

    name: str
    value: Any
    why: str
    rests: tuple[Feature, ...]
    on_gpus: bool = False

    def found(self, environment: Mapping[str, str]) -> Any:
        """Its value in this process."""
        return flag(self.name) if self.name.startswith("FLAGS_") else environment.get(self.name, self.value)


CHECKED = (
    Flag("FLAGS_enable_pir_in_executor", True, "programs are not run as they are built", (EVERYTHING,)),
    Flag("FLAGS_benchmark", False, "the host waits after each operation", (OVERLAP, OFFLOAD, TIMES)),
    Flag("FLAGS_check_nan_inf", False, "the host waits after each operation", (OVERLAP, OFFLOAD, TIMES)),
    Flag("FLAGS_force_sync_ops", "", "the host waits after some operations", (OVERLAP, OFFLOAD, TIMES)),
    Flag("FLAGS_new_executor_serial_run", False, "one thread of the host issues all, and waits with it", (TIMES,)),
    Flag("FLAGS_eager_delete_tensor_gb", 0.0, "memory is collected later or never", (MEMORY,)),
    Flag("FLAGS_memory_fraction_of_eager_deletion", 1.0, "memory is collected later or never", (MEMORY,)),
    Flag("FLAGS_allocator_strategy", "auto_growth", "streams have no pools of their own", (OVERLAP, OFFLOAD), True),
    Flag("FLAGS_use_stream_safe_cuda_allocator", True, "readers on other streams are not known", (OVERLAP, OFFLOAD), True),
    Flag("FLAGS_use_cuda_malloc_async_allocator", False, "readers on other streams are not recorded", (OVERLAP, OFFLOAD), True),
    Flag("FLAGS_fast_eager_deletion_mode", True, "memory is collected by events", (RETURN, MEMORY), True),
    Flag("FLAGS_pir_interpreter_record_stream_for_gc_cache", False, "readers may be left out", (OVERLAP, OFFLOAD), True),
    Flag("FLAGS_use_default_stream", False, "streams do not wait for the legacy stream", (EVERYTHING,), True),
    Flag("CUDA_LAUNCH_BLOCKING", "0", "the host waits after each kernel", (OVERLAP, OFFLOAD, TIMES), True),
)


def installed_versions() -> dict[str, str]:
    """Name -> version of installed software that matters."""
    found = versions()
    if paddle.is_compiled_with_cuda():
        found["cuda"] = str(paddle.version.cuda())
    if driver := _driver():
        found["driver"] = driver
    return found


def check_versions(device: Device, profile: DeviceProfile) -> list[Check]:
    """Check that this version of Paddle was tested, and that the profile was measured with this driver."""
    other = other_paddle()
    found = paddle_version() or "unknown"
    said = f"{found}, which nobody has tested: what follows is all that is known of it" if other else found
    paddles = Check("Paddle", " or ".join(TESTED), said, "not checked" if other else "holds", (EVERYTHING,), VERSIONS)
    known, driver = profile.provenance.driver, _driver()
    if device.target is not GPU:
        return [paddles, Check("driver", "as the profile's", "no GPU is in use", "not checked", (TIMES,), VERSIONS)]
    if not driver or not known:
        said = "Linux does not tell which it is" if not driver else f"{driver}; the profile does not say its own"
        return [paddles, Check("driver", known or "as the profile's", said, "not checked", (TIMES,), VERSIONS)]
    same = driver == known
    said = driver if same else f"{driver}, with which nobody has measured"
    return [paddles, Check("driver", known, said, "holds" if same else "not checked", (TIMES,), VERSIONS)]


def check_flags(device: Device, environment: Mapping[str, str] | None = None) -> list[Check]:
    """Check that flags have the required values; one row for all that do, and one for each that does not."""
    environment = os.environ if environment is None else environment
    rows = [_set_by_runs(), _connections(device, environment.get(CONNECTIONS_VARIABLE, ""))]
    for each in CHECKED:
        name, expected = each.name.removeprefix("FLAGS_"), _shown(each.value)
        found = each.found(environment)
        verdict: Verdict = "not checked"
        if each.on_gpus and device.target is not GPU:
            said = "means something on GPUs only"
        elif found is None:
            said = "this build of Paddle has no such flag"
        elif found == each.value:
            verdict, said = "holds", _shown(found)
        else:
            verdict, said = "fails", f"{_shown(found)}: {each.why}"
        rows.append(Check(name, expected, said, verdict, each.rests, FLAGS))
    return rows


def _connections(device: Device, asked: str) -> Check:
    """Check the number of connections to the GPU: with only one, streams wait for each other; with few, gaps between kernels are longer
    (benchmarks/results/gpu.md)."""
    verdict: Verdict = "not checked"
    if device.target is not GPU:
        said = "means something on GPUs only"
    elif not asked:
        verdict, said = "holds", f"{USUAL_CONNECTIONS}, as it is not set; {MOST_CONNECTIONS} give shorter gaps between kernels"
    elif not asked.isascii() or not asked.isdigit() or not 1 <= int(asked) <= MOST_CONNECTIONS:
        verdict, said = "fails", f"{asked!r}: no number from 1 to {MOST_CONNECTIONS}"
    elif int(asked) < USUAL_CONNECTIONS:
        verdict, said = "fails", f"{asked}: work of one stream waits for that of others"
    else:
        verdict, said = "holds", asked
    return Check(CONNECTIONS_VARIABLE, f"{USUAL_CONNECTIONS} to {MOST_CONNECTIONS}", said, verdict, (TIMES,), FLAGS)


def _shown(value: Any) -> str:
    return "empty" if value == "" else str(value)


def _set_by_runs() -> Check:
    unknown = [name for name in SET if flag(name) is None]
    found = f"this build of Paddle has no {', '.join(unknown)}" if unknown else "known"
    return Check(
        "flags that runs set",
        ", ".join(name.removeprefix("FLAGS_") for name in SET),
        found,
        "fails" if unknown else "holds",
        (EVERYTHING,),
        FLAGS,
    )


def _driver() -> str:
    """Version of the GPU's driver; empty if there is none.

    >>> _of_driver("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep  9")
    '580.159.04'
    """
    try:
        return _of_driver(DRIVER.read_text())
    except OSError:
        return ""


def _of_driver(text: str) -> str:
    words = text.partition("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")
