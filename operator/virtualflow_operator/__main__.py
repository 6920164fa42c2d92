"""``virtualflow-operator``: says what to install where the operator's requirements are missing."""

import sys

from virtualflow._imports import prefer_own

_REQUIREMENTS = ("kopf", "kubernetes", "prometheus_client")


def main() -> int:
    prefer_own()
    try:
        from virtualflow_operator.controllers.watches import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _REQUIREMENTS:
            raise
        print(
            f"virtualflow-operator: the operator needs {error.name}, not installed here; "
            "run: pip install 'virtualflow[operator]'",
            file=sys.stderr,
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
