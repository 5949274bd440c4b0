"""The part of the proof that needs all ranks: partners issue matching calls, and no ranks wait for each other in a cycle."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.scheduler.hazards.call_names import Teller
from interlace.scheduler.hazards.channels import World, difference_text, differences, unclear
from interlace.scheduler.hazards.deadlock import circle, circle_text
from interlace.scheduler.hazards.finding import Finding
from interlace.scheduler.hazards.skeleton import Voice
from interlace.scheduler.target import Target


def check_together(voices: Sequence[Voice], target: Target, ask: Teller) -> list[Finding]:
    """Findings about several ranks.

    Where something is wrong, `ask` gets the calls that the findings name. Ranks with the same `voices` ask for the same calls and
    get the same findings.
    """
    world = World(voices)
    doubt = unclear(world)
    unequal = [each for each in differences(world) if each.line[0][0] not in world.names.unclear]
    round_ = circle(world, target) if not (doubt or unequal) else None
    asks = [ask_ for each in unequal for ask_ in each.asks()] + (round_.waits if round_ else [])
    told = ask(asks) if asks else []
    at, findings = 0, doubt
    for each in unequal:
        findings.append(difference_text(world, each, told[at : at + len(each.asks())]))
        at += len(each.asks())
    return [*findings, *([circle_text(round_, told)] if round_ else [])]
