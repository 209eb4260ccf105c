"""The names of learned quantities: one series each.

Note: [Whose series]
Each series has an owner: the object whose sizes it uses. The series of a family use a
layer's own sizes. Those of the head and the loss use the model's sizes, in one context.
Those of gaps between layers use the model's sizes too, in all contexts with one
structure of arguments. The backward of a forward's first call continues into what is
before it: an embedding, or the head and loss of the forward before. So it uses the
model's sizes, in one context. When an owner is forgotten, so are its series.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from mimose.cost.pattern import Neighbours
from mimose.types import Sizes, StepInput

QuantityKind: TypeAlias = Literal["exact", "transient", "retained"]
"""How it is fitted: see `mimose.cost.series.kinds_of`."""
QuantityName: TypeAlias = Literal[
    "held",
    "host",
    "cost",
    "moved",
    "own output",
    "largest",
    "forward",
    "backward",
    "uncounted",
    "uncounted if all are kept",
    "gap",
    "head",
    "loss",
    "loss without copies",
]

AGAIN = "again"
"""Stands for the action of a kept forward that was read from a recomputation."""


class Quantity(NamedTuple):
    """One quantity of one owner, under one action; hashable, and plain JSON data."""

    kind: QuantityKind
    owner: str
    """A family, a context or a structure: Note: [Whose series]."""
    name: QuantityName
    action: str = ""
    """The action under which it was read; "" if it is the same under all."""
    neighbours: Neighbours = ()
    """The families before and after a call; for a gap, those on its sides."""
    family: str = ""
    """The call's family, if its owner is a context."""
    has_gradients: bool = False
    """Whether gradients were there when the step began: their memory is used again."""


def of_backward(
    kind: QuantityKind,
    step_input: StepInput,
    family: str,
    neighbours: Neighbours,
    action: str = "",
) -> Quantity:
    """Return a quantity of the backward of a call."""
    context = "" if neighbours[0] else step_input.context
    return Quantity(
        kind,
        context or family,
        "backward",
        action,
        neighbours,
        family if context else "",
        step_input.has_gradients,
    )


def backward_sizes(step_input: StepInput, own: Sizes, neighbours: Neighbours) -> Sizes:
    """Return the sizes that a backward depends on: Note: [Whose series]."""
    return own if neighbours[0] else step_input.sizes


def of_gap(
    kind: QuantityKind, step_input: StepInput, neighbours: Neighbours
) -> Quantity:
    """Return a quantity of what runs between two layers' forwards."""
    return Quantity(
        kind,
        step_input.structure,
        "gap",
        neighbours=neighbours,
        has_gradients=step_input.has_gradients,
    )


def of_end(
    kind: QuantityKind,
    step_input: StepInput,
    name: Literal["head", "loss", "loss without copies"],
) -> Quantity:
    """Return a quantity of what runs behind the last layer."""
    return Quantity(
        kind, step_input.context, name, has_gradients=step_input.has_gradients
    )
