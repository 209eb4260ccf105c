"""Operators that save a tensor first and fill it afterwards.

Note: [Where a recomputation may end]
A recomputation ends as the last tensor that is needed is saved, in the midst of an
operator. Most save what they are given and what they have made, so nothing is missing.
But one that saves an auxiliary tensor, and then has its kernel fill it, leaves it as
the allocator gave it: RReLU does so with its noise. So the first recomputation runs to
its end, and what is saved without a graph is compared: as it is saved, and at the end.
A layer in which it differs runs to its end from then on. Since memory that was freed
may hold the very values of the forward, torch's own such operators are known by name
besides. A call that saves another number of tensors went another way, and is looked at
in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from mimose.tensors import is_plain, sum_of_words, tensors_in
from mimose.torch_private import (
    pop_saved_hooks,
    push_saved_hooks,
    sequence_number,
    storage_key,
    top_saved_hooks,
    without_dispatch_modes,
)

_FILL_LATER = "RreluWithNoiseBackward"


class EarlySaves(contextlib.AbstractContextManager["EarlySaves"]):
    """Compares what is saved meanwhile with what it is at the end.

    Args:
        own: The layer's own tensors, which its operators may save and change.

    Attributes:
        n_saved: How many tensors were saved.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._own = {_key(tensor) for tensor in own}
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.n_saved = 0

    def __enter__(self) -> EarlySaves:
        outer = top_saved_hooks(False)
        pack, unpack = outer or (_same, _same)

        def noted(tensor: torch.Tensor) -> Any:
            self.n_saved += 1
            self.note(tensor)
            return pack(tensor)

        push_saved_hooks(noted, unpack)
        return self

    def __exit__(self, *_: object) -> None:
        pop_saved_hooks()

    def note(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that is saved now."""
        if tensor.requires_grad or not is_plain(tensor) or _key(tensor) in self._own:
            return
        with without_dispatch_modes():  # nobody is to count this
            kept = tensor.detach()
            self._seen.append((kept, _sum(kept)))

    def differences(self) -> list[torch.Tensor]:
        """Return a flag, true where a tensor was filled later; [] where none can be.

        What was saved is not held any longer.
        """
        seen, self._seen = self._seen, []
        with without_dispatch_modes():
            found = [torch.as_tensor(_sum(t) != before) for t, before in seen]
            return [torch.stack(found).any()] if found else []


def fills_later(output: object, began: int) -> bool:
    """Whether a call has run an operator that is known to fill later what it saves.

    Args:
        output: What the call returned.
        began: What `next_sequence_number` told as it began.
    """
    left = [tensor.grad_fn for tensor in tensors_in(output)]
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen or sequence_number(node) < began:
            continue
        if node.name().startswith(_FILL_LATER):
            return True
        seen.add(node)
        left.extend(parent for parent, _ in node.next_functions)
    return False


def _sum(tensor: torch.Tensor) -> Any:
    total = sum_of_words(tensor)
    return int(total) if total.is_cpu else total


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage()) if is_plain(tensor) else id(tensor)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
