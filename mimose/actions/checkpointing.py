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
other objects, too: see `mimose.exactness.handed`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint

from mimose.actions.host import AwayInput
from mimose.exactness.early_saves import Branches, Count, Way
from mimose.exactness.guard import Entered, GuardState, ModuleGuard
from mimose.exactness.handed import Handed, HandedObjects
from mimose.exactness.input_watch import Marks, is_edited, marks
from mimose.exactness.random_state import RandomState, accelerators
from mimose.torch_private import (
    is_checkpoint_debugged,
    next_sequence_number,
    pytree,
)
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
    buffers: contextlib.AbstractContextManager[None] | None = None,
    on_recompute: OnRecompute | None = None,
    guard: ModuleGuard | None = None,
    devices: tuple[torch.device, ...] = (),
    handed: HandedObjects | None = None,
    early_stop: bool = True,
    branches: Branches | None = None,
    away: AwayInput | None = None,
) -> Any:
    """Call `forward` now without keeping its activations, and again in backward.

    Exact: gradients, random state and buffers are those of a plain call. `checkpoint`
    restores autocast, the region torch's random state, and `buffers` themselves.

    Args:
        forward: What to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        buffers: Entered around each recomputation: puts those back that `forward`
            changes.
        on_recompute: Called in backward with a function that recomputes, which it has
            to call and whose result it has to return, and with the tensors given. A
            second call of that function begins with the same random state.
        guard: Makes sure of the weights and modes of what is recomputed.
        devices: Accelerators that `forward` may draw on, besides those of its tensors.
        handed: Knows what `forward` does to objects among its arguments.
        early_stop: Whether the recomputation may end at the last tensor that is
            needed.
        branches: Knows which calls' may not.
        away: One of the tensors, which is held elsewhere until then.

    Returns:
        What `forward` returns.

    Raises:
        ChangedWeightsError: In backward, where weights were changed meanwhile.
        RecomputationError: In backward, where the recomputation is not the same.
        LateChangeError: Now, where a buffer has begun to change.
    """
    entered = None if guard is None else guard.enter()
    if guard is not None and guard.is_other:
        return forward(*args, **kwargs)
    call = _positional(args, kwargs, handed)
    own = None if call.rebuild is None else (args, kwargs)
    sent = _Sent(away, call.tensors) if away is not None else None
    if sent is not None:
        own, call = (args, kwargs), call._replace(tensors=sent.stand_ins)
    names = not is_checkpoint_debugged()  # only then may regions have a context
    region = _Region(
        forward,
        own,
        call,
        handed,
        on_recompute,
        guard,
        entered,
        devices,
        sent,
        branches,
        names=names,
    )
    options: dict[str, Any] = {}
    if (buffers is not None or guard is not None) and names:
        naming = contextlib.nullcontext() if guard is None else guard.naming
        contexts = naming, buffers or contextlib.nullcontext()
        options["context_fn"] = lambda: contexts
    return checkpoint(
        region,
        *call.tensors,
        use_reentrant=False,
        preserve_rng_state=False,
        early_stop=early_stop,
        **options,
        **call.others,
    )


class _Passed(NamedTuple):
    """A call's arguments as `checkpoint` is given them."""

    tensors: Sequence[Any]
    """By position."""
    others: Mapping[str, Any]
    """By name."""
    rebuild: Rebuild | None = None
    """Puts them back in their places; None where they are there."""
    objects: Sequence[Handed] = ()
    """Those among them that may change."""


class _Sent:
    """A tensor that is held elsewhere, and its places among a call's tensors.

    Args:
        away: Holds it.
        tensors: The call's, by position.

    Attributes:
        stand_ins: What is passed by position in the forward.
    """

    __slots__ = ("_away", "_places", "stand_ins")

    def __init__(self, away: AwayInput, tensors: Sequence[Any]) -> None:
        self._away = away
        self._places = [i for i, each in enumerate(tensors) if away.is_of(each)]
        self.stand_ins = self._with(tensors, away.stand_in)

    def brought(self, given: Sequence[Any]) -> Sequence[Any]:
        """Return what was passed by position, the tensor among them."""
        return self._with(given, self._away.bring())

    def _with(self, given: Sequence[Any], tensor: torch.Tensor) -> Sequence[Any]:
        places = self._places
        return [tensor if i in places else each for i, each in enumerate(given)]


