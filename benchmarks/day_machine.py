"""Names the hardware and the versions of a machine, for the head of a report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch
from day_common import device_of, memory_of, parser_of, report

PACKAGES = ("ds_finepage", "torch", "transformers", "deepspeed", "triton")


def processor() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2] for line in file if line.startswith("model name")]
        return names[0].strip()
    except (OSError, IndexError):
        return platform.machine()


def version_of(package: str) -> str:
    """Return the version of an installed package, in words where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Report both tables."""
    device = device_of(parser_of(__doc__).parse_args())
    module = None if device.type == "cpu" else torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda of: of.type)(device)
    report("hardware", what="device", found=name)
    report("hardware", what="device_bytes", found=memory_of(device)[1])
    report("hardware", what="processor", found=processor())
    report("hardware", what="cores", found=len(os.sched_getaffinity(0)))
    report("hardware", what="host_bytes", found=psutil.virtual_memory().total)
    report("versions", what="Python", found=platform.python_version())
    for package in PACKAGES:
        report("versions", what=package, found=version_of(package))
    if device.type == "cuda":
        report("versions", what="CUDA", found=torch.version.cuda)
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
        report("versions", what="CUDA of the driver", found=driver)


if __name__ == "__main__":
    main()
