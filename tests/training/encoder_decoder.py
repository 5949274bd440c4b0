"""An encoder-decoder as T5 is one: the encoder on the first stage, the decoder, which reads its result in every block, on the second.

The stages have unequal work: `--layers` are the blocks of each of the two, a block of the decoder has a second attention, and the
decoder has the head.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import paddle
from paddle import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import common
import gpt

import interlace


class CrossAttention(nn.Layer):
    """Queries from the decoder, keys and values from the encoder."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.stage, self.heads = stage, args.heads
        self.q, self.k, self.v = (common.ColumnLinear(stage, args.hidden, args.hidden, bias=False) for _ in range(3))
        self.out = common.RowLinear(stage, args.hidden, args.hidden, bias=False)

    def forward(self, x: paddle.Tensor, encoded: paddle.Tensor) -> paddle.Tensor:
        q, k, v = (self.stage.split_heads(f(y), self.heads) for f, y in ((self.q, x), (self.k, encoded), (self.v, encoded)))
        weights = nn.functional.softmax(paddle.matmul(q, k, transpose_y=True) * q.shape[3] ** -0.5, axis=-1)
        return self.out(self.stage.merge_heads(paddle.matmul(weights, v)))


class DecoderBlock(nn.Layer):
    """A block of GPT with a cross attention in front of it."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.norm = stage.replicated(nn.LayerNorm(args.hidden))
        self.cross = CrossAttention(args, stage)
        self.block = gpt.Block(args, stage)

    def forward(self, x: paddle.Tensor, encoded: paddle.Tensor) -> paddle.Tensor:
        return self.block(x + self.cross(self.norm(x), encoded))


class EncoderDecoder(nn.Layer):
    """Tokens in, logits of the same tokens out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.stages = common.stages(args)
        first, last = self.stages
        self.source, self.target = gpt.Embedding(args, first), gpt.Embedding(args, last)
        self.encoder = nn.LayerList([gpt.Block(args, first) for _ in range(args.layers)])
        self.decoder = nn.LayerList([DecoderBlock(args, last) for _ in range(args.layers)])
        self.norm = last.replicated(nn.LayerNorm(args.hidden))
        self.head = common.ColumnLinear(last, args.hidden, args.vocab, bias=False)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        last = self.stages[-1]
        x = self.source(tokens)
        for block in self.encoder:
            x = block(x)
        encoded, y = last.between_blocks(x), self.target(last.over_dp(tokens, 0))
        for block in self.decoder:
            y = block(y, encoded)
        return self.head(self.norm(y))


def build(args: argparse.Namespace) -> tuple:
    """(DistModel, loader); nothing has run yet."""
    with common.construction(args):
        model = EncoderDecoder(args)
    strategy = common.make_strategy(args)
    interlace.enable(strategy)
    return common.to_static(args, model, strategy)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from `argv` or the command line."""
    return gpt.parse(argv)


if __name__ == "__main__":
    common.main(parse(), build)
