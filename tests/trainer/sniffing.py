"""Somebody who hears every packet, and a training of which it is known what must not be heard."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from namespaces import enter

GRADIENT = struct.unpack("<f", struct.pack("<f", 0.7654321))[0]
STATE = b"what is in the state of this job"
SAMPLE = b"what is in a sample of this job."
METRIC = "a-name-that-the-page-shows"


def training(steps: int, pause: float, first: str = "") -> str:
    """A training whose gradients, state, samples and metric are known.

    Args:
        pause: seconds between two steps.
        first: what it does before.
    """
    return f"""
{first}
import time
import torch, virtualflow as vf

class Known(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2_000))
        self.register_buffer("said", torch.frombuffer(bytearray({STATE!r} * 40), dtype=torch.uint8))

    def forward(self, x):
        return {GRADIENT} * self.weight.sum() + 0.0 * x.float().mean()

model = Known()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
samples = torch.frombuffer(bytearray({SAMPLE!r} * 64), dtype=torch.uint8).view(64, -1)
data = torch.utils.data.TensorDataset(samples)
with vf.elastic(model, optimizer, data, batch_size=16, steps={steps}, virtual_nodes=4) as run:
    for step in run:
        for (x,) in step:
            loss = model(x)
            loss.backward()
            step.log(**{{"{METRIC}": loss}})
        if step.number % 4 == 0:
            vf.evaluate(model, data, lambda batch: batch[0], batch_size=16)
        time.sleep({pause})
"""


OUTGOING = 4
"""PACKET_OUTGOING: on a loopback each packet is heard as it goes and as it comes."""
_BUFFER, _STATISTICS = (socket.SOL_SOCKET, 33), (263, 6)
"""SO_RCVBUFFORCE, and PACKET_STATISTICS of SOL_PACKET."""
_ALL = 3
"""ETH_P_ALL: packets of each protocol."""


class Sniffer:
    """Hears all TCP that passes some interfaces, by connection and direction.

    Args:
        namespace: of the network; empty: this machine's own.
        interface: its name; with a star behind it, how the names of all begin, those to come too.
    """

    def __init__(self, namespace: str = "", interface: str = "lo") -> None:
        self._flows: dict[bytes, bytearray] = defaultdict(bytearray)
        self._beginning = interface.rstrip("*")
        self.dropped = 0
        """Packets that came faster than they were heard."""
        with ThreadPoolExecutor(1) as insider:
            if namespace:
                insider.submit(enter, namespace).result()
            protocol = socket.htons(_ALL) if interface.endswith("*") else 0  # 0: none before it is bound
            self._socket = insider.submit(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, protocol).result()
        self._socket.setsockopt(*_BUFFER, 1 << 28)
        self._socket.settimeout(0.2)
        self._grace = 0.0
        if not protocol:
            self._socket.bind((interface, _ALL))
        self._over = math.inf
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def close(self, grace: float = 10.0) -> None:
        """Hear no more; what was sent before is heard, for so many seconds at most if others go on to send."""
        self._grace = grace
        self._over = time.monotonic()
        self._thread.join()
        _, self.dropped = struct.unpack("II", self._socket.getsockopt(*_STATISTICS, 8))
        self._socket.close()

    def hears(self, pattern: bytes) -> bool:
        return any(pattern in flow for flow in self._flows.values())

    @property
    def total(self) -> int:
        return sum(map(len, self._flows.values()))

    def _listen(self) -> None:
        while True:
            try:
                packet, address = self._socket.recvfrom(1 << 18)
            except TimeoutError:
                if time.monotonic() > self._over:
                    return
                continue
            if address[2] != OUTGOING and address[0].startswith(self._beginning):
                self._keep(packet[14:])
            if time.monotonic() > self._over + self._grace:
                return

    def _keep(self, packet: bytes) -> None:
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            self._flows[b"no TCP"] += packet
            return
        segment = packet[4 * (packet[0] & 15) :]
        self._flows[packet[12:20] + segment[:4]] += segment[4 * (segment[12] >> 4) :]


def known_patterns() -> dict[str, list[bytes]]:
    """What is in the job's messages, in each form that it may have there."""
    return {
        "gradients": [struct.pack("<f", GRADIENT * 2.0**power) * 16 for power in range(-6, 5)],
        "state": [STATE],
        "samples": [SAMPLE],
        "page": [METRIC.encode()],
    }


def key_patterns(identity: bytes) -> dict[str, bytes]:
    """What is secret in the file of an identity: its key as a number, and two lines of its text."""
    key = load_pem_private_key(identity, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    lines = identity.split(b"\n")
    return {"key": key.private_numbers().private_value.to_bytes(32), "its file": lines[1], "its end": lines[2]}
