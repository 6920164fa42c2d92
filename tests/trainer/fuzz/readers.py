"""What reads bytes that others wrote, what it may raise, and what it reads when all is well.

A reader that raises anything else is wrong, and so is one whose error is no sentence, where a person reads it.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml
from coordinator_server import hello
from identities import identities
from meshes import plan_of
from signers import NamedSigner

from fuzz.mutations import LARGEST, mutated
from virtualflow.cluster.client import read_manifest
from virtualflow.errors import CommunicatorBroken, ConfigurationError, VirtualFlowError
from virtualflow.launcher.manifest import load_manifest
from virtualflow.launcher.report import read_report
from virtualflow.protocol import framing
from virtualflow.protocol.certificates import NotTrusted, Party
from virtualflow.protocol.device_profile import read_profile
from virtualflow.protocol.http_client import CallRefused, CoordinatorClient
from virtualflow.protocol.settings import SignalSettings
from virtualflow.protocol.termination_message import (
    TerminationMessage,
    decode_termination_message,
    encode_termination_message,
)
from virtualflow.protocol.versions import OLDEST_PROTOCOL, PROTOCOL, read_hello_header
from virtualflow.protocol.wording import printable
from virtualflow.state import codec
from virtualflow.state.checkpoint_format import FORMAT, JobIdentity, Manifest, unseal
from virtualflow.state.sealed_manifest import seal
from virtualflow.transport.channel import Channel, FrameExchange, SealedChannel, checksum
from virtualflow.transport.key_agreement import SECRET, Introduction
from virtualflow.transport.mesh import _SEALED, _meet
from virtualflow.verify import traces
from virtualflow_operator.api.job import write_status
from virtualflow_operator.api.objects import parse_time, read_job
from virtualflow_operator.api.queue import read_queue
from virtualflow_operator.api.validation import parse_quantity

ROOT = Path(__file__).parents[3]
KEPT = Path(__file__).parent / "seeds"
"""Inputs that were found, a folder for each reader: they are seeds from then on."""
WIRE = ROOT / "tests" / "unit" / "protocol" / "wire"
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What :mod:`virtualflow.protocol.framing` says that it raises."""
CONTENT = bytes(range(256)) * 5


@dataclass(frozen=True)
class Reader:
    """One of them."""

    name: str
    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refusals: tuple[type[Exception], ...] = ()
    """What it may raise."""
    sentence: bool = False
    """Whether a person reads the refusal, which is one line then."""
    share: float = 1.0
    """Of the inputs, beside the others: less for what takes long."""
    largest: int = LARGEST
    """Bytes of an input."""
    kept: Sequence[bytes] = field(init=False, default=())

    def __post_init__(self) -> None:
        found = sorted((KEPT / self.name).glob("*")) if (KEPT / self.name).is_dir() else []
        object.__setattr__(self, "kept", [path.read_bytes() for path in found])

    def inputs(self, rng: random.Random, count: int) -> Iterator[bytes]:
        """Yield what is known, then ``count`` inputs that are drawn."""
        known = [*self.seeds, *self.kept]
        yield from known
        for _ in range(count):
            yield mutated(rng, known, self.largest)

    def try_one(self, said: bytes) -> bool:
        """Give it one input; whether it was read.

        Raises:
            AssertionError: the refusal is no sentence.
            Exception: what it must not raise.
        """
        try:
            self.read(said)
        except self.refusals as error:
            if self.sentence:
                text = str(error)
                assert text == printable(text).replace("\n", ""), f"no sentence: {text!r:.300}"
                assert len(text) < 5_000, f"{len(text)} characters: {text[:300]}"
            return False
        return True


def _wire(*names: str) -> list[bytes]:
    """Return what each protocol has said, of these kinds; without a name, of all."""
    protocols = [json.loads((WIRE / f"protocol-{n}.json").read_text()) for n in range(OLDEST_PROTOCOL, PROTOCOL + 1)]
    entries = [entry for protocol in protocols for entry in protocol if not names or entry["name"] in names]
    return [json.dumps(entry["said"]).encode() for entry in entries]


