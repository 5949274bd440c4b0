"""The device alone: operations, order between streams, freeing, pinned memory, delays; each switch on and off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operators.table import LACKING

pytestmark = pytest.mark.paddle
Scenes = dict[str, Any]

WRONG = {"nan", "stale"}
"""What an early reader finds: poison, or what was there before, by who comes first."""


def test_operations_and_gradients_equal_the_cpus(scenes: Scenes) -> None:
    found = scenes["ops_against_cpu"]
    assert len(found) == 27
    assert {name: error for name, error in found.items() if error > 1e-5} == {}


def test_wide_rows_equal_the_cpus(scenes: Scenes) -> None:
    assert {name: error for name, error in scenes["wide_rows_against_cpu"].items() if error > 1e-4} == {}


def test_fused_operations_equal_elementary_ones(scenes: Scenes) -> None:
    """Without the operator `rms_norm` Paddle's function of that name needs a GPU build."""
    import paddle

    found = scenes["fused_ops"]
    assert len(found) == 9 - ("rms_norm" in LACKING.get(paddle.__version__, ()))
    assert {name: error for name, error in found.items() if error > 1e-5} == {}


def test_an_operation_without_a_kernel_is_named(scenes: Scenes) -> None:
    name, dtype = scenes["an_op_without_a_kernel"]
    assert name == "TestbedError: job forward: pd_op.erf has no kernel on the testbed, and would run on the CPU; write one in testbed/src"
    assert dtype == "TestbedError: job forward: pd_op.matmul of ['float64'] has no kernel on the testbed; it has ['bfloat16', 'float32']"


def test_events_inside_a_program(scenes: Scenes) -> None:
    found = scenes["events_inside_a_program"]
    assert found["executor's events"] == "right"
    assert found["dropped"] in WRONG


def test_events_between_jobs(scenes: Scenes) -> None:
    found = scenes["events_between_jobs"]
    assert found["with event"] == "right"
    assert found["without"] in WRONG


def test_only_kernels_on_the_device_take_events(scenes: Scenes) -> None:
    """Paddle refuses a plan that waits for an event behind control flow or a kernel of the host, and ignores waits in front of them."""
    records, waits = scenes["where_events_are_recorded"], scenes["where_events_are_waited_for"]
    assert records == {"kernel": "right", "if": "refused", "shape": "refused", "constant of the host": "refused"}
    assert waits.pop("kernel") == "right"
    assert set(waits) == {"if", "while", "constant of the host"}
    assert set(waits.values()) <= WRONG


def test_control_flow_runs_on_the_compute_stream(scenes: Scenes) -> None:
    streams = scenes["streams_of_control_flow"]
    assert streams["exp"] == streams["scale"] == 0 != streams["tanh"]


def test_a_copy_out_of_the_next_step_does_not_wait_for_a_copy_in(scenes: Scenes) -> None:
    """No step's job waits for the last use of a pinned buffer in the step before."""
    overtaken = ["copy_d2h", "copy_d2h", "copy_h2d", "copy_h2d"]
    assert scenes["a_pinned_buffer_in_the_next_step"] == {"one job": overtaken, "two jobs": overtaken}


def test_the_host_waits_at_the_end_of_a_job_or_not(scenes: Scenes) -> None:
    assert scenes["the_end_of_a_job"] == {"waits": [["sync_stream"], True], "goes on": [["sync_stream_left_out"], False]}


def test_what_holds_a_freed_block(scenes: Scenes) -> None:
    assert scenes["freeing"] == {
        "last reader on the side stream, recorded": "right",
        "last reader on the side stream, nobody recorded": "nan",
        "last reader on the side stream, recorded but not held": "nan",
        "last reader on compute (the hole)": "nan",
        "last reader on compute, all readers recorded": "right",
    }


