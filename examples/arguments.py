"""The command line that every example takes, and how long a training it asks for."""

from __future__ import annotations

import argparse
import math


def parser(
    description: str | None, *, epochs: int | None, steps: int | None, batch_size: int
) -> argparse.ArgumentParser:
    """Return a parser of --steps, --epochs and --batch-size, with an example's own defaults."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = f"{epochs} epochs" if steps is None else f"{steps} steps"
    result.add_argument("--steps", type=positive, metavar="N", help=f"updates to make (default: {length})")
    result.add_argument("--epochs", type=positive, metavar="N", help="passes over the data to make")
    result.add_argument(
        "--batch-size", type=positive, default=batch_size, metavar="N", help=f"samples a step ({batch_size})"
    )
    result.set_defaults(default_steps=steps, default_epochs=epochs)
    return result


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def steps_to_make(args: argparse.Namespace, samples: int) -> int:
    """Return how many steps --steps and --epochs ask for, the shorter of the two if both are given.

    `samples` is the length of the training set; the last batch of an epoch may be a short one.
    """
    steps, epochs = args.steps, args.epochs
    if steps is None and epochs is None:
        steps, epochs = args.default_steps, args.default_epochs
    limits: list[int] = []
    if steps is not None:
        limits.append(steps)
    if epochs is not None:
        limits.append(epochs * math.ceil(samples / args.batch_size))
    return min(limits)
