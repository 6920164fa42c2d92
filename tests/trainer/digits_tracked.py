"""The example of digits as it is, but for a tracker."""

import functools
import os
import runpy
import sys
from pathlib import Path

import virtualflow as vf
from virtualflow.integrations.trackers import TensorBoard

EXAMPLES = Path(__file__).parents[2] / "examples"

if __name__ == "__main__":
    vf.elastic = functools.partial(vf.elastic, tracker=TensorBoard(os.environ["RUNS"]))
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
