"""Shares of a checkpoint: whatever way parameters are cut to be written, all cuts of them can be read, or damage is."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import IDENTITY, Clock, flip, steps_in, truncate
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers import examples
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.messages import Generation
from virtualflow.state import checkpoint_format, checkpoint_shares, codec
from virtualflow.state.checkpoint_format import JobIdentity, find_newest, load
from virtualflow.state.checkpoint_order import Mark, hidden_share
from virtualflow.state.checkpoint_shares import OwnShare, Places, SavedPiece, ShareFile, ShareFiles, write_share
from virtualflow.state.checkpoint_writer import CheckpointPolicy, CheckpointWriter, WriterState

GRAIN = 4
SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 8), "scalar": (), "none": (0, 3), "b": (40,), "c": (2, 2)}
SIGNATURE = {
    "parameters": {name: {"shape": list(shape), "dtype": "float32"} for name, shape in SHAPES.items()},
    "groups": [["b", "a"], ["scalar", "none"]],
}
DIVIDED: JobIdentity = dataclasses.replace(IDENTITY, signature=SIGNATURE)
PLACES = Places(SIGNATURE)
GENERATION = Generation(5, 1)


def whole(name: str, step: int) -> SavedPiece:
    """A parameter of which each element tells where it is, and the step; nobody has stepped ``c``."""
    numel = math.prod(SHAPES[name])
    value = (torch.arange(numel) + 1000.0 * step).view(SHAPES[name])
    state = {
        "average": value + 0.5,
        "scales": torch.arange(-(-numel // GRAIN)) + 0.25,
        "steps": torch.tensor(float(step)),
        "plain": 7,
    }
    grains = {"average": 1, "scales": GRAIN, "steps": 0}
    return SavedPiece(name, 0, numel, value, None if name == "c" else state, grains, ("steps",))


def cut(cuts: Sequence[int], members: int, step: int) -> list[OwnShare]:
    """Shares of a row that is cut at some of the places where it may be, given out in turn."""
    pieces: list[SavedPiece] = []
    for name in SHAPES:
        parameter = whole(name, step)
        offset = PLACES.offsets[name]
        edges = [0, *(at - offset for at in sorted({*cuts}) if 0 < at - offset < parameter.end), parameter.end]
        edges = [0, *(edge for edge in edges[1:-1] if edge % GRAIN == 0), parameter.end]
        pieces += [parameter.cut(begin, end) for begin, end in pairwise(edges)]
    shares = []
    for number in range(members):
        own = pieces[number::members]
        spans = tuple(PLACES.span(piece.name, piece.begin, piece.end) for piece in own)
        shares.append(OwnShare(number, members, own, spans))
    return shares


def writer_to(directory: Path, events: list[str], generation: Generation = GENERATION) -> CheckpointWriter:
    policy = CheckpointPolicy(directory, every_steps=1, keep=3)
    writer = CheckpointWriter(policy, DIVIDED, events.append, Clock(), lambda step, failure: None)
    writer.generation = generation
    return writer


def tree(step: int) -> dict[str, Any]:
    groups = [{"params": [0, 1], "lr": 0.1}, {"params": [2, 3], "lr": 0.2}]
    optimizer = {"state": {}, "param_groups": groups}
    return {"parameters": {}, "buffers": {"seen": torch.tensor(step)}, "optimizer": optimizer, "hosted": []}


def save(directory: Path, step: int = 1, cuts: Sequence[int] = (20, 40), members: int = 3) -> Path:
    """Let workers write a checkpoint together."""
    directory.mkdir(exist_ok=True)
    events: list[str] = []
    owns = cut(cuts, members, step)
    leader, *peers = [writer_to(directory, events) for _ in owns]
    assert all(peer.save_share_now(step, own) for peer, own in zip(peers, owns[1:], strict=True))
    assert leader.save(step, tree(step), owns[0])
    assert leader.flush(60)
    assert events == []
    assert leader.newest == step
    return directory / Mark(GENERATION, step).name


def assert_same(one: Any, other: Any) -> None:
    assert codec.flatten(one, canonical=True)[0] == codec.flatten(other, canonical=True)[0]
    for left, right in zip(codec.flatten(one)[1], codec.flatten(other)[1], strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


CUTS = st.lists(st.integers(1, PLACES.length - 1), max_size=8)


@settings(max_examples=examples(50))
@given(cuts=CUTS, members=st.integers(1, 9), begin=st.integers(0, 40), end=st.integers(0, 40))
def test_what_is_cut_in_one_way_is_read_in_every_other(
    cuts: list[int], members: int, begin: int, end: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("cuts")
    path = save(directory, 2, cuts, members)
    found = find_newest(directory, print, DIVIDED)
    assert found is not None
    assert found.path == path
    loaded = load(found)
    for name in SHAPES:
        assert_same(loaded["parameters"][name], whole(name, 2).value)
    numbers = {"b": 0, "a": 1, "scalar": 2, "none": 3}
    assert_same(loaded["optimizer"]["state"], {numbers[name]: whole(name, 2).state for name in SHAPES if name != "c"})
    assert sorted(loaded["hosted"]) == [[number, "steps"] for number in range(4)]
    assert loaded["buffers"]["seen"] == 2
    begin, end = min(begin, end) // GRAIN * GRAIN, max(begin, end)
    if begin < end:
        pieces = found.open_shares.read("b", begin, end)
        assert [pieces[0].begin, pieces[-1].end] == [begin, end]
        for piece in pieces:
            expected = whole("b", 2).cut(piece.begin, piece.end)
            assert_same([piece.value, piece.state], [expected.value, expected.state])


SPANS: dict[str, tuple[Sequence[Sequence[tuple[int, int]]], str]] = {
    "all in one": ([[(0, PLACES.length)]], ""),
    "in turn": ([[(0, 5), (9, 20)], [(5, 9), (20, PLACES.length)]], ""),
    "one without any": ([[(0, PLACES.length)], []], ""),
    "a gap": ([[(0, 5)], [(6, PLACES.length)]], "6-70 follows 5"),
    "a stretch twice": ([[(0, 7)], [(6, PLACES.length)]], "6-70 follows 7"),
    "too short": ([[(0, 5)]], "5 of 70 elements"),
    "too long": ([[(0, PLACES.length + 1)]], "71 of 70 elements"),
    "backwards": ([[(0, 5), (5, 3)], [(5, PLACES.length)]], "5-3 follows 5"),
    "an empty one": ([[(0, 5), (5, 5)], [(5, PLACES.length)]], "5-5 follows 5"),
    "nothing": ([], "0 of 70 elements"),
}


@pytest.mark.parametrize(("spans", "sentence"), SPANS.values(), ids=SPANS.keys())
def test_a_manifest_has_each_place_of_the_row_once(spans: Any, sentence: str) -> None:
    shares = [ShareFile(f"share-{number}", 1, "", tuple(of)) for number, of in enumerate(spans)]
    if not sentence:
        PLACES.check(shares)
        return
    with pytest.raises(ValueError, match=sentence):
        PLACES.check(shares)


def share_of(path: Path, number: int = 1) -> Path:
    return sorted(path.glob("share-*"))[number]


def swap(path: Path) -> None:
    """Put a share of an older checkpoint of the same size in the place of one."""
    older = path.with_name(Mark(GENERATION, 1).name)
    assert share_of(older).stat().st_size == share_of(path).stat().st_size
    share_of(path).write_bytes(share_of(older).read_bytes())


def exchange(path: Path) -> None:
    first, second = share_of(path, 0), share_of(path, 1)
    first.rename(path / "other")
    second.rename(first)
    (path / "other").rename(second)


def in_place_of(file: Path, make: Callable[[Path], None]) -> None:
    file.unlink()
    make(file)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped at its end": lambda path: flip(share_of(path), -1),
    "flipped in its header": lambda path: flip(share_of(path), 30),
    "flipped in its length": lambda path: flip(share_of(path), 0),
    "cut": lambda path: truncate(share_of(path), 100),
    "empty": lambda path: truncate(share_of(path), 0),
    "missing": lambda path: share_of(path).unlink(),
    "a pipe": lambda path: in_place_of(share_of(path), os.mkfifo),
    "a share of another mark": swap,
    "two that have changed places": exchange,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_checkpoint_with_a_damaged_share_is_no_checkpoint(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    events: list[str] = []
    found = find_newest(tmp_path, events.append, DIVIDED)
    assert found is not None
    if found.step == 2:
        with pytest.raises(ValueError, match="share-"):
            load(found)
        with pytest.raises(ValueError, match="share-"):
            found.open_shares.verify()
        found = find_newest(tmp_path, events.append, DIVIDED, damaged=[2])
    else:
        assert "skipped the damaged checkpoint" in events[0]
    assert found is not None
    assert found.step == 1
    assert_same(load(found)["parameters"]["b"], whole("b", 1).value)


def test_whoever_needs_nothing_of_a_damaged_share_reads_the_others(tmp_path: Path) -> None:
    path = save(tmp_path, 1, cuts=(), members=len(SHAPES))
    flip(share_of(path, 0), -1)
    found = find_newest(tmp_path, print, DIVIDED)
    assert found is not None
    assert_same(found.open_shares.read_whole("b").value, whole("b", 1).value)
    with pytest.raises(ValueError, match="the content of share-00000-of-00005"):
        found.open_shares.read_whole("a")


def test_a_checkpoint_appears_when_the_last_share_is_there(tmp_path: Path) -> None:
    events: list[str] = []
    leader, peer = writer_to(tmp_path, events), writer_to(tmp_path, events)
    own = cut((20,), 2, 1)
    assert leader.save(1, tree(1), own[0])
    assert until(leader, WriterState.WAITING)
    assert steps_in(tmp_path) == []
    assert peer.save(1, None, own[1])
    assert leader.flush(60)
    assert steps_in(tmp_path) == [1]
    assert (leader.newest, peer.newest) == (1, None)
    assert [path.name for path in tmp_path.iterdir()] == [Mark(GENERATION, 1).name]
    assert events == []


def until(writer: CheckpointWriter, state: WriterState) -> bool:
    """Wait until a writer has come so far."""
    for _ in range(10_000):
        if writer.tell_state() == state:
            return True
        writer.flush(0.01)
    return False


@pytest.mark.parametrize("how", ["given up", "another generation"])
def test_a_checkpoint_whose_share_never_comes_does_not_appear(how: str, tmp_path: Path) -> None:
    events: list[str] = []
    leader = writer_to(tmp_path, events)
    leader.save(1, tree(1), cut((20,), 2, 1)[0])
    assert until(leader, WriterState.WAITING)
    if how == "given up":
        leader.give_up()
        leader.flush(60)
    else:
        leader.generation = Generation(5, 2)
    assert leader.tell_state() == WriterState.DONE
    assert list(tmp_path.iterdir()) == []
    assert [event.partition(": ")[2] for event in events] == ["not all workers have written their shares of it"]
    assert leader.failure is None


def test_a_share_that_cannot_be_written_is_told_and_the_next_one_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    leader, peer = writer_to(tmp_path, events), writer_to(tmp_path, events)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_shares, "save_file", full)
        peer.save(1, None, cut((20,), 2, 1)[1])
        peer.flush(60)
    leader.save(1, tree(1), cut((20,), 2, 1)[0])
    assert until(peer, WriterState.FAILED)
    assert until(leader, WriterState.WAITING)
    assert "the checkpoint of step 1 was not written" in events[0]
    assert "free some space there" in events[0]
    leader.give_up()
    assert leader.flush(60)
    assert peer.save(2, None, cut((20,), 2, 2)[1])
    assert leader.save(2, tree(2), cut((20,), 2, 2)[0])
    assert leader.flush(60)
    assert until(peer, WriterState.DONE)
    assert steps_in(tmp_path) == [2]


def test_shares_of_the_living_are_no_leftovers_and_those_of_the_dead_are(tmp_path: Path) -> None:
    mark, own = Mark(GENERATION, 1), cut((20,), 2, 1)[1]
    held = write_share(tmp_path, mark, own)
    writer_to(tmp_path, []).check_writable()
    assert hidden_share(tmp_path, mark, 1).exists()
    held._lock.close()  # as the end of its process does
    writer_to(tmp_path, []).check_writable()
    assert list(tmp_path.iterdir()) == []


def test_a_share_that_says_it_is_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    own = cut((20,), 2, 1)
    held = write_share(tmp_path, Mark(GENERATION, 3), own[1])
    hidden_share(tmp_path, Mark(GENERATION, 3), 1).rename(hidden_share(tmp_path, Mark(GENERATION, 1), 1))
    events: list[str] = []
    leader = writer_to(tmp_path, events)
    leader.save(1, tree(1), own[0])
    assert leader.flush(60)
    assert steps_in(tmp_path) == []
    assert "is not a share of the checkpoint" in events[0]
    held.release()


def test_older_readers_refuse_it_instead_of_taking_it_for_an_empty_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)
    monkeypatch.setattr(checkpoint_format, "DIVIDED", 1)
    with pytest.raises(ConfigurationError, match="has format 2 and this version of VirtualFlow reads"):
        find_newest(path.parent, print)


def test_a_whole_checkpoint_is_one_for_older_readers(tmp_path: Path) -> None:
    writer = writer_to(tmp_path, [])
    assert writer.save_now(1, tree(1))
    manifest = tmp_path / Mark(GENERATION, 1).name / "manifest.json"
    assert '"format": 1,' in manifest.read_text()


def test_a_header_that_tells_other_stretches_than_the_manifest_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1, cuts=(), members=2)
    found = find_newest(tmp_path, print, DIVIDED)
    assert found is not None
    one, other = found.shares
    lying = [one, ShareFile(other.file, other.size, other.sha256, one.spans)]
    moved = ShareFiles(path, [ShareFile(one.file, one.size, one.sha256, other.spans), lying[1]], SIGNATURE)
    with pytest.raises(ValueError, match="do not have"):
        moved.read_whole("a")
