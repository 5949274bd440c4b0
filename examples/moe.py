"""A mixture of experts, trained under `dist.to_static`: Llama's attention, and top-2 gated experts in place of some MLPs.

interlace run examples/moe.py --world 4 -- --dp 2 --pp 2 --experts 4 --micro-batches 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import common
import llama
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional as F

import interlace

PRESETS = {
    "8x7b": {**llama.PRESETS["llama3-8b"], "vocab": 32000, "seq_len": 4096, "rope_base": 1e6, "experts": 8, "dense_every": 0},
}


class Gate(nn.Layer):
    """Which two experts each token goes to, with which weights, and at which place in an expert's buffer.

    Every sequence has `capacity` places at each expert; tokens that come later are dropped: the residual connection alone carries them.
    All of it is local to a sequence, so ranks of dp do not communicate here.
    """

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.experts = args.experts
        self.capacity = max(1, int(args.capacity_factor * 2 * args.seq_len / args.experts))
        self.weight = self.create_parameter([args.hidden, args.experts])
        stage.replicated(self)

    def forward(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """[batch, sequence, hidden] -> combine and dispatch weights [batch, sequence, experts, capacity], balance loss [batch]."""
        with paddle.amp.auto_cast(False):
            shares = F.softmax(paddle.matmul(x.astype("float32"), self.weight.astype("float32")), axis=-1)
            first = self._chosen(shares)
            second = self._chosen(shares * (1 - first))
            taken = first.sum(axis=1, keepdim=True)
            to_first = self._at(first, paddle.cumsum(first, axis=1) - first)
            to_second = self._at(second, paddle.cumsum(second, axis=1) - second + taken)
            share_of_first, share_of_second = ((shares * chosen).sum(axis=-1, keepdim=True).unsqueeze(-1) for chosen in (first, second))
            dispatch = to_first + to_second
            combine = (to_first * share_of_first + to_second * share_of_second) / (share_of_first + share_of_second)
            balance = (shares.mean(axis=1) * first.mean(axis=1)).sum(axis=-1) * self.experts
        return combine.astype(x.dtype), dispatch.astype(x.dtype), balance

    def _chosen(self, shares: paddle.Tensor) -> paddle.Tensor:
        """1 at each token's largest share, 0 elsewhere."""
        return F.one_hot(paddle.argmax(shares, axis=-1), self.experts)

    def _at(self, chosen: paddle.Tensor, place: paddle.Tensor) -> paddle.Tensor:
        """What a token gives each place of each expert: its `chosen` at its `place`, nothing where the buffer is full."""
        places = paddle.arange(self.capacity, dtype="float32")
        return chosen.unsqueeze(-1) * (place.unsqueeze(-1) == places).astype("float32")


class Experts(nn.Layer):
    """SwiGLU with weights of its own for each expert: experts over dp, their width over mp."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.stage = stage
        for name, shape, dim in (
            ("gate", [args.hidden, args.intermediate], 2),
            ("up", [args.hidden, args.intermediate], 2),
            ("down", [args.intermediate, args.hidden], 1),
        ):
            weight = self.create_parameter([args.experts, *shape], default_initializer=nn.initializer.Normal(0.0, shape[0] ** -0.5))
            setattr(self, name, stage.expert_parameter(weight, dist.Shard(dim)))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[experts, rows, hidden] -> the same, with partial sums over mp."""
        return paddle.bmm(F.silu(paddle.bmm(x, self.gate)) * paddle.bmm(x, self.up), self.down)


