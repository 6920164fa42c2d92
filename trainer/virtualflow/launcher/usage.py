"""How the command line says that a request makes no sense: in one line on standard error."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import printable, suggest

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREAD = 141


def complain(sentence: str) -> None:
    """Say in one line on standard error what is wrong."""
    print(f"virtualflow: {printable(' '.join(sentence.split()))}", file=sys.stderr)


class _Help(argparse.HelpFormatter):
    """Says of each option with a value whether it must be given, or what holds without it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.help
        if said is None or not action.option_strings or action.nargs == 0:
            return said
        if action.required:
            return f"{said} (required)"
        return said if "default" in said else f"{said} (default: none)"


class Parser(argparse.ArgumentParser):
    """Complains in one line instead of printing the usage, and asks whether something like it was meant.

    Args:
        examples: command lines, for its help.
    """

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})
        self.examples = tuple(examples)
        self.advanced: dict[str, str] = {}
        """Subcommands that its help lists behind the others, with what each does."""
        self._given: list[str] = []

    def format_help(self) -> str:
        advanced = [f"  {name:10} {text}\n" for name, text in self.advanced.items()]
        examples = [f"  {example}\n" for example in self.examples]
        behind = ["\nadvanced commands:\n", *advanced] if advanced else []
        return super().format_help() + "".join([*behind, *(["\nexamples:\n", *examples] if examples else [])])

    def parse_known_args(  # type: ignore[override]  # its overloads are of use to nobody here
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse what is not known: also in a subcommand, which knows best what is like it."""
        self._given = list(sys.argv[1:] if args is None else args)
        parsed, left = super().parse_known_args(self._given, namespace)
        if left:
            self.error(self._unknown(left) or f"{' '.join(left)}: more than is needed")
        return parsed, left

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            message = self._unknown(self._given) or message  # a misspelt one is why another is missing
        complain(f"{message}; see {self.prog} --help")
        sys.exit(EXIT_USAGE)

    def _unknown(self, words: Iterable[str]) -> str:
        """What to say of the first word that is an option and not one of these; empty: there is none."""
        options = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", words)]
        known = self._option_string_actions
        wrong = next((each for each in options if re.match(r"--?[A-Za-z]", each) and each not in known), None)
        return "" if wrong is None else f"there is no option {wrong}{suggest(wrong, known)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"there is no command {value}{suggest(str(value), choices)}")
        raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(choices)}{suggest(str(value), choices)}")


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
        if not self._least <= values <= self._most:
            given = f"{values:g}" if isinstance(values, float) else str(values)
            raise ConfigurationError(f"{option_string or self.metavar} {given}: {self._must}")
        setattr(namespace, self.dest, values)
