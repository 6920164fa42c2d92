"""``python -m virtualflow``: the command line."""

import sys

from virtualflow.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
