"""How programs are built for a device, one module per kind; how devices of each kind behave is described in `interlace.ir.target`."""

from interlace.bridge.targets.base import Device
from interlace.bridge.targets.choose import choose_device, register_device

__all__ = ["Device", "choose_device", "register_device"]
