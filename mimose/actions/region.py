"""A call that runs again in backward, where its unit is known well.

Note: [Regions of our own]
`torch.utils.checkpoint` serves every call, and takes several times as long as a small
layer itself: it makes its hooks, contexts and closures anew each time, looks at all
that may be set, and names what it saves. Once a unit's calls have told what they change
and were compared, most of that is known: then what is saved is taken note of here, by
hooks as `checkpoint` has them. A holder stands for each tensor saved; the first that a
backward asks for has the forward run again, up to the last tensor that is needed, and
each holder that is still alive gets its own. Another backward has it run again.

Who is not served here is handed to `checkpoint`: calls whose arguments are no plain
tensors, numbers and tuples, units that change buffers, and calls inside of somebody
else's hooks or modes.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from mimose.actions.host import AwayInput
from mimose.exactness.autocast import autocast_now, in_autocast
from mimose.exactness.early_saves import Way
from mimose.exactness.guard import Entered, GuardState
from mimose.exactness.input_watch import Marks
from mimose.exactness.random_state import RandomState, accelerators
from mimose.exactness.unit import Unit
from mimose.torch_private import (
    NO_GRAPH_TASK,
    StopRecomputation,
    current_graph_task,
    drop_saved_hooks,
    eval_frame_callback,
    is_checkpoint_debugged,
    n_function_modes,
    next_sequence_number,
    push_saved_hooks,
    top_saved_hooks,
    version_of,
)
from mimose.worker import lock

_TENSORS = frozenset((torch.Tensor, nn.Parameter))
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_ON_CPU = ("cpu",)

_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


class _NotPlainError(Exception):
    """An argument is neither a plain tensor nor a number, nor a tuple of these."""


class Inputs:
    """What a call is given, held for its recomputation without its graph.

    Attributes:
        args: As they are passed again.
        kwargs: The same by name.
        tensors: All tensors among them.
        versions: How often each was changed in place.
        noted: The caller's tensors, which are not held.
        away: The one among them that is held elsewhere; stands in its place.
    """

    __slots__ = ("_seen", "args", "away", "kwargs", "noted", "tensors", "versions")

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        away: AwayInput | None = None,
    ) -> None:
        self.away = away
        self.noted: Marks = []
        self.tensors: list[torch.Tensor] = []
        self.versions: list[int] = []
        self._seen: dict[int, Any] = {}
        self.args = [self._again(value) for value in args]
        self.kwargs = {name: self._again(value) for name, value in kwargs.items()}
        self._seen.clear()

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        away: AwayInput | None = None,
    ) -> Inputs | None:
        """Take a call's arguments; None where some are of another kind."""
        try:
            return cls(args, kwargs, away)
        except _NotPlainError:
            return None

    @property
    def are_edited(self) -> bool:
        """Whether a tensor was changed in place since."""
        return list(map(version_of, self.tensors)) != self.versions

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The accelerators that the tensors are on."""
        away = () if self.away is None else (self.away.stand_in,)
        return accelerators((*self.tensors, *away))

    def given(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments, once more; what is away is brought."""
        if self.away is None:
            return self.args, self.kwargs
        brought = self.away.bring()
        args = [self._filled(value, brought) for value in self.args]
        kwargs = {n: self._filled(value, brought) for n, value in self.kwargs.items()}
        return args, kwargs

    def _filled(self, value: Any, brought: torch.Tensor) -> Any:
        if value is self.away:
            return brought
        if type(value) is tuple:
            return tuple([self._filled(item, brought) for item in value])
        return value

    def _again(self, value: Any) -> Any:
        """Return what is passed again: a tensor with a graph is cut off from it."""
        kind = type(value)
        if kind in _TENSORS:
            return self._tensor(value)
        if kind in _PLAIN:
            return value
        if kind is tuple:
            return tuple([self._again(item) for item in value])
        raise _NotPlainError

    def _tensor(self, value: torch.Tensor) -> Any:
        found = self._seen.get(id(value))
        if found is not None:
            return found
        if value.is_inference():
            raise _NotPlainError
        counted = version_of(value)
        if self.away is not None and self.away.is_of(value):
            self._seen[id(value)] = self.away
            self.noted.append((weakref.ref(value), counted))
            return self.away
        again = value if value.is_leaf else value.detach().requires_grad_()
        self._seen[id(value)] = again
        self.noted.append((weakref.ref(value), counted))
        self.tensors.append(again)
        self.versions.append(counted)
        return again


class _Holder(dict[Any, torch.Tensor]):
    """Stands for a saved tensor: by backward, what it was recomputed to."""

    __slots__ = ("__weakref__", "kind")

    kind: _Kind


def has_outer_modes() -> bool:
    """Whether somebody else watches what is saved, or what is called."""
    return (
        top_saved_hooks(True) is not None
        or n_function_modes() > 0
        or is_checkpoint_debugged()
    )


