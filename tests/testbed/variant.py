"""What the tests run on: host threads, or GPUs with `TESTBED_VARIANT=cuda` and a plugin that was built before."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from testbed import device
from testbed.build import build, library

SWITCHES = "poison=1" if device.variant() == "cuda" else ""
"""Switches of every run, beside its own: on GPUs freed memory is not poisoned unless one asks for it."""


def prepare() -> Path:
    """The plugin; on GPUs also what its processes need in the environment."""
    if device.variant() != "cuda":
        return build(jobs=os.cpu_count() or 1)
    from testbed.gpus import find_libraries

    if not library("cuda").is_file():
        pytest.fail(f"{library('cuda')} is not there; build it with `python -m testbed.build --cuda`")
    os.environ.update(find_libraries())
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault(device.SWITCHES_VARIABLE, SWITCHES)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(_count_gpus()))))
    if not os.environ["CUDA_VISIBLE_DEVICES"]:
        pytest.fail("TESTBED_VARIANT=cuda, and no GPU is seen")
    return library("cuda")


def _count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in shown.splitlines())


def need_ranks(world: int) -> None:
    """Skip where there are fewer GPUs than ranks: NCCL gives each rank its own."""
    if device.variant() == "cuda" and world > (found := len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))):
        pytest.skip(f"{world} ranks, {found} GPUs")


def switches(text: str) -> str:
    """Switches in words, with those of every run."""
    return ",".join(filter(None, [SWITCHES, text]))
