"""What fits: profiles for other micro-batches, the smallest number of virtual nodes, and sizes as people write them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers import examples
from virtualflow.errors import ConfigurationError
from virtualflow.memory import Budget, DoesNotFit, fit, format_bytes, parse_bytes, profile_for, what_fits
from virtualflow.memory.fitting import waiting_bytes
from virtualflow.memory.settings import PlannerSettings
from virtualflow.protocol.device_profile import BlockProfile, ChainProfile, ChainSize
from virtualflow.protocol.tree import subtrees

SETTINGS = PlannerSettings(moves=5_000)


def size(micro_batch: int, *, blocks: int = 4, seconds: float = 0.1, fixed: float = 0.0) -> ChainSize:
    one = BlockProfile(
        name="block",
        forward_seconds=fixed + seconds * micro_batch,
        backward_seconds=2 * (fixed + seconds * micro_batch),
        saved_bytes=100 * micro_batch,
        boundary_bytes=10 * micro_batch,
        parameter_bytes=50,
        gradient_bytes=50,
        overhead_seconds=0.01 + fixed * micro_batch,
    )
    return ChainSize(micro_batch, (one,) * blocks)


def chain(*sizes: ChainSize) -> ChainProfile:
    return ChainProfile(
        out_bytes_per_second=1e9, in_bytes_per_second=1e9, optimizer_bytes=400, fixed_bytes=0, sizes=sizes
    )


@pytest.mark.parametrize(
    ("sizes", "micro_batch", "seconds"),
    [
        pytest.param([size(4, fixed=0.2)], 8, 1.2, id="of one size: in proportion"),
        pytest.param([size(4, fixed=0.2), size(8, fixed=0.2)], 8, 1.0, id="as measured"),
        pytest.param([size(4, fixed=0.2), size(8, fixed=0.2)], 6, 0.8, id="between two"),
        pytest.param([size(4, fixed=0.2), size(8, fixed=0.2)], 16, 1.8, id="above"),
        pytest.param([size(4, fixed=0.2), size(8, fixed=0.2)], 2, 0.4, id="below"),
        pytest.param([size(2, fixed=9.0), size(4, fixed=0.2), size(8, fixed=0.2)], 12, 1.4, id="by the next two"),
        pytest.param([size(4, seconds=1.0), size(8, seconds=0.1)], 16, 4.0, id="more samples never take less"),
    ],
)
def test_a_profile_for_another_micro_batch(sizes: list[ChainSize], micro_batch: int, seconds: float) -> None:
    found = profile_for(chain(*sizes), micro_batch)
    assert found.blocks[0].forward_seconds == pytest.approx(seconds)
    assert found.blocks[0].saved_bytes == 100 * micro_batch
    assert found.blocks[0].parameter_bytes == 50
    assert found.optimizer_bytes == 400


@pytest.mark.parametrize(
    ("sizes", "micro_batch", "seconds"),
    [
        pytest.param([size(4)], 8, 0.01, id="of one size: as much"),
        pytest.param([size(4, fixed=0.2), size(8, fixed=0.2)], 16, 3.21, id="of two: on the line"),
    ],
)
def test_the_overhead_of_another_micro_batch(sizes: list[ChainSize], micro_batch: int, seconds: float) -> None:
    assert profile_for(chain(*sizes), micro_batch).blocks[0].overhead_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("counted", "micro_batch", "expected"),
    [
        pytest.param({4: 40}, 8, 80, id="of one size: in proportion"),
        pytest.param({4: -40}, 8, -40, id="and what goes early is no more for more samples"),
        pytest.param({4: -40}, 2, -20, id="but less for fewer"),
        pytest.param({4: -40, 8: 20}, 6, -10, id="between two"),
        pytest.param({4: -40, 8: 20}, 16, 140, id="above"),
        pytest.param({4: 20, 8: -40}, 16, -40, id="above, where nothing below was counted"),
        pytest.param({4: None}, 4, None, id="not counted"),
    ],
)
def test_the_workspace_of_a_backward_pass(
    counted: dict[int, int | None], micro_batch: int, expected: int | None
) -> None:
    sizes = [
        msgspec.structs.replace(
            size(samples),
            blocks=tuple(
                msgspec.structs.replace(block, backward_workspace_bytes=most) for block in size(samples).blocks
            ),
        )
        for samples, most in counted.items()
    ]
    assert profile_for(chain(*sizes), micro_batch).blocks[0].backward_workspace_bytes == expected


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        pytest.param([size(4), size(4)], "must grow", id="one size twice"),
        pytest.param([size(4), size(8, blocks=3)], "the same blocks", id="other blocks"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(sizes: list[ChainSize], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        profile_for(chain(*sizes), 4)


@settings(max_examples=examples(40))
@given(st.integers(800, 9_000), st.sampled_from([None, 0]))
def test_the_first_that_fits_is_the_smallest_number_of_virtual_nodes(device: int, host: int | None) -> None:
    one, budget = chain(size(1), size(4)), Budget(device, host)
    last = fit(one, 24, 24, budget, SETTINGS)
    if last.plan is None:
        with pytest.raises(DoesNotFit) as refused:
            what_fits(one, 24, budget, SETTINGS, more=2)
        assert refused.value.smallest == last.smallest_bytes
        return
    told: list[float] = []
    rows = what_fits(one, 24, budget, SETTINGS, more=2, tell=told.append)
    assert told == sorted(told), "how much of it is done"
    assert 0 == told[0] <= told[-1] < 1
    fitting = [row.virtual_nodes for row in rows if row.plan is not None]
    for virtual_nodes in (1, 2, 3, 4, 6, 8, 12, 24):
        if virtual_nodes < fitting[0]:
            assert fit(one, 24, virtual_nodes, budget, SETTINGS).plan is None
    assert 1 <= len(fitting) <= 3
    assert len(rows) - len(fitting) == (fitting[0] > 1)


def test_rows_end_where_everything_fits() -> None:
    rows = what_fits(chain(size(1)), 24, Budget(1 << 30), SETTINGS, more=4)
    assert [row.virtual_nodes for row in rows] == [1]
    assert rows[0].reason == "everything fits"
    assert rows[0].step_seconds == pytest.approx(24 * 0.1 * 3 * 4)


def test_rows_end_where_sums_of_gradients_take_more_than_smaller_micro_batches_save() -> None:
    one = msgspec.structs.replace(chain(size(1)), sum_bytes=300)
    least = [fit(one, 16, nodes, Budget(1 << 30), SETTINGS).smallest_bytes for nodes in (1, 2, 4, 8, 16)]
    assert least.index(min(least)) == 2
    rows = what_fits(one, 16, Budget(min(least)), SETTINGS, more=4)
    assert [(row.virtual_nodes, row.plan is not None) for row in rows] == [(2, False), (4, True)]
    with pytest.raises(DoesNotFit) as refused:
        what_fits(one, 16, Budget(min(least) - 1), SETTINGS, more=4)
    assert refused.value.smallest == min(least)


def test_the_optimizer_on_the_host_makes_room() -> None:
    with pytest.raises(DoesNotFit, match="not even micro-batches of 1 fit"):
        what_fits(chain(size(1)), 4, Budget(700), SETTINGS, more=1)
    assert what_fits(chain(size(1)), 4, Budget(700, None, "host"), SETTINGS, more=1)[-1].plan is not None


def test_virtual_nodes_divide_the_batch() -> None:
    with pytest.raises(ConfigurationError, match="5 virtual nodes do not divide a batch of 24"):
        fit(chain(size(1)), 24, 5, Budget(1_000), SETTINGS)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24Gi", 24 << 30),
        ("1.5 GiB", 3 << 29),
        ("800M", 800_000_000),
        ("7kb", 7_000),
        ("123", 123),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 2", "0", "1e9", "12Xi", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no size of memory"):
        parse_bytes(text)


@given(st.integers(1, 1 << 50))
def test_a_size_that_is_rounded_up_is_enough_and_hardly_more(size: int) -> None:
    shown = parse_bytes(format_bytes(size, up=True))
    assert size <= shown <= size * 1.01 + 1
    assert abs(parse_bytes(format_bytes(size)) - size) <= size * 0.005 + 1


@pytest.mark.parametrize("virtual_nodes", [1, 2, 3, 5, 8, 9, 64, 96, 100])
def test_as_many_sums_are_counted_as_ever_wait(virtual_nodes: int) -> None:
    waiting = max(len(subtrees(virtual_nodes, range(node))) for node in range(virtual_nodes))
    assert waiting_bytes(chain(size(1)), 10, virtual_nodes) == 10 * waiting


def test_a_block_joins_another_in_a_profile_if_it_did_at_both_sizes() -> None:
    apart = size(8)
    apart = ChainSize(
        8, tuple(msgspec.structs.replace(block, joins=number != 2) for number, block in enumerate(apart.blocks))
    )
    assert [block.joins for block in profile_for(chain(size(4), apart), 6).blocks] == [True, True, False, True]
