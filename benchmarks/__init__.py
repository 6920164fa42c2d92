"""Side-by-side measurements: ratios within one run, medians, on this machine."""
