"""PaddleNLP's Llama, trained by its `AutoTrainer`, which makes the Strategy itself: nothing here is Interlace's.

interlace run examples/paddlenlp_llama.py --world 4 --config overlap --verify
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import numpy as np
import paddle

for module in ("", ".load_state_dict", ".metadata", ".utils"):  # PaddleNLP 3.0.0b4 imports them from where Paddle 3.3 no longer has them
    sys.modules[f"paddle.distributed.checkpoint{module}"] = importlib.import_module(f"paddle.distributed.flex_checkpoint.dcp{module}")

from paddlenlp.trainer import AutoTrainingArguments, PdArgumentParser  # noqa: E402
from paddlenlp.trainer.auto_trainer import AutoTrainer  # noqa: E402
from paddlenlp.transformers import LlamaConfig  # noqa: E402
from paddlenlp.transformers.llama.modeling_auto import LlamaForCausalLM3DAuto, LlamaPretrainingCriterion3DAuto  # noqa: E402

VOCAB, SEQ_LEN = 64, 16
NUM_SEQUENCES = 16  # four steps of four micro-batches; with fewer steps than micro-batches AutoTrainer changes the number of micro-batches


@dataclass
class Arguments(AutoTrainingArguments):
    """PaddleNLP's options with other defaults; it reads `pipeline_schedule_mode`, and leaves it to the script to define it."""

    output_dir: str = "out/paddlenlp_llama"
    enable_auto_parallel: bool = True
    to_static: bool = True
    device: str = "gpu" if paddle.is_compiled_with_cuda() else "cpu"
    pipeline_parallel_degree: int = 2
    tensor_parallel_degree: int = 2
    pipeline_schedule_mode: str = "1F1B"
    gradient_accumulation_steps: int = 4
    per_device_train_batch_size: int = 1
    max_steps: int = 4
    logging_steps: int = 1
    report_to: str = "none"


class RandomTokens(paddle.io.Dataset):
    """Random sequences, each with the next token as the label of every token."""

    def __init__(self, seed: int) -> None:
        self.tokens = np.random.default_rng(seed).integers(0, VOCAB, [NUM_SEQUENCES, SEQ_LEN + 1])

    def __getitem__(self, k: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.tokens[k, :-1], "labels": self.tokens[k, 1:]}

    def __len__(self) -> int:
        return NUM_SEQUENCES


def main() -> None:
    """Make a model of random parameters, and train it."""
    (args,) = PdArgumentParser(Arguments).parse_args_into_dataclasses()
    paddle.seed(args.seed)  # before AutoTrainer does: without it every run starts from other parameters
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
        seq_length=SEQ_LEN,
        max_position_embeddings=SEQ_LEN,
        tensor_parallel_degree=args.tensor_parallel_degree,
        pipeline_parallel_degree=args.pipeline_parallel_degree,
    )
    model, criterion = LlamaForCausalLM3DAuto(config), LlamaPretrainingCriterion3DAuto(config)
    trainer = AutoTrainer(model=model, criterion=criterion, args=args, train_dataset=RandomTokens(args.seed))
    print(f"mean loss of {args.max_steps} steps: {trainer.train().training_loss:.6f}")


if __name__ == "__main__":
    main()
