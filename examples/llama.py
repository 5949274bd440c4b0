"""Llama, trained under `dist.to_static`: rotary positions, grouped-query attention, RMSNorm, SwiGLU, no biases.

interlace run examples/llama.py --world 4 -- --pp 2 --mp 2 --micro-batches 8 --sequence-parallel
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import common
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.incubate.nn import functional as fused
from paddle.nn import functional as F

import interlace

_SIZES = ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "seq_len", "rope_base")
PRESETS = {
    "llama-7b": dict(zip(_SIZES, (32, 4096, 32, 32, 11008, 32000, 4096, 1e4), strict=True)),
    "llama-13b": dict(zip(_SIZES, (40, 5120, 40, 40, 13824, 32000, 4096, 1e4), strict=True)),
    "llama2-70b": dict(zip(_SIZES, (80, 8192, 64, 8, 28672, 32000, 4096, 1e4), strict=True)),
    "llama3-8b": dict(zip(_SIZES, (32, 4096, 32, 8, 14336, 128256, 8192, 5e5), strict=True)),
}


class RMSNorm(nn.Layer):
    """x / root mean square(x), computed in float32, times a weight."""

    EPSILON = 1e-6

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.fused = args.fused
        self.weight = self.create_parameter([args.hidden], default_initializer=nn.initializer.Constant(1.0))
        stage.replicated(self)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        with paddle.amp.auto_cast(False):
            if self.fused:
                return fused.fast_rms_norm(x.astype(self.weight.dtype), self.weight, self.EPSILON)[0]
            y = x.astype("float32")
            y = y * paddle.rsqrt(y.square().mean(-1, keepdim=True) + self.EPSILON)
            return y.astype(self.weight.dtype) * self.weight


def rotary_tables(length: int, size: int, base: float) -> tuple[paddle.Tensor, paddle.Tensor]:
    """cos and sin of every position's angles: [length, size] each, the two halves of `size` alike."""
    with paddle.amp.auto_cast(False):
        frequencies = base ** (paddle.arange(0, size, 2, dtype="float32") * (-1.0 / size))
        angles = paddle.arange(length, dtype="float32").unsqueeze(1) * frequencies
        angles = paddle.concat([angles, angles], axis=-1)
        return paddle.cos(angles), paddle.sin(angles)


def rotate(x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor) -> paddle.Tensor:
    """Turn each pair (i, i + size / 2) of the last dimension by its position's angle."""
    low, high = x.chunk(2, axis=-1)
    return x * cos.astype(x.dtype) + paddle.concat([-high, low], axis=-1) * sin.astype(x.dtype)


def repeat_heads(x: paddle.Tensor, times: int) -> paddle.Tensor:
    """Each head `times` over. (`repeat_interleave`, `expand` and the gradient of `tile` would first gather all of `x` on every rank.)"""
    if times == 1:
        return x
    return paddle.concat([x.unsqueeze(2)] * times, axis=2).flatten(1, 2)


