"""``make fuzz``: a million inputs, and more by ``ARGS="--inputs 10000000 --seed 7"``; names choose readers."""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from functools import partial
from pathlib import Path

from fuzz.readers import readers
from fuzz.run import Found, Outcome, try_reader, try_server

SERVED = 0.005
"""Of the inputs, for the server's requests and for its messages."""
GROWTH = 24 * 2**20
"""Bytes that a reader may grow by: what caches keep, and what the allocator does not give back."""


def main() -> int:
    """Run, and print one line for each reader."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", help="readers, or requests and messages; all of them unless named")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many in total (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="what decides them (%(default)s)")
    asked = parser.parse_args()
    outcomes: list[Outcome] = []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, readers(Path(folder)) as known:
        unknown = set(asked.names) - {reader.name for reader in known} - {"requests", "messages"}
        if unknown:
            parser.error(f"no reader is called {unknown.pop()}; there are {', '.join(each.name for each in known)}")
        chosen = [reader for reader in known if not asked.names or reader.name in asked.names]
        shares = sum(reader.share for reader in chosen)
        served = [kind for kind in ("requests", "messages") if not asked.names or kind in asked.names]
        left = asked.inputs * (1 - SERVED * len(served)) if chosen else 0
        attempts = [partial(try_reader, reader, round(left * reader.share / shares)) for reader in chosen]
        count = round(asked.inputs * (SERVED if chosen else 1 / max(len(served), 1)))
        attempts += [partial(try_server, kind, count) for kind in served]
        found = 0
        for attempt in attempts:
            try:
                outcomes.append(attempt(seed=asked.seed))
                print(outcomes[-1], flush=True)
            except Found as what:
                print(f"{what}\nthe input is kept in {what.keep()}", file=sys.stderr, flush=True)
                found += 1
    total, seconds = sum(each.read + each.refused for each in outcomes), sum(each.seconds for each in outcomes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{total:,} inputs in {seconds:.0f} s, {total / max(seconds, 1e-9):,.0f}/s; {peak:.0f} MiB at the most")
    grown = [each for each in outcomes if each.growth > GROWTH]
    for each in grown:
        print(f"{each.name} has grown by {each.growth / 2**20:.0f} MiB", file=sys.stderr)
    return bool(found or grown)


if __name__ == "__main__":
    sys.exit(main())
