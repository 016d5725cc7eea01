"""Hardware profiles: rates and sizes of one device and its host link."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """The figures of a machine that the simulator needs. Rates are per second, sizes in bytes.

    The figures of ``DETAILS`` may be missing: of other ranks, the disk, or a host that computes.
    """

    name: str
    source: str  # where the figures come from: datasheet, measurement
    capacity_bytes: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]  # by dtype name; "default" holds for the others
    launch_ns: int = 0  # least time of one op on the device
    transfer_latency_ns: int = 0  # time of one copy beyond that of its bytes
    host_op_ns: int = 0  # time that the host takes to start one op
    host_copy_ns: int = 0  # time that the host takes to start one copy
    rank_bytes_per_s: float = 0.0  # link to the next rank; 0: not known, so it takes no time
    rank_latency_ns: int = 0  # time of one step of a collective beyond that of its bytes
    disk_bytes_per_s: float = 0.0  # 0: not known, so a file is as fast as the link
    host_bytes_per_s: float = 0.0  # weights that the host multiplies by, while copies run; 0: none
    host_flops_per_s: float = 0.0  # of such products

    @property
    def has_host(self) -> bool:
        """True where it is known how fast the host multiplies by weights in its memory."""
        return self.host_bytes_per_s > 0 and self.host_flops_per_s > 0

    @property
    def without_host(self) -> HardwareProfile:
        """The same machine, whose host computes nothing."""
        return replace(self, host_bytes_per_s=0.0, host_flops_per_s=0.0)


DETAILS = (
    "rank_bytes_per_s",
    "rank_latency_ns",
    "disk_bytes_per_s",
    "host_bytes_per_s",
    "host_flops_per_s",
)
"""The measured figures that a profile may lack."""
