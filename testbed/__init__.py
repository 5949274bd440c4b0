"""A Paddle device of our own whose streams are really asynchronous: host threads, or CUDA streams. See README.md."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`TARGET`, which `interlace run --target testbed` asks for; imported late, because building the plugin needs no Interlace."""
    if name == "TARGET":
        from testbed.target import TARGET

        return TARGET
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
