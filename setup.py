"""Maps the top-level folders under `interlace.*`, so that no generic name lands in site-packages."""

from setuptools import setup

INSIDE = ("bridge", "bridge.cpu", "bridge.cpu.kernels", "bridge.places", "cli", "ir", "report")
OUTSIDE = ("passes", "cost_model", "scheduler", "scheduler.hazards", "scheduler.offload", "configs", "configs.devices", "configs.presets")

setup(
    packages=["interlace", *(f"interlace.{name}" for name in INSIDE), *(f"interlace.{name}" for name in OUTSIDE)],
    package_dir={"interlace": "interlace", **{f"interlace.{name}": name.replace(".", "/") for name in OUTSIDE}},
    package_data={
        "interlace.configs.devices": ["*.json"],
        "interlace.configs.presets": ["*.yaml"],
        "interlace.bridge.cpu.kernels": ["*.cc"],
    },
)
