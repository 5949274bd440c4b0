"""Fixture files of passes: what people write in one, and what the passes give."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from interlace.config import Beyond
from interlace.cost_model import GivenCosts
from interlace.errors import InterlaceError
from interlace.ir import Program, parse, show, verify
from interlace.passes import Pass, Pipeline, find_pass
from interlace.passes.pipeline import PassReport
from interlace.report.screen import places_text
from tests.together import run_together

FILES = sorted((Path(__file__).parent / "fixtures").glob("*.txt"))
PASS = re.compile(r"([a-z0-9-]+)(?: (\{.*?\}))?(?:; |$)")


def head_of(text: str, key: str) -> str:
    found = re.search(rf"^{key}: (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def passes_of(text: str) -> Pipeline:
    made: list[Pass] = []
    for name, options in PASS.findall(head_of(text, "passes")):
        made.append(msgspec.convert(json.loads(options or "{}"), find_pass(name)))
    return Pipeline(tuple(made))


def costs_of(text: str) -> GivenCosts:
    stretch = {tuple(key.split("|")): tuple(pair) for key, pair in json.loads(head_of(text, "stretch") or "{}").items()}
    host = dict(zip(("host_ns", "job_ns"), json.loads(head_of(text, "host") or "[]"), strict=False))
    return GivenCosts(json.loads(head_of(text, "costs") or '{"default": 1}'), stretch, **host)


def given_of(text: str) -> str:
    """The part that people write."""
    return re.split(r"^=== (?:report|error)$", text, maxsplit=1, flags=re.MULTILINE)[0]


def programs_of(given: str, where: str) -> list[Program]:
    """The programs that people write."""
    programs = [parse(text, where) for text in given.split("=== program\n")[1:]]
    for program in programs:
        verify(program)
    return programs


def made_of(given: str, programs: Sequence[Program]) -> list[tuple[Program, Sequence[PassReport]]]:
    """What the passes of a file make of programs."""
    passes, costs, room = passes_of(given), costs_of(given), int(head_of(given, "room") or 0) or None
    extra_bytes = int(head_of(given, "beyond") or 0)
    if len(programs) > 1:
        return run_together(passes, programs, costs, memory_budget=Beyond(extra_bytes))
    return [passes.run(programs[0], costs, memory_limit=room, extra_bytes=extra_bytes)]


def outcome(given: str, where: str) -> str:
    """What the passes give, as the file's last part."""
    programs = programs_of(given, where)
    try:
        made = made_of(given, programs)
    except InterlaceError as error:
        return f"=== error\n{type(error).__name__}: {error}\n"
    return "".join("=== report\n{}\n=== expected\n{}".format("\n".join(places_text(told)), show(result)) for result, told in made)
