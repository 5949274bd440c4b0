"""Setup of a rank's process on the testbed: `interlace run --target testbed` calls it before the user's script.

The script builds its model on the CPU, where Paddle can reshard in the dynamic graph; groups, barriers and resharding outside of
programs use Interlace's CPU transport. Once an engine is created, the device is the testbed; parameters move there before the first
step. Rings become communicators of the plugin.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from interlace.cpu.install import patch_engine, rank_environment
from interlace.cpu.transport import Transport
from testbed import delays, device, measure

DEVICE = f"{device.NAME}:0"
REPORT_VARIABLE = "TESTBED_REPORT"  # folder where each rank writes its memory numbers and stream priorities when it ends
INPLACE_VARIABLE = "TESTBED_INPLACE"  # 0 or 1: Paddle's in-place pass
TRACE_RUN_VARIABLE = "TESTBED_TRACE_RUN"  # 0 or 1: the executor issues everything from one thread
ID_BYTES = 128
KEPT_FEEDS = 8  # how many steps the host may run ahead of the device
_ID_TIMEOUT_S = 60.0


def install(rank: int, world: int, run_dir: str, timeout_s: float) -> Transport:
    """Load the plugin, connect this rank to the others and patch Paddle; the caller closes the transport at the end."""
    os.environ.update(rank_environment(rank, world))
    os.environ.pop("POD_NAME", None)
    transport = Transport(rank, world, run_dir, timeout_s)
    if device.variant() == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = _own_gpu(rank)
    device.load()
    import paddle

    from interlace.cpu import dynamic, half, ops
    from testbed.lowering import register

    register()
    paddle.set_flags({"FLAGS_new_executor_sequential_run": True})
    trace_run = os.environ.get(TRACE_RUN_VARIABLE, "1" if device.variant() == "cuda" else "0") == "1"
    paddle.set_flags({"FLAGS_enable_pir_in_executor_trace_run": trace_run})
    inplace = os.environ.get(INPLACE_VARIABLE, "0" if device.variant() == "cuda" else "1")  # README.md, "Solved problems"
    paddle.set_flags({"FLAGS_pir_apply_inplace_pass": inplace == "1"})
    ops.set_transport(transport)
    dynamic.patch(transport)
    half._patch_sharding()
    half._choose_attention_as_on_gpu()
    delays.apply_words(os.environ.get(delays.DELAYS_VARIABLE, ""), rank)
    _patch_groups(rank, Path(run_dir))
    _patch_p2p()
    _patch_engine()
    _patch_amp()
    measure.install(rank, Path(run_dir))
    if os.environ.get(delays.TAKEN_VARIABLE):
        _record_delays(Path(os.environ[delays.TAKEN_VARIABLE]) / f"delays{rank}.json", rank)
    paddle.set_device("cpu")
    if os.environ.get(REPORT_VARIABLE):
        atexit.register(_write_report, Path(os.environ[REPORT_VARIABLE]) / f"memory{rank}.json")
    return transport


def _own_gpu(rank: int) -> str:
    """The GPUs of the run, the rank's own first, as it uses the first one; the others stay visible, so that NCCL finds them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not given:
        return str(rank)
    gpus = given.split(",")
    return gpus[rank] if os.environ.get("TESTBED_ONE_GPU") else ",".join([gpus[rank], *gpus[:rank], *gpus[rank + 1 :]])


def _write_report(path: Path) -> None:
    from testbed.programs import stream_priorities

    path.write_text(json.dumps({**asdict(device.memory()), "streams": stream_priorities()}) + "\n")


def _record_delays(path: Path, rank: int) -> None:
    """At the end of each step, write the delays applied so far, and what each of them delayed, to a file."""
    from paddle.distributed.auto_parallel.static.engine import Engine

    run = Engine.run

    def run_recorded(engine: Any, *args: Any, **kwargs: Any) -> Any:
        from testbed.programs import labels

        delays.begin_step()
        try:
            return run(engine, *args, **kwargs)
        finally:
            names = delays.step_ops()
            known = labels(engine._job_plan, names) if engine._job_plan is not None else {}
            rows = [
                {
                    "site": str(each.site._replace(rank=rank)),
                    "kind": each.kind,
                    "name": each.name,
                    "step": each.step,
                    "label": known.get(each.op, "") if each.step else "",
                }
                for each in delays.taken()
            ]
            path.write_text(json.dumps(rows) + "\n")

    Engine.run = run_recorded


def _patch_groups(rank: int, run_dir: Path) -> None:
    from paddle.distributed.auto_parallel.static import process_group

    def instantiate(self: Any) -> None:
        if self._is_instantiate:
            return
        self._is_instantiate = True
        ranks = [int(each) for each in self.ranks]
        if rank in ranks:
            make_ring(int(self.id), ranks.index(rank), len(ranks), run_dir / f"ring{self.id}_{ranks[0]}")

    process_group.ProcessGroup.instantiate = instantiate


