"""Sealed frames: what somebody makes of them on their way is refused in one sentence, and none of it is used."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cryptography.exceptions import InvalidTag
from elastic_jobs import ElasticJob, Trained, alone, trained
from meshes import Board, plan_of
from signers import NamedSigner
from test_channel import carry, connections, expect, sealed_pair, send
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import CommunicatorBroken, Damaged
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.transport import channel as channels
from virtualflow.transport import mesh
from virtualflow.transport.channel import Channel, SealedChannel
from virtualflow.transport.key_agreement import Introduction
from virtualflow.transport.mesh import build_mesh
from virtualflow.worker.session import Session

FIRST, SECOND = b"abcdefghijklmnopqrstuv", b"ABCDEFGHIJKLMNOPQRSTUV"
"""Frames of three pieces each, under :func:`small_pieces`."""
PIECES = [24, 8 + 16, 8 + 16, 6 + 16]
"""Bytes that such a frame is made of."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "PIECE", 8)


class Recorded:
    """Introductions of two members, and what a channel between them would put on the wire."""

    def __init__(self, plan: m.Plan | None = None) -> None:
        self.members = [Introduction(NamedSigner(f"worker-{rank}"), plan or plan_of(2), rank) for rank in range(2)]
        said = [member.say(b"somewhere 1") for member in self.members]
        for rank, member in enumerate(self.members):
            member.meet(1 - rank, b"somewhere 1", said[1 - rank])

    def frames(self, *contents: bytes, sender: int = 0, lane: int = 0) -> list[bytes]:
        """Each frame, as it leaves."""
        ours, theirs = connections()
        channel, found = self.members[sender].open_channel(ours, 1 - sender, lane), []
        theirs.settimeout(10.0)
        for content in contents:
            sent = send(channel, content)
            carry(channel, until=lambda sent=sent: not sent.left)
            size = 24 + sum(
                len(content[at : at + channels.PIECE]) + 16 for at in range(0, len(content), channels.PIECE)
            )
            found.append(theirs.recv(size, socket.MSG_WAITALL))
        channel.close()
        theirs.close()
        return found

    def arrive(self, raw: bytes, *sizes: int) -> list[bytearray]:
        """What member 1 makes of these bytes, in the place of frames of member 0."""
        ours, theirs = connections()
        channel = self.members[1].open_channel(ours, 0, 0)
        theirs.sendall(raw)
        theirs.close()
        found, arrives = expect(channel, *sizes)
        try:
            carry(channel, until=lambda: not arrives.left)
        except CommunicatorBroken:
            assert arrives.left, "it would be used"
            raise
        finally:
            channel.close()
        return found


def plaintext(*_: Any) -> bytes:
    ours, theirs = connections()
    send(channel := Channel(ours, "worker-0"), FIRST)
    channel.advance()
    return theirs.recv(1_000)


