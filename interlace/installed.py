"""Whether Paddle is installed, and whether it is the version that Interlace is built for. Imports no Paddle."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys

from interlace.errors import ConfigError
from interlace.notice import say_once
from interlace.version import PADDLE, VERSION

DISTRIBUTIONS = ("paddlepaddle", "paddlepaddle-gpu")


def require_paddle() -> None:
    """Raises ConfigError where there is no Paddle to import, with what to install."""
    known = sys.modules.get("paddle", sys)
    if known is None or (known is sys and importlib.util.find_spec("paddle") is None):
        raise ConfigError(
            f"PaddlePaddle is not installed for {sys.executable}; pip install paddlepaddle=={PADDLE} (on a GPU machine "
            f"the paddlepaddle-gpu {PADDLE} of Paddle's own index)"
        )


def paddle_version() -> str:
    """Of the imported Paddle, else of the installed one; empty where it does not say."""
    imported = getattr(sys.modules.get("paddle"), "__version__", "")
    if imported:
        return str(imported)
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def versions() -> dict[str, str]:
    """Of Interlace, Paddle and Python."""
    return {"interlace": VERSION, "paddle": paddle_version(), "python": platform.python_version()}


def other_paddle() -> str:
    """What to say of a Paddle that is not the supported one; empty where it is.

    Builds of the supported version (`3.3.1+cu129`, `3.3.1.post126`) are that version.
    """
    found = paddle_version()
    if found.partition("+")[0].split(".")[:3] == PADDLE.split("."):
        return ""
    return f"Paddle {found or 'of unknown version'} is installed, and Interlace is built and tested for {PADDLE} only"


def stands_back(force: bool) -> bool:
    """Whether the installed Paddle is left alone because it is another than the supported one; said once, by rank 0."""
    other = "" if force else other_paddle()
    if other:
        say_once(f"{other}: models are left to Paddle. Option `force_paddle: on` plans all the same, untested")
    return bool(other)
