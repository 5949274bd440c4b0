"""A Paddle custom device whose streams are truly asynchronous: host threads, or CUDA streams. See README.md."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`TARGET`, which `interlace run --target testbed` reads; imported on first use, so that the plugin can be built without Interlace."""
    if name == "TARGET":
        from testbed.target import TARGET

        return TARGET
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