class _Region:
    """What `checkpoint` calls: the forward, and in backward `on_recompute`.

    See Note: [Whose containers].
    """

    __slots__ = (
        "_branches",
        "_devices",
        "_entered",
        "_forward",
        "_guard",
        "_handed",
        "_is_first",
        "_marks",
        "_names",
        "_objects",
        "_on_recompute",
        "_own",
        "_random",
        "_rebuild",
        "_sent",
        "_state",
        "_way",
    )

    def __init__(
        self,
        forward: Forward,
        own: tuple[Sequence[Any], Mapping[str, Any]] | None,
        call: _Passed,
        handed: HandedObjects | None,
        on_recompute: OnRecompute | None,
        guard: ModuleGuard | None,
        entered: Entered | None,
        devices: tuple[torch.device, ...],
        sent: _Sent | None,
        branches: Branches | None,
        *,
        names: bool,
    ) -> None:
        self._forward = forward
        self._own = own
        self._rebuild = call.rebuild
        self._objects = call.objects
        self._handed = handed
        self._on_recompute = on_recompute
        self._guard = guard
        self._devices = devices
        self._names = names
        self._sent = sent
        self._branches = branches
        self._way = Way(0, 0)
        self._random: RandomState | None = None
        self._entered = entered
        """What the forward has found, until it has run."""
        self._state: GuardState | None = None
        self._marks: Marks | None = None
        self._is_first = True

    def __call__(self, *given: Any, **others: Any) -> Any:
        if self._is_first:
            self._is_first = False
            return self._first(given, others)
        return self._recompute(given, others)

    def _recompute(self, given: Sequence[Any], others: Mapping[str, Any]) -> Any:
        guard, before = self._guard, self._state
        if guard is None:
            return self._again(given, others)
        if before is None:
            assert self._entered is not None
            with guard.midway(self._entered):
                return self._again(given, others)
        if not self._names:
            guard.note_recomputed()
        setting = guard.restored(before)
        if self._marks is not None and is_edited(self._marks):
            guard.naming.refuse_edited()
        if setting is None:
            containers = guard.attributes.containers()
            try:
                return self._again(given, others)
            finally:
                guard.settle(before, containers)
                if guard.changes_weights:
                    self._state = guard.refreshed(before)
        try:
            with setting:
                return self._again(given, others)
        finally:
            # What the recomputation itself has changed, another may find changed.
            self._state = guard.refreshed(before)

    def _first(self, given: Sequence[Any], others: Mapping[str, Any]) -> Any:
        args, kwargs = given, others
        if self._own is not None:
            args, kwargs = self._own
            self._own = None
            self._marks = marks(args, kwargs)
        guard, entered = self._guard, self._entered
        devices = accelerators(given)
        if devices != self._devices:
            devices = tuple(dict.fromkeys((*self._devices, *devices)))
        self._random = RandomState(devices)
        hooks = None if entered is None else entered.hooks
        first_node = next_sequence_number()
        with (
            contextlib.nullcontext() if hooks is None else hooks.watched(),
            Count() as count,
        ):
            output = self._forward(*args, **kwargs)
        variant = 0 if entered is None else entered.variant
        self._way = Way(count.n_saved, variant)
        branches = self._branches
        if branches is not None and not branches.is_known(self._way):
            branches.note(output, first_node)
        if self._handed is not None and self._objects:
            self._handed.settle(self._objects)
            self._objects = ()
        if guard is not None and entered is not None:
            self._state = guard.leave(entered)
            self._entered = None
        return output

    def _again(self, given: Sequence[Any], others: Mapping[str, Any]) -> Any:
        """Recompute from the random state of the first call; put back what is now."""
        before = self._random
        assert before is not None
        if self._sent is not None:
            given = self._sent.brought(given)

        def forward() -> Any:
            before.restore()
            args, kwargs = given, others
            if self._rebuild is not None:
                args, kwargs = self._rebuild(given)
            branches, way = self._branches, self._way
            if branches is None or branches.may_end_early(way):
                return self._forward(*args, **kwargs)
            saves = branches.early_saves(way)
            try:
                with saves:
                    return self._forward(*args, **kwargs)
            finally:
                if not branches.is_known(way):
                    branches.check(saves)

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
) -> _Passed:
    """Pass all tensors by position.

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
        return _Passed(args, kwargs)
    others = {name: kwargs[name] for name in kwargs if name not in names}
    n_args = len(args)

    def rebuild(given: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        named = dict(zip(names, given[n_args:], strict=True))
        return given[:n_args], {**others, **named}

    return _Passed((*args, *[kwargs[name] for name in names]), {}, rebuild)


def _flattened(
    args: Sequence[Any], kwargs: Mapping[str, Any], handed: HandedObjects | None
) -> _Passed:
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in where]
    for i in where:
        leaves[i] = None
    objects = () if handed is None else handed.take(leaves)

    def rebuild(given: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        copies: dict[int, Any] = {}
        filled = [
            leaf.again(copies) if isinstance(leaf, Handed) else leaf for leaf in leaves
        ]
        for i, tensor in zip(where, given, strict=True):
            filled[i] = tensor
        call_args, call_kwargs = pytree.tree_unflatten(filled, spec)
        return call_args, call_kwargs

    return _Passed(tensors, {}, rebuild, objects)
