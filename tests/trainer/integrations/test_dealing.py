"""Files dealt to shards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from virtualflow.integrations.loaders import deal


@given(files=st.integers(1, 30), count=st.integers(1, 12), size=st.integers(1, 9))
def test_files_are_dealt_so_that_each_sample_is_in_one_shard_and_shares_are_even(
    files: int, count: int, size: int
) -> None:
    dealt = [deal(files, index, count) for index in range(count)]
    shares = [
        [(part.file, position) for part in parts for position in range(part.offset, size, part.step)] for parts in dealt
    ]
    assert sorted(place for share in shares for place in share) == [(f, p) for f in range(files) for p in range(size)]
    assert {sum(part.step == 1 for part in parts) for parts in dealt} <= {files // count, files // count + 1}
    assert all(len(parts) <= -(-files // count) for parts in dealt)
