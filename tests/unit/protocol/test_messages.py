"""What goes over the wire is strict but for what a newer version adds: what is no message is refused as a whole."""

from __future__ import annotations

import contextlib
import json
import zlib

import msgspec
import pytest
from coordinator_server import hello
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.protocol import framing
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import (
    MAX_CHANGES,
    MAX_METRICS,
    MAX_NAME,
    MAX_RUNS,
    MAX_UNPACKED,
    MAX_VIRTUAL_NODES,
    MAX_WORKERS,
)
from virtualflow.protocol.wording import as_metrics

HELLO = hello("worker-0")


def hello_with(**facts: object) -> bytes:
    return json.dumps({**json.loads(m.encode(HELLO)), **facts}).encode()


def test_a_hello_survives_the_way() -> None:
    assert framing.from_worker.decode(m.encode(HELLO)) == HELLO


CHANGE = {
    "generation": {"incarnation": 1, "counter": 1},
    "step": 1,
    "from": 1,
    "to": 2,
    "cause": "join",
    "reason": "",
    "pauseMs": None,
    "repeatedSteps": 0,
    "stateBytes": None,
    "stateMs": None,
    "stateDonors": None,
    "repeatedVirtualNodes": 0,
}


def progress_of(metrics: int) -> bytes:
    names = {f"{number:x}": 1.0 for number in range(metrics)}
    return m.encode(m.Progress(m.Generation(1, 1), 1, 0, None, names, 1.0, "training"))


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x00\xff\xfe", id="bytes that are no text"),
        pytest.param(b"{", id="half a message"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"type":"heartbeat"} x', id="something after the message"),
        pytest.param(b'{"type":"plan"}', id="a message of the other direction"),
        pytest.param(b'{"type":"nonsense"}', id="an unknown type"),
        pytest.param(b'{"type":7}', id="a type that is no name"),
        pytest.param(b'{"type":"hello"}', id="a Hello that says nothing"),
        pytest.param(b"[" * 100_000, id="deep nesting"),
        pytest.param(b'{"type":"note","kind":"info","text":"\\ud800"}', id="half a surrogate pair"),
        pytest.param(b'{"type":"note","kind":"info","text":"' + b"x" * 5_000 + b'"}', id="too long a sentence"),
        pytest.param(b'{"type":"note","kind":"' + b"x" * 64 + b'","text":""}', id="too long a kind"),
        pytest.param(hello_with(reproducibility="somewhat"), id="a value outside a closed set"),
        pytest.param(hello_with(worker=""), id="no name"),
        pytest.param(hello_with(worker="../etc"), id="a name that is a path"),
        pytest.param(hello_with(worker="a b"), id="a name with a space"),
        pytest.param(hello_with(worker="x" * 254), id="too long a name"),
        pytest.param(hello_with(step=-1), id="a negative step"),
        pytest.param(hello_with(step=2**53 + 1), id="a step too large"),
        pytest.param(hello_with(step=10**400), id="a number of 400 digits"),
        pytest.param(hello_with(step=1.5), id="half a step"),
        pytest.param(hello_with(step="1"), id="a step in quotation marks"),
        pytest.param(hello_with(step=True), id="a step that is a truth"),
        pytest.param(hello_with().replace(b"virtualNodes", b"virtual_nodes"), id="a field in another spelling"),
        pytest.param(hello_with(virtualNodes=0), id="no virtual nodes"),
        pytest.param(hello_with(virtualNodes=MAX_VIRTUAL_NODES + 1), id="too many virtual nodes"),
        pytest.param(hello_with(drainDeadline=-1), id="a deadline in the past"),
        pytest.param(hello_with(drainDeadline=1e300), id="a deadline at the end of time"),
        pytest.param(hello_with().replace(b"null", b"NaN", 1), id="NaN"),
        pytest.param(hello_with().replace(b"null", b"Infinity", 1), id="infinity"),
        pytest.param(hello_with(changes=[CHANGE] * (MAX_CHANGES + 1)), id="an enormous list"),
        pytest.param(progress_of(MAX_METRICS + 1), id="too many metrics"),
        pytest.param(
            progress_of(1).replace(b'"0"', b'"' + b"m" * (MAX_NAME + 1) + b'"'), id="too long a metric's name"
        ),
    ],
)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError, RecursionError)):
        framing.from_worker.decode(raw)


@given(st.binary())
def test_no_bytes_do_more_than_being_refused(raw: bytes) -> None:
    for decoder in (framing.from_worker, framing.to_worker):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            decoder.decode(raw)


PLAN = m.Plan(
    m.Generation(1, 1),
    "planned",
    tuple(m.Member(f"worker-{number}", f"{number:032x}", "10.0.0.1", number, number + 1) for number in range(300)),
    (),
    "join",
    "all join",
)


