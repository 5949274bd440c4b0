"""Names of jobs as schedules write them."""

from __future__ import annotations

import re

from interlace.scheduler.jobs.parts import KIND_NAMES


def slot_text(name: str) -> str:
    """A job's name as schedules and reasons write it.

    >>> [slot_text(name) for name in ("forward_3", "forward1_3", "pair_0B_2F", "pair_0Bc1_2F", "optimizer")]
    ['3F', '3F.1', '0B+2F', '0B.1+2F', 'O']
    """
    if name.startswith("pair_"):
        return name.removeprefix("pair_").replace("_", "+").replace("c", ".")
    single = re.fullmatch(r"(?P<kind>[a-z_]+?)(?P<c>\d*)_(?P<m>\d+)", name)
    kinds = {long: short for short, long in KIND_NAMES.items()}
    if single and single["kind"] in kinds:
        return f"{single['m']}{kinds[single['kind']]}" + (f".{single['c']}" if single["c"] and int(single["c"]) else "")
    return kinds.get(name, name)
