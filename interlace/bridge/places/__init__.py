"""What differs by device, one module each; the differences stand in the table of `Place`'s fields."""

from interlace.bridge.places.base import Place
from interlace.bridge.places.choose import choose_place

__all__ = ["Place", "choose_place"]
