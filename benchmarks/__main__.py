"""All measurements, one after the other: ``make bench``."""

from __future__ import annotations

import sys

from benchmarks import joiner, pauses, steps

sys.argv = sys.argv[:1]
for benchmark in (steps, pauses, joiner):
    print(f"\n{(benchmark.__doc__ or '').splitlines()[0]}", flush=True)
    benchmark.main()
