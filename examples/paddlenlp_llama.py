"""PaddleNLP's Llama, trained by its `AutoTrainer`, which makes the Strategy itself.

interlace run examples/paddlenlp_llama.py --world 4 --config overlap --verify
"""

from __future__ import annotations

import dataclasses
import importlib
import sys

import numpy as np
import paddle

for module in ("", ".load_state_dict", ".metadata", ".utils"):
    sys.modules[f"paddle.distributed.checkpoint{module}"] = importlib.import_module(f"paddle.distributed.flex_checkpoint.dcp{module}")

from paddlenlp.trainer import AutoTrainingArguments
from paddlenlp.trainer.auto_trainer import AutoTrainer
from paddlenlp.transformers import LlamaConfig
from paddlenlp.transformers.llama.modeling_auto import LlamaForCausalLM3DAuto, LlamaPretrainingCriterion3DAuto


@dataclasses.dataclass
class Arguments(AutoTrainingArguments):
    pipeline_schedule_mode: str = "1F1B"


class RandomTokens(paddle.io.Dataset):
    def __init__(self, size: int, seed: int) -> None:
        self.tokens = np.random.default_rng(seed).integers(0, 64, [size, 17])

    def __getitem__(self, k: int) -> dict:
        return {"input_ids": self.tokens[k, :-1], "labels": self.tokens[k, 1:]}

    def __len__(self) -> int:
        return len(self.tokens)


def main() -> None:
    args = Arguments(
        output_dir="out/paddlenlp_llama", device="cpu", enable_auto_parallel=True, to_static=True, do_train=True,
        pipeline_parallel_degree=2, tensor_parallel_degree=2, gradient_accumulation_steps=4,
        per_device_train_batch_size=1, max_steps=4, logging_steps=1, save_steps=0, report_to=[], disable_tqdm=True, seed=1,
    )
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         seq_length=16, max_position_embeddings=16, tensor_parallel_degree=2, pipeline_parallel_degree=2,
                         use_flash_attention=False, use_cache=False)
    model = LlamaForCausalLM3DAuto._from_config(config, dtype="float32")
    trainer = AutoTrainer(model=model, criterion=LlamaPretrainingCriterion3DAuto(config), args=args, train_dataset=RandomTokens(16, seed=1))
    print(trainer.train())


if __name__ == "__main__":
    main()