class MoE(nn.Layer):
    """Tokens to their experts and back: `all_to_all` over dp before and after the experts. A shared expert has every token."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.stage = stage
        self.gate, self.experts = Gate(args, stage), Experts(args, stage)
        self.shared = llama.MLP(args, stage) if args.shared_expert else None

    def forward(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        tokens = self.stage.batch_first(self.stage.whole(x))
        combine, dispatch, balance = self.gate(tokens)
        batch, length, num_experts, capacity = dispatch.shape
        hidden = tokens.shape[-1]
        sent = paddle.matmul(dispatch.reshape([batch, length, num_experts * capacity]), tokens, transpose_x=True)
        sent = sent.reshape([batch, num_experts, capacity, hidden]).transpose([1, 0, 2, 3])
        there = self.stage.over_dp(sent, 0).reshape([num_experts, batch * capacity, hidden])
        done = self.stage.summed(self.experts(there)).reshape([num_experts, batch, capacity, hidden])
        back = self.stage.over_dp(done, 1).transpose([1, 0, 2, 3]).reshape([batch, num_experts * capacity, hidden])
        y = paddle.matmul(combine.reshape([batch, length, num_experts * capacity]), back)
        y = self.stage.between_blocks(self.stage.batch_first(y))
        return (y if self.shared is None else y + self.shared(x)), balance


class Block(llama.Block):
    """Llama's, with experts or an MLP; the balance losses are summed on the way."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage, dense: bool) -> None:
        super().__init__(args, stage, llama.MLP(args, stage) if dense else MoE(args, stage))
        self.dense = dense

    def forward(self, x: paddle.Tensor, balance: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        x = self.attend(x)
        y = common.maybe_recompute(self.recompute == "mlp", self.mlp, self.mlp_norm(x))
        if self.dense:
            return x + y, balance
        return x + y[0], balance + y[1]


class Model(llama.Llama):
    """Tokens in, logits and the balance loss of each sequence out."""

    def make_block(self, layer: int, stage: common.Stage) -> nn.Layer:
        every = self.args.dense_every
        return Block(self.args, stage, dense=bool(every) and layer % every == 0)

    def forward(self, tokens: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        x, stage = self.embed(tokens), self.stages[0]
        balance = (tokens[:, 0] * 0).astype("float32")
        for block in self.blocks:
            if block.stage is not stage:
                stage = block.stage
                x, balance = stage.between_blocks(x), stage.per_sequence(balance)
            x, balance = common.maybe_recompute(self.args.recompute == "full", block, x, balance)
        return self.logits(x), balance


class Loss(common.NextTokenLoss):
    """The mean cross entropy, and the mean balance loss times its weight."""

    def __init__(self, stage: common.Stage, weight: float) -> None:
        super().__init__(stage)
        self.weight = weight

    def forward(self, logits: paddle.Tensor, balance: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        return super().forward(logits, labels) + self.stage.over_replicas(balance.mean()) * self.weight


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from `argv` or the command line."""
    parser = common.parser("Train a mixture of experts.", PRESETS)
    llama.add_options(parser)
    group = parser.add_argument_group("experts")
    group.add_argument("--experts", type=int, default=4, help="of each layer, over dp")
    group.add_argument("--capacity-factor", type=float, default=1.25, help="places at an expert, against an even share")
    group.add_argument("--dense-every", type=int, default=2, help="each so-many-th layer, from the first on, has an MLP; 0: none")
    group.add_argument("--shared-expert", action="store_true", help="an MLP for every token beside the experts")
    group.add_argument("--balance-weight", type=float, default=0.01, help="of the balance loss")
    group.add_argument("--flat-mesh", action="store_true", help="stages are meshes of dp alone, without mp")
    args = common.parse(parser, PRESETS, argv)
    llama.check_options(parser, args)
    if args.experts % args.dp:
        parser.error(f"--experts {args.experts} must be a multiple of dp = {args.dp}")
    if args.flat_mesh and args.mp > 1:
        parser.error("--flat-mesh goes with --mp 1")
    return args


def build(args: argparse.Namespace) -> tuple:
    """(DistModel, loader); nothing has run yet."""
    with common.construction(args):
        model = Model(args)
    strategy = common.make_strategy(args)
    interlace.enable(strategy)
    return common.to_static(args, model, strategy, Loss(model.stages[-1], args.balance_weight))


if __name__ == "__main__":
    common.main(parse(), build)
