"""Whether a plan is safe, for all ranks at once: happens-before over host order, streams, events, jobs and communication.

>>> from interlace.ir import parse
>>> text = '''program rank=0 world=1 mode=train
... #0 %0:float32[2]"x" = pd_op.data() forward
... #1 %1:float32[2] = pd_op.exp(%0) forward
... #2 %2:float32[2] = pd_op.relu(%1) forward stream="side"
... job a forward 0: 1@0
... job b forward 0: 2@0'''
>>> [finding.kind for finding in check([parse(text)])]
['race']
>>> check([parse(text + chr(10) + "event e 1@0 -> 2@0")])
[]

What is proved, for one target (`interlace.scheduler.target`): every access follows the write that the sequential step gives it;
memory is handed out again, and host buffers are written again, only behind their last use, in the next step too; all ranks of a
group agree about their collectives, sends match receives, and nobody waits in a circle.

Orders that hold only because another rank waits in between are not counted, except for deadlock: a plan must not lean on
them.
"""

from interlace.scheduler.hazards.all_ranks import check_together
from interlace.scheduler.hazards.call_names import Ask, Teller, Told, tell
from interlace.scheduler.hazards.check import check, refuse, require_safe, trace_of
from interlace.scheduler.hazards.communication import require_straight
from interlace.scheduler.hazards.finding import Finding, Where, findings_text
from interlace.scheduler.hazards.skeleton import Skeleton, Voice, unpacked

__all__ = [
    "Ask",
    "Finding",
    "Skeleton",
    "Teller",
    "Told",
    "Voice",
    "Where",
    "check",
    "check_together",
    "findings_text",
    "refuse",
    "require_safe",
    "require_straight",
    "tell",
    "trace_of",
    "unpacked",
]
