"""``virtualflow``, and ``python -m virtualflow``: the command line."""

import sys

from virtualflow._imports import prefer_own


def main() -> int:
    """Run the command line of this process; the exit code."""
    prefer_own()  # before anything else is imported
    from virtualflow.launcher.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
