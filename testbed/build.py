"""Build the plugin: `python -m testbed.build [--cuda]`.

The thread version needs g++ and the headers of the installed Paddle, and builds in about a minute. The CUDA version also needs nvcc and
headers of cuDNN; cuBLAS, cuDNN and NCCL are loaded at run time. Only changed files are compiled again.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
BUILD_VARIABLE = "TESTBED_BUILD"
CUDNN_VARIABLE = "TESTBED_CUDNN_INCLUDES"
CUDNN_HEADERS = ("cudnn_frontend.h", "cudnn.h", "nvrtc.h")
CUDNN_PLACES = ("include", "nvidia/cudnn/include", "nvidia/cu13/include")
COMMON = (
    "control",
    "capture",
    "memory",
    "best_fit",
    "pinned",
    "trap",
    "op",
    "ops_math",
    "ops_nn",
    "ops_zoo",
    "ops_fused",
    "ops_attention",
    "ops_comm",
    "device",
)
OWN = {"threads": ("threads", "gemm", "attention", "ccl_local"), "cuda": ("gemm_cuda", "attention_cudnn", "ccl_nccl", "activity")}
DEVICE_CODE = {"threads": ("kernels", "norms", "zoo"), "cuda": ("kernels", "norms", "zoo", "cuda")}
FLAGS = ("-std=c++17", "-fPIC", "-MMD", "-DPADDLE_WITH_CUSTOM_DEVICE", "-D_GLIBCXX_USE_CXX11_ABI=1")


class BuildError(Exception):
    """A tool is missing, or a compiler failed; the message contains its output."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One compilation: the command without the output file, and the output file."""

    source: Path
    output: Path
    command: tuple[str, ...]


def library(variant: str = "threads") -> Path:
    """Path of the built plugin of a variant; it may not exist yet."""
    return build_root() / variant / "libtestbed.so"


def build_root() -> Path:
    """Folder of all build outputs."""
    return Path(os.environ.get(BUILD_VARIABLE) or Path(__file__).parent / "build")


def build(variant: str = "threads", jobs: int = 1) -> Path:
    """Compile what is out of date, and link. Returns the plugin's path. Processes that build at the same time wait for each other.

    Raises:
        BuildError: The compiler or Paddle is missing, or a compilation failed.
    """
    target = library(variant)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        units = _units(variant, target.parent)
        stale = [unit for unit in units if _is_stale(unit)]
        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            list(pool.map(_compile, stale))
        if stale or not target.exists():
            _run(_link(variant, units, target))
    return target


def paddle_folder() -> Path:
    """The installed Paddle's folder, found without importing Paddle."""
    found = importlib.util.find_spec("paddle")
    if found is None or not found.submodule_search_locations:
        raise BuildError("Paddle is not installed for this Python; expected paddlepaddle 3.3.1 with its headers")
    folder = Path(next(iter(found.submodule_search_locations)))
    if not (folder / "include" / "paddle" / "phi").is_dir():
        raise BuildError(f"{folder}: no headers under include/paddle; expected the official wheel")
    return folder


def _units(variant: str, folder: Path) -> list[Unit]:
    paddle = paddle_folder()
    includes = ("-isystem", str(paddle / "include"), "-isystem", str(paddle / "include" / "third_party"))
    define = ("-DTESTBED_CUDA",) if variant == "cuda" else ()
    host = (_tool("g++"), *FLAGS, *define, "-O2", "-Wall", *_cuda_includes(variant), *includes, "-c")
    units = [_unit(SOURCES / f"{name}.cc", folder, host) for name in (*COMMON, *OWN[variant])]
    if variant == "cuda":
        device: tuple[str, ...] = (
            _tool("nvcc"),
            "-std=c++17",
            "-O3",
            "--extended-lambda",
            "-arch=sm_90",
            *define,
            "-Xcompiler",
            "-fPIC",
            "-c",
        )
    else:
        device = (_tool("g++"), *FLAGS, "-O2", "-Wall", "-x", "c++", "-c")
    return units + [_unit(SOURCES / f"{name}.cu", folder, device) for name in DEVICE_CODE[variant]]


