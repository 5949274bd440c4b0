"""Schedules of Paddle's own that receive in another order than they send: refused with cause and remedy."""

from __future__ import annotations

import msgspec
import pytest

from interlace.errors import PlanError
from interlace.ir import Pipeline, Program, parse, verify
from interlace.ir.schedule import interleaved
from interlace.passes.insert_events import events_of
from interlace.scheduler.hazards import check, require_straight


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 3)])
def test_vpp_needs_whole_rounds_on_two_stages(stages: int, chunks: int) -> None:
    for count in range(1, 13):
        pipeline = Pipeline(num_stages=stages, num_micro_batches=count, num_chunks=chunks, schedule="VPP")
        if stages == 2 and count > 2 and count % 2:
            with pytest.raises(PlanError, match=rf"set it to {count - 1} or {count + 1}, or use schedule_mode 1F1B"):
                require_straight(pipeline)
        else:
            require_straight(pipeline)
    require_straight(Pipeline(num_stages=stages, num_micro_batches=5, schedule="1F1B"))


def vpp_world(stages: int, chunks: int, count: int, table: str) -> list[Program]:
    """Stages under Paddle's own VPP order, whose first one gives the others a table of 4 bytes, `straight` or `beside` the activation, or
    gives it to the last one's last chunk, which hands a gradient back (`shared`, an embedding that is also the head)."""
    return [_vpp_rank(stage, stages, chunks, count, table) for stage in range(stages)]


def _vpp_rank(stage: int, stages: int, chunks: int, count: int, table: str) -> Program:
    lines = [f"group {10 * a + b} = {a},{b}" for a in range(stages) for b in range(stages) if a != b and stage in (a, b)]
    lines.append('#0 %0:float32[8]"x" = pd_op.data() forward\n#1 %1:float32[1]"mask" = pd_op.data() forward')
    slots: dict[tuple[str, int], list[int]] = {}

    def talk(slot: str, chunk: int, role: str, other: int, sends: bool, value: int = 0) -> None:
        number = len(lines) * 2
        slots.setdefault((slot, chunk), []).append(number)
        ring, result = (10 * stage + other, "") if sends else (10 * other + stage, f"%{number}:float32[{(8, 1)[value]}] = ")
        name, peer = (f"pd_op.send_v2(%{value})", 1) if sends else ("pd_op.recv_v2()", 0)
        stream = f"{'send' if sends else 'receive'}_{ring}"
        lines.append(f'#{number} {result}{name} {role} chunk={chunk} group={ring} stream="{stream}" {{"peer":{peer}}}')

    last = stages * chunks - 1
    for chunk in range(chunks):
        part = chunk * stages + stage
        if part:
            talk("R", chunk, "forward", (stage - 1) % stages, False)
            talk("S", chunk, "backward", (stage - 1) % stages, True)
        if part < last:
            talk("F", chunk, "forward", (stage + 1) % stages, True)
            talk("B", chunk, "backward", (stage + 1) % stages, False)
    if stage and table != "shared":
        talk("R", 0, "forward", 0 if table == "straight" else stage - 1, False, 1)
    if stage == 0 and table == "shared":
        talk("F", 0, "forward", stages - 1, True, 1)
        talk("B", 0, "backward", stages - 1, False, 1)
    if stage == stages - 1 and table == "shared":
        talk("F", chunks - 1, "forward", 0, False, 1)
        talk("B", chunks - 1, "backward", 0, True, 1)
    for other in range(stage + 1, stages) if table != "shared" else ():
        if stage == 0 if table == "straight" else other == stage + 1:
            talk("F", 0, "forward", other, True, 1)
    order = [part for slot in interleaved(stage, stages, count, chunks) for part in slot.parts if (part.kind, part.chunk) in slots]
    for k, part in enumerate(order):
        items = " ".join(f"{op}@{part.micro_batch}" for op in slots[part.kind, part.chunk])
        lines.append(f"job j{k} {part.kind} {part.micro_batch}: {items}")
    step = f"pipeline stage={stage} of {stages} micro_batches={count} chunks={chunks} schedule=VPP"
    made = parse("\n".join([f"program rank={stage} world={stages} mode=train", step, *lines]))
    verify(made)
    return msgspec.structs.replace(made, events=events_of(made))


@pytest.mark.parametrize("stages", [3, 4])
def test_a_table_that_goes_straight_to_the_last_stage_meets_a_gradient_on_its_ring(stages: int) -> None:
    """Paddle's own VPP order, all ranks given: the last stage takes the gradient of what it hands back ahead of tables sent before."""
    (finding,) = check(vpp_world(stages, 2, 2 * stages, "straight"))
    assert finding.kind == "p2p-mismatch"
    assert finding.message.startswith(f"group {stages - 1} of ranks [0, {stages - 1}], 0 to {stages - 1}: message ")
    assert "(p2p 4 B float32, forward call " in finding.message
    assert "(p2p 32 B float32, backward call 0 of micro-batch 0)" in finding.message
    assert "A value goes straight from the first stage to the last" in finding.remedy


def test_a_table_that_each_stage_hands_on_crosses_nothing() -> None:
    for stages, table in ((3, "beside"), (4, "beside"), (2, "straight")):
        assert check(vpp_world(stages, 2, 2 * stages, table)) == []


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_shared_embedding_crosses_nothing_from_three_stages_on_with_as_many_micro_batches(stages: int) -> None:
    """As trained: `tests/training/cases.py`."""
    assert bool(check(vpp_world(stages, 2, stages, "shared"))) == (stages == 2)
    found = check(vpp_world(stages, 2, 2 * stages, "shared"))
    assert {finding.kind for finding in found} == {"p2p-mismatch"}
    assert "an embedding that is also the head" in found[0].remedy


BUFFER = """program rank=0 world=1 mode=train
#0 %0:float32[2]!"buffer" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2]~0! = pd_op.add_(%0, %1) forward inplace=0:0
#3 %3:float32[2] = pd_op.multiply_grad(%0, %1) backward
"""
JOBS = {"F": "job F{m} forward {m}: 1@{m} 2@{m}", "B": "job B{m} backward {m}: 3@{m}"}


@pytest.mark.parametrize(
    ("order", "kinds"), [("F0 F1 B0 F2 B1 B2", []), ("F0 B0 F1 B1 F2 B2", ["wrong-version"]), ("F0 F1 F2 B0 B1 B2", ["wrong-version"])]
)
def test_a_buffer_that_backward_reads_is_found_as_in_paddles_own_order(order: str, kinds: list[str]) -> None:
    """Stage 0 of 2 under 1F1B runs one more forward ahead of each backward, and backward finds what that one left."""
    jobs = [JOBS[word[0]].format(m=word[1]) for word in order.split()]
    program = parse(BUFFER + "\n".join(jobs))
    pipeline = Pipeline(num_stages=2, num_micro_batches=3, schedule="1F1B")
    found = check([msgspec.structs.replace(program, pipeline=pipeline)])
    assert sorted({finding.kind for finding in found}) == kinds
