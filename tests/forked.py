"""Ranks without their start: processes that have imported Paddle once and are forked for each rank.

Importing Paddle takes 1.5 s of processor time, and the suite starts some hundred ranks. `tests/cpu` starts ranks as users do.
Rank 0 is forked from another process than the other ranks, so that their sets are in different orders, as in a real run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from interlace.local import processes
from interlace.local.processes import PARENT_PIPE_VARIABLE, SAY_VARIABLE
from interlace.notice import heard
from interlace.outside import TARGET_VARIABLE
from testbed import device
from tests import engines, searches

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "interlace.cpu",  # which lets Paddle import without its warning
    "paddle",
    "paddle.distributed.auto_parallel.static.engine",
    "interlace.cpu.install",
    "interlace.cpu.dynamic",
    "interlace.cpu.half",
    "interlace.bridge.hook",
    "interlace.bridge.mesh",
    "interlace.planning.plan",
    "interlace.local.rank",
    "interlace.local.build_rank",
    "interlace.layout.judge",
)
MODULES = ("interlace.local.rank", "interlace.local.build_rank", "interlace.layout.judge")
"""What is forked: ranks, and what judges a layout for `interlace choose`."""
LOADED = (device.ROOT_VARIABLE,)
"""What Paddle's import, or the testbed's plugin, leaves in the environment."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Numbers of `mallopt`."""
START_S = 120.0
START = processes.start


