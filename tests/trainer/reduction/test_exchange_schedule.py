"""Which way a bucket takes between workers, why, and what it is predicted to take."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.errors import ConfigurationError
from virtualflow.reduction.reducer import agree_on_network
from virtualflow.reduction.schedule import Choice, Shape, Terms, Way, choose_ways, combine, predict, stages
from virtualflow.reduction.settings import (
    ALGORITHMS,
    BACKENDS,
    MAX_BUCKET,
    NETWORK_SIZE,
    Exchange,
    Network,
    ProbeSettings,
    ReductionSettings,
)
from virtualflow.worker.options import check_exchange

NETWORK = Network(latency=1e-4, byte=1e-9, add_byte=1e-10)


def choose(
    shape: Shape,
    exchange: Exchange | None = None,
    network: Network = NETWORK,
    *,
    final: bool = False,
    measured: bool = False,
) -> Choice:
    """Choose the way of one bucket."""
    (choice,) = choose_ways([shape], final, Terms(exchange or Exchange(), network, measured), ReductionSettings())
    return choice


@pytest.mark.parametrize(
    ("way", "delivered", "overlapped", "text"),
    [
        pytest.param(Way.WHOLE, None, False, "gather sums -> tree sum", id="gathered"),
        pytest.param(Way.SLICES, None, False, "slices out -> tree sum -> slices back", id="in slices"),
        pytest.param(Way.SLICES, 8, False, "slices out -> tree sum -> sums to second keepers", id="sharded"),
        pytest.param(Way.SLICES, 0, False, "slices out -> tree sum -> sums stay", id="kept once"),
        pytest.param(Way.WHOLE, None, True, "gather sums -> tree sum, beside the backward pass", id="overlapped"),
    ],
)
def test_the_stages_of_a_way_are_told(way: Way, delivered: int | None, overlapped: bool, text: str) -> None:
    assert stages(Choice(way, 0.0, "", overlapped=overlapped), Shape(8, (1, 1), delivered)) == text


SHAPES = st.builds(Shape, st.integers(0, 1 << 28), st.lists(st.integers(1, 5), min_size=2, max_size=8).map(tuple))
COST = st.floats(0, 1e-3)
NETWORKS = st.builds(Network, COST, COST, COST, st.floats(0, 1))


@given(SHAPES, NETWORKS, st.booleans())
def test_no_way_is_predicted_to_be_faster_than_the_one_that_is_chosen(
    shape: Shape, network: Network, final: bool
) -> None:
    settings = ReductionSettings(overlap_from=0.0, most_gathered=1 << 60)
    (choice,) = choose_ways([shape], final, Terms(Exchange(), network), settings)
    assert choice.seconds == min(predict(way, shape, network) for way in Way)
    assert choice.seconds == predict(choice.way, shape, network)
    assert choice.overlapped == final


def test_slices_return_to_all_only_where_all_step_everything() -> None:
    way = Exchange("reduce-scatter")
    assert "shard_optimizer=False" in dict(choose(Shape(8, (1, 1)), way).refused)["reorder"]
    assert "reorder" not in dict(choose(Shape(8, (1, 1), delivered=8), way).refused)


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        pytest.param(Shape(1_000, (1, 1)), Way.WHOLE, id="little, by latency"),
        pytest.param(Shape(4_000_000, (1, 1)), Way.SLICES, id="two trips add half as much"),
        pytest.param(Shape(100_000, (1,) * 8), Way.SLICES, id="of eight workers seven would send everything"),
        pytest.param(Shape(10_000, (3, 1, 1)), Way.WHOLE, id="uneven and little"),
        pytest.param(Shape(200_000, (3, 1, 1)), Way.SLICES, id="uneven"),
    ],
)
def test_the_way_follows_from_bytes_workers_and_rows(shape: Shape, way: Way) -> None:
    choice = choose(shape)
    assert choice.way is way
    assert dict(choice.predicted)[way] == min(dict(choice.predicted).values())
    assert "assumed" in choice.reason


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        pytest.param(Shape(1_000, (2, 2, 2)), Way.WHOLE, id="whole passes, by latency"),
        pytest.param(Shape(1_000, (2, 2, 1), pieces=(500, 500, 0)), Way.SLICES, id="most of them"),
        pytest.param(Shape(1_000, (1, 1, 0), pieces=(500, 500, 0)), Way.SLICES, id="of two workers"),
        pytest.param(Shape(1_000, (1, 0, 0), pieces=(1_000, 0, 0)), Way.WHOLE, id="of one, who sends it to all"),
        pytest.param(Shape(1_000, (2, 2, 1), 1_000, (500, 500, 0)), Way.WHOLE, id="of which slices go to their owners"),
    ],
)
def test_where_backward_passes_end_early_nothing_is_gathered_that_sends_more(shape: Shape, way: Way) -> None:
    choice = choose(shape)
    assert choice.way is way
    assert ("to send less" in choice.reason) == (way is Way.SLICES)


def test_what_would_take_much_memory_is_not_gathered_by_choice() -> None:
    fast = Network(latency=1e-5, byte=1e-12, add_byte=1e-12)
    for size, way in ((1 << 20, Way.WHOLE), (1 << 22, Way.SLICES)):
        shape = Shape(size, (2, 1))
        choice = choose(shape, network=fast)
        assert choice.way is way
    assert "12 MiB of memory" in choice.reason


def test_the_way_follows_from_the_network() -> None:
    shape = Shape(400_000, (1, 1, 1, 1))
    ways = []
    for scale in (0.01, 100.0):
        network = Network(NETWORK.latency, scale * 1e-9, 0.0)
        choice = choose(shape, network=network, measured=True)
        ways.append(choice.way)
        assert "measured" in choice.reason
    assert ways == [Way.WHOLE, Way.SLICES]


@pytest.mark.parametrize(
    ("exchange", "final", "overlapped", "reason"),
    [
        pytest.param(Exchange(), True, False, "to begin early costs", id="too little"),
        pytest.param(Exchange(overlap=True), True, True, "", id="wanted"),
        pytest.param(Exchange(overlap=True), False, False, "may still change", id="wanted, but not legal"),
        pytest.param(Exchange(overlap=False), True, False, "not wanted", id="not wanted"),
    ],
)
def test_an_exchange_begins_early_where_that_is_legal_and_worth_it(
    exchange: Exchange, final: bool, overlapped: bool, reason: str
) -> None:
    choice = choose(Shape(64, (1, 1)), exchange, final=final)
    assert choice.overlapped is overlapped
    assert reason in dict(choice.refused).get("overlap", "")
    choice = choose(Shape(1 << 22, (1, 1)), final=True)
    assert choice.overlapped


def test_latency_alone_is_no_reason_to_begin_early() -> None:
    far = Network(latency=0.1, byte=1e-9, add_byte=1e-10)
    for size, overlapped in ((1_000, False), (1 << 22, True)):
        choice = choose(Shape(size, (1, 1)), network=far, final=True)
        assert choice.overlapped is overlapped


def test_what_keeps_busy_the_processors_that_compute_is_no_reason_either() -> None:
    """To begin early saves what the exchange waits for, where no processor is left to a thread beside the training."""
    shape = Shape(1 << 24, (1, 1))
    for hidden, overlapped in ((0.0, False), (0.01, False), (0.3, True), (1.0, True)):
        network = replace(NETWORK, hidden=hidden)
        choice = choose(shape, network=network, final=True, measured=True)
        assert choice.overlapped is overlapped
        assert ("predicted to save" in dict(choice.refused).get("overlap", "")) is not overlapped


@given(st.lists(NETWORKS, min_size=1, max_size=4))
def test_members_agree_on_what_holds_for_all_of_them(measured: list[Network]) -> None:
    agreed = combine([Network.from_bytes(one.to_bytes()) for one in measured])
    assert len(agreed.to_bytes()) == NETWORK_SIZE
    for one in measured:
        assert agreed.latency <= one.latency
        assert agreed.byte <= one.byte
        assert agreed.add_byte >= one.add_byte
        assert agreed.hidden <= one.hidden


class Clocks:
    """Those of a thread that waits, or is busy, as it is told."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def thread_time(self) -> float:
        return self.busy


