"""`interlace/passes`, `interlace/cost_model`, `interlace/scheduler` and `interlace/configs` are links to the top-level folders: one import
path, and a wheel that holds nothing but `interlace`."""

from setuptools import find_namespace_packages, setup

setup(
    package_dir={"": "."},
    packages=find_namespace_packages(include=["interlace", "interlace.*"], exclude=["*.__pycache__"]),
    package_data={
        "interlace.configs.devices": ["*.json"],
        "interlace.configs.presets": ["*.yaml"],
        "interlace.cpu.kernels": ["*.cc"],
        "interlace.report.page": ["*.html"],
        "interlace.layout": ["*.html"],
    },
)