class Server:
    """A process that forks ranks of one target as long as its owner lives."""

    def __init__(self, target: str, address: Path, owner: int) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        env = {**os.environ, **threads, "GLOG_minloglevel": "2", "FLAGS_selected_cpus": "0"}
        env["PYTHONPATH"] = os.pathsep.join([os.fspath(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        ours, theirs = socket.socketpair()
        with ours, theirs:
            words = [sys.executable, "-m", "tests.forked", target, os.fspath(address), str(theirs.fileno()), str(owner)]
            self.process = subprocess.Popen(words, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            theirs.close()
            ours.settimeout(START_S)
            if ours.recv(1) != b"+":
                raise RuntimeError(f"the process that forks ranks of {target} ended with code {self.process.wait()}; it said why above")

    def end(self) -> None:
        """Forked ranks are the launcher's to end."""
        self.process.kill()  # Paddle tells of every other signal
        self.process.wait()


class Forked:
    """A forked rank, with as much of `subprocess.Popen` as the launcher uses."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the rank runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same; waits for it."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            self.returncode = int(self._lines.readline())
            self._connection.close()
        return self.returncode


class Servers:
    """Starts ranks in place of `processes.start`; a server is started with the first rank that it forks.

    Args:
        folder: Has the servers' sockets; who has the same one shares the servers.
        owner: The process that the servers end with.
    """

    def __init__(self, folder: Path, owner: int) -> None:
        self._servers: list[Server] = []
        self._folder, self._owner = folder, owner
        folder.mkdir(exist_ok=True)

    def start(
        self, command: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes] | int = subprocess.STDOUT
    ) -> processes.Child:
        """As `processes.start`."""
        target = env.get(TARGET_VARIABLE, "") or "cpu"
        is_known = target == "cpu" or (target == "testbed" and device.variant() == "threads")
        if list(command[:2]) != [sys.executable, "-m"] or command[2] not in MODULES or not is_known:
            return START(command, env, stdout, stderr)
        child_fd, alive_fd = os.pipe()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address(target, int(env.get("PADDLE_TRAINER_ID", "0")) > 0))
        request = json.dumps({"words": list(command[2:]), "env": dict(env), "cwd": os.getcwd()}).encode()
        error = stdout.fileno() if isinstance(stderr, int) else stderr.fileno()
        with heard() as said_fd:
            socket.send_fds(connection, [len(request).to_bytes(4, "big")], [stdout.fileno(), error, child_fd, said_fd])
            connection.sendall(request)
            process = Forked(connection)
        os.close(child_fd)
        return processes.Child(process, alive_fd)  # type: ignore[arg-type]

    def _address(self, target: str, is_other: bool) -> str:
        address = self._folder / f"{target}-{'others' if is_other else 'first'}"
        if not address.exists():
            with (self._folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not address.exists():
                    self._servers.append(Server(target, address, self._owner))
        return os.fspath(address)

    def end(self) -> None:
        """End the servers that nobody else uses."""
        for server in self._servers if self._owner == os.getpid() else ():
            server.end()


def serve(target: str, address: str, ready: int, owner: int) -> None:
    """Fork a rank for each connection; returns in the rank, whose arguments are then `sys.argv`."""
    if target == "testbed":
        os.environ.pop(device.SWITCHES_VARIABLE, None)
        device.load()
        importlib.import_module("testbed.world")
        importlib.import_module("testbed.lowering")
        importlib.import_module("testbed.programs").kernel_types()  # known from here on
    for name in PRELOADED:
        importlib.import_module(name)
    searches.shorten()
    engines.wait_for_engines()
    engines.plan()
    make_building_cheap()
    keep_freed_memory()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # there once it listens
    os.write(ready, b"+")
    os.close(ready)
    running: dict[int, tuple[int, socket.socket]] = {}  # what tells of a rank's end -> the rank, and whom to tell
    while _is_alive(owner):
        for ended in select.select([*running, listener.fileno()], [], [], 2.0)[0]:
            if ended in running:
                _tell(*running.pop(ended))
                os.close(ended)
                continue
            connection, _ = listener.accept()
            request = _request(connection)
            pid = os.fork() if request else 0
            if pid:
                with contextlib.suppress(OSError):  # who asked has ended, and the rank will
                    connection.sendall(f"{pid}\n".encode())
                running[os.pidfd_open(pid)] = pid, connection
            elif request:
                _become(request, [listener, connection, *(other for _, other in running.values())], list(running))
                return
            for fd in request.fds if request else ():
                os.close(fd)
    raise SystemExit(0)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def keep_freed_memory() -> None:
    """This process and its forks give no memory back to the system: to get it anew, a page at a time, takes a fourteenth of a rank."""
    mallopt = ctypes.CDLL(None).mallopt
    for option, size_bytes in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 1 << 30), (M_TOP_PAD, 64 << 20)):
        if not mallopt(option, size_bytes):
            raise OSError(f"mallopt({option}, {size_bytes}) is refused")


def make_building_cheap() -> None:
    """In this process and its forks Paddle builds models of ours in half of the time, into the same programs."""
    _take_models_as_they_stand()
    _convert_what_calls_models()
    _record_no_stacks()
    _collect_no_garbage()


def _take_models_as_they_stand() -> None:
    """Tell Paddle not to convert the source of our models: none has control flow that depends on tensors.

    The conversion takes half of the processor time of a rank this small. Ranks that `tests/cpu` starts convert everything.
    """
    from paddle.jit import ignore_module
    from paddle.jit.dy2static.convert_call_func import is_unsupported

    modules = [types.ModuleType(name) for name in ("examples", "tests")]
    for module in modules:
        module.__file__ = os.fspath(ROOT / module.__name__ / "__init__.py")
    ignore_module(modules)
    is_unsupported(None)  # from here on the functions of all ignored modules are known


def _convert_what_calls_models() -> None:
    """Convert Paddle's own methods that call a model and its loss once; each rank would convert them for its own object."""
    import paddle
    from paddle.distributed.auto_parallel.static.helper import ProxyLayer
    from paddle.jit.dy2static import program_translator, utils

    cache = program_translator.FunctionCache
    convert = cache.convert_with_cache
    cache.convert_with_cache = lambda self, function: convert(self, getattr(function, "__func__", function))
    ProxyLayer(paddle.nn.Layer(), None, [])  # says that they are to be converted
    utils.DEL_TEMP_DIR = False  # this process removes its folder now, and each rank its own at its end
    for method in (ProxyLayer._train, ProxyLayer._eval, ProxyLayer.call_loss, ProxyLayer.call_metrics):
        program_translator.convert_to_static(method)
    shutil.rmtree(utils.get_temp_dir())
    utils.DEL_TEMP_DIR = True


def _record_no_stacks() -> None:
    """Let Paddle record the same Python stack on every operation: to look for each takes a fifth of building a model this small."""
    stack = traceback.extract_stack(limit=1)
    traceback.extract_stack = lambda f=None, limit=None: stack


def _collect_no_garbage() -> None:
    """Ranks end before their garbage matters; collecting it would touch, and so copy, every page that they share with this process."""
    gc.collect()
    gc.freeze()
    gc.disable()


class Request(NamedTuple):
    """A rank that somebody wants: its arguments, environment and folder, and its files: output, errors, whether the launcher lives, and
    where it says things."""

    words: list[str]
    env: dict[str, str]
    cwd: str
    fds: list[int]


def _request(connection: socket.socket) -> Request | None:
    """What comes; None where who asked has ended."""
    size, fds, _, _ = socket.recv_fds(connection, 4, 4)
    text = connection.makefile("rb").read(int.from_bytes(size, "big"))
    return Request(**json.loads(text), fds=fds) if text else None


def _tell(pid: int, connection: socket.socket) -> None:
    """The exit code of a rank that has ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError), connection:
        connection.sendall(f"{code}\n".encode())


def _become(request: Request, sockets: Sequence[socket.socket], fds: Sequence[int]) -> None:
    """Be the rank, without what is the server's."""
    for each in sockets:
        each.close()
    for fd in fds:
        os.close(fd)
    os.setsid()
    output, error, alive, said = request.fds
    os.dup2(output, 1)
    os.dup2(error, 2)
    loaded = {name: os.environ[name] for name in LOADED if name in os.environ}
    os.environ.clear()
    os.environ.update({**request.env, **loaded, PARENT_PIPE_VARIABLE: str(alive), SAY_VARIABLE: str(said)})
    os.chdir(request.cwd)
    _take_flags(request.env)
    searches.try_few_forms(pytest.MonkeyPatch())
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    random.seed()
    sys.argv = request.words


def _take_flags(env: Mapping[str, str]) -> None:
    """Paddle's flags that stand in the environment, which it reads when it is imported."""
    from paddle.base.framework import _global_flags

    flags = _global_flags()
    for name, text in env.items():
        if name.startswith("FLAGS_") and name in flags and flags.is_public(name):
            kind = type(flags[name])
            flags[name] = text.lower() in ("1", "true", "yes") if kind is bool else kind(text)


def _leave(code: int) -> None:
    """As `sys.exit`, but the interpreter is not taken apart, which would touch, and so copy, every page that a rank shares with its server:
    a third of the processor time of a rank by Paddle's own plan."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    _leave(importlib.import_module(sys.argv[0]).main(sys.argv[1:]))