class Slow:
    """Two members between whom a large message takes so long, of which this one is busy with it for a share."""

    rank, size = 0, 2

    def __init__(self, clocks: Clocks, seconds: float, busy: float) -> None:
        self.clocks, self.seconds, self.busy = clocks, seconds, busy

    def all_gather(self, block: torch.Tensor) -> torch.Tensor:
        if block.numel() > 1_000:
            self.clocks.now += self.seconds
            self.clocks.busy += self.busy * self.seconds
        return torch.stack([block, block])


@pytest.mark.parametrize(
    ("busy", "spare", "hidden"),
    [
        pytest.param(0.0, False, 1.0, id="it only waits"),
        pytest.param(0.7, False, 0.3, id="it is busy with a part"),
        pytest.param(1.0, False, 0.0, id="it is busy with all"),
        pytest.param(1.0, True, 1.0, id="it is busy, and another processor is left"),
    ],
)
def test_the_time_in_which_nothing_is_taken_from_the_backward_pass_is_hidden(
    monkeypatch: pytest.MonkeyPatch, busy: float, spare: bool, hidden: float
) -> None:
    clocks, probe = Clocks(), ProbeSettings()
    monkeypatch.setattr("virtualflow.reduction.reducer.time", clocks)
    network = agree_on_network(Slow(clocks, 0.05, busy), probe, None, spare=spare)  # type: ignore[arg-type]
    assert network.hidden == pytest.approx(hidden, abs=1e-3)
    assert network.byte == pytest.approx(0.05 / probe.large, rel=1e-3)


