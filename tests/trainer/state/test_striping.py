"""Which bytes of a state go which way: who gives how much to whom, and a state taken apart and put together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import assert_same, captured, small_model

from virtualflow.state import codec
from virtualflow.state.striping import (
    Piece,
    Round,
    announce,
    describe,
    join,
    layout_hash,
    plan_rounds,
    share_out,
    size_of,
    split,
)

# --- who sends what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("donors", "receivers", "wanted"),
    [
        pytest.param((0, 1), (), (), id="nobody lacks it"),
        pytest.param((0, 2), (1,), (Round((0, 2), (1,)),), id="all donors give to one joiner at once"),
        pytest.param((0, 1), (2, 3), (Round((0, 1), (2, 3)),), id="as many at once as there are donors"),
        pytest.param(
            (4,),
            (0, 1, 2, 3),
            (Round((4,), (0,)), Round((4, 0), (1, 2)), Round((4, 0, 1, 2), (3,))),
            id="who has received gives in the next round",
        ),
    ],
)
def test_rounds(donors: tuple[int, ...], receivers: tuple[int, ...], wanted: tuple[Round, ...]) -> None:
    assert plan_rounds(donors, receivers) == wanted


@pytest.mark.parametrize(
    ("sizes", "donors", "most", "wanted"),
    [
        pytest.param([100], 1, 1_000, [[Piece(0, 0, 100)]], id="one donor sends everything"),
        pytest.param([256], 2, 1_000, [[Piece(0, 0, 128)], [Piece(0, 128, 256)]], id="two halves of one tensor"),
        pytest.param(
            [128, 256, 128],
            2,
            1_000,
            [[Piece(0, 0, 128), Piece(1, 0, 128)], [Piece(1, 128, 256), Piece(2, 0, 128)]],
            id="a tensor on the border is cut",
        ),
        pytest.param([300], 1, 128, [[Piece(0, 0, 128), Piece(0, 128, 256), Piece(0, 256, 300)]], id="no large pieces"),
        pytest.param([40], 3, 64, [[Piece(0, 0, 40)], [], []], id="too small to be cut"),
        pytest.param([], 2, 64, [[], []], id="nothing is large"),
    ],
)
def test_shares(sizes: list[int], donors: int, most: int, wanted: list[list[Piece]]) -> None:
    assert share_out(sizes, donors, most) == wanted


@given(st.lists(st.integers(0, 3_000), max_size=12), st.integers(1, 9), st.sampled_from([64, 320, 10_000]))
def test_shares_are_equal_and_hold_every_byte_once(sizes: list[int], donors: int, most: int) -> None:
    shares = share_out(sizes, donors, most)
    pieces = [piece for share in shares for piece in share]
    covered = Counter((piece.index, byte) for piece in pieces for byte in range(piece.begin, piece.end))
    assert covered == Counter((index, byte) for index, size in enumerate(sizes) for byte in range(size))
    assert all(0 < piece.end - piece.begin <= most and piece.begin % 64 == 0 for piece in pieces)
    weights = [sum(piece.end - piece.begin for piece in share) for share in shares]
    assert len(shares) == donors
    assert max(weights) - min(weights) <= 3 * 64


@given(st.integers(1, 6), st.integers(0, 40))
def test_all_receive_in_as_few_rounds_as_if_each_donor_served_one(donors: int, receivers: int) -> None:
    ranks = list(range(donors + receivers))
    rounds = plan_rounds(ranks[:donors], ranks[donors:])
    have = set(ranks[:donors])
    for turn in rounds:
        assert set(turn.donors) == have, "a donor must have the state"
        assert len(turn.receivers) <= len(turn.donors)
        have |= set(turn.receivers)
    assert have == set(ranks)
    assert 2 ** max(0, len(rounds) - 1) * donors < donors + receivers or not receivers


# --- taken apart and put together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0, 40, 256, 10**6])
def test_a_state_without_its_large_tensors_and_those_make_the_state(least: int) -> None:
    tree = captured(*small_model())
    before = codec.snapshot(tree)
    thin, stripes = split(tree, least)
    assert all(size_of(tensor) >= least for tensor in stripes.values())
    assert_same(tree, before)  # the capture itself is not changed
    block = codec.pack({"tree": thin, "stripes": describe(stripes)})
    content = codec.unpack(block)
    announced = announce(content["stripes"])
    assert [(t.shape, t.dtype) for t in announced.values()] == [(t.shape, t.dtype) for t in stripes.values()]
    join(content["tree"], {path: stripes[path] for path in announced})
    assert_same(content["tree"], before)


def test_the_order_in_which_a_donor_has_its_optimizers_state_makes_no_other_layout() -> None:
    tree = captured(*small_model())
    turned = {**tree, "optimizer": {**tree["optimizer"], "state": dict(reversed(tree["optimizer"]["state"].items()))}}
    assert layout_hash(describe(split(tree, 40)[1])) == layout_hash(describe(split(turned, 40)[1]))


def test_two_tensors_of_one_shape_in_other_places_make_another_layout() -> None:
    tree = captured(*small_model())
    renamed = {**tree, "parameters": {f"x.{name}": value for name, value in tree["parameters"].items()}}
    assert layout_hash(describe(split(tree, 40)[1])) != layout_hash(describe(split(renamed, 40)[1]))


@pytest.mark.parametrize(
    "strange",
    [
        torch.zeros(6, 7).t(),
        torch.zeros(1).expand(100),
        torch.zeros(50, dtype=torch.complex64).conj(),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ],
    ids=["transposed", "expanded", "conjugated", "channels last"],
)
def test_a_tensor_that_is_not_its_bytes_in_a_row_travels_in_the_block(strange: torch.Tensor) -> None:
    tree = captured(*small_model())
    tree["parameters"]["strange"] = strange
    thin, stripes = split(tree, 0)
    assert ("parameters", "strange") not in stripes
    assert thin["parameters"]["strange"] is strange


@pytest.mark.parametrize("described", [[["a"]], [[["a"], "float99", [1]]], [[["a"], "float32", ["x"]]], 3])
def test_what_does_not_describe_tensors_is_refused(described: Any) -> None:
    with pytest.raises(ValueError, match="does not describe"):
        announce(described)
