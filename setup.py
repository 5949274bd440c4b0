"""Maps the top-level folders under `interlace.*`, so that no generic name lands in site-packages."""

from setuptools import setup

FOLDERS = ("passes", "cost_model", "scheduler", "configs")

setup(
    packages=["interlace", *(f"interlace.{name}" for name in ("bridge", "bridge.cpu", "bridge.places", "cli", "ir", "report")),
              *(f"interlace.{name}" for name in FOLDERS)],  # fmt: skip
    package_dir={"interlace": "interlace", **{f"interlace.{name}": name for name in FOLDERS}},
    package_data={"interlace.configs": ["devices/*.json", "presets/*.yaml"]},
)
