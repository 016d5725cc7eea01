"""Measure this machine and write a hardware profile for 'plan --hardware'.

Exit status: 0; 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_finepage.cli import options
from ds_finepage.errors import ConfigError
from ds_finepage.graph import codec
from ds_finepage.units import parse_bytes

MIN_SCRATCH_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write; by default it is printed"
    )
    parser.add_argument(
        "--device", help="device to measure; by default the accelerator, if there is one"
    )
    parser.add_argument(
        "--scratch",
        default="256MiB",
        metavar="SIZE",
        help="device bytes to measure with (256MiB); fewer give rougher figures",
    )
    options.add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and write."""
    scratch = parse_bytes(arguments.scratch, name="--scratch")
    if scratch < MIN_SCRATCH_BYTES:
        raise ConfigError(
            f"--scratch: {scratch} bytes are too few to measure with. Write at least "
            f"{MIN_SCRATCH_BYTES}."
        )
    if arguments.out is not None:
        options.require_writable(arguments.out, force=arguments.force)

    from ds_finepage.execution.device import default_device, require_device
    from ds_finepage.execution.probe import probe

    name = arguments.device
    device = default_device() if name is None else require_device(name, option="--device")
    profile = probe(device, scratch_bytes=scratch)
    if arguments.out is None:
        print(codec.dumps(profile), end="")
        return 0
    codec.save(profile, arguments.out)
    print(f"profile: {arguments.out}")
    following = options.command_line("plan", model="llama-7b", hardware=arguments.out)
    print(f"plan a model for it: {following}")
    return 0
