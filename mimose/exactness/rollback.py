"""Saves what a forward changes besides its output, so that it can run again."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress

import torch
from torch import nn

from mimose.exactness.context import accelerators_of, saved_random_state
from mimose.exactness.findings import Findings
from mimose.exactness.guard import INTERNAL, Key, State, held_objects
from mimose.exactness.layer import Layer
from mimose.exactness.side_effects import generators
from mimose.exactness.slots import (
    SavedTensors,
    TensorSlot,
    running_statistics,
    tensor_slots,
)
from mimose.tensors import is_newer, tensors_in, version
from mimose.torch_private import buffers_of, cached_parametrizations, submodules_of

_READ = operator.methodcaller("read")
_SMALL = 4096
"""Buffers with at most this many elements are saved in each step, because they may
begin to change."""


class Snapshot:
    """A model when a step begins: random state, and all that a forward may change.

    Args:
        model: The model.
        changing: Places of tensors that forwards were seen to change.
    """

    def __init__(self, model: nn.Module, changing: Iterable[TensorSlot]) -> None:
        modules = list(model.modules())
        self._devices = accelerators_of(model)
        self._generators = generators(modules)
        users = [module for module in modules if _is_of_users(module)]
        tables = [*map(vars, users), *map(submodules_of, users), *held_objects(users)]
        tables += [table for m in modules if (table := buffers_of(m))]
        self._tables = [table for table in tables if isinstance(table, dict)]
        self._state: State | None = None
        self._changing = list(dict.fromkeys(changing))
        others = set(tensor_slots(modules)).difference(self._changing)
        self._unsaved: list[tuple[int, int]] = []
        self._small = [slot for slot in others if _is_small(slot.now())]
        self._large = others.difference(self._small)
        self.saved = SavedTensors(())

    def take(self, *, is_wide: bool = True) -> None:
        """Take the snapshot, in place of an earlier one.

        Args:
            is_wide: Whether to save all tensors that might change.
        """
        self._restore_random = saved_random_state(self._devices)
        self._computed = set(cached_parametrizations())
        self._drawn = list(map(_READ, self._generators))
        if self._state is None or not self._state.is_now():
            self._state = State(self._tables)
        large = self._large if is_wide else ()
        self._unsaved = [] if is_wide else list(map(_version, self._large))
        self.saved = SavedTensors([*self._changing, *self._small, *large])

    def is_now(self) -> bool:
        """Whether the modules' attributes are what they were when it was taken."""
        return self._state is not None and self._state.is_now()

    def has_missed(self) -> bool:
        """Whether a tensor has changed that was not saved."""
        now = map(_version, self._large)
        return bool(self._unsaved) and any(map(operator.ne, self._unsaved, now))

    def restore(self) -> None:
        """Restore everything, tensors in place."""
        assert self._state is not None
        self._restore_random()
        for generator, drawn in zip(self._generators, self._drawn, strict=True):
            generator.restore(drawn)
        self._state.put()
        for slot, state in self.saved.states:
            slot.restore(state)
        computed = cached_parametrizations()  # they change buffers as they are computed
        for key in set(computed) - self._computed:
            del computed[key]

    @property
    def graph_ids(self) -> Mapping[Key, int]:
        """The ids of attributes that held a tensor with a graph, by place."""
        assert self._state is not None
        return self._state.graph_ids