def _unit(source: Path, folder: Path, command: tuple[str, ...]) -> Unit:
    output = folder / f"{source.stem}.o"
    return Unit(source, output, (*command, str(source), "-o", str(output)))


def _is_stale(unit: Unit) -> bool:
    if not unit.output.exists():
        return True
    made = unit.output.stat().st_mtime
    return any(not path.exists() or path.stat().st_mtime > made for path in (unit.source, *_own_headers(unit)))


def _own_headers(unit: Unit) -> list[Path]:
    """The testbed's own headers that a unit included when it was last compiled; all of them if that is not known."""
    known = unit.output.with_suffix(".d")
    if not known.exists():
        return list(SOURCES.glob("*.h"))
    words = known.read_text().replace("\\\n", " ").split()
    return [Path(word) for word in words if word.startswith(str(SOURCES)) and word.endswith(".h")]


def _compile(unit: Unit) -> None:
    _run(unit.command)


def _link(variant: str, units: Sequence[Unit], target: Path) -> list[str]:
    libraries = paddle_folder() / "libs"
    objects = [str(unit.output) for unit in units]
    words = [_tool("g++"), "-shared", "-o", str(target), *objects, "-Wl,--allow-shlib-undefined", f"-L{libraries}"]
    words += ["-lphi_core", "-lcommon", "-lphi", "-ldl", "-lpthread"]
    return [*words, *((f"-L{_cuda_home() / 'lib64'}", "-lcudart_static", "-lrt") if variant == "cuda" else ())]


def _cuda_home() -> Path:
    nvcc = Path(_tool("nvcc")).resolve()
    homes = [nvcc.parent.parent, Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for home in homes:
        if (home / "include" / "cuda_runtime.h").exists():
            return home
    raise BuildError(f"no CUDA headers beside {nvcc}; expected include/cuda_runtime.h in one of {[str(home) for home in homes]}")


def _cuda_includes(variant: str) -> tuple[str, ...]:
    if variant != "cuda":
        return ()
    folders = [_cuda_home() / "include", _cuda_home() / "extras" / "CUPTI" / "include", *_cudnn_folders()]
    return tuple(word for folder in folders for word in ("-isystem", str(folder)))


def _cudnn_folders() -> list[Path]:
    """Folders with the headers of cuDNN, cudnn-frontend and nvrtc: in Python packages, or named in `CUDNN_VARIABLE`."""
    named = [Path(folder) for folder in os.environ.get(CUDNN_VARIABLE, "").split(os.pathsep) if folder]
    places = [*named, *(Path(folder) / part for folder in sys.path if folder for part in CUDNN_PLACES), _cuda_home() / "include"]
    found = [next((place for place in places if (place / name).exists()), None) for name in CUDNN_HEADERS]
    if None in found:
        raise BuildError(
            f"no {CUDNN_HEADERS[found.index(None)]}; install nvidia-cudnn-frontend, nvidia-cudnn-cu13 and nvidia-cuda-nvrtc, "
            f"or name the folders of their headers in {CUDNN_VARIABLE}"
        )
    return [folder for folder in found if folder]


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"{name} is not on the PATH; the {'CUDA' if name == 'nvcc' else 'thread'} version needs it")
    return found


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m testbed.build", description="Build the testbed's plugin.")
    parser.add_argument("--cuda", action="store_true", help="CUDA streams instead of host threads (nvcc, sm_90)")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="compilations at once")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        target = build("cuda" if args.cuda else "threads", args.jobs)
    except BuildError as error:
        print(f"testbed.build: {error}", file=sys.stderr)
        return 2
    print(f"{target} ({time.perf_counter() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
