"""What a recomputation has to find as the forward left it: weights, buffers, modes."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import torch
from torch import nn

from mimose.exact.changes import BufferSlot
from mimose.exact.impurities import INTERNAL
from mimose.exact.named_errors import Naming
from mimose.exceptions import ChangedWeightsError
from mimose.tensors import version
from mimose.torch_private import (
    buffers_of,
    parameters_of,
    sharded_weights,
    version_of,
)
from mimose.watch.sharding import is_sharded

Versions: TypeAlias = "list[tuple[int, int]]"

_TRAINING = operator.attrgetter("training")
_LEARNS = operator.attrgetter("requires_grad")


class Guarded(Protocol):
    """A unit that takes note of what its recomputations tell."""

    def note_recomputed(self) -> None:
        """Take note that it is about to be recomputed."""
        ...

    def keep(self, why: str) -> None:
        """Never recompute it again."""
        ...

    def refuse_late_change(self, buffers: list[BufferSlot]) -> None:
        """Raise an error: its forward has changed buffers as never before."""
        ...


class GuardState(NamedTuple):
    """What a unit consists of at one moment."""

    places: Places
    tensors: list[Any]
    versions: list[int]
    modes: tuple[bool, ...]
    """Which modules are in training mode, and which of the tensors learn."""


class Places(NamedTuple):
    """Where tensors are: the modules' own tables, and names, one by one."""

    tables: tuple[dict[str, Any], ...]
    names: tuple[str, ...]

    def read(self) -> tuple[list[Any], list[int]]:
        """Return what is there now, and how often it was changed in place.

        Where there is no tensor any more, that is -1.
        """
        found: list[Any] = list(map(dict.get, self.tables, self.names))
        try:
            return found, list(map(version_of, found))
        except (AttributeError, RuntimeError):  # no tensor, or one of inference
            return found, [
                version(t) if isinstance(t, torch.Tensor) else -1 for t in found
            ]


