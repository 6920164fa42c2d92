"""``python -m virtualflow_operator.simulator``: as ``virtualflow simulate``, also where no command was installed."""

import sys

from virtualflow_operator.simulator.command import run

if __name__ == "__main__":
    sys.exit(run())
