"""Paddle's launcher with Interlace in every rank, for scripts that cannot call `interlace.enable`, as their trainer makes the `Strategy`:

INTERLACE_CONFIG=overlap python -m interlace.launch --devices 0,1,2,3 train.py ARGS

Options and environment are those of `python -m paddle.distributed.launch`, also for several hosts. `INTERLACE_CONFIG` names a preset or a
YAML file, `INTERLACE_PLAN` a folder of stored plans, `INTERLACE_MEMORY_BUDGET` and `INTERLACE_POOL_BUDGET` are budgets; the first two take
the place of what the script itself asks of Interlace.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from interlace.config import make_config
from interlace.errors import ConfigError, InterlaceError
from interlace.installed import require_paddle
from interlace.outside import CONFIG_VARIABLE, VARIABLES, asked_outside, with_connections

ATTACH = Path(__file__).with_name("local") / "attach.py"
"""What Paddle's launcher starts in place of the script; by path, as it starts no modules."""


def words_with_interlace(words: Sequence[str]) -> list[str]:
    """The launcher's arguments with Interlace before the script. Raises ConfigError where the environment asks for nothing, or for what
    cannot be read, or the script is no Python file."""
    outside = asked_outside(typed=VARIABLES)
    if outside is None:
        raise ConfigError(
            f"none of {', '.join(VARIABLES)} is set in the environment; expected what Interlace shall do, as in {CONFIG_VARIABLE}=overlap. "
            "A script that calls interlace.enable(strategy) needs Paddle's launcher alone"
        )
    make_config(outside.options, outside.source, outside.marks, strange=[])  # the script may register passes of strange names
    require_paddle()
    from paddle.distributed.launch.context.args_envs import parse_args

    given, _ = parse_args()
    script = given.training_script
    at = len(words) - len(given.training_script_args) - 1
    if at < 0 or words[at] != script:
        raise ConfigError(f"{script}: where the script begins is not clear; expected OPTIONS SCRIPT ARGS, as for paddle.distributed.launch")
    if not script.endswith(".py") or not Path(script).is_file():
        raise ConfigError(f"{script}: expected the path of a training script that ends in .py")
    return [*words[:at], os.fspath(ATTACH), *words[at:]]


def main() -> None:
    """Run Paddle's launcher with the arguments of this process."""
    try:
        words = words_with_interlace(sys.argv[1:])
    except InterlaceError as error:
        print(f"interlace.launch: {error}", file=sys.stderr)
        sys.exit(2)
    from paddle.distributed.launch.main import launch

    package = os.fspath(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ |= with_connections()
    sys.argv[1:] = words
    launch()


if __name__ == "__main__":
    main()
