"""Programs that compute activations again, as text."""

from __future__ import annotations

from pathlib import Path

TEXT = (Path(__file__).parent / "fixtures" / "recompute_unread.txt").read_text()
PLAIN = TEXT.partition("=== program\n")[2].partition("=== report")[0]


def layered(layers: int) -> str:
    """Layers `x + f(x)`, of which backward reads what f computes, nine times the bytes of x, and two of those of x's own."""
    forward, backward, last = [], [], 0
    for k in range(layers):
        x, a, u, g, d, y = ("%0" if not k else f"%{6 * k}", *(f"%{6 * k + n}" for n in (1, 2, 3, 4, 6)))
        forward += [
            f"{a}:float32[512,512] = pd_op.tanh({x}) forward",
            f"{u}:float32[512,2048] = pd_op.concat({a}, {a}, {a}, {a}) forward",
            f"{g}:float32[512,2048] = pd_op.gelu({u}) forward",
            f"{d}:float32[512,512] = pd_op.matmul({g}, {g}) forward",
            f"{y}:float32[512,512] = pd_op.add({x}, {d}) forward",
        ]
        dg, du, da, dx, dy, given = (f"%{1000 + 5 * k + n}" for n in (0, 1, 2, 3, 4, 9))
        backward.append(
            [
                f"{dg}:float32[512,2048] = pd_op.matmul_grad({g}, {given}) backward",
                f"{du}:float32[512,2048] = pd_op.gelu_grad({u}, {dg}) backward",
                f"{da}:float32[512,512] = pd_op.concat_grad({du}) backward",
                f"{dx}:float32[512,512] = pd_op.tanh_grad({a}, {x}, {da}) backward",
                f"{dy}:float32[512,512] = pd_op.add({dx}, {given}) backward",
            ]
        )
        last = 1000 + 5 * k + 9
    first = f"%{last}:float32[512,512] = pd_op.exp_grad(%{6 * layers}) backward"
    lines = [
        '%0:float32[512,512]"x" = pd_op.data() forward',
        *forward,
        first,
        *(line for each in reversed(backward) for line in each),
        'builtin.shadow_output(%1004) optimize {"output_name":"dx"}',
    ]
    head = "program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=FThenB\n"
    return head + "\n".join(f"#{k} {line}" for k, line in enumerate(lines)) + "\n"
