"""Words of others do nothing to a terminal."""

from __future__ import annotations

import sys

import pytest

from virtualflow.protocol.termination_message import TerminationMessage, encode_termination_message
from virtualflow.protocol.wording import printable

HOSTILE = {
    "what clears the screen": ("\x1b[2Jx", "\\x1b[2Jx"),
    "its C1 form": ("\x9b2Jx", "\\x9b2Jx"),
    "a title": ("\x1b]0;root\x07", "\\x1b]0;root\\x07"),
    "what hides a line": ("failed\rok", "failed\\rok"),
    "what takes letters back": ("no\b\bok\x7f", "no\\x08\\x08ok\\x7f"),
    "letters from right to left": ("a\u202eb\u2066", "a\\u202eb\\u2066"),
    "half of a character": ("a\ud800", "a\\ud800"),
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.values(), ids=HOSTILE.keys())
def test_control_characters_are_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
    message = encode_termination_message(TerminationMessage("failed", error=text, traceback=text)).decode()
    assert printable(message) == message


def test_no_character_of_any_terminal_control_is_left() -> None:
    shown = printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert [character for character in shown if ord(character) < 32 or 127 <= ord(character) < 160] == ["\t", "\n"]
    assert shown.encode()


@pytest.mark.parametrize("text", ["Größe 8 → 4", "行\n\tzweite Zeile", "emoji 🙂", ""])
def test_people_s_own_words_and_lines_stay(text: str) -> None:
    assert printable(text) == text
