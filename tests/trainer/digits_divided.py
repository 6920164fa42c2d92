"""The example of digits as it is, but for parameters that are divided among all processes."""

import functools
import runpy
import sys
from pathlib import Path

import virtualflow as vf

EXAMPLES = Path(__file__).parents[2] / "examples"

if __name__ == "__main__":
    vf.elastic = functools.partial(vf.elastic, shard="parameters")
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
