"""The test device's own tests use its fixtures."""

from tests.device.plugin import device, slowcard_device

__all__ = ["device", "slowcard_device"]
