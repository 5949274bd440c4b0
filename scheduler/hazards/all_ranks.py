"""The part of the proof that needs all ranks: partners issue matching calls, and no ranks wait for each other in a cycle."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.ir.target import Target
from interlace.scheduler.hazards.call_names import AnswerQueries
from interlace.scheduler.hazards.channels import World, difference_text, differences, unclear
from interlace.scheduler.hazards.deadlock import circle, circle_text
from interlace.scheduler.hazards.finding import Finding
from interlace.scheduler.hazards.skeleton import RankComm


def check_together(comms: Sequence[RankComm], target: Target, ask: AnswerQueries) -> list[Finding]:
    """Findings about several ranks.

    If something is wrong, `ask` is called with requests for the names of the calls involved. Ranks with the same `comms` make the same
    requests and get the same findings.
    """
    world = World(comms)
    doubt = unclear(world)
    unequal = [each for each in differences(world) if each.line[0][0] not in world.names.unclear]
    round_ = circle(world, target) if not (doubt or unequal) else None
    queries = [query for each in unequal for query in each.queries()] + (round_.waits if round_ else [])
    answers = ask(queries) if queries else []
    at, findings = 0, doubt
    for each in unequal:
        findings.append(difference_text(world, each, answers[at : at + len(each.queries())]))
        at += len(each.queries())
    return [*findings, *([circle_text(round_, answers)] if round_ else [])]
