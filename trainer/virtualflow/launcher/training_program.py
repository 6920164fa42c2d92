"""What a worker runs: a script by its path, or a module by its name, as ``python`` and ``python -m`` do; and how its
process allocates memory. Pure but for looking whether the program is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import iter_modules

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import suggest

ALLOCATOR_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment of workers, unless a user sets these; the trainer's image has the same. Without it the GNU C library
gives the memory of gradients back to the kernel after each virtual node: 27,000 page faults a step, a quarter of its
time, for a model of 6 M parameters. One arena, as each thread that exchanges would keep another one's worth: with 25 MB
of gradients a worker grew by 400 MB in 17 changes. Huge pages where the kernel has them on request (``madvise``): on a
CPU a step is 4 to 11 % shorter, as addresses are looked up less often."""
_WITH_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the interpreter whose value may be a word of its own."""
_ENDS_OPTIONS = "cm"
"""Letters of options behind which everything belongs to the program."""


@dataclass(frozen=True)
class TrainingProgram:
    name: str
    """The path of the script, or the module's name with dots."""
    is_module: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """As the interpreter takes it, and ``virtualflow run``."""
        return ("-m", self.name) if self.is_module else (self.name,)

    @property
    def title(self) -> str:
        """What a job, or a file about it, is called after it."""
        return self.name if self.is_module else Path(self.name).stem

    def __str__(self) -> str:
        return " ".join(self.words)

    def check(self, environment: Mapping[str, str] = os.environ) -> None:
        if self.is_module:
            check_module(self.name, _users_places(environment))
        else:
            check_script(Path(self.name))


def program_of(words: Sequence[str]) -> TrainingProgram | None:
    """What an interpreter with these arguments runs; ``None``: something else, such as ``-c``."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            return TrainingProgram(word)
        if word == "-":
            return None
        if word in _WITH_A_VALUE:
            del rest[:1]
        elif not word.startswith(("--", "-W", "-X")):
            letter = next((letter for letter in word if letter in _ENDS_OPTIONS), "")
            if letter:
                name = word.partition(letter)[2] or next(iter(rest), "")
                return TrainingProgram(name, is_module=True) if letter == "m" and name else None
    return None


def check_script(script: Path) -> None:
    if script.is_dir():
        raise ConfigurationError(f"{script} is a directory; name the script itself")
    try:
        with script.open("rb"):
            pass
    except FileNotFoundError:
        raise ConfigurationError(f"there is no script {script}") from None
    except OSError as error:
        raise ConfigurationError(f"cannot read the script {script}: {error.strerror}") from error


def check_module(name: str, users: Sequence[str]) -> None:
    """Check that a module can be found, without importing anything.

    Args:
        users: where a worker looks for it first, before what is installed.

    Raises:
        ConfigurationError: it is not there, or is a package that cannot be run.
    """
    if name.endswith(".py") or os.sep in name or not all(name.split(".")):
        dotted = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigurationError(
            f"-m {name}: -m takes the name of a module, with dots; write -m {dotted}, or leave out -m for a path"
        )
    found: ModuleSpec | None = None
    places, known, near = [*users, *sys.path], "", list(users)
    for part in name.split("."):
        found = _find(part, places, top=not known)
        if found is None:
            where = f"{known} has no module {part}" if known else f"there is no module {part}"
            meant = suggest(part, [each.name for each in iter_modules(near)])
            raise ConfigurationError(
                f"-m {name}: {where}{meant}; it is looked for in this directory, in PYTHONPATH and among what is "
                "installed, as by python -m"
            )
        places = near = list(found.submodule_search_locations or ())
        known = f"{known}.{part}".lstrip(".")
    if places and _find("__main__", places, top=False) is None:
        inside = ", ".join(sorted(each.name for each in iter_modules(places))[:8])
        raise ConfigurationError(
            f"-m {name}: this is a package without a __main__; name one of its modules ({inside or 'it has none'})"
        )


def _find(part: str, places: list[str], *, top: bool) -> ModuleSpec | None:
    found = PathFinder.find_spec(part, places)
    if found is None and top:  # what the interpreter has built in, and what an editable installation knows by a hook
        finders = (finder for finder in sys.meta_path if finder is not PathFinder)
        found = next((spec for finder in finders if (spec := finder.find_spec(part, None)) is not None), None)
    return found


def _users_places(environment: Mapping[str, str]) -> list[str]:
    """Where ``python -m`` looks for modules first, in that environment."""
    here = [] if environment.get("PYTHONSAFEPATH") else [os.getcwd()]
    return here + [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
