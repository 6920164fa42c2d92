"""Inputs that are nearly right: seeds with bits, bytes, numbers, words or parts of their structure changed."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

LARGEST = 16_384
"""Bytes of an input, so that time goes into many inputs and not into large ones."""
NUMBERS = (0, -1, 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 1e308, -0.0, 0.1, 10**400)
WORDS = (
    *(
        "",
        "\x00",
        "\ud800",
        "\ufeff",
        "ä" * 300,
        "a" * 5_000,
        "../..",
        "%s%n",
        "NaN",
        "null",
        "1e999",
        "0x10",
        "1:60:60",
    ),
    *(
        "2026-13-45",
        "2026-01-01T25:61:61Z",
        "9" * 4_301,
        "-1",
        "1Ki",
        "1e-9999999",
        "!!int x",
        "!!timestamp x",
        "!!bool x",
    ),
    *(
        "!!float x",
        "!!int ''",
        "!!binary x",
        "&a [*a]",
        "*a",
        "? [a, {b: c}]",
        "!!python/name:os",
        "!!set [a]",
        "<<: 1",
    ),
)
BYTES = (
    b"\x00",
    b"\xff",
    b"\xff\xfe",
    b"\r\n",
    b"\r\n\r\n",
    b"{",
    b"[" * 3_000,
    b'"',
    b"\\ud800",
    b"NaN",
    b"1e999",
    b",",
)


def mutated(rng: random.Random, seeds: Sequence[bytes], largest: int = LARGEST) -> bytes:
    """Return one input, drawn from ``rng``: noise, a seed of another structure, or one with bytes changed."""
    seed = rng.choice(seeds)
    chance = rng.random()
    if chance < 0.02:
        return rng.randbytes(rng.choice((0, 1, 16, 200, 5_000)))
    if chance < 0.5 and seed[:1] in (b"{", b"["):
        with contextlib.suppress(ValueError, RecursionError):  # of an input that was kept: its bytes are changed
            return _dumped(rng, _restructured(rng, json.loads(seed)))[:largest]
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        seed = rng.choice(_WAYS)(rng, seed, rng.choice(seeds))
    return seed[:largest]


def _place(rng: random.Random, text: bytes) -> int:
    return rng.randrange(len(text) + 1)


def _flip(rng: random.Random, text: bytes, other: bytes) -> bytes:
    if not text:
        return text
    changed = bytearray(text)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _insert(rng: random.Random, text: bytes, other: bytes) -> bytes:
    at = _place(rng, text)
    new = rng.choice((*BYTES, rng.choice(WORDS).encode("utf-8", "surrogatepass"), rng.randbytes(rng.randrange(9))))
    return text[:at] + new + text[at + rng.choice((0, 0, len(new))) :]


def _cut(rng: random.Random, text: bytes, other: bytes) -> bytes:
    first, last = sorted((_place(rng, text), _place(rng, text)))
    return rng.choice((text[:first], text[last:], text[:first] + text[last:]))


def _repeat(rng: random.Random, text: bytes, other: bytes) -> bytes:
    first, last = sorted((_place(rng, text), _place(rng, text)))
    return (text[:last] + text[first:last] * rng.choice((1, 2, 50)) + text[last:])[:LARGEST]


def _splice(rng: random.Random, text: bytes, other: bytes) -> bytes:
    return text[: _place(rng, text)] + other[_place(rng, other) :]


def _replace_word(rng: random.Random, text: bytes, other: bytes) -> bytes:
    """Put a word in the place of what stands behind a colon, as in YAML, JSON and a header."""
    parts = text.split(b": ")
    if len(parts) < 2:
        return _insert(rng, text, other)
    at = rng.randrange(1, len(parts))
    _, line, rest = parts[at].partition(b"\n")
    parts[at] = rng.choice(WORDS).encode("utf-8", "surrogatepass") + line + rest
    return b": ".join(parts)


_WAYS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    *(_flip, _flip, _insert, _insert, _cut, _repeat, _splice),
    *(_replace_word, _replace_word),
)


def _restructured(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """Change one thing somewhere in a value of JSON."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: inner for name, inner in value.items() if name != key}
        if rng.random() < 0.1:
            return value | {rng.choice(WORDS): _anything(rng)}
        return value | {key: _restructured(rng, value[key], depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value * rng.choice((0, 2, 100))
        return [*value[:at], _restructured(rng, value[at], depth + 1), *value[at + 1 :]]
    return _anything(rng)


def _anything(rng: random.Random) -> Any:
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(WORDS)
    if kind == 2:
        return rng.choice((None, True, False, [], {}, [[]], {"": None}))
    if kind == 3:
        return rng.getrandbits(rng.choice((1, 8, 40, 64)))
    if kind == 4:
        return [_anything(rng) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {rng.choice(WORDS): _anything(rng)}
    nested: Any = "a"
    for _ in range(rng.choice((3, 200))):
        nested = [nested]
    return nested


def _dumped(rng: random.Random, value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")
