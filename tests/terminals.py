"""A real terminal for a program of a test, and what a person sees on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS, COLUMNS = 30, 120
_MARK = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


@dataclass(frozen=True)
class Seen:
    """A program that has ended."""

    code: int
    written: str
    """All that it wrote to the terminal, with the marks that move the cursor."""
    piped: str
    """What it wrote to standard output, where that was a pipe."""

    @property
    def words(self) -> str:
        """What was on the terminal at some time, without the marks."""
        return _MARK.sub("", self.written)

    @property
    def left(self) -> list[str]:
        """The lines that are on it in the end."""
        lines, row, column = [""], 0, 0
        for piece in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", self.written):
            mark = _MARK.fullmatch(piece)
            if mark and mark[2] == "A":
                row = max(0, row - int(mark[1] or 1))
            elif mark and mark[2] == "K":
                lines[row] = "" if mark[1] == "2" else lines[row][:column]
            elif piece == "\r":
                column = 0
            elif piece == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif not mark:
                lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
                column += len(piece)
        return [line.rstrip() for line in lines if line.strip()]

    @property
    def cursor(self) -> bool:
        """Whether it is shown in the end."""
        return self.written.rfind("\x1b[?25l") <= self.written.rfind("\x1b[?25h")


def run(words: Sequence[str], *, piped: bool, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Seen:
    """Run ``python`` with these words on a terminal, to its end.

    Args:
        words: behind the interpreter.
        piped: whether standard output goes to a pipe.
        env: further variables.
        cwd: its directory.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    variables = {**os.environ, "TERM": "xterm", "PYTHONPATH": f"{ROOT / 'trainer'}:{ROOT}", **(env or {})}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        variables.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=theirs,
        stdout=subprocess.PIPE if piped else theirs,
        stderr=theirs,
        env=variables,
        cwd=cwd,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65_536)
        except OSError:  # the other end is closed
            break
        written += piece
    os.close(ours)
    said = process.stdout.read().decode() if process.stdout is not None else ""
    return Seen(process.wait(), written.decode(), said)
