"""How far backward passes go, as a manifest says it, and what the coordinator knows of it to assign virtual nodes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from virtualflow.protocol.settings import MAX_CLASSES

Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]


class BackwardSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """``spec.backward`` of a job: what :class:`virtualflow.PartialBackward` says, but for the model's blocks."""

    fractions: Annotated[tuple[Fraction, ...], msgspec.Meta(min_length=1, max_length=MAX_CLASSES)]
    rotate: bool = True
    scale: Literal["Mean", "Sum"] = "Mean"
    full_every: Annotated[int, msgspec.Meta(ge=1)] | None = None


class PassClass(msgspec.Struct, frozen=True):
    """Neighbouring virtual nodes whose backward passes go equally far, for a job's life."""

    cost: Fraction
    """The computing of one, as a share of that of a virtual node with a whole pass; on average over the steps."""
    reach: Fraction
    """The part of the model's blocks that the longest of its passes reaches: with it goes what activations take."""


def class_of(virtual_node: int, virtual_nodes: int, classes: int) -> int:
    """Of equally large classes of neighbours, the one to which a virtual node belongs."""
    return virtual_node * classes // virtual_nodes
