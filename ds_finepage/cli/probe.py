"""Measure this machine and write a hardware profile for 'plan --hardware'.

Exit status: 0; 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_finepage.cli import options
from ds_finepage.graph import codec

SCRATCH_BYTES = 256 << 20
"""Device bytes to measure with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write; by default it is printed"
    )
    parser.add_argument(
        "--device", help="device to measure; by default the accelerator, if there is one"
    )
    parser.add_argument(
        "--host",
        action="store_true",
        help="measure how fast the host computes products, too; plans for the profile then let it",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="FILE",
        help="measure how fast this file is read, too; 'plan --host-memory' then takes that rate",
    )
    options.add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and write."""
    if arguments.out is not None:
        options.require_writable(arguments.out, force=arguments.force)

    from ds_finepage.execution.device import default_device, require_device
    from ds_finepage.execution.probe import probe, with_measured_disk, with_measured_host

    name = arguments.device
    device = default_device() if name is None else require_device(name, option="--device")
    profile = probe(device, scratch_bytes=SCRATCH_BYTES)
    if arguments.host:
        profile = with_measured_host(profile, device)
    if arguments.disk is not None:
        profile = with_measured_disk(profile, device, arguments.disk)
    if arguments.out is None:
        print(codec.dumps(profile), end="")
        return 0
    codec.save(profile, arguments.out)
    print(f"profile: {arguments.out}")
    following = options.command_line("plan", model="llama-7b", hardware=arguments.out)
    print(f"plan a model for it: {following}")
    return 0