def _patch_p2p() -> None:
    """Build bfloat16 `send_v2` and `recv_v2` as float16, because the CPU wheel cannot build them.

    Resharding sets the type of the received value anyway, and `programs` replaces both operators.
    """
    import paddle

    send, receive = paddle._C_ops.send_v2, paddle._C_ops.recv_v2
    with paddle.pir_utils.IrGuard(), paddle.static.program_guard(paddle.static.Program()):
        half = paddle._C_ops.empty([1], paddle.float16, paddle.CPUPlace()).type()

    def send_any(value: Any, *rest: Any) -> Any:
        if value.dtype != paddle.bfloat16:
            return send(value, *rest)
        own = value.type()
        value.set_type(half)
        try:
            return send(value, *rest)
        finally:
            value.set_type(own)

    def receive_any(shape: Any, dtype: Any, *rest: Any) -> Any:
        return receive(shape, paddle.float16 if dtype == paddle.bfloat16 else dtype, *rest)

    paddle._C_ops.send_v2, paddle._C_ops.recv_v2 = send_any, receive_any


def make_ring(ring: int, rank: int, size: int, path: Path) -> None:
    """Create this rank's side of a communicator; returns when all its ranks have met at `path`, which must be unique to them.

    The ring's number is not unique: disjoint groups may have the same number.

    Raises:
        device.TestbedError: Another rank did not come, or the communicator could not be created.
    """
    name = _ring_id(ring, rank, path)
    if device.plugin().tb_ring_make(str(ring).encode(), 0, rank, size, ctypes.c_char_p(name)):
        raise device.TestbedError(f"ring {ring}: no communicator of {size} ranks; see the reason above")


def _ring_id(ring: int, rank: int, meeting: Path) -> bytes:
    """The ring's id: the path of the meeting file (threads), or NCCL's unique id from the first rank."""
    if device.variant() == "threads":
        return os.fsencode(meeting).ljust(ID_BYTES, b"\0")
    path = meeting.with_suffix(".id")
    if rank == 0:
        made = ctypes.create_string_buffer(ID_BYTES)
        device.plugin().tb_ccl_new_id(made)
        path.with_suffix(".part").write_bytes(made.raw)
        path.with_suffix(".part").rename(path)
    deadline_s = time.monotonic() + _ID_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise device.TestbedError(f"ring {ring}: its first rank gave no id within {_ID_TIMEOUT_S:g} s")
        time.sleep(0.01)
    return path.read_bytes()


def _patch_engine() -> None:
    import paddle
    from paddle.distributed.auto_parallel.static import engine as engine_module
    from paddle.distributed.auto_parallel.static import process_group

    from testbed.programs import prepare_program

    patch_engine(prepare_program)
    engine_class = engine_module.Engine
    make, initialize = engine_class.__init__, engine_class._initialize

    def make_here(self: Any, *args: Any, **kwargs: Any) -> None:
        paddle.set_device(DEVICE)
        generator = paddle.base.core.default_custom_device_generator(paddle.CustomPlace(device.NAME, 0))
        generator.manual_seed(paddle.base.core.default_cpu_generator().initial_seed())  # paddle.seed has set the CPU generator
        make(self, *args, **kwargs)

    def initialize_here(self: Any, mode: str, *args: Any, **kwargs: Any) -> None:
        if self._nranks == 1:  # Paddle creates no group, but a collective inside a branch stays and needs its ring
            for group in process_group.get_all_process_groups():
                group.instantiate()
        initialize(self, mode, *args, **kwargs)
        _move_parameters(self, mode)

    fed: list[dict[str, Any]] = []

    def feed_device(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Put the batch on the device, as a loader on a GPU does, because jobs after the first read it there.

        The host continues meanwhile, so batches that earlier steps may still read must stay alive.
        """
        if len(fed) == KEPT_FEEDS:
            device.synchronize()
            fed.clear()
        given = prepare_feed(self, *args, **kwargs)
        with device.fresh_memory():
            fed.append({name: _on_device(value) for name, value in given.items()})
        return fed[-1]

    prepare_feed = engine_class._prepare_feed
    engine_class._prepare_feed = feed_device
    engine_class.__init__, engine_class._initialize = make_here, initialize_here


def _patch_amp() -> None:
    """Let mixed precision work as on the GPU place: on a custom place, Paddle warns and builds the program in float32."""
    from paddle.distributed.auto_parallel.static.engine import Engine

    from interlace.cpu import half

    build = Engine._build

    def build_cast(self: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        amp = self._strategy.amp
        with half.auto_cast(amp) if amp.enable else contextlib.nullcontext():
            return build(self, mode, *args, **kwargs)

    Engine._build = build_cast


def _on_device(value: Any) -> Any:
    import numpy as np
    import paddle

    made = paddle.base.core.DenseTensor()
    made.set(np.array(value), paddle.CustomPlace(device.NAME, 0))
    return made


def _move_parameters(engine: Any, mode: str) -> None:
    """Move the parameters that the script created on the CPU to the device."""
    import numpy as np
    import paddle

    scope, there = paddle.static.global_scope(), paddle.CustomPlace(device.NAME, 0)
    for op in engine._pir_dense_main_progs[mode].global_block().ops:
        if op.name() != "builtin.parameter":
            continue
        variable = scope.find_var(op.str_attr("parameter_name"))
        tensor = variable.get_tensor() if variable is not None else None
        if tensor is not None and tensor._is_initialized() and tensor._place().is_cpu_place():
            tensor.set(np.array(tensor), there)
