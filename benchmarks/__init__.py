"""Side-by-side measurements: both sides in one run, in turns, on this machine; ratios and medians.

``figures`` lists what is measured. Each figure writes one file below ``results``, and ``report`` makes
``docs/explanation/benchmarks.md`` and its plots from these files, so that a figure can be measured again by itself.
"""
