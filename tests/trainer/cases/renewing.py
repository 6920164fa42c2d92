"""The command line, but certificates of a job are issued anew every second; at its end it says how often they were."""

import sys
from collections.abc import Container

from virtualflow.launcher import cli, runner
from virtualflow.launcher.registry import JobAccess

renewals = 0
renew = JobAccess.renew


def count(access: JobAccess, ended: Container[str]) -> None:
    global renewals  # noqa: PLW0603 - what this script is for
    renewals += 1
    renew(access, ended)


if __name__ == "__main__":
    runner.CERTIFICATE_LIFETIME, runner.CERTIFICATE_RENEWAL = 60.0, 1.0
    JobAccess.renew = count
    code = cli.main()
    print(f"certificates were renewed {renewals} times", file=sys.stderr)
    sys.exit(code)