@pytest.mark.parametrize(
    ("scene", "kind"),
    [
        ("the_batch_is_cut_late", "race"),
        ("an_output_comes_late", "race"),
        ("a_base_is_overwritten_under_its_view", "race"),
        ("memory_of_two_variables_is_freed", "freed-in-use"),
    ],
)
def test_a_plan_without_an_event_is_refused_and_wrong(scenes: Scenes, scene: str, kind: str) -> None:
    """What orders the ends of the step, and memory that has two variables: the executor itself says that the checker is right."""
    assert scenes[scene] == {"planned": ["right", []], "no events": ["wrong", [kind]]}


def test_memory_numbers(scenes: Scenes) -> None:
    found = scenes["held_blocks_count"]
    assert found["allocated"] == 0
    assert found["bytes_of_one"] <= found["peak"] <= 3 * found["bytes_of_one"]


def test_pinned_memory_without_events(scenes: Scenes) -> None:
    found = scenes["pinned_memory"]
    assert found.pop("both") == "right"
    assert set(found.values()) <= WRONG


def test_copies_out_block_the_host_or_not(scenes: Scenes) -> None:
    assert scenes["copies_out_block_or_not"] == {"asynchronous": False, "blocking": True}


def test_refused_pinned_memory_is_a_clear_error(scenes: Scenes) -> None:
    assert "49152 bytes of pinned host memory were refused" in scenes["refused_pinned_memory"]


def test_pinned_buffers_are_cut_from_slabs(scenes: Scenes) -> None:
    """Pinned memory, faults of ranks. Buffers in new memory, allocations, KiB in use, KiB reserved. Freed neighbours are joined."""
    slab, each = (scenes["pinned_slabs"][name] for name in ("one slab", "one allocation each"))
    refused = "655360 bytes of pinned host memory were refused"
    assert slab.pop("refused").startswith(f"testbed: {refused}")
    assert each.pop("refused").startswith(f"testbed: {refused}")
    assert slab == {
        "three buffers": [3, 1, 320, 1024],
        "one freed, one of its size made": [3, 1, 320, 1024],
        "two neighbours freed, one of their size made": [3, 1, 320, 1024],
        "refused, and nothing taken": [3, 1, 320, 1024],
        "larger than a slab": [4, 2, 1600, 2304],
        "all freed": [4, 2, 0, 2304],
    }
    assert each == {
        "three buffers": [3, 3, 320, 320],
        "one freed, one of its size made": [3, 3, 320, 320],
        "two neighbours freed, one of their size made": [4, 4, 320, 560],
        "refused, and nothing taken": [4, 4, 320, 560],
        "larger than a slab": [5, 5, 1600, 1840],
        "all freed": [5, 5, 0, 1840],
    }


def test_streams_have_the_priority_that_is_asked_for(scenes: Scenes) -> None:
    """Plain lowering."""
    found = scenes["stream_priorities"]
    assert found.pop("two under one name").startswith(
        "TestbedError: job forward: pd_op.scale asks for priority 0 on stream 'twice', whose first operation asked for -1; "
    )
    assert found == {
        "asked for -1": {"streams": [1, 0], "priorities": [-1]},
        "asked for none": {"streams": [1, 0], "priorities": [0]},
        "asked for -1, ignored": {"streams": [1, 0], "priorities": [0]},
        "the executor's stream": {"new": 0, "priority": [-1]},
    }


def test_one_communicator_a_stream_name(scenes: Scenes) -> None:
    found = scenes["two_rings_one_stream"]
    assert "ring 32 is on stream 'shared', which belongs to ring 31" in found["refused"]
    assert found["as the GPU place"] == [31, 31]


def test_delays_repeat_by_seed(scenes: Scenes) -> None:
    assert scenes["delays_repeat"] == {"same": True, "other": True, "some": True, "right": "right"}


def test_a_missing_event_shrinks_to_the_delay_that_shows_it(scenes: Scenes) -> None:
    assert scenes["a_missing_event_shrinks_to_one_delay"] == ["tanh"]


def test_switches_are_named(scenes: Scenes) -> None:
    found = scenes["switches_are_named"]
    assert found["unknown"].startswith("TestbedError: no switch 'nosink'; there are ['copy_order', ")
