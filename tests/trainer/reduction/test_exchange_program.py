"""The exchange as a program: its rewrites, which are refused and why, and what a program is predicted to take."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.errors import ConfigurationError
from virtualflow.reduction.program import (
    NETWORK_SIZE,
    Facts,
    Illegal,
    Layout,
    Network,
    Operation,
    Program,
    Route,
    Shape,
    Split,
    UpdateRule,
    combine,
    compile_route,
    fuse,
    legal_programs,
    overlap,
    predict,
    reorder,
    split,
    write,
)
from virtualflow.reduction.reducer import agree_on_network
from virtualflow.reduction.schedule import Terms, choose_programs, improve
from virtualflow.reduction.settings import ALGORITHMS, MAX_BUCKET, Exchange, ProbeSettings, ReductionSettings
from virtualflow.worker.options import check_exchange

PLAIN, SHARDED = UpdateRule(), UpdateRule(sharded=True)
TWO = Facts(2)
NETWORK = Network(latency=1e-4, byte=1e-9, add_byte=1e-10)
Rewrite = Callable[[Program, Facts], Program]


def slices(program: Program, facts: Facts) -> Program:
    return split(program, facts, Split.SLICES)


def whole(program: Program, facts: Facts) -> Program:
    return split(program, facts, Split.WHOLE)


def rewritten(facts: Facts, *rewrites: Rewrite) -> Program:
    program = write(facts.rule)
    for rewrite in rewrites:
        program = rewrite(program, facts)
    return program


@pytest.mark.parametrize(
    ("facts", "rewrites", "text"),
    [
        pytest.param(TWO, [], "all-reduce (replicated) -> scale (replicated) -> update (replicated)", id="written"),
        pytest.param(
            TWO,
            [whole],
            "gather sums (replicated) -> tree sum (replicated) -> scale (replicated) -> update (replicated)",
            id="gathered",
        ),
        pytest.param(
            TWO,
            [slices],
            "slices out (sliced) -> tree sum (sliced) -> slices back (replicated) -> scale (replicated) -> "
            "update (replicated)",
            id="split",
        ),
        pytest.param(
            TWO,
            [slices, reorder, fuse],
            "slices out (sliced) -> tree sum (sliced) + scale (sliced) -> slices back (replicated) -> "
            "update (replicated)",
            id="reordered and fused",
        ),
        pytest.param(
            Facts(2, UpdateRule(sharded=True, clip_norm=True)),
            [slices, reorder, reorder],
            "slices out (sliced) -> tree sum (sliced) -> scale (sliced) -> sums to owners (owned) -> norm (owned) -> "
            "clip by norm (owned) -> update (owned) -> gather new values (replicated)",
            id="sharded",
        ),
        pytest.param(
            Facts(2, SHARDED, scale_known=False),
            [slices, reorder],
            "slices out (sliced) -> tree sum (sliced) -> sums to owners (owned) -> scale (owned) -> update (owned) -> "
            "gather new values (replicated)",
            id="sharded, and only the headers will tell the factor",
        ),
        pytest.param(
            Facts(2, final=True),
            [whole, overlap],
            "gather sums (replicated) -> tree sum (replicated) -> scale (replicated) -> update (replicated), "
            "beside the backward pass",
            id="overlapped",
        ),
    ],
)
def test_rewrites_move_stages(facts: Facts, rewrites: list[Rewrite], text: str) -> None:
    assert str(rewritten(facts, *rewrites)) == text


@pytest.mark.parametrize(
    ("facts", "rewrites", "says"),
    [
        pytest.param(Facts(1), [slices], "there is one worker", id="alone"),
        pytest.param(TWO, [slices, whole], "is split already", id="split twice"),
        pytest.param(TWO, [reorder], "not cut into slices", id="nothing returns"),
        pytest.param(TWO, [whole, reorder], "not cut into slices", id="gathered"),
        pytest.param(Facts(2, scale_known=False), [slices, reorder], "from the step headers only", id="unknown factor"),
        pytest.param(
            Facts(2, UpdateRule(elementwise=False)),
            [slices, reorder, reorder],
            "does not treat each element for itself",
            id="not elementwise",
        ),
        pytest.param(TWO, [slices, reorder, reorder], "whole state of the optimizer", id="not sharded"),
        pytest.param(
            Facts(2, UpdateRule(clip_norm=True)), [slices, reorder, reorder], "a norm needs the sums of all", id="norm"
        ),
        pytest.param(
            Facts(2, UpdateRule(scaler=True)), [slices, reorder, reorder], "a gradient scaler looks at", id="scaler"
        ),
        pytest.param(
            Facts(2, SHARDED), [slices, reorder, reorder, reorder], "is with their owners already", id="all is moved"
        ),
        pytest.param(TWO, [slices, fuse], "no message follows", id="scaled behind"),
        pytest.param(TWO, [whole, fuse], "no message follows", id="gathered and scaled"),
        pytest.param(TWO, [slices, reorder, fuse, fuse], "are one already", id="fused twice"),
        pytest.param(Facts(2, SHARDED), [slices, reorder, reorder, fuse], "cut out of the slice", id="delivered"),
        pytest.param(TWO, [slices, overlap], "gradients may still change", id="not known to be final"),
        pytest.param(Facts(2, final=True), [overlap], "has to be split", id="not split"),
        pytest.param(Facts(2, final=True), [slices, overlap, overlap], "already", id="overlapped twice"),
        pytest.param(Facts(2, UpdateRule(sharded=True, scaler=True)), [], "a gradient scaler", id="sharded scaler"),
        pytest.param(
            Facts(2, UpdateRule(sharded=True, elementwise=False)), [], "cannot be sharded", id="sharded as a whole"
        ),
    ],
)
def test_a_rewrite_that_would_change_what_is_meant_is_refused_with_a_reason(
    facts: Facts, rewrites: list[Rewrite], says: str
) -> None:
    with pytest.raises(Illegal, match=says):
        rewritten(facts, *rewrites)


RULES = [
    UpdateRule(elementwise, sharded, scaler, clip_norm, clip_value)
    for elementwise, sharded, scaler, clip_norm, clip_value in product([False, True], repeat=5)
    if not (sharded and (scaler or not elementwise))
]
FACTS = st.builds(Facts, st.integers(2, 8), st.sampled_from(RULES), st.booleans(), st.booleans())


@given(FACTS)
def test_every_legal_program_does_what_is_meant_once_and_in_order(facts: Facts) -> None:
    programs = legal_programs(facts)
    assert len({compile_route(program) for program in programs}) >= 2
    for program in programs:
        moved = {Operation.SEND_SLICES, Operation.GATHER_SUMS, Operation.GATHER, Operation.DELIVER}
        done = [operation for operation in program.operations if operation not in moved]
        assert done == [Operation.ADD, *(o for o in write(facts.rule).operations if o is not Operation.REDUCE)]
        update = program.stages[done.index(Operation.UPDATE) + len(program.stages) - len(done)]
        assert update.layout is (Layout.OWNED if facts.rule.sharded else Layout.REPLICATED)
        assert program.overlapped <= facts.final
        route = compile_route(program)
        assert route.to_owners <= facts.rule.sharded
        assert route.scales_slices or route.way is Split.SLICES


SHAPES = st.builds(Shape, st.integers(0, 1 << 28), st.lists(st.integers(1, 5), min_size=2, max_size=8).map(tuple))
COST = st.floats(0, 1e-3)
NETWORKS = st.builds(Network, COST, COST, COST, st.floats(0, 1))


@given(SHAPES, FACTS, NETWORKS)
def test_no_legal_program_is_predicted_to_be_faster_than_the_one_that_is_chosen(
    shape: Shape, facts: Facts, network: Network
) -> None:
    facts = Facts(shape.workers, facts.rule, facts.scale_known, facts.final)
    (choice,) = choose_programs(
        [shape], facts, Terms(Exchange(), network), ReductionSettings(overlap_from=0.0, most_gathered=1 << 60)
    )
    best = min(predict(program, shape, network) for program in legal_programs(facts))
    delivered = Operation.DELIVER in choice.program.operations
    # A sharded optimizer needs only its share: less memory is worth the time of cutting it out.
    assert choice.seconds <= best * (1 + 1e-9) or delivered
    assert choice.seconds == predict(choice.program, shape, network)
    assert choice.program.overlapped == facts.final


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        pytest.param(Shape(1_000, (1, 1)), Split.WHOLE, id="little, by latency"),
        pytest.param(Shape(4_000_000, (1, 1)), Split.SLICES, id="two trips add half as much"),
        pytest.param(Shape(100_000, (1,) * 8), Split.SLICES, id="of eight workers seven would send everything"),
        pytest.param(Shape(10_000, (3, 1, 1)), Split.WHOLE, id="uneven and little"),
        pytest.param(Shape(200_000, (3, 1, 1)), Split.SLICES, id="uneven"),
    ],
)
def test_the_way_follows_from_bytes_workers_and_rows(shape: Shape, way: Split) -> None:
    (choice,) = choose_programs([shape], Facts(shape.workers), Terms(Exchange(), NETWORK), ReductionSettings())
    assert choice.route.way is way
    assert dict(choice.predicted)[way] == min(dict(choice.predicted).values())
    assert "assumed" in choice.reason


def test_what_would_take_much_memory_is_not_gathered_by_choice() -> None:
    fast = Network(latency=1e-5, byte=1e-12, add_byte=1e-12)
    for size, way in ((1 << 20, Split.WHOLE), (1 << 22, Split.SLICES)):
        shape = Shape(size, (2, 1))
        (choice,) = choose_programs([shape], TWO, Terms(Exchange(), fast), ReductionSettings())
        assert choice.route.way is way
    assert "16 MiB of memory" in choice.reason


def test_the_way_follows_from_the_network() -> None:
    shape = Shape(400_000, (1, 1, 1, 1))
    ways = []
    for scale in (0.01, 100.0):
        network = Network(NETWORK.latency, scale * 1e-9, 0.0)
        (choice,) = choose_programs([shape], Facts(4), Terms(Exchange(), network, measured=True), ReductionSettings())
        ways.append(choice.route.way)
        assert "measured" in choice.reason
    assert ways == [Split.WHOLE, Split.SLICES]


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
    (choice,) = choose_programs(
        [Shape(64, (1, 1))], Facts(2, final=final), Terms(exchange, NETWORK), ReductionSettings()
    )
    assert choice.program.overlapped is overlapped
    assert reason in dict(choice.refused)["overlap"]
    (choice,) = choose_programs(
        [Shape(1 << 22, (1, 1))], Facts(2, final=True), Terms(Exchange(), NETWORK), ReductionSettings()
    )
    assert choice.program.overlapped


def test_latency_alone_is_no_reason_to_begin_early() -> None:
    far = Network(latency=0.1, byte=1e-9, add_byte=1e-10)
    for size, overlapped in ((1_000, False), (1 << 22, True)):
        (choice,) = choose_programs(
            [Shape(size, (1, 1))], Facts(2, final=True), Terms(Exchange(), far), ReductionSettings()
        )
        assert choice.program.overlapped is overlapped


def test_what_keeps_busy_the_processors_that_compute_is_no_reason_either() -> None:
    """To begin early saves what the exchange waits for, where no processor is left to a thread beside the training."""
    shape = Shape(1 << 24, (1, 1))
    for hidden, overlapped in ((0.0, False), (0.01, False), (0.3, True), (1.0, True)):
        network = replace(NETWORK, hidden=hidden)
        (choice,) = choose_programs(
            [shape], Facts(2, final=True), Terms(Exchange(), network, measured=True), ReductionSettings()
        )
        assert choice.program.overlapped is overlapped
        assert ("predicted to save" in dict(choice.refused)["overlap"]) is not overlapped


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


@pytest.mark.parametrize("way", list(Split))
def test_an_expert_gets_the_way_that_is_asked_for(way: Split) -> None:
    for size in (1, 1 << 30):
        exchange = Exchange(way.value)  # type: ignore[arg-type]
        (choice,) = choose_programs([Shape(size, (1, 1))], TWO, Terms(exchange, NETWORK), ReductionSettings())
        assert choice.route.way is way
        assert choice.reason == f"asked for: vf.Exchange(algorithm={way.value!r})"


@given(
    st.builds(
        Exchange,
        st.sampled_from(ALGORITHMS),
        st.none() | st.integers(1, MAX_BUCKET),
        st.sampled_from([None, True, False]),
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


def test_a_program_that_is_only_meant_cannot_be_carried_out() -> None:
    with pytest.raises(Illegal, match="has to be split"):
        compile_route(write(PLAIN))
    assert compile_route(improve(slices(write(PLAIN), TWO), TWO)) == Route(Split.SLICES)


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