class _Wire:
    """Both ends of one connection, over which one frame after the other goes."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.theirs = socket.create_connection(listener.getsockname())
            self.ours, _ = listener.accept()
        self.key, self.other = bytes(32), bytes(range(32))

    def plain(self) -> Channel:
        return Channel(self.ours, "worker-1")

    def sealed(self) -> Channel:
        return SealedChannel(self.ours, "worker-1", self.other, self.key)

    def frame(self, sender: Callable[[socket.socket], Channel]) -> bytes:
        """Return the frame of ``CONTENT``, as it leaves."""
        exchange = FrameExchange()
        channel = sender(self.theirs)
        channel.send(memoryview(CONTENT), checksum(CONTENT), exchange)
        while exchange.left:
            channel.advance()
        return self.ours.recv(100_000)

    def reader(self, make: Callable[[], Channel]) -> Callable[[bytes], None]:
        def read(said: bytes) -> None:
            content, exchange = bytearray(len(CONTENT)), FrameExchange()
            channel = make()
            channel.expect(memoryview(content), exchange)
            self.theirs.sendall(said)
            try:
                while exchange.left and channel.advance():
                    pass
                if exchange.left:
                    raise CommunicatorBroken("it has not all come")
                assert content == CONTENT, "another content passes for what was sent"
            finally:
                while _drained(self.ours):
                    pass

        return read

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def _drained(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 20)
    except BlockingIOError:
        return b""


def _json(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """A reader of what the API server gives: values of JSON."""

    def decoded(said: bytes) -> object:
        try:
            value = json.loads(said)
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return None  # a client of Kubernetes says so, and the API server knows of no lone surrogates
        return read(value)

    return decoded


def _job(value: Any) -> object:
    metadata = {"namespace": "default", "name": "a", "uid": "b"}
    body = value if isinstance(value, dict) else {"spec": value}
    read = read_job({"metadata": metadata, "spec": _mapping(body.get("spec")), "status": _mapping(body.get("status"))})
    assert all(isinstance(fault, str) and len(fault) < 5_000 for fault in read.faults)
    return write_status(read.status)


def _queue(value: Any) -> object:
    body = value if isinstance(value, dict) else {"spec": value}
    return read_queue(
        {"metadata": {"name": "a"}, "spec": _mapping(body.get("spec")), "status": _mapping(body.get("status"))}
    )


def _mapping(value: Any) -> Any:
    """What the definitions' schema lets through, at the least: a mapping."""
    return value if isinstance(value, dict) else {}


def _quantity(said: bytes) -> object:
    return parse_quantity(said.decode("utf-8", "replace"))


def _moment(said: bytes) -> object:
    return parse_time(said.decode("utf-8", "replace"))


def _ended(said: bytes) -> object:
    """A termination message is read from bytes here, and from the text in a pod's status there."""
    decode_termination_message(said.decode("utf-8", "replace"))
    read = decode_termination_message(said)
    if read is not None:
        encode_termination_message(read)
    return read


def _documents(path: Path) -> list[bytes]:
    return [path.read_bytes(), *(part.encode() for part in path.read_text().split("\n---\n"))]


def _as_json(*paths: Path) -> list[bytes]:
    documents = [document for path in paths for document in yaml.safe_load_all(path.read_text())]
    return [json.dumps(document).encode() for document in documents]


