"""Whether Paddle is installed, whether it is tested, and whether what Interlace needs of it is there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys

from interlace.errors import ConfigError
from interlace.notice import say_once
from interlace.report.checks import EVERYTHING, Feature
from interlace.version import PADDLE, TESTED, VERSION

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
    """What to say of a Paddle that nobody has tested; empty for a tested one.

    Builds of a tested version (`3.3.1+cu129`, `3.3.1.post126`) are that version.
    """
    found = paddle_version()
    if ".".join(found.partition("+")[0].split(".")[:3]) in TESTED:
        return ""
    return f"Paddle {found or 'of unknown version'} is installed, and Interlace is tested with {' and '.join(TESTED)} only"


def unusable_paddle(*features: Feature) -> str:
    """Why features cannot be had with a Paddle that nobody has tested: names that they need are not there. Empty where all are, and for
    tested versions. Imports Paddle."""
    from interlace.bridge.doctor.internals import missing_for

    other = other_paddle()
    missing = missing_for(*features) if other else ""
    return f"{other}; this one lacks what is needed for {' and '.join(each.name for each in features)}: {missing}" if missing else ""


def stands_back(force: bool) -> bool:
    """Whether the installed Paddle is left alone: nobody has tested it, and it lacks what every plan needs. Rank 0 says once what is done
    with one that nobody has tested."""
    other = other_paddle()
    if not other:
        return False
    unusable = "" if force else unusable_paddle(EVERYTHING)
    if unusable:
        say_once(f"{unusable}. Models are left to Paddle; option `force_paddle: on` tries all the same")
    else:
        say_once(f"{other}: it is used as its rules are found to be (option `examine`); begin with `interlace run --verify`")
    return bool(unusable)
