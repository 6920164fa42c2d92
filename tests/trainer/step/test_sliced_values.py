"""Slices of parameters: what is kept comes back to the bit, the rest takes no memory and is no number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from virtualflow.errors import ConfigurationError
from virtualflow.reduction import Row, Spans, Stretch, intersection, union
from virtualflow.step import SlicedValues

SHAPES = [(3, 5), (1,), (2, 4, 3, 3), (0,), (17,), ()]
UNIT = 4


def made() -> tuple[list[nn.Parameter], Row, list[torch.Tensor]]:
    """Parameters of odd shapes, one of them with its channels last, and a copy of their values."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    parameters[2] = nn.Parameter(torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last))
    units = tuple(UNIT if each.is_contiguous() else 0 for each in parameters)
    row = Row(tuple(each.numel() for each in parameters), (4,) * len(parameters), units)
    return parameters, row, [each.detach().clone(memory_format=torch.preserve_format) for each in parameters]


def sliced(parameters: list[nn.Parameter], row: Row) -> SlicedValues:
    return SlicedValues([f"p{n}" for n in range(len(parameters))], parameters, row)


def held(parameters: list[nn.Parameter]) -> int:
    """Bytes that the model's own tensors take."""
    return sum(each.untyped_storage().nbytes() for each in parameters)


@st.composite
def spans(draw: st.DrawFn) -> Spans:
    """Something of the row, cut where it may be."""
    _, row, _ = made()
    edges = [
        row.offsets[place] + at
        for place, numel in enumerate(row.numels)
        for at in range(0, max(1, numel), row.units[place] or max(1, numel))
    ]
    edges.append(row.offsets[-1])
    chosen = sorted(draw(st.sets(st.sampled_from(edges))))
    return union(zip(chosen[::2], chosen[1::2], strict=False))


@given(spans(), spans())
def test_what_is_kept_is_what_it_was(first: Spans, second: Spans) -> None:
    parameters, row, before = made()
    values = sliced(parameters, row)
    values.keep(first)
    both = intersection(first, second)
    for wanted in (first, both):
        values.keep(wanted)
        assert values.spans == wanted
        for piece in row.pieces(wanted):
            whole = before[piece.place]
            flat = whole.as_strided((whole.numel(),), (1,))[piece.begin : piece.end]
            kept = values.read(piece)
            assert torch.equal(kept.as_strided((kept.numel(),), (1,)), flat)
    for place, parameter in enumerate(parameters):
        if values.is_kept(place):
            assert torch.equal(parameter.detach(), before[place])
        else:
            assert parameter.isnan().all()


@given(spans())
def test_what_comes_back_makes_it_whole(kept: Spans) -> None:
    parameters, row, before = made()
    values = sliced(parameters, row)
    values.keep(kept)
    for piece in row.pieces(row.all):
        if values.is_kept(piece.place):
            continue
        values.open(piece.place)
        values.fill(piece, before[piece.place])
        values.show(piece.place)
        assert torch.equal(parameters[piece.place].detach(), before[piece.place])
        values.free(piece.place)
        assert parameters[piece.place].isnan().all()


def test_what_others_keep_takes_no_memory() -> None:
    parameters, row, before = made()
    values = sliced(parameters, row)
    whole = held(parameters)
    for value in before:
        value.numpy()  # as whoever hashes it does, which makes memory that cannot be given back
    for parameter in parameters:
        parameter.detach().numpy()
    values.keep(((0, UNIT),))
    assert held(parameters) <= 4 * len(parameters) < whole
    values.open(0)
    values.show(0)
    assert parameters[0].untyped_storage().nbytes() == parameters[0].nbytes
    values.free(0)
    assert held(parameters) <= 4 * len(parameters)


def test_slices_are_stepped_in_place() -> None:
    parameters, row, before = made()
    values = sliced(parameters, row)
    piece = Stretch(0, 0, UNIT)
    values.keep(((0, UNIT),))
    values.read(piece).add_(1.0)
    values.open(0)
    values.fill(Stretch(0, UNIT, 15), before[0].view(-1)[UNIT:])
    values.show(0)
    assert torch.equal(parameters[0].detach().view(-1)[:UNIT], before[0].view(-1)[:UNIT] + 1.0)


def test_a_parameter_with_gaps_is_refused_by_name() -> None:
    gappy = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(ConfigurationError, match="parameter p0 has gaps"):
        sliced([gappy], Row((12,), (4,), (0,)))
