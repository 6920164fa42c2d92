"""What both charlm scripts share, so that they differ in how they train only: text, model, arguments."""

from __future__ import annotations

import argparse
import ast
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from arguments import parser

CONTEXT = 64  # characters that the model sees
CHARACTERS = 256  # a character is a byte of the UTF-8 text, so that any file will do
DEFAULT_TEXT_BYTES = 500_000
HELD_OUT_WINDOWS = 512


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into windows side by side: (characters [CONTEXT], the character after each [CONTEXT])."""

    def __init__(self, text: Tensor) -> None:
        self._text = text

    def __len__(self) -> int:
        return (len(self._text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


def windows(path: Path | None) -> tuple[Windows, Windows]:
    """Return the text at `path`, or Python's documentation, as (training set, held-out end of the text)."""
    if path is not None and not path.is_file():
        raise SystemExit(f"there is no text file {path}")
    text = docstrings(DEFAULT_TEXT_BYTES) if path is None else path.read_bytes()
    held_out = min(HELD_OUT_WINDOWS, len(text) // CONTEXT // 10) * CONTEXT
    if held_out == 0:
        raise SystemExit(f"{path} is too short to learn from: it takes {10 * CONTEXT} bytes at least")
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Windows(characters[:-held_out]), Windows(characters[-held_out - 1 :])


def docstrings(size: int) -> bytes:
    """Return the first `size` bytes of the standard library's documentation strings.

    Modules are taken by name and parsed, never imported: the text depends on the version of Python only.
    """
    pieces: list[bytes] = []
    total = 0
    for file in standard_library():
        try:
            found = [text.encode() for text in docstrings_in(ast.parse(file.read_bytes()))]
        except (SyntaxError, ValueError):  # templates and deliberately broken sources
            continue
        pieces += found
        total += sum(len(piece) + 2 for piece in found)
        if total >= size:
            break
    return b"\n\n".join(pieces)[:size]


def standard_library() -> Iterator[Path]:
    """Yield the source files of the standard library's modules in a fixed order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(sys.stdlib_module_names):
        module = root / f"{name}.py"
        if module.is_file():
            yield module
        for file in sorted((root / name).rglob("*.py")):
            if not {"test", "tests", "idle_test", "site-packages"} & set(file.relative_to(root).parts):
                yield file


def docstrings_in(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the documentation strings of a module, its classes and functions, in the order of the source."""
    text = ast.get_docstring(node)
    if text:
        yield text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings_in(child)


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each behind a layer norm and beside a residual path."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, length, width] to the same shape."""
        projected = self.queries_keys_values(self.norm_1(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = projected.permute(2, 0, 3, 1, 4)  # each [n, heads, length, width of a head]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.mix(attended))
        out: Tensor = x + self.dropout(self.perceptron(self.norm_2(x)))
        return out


class CharacterModel(nn.Module):
    """A causal transformer: characters [n, length up to CONTEXT] -> logits [n, CHARACTERS, length]."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.character = nn.Embedding(CHARACTERS, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS)
        nn.init.normal_(self.position.weight, std=0.1)  # which character matters more than where

    def forward(self, characters: Tensor) -> Tensor:
        """Return, classes second as `F.cross_entropy` wants them, the logits of the character after each."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.dropout(self.character(characters) + self.position(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(1, 2)


def window_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return each window's mean loss a character in nats, shape [n]."""
    characters, following = batch
    return F.cross_entropy(model(characters), following, reduction="none").mean(dim=1)


def warm_up_then_cosine(steps: int, warm_up: int = 20) -> Callable[[int], float]:
    """Return the factor of the learning rate as a function of the steps made: up linearly, then down to 0."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up)))) / 2

    return factor


@torch.no_grad()
def generate(model: nn.Module, prompt: str = "Return ", length: int = 240) -> str:
    """Let the model go on after `prompt` for `length` characters, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    was_training = model.training
    model.eval()
    text = torch.tensor(list(prompt.encode()))
    for _ in range(length):
        logits = model(text[None, -CONTEXT:])[0, :, -1]
        text = torch.cat([text, torch.multinomial((logits / 0.8).softmax(0), 1, generator=generator)])
    model.train(was_training)
    return bytes(text.tolist()).decode(errors="replace")


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line."""
    arguments = parser(description, epochs=None, steps=200, batch_size=32)
    arguments.add_argument("--text", type=Path, metavar="FILE", help="what to learn (default: Python's documentation)")
    return arguments.parse_args()
