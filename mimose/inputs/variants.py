"""Variants of a step, told apart by what the model hands to its first layer.

Attention takes another kernel, and holds other tensors, under a mask that hides
nothing: models drop such a mask. On a CPU the mask itself tells (`partial_masks`). On
an accelerator the host would have to wait for it; but what the model hands to its first
layer shows what became of the mask, None or a tensor, and that the host has at hand.

So there a step begins as the variant that came last with such arguments, and is put
right as its first layer is called. Nothing that a plan decides has run by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mimose.inputs.families import digest
from mimose.inputs.shapes import call_shape
from mimose.types import MOST_CONTEXTS, Context


class Variants:
    """Names variants, and remembers which came last."""

    def __init__(self) -> None:
        self._last: dict[Context, Context] = {}

    def expected(self, base: Context) -> Context:
        """Return the context of the variant that came last; the base before any.

        Args:
            base: The context as far as the root's arguments tell it.
        """
        return self._last.get(base, base)

    def seen(
        self, base: Context, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Context:
        """Return the context of the variant whose first layer is called.

        Args:
            base: The context as far as the root's arguments tell it.
            args: What the layer is called with.
            kwargs: What it is called with by name.
        """
        context = digest((base, call_shape(args, kwargs).structure))
        self._last.pop(base, None)
        self._last[base] = context
        if len(self._last) > MOST_CONTEXTS:
            del self._last[next(iter(self._last))]
        return context

    def state_dict(self) -> dict[str, str]:
        """Return what came last, ready for JSON."""
        return dict(self._last)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what came last.

        Args:
            state: What ``state_dict`` returned.
        """
        self._last = {str(base): str(last) for base, last in state.items()}
