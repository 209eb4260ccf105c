"""Running one event under an action: kept, or recomputed in backward.

Note: [Why the tensors travel positionally]
`torch.utils.checkpoint` saves the random state of the devices of its *positional*
tensors only, and notices an in-place edit only of them. So every tensor among the
keyword arguments and inside containers is passed positionally, and put back in its
place inside the region.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mimose.surroundings import Look, Surroundings

Forward: TypeAlias = Callable[..., Any]
OnRecompute: TypeAlias = Callable[[Callable[[], Any], Sequence[torch.Tensor]], Any]
Rebuild: TypeAlias = Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]]

_PLAIN = (type(None), bool, int, float, str)
_PASSED = (torch.Tensor, *_PLAIN)
_CHECKPOINTS_OWN = frozenset(inspect.signature(checkpoint).parameters)
"""Names that `checkpoint` would take for its own options."""


def recompute(
    forward: Forward,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    buffers: Sequence[tuple[nn.Module, str]] = (),
    on_recompute: OnRecompute | None = None,
    surroundings: Surroundings | None = None,
    early_stop: bool = True,
) -> Any:
    """Call `forward` now without keeping its activations, and again in backward.

    Exact: gradients, random state and buffers are those of a plain call. `checkpoint`
    restores random state and autocast; `buffers` sees to running statistics.

    Args:
        forward: What to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        buffers: Buffers that `forward` changes, as (module, name): they change in the
            first call only.
        on_recompute: Called in backward with a function that recomputes, which it has
            to call and whose result it has to return, and with the tensors given.
        surroundings: Makes sure of the weights and modes of what is recomputed.
        early_stop: Whether the recomputation may end at the last tensor that is
            needed.

    Returns:
        What `forward` returns.

    Raises:
        ChangedWeightsError: In backward, where weights were changed meanwhile.
    """
    tensors, others, rebuild = _positional(args, kwargs)
    region = _Region(forward, rebuild, on_recompute, surroundings)
    if buffers:
        return checkpoint(
            region,
            *tensors,
            use_reentrant=False,
            early_stop=early_stop,
            context_fn=lambda: (contextlib.nullcontext(), _OldBuffers(buffers)),
            **others,
        )
    return checkpoint(
        region, *tensors, use_reentrant=False, early_stop=early_stop, **others
    )


class _Region:
    """What `checkpoint` calls: the forward, and in backward `on_recompute`."""

    __slots__ = (
        "_forward",
        "_is_first",
        "_look",
        "_on_recompute",
        "_rebuild",
        "_surroundings",
    )

    def __init__(
        self,
        forward: Forward,
        rebuild: Rebuild | None,
        on_recompute: OnRecompute | None,
        surroundings: Surroundings | None,
    ) -> None:
        self._forward = forward
        self._rebuild = rebuild
        self._on_recompute = on_recompute
        self._surroundings = surroundings
        self._look: Look | None = None
        self._is_first = True

    def __call__(self, *given: Any, **others: Any) -> Any:
        args: Sequence[Any] = given
        kwargs: Mapping[str, Any] = others
        if self._rebuild is not None:
            args, kwargs = self._rebuild(given)
        around = self._surroundings
        if self._is_first:
            self._is_first = False
            output = self._forward(*args, **kwargs)
            self._look = None if around is None else around.look()
            return output
        if around is None or self._look is None:
            return self._again(given, args, kwargs)
        before = self._look
        context = around.restored(before)
        if context is None and not around.changes_itself:
            return self._again(given, args, kwargs)
        try:
            with context or contextlib.nullcontext():
                return self._again(given, args, kwargs)
        finally:
            # What the recomputation itself has changed, another may find changed.
            self._look = around.look(before.slots)._replace(modes=before.modes)

    def _again(
        self, given: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self._on_recompute is None:
            return self._forward(*args, **kwargs)
        tensors = [item for item in given if isinstance(item, torch.Tensor)]
        return self._on_recompute(lambda: self._forward(*args, **kwargs), tensors)


def _positional(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any], Rebuild | None]:
    """Return what to pass by position, by name, and how to put it back in place.

    See Note: [Why the tensors travel positionally].
    """
    names = []
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            names.append(name)
        elif not isinstance(value, _PLAIN) or name in _CHECKPOINTS_OWN:
            return _flattened(args, kwargs)
    for value in args:
        if not isinstance(value, _PASSED):
            return _flattened(args, kwargs)
    if not names:
        return args, kwargs, None
    others = {name: kwargs[name] for name in kwargs if name not in names}
    n_args = len(args)

    def rebuild(given: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        named = dict(zip(names, given[n_args:], strict=True))
        return given[:n_args], {**others, **named}

    return (*args, *[kwargs[name] for name in names]), {}, rebuild


def _flattened(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any], Rebuild]:
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in where]
    for i in where:
        leaves[i] = None

    def rebuild(given: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        filled = list(leaves)
        for i, tensor in zip(where, given, strict=True):
            filled[i] = tensor
        call_args, call_kwargs = pytree.tree_unflatten(filled, spec)
        return call_args, call_kwargs

    return tensors, {}, rebuild


def changing_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the buffers that a forward is known to change: running statistics.

    Their operators change them without a trace in the tensor's version.
    """
    return [
        (inner, name)
        for inner, name in all_buffers(module)
        if name.startswith("running_") or name == "num_batches_tracked"
    ]


def all_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return every buffer of a module and those inside it, as (module, name)."""
    return [
        (inner, name)
        for inner in module.modules()
        for name, buffer in inner._buffers.items()
        if buffer is not None
    ]


class _OldBuffers(contextlib.AbstractContextManager[None]):
    """Copies buffers when made; while entered, the modules change copies of those.

    It can be entered more than once: a second backward recomputes again.
    """

    def __init__(self, buffers: Sequence[tuple[nn.Module, str]]) -> None:
        self._buffers = buffers
        self._old = [_copy(module._buffers[name]) for module, name in buffers]
        self._current: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._current = [module._buffers[name] for module, name in self._buffers]
        for (module, name), old in zip(self._buffers, self._old, strict=True):
            module._buffers[name] = _copy(old)

    def __exit__(self, *_: object) -> None:
        for (module, name), buffer in zip(self._buffers, self._current, strict=True):
            module._buffers[name] = buffer


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.detach().clone()
