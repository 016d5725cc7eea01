"""Hosts by name: how fast they multiply by weights in their memory, while the link copies others.

Both read the same memory, so the link's rate is taken off the rate of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_finepage.config import did_you_mean
from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class Host:
    """The memory and the arithmetic of a host."""

    memory_bytes_per_s: float
    flops_per_s: float
    source: str


HOSTS = {
    "desktop": Host(
        62.7e9, 0.7e12, "two channels of DDR5-5600 (89.6e9 bytes/s) at 70 %, 8 cores with AVX2"
    ),
    "server-ddr4": Host(
        143e9, 1.5e12, "eight channels of DDR4-3200 (204.8e9 bytes/s) at 70 %, 32 cores with AVX2"
    ),
    "server": Host(
        215e9, 3e12, "eight channels of DDR5-4800 (307.2e9 bytes/s) at 70 %, 32 cores with AVX-512"
    ),
}
"""Hosts as people have them. The shares of the peaks, and the arithmetic, are assumptions."""


def with_host(profile: HardwareProfile, name: str) -> HardwareProfile:
    """Return a profile with another host.

    Args:
        profile: The machine.
        name: A key of ``HOSTS``.

    Raises:
        ConfigError: There is no such host, or the link takes all that its memory can give.
    """
    if name not in HOSTS:
        raise ConfigError(f"unknown host {name!r}. {did_you_mean(name, HOSTS)}")
    host = HOSTS[name]
    rate = host.memory_bytes_per_s - profile.h2d_bytes_per_s
    if rate <= 0:
        raise ConfigError(
            f"the link of {profile.name} copies {profile.h2d_bytes_per_s:.3g} bytes a second, and "
            f"the memory of host {name!r} has {host.memory_bytes_per_s:.3g}: nothing is left to "
            f"compute with."
        )
    return replace(
        profile,
        name=f"{profile.name}+{name}",
        source=f"{profile.source} Host: {host.source}.",
        host_bytes_per_s=rate,
        host_flops_per_s=host.flops_per_s,
    )
