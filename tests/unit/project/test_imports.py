"""What the library imports is the installation's, and what a user's script imports stays the user's."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from virtualflow._imports import load, own_imports, prefer_own


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory in front of everything, and an installation behind it with modules of the same names."""
    for folder in ("user", "installed"):
        (tmp_path / folder).mkdir()
        for name in ("vf_same", "vf_loaded"):
            (tmp_path / folder / f"{name}.py").write_text(f"of = {folder!r}\n")
    (tmp_path / "installed" / "vf_library.py").write_text("import vf_loaded, vf_same\nof = vf_same.of, vf_loaded.of\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "user"), *sys.path, str(tmp_path / "installed")])
    for name in ("vf_same", "vf_loaded", "vf_library", "vf_user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "user"


def test_the_library_gets_the_installations_modules_and_the_script_its_own(users: Path) -> None:
    theirs = import_module("vf_loaded")
    assert theirs.of == "user"
    before = sys.path[:]
    with own_imports():
        library = import_module("vf_library")
    assert library.of == ("installed", "installed")
    assert sys.path == before
    assert sys.modules["vf_loaded"] is theirs
    assert import_module("vf_same").of == "user"
    assert import_module("vf_library") is library


def test_a_module_that_only_the_user_has_is_found_and_stays(users: Path) -> None:
    (users / "vf_user.py").write_text("of = 'user'\n")
    with own_imports():
        found = import_module("vf_user")
    assert sys.modules["vf_user"] is found


def test_a_folder_of_data_is_no_module(users: Path) -> None:
    (users / "vf_library").mkdir()
    with own_imports():
        found = import_module("vf_library")
    assert sys.modules["vf_library"] is found


def test_everything_is_as_it_was_after_an_import_that_failed(users: Path) -> None:
    theirs = import_module("vf_loaded")
    before = sys.path[:]
    with pytest.raises(ModuleNotFoundError), own_imports():
        import_module("vf_nowhere")
    assert (sys.path, sys.modules["vf_loaded"]) == (before, theirs)


def test_a_process_without_a_script_looks_beside_it_last(users: Path) -> None:
    prefer_own()
    assert import_module("vf_same").of == "installed"
    before = sys.path[:]
    prefer_own()
    assert sys.path == before
    assert before.count(str(users)) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(
            "import os\nos.no_such_thing\n", "module 'os' has no attribute 'no_such_thing'", id="while loading"
        ),
        pytest.param("", "module 'vf_user' has no attribute 'wanted'", id="without the name"),
    ],
)
def test_an_attribute_error_is_told_as_it_is_and_not_as_a_name_that_is_not_there(
    users: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    (users / "vf_user.py").write_text(text)
    (users / "vf_package.py").write_text(
        "from virtualflow._imports import load\n"
        "def __getattr__(name):\n"
        "    if name != 'wanted': raise AttributeError(name)\n"
        "    return load('vf_user', name)\n"
    )
    monkeypatch.delitem(sys.modules, "vf_package", raising=False)
    with pytest.raises(ImportError, match=f"^vf_user cannot be imported: AttributeError: {says}$") as raised:
        from vf_package import wanted  # type: ignore[import-not-found]  # noqa: F401
    assert isinstance(raised.value.__cause__, AttributeError)
    with pytest.raises(ImportError):
        hasattr(import_module("vf_package"), "wanted")


def test_a_name_of_a_module_that_is_there_is_given() -> None:
    assert load("virtualflow.errors", "Drained") is import_module("virtualflow.errors").Drained
