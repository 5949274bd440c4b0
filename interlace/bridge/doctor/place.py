"""The device that is examined."""

from __future__ import annotations

import paddle

from interlace.errors import ConfigError


def use_place(target: str = "") -> None:
    """Let Paddle use a device: `gpu`, `cpu` or `custom`; empty for the first of GPU, custom device and CPU that there is.

    Raises:
        ConfigError: It is not there.
    """
    has_gpu = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    custom = paddle.device.get_all_custom_device_type()
    gpu = f"gpu:{paddle.distributed.ParallelEnv().dev_id}" if has_gpu else ""
    places = {"gpu": gpu, "custom": f"{custom[0]}:0" if custom else "", "cpu": "cpu"}
    wanted = target or next(name for name, place in places.items() if place)
    if not places[wanted]:
        raise ConfigError(
            f"--target {wanted}: this Paddle sees no such device; expected one of {[each for each in places if places[each]]}"
        )
    paddle.set_device(places[wanted])