OTHERS = {
    "a frame comes again": lambda wire, one, two: one + one,
    "a frame is lost": lambda wire, one, two: two,
    "frames change places": lambda wire, one, two: two + one,
    "a frame is truncated": lambda wire, one, two: one[:-1] + two,
    "pieces change places": lambda wire, one, two: one[:24] + one[48:72] + one[24:48] + one[72:],
    "a piece comes again": lambda wire, one, two: one[:48] + one[24:48] + one[72:],
    "a piece of another frame": lambda wire, one, two: one[:48] + two[48:72] + one[72:],
    "of the other lane": lambda wire, one, two: wire.frames(FIRST, lane=1)[0],
    "the receiver's own": lambda wire, one, two: wire.frames(FIRST, sender=1)[0],
    "of a former generation": lambda wire, one, two: Recorded().frames(FIRST)[0],
    "in plaintext": lambda wire, one, two: plaintext(),
    "noise": lambda wire, one, two: bytes(range(94)),
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_frames_that_somebody_meddles_with_are_refused(
    small_pieces: None, others: Callable[[Recorded, bytes, bytes], bytes]
) -> None:
    wire = Recorded()
    one, two = wire.frames(FIRST, SECOND)
    assert [bytes(content) for content in wire.arrive(one + two, len(FIRST), len(SECOND))] == [FIRST, SECOND]
    with pytest.raises(Damaged, match="bytes from worker-0 arrived damaged: their seal does not hold"):
        wire.arrive(others(wire, one, two), len(FIRST), len(SECOND))


def test_each_bit_of_a_sealed_frame_is_held_by_its_seal(small_pieces: None) -> None:
    wire = Recorded()
    (frame,) = wire.frames(FIRST)
    assert len(frame) == sum(PIECES)
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            wire.arrive(bytes(flipped), len(FIRST))


def test_a_frame_that_ends_early_is_not_used(small_pieces: None) -> None:
    wire = Recorded()
    (frame,) = wire.frames(FIRST)
    with pytest.raises(CommunicatorBroken, match="worker-0 has closed its connection"):
        wire.arrive(frame[:-1], len(FIRST))


def test_keys_end_with_their_channel() -> None:
    left, right = sealed_pair()
    send(left, b"abc")
    left.advance()
    raw = memoryview(bytearray(right._connection.recv(24)))
    left.close()
    right.close()
    assert isinstance(right, SealedChannel)
    with pytest.raises(InvalidTag):
        right._receiving.open(raw, b"head", bytearray(8))


# --- who is let in ----------------------------------------------------------------------------------------------------


def told(board: Board, rank: int, signer: NamedSigner | None, plan: m.Plan | None = None) -> None:
    """Publish what that member would, without waiting for anybody."""
    introduction = None if signer is None else Introduction(signer, plan or plan_of(2), rank)
    with pytest.raises(CommunicatorBroken, match="not all come"):
        build_mesh(Alone(board), rank, 2, "127.0.0.1", 0.0, introduction=introduction)


class Alone(Board):
    """The rendezvous of one who finds nobody there."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self.publish = board.publish  # type: ignore[method-assign]

    def wait(self, keys: Any, timeout: float) -> list[bytes]:
        raise CommunicatorBroken("they have not all come")


def former(plan: m.Plan) -> m.Plan:
    return msgspec.structs.replace(plan, generation=m.Generation(1, plan.generation.counter - 1))


def replaced(plan: m.Plan) -> m.Plan:
    members = tuple(msgspec.structs.replace(member, incarnation="former") for member in plan.members)
    return msgspec.structs.replace(plan, members=members)


UNSIGNED = "worker-0 has not shown that it is worker-0: worker-0 of a job has not signed this"
PRETENDERS: dict[str, tuple[NamedSigner | None, Callable[[m.Plan], m.Plan], str]] = {
    "another worker of the job": (NamedSigner("worker-1"), lambda plan: plan, UNSIGNED),
    "the same name in another job": (NamedSigner("worker-0", "another job"), lambda plan: plan, UNSIGNED),
    "a key of a former generation": (NamedSigner("worker-0"), former, UNSIGNED),
    "a former process of the name": (NamedSigner("worker-0"), replaced, UNSIGNED),
    "a plaintext peer": (None, lambda plan: plan, "member 0 sends in plaintext and this one seals what it sends: "),
}


@pytest.mark.parametrize(("signer", "of", "sentence"), PRETENDERS.values(), ids=PRETENDERS)
def test_a_member_that_is_not_who_it_says_is_not_dialled(
    monkeypatch: pytest.MonkeyPatch, signer: NamedSigner | None, of: Callable[[m.Plan], m.Plan], sentence: str
) -> None:
    board = Board()
    told(board, 0, signer, of(plan_of(2)))
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it dials"))
    introduction = Introduction(NamedSigner("worker-1"), plan_of(2), 1)
    with pytest.raises(CommunicatorBroken, match=sentence):
        build_mesh(board, 1, 2, "127.0.0.1", 20.0, introduction=introduction)


def test_an_address_that_somebody_else_put_in_a_members_place_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    told(board, 0, NamedSigner("worker-0"))
    board.values["member-0"] = board.values["member-0"].replace(b"127.0.0.1", b"127.0.0.9")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it dials"))
    with pytest.raises(CommunicatorBroken, match=UNSIGNED):
        build_mesh(board, 1, 2, "127.0.0.1", 20.0, introduction=Introduction(NamedSigner("worker-1"), plan_of(2), 1))


def test_a_plaintext_member_refuses_one_that_seals() -> None:
    board = Board()
    told(board, 0, NamedSigner("worker-0"))
    with pytest.raises(CommunicatorBroken, match="member 0 seals what it sends and this one sends in plaintext: "):
        build_mesh(board, 1, 2, "127.0.0.1", 20.0)


def test_who_knows_what_the_coordinator_knows_is_not_let_in() -> None:
    board = Board()
    plan = plan_of(2)
    members = [Introduction(NamedSigner(f"worker-{rank}"), plan, rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(build_mesh, board, 0, 2, "127.0.0.1", 60.0, introduction=members[0])
        (value,) = board.wait(["member-0"], 60.0)
        secret, port = value[:16], int(value[16:].partition(b"\0")[0].rsplit(b" ", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(secret + bytes([1, 0, 0, 0, 0]))
            second = threads.submit(build_mesh, board, 1, 2, "127.0.0.1", 60.0, introduction=members[1])
            lanes = first.result(), second.result()
            stranger.settimeout(60.0)
            assert stranger.recv(1) == b""
        for mine, theirs in zip(*lanes, strict=True):
            mine[1].sendall(b"hello")
            assert theirs[0].recv(5) == b"hello"
            mine[1].close()
            theirs[0].close()


# --- jobs -------------------------------------------------------------------------------------------------------------

SAID = b"what is in the state of this job "


def seal_all(recorded: Path | None, sealed: bool) -> None:
    """Let this process seal what it sends; whatever passes its connections is kept in ``recorded``."""
    if sealed:
        signer, begin = NamedSigner(os.environ[ENV_WORKER]), Session.__init__

        def begin_sealed(self: Session, *given: Any, **named: Any) -> None:
            begin(self, *given, **{**named, "signer": signer})

        Session.__init__ = begin_sealed  # type: ignore[method-assign, assignment]
    if recorded is not None:
        mesh._connect = partial(connect_by_tap, mesh._connect, recorded)  # type: ignore[attr-defined]


def connect_by_tap(connect: Callable[..., socket.socket], recorded: Path, where: bytes, *rest: Any) -> socket.socket:
    """Connect through a relay of this process, which writes down what passes."""
    host, port = where.decode().rsplit(" ", 1)
    listener = socket.create_server(("127.0.0.1", 0))
    connection = connect(f"127.0.0.1 {listener.getsockname()[1]}".encode(), *rest)
    ends = listener.accept()[0], socket.create_connection((host, int(port)))
    listener.close()
    for here, there in (ends, ends[::-1]):
        threading.Thread(target=pass_on, args=(here, there, recorded), daemon=True).start()
    return connection


def pass_on(here: socket.socket, there: socket.socket, recorded: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=recorded, delete=False, buffering=0) as file, suppress(OSError):
        while said := here.recv(1 << 16):
            file.write(said)
            there.sendall(said)
        there.shutdown(socket.SHUT_RDWR)


class Known(nn.Module):
    """Has a state that anybody would find, and gradients of one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2_000,), 0.1234567))
        self.register_buffer("said", torch.frombuffer(bytearray(SAID * 40), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * self.weight.sum()


def train(steps: int, recorded: Path | None = None, sealed: bool = False) -> Trained:
    if ENV_WORKER in os.environ:
        seal_all(recorded, sealed)
    torch.manual_seed(0)
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = TensorDataset(torch.rand(48, generator=torch.Generator().manual_seed(0)))
    with vf.elastic(model, optimizer, dataset, batch_size=12, steps=steps, virtual_nodes=4) as run:
        for step in run:
            for (x,) in step:
                model(x).backward()
    return trained(run, model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plaintext"])
def test_a_sniffer_finds_neither_gradients_nor_state_in_a_sealed_job_of_the_same_bits(
    start_job: Callable[..., ElasticJob], tmp_path: Path, sealed: bool
) -> None:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    job = start_job(train, 8, recorded, sealed, workers=2, hold=2)
    job.reach(2)
    job.join()
    job.reach(4)
    job.kill("worker-1")
    job.reach(6)
    assert set(map(astuple, job.results())) == {astuple(alone(train, 8))}
    wire = b"".join(file.read_bytes() for file in recorded.iterdir())
    assert len(wire) > 100_000, "gradients of eight steps, and a state"
    gradients = re.search(rb"(?s)(?!\0{4})(.{4})\1{30}", wire)
    assert (gradients is None, SAID not in wire) == (sealed, sealed)