class Attention(nn.Layer):
    """Causal self-attention in which `heads / kv_heads` query heads share a key and value head."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.stage, self.kind, self.fused = stage, args.attention, args.fused
        self.heads, self.kv_heads = args.heads, args.kv_heads
        size = args.hidden // args.heads
        self.q = common.ColumnLinear(stage, args.hidden, args.heads * size, bias=False)
        self.k = common.ColumnLinear(stage, args.hidden, args.kv_heads * size, bias=False)
        self.v = common.ColumnLinear(stage, args.hidden, args.kv_heads * size, bias=False)
        self.out = common.RowLinear(stage, args.heads * size, args.hidden, bias=False)
        self.size, self.rope_base = size, args.rope_base

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.stage.whole(x)
        if self.fused:
            return self.out(self.stage.merge_heads(self._fused(x), heads_first=False))
        q = self.stage.split_heads(self.q(x), self.heads)
        k = self.stage.split_heads(self.k(x), self.kv_heads)
        v = self.stage.split_heads(self.v(x), self.kv_heads)
        cos, sin = rotary_tables(q.shape[2], self.size, self.rope_base)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (repeat_heads(t, self.heads // self.kv_heads) for t in (k, v))
        return self.out(self.stage.merge_heads(common.causal_attention(q, k, v, self.kind)))

    def _fused(self, x: paddle.Tensor) -> paddle.Tensor:
        """The heads dimension stays after the sequence, as the fused operators expect."""
        q = self.stage.split_heads(self.q(x), self.heads, heads_first=False)
        k = self.stage.split_heads(self.k(x), self.kv_heads, heads_first=False)
        v = self.stage.split_heads(self.v(x), self.kv_heads, heads_first=False)
        cos, sin = (t.astype(q.dtype).reshape([1, -1, 1, self.size]) for t in rotary_tables(q.shape[1], self.size, self.rope_base))
        q, k, _ = fused.fused_rotary_position_embedding(q, k, sin=sin, cos=cos, use_neox_rotary_style=False)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Layer):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.stage, self.fused = stage, args.fused
        self.gate = common.ColumnLinear(stage, args.hidden, args.intermediate, bias=False)
        self.up = common.ColumnLinear(stage, args.hidden, args.intermediate, bias=False)
        self.down = common.RowLinear(stage, args.intermediate, args.hidden, bias=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.stage.whole(x)
        gate, up = self.gate(x), self.up(x)
        return self.down(F.swiglu(gate, up) if self.fused else F.silu(gate) * up)


class Block(nn.Layer):
    """x + attention(norm(x)), then the same with the MLP, or with what is given in its place."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage, mlp: nn.Layer | None = None) -> None:
        super().__init__()
        self.stage, self.recompute = stage, args.recompute
        self.attention_norm = RMSNorm(args, stage)
        self.attention = Attention(args, stage)
        self.mlp_norm = RMSNorm(args, stage)
        self.mlp = mlp or MLP(args, stage)

    def attend(self, x: paddle.Tensor) -> paddle.Tensor:
        """The block's first half."""
        return x + common.maybe_recompute(self.recompute == "attention", self.attention, self.attention_norm(x))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.attend(x)
        return x + common.maybe_recompute(self.recompute == "mlp", self.mlp, self.mlp_norm(x))


class Llama(nn.Layer):
    """Tokens in, logits out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.stages = args, common.stages(args)
        first, last = self.stages[0], self.stages[-1]
        self.embedding = nn.Embedding(args.vocab, args.hidden)
        self.embedding.weight = first.parameter(self.embedding.weight, dist.Shard(1))
        self.blocks = nn.LayerList([self.make_block(i, self.stages[common.stage_of_layer(args, i)]) for i in range(args.layers)])
        self.norm = RMSNorm(args, last)
        self.head = common.ColumnLinear(last, args.hidden, args.vocab, bias=False)

    def make_block(self, layer: int, stage: common.Stage) -> nn.Layer:
        """The block of one layer."""
        return Block(self.args, stage)

    def embed(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """What the first block reads."""
        first = self.stages[0]
        x = self.embedding(tokens).astype(self.embedding.weight.dtype)  # `--amp` makes it float32, and with it all between blocks
        return first.between_blocks(first.batch_first(x))

    def logits(self, x: paddle.Tensor) -> paddle.Tensor:
        """From what the last block gives."""
        last = self.stages[-1]
        return self.head(last.batch_first(last.whole(self.norm(x))))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.logits(common.run_blocks(self.args, self.blocks, self.embed(tokens)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from `argv` or the command line."""
    parser = common.parser("Train a Llama.", PRESETS)
    add_options(parser)
    args = common.parse(parser, PRESETS, argv)
    check_options(parser, args)
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    """What its layers are made from, beside what every example has."""
    parser.add_argument("--kv-heads", type=int, default=0, help="key and value heads; 0 is as many as --heads")
    parser.add_argument("--rope-base", type=float, default=10000.0)
    parser.add_argument("--fused", action="store_true", help="RMSNorm, rotary, SwiGLU as one operator each; not on the CPU")


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in sizes that follow from others; contradictions end the program with code 2."""
    args.kv_heads = args.kv_heads or args.heads
    args.intermediate = args.intermediate or 8 * args.hidden // 3 // 16 * 16
    if args.heads % args.kv_heads or args.kv_heads % args.mp:
        parser.error(f"--kv-heads {args.kv_heads} must divide --heads and be a multiple of mp = {args.mp}")
    if args.fused and (args.attention != "flash" or args.kv_heads != args.heads):
        parser.error("--fused goes with --attention flash and as many key and value heads as heads")


def build(args: argparse.Namespace) -> tuple:
    """(DistModel, loader); nothing has run yet."""
    with common.construction(args):
        model = Llama(args)
    strategy = common.make_strategy(args)
    interlace.enable(strategy)
    return common.to_static(args, model, strategy)


if __name__ == "__main__":
    common.main(parse(), build)
