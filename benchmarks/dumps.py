"""Size of stored programs, and time to encode, decode, verify, print and parse them, by number of operations.

python benchmarks/dumps.py [--quick] [-o FILE]
"""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import meta, middle, store
from oracle import Layers

from interlace.ir import Program, parse, show, verify
from interlace.ir.dump import decode, encode

SIZES = (1_000, 10_000, 100_000)
MP, SEQ = 2, 2048


def program(num_ops: int) -> Program:
    """Forward and backward of GPT layers, at least this many operations."""
    per_layer = len(Layers(MP, SEQ, 2).build().ops) - len(Layers(MP, SEQ, 1).build().ops)
    return Layers(MP, SEQ, -(-num_ops // per_layer)).build()


def seconds(action: Callable[[], Any], runs: int) -> dict[str, Any]:
    """CPU seconds of several runs."""
    found = []
    for _ in range(runs):
        start = time.thread_time()
        action()
        found.append(time.thread_time() - start)
    return middle(found)


def measure(num_ops: int, runs: int) -> dict[str, Any]:
    made = program(num_ops)
    data = encode(made)
    text = show(made)
    assert decode(data) == made
    assert parse(text) == made
    return {
        "ops": len(made.ops),
        "values": len(made.values),
        "bytes": len(data),
        "bytes_per_op": round(len(data) / len(made.ops), 1),
        "gzip_bytes": len(gzip.compress(data, mtime=0)),
        "text_bytes": len(text.encode()),
        "encode_s": seconds(lambda: encode(made), runs),
        "decode_s": seconds(lambda: decode(data), runs),
        "verify_s": seconds(lambda: verify(made), runs),
        "show_s": seconds(lambda: show(made), runs),
        "parse_s": seconds(lambda: parse(text), runs),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small program")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for size in (200,) if args.quick else SIZES:
        rows.append(measure(size, 3))
        print({key: value["median"] if isinstance(value, dict) else value for key, value in rows[-1].items()}, flush=True)
    store("dumps", {**meta(), "aim": "100,000 operations decode in under 0.5 s", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