class Region:
    """One call of a unit, run again whenever a backward needs what it saved.

    See Note: [Regions of our own].

    Args:
        unit: The unit.
        inputs: What it is called with.
    """

    __slots__ = (
        "_autocast",
        "_entered",
        "_holders",
        "_inputs",
        "_kinds",
        "_random",
        "_state",
        "_unit",
    )

    def __init__(self, unit: Unit, inputs: Inputs) -> None:
        self._unit = unit
        self._inputs = inputs
        self._holders: list[weakref.ref[_Holder]] = []
        self._entered: Entered | None = None
        """What the forward has found, as long as it runs."""
        self._state: GuardState | None = None
        devices = inputs.devices
        if devices != unit.devices:
            devices = tuple(dict.fromkeys((*unit.devices, *devices)))
        self._random = RandomState(devices)
        self._kinds: tuple[str, ...] = _ON_CPU
        if devices:
            self._kinds = (*{device.type: None for device in devices}, "cpu")
        self._autocast = autocast_now(self._kinds)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward on the caller's own arguments.

        Raises:
            LateChangeError: A buffer has begun to change.
        """
        guard = self._unit.guard
        self._entered = entered = guard.enter()
        if guard.is_other:
            return self._unit.forward(*args, **kwargs)
        first_node = next_sequence_number()
        outer = top_saved_hooks(False)
        try:
            push_saved_hooks(self._pack, self._unpack)
            if entered.hooks is None:
                output = self._unit.forward(*args, **kwargs)
            else:
                with entered.hooks.watched():
                    output = self._unit.forward(*args, **kwargs)
        finally:
            drop_saved_hooks(outer)
        self._state, self._entered = guard.leave(entered), None
        branches = self._unit.branches
        if not branches.is_known(Way(len(self._holders), entered.variant)):
            branches.note(output, first_node)
        return output

    def _pack(self, tensor: torch.Tensor) -> _Holder:
        holder = _Holder()
        holder.kind = tensor.shape, tensor.dtype, tensor.device
        self._holders.append(weakref.ref(holder))
        return holder

    def _unpack(self, holder: _Holder) -> torch.Tensor:
        task: Any = current_graph_task()
        tensor = holder.pop(task, None)
        if tensor is None:
            if eval_frame_callback() is None:
                self.recompute(holder, task)
            else:
                _untraced()(self, holder, task)
            tensor = holder.pop(task)
        return tensor

    def recompute(self, wanted: _Holder, task: int) -> None:
        """Run the forward again, and hand out what it saves.

        Args:
            wanted: The holder that is asked for.
            task: The backward's number; outside of any, this holder alone is served.

        Raises:
            ChangedWeightsError: The weights are not those of the forward any more.
            RecomputationError: The arguments are not, or other tensors were saved.
        """
        guard, before = self._unit.guard, self._state
        setting: contextlib.AbstractContextManager[None] | None
        if before is not None:
            setting = guard.restored(before)
        else:
            assert self._entered is not None
            setting = guard.midway(self._entered)
        if self._inputs.are_edited:
            guard.naming.refuse_edited()
        only = wanted if task == NO_GRAPH_TASK else None
        if setting is None and before is not None:
            containers = guard.attributes.containers()
            try:
                is_same = self._recompute_cast(task, only)
            finally:
                guard.settle(before, containers)
        else:
            with setting or contextlib.nullcontext():
                is_same = self._recompute_cast(task, only)
            if before is not None:
                self._state = guard.refreshed(before)
        if not is_same or task not in wanted:
            guard.naming.refuse_other_tensors()

    def _recompute_cast(self, task: int, only: _Holder | None) -> bool:
        """Recompute in the forward's autocast."""
        if not self._autocast and not autocast_now(self._kinds):
            return self._recompute(task, only)
        with in_autocast(self._kinds, self._autocast):
            return self._recompute(task, only)

    def _recompute(self, task: int, only: _Holder | None) -> bool:
        """Return whether what is saved now is of the same kinds."""
        left = self._holders[::-1]
        is_same = True
        unit, ends_early, saves = self._unit, True, None
        # A layer that takes a gradient in its forward has not saved all it will.
        if self._state is not None:
            way = Way(len(left), self._state.entered.variant)
            ends_early = unit.branches.may_end_early(way)
            if not unit.branches.is_known(way):
                saves = unit.branches.early_saves(way)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal is_same
            if not left:
                if ends_early:  # the layer has caught the first one
                    raise StopRecomputation
                is_same = False
                return tensor
            if saves is not None:
                saves.note(tensor)
            if tensor.requires_grad:
                tensor = tensor.detach()
            holder = left.pop()()
            if holder is not None:
                kind = tensor.shape, tensor.dtype, tensor.device
                is_same = is_same and kind == holder.kind
                if only is None or holder is only:
                    holder[task] = tensor
            if ends_early and not left:
                raise StopRecomputation
            return tensor

        args, kwargs = self._inputs.given()
        outer = top_saved_hooks(False)
        with _GENERATORS:
            now = self._random.as_now()
            try:
                push_saved_hooks(pack, _same)
                self._random.restore()
                with torch.enable_grad():
                    unit.forward(*args, **kwargs)
            except StopRecomputation:
                pass
            finally:
                drop_saved_hooks(outer)
                now.restore()
        if saves is not None:
            unit.branches.check(saves)
        return is_same and not left


_GENERATORS = lock()
"""Torch's generators are everybody's: of backwards in several threads one at a time
puts its forward's state back and draws again."""


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@functools.cache
def _untraced() -> Callable[[Region, _Holder, int], None]:
    """Return what recomputes, hidden from a compiler that follows the backward."""
    disable: Any = torch.compiler.disable
    hidden: Callable[[Region, _Holder, int], None] = disable(Region.recompute)
    return hidden
