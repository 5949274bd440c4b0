"""Attributes of Paddle's operations, even if Paddle cannot return all of them."""

from __future__ import annotations

import json
from typing import Any

import paddle

from interlace.ir.kinds import OPAQUE


def attributes(op: Any) -> dict[str, Any]:
    """All attributes of a PIR operation; `OPAQUE` for those that Paddle cannot return.

    `Operation.attrs()` fails as a whole on one such attribute. For example, `persistable` of `coalesce_tensor_` is an array with a
    null in it if only one of two results was made persistable (sharding with tensor fusion).
    """
    try:
        return op.attrs()  # type: ignore[no-any-return]
    except NotImplementedError:
        return _one_by_one(op)


def _one_by_one(op: Any) -> dict[str, Any]:
    """The attributes, read one by one from copies on another operation in a temporary program."""
    names = _names(op)
    with paddle.static.program_guard(paddle.static.Program()):
        alone = paddle._C_ops.full([1], 0.0, paddle.float32, paddle.CPUPlace()).get_defining_op()
        _erase(alone, _names(alone))
        found: dict[str, Any] = {}
        for name in names:
            alone.copy_attrs_from(op)
            _erase(alone, [other for other in names if other != name])
            try:
                found.update(alone.attrs())
            except NotImplementedError:
                found[name] = OPAQUE
    return found


def _names(op: Any) -> list[str]:
    return [entry["N"] for entry in json.loads(str(paddle.base.libpaddle.pir.get_attrs_map_json(op)))]


def _erase(op: Any, names: list[str]) -> None:
    for name in names:
        op.erase_attr(name)
