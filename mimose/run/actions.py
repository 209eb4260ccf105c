"""Running one event under an action: kept, or recomputed in backward.

Note: [Why the tensors travel positionally]
`torch.utils.checkpoint` restores autocast for the devices of its *positional* tensors
only, and notices an in-place edit only of them. So every tensor among the keyword
arguments and inside containers is passed positionally, and put back in its place inside
the region.

Note: [Random state]
`checkpoint` copies an accelerator's random state once for each positional tensor in the
forward, and once more for each in backward. So it is told to leave random state alone,
and the region saves it: once for each device that a tensor given, or a weight, is on.

Note: [Whose containers]
The first call gets the caller's own lists and dicts: what a layer adds to them is the
caller's. The recomputation gets copies of them as they were before, each time new; of
other objects, too: see `mimose.exact.handed`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint

from mimose.exact.guard import Look, Surroundings
from mimose.exact.handed import Handed, HandedObjects
from mimose.exact.input_watch import Marks, is_edited, marks
from mimose.exact.named_errors import can_name
from mimose.exact.random_state import RandomState, accelerators
from mimose.torch_private import pytree
from mimose.types import OnRecompute

Forward: TypeAlias = Callable[..., Any]
Rebuild: TypeAlias = Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]]

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_PASSED = (torch.Tensor, *_PLAIN)
_CHECKPOINTS_OWN = frozenset(inspect.signature(checkpoint).parameters)
"""Names that `checkpoint` would take for its own options."""


def recompute(
    forward: Forward,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    before: contextlib.AbstractContextManager[None] | None = None,
    on_recompute: OnRecompute | None = None,
    surroundings: Surroundings | None = None,
    devices: tuple[torch.device, ...] = (),
    handed: HandedObjects | None = None,
    early_stop: bool = True,
) -> Any:
    """Call `forward` now without keeping its activations, and again in backward.

    Exact: gradients, random state and buffers are those of a plain call. `checkpoint`
    restores autocast, the region torch's random state, and `before` the rest.

    Args:
        forward: What to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        before: Entered around each recomputation: puts back what `forward` changes.
        on_recompute: Called in backward with a function that recomputes, which it has
            to call and whose result it has to return, and with the tensors given. A
            second call of that function begins with the same random state.
        surroundings: Makes sure of the weights and modes of what is recomputed.
        devices: Accelerators that `forward` may draw on, besides those of its tensors.
        handed: Knows what `forward` does to objects among its arguments.
        early_stop: Whether the recomputation may end at the last tensor that is
            needed.

    Returns:
        What `forward` returns.

    Raises:
        ChangedWeightsError: In backward, where weights were changed meanwhile.
        RecomputationError: In backward, where the recomputation is not the same.
        LateChangeError: Now, where a buffer has begun to change.
    """
    tensors, others, rebuild, taken = _positional(args, kwargs, handed)
    own = (args, kwargs) if rebuild is not None else None
    region = _Region(forward, own, rebuild, on_recompute, surroundings, devices)
    if handed is not None and taken:
        region.on_called = lambda: handed.settle(taken)
    naming = None if surroundings is None else surroundings.naming
    if (before is None and naming is None) or not can_name():
        return checkpoint(
            region,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=early_stop,
            **others,
        )
    contexts = (naming or contextlib.nullcontext(), before or contextlib.nullcontext())
    return checkpoint(
        region,
        *tensors,
        use_reentrant=False,
        preserve_rng_state=False,
        early_stop=early_stop,
        context_fn=lambda: contexts,
        **others,
    )


class _Region:
    """What `checkpoint` calls: the forward, and in backward `on_recompute`.

    See Note: [Whose containers].
    """

    __slots__ = (
        "_devices",
        "_forward",
        "_is_first",
        "_look",
        "_marks",
        "_on_recompute",
        "_own",
        "_random",
        "_rebuild",
        "_surroundings",
        "on_called",
    )

    def __init__(
        self,
        forward: Forward,
        own: tuple[Sequence[Any], Mapping[str, Any]] | None,
        rebuild: Rebuild | None,
        on_recompute: OnRecompute | None,
        surroundings: Surroundings | None,
        devices: tuple[torch.device, ...],
    ) -> None:
        self._forward = forward
        self._own = own
        self._rebuild = rebuild
        self._on_recompute = on_recompute
        self._surroundings = surroundings
        self._devices = devices
        self._random: RandomState | None = None
        self._look: Look | None = None
        self._marks: Marks | None = None
        self._is_first = True
        self.on_called: Callable[[], None] | None = None
        """Called once, when the first call has run."""

    def __call__(self, *given: Any, **others: Any) -> Any:
        if self._is_first:
            self._is_first = False
            return self._first(given, others)
        around = self._surroundings
        if around is None or self._look is None:
            return self._again(given, others)
        before = self._look
        context = around.restored(before)
        if self._marks is not None and is_edited(self._marks):
            around.refuse_edited()
        if context is None and not around.changes_itself:
            return self._again(given, others)
        try:
            with context or contextlib.nullcontext():
                return self._again(given, others)
        finally:
            # What the recomputation itself has changed, another may find changed.
            self._look = around.look(before.slots)._replace(modes=before.modes)

    def _first(self, given: Sequence[Any], others: Mapping[str, Any]) -> Any:
        args, kwargs = given, others
        if self._own is not None:
            args, kwargs = self._own
            self._own = None
            self._marks = marks(args, kwargs)
        around = self._surroundings
        counted = [] if around is None else around.buffer_versions()
        self._random = self._random_state(given)
        output = self._forward(*args, **kwargs)
        if self.on_called is not None:
            self.on_called()
            self.on_called = None
        if around is not None:
            if counted != around.buffer_versions():
                around.refuse_late_change(counted)
            self._look = around.look()
        return output

    def _random_state(self, given: Sequence[Any]) -> RandomState:
        devices = accelerators(given)
        if devices != self._devices:
            devices = tuple(dict.fromkeys((*self._devices, *devices)))
        return RandomState(devices)

    def _again(self, given: Sequence[Any], others: Mapping[str, Any]) -> Any:
        """Recompute from the random state of the first call; put back what is now."""
        before = self._random
        assert before is not None

        def forward() -> Any:
            before.restore()
            args, kwargs = given, others
            if self._rebuild is not None:
                args, kwargs = self._rebuild(given)
            return self._forward(*args, **kwargs)

        now = before.as_now()
        try:
            if self._on_recompute is None:
                return forward()
            tensors = [item for item in given if isinstance(item, torch.Tensor)]
            return self._on_recompute(forward, tensors)
        finally:
            now.restore()


def _positional(
    args: Sequence[Any], kwargs: Mapping[str, Any], handed: HandedObjects | None
) -> tuple[Sequence[Any], Mapping[str, Any], Rebuild | None, list[Handed]]:
    """Return what to pass by position, by name, and how to put it back in place.

    See Note: [Why the tensors travel positionally].
    """
    names = []
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            names.append(name)
        elif not isinstance(value, _PLAIN) or name in _CHECKPOINTS_OWN:
            return _flattened(args, kwargs, handed)
    for value in args:
        if not isinstance(value, _PASSED):
            return _flattened(args, kwargs, handed)
    if not names:
        return args, kwargs, None, []
    others = {name: kwargs[name] for name in kwargs if name not in names}
    n_args = len(args)

    def rebuild(given: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        named = dict(zip(names, given[n_args:], strict=True))
        return given[:n_args], {**others, **named}

    return (*args, *[kwargs[name] for name in names]), {}, rebuild, []


def _flattened(
    args: Sequence[Any], kwargs: Mapping[str, Any], handed: HandedObjects | None
) -> tuple[Sequence[Any], Mapping[str, Any], Rebuild, list[Handed]]:
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in where]
    for i in where:
        leaves[i] = None
    taken = [] if handed is None else handed.take(leaves)

    def rebuild(given: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        copies: dict[int, Any] = {}
        filled = [
            leaf.again(copies) if isinstance(leaf, Handed) else leaf for leaf in leaves
        ]
        for i, tensor in zip(where, given, strict=True):
            filled[i] = tensor
        call_args, call_kwargs = pytree.tree_unflatten(filled, spec)
        return call_args, call_kwargs

    return tensors, {}, rebuild, taken
