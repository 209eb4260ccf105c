"""Who else holds a tensor that a node has saved: may its memory be used again?

Note: [Nobody else]
A tensor is held by names of the user's (its Python object is counted), by other nodes
of the graph (they count on its C++ half), by views and detached aliases (on its
storage), and can be reached by weak references. How many of each there are where
nobody else holds it is not known by heart, but seen once, on a small tensor. Any other
count means that it is left as it is. It is seen in a thread of its own, where nobody's
hooks and modes can hold it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch

from mimose.torch_private import base_of, storage_key, storage_users, tensor_users

Holders: TypeAlias = tuple[int, ...]
"""Counts of a tensor, of its base if it has one, and of their storage."""


def is_alone(holders: Holders) -> bool:
    """Whether only the node that saved a tensor holds it: see Note: [Nobody else].

    Args:
        holders: What `holders_of` returned in the node's backward.
    """
    return holders in (_alone(is_view=False), _alone(is_view=True))


def holders_of(tensor: torch.Tensor) -> Holders:
    """Count who holds a tensor, as a backward sees it that has unpacked it."""
    base = base_of(tensor)
    counts = [sys.getrefcount(tensor), *_owners(tensor)]
    if base is not None:
        counts += [sys.getrefcount(base), *_owners(base)]
    storage = tensor.untyped_storage()
    return *counts, sys.getrefcount(storage), storage_users(storage_key(storage))


def _owners(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor_users(tensor), weakref.getweakrefcount(tensor)


@functools.cache
def _alone(*, is_view: bool) -> Holders | None:
    """Return the counts where nobody else holds a tensor; None where torch tells none.

    Args:
        is_view: Whether what is saved is a view of a whole tensor.
    """
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(_seen, is_view).result()


def _seen(is_view: bool) -> Holders | None:
    seen: list[Holders] = []
    made = torch.ones(2, 2, requires_grad=True) * 1.0
    if tensor_users(made) == 0:
        return None
    loss = _See.apply(made.view(4) if is_view else made, seen)  # type: ignore[no-untyped-call]
    del made
    loss.backward()
    return seen[0]


class _See(torch.autograd.Function):
    """Saves a tensor, and counts in backward who holds it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seen: list[Holders]) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        ctx.seen = seen
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (tensor,) = ctx.saved_tensors
        ctx.seen.append(holders_of(tensor))
        return torch.zeros_like(tensor), None
