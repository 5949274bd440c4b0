"""Products whose rows are no multiple of 16 bytes, and the same with the sizes rounded up to one, with PyTorch on one GPU.

    python -m benchmarks.gpu.unaligned OUT.json     (PyTorch with CUDA, one GPU, a minute)

Heads over vocabularies and classes that nobody padded: their forward product, and those of the gradients of input and weight, measured as
in `single.py`. `benchmarks/device_profile.py` makes slowdowns of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.gpu import single

LOADED = 16
"""Bytes that kernels load at a time if all rows are multiples of it; else 8, 4 or 2."""
WIDTHS = (1001, 1002, 1004, 15261, 15262, 15268, 25129, 30522, 30524, 50257, 50258, 50260)
"""Classes and vocabularies: ImageNet with a class more, BERT's (30522) and GPT-2's (50257) on one device and on two, and similar ones."""
TOKENS, HIDDEN = (4096, 16384), (1024, 4096)


def measure_all() -> None:
    """Measure all products; `single.samples` has them afterwards."""
    torch.backends.cuda.matmul.allow_tf32 = True
    for dtype in single.DTYPES:
        for tokens in TOKENS:
            for hidden in HIDDEN:
                step = LOADED // single.DTYPES[dtype].itemsize
                for n in sorted({-(-words // step) * step for words in WIDTHS} | {*WIDTHS}):
                    single.product("gemm", dtype, 1, tokens, n, hidden)
                    single.product("gemm", dtype, 1, tokens, hidden, n, "y")
                    single.product("gemm", dtype, 1, hidden, n, tokens, "x")


def main() -> None:
    """The command line."""
    measure_all()
    Path(sys.argv[1]).write_text(json.dumps({"meta": single.meta(), "samples": single.samples}).replace('{"kind"', '\n{"kind"') + "\n")
    print(f"{len(single.samples)} products")


if __name__ == "__main__":
    main()
