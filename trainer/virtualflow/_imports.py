"""How the library imports: what lies beside a user's script is the script's, and not what the library asks for.

Python looks for a module beside the script first. A user's ``attr.py`` or ``statistics.py`` there would be what aiohttp
and the library get, although nobody in the script has asked for theirs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

_STANDARD = os.path.dirname(os.__file__)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def load(module: str, name: str) -> Any:
    """A name of a module that is imported once somebody asks for it: for a ``__getattr__`` of a package.

    Raises:
        ImportError: it has failed, also with an ``AttributeError``, which Python would take for the word that the
            package has no such name.
    """
    try:
        if module not in sys.modules:
            with own_imports():
                import_module(module)
        return getattr(import_module(module), name)
    except AttributeError as error:
        raise ImportError(f"{module} cannot be imported: AttributeError: {error}") from error


def prefer_own() -> None:
    """Look beside the script and in ``PYTHONPATH`` last, from now on: for processes that run no script of a user's."""
    users = _places_of_the_user()
    sys.path[:] = [place for place in sys.path if place not in users] + users


@contextmanager
def own_imports() -> Iterator[None]:
    """Whatever is imported meanwhile comes from the installation; all others go on importing what they did."""
    users, former = _places_of_the_user(), sys.path[:]
    own = [place for place in former if place not in users]
    sys.path[:] = own + users
    hidden = {name: sys.modules.pop(name) for name in _hiding(users, own)}
    before = set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = former + [place for place in sys.path if place not in former]
        for name in [name for name in sys.modules if name not in before]:
            if _is_file(_top(name), users) and not _is_of(sys.modules.get(_top(name)), users):
                del sys.modules[name]
        sys.modules.update(hidden)


def _places_of_the_user() -> list[str]:
    """What stands before the standard library: the script's directory, or the present one, and ``PYTHONPATH``."""
    end = sys.path.index(_STANDARD) if _STANDARD in sys.path else 0
    return [place for place in sys.path[:end] if os.path.abspath(place) != _OURS]


def _hiding(users: Sequence[str], own: Sequence[str]) -> list[str]:
    """Modules of the user's that were imported already, and bear the name of one of the installation."""
    tops = {name for name, module in sys.modules.items() if "." not in name and _is_of(module, users)} - {"__main__"}
    hiding = {top for top in tops if _is_file(top, own)}
    return [name for name in sys.modules if _top(name) in hiding]


def _top(name: str) -> str:
    return name.partition(".")[0]


def _is_of(module: object, places: Sequence[str]) -> bool:
    """Whether a module that is no part of a package lies in one of these places."""
    known = vars(module) if isinstance(module, ModuleType) else {}  # none of its attributes is asked for: some import
    file = known.get("__file__")
    if not isinstance(file, str):
        return False
    folder = os.path.dirname(os.path.abspath(file))
    place = os.path.dirname(folder) if "__path__" in known else folder
    return place in map(os.path.abspath, places)


def _is_file(name: str, places: Sequence[str]) -> bool:
    """Whether a module of that name would be found there; a mere folder is none where a module follows."""
    found = PathFinder.find_spec(name, [place or os.getcwd() for place in places])
    return found is not None and found.origin is not None
