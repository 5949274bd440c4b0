"""`examples/llama.py` with the loss of a padded corpus: the mean over tokens whose loss is above zero, of all replicas together.

Started as the example is, with its arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import common
import llama
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional


class MaskedLoss(nn.Layer):
    """Mean cross entropy of the tokens that count, gathered over dp before they are chosen."""

    def __init__(self, stage: common.Stage) -> None:
        super().__init__()
        self.mesh = stage.mesh

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        whole = [dist.Replicate(), dist.Replicate()]
        logits = dist.reshard(logits, self.mesh, [dist.Shard(0), dist.Replicate()]).astype("float32")
        losses = functional.cross_entropy(logits, labels.unsqueeze(-1), reduction="none")
        return paddle.masked_select(dist.reshard(losses, self.mesh, whole), dist.reshard(losses > 0, self.mesh, whole)).mean()


common.NextTokenLoss = MaskedLoss
common.main(llama.parse(), llama.build)
