"""Internals of Paddle that the bridge uses and that Paddle does not promise to keep: each by name, with the features that depend on it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from interlace.grouping import grouped
from interlace.report.checks import CAPTURE, DUMPS, EVERYTHING, OFFLOAD, OVERLAP, RANKS, RETURN, SUMS, THROTTLE, TUNE, Check, Feature

GROUP = "internals of Paddle"


@dataclass(frozen=True, slots=True)
class Internals:
    """Names of one kind, each an attribute of `owner`, a module or a class; `name/3` must take 3 parameters."""

    what: str
    owner: str
    names: str
    rests: tuple[Feature, ...] = (EVERYTHING,)


STATIC = "paddle.distributed.auto_parallel.static"
ENGINE = f"{STATIC}.engine"
OPERATION = "paddle.base.libpaddle.pir.Operation"
KNOWN = (
    Internals("the hook in the engine", ENGINE, "pipeline_pass/3"),
    Internals("the hook in the engine", f"{ENGINE}.Engine", "_parallel_pir/2 run to_mode _build _initialize"),
    Internals("the hook in the engine", f"{STATIC}.pir_pass", "get_pp_stage_by_pp_degree"),
    Internals("fused passes", f"{STATIC}.pir_pass", "eliminate_transpose_by_reshape"),
    Internals("groups", f"{STATIC}.process_group", "get_all_process_groups"),
    Internals("the mesh", f"{STATIC}.dist_context", "get_default_distributed_context"),
    Internals("user passes of Paddle", "paddle.distributed.passes.pass_base", "PassBase"),
    Internals("several plans in a run", "paddle.base.executor", "_ExecutorCache", (TUNE,)),
    Internals("several plans in a run", "paddle.base.executor._ExecutorCache", "_get_pir_program_and_executor/2", (TUNE,)),
    Internals("a copy of what a step writes", "paddle.base.core", "DenseTensor size_of_dtype default_cpu_generator", (TUNE,)),
    Internals("a copy of what a step writes", "paddle.base.core.DenseTensor", "_copy_from _is_initialized _numel _dtype _place", (TUNE,)),
    Internals("captured steps", "paddle.base.executor._StandaloneExecutor", "run", (CAPTURE,)),
    Internals(
        "captured steps", "paddle.base.core.DenseTensor", "_copy_from _is_initialized _place _ptr _share_data_with shape", (CAPTURE,)
    ),
    Internals("checkpoints of optimizer state", "paddle.pir.Program", "state_dict", (OFFLOAD,)),
    Internals("agreement of ranks", "paddle.base.core", "create_or_get_global_tcp_store"),
    Internals("the place", "paddle.base.framework", "_current_expected_place_ get_flags"),
    Internals("jobs", "paddle.base.core", "Job Plan Place Scope StandaloneExecutor CPUPlace DataType"),
    Internals("jobs", "paddle.base.core.Job", "set_micro_batch_id set_skip_gc_vars micro_batch_id type"),
    Internals("jobs", "paddle.base.core.Plan", "job_list job_types ir_program"),
    Internals("reading programs", "paddle.base.libpaddle.pir", "get_attrs_map_json get_op_inplace_info get_used_external_value"),
    Internals("reading programs", "paddle.pir", "Value is_fake_value"),
    Internals(
        "reading programs",
        OPERATION,
        "attrs blocks has_attr id int_attr is_no_need_buffer name num_regions num_results operand_source operands_source result results "
        "str_attr",
    ),
    Internals("building programs", "paddle.base.libpaddle.pir", "CloneOptions IrMapping PassManager fake_value"),
    Internals("building programs", "paddle.pir", "set_insertion_point set_insertion_point_after set_insertion_point_to_block_end"),
    Internals("building programs", "paddle.base.libpaddle.pir.Block", "add_kwarg kwargs ops"),
    Internals("building programs", OPERATION, "clone erase operand set_bool_attr set_int_attr set_str_attr"),
    Internals(
        "building programs",
        "paddle._C_ops",
        "all_to_all assign bmm_grad cast data full full_int_array matmul matmul_grad reshape set_persistable_value slice "
        "split_with_num stack transpose",
    ),
    Internals("streams", OPERATION, "set_execution_stream set_scheduling_priority", (OVERLAP, OFFLOAD)),
    Internals("events between jobs", OPERATION, "set_str_array_attr"),
    Internals("copies to and from the host", "paddle._C_ops", "memcpy memcpy_d2h memcpy_h2d", (OFFLOAD,)),
    Internals("last readers", "paddle._C_ops", "share_data", (OVERLAP, RETURN)),
    Internals("sums in place", "paddle._C_ops", "all_reduce_", (SUMS,)),
    Internals("the host's waits", "paddle._C_ops", "sync_calc_stream_", (THROTTLE,)),
    Internals("communication of CPU ranks", "paddle.static.python_op", "register_op", (RANKS,)),
    Internals("communication of CPU ranks", "paddle.static", "MetaTensor", (RANKS,)),
    Internals("communication of CPU ranks", "paddle._C_ops", "assign_out_ scale", (RANKS,)),
    Internals("communication of CPU ranks", "paddle._legacy_C_ops", "barrier", (RANKS,)),
    Internals("groups of CPU ranks", "paddle.distributed.collective", "_new_process_group_impl", (RANKS, DUMPS)),
    Internals("groups of CPU ranks", "paddle.distributed.parallel", "_new_process_group_impl", (RANKS, DUMPS)),
    Internals("groups of CPU ranks", "paddle.distributed.communication.group._GroupManager", "group_map_by_id", (RANKS, DUMPS)),
    Internals("groups of CPU ranks", f"{STATIC}.process_group", "ProcessGroup get_process_group new_process_group", (RANKS, DUMPS)),
    Internals("groups of CPU ranks", f"{STATIC}.process_group.ProcessGroup", "instantiate", (RANKS, DUMPS)),
    Internals("dynamic graph of CPU ranks", "paddle.base.core", "eager reshard", (RANKS, DUMPS)),
    Internals("engine of CPU ranks", ENGINE, "remove_unuseful_comm_op_pass", (RANKS,)),
    Internals("engine of CPU ranks", "paddle.base.executor", "_StandaloneExecutor", (RANKS,)),
    Internals(
        "fused buffers of CPU ranks",
        "paddle.distributed.fleet.utils.tensor_fusion_helper",
        "__current_device_type__ alignment",
        (RANKS, DUMPS),
    ),
    Internals("half precision of CPU ranks", "paddle.sysconfig", "get_include get_lib", (RANKS, DUMPS)),
    Internals("half precision of CPU ranks", "paddle.version", "commit", (RANKS, DUMPS)),
    Internals("runs that only train", "paddle.distributed.auto_parallel.api.DistModel", "__call__", (RANKS,)),
    Internals("dumps", "paddle.distributed.auto_parallel.api", "ShardingStage3 get_placement_with_sharding", (DUMPS,)),
    Internals("dumps", "paddle.distributed.auto_parallel.api.ShardingStage3", "_shard_parameter", (DUMPS,)),
    Internals("dumps", "paddle.nn.initializer.lazy_init", "lazy_init_helper", (DUMPS,)),
    Internals("dumps", "paddle.jit.dy2static.convert_call_func", "is_unsupported/1", (DUMPS,)),
    Internals("dumps", "paddle.jit.dy2static.program_translator.FunctionCache", "convert_with_cache/2", (DUMPS,)),
    Internals("dumps", f"{STATIC}.dist_context.DistributedContext", "add_process_mesh/2", (DUMPS,)),
    Internals("dumps", "paddle.optimizer.optimizer.Optimizer", "_create_master_weight/2", (DUMPS,)),
    Internals("dumps of all stages", ENGINE, "apply_partition_pass", (DUMPS,)),
    Internals("dumps of all stages", "paddle.distributed.parallel", "_global_parallel_env", (DUMPS,)),
)


def check_internals() -> list[Check]:
    """A check for each purpose; it lists the names that are missing, if any."""
    by_purpose = grouped(((each.what, each.rests), each) for each in KNOWN)
    return [_check(what, rests, parts) for (what, rests), parts in by_purpose.items()]


def _check(what: str, rests: tuple[Feature, ...], parts: Sequence[Internals]) -> Check:
    missing, count = [name for each in parts for name in _missing(each)], sum(len(each.names.split()) for each in parts)
    expected, found = f"{count} name{'s' * (count > 1)} of Paddle", "; ".join(missing) or "all there"
    return Check(what, expected, found, "fails" if missing else "holds", rests, GROUP)


def missing_for(*features: Feature) -> str:
    """The missing internals that some features need, as text; empty if there are none."""
    return "; ".join(each.found for each in check_internals() if each.verdict == "fails" and set(each.rests) & set(features))


def _missing(each: Internals) -> list[str]:
    """Names that are missing, or take another number of parameters."""
    try:
        owner = resolve(each.owner)
    except (ImportError, AttributeError) as error:
        return [f"{each.owner}: {error}"]
    missing = []
    for name in each.names.split():
        plain, _, asked = name.partition("/")
        if not hasattr(owner, plain):
            missing.append(f"no {each.owner}.{plain}")
            continue
        if asked and len(given := inspect.signature(getattr(owner, plain)).parameters) != int(asked):
            missing.append(f"{each.owner}.{plain} takes ({', '.join(given)}), expected {asked} parameters")
    return missing


def resolve(path: str) -> Any:
    """The object of a dotted name, found through modules and then their attributes. Raises ImportError or AttributeError if there is
    none."""
    words = path.split(".")
    for end in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:end]))
        except ModuleNotFoundError:
            continue
        for word in words[end:]:
            found = getattr(found, word)
        return found
    raise ImportError(f"no module {words[0]}")
