"""Functions compiled by numba and stored for the next process, so that it always runs what the sources say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numba


def compiled(function: Callable[..., Any], sources: Sequence[ModuleType], **options: Any) -> Any:
    """The function, of arrays and numbers, compiled by numba (`options` are those of `numba.njit`) when it is called first; stored where
    that is possible.

    numba keeps a stored function for as long as its own file is the same, and knows nothing of what it calls. So what was stored from other
    `sources` is thrown away: the modules of everything that it calls, and of the layout of what it reads.
    """
    try:
        made = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to store it in
        return numba.njit(**options)(function)
    with suppress(OSError):
        _forget_other_sources(function, Path(made.stats.cache_path), sources)
    return made


def _forget_other_sources(function: Callable[..., Any], folder: Path, sources: Sequence[ModuleType]) -> None:
    texts = b"".join(Path(str(module.__file__)).read_bytes() for module in sources)
    digest, name = hashlib.blake2b(texts, digest_size=16).hexdigest(), f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    stamp = folder / f"{name}.sources"
    if stamp.is_file() and stamp.read_text() == digest:
        return
    for index in folder.glob(f"{name}-*.nbi"):
        index.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest)
