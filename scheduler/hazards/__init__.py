"""The checker: proves plans of all ranks safe, by happens-before over host order, streams, events, jobs and communication.

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

The proof holds for one target (`interlace.ir.target`): every access finds the contents that it has in the sequential step; memory is
reused, and host buffers are overwritten, only after their last use, in the next step too; all ranks of a group issue the same
collectives in the same order; sends match receives; and no ranks wait for each other in a cycle.

Orders that hold only because another rank waits in between do not count, as a plan must not depend on them; only the search for deadlocks
takes them into account.
"""

from interlace.scheduler.hazards.all_ranks import check_together
from interlace.scheduler.hazards.call_names import AnswerQueries, CallAnswer, CallQuery, answer_queries
from interlace.scheduler.hazards.check import check, refuse, require_safe, trace_of
from interlace.scheduler.hazards.communication import require_straight
from interlace.scheduler.hazards.finding import Finding, findings_text
from interlace.scheduler.hazards.graph_memory import graph_memory
from interlace.scheduler.hazards.graph_steps import kept_from_graph
from interlace.scheduler.hazards.skeleton import RankComm, unpacked

__all__ = [
    "AnswerQueries",
    "CallAnswer",
    "CallQuery",
    "Finding",
    "RankComm",
    "answer_queries",
    "check",
    "check_together",
    "findings_text",
    "graph_memory",
    "kept_from_graph",
    "refuse",
    "require_safe",
    "require_straight",
    "trace_of",
    "unpacked",
]
