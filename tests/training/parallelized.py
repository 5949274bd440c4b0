"""A model of plain layers that `dist.parallelize` places: `parallelized.py [PP [MP]]`, two stages of two ranks without arguments.

The layers know nothing of meshes: Paddle's hooks shard the parameters, move the activation on at the end of a stage, and place inputs.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional

PP, MP = (int(word) for word in (*sys.argv[1:], "2", "2")[:2])
HIDDEN, LAYERS, ROWS, MICRO_BATCHES, STEPS = 16, 2, 8, 4, 2


class Block(nn.Layer):
    """Norm, two linear layers, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Layer):
    """Blocks, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LayerList([Block() for _ in range(LAYERS)]), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Rows(paddle.io.Dataset):
    """Seeded noise."""

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        row = np.random.default_rng(place).standard_normal(HIDDEN).astype("float32")
        return row, np.tanh(row)


def main() -> None:
    mesh = dist.ProcessMesh(np.arange(PP * MP).reshape(PP, MP), dim_names=["pp", "mp"])
    dist.auto_parallel.set_mesh(mesh)
    paddle.seed(7)
    net = Net()
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=net.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0))
    config: dict[str, Any] = {
        "pp_config": {"split_spec": "layers"},
        "mp_config": {"parallelize_plan": {"layers.*.up": dist.ColWiseParallel(), "layers.*.down": dist.RowWiseParallel()}},
    }
    net, optimizer = dist.parallelize(net, optimizer, mesh=mesh, config=config)
    ends = [mesh.get_mesh_with_dim("pp", stage) for stage in (0, PP - 1)]
    loader = dist.shard_dataloader(paddle.io.DataLoader(Rows(), batch_size=ROWS), meshes=ends)
    strategy = dist.Strategy()
    pipeline = strategy.pipeline
    pipeline.enable, pipeline.schedule_mode, pipeline.pp_degree = True, "1F1B", PP
    pipeline.accumulate_steps, pipeline.micro_batch_size = MICRO_BATCHES, ROWS // MICRO_BATCHES
    model = dist.to_static(net, loader, functional.mse_loss, optimizer, strategy)
    model.train()
    for batch in loader():
        model(*batch)


main()
