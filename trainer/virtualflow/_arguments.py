"""Names of arguments: one that is not there is refused by name, with the one that is most like it.

Python says so of some functions, of none with ``**options``, and nothing of a name that is only misspelt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

from virtualflow.errors import ConfigurationError, show_errors_plainly
from virtualflow.protocol.wording import suggest

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class")


def checked(
    called: str, passed_on: Iterable[str] = ()
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Let a function refuse keywords that it does not know.

    Args:
        called: the function's name, as users write it.
        passed_on: names that it takes by its ``**`` for the data loader.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        known = [*_names(function), *passed_on]

        @wraps(function)
        def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            _check(called, options, known, passed_on)
            return function(*arguments, **options)

        return call

    return decorate


def checked_class(called: str) -> Callable[[type[_Class]], type[_Class]]:
    """Let the constructor of a class refuse keywords that neither it knows nor those to which it passes them on.

    Args:
        called: the class's name, as users write it.
    """

    def decorate(made: type[_Class]) -> type[_Class]:
        known = list(_names_of_constructors(made))
        construct = made.__init__

        @wraps(construct)
        def __init__(self: _Class, *arguments: object, **options: object) -> None:  # noqa: N807
            if "**" not in known:
                _check(called, options, known)
            construct(self, *arguments, **options)

        setattr(made, "__init__", __init__)  # noqa: B010 - as a method, it is not to be assigned to
        return made

    return decorate


def _check(called: str, given: Iterable[str], known: Iterable[str], passed_on: Iterable[str] = ()) -> None:
    """Refuse the first name that is not known."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return
    show_errors_plainly()
    meant = suggest(unknown, known)
    passing = f"; what it passes on to the data loader is {', '.join(passed_on)}" if passed_on and not meant else ""
    raise ConfigurationError(f"{called} has no argument {unknown}{meant}{passing}")


def _names(function: Callable[..., object]) -> Iterator[str]:
    """What may be given by name."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield parameter.name


def _names_of_constructors(made: type) -> Iterator[str]:
    """Those of a constructor, and of its parents' as long as one passes on what it does not know; ``**``: of all."""
    for parent in made.__mro__:
        construct = vars(parent).get("__init__")
        if construct is None:
            continue
        if parent is object:
            yield "**"
            return
        yield from _names(construct)
        if not any(each.kind is each.VAR_KEYWORD for each in inspect.signature(construct).parameters.values()):
            return
