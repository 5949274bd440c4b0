"""What the example models share: options, where tensors lie, data, `dist.to_static`, the training loop.

Nothing here knows Interlace: this is plain `paddle.distributed`, as a user would write it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F

Build = Callable[[argparse.Namespace], tuple]
Presets = dict[str, dict[str, float]]


# Options ------------------------------------------------------------------------------------------------------


def parser(description: str, presets: Presets) -> argparse.ArgumentParser:
    """The options that every example has; `presets` maps a name to default values of some of them."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    _add_model_options(p.add_argument_group("model"), presets)
    _add_parallel_options(p.add_argument_group("parallelism"))
    _add_training_options(p.add_argument_group("training"))
    return p


def _add_model_options(g: argparse._ArgumentGroup, presets: Presets) -> None:
    g.add_argument("--preset", choices=sorted(presets), help="named size; options given beside it win")
    g.add_argument("--layers", type=int, default=4)
    g.add_argument("--hidden", type=int, default=64)
    g.add_argument("--heads", type=int, default=4)
    g.add_argument("--intermediate", type=int, default=0, help="width of the MLP; 0 is the model's usual multiple")
    g.add_argument("--vocab", type=int, default=64)
    g.add_argument("--seq-len", type=int, default=16)
    g.add_argument("--attention", choices=("math", "flash"), default="math", help="flash has GPU kernels only")
    g.add_argument("--lazy", action="store_true", help="allocate nothing: to build only (`interlace dump` does so by itself)")


