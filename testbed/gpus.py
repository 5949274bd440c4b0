"""The machine that measurements run on: its libraries, its name, how its processes find our code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"TESTBED_CUBLAS": "libcublas.so.13", "TESTBED_NCCL": "libnccl.so.2", "TESTBED_CUDNN": "libcudnn.so.9"}


def find_libraries() -> dict[str, str]:
    """cuBLAS and NCCL where Python packages brought them; the loader looks for those that are not named here."""
    places = [Path(folder) / "nvidia" for folder in sys.path if folder] + [Path("/usr/local")]
    found: dict[str, str] = {}
    for variable, name in LIBRARIES.items():
        paths = [path for place in places if place.is_dir() for path in place.glob(f"*/lib*/{name}")]
        paths += [path for place in places if place.is_dir() for path in place.glob(f"*/*/lib*/{name}")]
        if paths:
            found[variable] = os.fspath(paths[0])
    return found


def machine() -> dict[str, str]:
    """The GPUs and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        shown = "no nvidia-smi"
    import importlib.metadata

    from interlace.version import VERSION

    return {"gpus": shown, "paddle": importlib.metadata.version("paddlepaddle"), "interlace": VERSION, "python": sys.version.split()[0]}


def python_path() -> str:
    """`PYTHONPATH` of a process that is to find this package."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
