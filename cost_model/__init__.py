"""How long operations, collectives and copies take: alone, and beside each other.

A `DeviceProfile` is measured and stored; a `CostModel` answers from it, and every answer says how it was found.
"""

from interlace.cost_model.base import Costs, Estimate, GivenCosts
from interlace.cost_model.interference import Stretch
from interlace.cost_model.model import CostModel
from interlace.cost_model.profile import DeviceProfile, load_profile, profile_names, profile_of, require_device, save_profile

__all__ = [
    "CostModel",
    "Costs",
    "DeviceProfile",
    "Estimate",
    "GivenCosts",
    "Stretch",
    "load_profile",
    "profile_names",
    "profile_of",
    "require_device",
    "save_profile",
]