def test_additions_are_hidden_only_where_a_processor_is_left_to_them() -> None:
    assert replace(NETWORK, hidden=0.5).beside() == Network(0.0, 0.5 * NETWORK.byte, 0.0, 0.5)
    assert NETWORK.beside() == Network(0.0, NETWORK.byte, NETWORK.add_byte)


@pytest.mark.parametrize("way", list(Way))
def test_an_expert_gets_the_way_that_is_asked_for(way: Way) -> None:
    for size in (1, 1 << 30):
        exchange = Exchange(way.value)  # type: ignore[arg-type]
        choice = choose(Shape(size, (1, 1)), exchange)
        assert choice.way is way
        assert choice.reason == f"asked for: vf.Exchange(algorithm={way.value!r})"


@given(
    st.builds(
        Exchange,
        st.sampled_from(ALGORITHMS),
        st.none() | st.integers(1, MAX_BUCKET),
        st.sampled_from([None, True, False]),
        st.sampled_from(BACKENDS),
    )
)
def test_a_wish_goes_over_the_wire_as_a_number(exchange: Exchange) -> None:
    assert Exchange.from_number(exchange.to_number()) == exchange
    assert exchange.to_number() < 1 << 63


@given(NETWORKS, NETWORKS)
def test_what_workers_measure_together_is_the_least_and_what_each_does_alone_the_most(
    one: Network, other: Network
) -> None:
    agreed = combine([one, other])
    assert agreed == combine([other, one]) == Network.from_bytes(agreed.to_bytes())
    assert agreed.latency == min(one.latency, other.latency)
    assert agreed.add_byte == max(one.add_byte, other.add_byte)


@pytest.mark.parametrize(
    ("exchange", "says"),
    [
        pytest.param("ring", "exchange is 'ring'; it must be \"auto\" or a vf.Exchange", id="no such word"),
        pytest.param(Exchange("ring"), 'it must be "auto", "gather" or "reduce-scatter"', id="no such algorithm"),  # type: ignore[arg-type]
        pytest.param(Exchange(bucket_bytes=0), "a whole number of bytes between 1 and", id="empty buckets"),
        pytest.param(Exchange(bucket_bytes=1.5), "a whole number of bytes between 1 and", id="half bytes"),  # type: ignore[arg-type]
        pytest.param(Exchange(overlap="yes"), "it must be True, False, or None", id="no truth value"),  # type: ignore[arg-type]
    ],
)
def test_an_exchange_that_makes_no_sense_is_refused_in_a_sentence(exchange: Exchange | str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        check_exchange(exchange)


@pytest.mark.parametrize("exchange", ["auto", Exchange(), Exchange("gather", 1 << 20, True)], ids=str)
def test_an_exchange_that_makes_sense_is_taken(exchange: Exchange | str) -> None:
    check_exchange(exchange)
