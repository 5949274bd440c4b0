"""One rank of Paddle's launcher: `attach.py SCRIPT ARGS...`, which `interlace.launch` puts before the user's script.

Runs SCRIPT as if it had been started directly, with Interlace in Paddle's engine.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

from interlace.installed import stands_back
from interlace.outside import asked_outside, is_disabled
from interlace.user_passes import import_from_environment


def attach() -> None:
    """Install Interlace in Paddle's engine if the environment asks for it, even if the script does not. Raises ConfigError if what the
    environment asks for cannot be read."""
    import_from_environment()
    if is_disabled():
        return
    outside = asked_outside()
    if outside and not stands_back(outside.options.get("force_paddle") in ("on", True)):
        from interlace.bridge import hook, mesh

        mesh.install()
        hook.install()


def run_script(script: str, arguments: list[str]) -> None:
    """Execute `script` as `__main__`, with its folder first on the path and its own arguments."""
    path = Path(script).resolve()
    sys.argv = [script, *arguments]
    sys.path[0] = os.fspath(path.parent)
    module = types.ModuleType("__main__")
    module.__file__ = os.fspath(path)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    try:
        exec(compile(path.read_bytes(), os.fspath(path), "exec"), module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


if __name__ == "__main__":
    attach()
    run_script(sys.argv[1], sys.argv[2:])