class ModuleGuard:
    """Captures a unit's tensors and modes after its forward, and makes sure of them.

    A weight or buffer that is replaced or changed in place before the recomputation
    would give, silently, other gradients than the bare model's; so would a tensor among
    its attributes. What is written through ``.data`` cannot be seen. A changed mode is
    set back meanwhile.

    Args:
        name: The unit's, for the error.
        module: The unit.
        unit: Takes note of its recomputations, and of those that went wrong.

    Attributes:
        naming: Names the unit in the errors of its recomputations.
        changes_weights: Whether its own forward does, as the first one told.
        uncounted: The name of a tensor of its own whose edits nobody counts, since it
            was made under ``torch.inference_mode()``; "" without one.
        watches_buffers: Whether there are buffers that no forward has changed yet.
    """

    def __init__(self, name: str, module: nn.Module, unit: Guarded) -> None:
        self._name = name
        self._unit = unit
        self.naming = Naming(name, unit.keep)
        self._module = module
        self._modules = tuple(module.modules())
        self.begin_anew()
        self.changes_weights = False
        self.uncounted = _uncounted(self._modules)

    def begin_anew(self) -> None:
        """Look at the weights alone: what a forward changes is to be found out."""
        self._all = _places(self._weights())
        self._buffers = Places((), ())
        self.watches_buffers = False

    def _weights(self) -> list[dict[str, Any]]:
        """Return tables of the weights.

        In those of FSDP groups inside, whole weights and sharded ones take turns; what
        stays are the sharded ones, which an optimizer changes.
        """
        sharded: dict[int, dict[str, Any]] = {}
        for inner in self._modules[1:]:
            if is_sharded(inner):
                for module, name, weight in sharded_weights(inner):
                    sharded.setdefault(id(module), {})[name] = weight
        return [sharded.get(id(m)) or parameters_of(m) for m in self._modules]

    def watch(self, left_out: Iterable[BufferSlot]) -> None:
        """Look at all but these buffers: they are copied for each recomputation."""
        keys = {slot.key for slot in left_out}
        weights = self._weights()
        buffers = list(map(buffers_of, self._modules))
        self._buffers = _places(buffers, keys)
        self.watches_buffers = bool(self._buffers.names)
        self._all = _places([*weights, *buffers, *map(vars, self._modules)], keys)
        self.uncounted = _uncounted(self._modules)

    def buffer_versions(self) -> Versions:
        """Return which the buffers are that are not left out, and how often changed."""
        tensors, versions = self._buffers.read()
        return list(zip(map(id, tensors), versions, strict=True))

    def refuse_late_change(self, before: Versions) -> None:
        """Stop a forward that has changed a buffer as never before.

        Args:
            before: The versions before it.

        Raises:
            LateChangeError: One was changed.
        """
        now = self.buffer_versions()
        if now != before:
            is_other = map(operator.ne, before, now)
            changed = compress(zip(*self._buffers, strict=True), is_other)
            self._unit.refuse_late_change([BufferSlot(*place) for place in changed])

    def refuse_edited(self) -> None:
        """Stop a recomputation whose arguments' tensors were edited in place.

        Raises:
            RecomputationError: Always.
        """
        self.naming.refuse("a tensor among its arguments was edited in place")

    def note_recomputed(self) -> None:
        """Take note that it is about to be recomputed, where no error names it."""
        self._unit.note_recomputed()

    def capture(self, places: Places | None = None) -> GuardState:
        """Return what is there now, in these places or in all."""
        places = self._all if places is None else places
        tensors, versions = places.read()
        return GuardState(places, tensors, versions, self._modes(tensors))

    def restored(
        self, before: GuardState
    ) -> contextlib.AbstractContextManager[None] | None:
        """Return what sets the modes back for a while; None where none was changed.

        Args:
            before: What was there when the forward had run.

        Raises:
            ChangedWeightsError: The weights are not those of the forward any more.
            RecomputationError: An attribute is not.
        """
        tensors, versions = before.places.read()
        if not all(map(operator.is_, tensors, before.tensors)):
            self._refuse(before.places, map(operator.is_not, tensors, before.tensors))
        if versions != before.versions:
            self._refuse(before.places, map(operator.ne, versions, before.versions))
        modes = self._modes(tensors)
        return None if modes == before.modes else self._in_modes(before)

    def _refuse(self, places: Places, is_changed: Iterable[bool]) -> NoReturn:
        table, name = next(compress(zip(*places, strict=True), is_changed))
        if any(table is vars(module) for module in self._modules):
            self.naming.refuse(f"its attribute {name!r} was changed after its forward")
        msg = (
            f"weights or buffers of {self._name} were replaced or changed in place "
            f"after its forward and before its backward (torch.func."
            f"functional_call, or an optimizer step in between?); recomputed with "
            f"them it would give other gradients. Run the backward before, or "
            f"leave the layer out with attach(units=...)"
        )
        raise ChangedWeightsError(msg)

    def _modes(self, tensors: Sequence[Any]) -> tuple[bool, ...]:
        """Return what is in training mode, and which of the tensors learn."""
        try:
            learn = tuple(map(_LEARNS, tensors))
        except AttributeError:  # no tensor any more
            learn = tuple(getattr(t, "requires_grad", False) for t in tensors)
        return (*map(_TRAINING, self._modules), *learn)

    @contextlib.contextmanager
    def _in_modes(self, before: GuardState) -> Iterator[None]:
        now = self._modes(before.tensors)
        self._set(before.modes, before.tensors)
        try:
            yield
        finally:
            self._set(now, before.tensors)

    def _set(self, modes: tuple[bool, ...], tensors: Sequence[Any]) -> None:
        n_modules = len(self._modules)
        for module, mode in zip(self._modules, modes[:n_modules], strict=True):
            module.training = mode
        for tensor, learns in zip(tensors, modes[n_modules:], strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad != learns:
                tensor.requires_grad_(learns)


def _uncounted(modules: Iterable[nn.Module]) -> str:
    return next(
        (
            name
            for module in modules
            for table in (buffers_of(module), vars(module))
            for name, value in table.items()
            if isinstance(value, torch.Tensor) and value.is_inference()
        ),
        "",
    )


def _places(
    tables: Iterable[dict[str, Any]], without: Collection[object] = ()
) -> Places:
    """Find the tensors that count their changes; inference tensors do not.

    Args:
        tables: Where to look.
        without: Keys of slots that are left out.
    """
    found = [
        (table, name)
        for table in tables
        for name, value in table.items()
        if isinstance(value, torch.Tensor)
        and not value.is_inference()
        and name not in INTERNAL
        and (id(table), name) not in without
    ]
    return Places(tuple(table for table, _ in found), tuple(name for _, name in found))