@contextmanager
def readers(folder: Path) -> Iterator[list[Reader]]:
    """All that read in a process of their own.

    Args:
        folder: for files that some of them read, best in memory.
    """
    with ExitStack() as stack:
        plain, sealed = _Wire(), _Wire()
        stack.callback(plain.close)
        stack.callback(sealed.close)

        def in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
            def write_and_read(said: bytes) -> object:
                (folder / name).write_bytes(said)
                return read(folder / name)

            return write_and_read

        job = identities(folder)
        identity, other = job.hold("worker", "worker-0"), job.hold("worker", "worker-1")
        signed = other.sign(CONTENT)
        certificate = signed[2 : 2 + int.from_bytes(signed[:2])]
        members = [Introduction(NamedSigner(f"worker-{rank}"), plan_of(2), rank) for rank in range(2)]
        told = bytes(SECRET) + b"127.0.0.1 1"
        introduced = told + _SEALED + members[1].say(b"127.0.0.1 1")
        client = CoordinatorClient("http://127.0.0.1:1", "a token", SignalSettings())
        checkpoint = Manifest(
            FORMAT, 7, JobIdentity(8, 0, 64, None, {"parameters": [["a", [3], "f"]]}), 10, "ab", "2.13.0"
        )
        tree = {"model": {"weight": torch.ones(3, 2), "n": 2**70}, "list": [1, 2.5, "a", None, (True, float("inf"))]}
        header, tensors = codec.encode(tree)
        packed = codec.pack(tree).numpy().tobytes()

        def unpacked(said: bytes) -> object:
            return codec.unpack(torch.frombuffer(bytearray(said or b"\0"), dtype=torch.uint8))

        failed = TerminationMessage("failed", step=3, metrics={"loss": 0.5}, error="ValueError: a", traceback="File a")
        record = traces.encode(traces.Committed((1, 2), 3, {"a": "b"}, {"loss": "0.5"}))
        manifests = [document for path in (ROOT / "examples").glob("*.yaml") for document in _documents(path)]
        bodies = _as_json(*(ROOT / "examples").glob("*.yaml"))
        yield [
            Reader(
                "messages of workers", framing.unpack_from_worker, [*_wire(), framing.pack(hello("a" * 90))], UNREADABLE
            ),
            Reader("messages to workers", framing.unpack_to_worker, _wire(), UNREADABLE),
            Reader("headers of hellos", read_hello_header, _wire("Hello")),
            Reader("statuses", client._decode, _wire("Status"), (CallRefused,)),
            Reader("termination messages", _ended, [*_wire("TerminationMessage"), encode_termination_message(failed)]),
            Reader(
                "plain frames", plain.reader(plain.plain), [plain.frame(lambda s: Channel(s, "a"))], (VirtualFlowError,)
            ),
            Reader(
                "sealed frames",
                sealed.reader(sealed.sealed),
                [sealed.frame(lambda s: SealedChannel(s, "a", sealed.key, sealed.other))],
                (VirtualFlowError,),
            ),
            Reader("certificates", identity.believe, [certificate], (NotTrusted,), sentence=True, share=0.2),
            Reader(
                "names in certificates", lambda said: Party.read(said.decode("latin-1")), [other.party.uri.encode()]
            ),
            Reader(
                "signatures",
                lambda said: identity.verify("worker-1", CONTENT, said),
                [signed],
                (NotTrusted,),
                sentence=True,
                share=0.2,
            ),
            Reader(
                "rendezvous keys",
                lambda said: _meet(1, said, members[0]),
                [introduced, told],
                (CommunicatorBroken,),
                sentence=True,
                share=0.2,
            ),
            Reader(
                "manifests of checkpoints",
                lambda said: unseal(said, "a"),
                [seal(checkpoint)],
                (ValueError, ConfigurationError),
            ),
            Reader(
                "headers of states",
                lambda said: codec.decode(said, lambda n, *_: tensors[n % len(tensors)]),
                [header],
                (ValueError,),
            ),
            Reader("packed states", unpacked, [packed], (ValueError,)),
            Reader("traces", traces.decode, [record]),
            Reader("reports", lambda said: read_report(said, "a"), [b"{}"], (ConfigurationError,), sentence=True),
            Reader("device profiles", in_file("profile", read_profile), [b"{}"], (ConfigurationError,), sentence=True),
            Reader("jobs of the API server", _json(_job), bodies, share=0.5),
            Reader("queues of the API server", _json(_queue), bodies, share=0.5),
            Reader("quantities", _quantity, [b"1", b"1.5Gi", b"500m", b"1e3", b"1E-3"]),
            Reader("times", _moment, [b"2026-01-02T03:04:05Z", b"2026-01-02T03:04:05.123456Z"]),
            # PyYAML takes seconds for what is long and nested.
            Reader(
                "manifests", in_file("job.yaml", load_manifest), manifests, (ConfigurationError,), True, 0.03, 3_000
            ),
            Reader(
                "manifests for a cluster",
                in_file("object.yaml", read_manifest),
                manifests,
                (ConfigurationError,),
                True,
                0.03,
                3_000,
            ),
        ]
