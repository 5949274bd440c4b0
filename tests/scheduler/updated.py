"""Programs whose optimizer part has state of its own."""

from __future__ import annotations

from interlace.ir import Program, parse, verify

LAYERS = 4


def trained(layers: int = LAYERS, micro_batches: int = 2) -> Program:
    """A stack of layers, each with a weight, a buffer of its gradient, a moment and a counter, and the rate that all read."""
    ops, values = [], {}

    def op(text: str) -> None:
        ops.append(f"#{len(ops)} {text}")

    def value(name: str, text: str) -> str:
        values[name] = len(values)
        return f"%{values[name]}:{text}"

    def of(name: str) -> str:
        return f"%{values[name]}"

    op(f'{value("x", "float32[256]")}"x" = pd_op.data() forward')
    op(f'{value("rate", "float32[1]")}!"rate" = pd_op.data() forward')
    for k in range(layers):
        for name, size in (("w", 256), ("g", 256), ("m", 256), ("c", 1)):
            op(f'{value(f"{name}{k}", f"float32[{size}]")}!"{name}{k}" = pd_op.data() forward')
    last = "x"
    for k in range(layers):
        op(f'{value(f"h{k}", "float32[256]")} = pd_op.multiply({of(last)}, {of(f"w{k}")}) forward layer="layers.{k}"')
        last = f"h{k}"
    op(f'builtin.shadow_output({of(last)}) forward {{"output_name":"y"}}')
    for k in reversed(range(layers)):
        grad = of(last)
        op(f'{value(f"d{k}", "float32[256]")} = pd_op.relu_grad({of(f"h{k}")}, {grad}) backward layer="layers.{k}"')
        last = f"d{k}"
        op(f"{value(f's{k}', 'float32[256]')}~{values[f'g{k}']} = pd_op.add_({of(f'g{k}')}, {of(last)}) backward inplace=0:0")
    for k in range(layers):
        written = (("w", 256), ("m", 256), ("c", 1))
        results = ", ".join(value(f"{n}{k}'", f"float32[{size}]") + f"~{values[f'{n}{k}']}" for n, size in written)
        read = ", ".join(of(name) for name in (f"w{k}", f"s{k}", "rate", f"m{k}", f"c{k}"))
        op(f"{results} = pd_op.adamw_({read}) optimize inplace=0:0,1:3,2:4")
    head = f"program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches={micro_batches} chunks=1 schedule=accumulate\n"
    made = parse(head + "\n".join(ops))
    verify(made)
    return made
