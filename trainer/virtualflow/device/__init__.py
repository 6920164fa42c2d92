"""What a device computes and has: what is pinned so that its bits repeat, a probe of these bits, and how much memory is
used.
"""

from virtualflow.device.determinism import (
    count_processors,
    describe_device,
    device_name,
    device_of,
    fingerprint,
    has_spare_processor,
    pin,
    probe_bits,
)
from virtualflow.device.memory_gauge import FreedMemory, MemoryGauge, MemoryUse, free_bytes, status_bytes