class Rollback:
    """Saves before each forward what it may change, and restores it after a failure.

    Until all layers' calls have shown what they change, and in each step without a
    plan, all tensors that might change are saved and compared. Otherwise only small
    tensors are saved, and those that were seen to change.

    Args:
        model: The model.
        layers: Its layers.
        findings: Its version shows that more about the layers was found.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        findings: Findings,
    ) -> None:
        self._findings = findings
        self._model = model
        self._layers = layers
        self._changing: set[TensorSlot] = set()
        """Places that forwards were seen to change."""
        self.is_wide = True
        self._has_compared = False
        """Whether a forward was compared after all layers were known."""
        self._of_step: tuple[tuple[int, Snapshot], Snapshot] | None = None
        """The snapshot of `Session.step`, and the findings' version and the forwards'
        snapshot of then. To make it takes as long as a forward of many layers."""
        self.renew()

    def renew(self) -> None:
        """Make the snapshot again, because the model's modules have changed."""
        self._version = -1
        """The findings' version when the snapshot was made."""
        self._running = running_statistics(self._model.modules())
        self._snapshot = self._make()

    @contextmanager
    def of_step(self, *, is_outdated: bool) -> Iterator[Snapshot]:
        """Save all that the forwards of one `Session.step` may change, until it ends.

        Args:
            is_outdated: Whether the model's modules have changed since the last
                forward.
        """
        of, made = (self._findings.version, self._snapshot), self._of_step
        self._of_step = None  # a step inside this one makes its own
        if is_outdated or made is None or made[0] != of or not made[1].is_now():
            made = of, self._make()
        snapshot = made[1]
        snapshot.take()
        try:
            yield snapshot
        finally:
            snapshot.saved = SavedTensors(())
            self._of_step = made

    def _make(self) -> Snapshot:
        """Return a snapshot of what a forward changes, not yet taken."""
        layers = (slot for layer in self._layers for slot in layer.may_change())
        return Snapshot(self._model, [*self._running, *layers, *self._changing])

    def take(self, *, is_planned: bool) -> None:
        """Save what the next forward may change.

        Args:
            is_planned: Whether it runs under a plan and is not measured.
        """
        if self._version != self._findings.version:
            self._version = self._findings.version
            self._snapshot = self._make()
            self._has_compared = False
        self.is_wide = not (is_planned and self._has_compared)
        self._snapshot.take(is_wide=self.is_wide)

    def learn(self) -> None:
        """Record what the forward has changed; everything was saved."""
        self._has_compared = all([u.is_known or u.is_kept for u in self._layers])
        changed, asked = self._snapshot.saved.compare(self._running)
        self._note(changed)
        flags = list(asked.values())
        self._findings.defer(flags, lambda differ: self._note(compress(asked, differ)))

    def covers(self, keys: Iterable[Key]) -> bool:
        """Whether the tensors at all these places were saved."""
        return set(keys) <= {slot.key for slot, _ in self._snapshot.saved.states}

    def has_missed(self) -> bool:
        """Whether the forward has changed a tensor that `restore` cannot restore."""
        return self._snapshot.has_missed()

    def restore(self, began: int | None = None) -> None:
        """Restore everything, tensors in place.

        An attribute that held a tensor with its graph cannot be: it is deleted if the
        forward has set it, which sets it again. A list or dict that a hook has filled
        stays, and what it holds is found to be held.

        Args:
            began: What `next_sequence_number` returned before a forward that runs
                again; None if no such attribute matters.
        """
        self._snapshot.restore()
        if began is None:
            return
        before = self._snapshot.graph_ids
        for table in map(vars, self._model.modules()):
            for name in table.keys() - INTERNAL:
                value = table[name]
                is_set = isinstance(value, (torch.Tensor, tuple)) or (
                    before.get((id(table), name), id(value)) != id(value)
                )
                if is_set and any(is_newer(t, began) for t in tensors_in(value)):
                    del table[name]

    def _note(self, slots: Iterable[TensorSlot]) -> None:
        new = set(slots) - self._changing
        if new:
            self._changing |= new
            self._version = -1


def _version(slot: TensorSlot) -> tuple[int, int]:
    """Return which tensor is at a place, and how often it was edited."""
    tensor = slot.now()
    return id(tensor), 0 if tensor is None else version(tensor)


def _is_small(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor is small and counts its edits."""
    return tensor is not None and tensor.numel() <= _SMALL and not tensor.is_inference()


def _is_of_users(module: nn.Module) -> bool:
    """Whether its forward may set attributes, which torch's own modules do not."""
    return not type(module).__module__.startswith("torch.nn.")
