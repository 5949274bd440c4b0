"""Compile `half_kernels.cc` for the installed Paddle, once, and keep the result."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from interlace.errors import ConfigError
from interlace.files import cache_folder
from interlace.notice import say

SOURCE = Path(__file__).with_name("half_kernels.cc")
_FLAGS = ("-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-shared", "-w")
_COMPILERS = ("g++", "c++", "clang++")
_LOG_TAIL_LINES = 12


def library_path() -> Path:
    """Path of the compiled kernels for the installed Paddle; they are compiled now (15 s or more) if they do not exist.

    Several processes may call it at once: one compiles, the others wait for it. Raises ConfigError if there is no compiler, or it fails.
    """
    source = SOURCE.read_bytes()
    folder = cache_folder() / hashlib.sha256(source + _identity().encode()).hexdigest()[:16]
    made = folder / "half_kernels.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(made)
    return made


def _identity() -> str:
    """What the compiled kernels depend on besides their source."""
    import paddle

    return f"{paddle.__version__} {paddle.version.commit} {paddle.sysconfig.get_lib()} {platform.machine()} {_FLAGS}"


def _compile(target: Path) -> None:
    """Compile into a temporary file beside `target`, and move it there."""
    compiler = _compiler()
    for left in target.parent.glob("tmp*"):  # left by a killed process, as only the holder of the lock compiles
        shutil.rmtree(left, ignore_errors=True)
    say("compiling kernels of half precision for CPU ranks; once, 15 s or more")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        done = subprocess.run([compiler, *_arguments(made)], capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            tail = "\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()[-_LOG_TAIL_LINES:])
            raise ConfigError(
                f"half precision on a CPU: {compiler} ended with code {done.returncode} on {SOURCE}; its last lines:\n"
                f"{tail}\nExpected a compiler for C++17; name another one in the variable CXX, or train with amp off"
            )
        os.replace(made, target)


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(_COMPILERS)
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise ConfigError(
        f"half precision on a CPU needs a C++17 compiler once, to compile {SOURCE.name} for the installed Paddle; looked "
        f"for {', '.join(names)}. Install one (for example g++), name it in the variable CXX, or train with amp off"
    )


def _arguments(target: Path) -> list[str]:
    import paddle

    libraries = [f"-l:lib{name}.so" for name in ("phi", "phi_core", "common")]
    include, folder = paddle.sysconfig.get_include(), paddle.sysconfig.get_lib()
    return [*_FLAGS, f"-I{include}", os.fspath(SOURCE), "-o", os.fspath(target), f"-L{folder}", *libraries]
