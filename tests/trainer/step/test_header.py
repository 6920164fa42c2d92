"""What travels beside the gradients arrives as it was sent, and every virtual node starts from the same buffers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tiers import examples
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.messages import NO_GENERATION, Generation
from virtualflow.reduction.accumulation import CanonicalSummation
from virtualflow.step.buffers import BufferTracker
from virtualflow.step.header import (
    HeaderFormat,
    Kind,
    NodeRecord,
    Schema,
    StepHeader,
    combine_metrics,
    layout_hash,
    read_weights,
)

# --- headers ----------------------------------------------------------------------------------------------------------

NAMES = ["loss", "accuracy", "größe", ""]


def double(value: float) -> bytes:
    """The bits of a number, in which a NaN equals itself."""
    return struct.pack("<d", value)


@st.composite
def records(draw: st.DrawFn) -> list[NodeRecord]:
    metrics = st.dictionaries(st.sampled_from(NAMES), st.floats(), max_size=len(NAMES))
    return [
        NodeRecord(
            draw(st.integers(0, 2**40)),
            draw(metrics),
            {},
            {"seen": torch.tensor([node, -node])},
            told=draw(st.none() | st.floats(0, 1e300)),
        )
        for node in range(draw(st.integers(1, 6)))
    ]


@settings(max_examples=examples(80), deadline=None)
@given(
    records=records(),
    schema_names=st.sets(st.sampled_from(NAMES)),
    present=st.lists(st.booleans(), max_size=20),
    numbers=st.tuples(*[st.integers(0, 2**53)] * 4),
    flags=st.tuples(*[st.booleans()] * 4),
    spare=st.integers(0, 3),
    copies=st.booleans(),
    alignment=st.sampled_from([1, 8, 16, 64]),
)
def test_a_step_header_is_read_as_it_was_written(
    records: list[NodeRecord],
    schema_names: set[str],
    present: list[bool],
    numbers: tuple[int, int, int, int],
    flags: tuple[bool, bool, bool, bool],
    spare: int,
    copies: bool,
    alignment: int,
) -> None:
    schema = Schema(tuple(sorted(schema_names)), (), ("seen",) if copies else ())
    form = HeaderFormat(schema, len(present), len(records) + spare, 16 if copies else 0, alignment, 3)
    for node, record in enumerate(records):
        record.switched = frozenset(place for place in range(len(present)) if (place + node) % 3 == 0)
    sums = [bytes([node % 256, 7, 0]) for node in range(len(records))]
    exchange, layout, incarnation, counter = numbers
    named = dict(zip(("wishes", "more", "steady", "saves"), flags, strict=True))
    offer = Generation(incarnation, counter)
    told = form.tell(
        Kind.EVALUATE, exchange, offer, layout=layout, present=present, records=records, summed=sums, **named
    )
    block = form.write(told)
    assert block.dtype == torch.uint8
    assert block.numel() == form.size
    assert form.size % alignment == 0
    header = form.read(block)
    assert (header.kind, header.exchange, header.layout) == (Kind.EVALUATE, exchange, layout)
    assert header.offer == Generation(incarnation, counter)
    assert (header.wishes, header.more, header.steady, header.saves) == flags
    assert header.samples == tuple(record.samples for record in records)
    assert header.told == tuple(record.told for record in records)
    assert header.weights == tuple(record.weight for record in records)
    assert header.present == tuple(present)
    for record, row in zip(records, header.metrics, strict=True):
        for name, (value, there) in zip(schema.metrics, row, strict=True):
            assert there == (name in record.metrics)
            assert double(value) == double(float(record.metrics.get(name, 0.0)))
    first = next((node for node, record in enumerate(records) if record.samples), None)
    assert header.switched == (frozenset() if first is None else records[first].switched)
    assert header.summed == tuple(sums)
    if copies and first is not None:
        assert header.copied == struct.pack("<2q", first, -first)
    else:
        assert header.copied == bytes(form.copied_bytes)


def test_step_headers_of_one_generation_have_one_size_however_much_a_worker_carries() -> None:
    form = HeaderFormat(Schema(("loss",)), 9, 5, 0, 16)
    sizes = {
        form.write(
            form.tell(Kind.TRAIN, 1, NO_GENERATION, present=[True] * places, records=[NodeRecord()] * nodes)
        ).numel()
        for nodes in range(6)
        for places in range(10)
    }
    assert sizes == {form.size}


def header(samples: list[int], rows: list[list[float | None]], weights: list[float | None] | None = None) -> StepHeader:
    metrics = tuple(tuple((0.0 if v is None else v, v is not None) for v in row) for row in rows)
    form = HeaderFormat(Schema(), 0, len(samples), 0, 16)
    told = form.tell(Kind.TRAIN, 1, NO_GENERATION, records=[NodeRecord(count) for count in samples])
    return replace(told, metrics=metrics, told=tuple(weights or [None] * len(samples)))


def hand_mean(samples: list[int], values: list[float | None]) -> float | None:
    """A weighted mean, added up half by half."""

    def total(left: int, right: int) -> tuple[float, float]:
        if right - left == 1:
            value = values[left]
            return (0.0, 0.0) if value is None or not samples[left] else (value * samples[left], float(samples[left]))
        middle = (left + right) // 2
        a, b = total(left, middle), total(middle, right)
        return a[0] + b[0], a[1] + b[1]

    above, below = total(0, len(values))
    return above / below if below else None


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data(), virtual_nodes=st.integers(1, 17))
def test_metrics_are_means_over_samples_summed_in_the_shape_of_the_tree(
    data: st.DataObject, virtual_nodes: int
) -> None:
    samples = data.draw(st.lists(st.integers(0, 300), min_size=virtual_nodes, max_size=virtual_nodes))
    number = st.none() | st.floats(-1e9, 1e9)
    columns = data.draw(
        st.lists(st.lists(number, min_size=virtual_nodes, max_size=virtual_nodes), min_size=1, max_size=3)
    )
    rows = [[column[node] for column in columns] for node in range(virtual_nodes)]
    cut = data.draw(st.integers(0, virtual_nodes))
    schema = Schema(tuple("abc"[: len(columns)]))
    wanted = {
        name: mean
        for name, column in zip(schema.metrics, columns, strict=True)
        if (mean := hand_mean(samples, column)) is not None
    }
    one = [header(samples, rows)]
    two = [header(samples[:cut], rows[:cut]), header(samples[cut:], rows[cut:])]
    for headers in (one, two):
        combined = combine_metrics(schema, CanonicalSummation(virtual_nodes), headers)
        assert {name: double(value) for name, value in combined.items()} == {
            name: double(value) for name, value in wanted.items()
        }


def test_a_metric_that_some_virtual_nodes_did_not_log_is_the_mean_over_the_others() -> None:
    schema = Schema(("all", "nobody", "some"))
    headers = [
        header([4, 2], [[1.0, None, None], [4.0, None, 7.0]]),
        header([2, 0], [[5.0, None, 3.0], [9.0, None, 9.0]]),
    ]
    assert combine_metrics(schema, CanonicalSummation(4), headers) == {"all": (4 + 8 + 10) / 8, "some": (14 + 6) / 4}


# --- weights ----------------------------------------------------------------------------------------------------------


def test_what_a_script_has_told_counts_in_place_of_samples() -> None:
    headers = [header([4, 4], [[1.0], [float("nan")]], [30.0, 0.0]), header([3, 0], [[5.0], [None]], [0.5, None])]
    assert read_weights(headers) == [30.0, 0.0, 0.5, 0]
    # A mean over nothing is not a number, and nobody counts it.
    assert combine_metrics(Schema(("loss",)), CanonicalSummation(4), headers) == {"loss": (30 + 2.5) / 30.5}


@pytest.mark.parametrize(
    ("samples", "weights", "sentence"),
    [
        ([0, 0], [None, None], "a step has no samples at all"),
        ([4, 4, 0], [7.0, None, None], "step.weight was called for 1 of the 2 micro-batches of a step"),
        ([4, 4], [0.0, 0.0], "all micro-batches of a step weigh nothing"),
    ],
    ids=["no samples", "some told", "nothing"],
)
def test_weights_without_a_mean_are_refused(samples: list[int], weights: list[float | None], sentence: str) -> None:
    each = [header([count], [[]], [weight]) for count, weight in zip(samples, weights, strict=True)]
    with pytest.raises(ConfigurationError, match=sentence):
        read_weights(each)


# --- names ------------------------------------------------------------------------------------------------------------

names = st.lists(st.sampled_from("abcdef"), unique=True).map(sorted).map(tuple)
schemas = st.builds(Schema, names, names, names)


@given(a=schemas, b=schemas, c=schemas)
def test_schemas_merge_in_any_order_to_the_same_and_only_grow(a: Schema, b: Schema, c: Schema) -> None:
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(a) == a.merge(Schema()) == a
    for part, whole in zip(a.parts(), a.merge(b).parts(), strict=True):
        assert set(part) <= set(whole)
        assert list(whole) == sorted(set(whole))
    assert Schema.from_json(a.to_json()) == a


def test_layouts_differ_where_one_worker_would_misread_another() -> None:
    weight, schema = torch.zeros(2, 3), Schema(("a",), ("b",), ("c",))
    layouts = [
        ({"weight": weight}, schema),
        ({"bias": weight}, schema),
        ({"weight": weight.t()}, schema),
        ({"weight": weight.double()}, schema),
        ({"weight": weight, "bias": weight}, schema),
        ({"weight": weight}, Schema(("a",), ("b", "c"), ())),
        ({"weight": weight}, Schema()),
    ]
    assert len({layout_hash(parameters.items(), schema) for parameters, schema in layouts}) == len(layouts)
    assert layout_hash({"weight": weight + 1}.items(), schema) == layout_hash({"weight": weight}.items(), schema)


# --- buffers ----------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """A module whose forward pass is the function that a test gives it."""

    def __init__(self, forward: Callable[[Buffered], None], persistent: bool = True, **buffers: Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=persistent)
        self._forward = forward

    def forward(self) -> None:
        self._forward(self)


NOTHING_YET = Schema()


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_each_virtual_node_has_batch_norm_start_from_the_same_statistics() -> None:
    norm = nn.BatchNorm1d(3)
    tracker = BufferTracker(norm)
    before = {name: tensor.clone() for name, tensor in norm.named_buffers()}
    draw = torch.Generator().manual_seed(0)
    tracker.begin()
    for _ in range(3):
        x = torch.randn(5, 3, generator=draw)
        norm(x)
        averaged, copied = tracker.collect(NOTHING_YET)
        torch.testing.assert_close(averaged["running_mean"], 0.1 * x.mean(0))
        torch.testing.assert_close(averaged["running_var"], 0.9 + 0.1 * x.var(0))
        assert {name: int(value) for name, value in copied.items()} == {"num_batches_tracked": 1}
        assert all(torch.equal(tensor, before[name]) for name, tensor in norm.named_buffers())
    tracker.commit({**averaged, **copied})
    assert torch.equal(norm.running_mean, averaged["running_mean"])
    tracker.begin()
    norm(x)
    averaged, copied = tracker.collect(NOTHING_YET)
    assert int(copied["num_batches_tracked"]) == 2
    torch.testing.assert_close(averaged["running_mean"], 0.19 * x.mean(0))


def test_a_void_attempt_leaves_no_trace() -> None:
    norm = nn.BatchNorm1d(3)
    tracker = BufferTracker(norm)
    before = {name: raw(tensor) for name, tensor in norm.named_buffers()}
    tracker.begin()
    norm(torch.randn(5, 3))
    tracker.collect(NOTHING_YET)
    norm(torch.randn(5, 3))
    norm.running_mean = torch.ones(3)
    tracker.restore()
    assert {name: raw(tensor) for name, tensor in norm.named_buffers()} == before


def test_what_has_not_changed_is_not_collected_unless_others_know_it() -> None:
    module = Buffered(lambda module: None, real=torch.ones(2), whole=torch.ones(2, dtype=torch.int64))
    tracker = BufferTracker(module)
    tracker.begin()
    module()
    assert tracker.collect(NOTHING_YET) == ({}, {})
    averaged, copied = tracker.collect(Schema((), ("real",), ("whole",)))
    assert (averaged["real"].tolist(), copied["whole"].tolist()) == ([1.0, 1.0], [1, 1])
    assert not tracker.changed({"real": averaged["real"]})


def test_collected_values_are_copies() -> None:
    module = Buffered(lambda module: module.value.add_(1.0), value=torch.zeros(2))
    tracker = BufferTracker(module)
    tracker.begin()
    module()
    averaged, _ = tracker.collect(NOTHING_YET)
    module()
    tracker.baseline("value").add_(5.0)
    assert averaged["value"].tolist() == [1.0, 1.0]
    assert tracker.baseline("value").tolist() == [0.0, 0.0]


def test_a_replaced_buffer_counts_and_its_place_keeps_the_tensor_that_others_refer_to() -> None:
    module = Buffered(lambda module: setattr(module, "value", module.value + 1.0), value=torch.zeros(2))
    tensor = module.value
    tracker = BufferTracker(module)
    tracker.begin()
    for _ in range(2):
        module()
        averaged, _ = tracker.collect(NOTHING_YET)
        assert averaged["value"].tolist() == [1.0, 1.0]
        assert module.value is tensor
        assert tensor.tolist() == [0.0, 0.0]
    tracker.commit(averaged)
    assert module.value is tensor
    assert tensor.tolist() == [1.0, 1.0]


def test_what_the_script_sets_between_two_steps_is_what_the_next_starts_from() -> None:
    module = Buffered(lambda module: module.value.add_(1.0), value=torch.zeros(2))
    tracker = BufferTracker(module)
    tracker.begin()
    module.value = torch.full((2,), 7.0)
    tracker.begin()
    module()
    averaged, _ = tracker.collect(NOTHING_YET)
    assert averaged["value"].tolist() == [8.0, 8.0]
    assert module.value.tolist() == [7.0, 7.0]


def test_tied_buffers_are_one() -> None:
    shared = torch.zeros(2)
    model = nn.ModuleList([Buffered(lambda module: module.value.add_(1.0), value=shared) for _ in range(2)])
    tracker = BufferTracker(model)
    tracker.begin()
    model[0]()
    model[1]()
    averaged, _ = tracker.collect(NOTHING_YET)
    assert {name: value.tolist() for name, value in averaged.items()} == {"0.value": [2.0, 2.0]}
    assert shared.tolist() == [0.0, 0.0]
    tracker.commit({"0.value": torch.tensor([3.0, 4.0])})
    assert model[0].value is model[1].value
    assert model[1].value.tolist() == [3.0, 4.0]


NAN = float("nan")


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        pytest.param([NAN, 1.0], [NAN, 1.0], False, id="the same NaN"),
        pytest.param([NAN, 1.0], [NAN, 2.0], True, id="a change beside a NaN"),
        pytest.param([1.0, 1.0], [NAN, 1.0], True, id="a NaN that came"),
        pytest.param([0.0, 1.0], [-0.0, 1.0], True, id="another sign of zero"),
    ],
)
def test_buffers_are_compared_by_their_bits(before: list[float], after: list[float], found: bool) -> None:
    module = Buffered(lambda module: module.value.copy_(torch.tensor(after)), value=torch.tensor(before))
    tracker = BufferTracker(module)
    tracker.begin()
    module()
    averaged, _ = tracker.collect(NOTHING_YET)
    assert ("value" in averaged) == found
    if found:
        assert raw(averaged["value"]) == raw(torch.tensor(after))
    assert raw(module.value) == raw(torch.tensor(before))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_numbers_that_can_be_averaged_are(dtype: torch.dtype) -> None:
    module = Buffered(lambda module: module.value.add_(1), value=torch.zeros(2, dtype=dtype))
    tracker = BufferTracker(module)
    tracker.begin()
    module()
    averaged, copied = tracker.collect(NOTHING_YET)
    assert (list(averaged), list(copied)) == (["value"], [])
    assert averaged["value"].dtype == dtype


def test_other_buffers_are_copied_through_a_step_header() -> None:
    def forward(module: Buffered) -> None:
        module.count.add_(3)
        module.flags.logical_not_()
        module.table.copy_(torch.arange(6, dtype=torch.uint8).view(3, 2).t())

    def build() -> Buffered:
        return Buffered(
            forward,
            count=torch.tensor(2),
            flags=torch.tensor([True, False]),
            table=torch.zeros(2, 3, dtype=torch.uint8),
            nothing=torch.zeros(0, dtype=torch.int32),
        )

    sender, receiver = build(), build()
    tracker, other = BufferTracker(sender), BufferTracker(receiver)
    for each in (tracker, other):
        each.begin()
    sender()
    averaged, copied = tracker.collect(NOTHING_YET)
    assert not averaged
    schema = Schema((), (), tuple(sorted(copied)))
    form = HeaderFormat(schema, 0, 2, tracker.copied_bytes(schema), 16)
    # The first virtual node with samples counts.
    records = [NodeRecord(0), NodeRecord(4, copied=copied)]
    told = form.tell(Kind.TRAIN, 1, NO_GENERATION, records=records)
    arrived = other.read_copied(schema, form.read(form.write(told)).copied)
    other.commit(arrived)
    assert receiver.count.item() == 5
    assert receiver.flags.tolist() == [False, True]
    assert receiver.table.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_a_buffer_that_changes_its_shape_is_refused_and_a_cache_is_left_out() -> None:
    def grow(module: Buffered) -> None:
        module.value = torch.zeros(3)

    module = Buffered(grow, value=torch.zeros(2))
    tracker = BufferTracker(module)
    tracker.begin()
    module()
    with pytest.raises(ConfigurationError, match="buffer value has changed its shape from \\[2\\] to \\[3\\]"):
        tracker.collect(NOTHING_YET)
    cache = Buffered(grow, persistent=False, value=torch.zeros(2))
    tracker = BufferTracker(cache)
    tracker.begin()
    cache()
    assert tracker.collect(NOTHING_YET) == ({}, {})
