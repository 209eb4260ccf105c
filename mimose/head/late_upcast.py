"""Logits on their way through a loss function that somebody else has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mimose.head.cross_entropy import CAST, cross_entropy
from mimose.torch_private import pytree

_VIEWS = (
    torch.Tensor.contiguous,
    torch.Tensor.flatten,
    torch.Tensor.reshape,
    torch.Tensor.view,
)
_shape: Any = torch.Tensor.shape
_device: Any = torch.Tensor.device
_PLACES = _shape.__get__, _device.__get__


class LateUpcast(torch.Tensor):
    """Logits whose cast to float32 waits for whoever needs all of it.

    Cross-entropy does not: it casts some rows at a time. To all others these are the
    logits, cast if that was asked for. Made by `late`.
    """

    plain: torch.Tensor
    """The logits, not cast."""
    is_cast: bool
    """Whether float32 was asked for."""

    def read(self) -> torch.Tensor:
        """Return what these stand for."""
        return self.plain.float() if self.is_cast else self.plain

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run what the loss function calls."""
        del types
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LateUpcast):
            if func is F.cross_entropy:
                cast = torch.float32 if first.is_cast else None
                return cross_entropy(first.plain, *args[1:], **kwargs, cast=cast)
            if func is torch.Tensor.float and not kwargs and first.plain.dtype in CAST:
                return late(first.plain, is_cast=True)
            if func in _VIEWS:
                viewed = func(first.plain, *args[1:], **kwargs)
                return late(viewed, is_cast=first.is_cast)
            if func in _PLACES:
                return func(first.plain)
        args, kwargs = pytree.tree_map_only(LateUpcast, _READ, (args, dict(kwargs)))
        return func(*args, **kwargs)


_READ = LateUpcast.read


def late(logits: torch.Tensor, *, is_cast: bool = False) -> LateUpcast:
    """Return logits as whoever computes a loss is to see them.

    Args:
        logits: Torch's own, or a parameter.
        is_cast: Whether float32 was asked for.
    """
    made = logits.as_subclass(LateUpcast)
    made.plain, made.is_cast = logits, is_cast
    return made
