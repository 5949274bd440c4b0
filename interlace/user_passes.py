"""`--import MODULE`: modules of a user that register passes of their own."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from interlace.errors import ConfigError, InterlaceError

imported: list[str] = []
"""Names of the passes that imported modules registered: they run with their defaults where the configuration does not name them."""
VARIABLE = "INTERLACE_IMPORT"
"""Tells ranks which modules to import; names are apart as in a search path."""


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the option to a command."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first, by name or as a .py file: passes of your own that it registers run, "
        "with their defaults where the configuration does not name them",
    )


def import_own(names: Iterable[str]) -> None:
    """Import modules, found as a script in this folder, or beside the named file, would find them. Raises ConfigError where there is no
    such module, or it fails."""
    from interlace.passes import REGISTRY

    for name in names:
        path = Path(name).absolute()
        is_file = name.endswith(".py")
        if is_file and not path.is_file():
            raise ConfigError(f"--import {name}: no such file")
        folder = str(path.parent) if is_file else os.getcwd()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        before = set(REGISTRY)
        try:
            module = importlib.import_module(path.stem if is_file else name)
        except InterlaceError:
            raise
        except Exception as error:
            raise ConfigError(f"--import {name}: {type(error).__name__}: {error}; expected a module that registers passes") from error
        made = [each for each, kind in REGISTRY.items() if each not in before or kind.__module__ == module.__name__]
        imported.extend(each for each in made if each not in imported)
        if not made:
            print(f"interlace: --import {name}: it registers no pass (@interlace.passes.register)", file=sys.stderr)


def import_from_environment() -> None:
    """What a rank imports before it reads its configuration. Raises ConfigError."""
    import_own(filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)))
