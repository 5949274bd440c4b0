"""The machine that measurements run on: its CUDA libraries, GPUs and versions, and `PYTHONPATH` for its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"TESTBED_CUBLAS": "libcublas.so.13", "TESTBED_NCCL": "libnccl.so.2", "TESTBED_CUDNN": "libcudnn.so.9"}


def find_libraries() -> dict[str, str]:
    """Variable -> path of cuBLAS, NCCL and cuDNN in Python packages or CUDA's folder; the loader searches for any that are missing here."""
    places = [Path(folder) / "nvidia" for folder in sys.path if folder] + [Path("/usr/local")]
    found: dict[str, str] = {}
    for variable, name in LIBRARIES.items():
        paths = [path for place in places if place.is_dir() for path in place.glob(f"*/lib*/{name}")]
        paths += [path for place in places if place.is_dir() for path in place.glob(f"*/*/lib*/{name}")]
        if paths:
            found[variable] = os.fspath(paths[0])
    return found


def machine() -> dict[str, str]:
    """The GPUs, and the versions of Paddle, Interlace and Python."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        shown = "no nvidia-smi"
    import importlib.metadata

    from interlace.version import VERSION

    return {"gpus": shown, "paddle": importlib.metadata.version("paddlepaddle"), "interlace": VERSION, "python": sys.version.split()[0]}


def python_path() -> str:
    """`PYTHONPATH` with which a process finds this package."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
