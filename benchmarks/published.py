"""Published layouts with the speed that their authors' programs reached, simulated for the programs that Paddle builds.

Every setting is a row of facts with its source. The layout is built and simulated like in `interlace choose`, with Paddle's plan and with
Interlace's within nine tenths of the device memory; each row says what the examples cannot express. Other settings in FILE are kept.

    PYTHONPATH=. python benchmarks/published.py [--only NAME ...] [--keep DIR] [--drafts] [--jobs J] [-o FILE]     (with Paddle)
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from layouts import GPT, HALF, LLAMA, VARIES, searched
from measuring import RESULTS, meta, store

MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/f2e5db402c44ae309aa6448bcb4ae87e8ae0f5f4/images/model_table.png"
CLOUD = "https://github.com/NVIDIA/dgxc-benchmarking/blob/0b71cfda5163540778e2a3d2db59858bf62f96f7/{}"
NEMO = "https://docs.nvidia.com/nemo-framework/user-guide/24.09/performance/performance_summary.html"
H100, H200 = "--memory 76GB --device h100", "--memory 133GB --device h200"
"""Nine tenths of device memory; the rest is for the driver and NCCL."""


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer as described by the sources. `products`: those of its MLP, two, or three if it is gated."""

    script: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int
    kv_heads: int = 0
    intermediate: int = 0
    products: int = 2

    def words(self) -> str:
        """Arguments of the script."""
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "vocab": self.vocab, "seq-len": self.seq_len}
        sizes |= {"intermediate": self.intermediate} if self.intermediate else {}
        sizes |= {"kv-heads": self.kv_heads} if self.kv_heads else {}
        return " ".join(f"--{name} {size}" for name, size in sizes.items())

    def flops_a_token(self) -> int:
        """FLOPs per token of forward and backward, without recomputation and with attention counted as if it were not causal: the formula
        of all sources (given in the readmes of DGX Cloud; Megatron-LM's table follows arXiv 2104.04473 without recomputation)."""
        width, share = self.intermediate or 4 * self.hidden, (self.kv_heads or self.heads) / self.heads
        attention = 12 * self.layers * self.hidden * (self.hidden * (1 + share) + self.seq_len)
        return round(attention + 6 * self.products * self.layers * self.hidden * width + 6 * self.vocab * self.hidden)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of a published table.

    Attributes:
        source: Address of the source.
        layouts: The source's layout; several if the source does not give all of it, or if the examples can only express similar ones.
        batch: Sequences per step.
        step_s, tflops, tokens: The one that the source gives: seconds per step, or per GPU model TFLOP/s, or tokens per second.
        precision: Precision of the source's matrix products; all simulated ones are in bfloat16.
        differs: Differences between the source and the simulation, besides those of all settings.
        flags: Arguments of the script, besides the model's sizes.
        config: Configuration of Interlace's plans; empty for the defaults.
        common: Arguments of `choose`: the device and its memory.
    """

    source: str
    model: Model
    gpus: int
    layouts: Sequence[Mapping[str, int | str]]
    batch: int
    step_s: float = 0.0
    tflops: float = 0.0
    tokens: float = 0.0
    precision: str = "bfloat16"
    differs: str = ""
    flags: str = "--sequence-parallel"
    config: str = ""
    common: str = H100

    def reached(self) -> float:
        """Model TFLOP/s per GPU according to the source."""
        a_token = self.model.flops_a_token()
        if self.tflops:
            return self.tflops
        return a_token * (self.tokens or self.batch * self.model.seq_len / self.step_s / self.gpus) / 1e12

    def case(self, *, plans: bool = True) -> tuple[str, str, str]:
        """Script, arguments of `choose`, arguments of the script; `plans`: whether Interlace plans are made."""
        sizes = f"--layers {self.model.layers} --heads {self.model.heads} --batch-size {self.batch}"
        words = f"--gpus {self.gpus} --gpus-a-host 8 {sizes} --all"
        words += f" --finalists {len(self.layouts) if plans else 0}" + (f" --config {self.config}" if self.config else "")
        # VPP does not support the casts of master gradients
        half = HALF if all(each["vpp"] == 1 for each in self.layouts) else HALF.replace(" --master-grad", "")
        arguments = f"{self.model.words()} {half} --batch-size {self.batch} --vpp {{vpp}} {VARIES} {self.flags}"
        return self.model.script, words, arguments.strip()


KEPT = ("command", "alternatives", "simulated", "tokens", "layouts", "refused")
"""Keys of an answer that are stored."""
REPLICAS = 32
"""Number of replicas in the simulated rows of Megatron-LM."""
BESIDE = "GPT-3 175B, 1,024 GPUs, as searched"
"""The published layout with the batch of a stored search (`layouts.py`)."""


def layout(pp: int, mp: int, dp: int, m: int, vpp: int = 1, sharding: int = 1) -> dict[str, int | str]:
    """A layout without recomputation, with the optimizer sharded."""
    return {"pp": pp, "mp": mp, "dp": dp, "vpp": vpp, "m": m, "sharding": sharding, "recompute": "none"}


def megatron(layers: int, hidden: int, heads: int, mp: int, pp: int, batch: int, tflops: float) -> Setting:
    """A row of Megatron-LM's table with fewer replicas and the same batch for each: the source has 48 replicas, does not give its
    micro-batches, and not all tensors can be split over 48 ranks, as Paddle's sharding of the optimizer requires."""
    a_replica = batch // 48
    batches = [a_replica // size for size in ((1, 2, 4) if pp == 1 else (1,))]
    return Setting(
        MEGATRON,
        Model(GPT, layers, hidden, heads, 131072, 4096),
        REPLICAS * mp * pp,
        [layout(pp, mp, REPLICAS, m) for m in batches],
        REPLICAS * a_replica,
        tflops=tflops,
        flags="--sequence-parallel" if mp > 1 else "",
        differs=f"{REPLICAS} replicas of 48; micro-batches and chunks are not told",
    )


MLPERF = "https://github.com/mlcommons/training_results_v5.1/tree/441d65f4445cd59687466533fd9f55399136e7a4/Nebius/{}"
LLAMA_405B = Model(LLAMA, 128, 16384, 128, 128256, 8192, 8, 53248, 3)
GPT_175B = Model(GPT, 96, 12288, 96, 51200, 2048)
MIXED = "benchmarks/mixed.yaml"
README_175B, DROPOUT = CLOUD.format("nemo_megatron/README_175b.md"), "dropout of 0.1, here none"
SETTINGS: dict[str, Setting] = {
    "GPT 1.7B": megatron(24, 2048, 16, 1, 1, 192, 408.8),
    "GPT 7.1B": megatron(30, 4096, 32, 2, 1, 192, 465.9),
    "GPT 16B": megatron(32, 6144, 48, 4, 1, 192, 489.1),
    "GPT 32B": megatron(48, 7168, 56, 8, 1, 192, 459.6),
    "GPT 70B": megatron(84, 8192, 64, 8, 2, 384, 419.7),
    "GPT 119B": megatron(92, 10240, 80, 8, 4, 768, 420.5),
    "GPT 177B": megatron(96, 12288, 96, 8, 6, 1152, 432.8),
    "GPT-3 175B, 128 GPUs": Setting(
        README_175B, GPT_175B, 128, [layout(8, 4, 4, 64, 12)], 256, step_s=8.309, differs=DROPOUT, config=MIXED
    ),
    "GPT-3 175B, 1,024 GPUs": Setting(
        README_175B, GPT_175B, 1024, [layout(8, 4, 32, 64, 12)], 2048, step_s=8.453, differs=DROPOUT, config=MIXED
    ),
    BESIDE: Setting(
        README_175B,
        replace(GPT_175B, vocab=50304),
        1024,
        [layout(8, 4, 32, 48, 12)],
        1536,
        tokens=496191 / 1024,
        config=MIXED,
        differs="the source's figure is that of 2,048 sequences",
    ),
    "Nemotron-4 15B, 16 GPUs": Setting(
        CLOUD.format("nemotron/README_15b.md"),
        Model(GPT, 32, 6144, 48, 256000, 4096),
        16,
        [layout(1, 4, 4, 4)],
        64,
        step_s=2.812,
        differs="8 key and value heads, which its FLOP formula counts as 48, no biases; here 48, and biases",
    ),
    "GPT-3 5B, 16 GPUs": Setting(
        CLOUD.format("paxml/README_5b.md"),
        Model(GPT, 24, 4096, 32, 51200, 2048),
        16,
        [layout(1, 1, 16, 1, sharding=3), layout(1, 1, 16, 1)],
        64,
        step_s=0.634,
        flags="",
        differs="compiled by XLA; parameters sharded within or across hosts is not told",
    ),
    "Llama 3.1 8B, 8 GPUs": Setting(
        CLOUD.format("llama3.1/README_8b.md"),
        Model(LLAMA, 32, 4096, 32, 128256, 8192, 8, 14336, 3),
        8,
        [layout(1, 2, 4, 32)],
        128,
        step_s=12.91,
        differs="cp 2 of the source is mp 2 here",
    ),
    "Llama 3.1 70B, 64 GPUs": Setting(
        CLOUD.format("llama3.1/README_70b.md"),
        Model(LLAMA, 80, 8192, 64, 128256, 8192, 8, 28672, 3),
        64,
        [layout(4, 8, 2, 64, 5)],
        128,
        step_s=14.72,
        differs="tp 4 and cp 2 of the source are mp 8 here",
    ),
    "Llama 3.1 405B, 512 H200": Setting(
        MLPERF.format("results/nebius_h200_n64/llama31_405b"),
        LLAMA_405B,
        512,
        [layout(8, 8, 8, 144, 8)],
        1152,
        tflops=replace(LLAMA_405B, layers=126).flops_a_token() * 1152 * 8192 / 50.0 / 512 / 1e12,
        precision="FP8",
        differs="128 layers of 126, as stages are equal here; tp 4 and cp 2 of the source are mp 8 here",
        config=MIXED,
        common=H200,
    ),
    "Llama 2 13B, 16 GPUs": Setting(
        NEMO,
        Model(LLAMA, 40, 5120, 40, 32000, 4096, 40, 13824, 3),
        16,
        [layout(4, 1, 4, 32, 10)],
        128,
        tokens=8646,
        precision="FP8",
        flags="",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate the requested settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--keep", type=Path, help="folder of what is built; what is there already is not built again")
    parser.add_argument("--drafts", action="store_true", help="Paddle's own plans alone: ours of long pipelines take long")
    parser.add_argument("--jobs", type=int, default=0, metavar="J", help="processes at once (default: all cores)")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "published.json")
    args = parser.parse_args(argv)
    stored: dict[str, Any] = json.loads(args.output.read_text())["settings"] if args.output.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            setting = SETTINGS[name]
            keep = (args.keep or Path(folder)) / name.replace(" ", "_").replace(",", "")
            found = searched(setting.case(plans=not args.drafts), keep, setting.layouts, jobs=args.jobs, common=setting.common)
            facts = {key: value for key, value in asdict(setting).items() if value and key not in ("model", "layouts")}
            flops = {"flops_a_token": setting.model.flops_a_token(), "published_tflops": round(setting.reached(), 1)}
            stored[name] = {**facts, **flops, **{key: found[key] for key in KEPT}}
            ordered = {each: stored[each] for each in SETTINGS if each in stored}
            store("published", {**meta(), "settings": ordered}, args.output)
            print(f"{name}: published {setting.reached():.0f} TFLOP/s a GPU; {json.dumps(found['layouts'])}", flush=True)


if __name__ == "__main__":
    main()
