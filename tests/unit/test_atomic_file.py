import os
import resource
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from virtualflow.atomic_file import PRIVATE, create_whole, read_regular, write_whole


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_takes_the_place_of_the_former_one_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "report"
    for content in (b"former", b"new"):
        write_whole(path, content)
        assert (path.read_bytes(), names(tmp_path)) == (content, ["report"])


def test_a_reader_keeps_the_content_that_it_has_opened(tmp_path: Path) -> None:
    path = tmp_path / "report"
    write_whole(path, b"former")
    with path.open("rb") as file:
        write_whole(path, b"new")
        assert file.read() == b"former"


def test_the_mode_is_what_the_umask_leaves_of_it(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "for all", b"")
        write_whole(tmp_path / "private", b"", PRIVATE)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "for all") == 0o640
    assert mode_of(tmp_path / "private") == 0o600


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(target)
    write_whole(link, b"content")
    assert link.is_symlink()
    assert target.read_bytes() == b"content"


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        write_whole(pipe, b"content")
        assert read.result() == b"content"
    assert names(tmp_path) == ["pipe"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report"
    write_whole(path, b"former")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))  # as if the disk were full
    try:
        with pytest.raises(OSError, match="too large"):
            write_whole(path, bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (path.read_bytes(), names(tmp_path)) == (b"former", ["report"])


def test_of_many_who_create_a_file_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "job"

    def create(number: int) -> int | None:
        try:
            create_whole(path, str(number).encode(), PRIVATE)
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        made = [number for number in pool.map(create, range(40)) if number is not None]
    assert [path.read_bytes()] == [str(number).encode() for number in made]
    assert (mode_of(path), names(tmp_path)) == (0o600, ["job"])


@pytest.mark.parametrize(
    ("make", "because"),
    [
        pytest.param(os.mkfifo, "it is no regular file", id="a pipe that nobody writes to"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "it is no regular file", id="a device without an end"),
        pytest.param(lambda path: path.mkdir(), "Is a directory", id="a directory"),
        pytest.param(lambda path: path.write_bytes(b"12345"), "it is larger than 4 bytes", id="a byte too much"),
        pytest.param(
            lambda path: (path.touch(), os.truncate(path, 1 << 40)), "it is larger than 4 bytes", id="a sparse file"
        ),
    ],
)
def test_what_does_not_end_is_refused_at_once(make: Callable[[Path], object], because: str, tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=because):
        read_regular(tmp_path / "file", 4)


def test_a_link_to_a_file_is_read_to_its_last_byte(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 4) == b"1234"
