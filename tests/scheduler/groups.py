"""Plans of ranks that differ in the groups they list and in the order of their collectives."""

from __future__ import annotations

from interlace.ir import Program, parse, verify

HEAD = "program rank={rank} world={world} mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n"


def program(text: str, rank: int, world: int) -> Program:
    made = parse(HEAD.format(rank=rank, world=world) + text)
    verify(made)
    return made


def three_ranks_in_a_circle(straight: bool = False) -> list[Program]:
    """Three groups of two; every rank calls its two groups in the order in which its neighbour to the right calls them last."""
    groups = {7: (0, 1), 8: (1, 2), 9: (0, 2)}
    orders = {0: (7, 9), 1: (8, 7), 2: (9, 8)}
    made = []
    for rank, order in orders.items():
        lines = [f"group {number} = {','.join(map(str, ranks))}" for number, ranks in groups.items() if rank in ranks]
        lines.append('#0 %0:float32[2]"x" = pd_op.data() forward')
        for k, group in enumerate(sorted(order) if straight else order, 1):
            lines.append(f'#{k} %{k}:float32[2] = pd_op.all_reduce(%0) forward group={group} layer="g{group}"')
        made.append(program("\n".join([*lines, "job f forward 0: 1-2@0"]), rank, 3))
    return made


TWO = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.all_reduce(%0) forward group={first} layer="a"
#2 %2:float32[4]"z" = pd_op.data() forward
#3 %3:float32[4] = pd_op.all_reduce(%2) forward group={second} layer="b"
job f forward 0: 1@0 3@0"""


def pair(lists: tuple[tuple[int, ...], ...], uses: tuple[tuple[int, int], ...]) -> list[Program]:
    """Two ranks with groups of both of these numbers, each using two."""
    made = []
    for rank, (numbers, (first, second)) in enumerate(zip(lists, uses, strict=True)):
        groups = "\n".join(f"group {number} = 0,1" for number in numbers)
        made.append(program(groups + TWO.format(first=first, second=second), rank, 2))
    return made
