"""How the command line says that a request makes no sense: in one line on standard error."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from virtualflow.errors import ConfigurationError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREAD = 141


def complain(sentence: str) -> None:
    """Say in one line on standard error what is wrong."""
    print(f"virtualflow: {' '.join(sentence.split())}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """Complains in one line instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        """End the process, as argparse has it."""
        complain(f"{message} (see {self.prog} --help)")
        sys.exit(EXIT_USAGE)


class Number(argparse.Action):
    """Stores a number between ``least`` and ``most``; ``must`` says so of any other, NaN included."""

    def __init__(self, *args: Any, least: float, most: float, must: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._least, self._most, self._must = least, most, must

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Check and store.

        Raises:
            ConfigurationError: the number is not in the range.
        """
        if not self._least <= values <= self._most:
            given = f"{values:g}" if isinstance(values, float) else str(values)
            raise ConfigurationError(f"{option_string or self.metavar} {given}: {self._must}")
        setattr(namespace, self.dest, values)