def _add_parallel_options(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--dp", type=int, default=1, help="data-parallel replicas")
    g.add_argument("--mp", type=int, default=1, help="tensor-parallel ranks")
    g.add_argument("--pp", type=int, default=1, help="pipeline stages")
    g.add_argument("--vpp", type=int, default=1, help="model chunks a stage, for --schedule VPP")
    g.add_argument(
        "--schedule",
        choices=("none", "FThenB", "1F1B", "VPP"),
        help="pipeline schedule; by default 1F1B where pp > 1, VPP where vpp > 1, and none elsewhere",
    )
    g.add_argument("--micro-batches", type=int, help="a step (default: 2 pp where pp > 1); accumulated where no schedule is")
    g.add_argument("--gradient-accumulation", type=int, default=1, help="the same, without a schedule")
    g.add_argument(
        "--sequence-parallel", action=argparse.BooleanOptionalAction, default=False, help="split the sequence over mp between matmuls"
    )
    g.add_argument("--sharding-stage", type=int, choices=(0, 1, 2, 3), default=0, help="of the optimizer, over dp")
    g.add_argument("--sharding-fusion", action="store_true", help="sharding over fused buffers of gradients and parameters")
    g.add_argument("--sharding-overlap", action="store_true", help="its communication on streams of its own; with --sharding-fusion")
    g.add_argument("--recompute", choices=("none", "full", "attention", "mlp"), default="none")


def _add_training_options(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--steps", type=int, default=3)
    g.add_argument("--batch-size", type=int, default=8, help="sequences a step, over all replicas and micro-batches")
    g.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    g.add_argument("--learning-rate", type=float, default=1e-2)
    g.add_argument("--lr-scheduler", choices=("none", "cosine"), default="none", help="cosine has a linear warm-up")
    g.add_argument("--clip-grad", type=float, default=0.0, metavar="NORM", help="global norm; 0 is off")
    g.add_argument("--amp", choices=("off", "O1", "O2"), default="off")
    g.add_argument("--amp-dtype", choices=("bfloat16", "float16"), default="bfloat16")
    g.add_argument("--master-grad", action="store_true", help="gradients in float32, with --amp O2")
    g.add_argument("--dropout", type=float, default=0.0)
    g.add_argument("--seed", type=int, default=2024)


def parse(p: argparse.ArgumentParser, presets: Presets, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse twice, so that a preset changes defaults only; contradictions end the program with code 2."""
    preset = p.parse_args(argv).preset
    p.set_defaults(**presets.get(preset, {}))
    args = p.parse_args(argv)
    if args.schedule is None:
        args.schedule = "VPP" if args.vpp > 1 else "1F1B" if args.pp > 1 else "none"
    if args.schedule == "none" and args.gradient_accumulation == 1:
        args.gradient_accumulation, args.micro_batches = args.micro_batches or 1, 1
    args.micro_batches = args.micro_batches or (2 * args.pp if args.pp > 1 else 1)
    for wrong, message in _contradictions(args):
        if wrong:
            p.error(message)
    return args


def _contradictions(args: argparse.Namespace) -> list[tuple[bool, str]]:
    chunks, num_batches = args.pp * args.vpp, args.micro_batches * args.gradient_accumulation * args.dp
    piped = args.schedule != "none"
    return [
        (args.pp > 1 and not piped, "--pp > 1 needs a --schedule"),
        (args.vpp > 1 and args.schedule != "VPP", "--vpp > 1 needs --schedule VPP"),
        (args.micro_batches > 1 and not piped, "--micro-batches and --gradient-accumulation say the same without a --schedule; give one"),
        (args.gradient_accumulation > 1 and piped, "--gradient-accumulation is for --schedule none"),
        (args.layers % chunks != 0, f"--layers {args.layers} must be a multiple of pp x vpp = {chunks}"),
        (args.heads % args.mp != 0, f"--heads {args.heads} must be a multiple of mp = {args.mp}"),
        (args.batch_size % num_batches != 0, f"--batch-size {args.batch_size} must be a multiple of {num_batches}"),
        (args.sequence_parallel and args.mp == 1, "--sequence-parallel needs --mp > 1"),
        (args.sharding_stage > 0 and args.dp == 1, "--sharding-stage needs --dp > 1"),
        (args.sharding_fusion and args.sharding_stage != 1, "--sharding-fusion needs --sharding-stage 1"),
        (args.sharding_overlap and not args.sharding_fusion, "--sharding-overlap needs --sharding-fusion"),
        (args.master_grad and args.amp != "O2", "--master-grad needs --amp O2"),
    ]


# Where tensors lie --------------------------------------------------------------------------------------------


class Stage:
    """One pipeline stage: its (dp, mp) mesh, and how parameters and activations lie on it.

    Activations are [batch, sequence, hidden]; with sequence parallelism [sequence, batch, hidden], so that the
    dimension that is split over mp comes first and no collective between blocks needs a transpose.
    """

    def __init__(self, mesh: dist.ProcessMesh, sequence_parallel: bool) -> None:
        self.mesh, self.sequence_parallel = mesh, sequence_parallel

    def parameter(self, tensor: paddle.Tensor, over_mp: dist.Placement | None = None) -> paddle.Tensor:
        """`tensor` on this stage, the same on every dp rank."""
        return dist.shard_tensor(tensor, self.mesh, self._placements(dist.Replicate(), over_mp or dist.Replicate()))

    def expert_parameter(self, tensor: paddle.Tensor, over_mp: dist.Placement) -> paddle.Tensor:
        """`tensor` of [experts, ...] on this stage, experts split over dp."""
        return dist.shard_tensor(tensor, self.mesh, self._placements(dist.Shard(0), over_mp))

    def replicated(self, layer: nn.Layer) -> nn.Layer:
        """`layer` with every parameter whole on every rank of this stage."""
        for name, tensor in list(layer.named_parameters(include_sublayers=False)):
            setattr(layer, name, self.parameter(tensor))
        return layer

    def whole(self, x: paddle.Tensor) -> paddle.Tensor:
        """`x` with the full sequence on every mp rank: what a column-parallel linear reads."""
        return self._place(x, dist.Replicate()) if self.sequence_parallel else x

    def between_blocks(self, x: paddle.Tensor) -> paddle.Tensor:
        """`x` as it lies between blocks: partial sums added up, brought here from another stage if need be."""
        return self._place(x, dist.Shard(0) if self.sequence_parallel else dist.Replicate())

    def batch_first(self, x: paddle.Tensor) -> paddle.Tensor:
        """Exchange batch and sequence where this stage keeps the sequence first; its own inverse."""
        return x.transpose([1, 0, *range(2, x.ndim)]) if self.sequence_parallel else x

    def split_heads(self, x: paddle.Tensor, num_heads: int, heads_first: bool = True) -> paddle.Tensor:
        """[batch, heads, sequence, head size], or [batch, sequence, heads, head size], whatever comes first here."""
        x = x.reshape([*x.shape[:2], num_heads, -1])
        if heads_first:
            return x.transpose([1, 2, 0, 3] if self.sequence_parallel else [0, 2, 1, 3])
        return x.transpose([1, 0, 2, 3]) if self.sequence_parallel else x

    def merge_heads(self, x: paddle.Tensor, heads_first: bool = True) -> paddle.Tensor:
        """The inverse of `split_heads`."""
        if heads_first:
            x = x.transpose([2, 0, 1, 3] if self.sequence_parallel else [0, 2, 1, 3])
        elif self.sequence_parallel:
            x = x.transpose([1, 0, 2, 3])
        return x.reshape([*x.shape[:2], -1])

    def over_replicas(self, x: paddle.Tensor) -> paddle.Tensor:
        """The mean over dp ranks of a number that each has. (Over one rank it would leave an all_reduce in the program.)"""
        if self.mesh.get_dim_size("dp") == 1:
            return x
        return dist.reshard(x, self.mesh, self._placements(dist.Replicate(), dist.Replicate()))

    def per_sequence(self, x: paddle.Tensor) -> paddle.Tensor:
        """`x` of [batch] brought here from another stage."""
        return self.over_dp(x, 0)

    def summed(self, x: paddle.Tensor) -> paddle.Tensor:
        """`x` of [experts, ...] with its partial sums over mp added up."""
        return self.over_dp(x, 0)

    def over_dp(self, x: paddle.Tensor, dim: int) -> paddle.Tensor:
        """`x` with another dimension split over dp, and whole over mp."""
        return dist.reshard(x, self.mesh, self._placements(dist.Shard(dim), dist.Replicate()))

    def _place(self, x: paddle.Tensor, over_mp: dist.Placement) -> paddle.Tensor:
        return dist.reshard(x, self.mesh, self._placements(dist.Shard(1 if self.sequence_parallel else 0), over_mp))

    def _placements(self, over_dp: dist.Placement, over_mp: dist.Placement) -> list[dist.Placement]:
        """Of a tensor on this stage; a mesh of dp alone has no place for the second."""
        return [over_dp, over_mp][: self.mesh.ndim]


def stages(args: argparse.Namespace) -> list[Stage]:
    """One `Stage` per pipeline rank; global ranks count mp first, then dp, then pp."""
    ranks = np.arange(args.pp * args.dp * args.mp).reshape(args.pp, args.dp, args.mp)
    if dist.get_world_size() != ranks.size:
        raise SystemExit(f"pp x dp x mp = {ranks.size}, but {dist.get_world_size()} processes are running")
    names = ["pp", "dp", "mp"]
    if getattr(args, "flat_mesh", False):
        ranks, names = ranks[:, :, 0], names[:2]
    dist.auto_parallel.set_mesh(dist.ProcessMesh(ranks, dim_names=names))
    return [Stage(dist.ProcessMesh(r, dim_names=names[1:]), args.sequence_parallel) for r in ranks]


def stage_of_layer(args: argparse.Namespace, layer: int) -> int:
    """The stage that holds `layer`: with vpp chunks a stage, chunk c lies on stage c modulo pp."""
    return layer * args.pp * args.vpp // args.layers % args.pp


# Layers -------------------------------------------------------------------------------------------------------


class ColumnLinear(nn.Linear):
    """A linear layer whose outputs are split over mp; reads the whole input, and needs no communication."""

    def __init__(self, stage: Stage, fan_in: int, fan_out: int, bias: bool = True) -> None:
        super().__init__(fan_in, fan_out, bias_attr=None if bias else False)
        self.weight = stage.parameter(self.weight, dist.Shard(1))
        if bias:
            self.bias = stage.parameter(self.bias, dist.Shard(0))


class RowLinear(nn.Linear):
    """A linear layer whose inputs are split over mp; the partial results are added up before the bias."""

    def __init__(self, stage: Stage, fan_in: int, fan_out: int, bias: bool = True) -> None:
        super().__init__(fan_in, fan_out, bias_attr=None if bias else False)
        self.stage = stage
        self.weight = stage.parameter(self.weight, dist.Shard(0))
        if bias:
            self.bias = stage.parameter(self.bias)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.stage.between_blocks(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def causal_attention(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, kind: str) -> paddle.Tensor:
    """Attention of [batch, heads, sequence, head size] over the past; "flash" is one GPU kernel."""
    if kind == "flash":
        q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose([0, 2, 1, 3])
    length = q.shape[2]
    scores = paddle.matmul(q, k, transpose_y=True) * q.shape[3] ** -0.5
    with paddle.amp.auto_cast(False):
        future = paddle.triu(paddle.full([length, length], -1e4, dtype="float32"), diagonal=1)
        weights = F.softmax(scores.astype("float32") + future, axis=-1).astype(v.dtype)
    return paddle.matmul(weights, v)


def maybe_recompute(wanted: bool, layer: nn.Layer, *inputs: paddle.Tensor):
    """Run `layer`, keeping nothing of it for backward but its inputs where `wanted`."""
    return recompute(layer, *inputs) if wanted else layer(*inputs)


def run_blocks(args: argparse.Namespace, blocks: nn.LayerList, x: paddle.Tensor) -> paddle.Tensor:
    """Run all blocks, going from stage to stage."""
    stage = blocks[0].stage
    for block in blocks:
        if block.stage is not stage:
            stage = block.stage
            x = stage.between_blocks(x)
        x = maybe_recompute(args.recompute == "full", block, x)
    return x


class NextTokenLoss(nn.Layer):
    """Mean cross entropy over the whole batch of [batch, sequence, vocab] logits, in float32."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        logits = self.stage.over_dp(logits, 0).astype("float32")
        return self.stage.over_replicas(F.cross_entropy(logits, labels.unsqueeze(-1), reduction="none").mean())


# Data ---------------------------------------------------------------------------------------------------------


class NextToken(paddle.io.Dataset):
    """Sequences in which a token's successor is fixed nine times out of ten, so that a loss can fall."""

    NOISE = 0.1

    def __init__(self, num_sequences: int, seq_len: int, vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        successor = rng.permutation(vocab)
        tokens = rng.integers(0, vocab, (num_sequences, seq_len + 1))
        noisy = rng.random(tokens.shape) < self.NOISE
        for t in range(1, seq_len + 1):
            tokens[:, t] = np.where(noisy[:, t], tokens[:, t], successor[tokens[:, t - 1]])
        self.tokens = tokens

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens[i, :-1], self.tokens[i, 1:]

    def __len__(self) -> int:
        return len(self.tokens)


def data_loader(args: argparse.Namespace, first: Stage, last: Stage):
    """Tokens for the first stage and labels for the last, split over dp; `steps` batches, always the same."""
    dataset = NextToken(args.batch_size * max(args.steps, 1), args.seq_len, args.vocab, args.seed)
    sampler = paddle.io.BatchSampler(dataset, batch_size=args.batch_size, drop_last=True)
    loader = paddle.io.DataLoader(dataset, batch_sampler=sampler)
    return dist.shard_dataloader(loader, meshes=[first.mesh, last.mesh], shard_dims="dp")


# Training -----------------------------------------------------------------------------------------------------


def make_strategy(args: argparse.Namespace) -> dist.Strategy:
    """The `dist.Strategy` that the options ask for."""
    strategy = dist.Strategy()
    if args.schedule != "none":
        pipeline = strategy.pipeline
        pipeline.enable = True
        pipeline.schedule_mode = args.schedule
        pipeline.pp_degree, pipeline.vpp_degree = args.pp, args.vpp
        pipeline.vpp_seg_method = "Block" if args.vpp > 1 else ""
        pipeline.accumulate_steps = args.micro_batches
        pipeline.micro_batch_size = args.batch_size // (args.micro_batches * args.dp)
    if args.gradient_accumulation > 1:
        strategy.gradient_merge.enable = True
        strategy.gradient_merge.k_steps = args.gradient_accumulation
    if args.sharding_stage:
        strategy.sharding.enable = True
        strategy.sharding.stage, strategy.sharding.degree = args.sharding_stage, args.dp
        strategy.sharding.enable_tensor_fusion, strategy.sharding.enable_overlap = args.sharding_fusion, args.sharding_overlap
    if args.amp != "off":
        strategy.amp.enable = True
        strategy.amp.level, strategy.amp.dtype = args.amp, args.amp_dtype
        strategy.amp.use_master_grad = args.master_grad
    strategy._recompute.enable = args.recompute != "none"
    return strategy


def make_optimizer(args: argparse.Namespace, model: nn.Layer):
    """AdamW or SGD, with the learning rate, clipping and sharding that the options ask for."""
    rate = args.learning_rate
    if args.lr_scheduler == "cosine":
        decay = paddle.optimizer.lr.CosineAnnealingDecay(rate, T_max=max(args.steps, 1))
        rate = paddle.optimizer.lr.LinearWarmup(decay, warmup_steps=2, start_lr=rate / 10, end_lr=rate)
    kind = {"adamw": paddle.optimizer.AdamW, "sgd": paddle.optimizer.SGD}[args.optimizer]
    clip = nn.ClipGradByGlobalNorm(args.clip_grad) if args.clip_grad else None
    return kind(learning_rate=rate, parameters=model.parameters(), grad_clip=clip, multi_precision=args.amp == "O2")


def to_static(args: argparse.Namespace, model: nn.Layer, strategy: dist.Strategy, loss: nn.Layer | None = None) -> tuple:
    """(DistModel, loader) for a model that has its `stages`; the loss is that of the next token unless another is given."""
    optimizer = make_optimizer(args, model)
    sharding = {1: dist.ShardingStage1, 2: dist.ShardingStage2, 3: dist.ShardingStage3}.get(args.sharding_stage)
    optimizer = dist.shard_optimizer(optimizer, sharding("dp") if sharding else None)
    loader = data_loader(args, model.stages[0], model.stages[-1])
    return dist.to_static(model, loader, loss or NextTokenLoss(model.stages[-1]), optimizer, strategy), loader


@contextlib.contextmanager
def construction(args: argparse.Namespace) -> Iterator[None]:
    """Make a model in here: seeded, in the dtype its parameters are to have, with `--lazy` described only."""
    paddle.seed(args.seed)
    np.random.seed(args.seed)
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(args.amp_dtype if args.amp == "O2" else before)
    try:
        with paddle.LazyGuard() if args.lazy else contextlib.nullcontext():
            yield
    finally:
        paddle.set_default_dtype(before)


def losses(dist_model, loader) -> Iterator[float | None]:
    """Train over the loader; the mean loss of each step on ranks of the last stage, None on the others."""
    scheduler = dist_model._engine._optimizer._learning_rate
    dist_model.train()
    for batch in loader():
        loss = dist_model(*batch)
        if isinstance(scheduler, paddle.optimizer.lr.LRScheduler):
            scheduler.step()
        yield None if loss is None else float(np.mean(np.asarray(loss)))


def main(args: argparse.Namespace, build: Build) -> None:
    """Train, and print the loss of each step where it is known."""
    if args.lazy:
        raise SystemExit("--lazy allocates no parameters, so there is nothing to train; `interlace dump` allocates none without it")
    for step, loss in enumerate(losses(*build(args)), 1):
        if loss is not None:
            print(f"step {step} loss {loss:.6f}", flush=True)
