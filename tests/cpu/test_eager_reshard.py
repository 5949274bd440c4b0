"""`dist.reshard` outside of programs, between CPU processes; Paddle's own ends them by SIGSEGV."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.local.launch import launch

pytestmark = pytest.mark.paddle

SCRIPT = """
import paddle, paddle.distributed as dist
R, S, P = dist.Replicate(), dist.Shard, dist.Partial
mesh = lambda ranks, names: dist.ProcessMesh(ranks, dim_names=names)
first, last, both = mesh([0, 1], ["mp"]), mesh([2, 3], ["mp"]), mesh([[0, 1], [2, 3]], ["pp", "mp"])
rank = dist.get_rank()
sources = ((first, [R]), (first, [S(0)]), (first, [S(1)]), (both, [S(0), S(1)]), (both, [R, S(0)]), (both, [S(0), S(0)]))
targets = ((last, [R]), (last, [S(0)]), (first, [R]), (first, [S(1)]), (both, [R, R]), (both, [S(1), S(0)]), (both, [R, S(0)]))
for dtype in ("float32", "bfloat16", "int64"):
    whole = paddle.arange(32, dtype="float32").reshape([4, 8]).astype(dtype)
    for start, lies in sources:
        tensor = dist.shard_tensor(whole, start, lies)
        for end, asked in targets:
            found, wanted = dist.reshard(tensor, end, asked), dist.shard_tensor(whole, end, asked)
            assert (found.process_mesh, found.placements, found.dtype) == (end, asked, whole.dtype)
            assert found._is_initialized() == (rank in end.process_ids)
            if rank in end.process_ids:
                mine, right = (each._local_value().astype("float32").numpy() for each in (found, wanted))
                assert mine.shape == right.shape and (mine == right).all(), (dtype, start, lies, end, asked)
local = paddle.full([4], rank + 1.0)
part = dist.auto_parallel.api.dtensor_from_local(local, first, [P()]) if rank < 2 else dist.shard_tensor(local, first, [P()])
total = dist.reshard(part, last, [S(0)])
assert rank < 2 or total._local_value().numpy().tolist() == [3.0, 3.0]
"""


def test_tensors_go_between_meshes_and_placements(forked: None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert len(launch(script, [], 4, {}, None, tmp_path / "logs", 120.0).reports) == 4