def test_a_long_message_travels_deflated_and_a_short_one_as_it_is() -> None:
    assert len(framing.pack(PLAN)) < len(m.encode(PLAN)) / 3
    assert framing.unpack_to_worker(framing.pack(PLAN)) == framing.unpack_to_worker(m.encode(PLAN)) == PLAN
    assert framing.pack(m.Ready()) == m.encode(m.Ready())
    assert framing.unpack_from_worker(framing.pack(m.Ready()).decode()) == m.Ready()


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(framing.pack(PLAN)[:-1], id="one that was cut off"),
        pytest.param(framing.pack(PLAN) + b"x", id="something behind it"),
        pytest.param(zlib.compress(b"no JSON"), id="something else deflated"),
        pytest.param(zlib.compress(zlib.compress(m.encode(PLAN))), id="deflated twice"),
        pytest.param(zlib.compress(b" " * (MAX_UNPACKED + 1)), id="little that becomes much"),
        pytest.param(zlib.compress(m.encode(PLAN) + b" " * MAX_UNPACKED), id="a message that becomes too long"),
    ],
)
def test_what_was_packed_otherwise_is_refused(raw: bytes) -> None:
    for unpack in (framing.unpack_from_worker, framing.unpack_to_worker):
        with pytest.raises(msgspec.MsgspecError):
            unpack(raw)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(zlib.compress(progress_of(200_000)), id="metrics"),
        pytest.param(zlib.compress(hello_with(unknown=dict.fromkeys(map(str, range(200_000))))), id="an unknown field"),
        pytest.param('{"type":"heartbeat","doing":[' + "1," * 200_000 + "1]}", id="a list as text"),
    ],
)
def test_a_message_of_very_many_values_is_refused_before_it_is_decoded(raw: bytes | str) -> None:
    for unpack in (framing.unpack_from_worker, framing.unpack_to_worker):
        with pytest.raises(msgspec.DecodeError, match=r"^it has 2\d{5} values, and no message has more than 131072$"):
            unpack(raw)


def test_the_largest_messages_of_a_job_have_few_enough_values() -> None:
    member = m.Member("worker-0", "a", "10.0.0.1", 0, 1)
    plan = m.Plan(m.Generation(1, 1), "planned", (member,) * MAX_WORKERS, ("a",) * MAX_WORKERS, "join", "all join")
    result = m.RunResult(1, 10, 10, "d", {f"metric-{number}": 1.0 for number in range(500)})
    changes = (msgspec.convert(CHANGE, m.Change),) * MAX_CHANGES
    largest = msgspec.structs.replace(HELLO, plan=plan, changes=changes, runs=(result,) * MAX_RUNS)
    assert framing.unpack_from_worker(framing.pack(largest)) == largest


def test_a_worker_tells_of_no_more_metrics_than_a_message_may_have() -> None:
    told = as_metrics({f"metric-{number}": 1.0 for number in range(MAX_METRICS + 1)})
    assert list(told) == [f"metric-{number}" for number in range(MAX_METRICS)]


@given(st.binary())
def test_no_bytes_do_more_to_who_unpacks_them(raw: bytes) -> None:
    for unpack in (framing.unpack_from_worker, framing.unpack_to_worker):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            unpack(raw)


@given(st.tuples(st.integers(0, 2**53), st.integers(0, 2**53)), st.tuples(st.integers(0, 2**53), st.integers(0, 2**53)))
def test_generations_are_ordered_by_coordinator_and_then_by_number(
    left: tuple[int, int], right: tuple[int, int]
) -> None:
    assert (m.Generation(*left) < m.Generation(*right)) == (left < right)


def test_a_rank_is_that_of_the_process_and_not_of_the_name() -> None:
    members = (m.Member("a", "1", "127.0.0.1", 0, 4), m.Member("b", "2", "127.0.0.1", 4, 8))
    plan = m.Plan(m.Generation(1, 1), "planned", members, (), "start", "")
    assert plan.rank_of("b", "2") == 1
    assert plan.rank_of("b", "3") is None
    assert list(members[1].virtual_nodes) == [4, 5, 6, 7]


def test_a_change_is_from_and_to_on_the_wire() -> None:
    change = msgspec.convert(CHANGE, m.Change)
    assert (change.from_, change.to) == (1, 2)
    assert json.loads(m.encode(change)) == CHANGE | {"run": 1}


@pytest.mark.parametrize("kind", m.Base.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_field_is_in_camel_case_on_the_wire(kind: type[m.Base]) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    assert [name for name in names if not name.isalnum() or not name[0].islower()] == []
