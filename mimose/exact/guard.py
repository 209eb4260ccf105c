"""What a recomputation has to find as the forward left it: weights, buffers, modes."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from mimose.exact.named_errors import Naming
from mimose.exceptions import ChangedWeightsError
from mimose.tensors import version
from mimose.torch_private import buffers_of, parameters_of, version_of

Slots: TypeAlias = "tuple[tuple[Mapping[str, torch.Tensor | None], str], ...]"
"""Where the weights and buffers are: the modules' own tables, and names."""

Buffers: TypeAlias = "tuple[tuple[dict[str, torch.Tensor | None], str], ...]"

_TRAINING = operator.attrgetter("training")


class Look(NamedTuple):
    """A unit's surroundings at one moment."""

    slots: Slots
    tensors: list[torch.Tensor | None]
    versions: list[int]
    modes: tuple[bool, ...]


class Surroundings:
    """Looks at a unit's weights and modes after its forward, and makes sure of them.

    A weight or buffer that is replaced or changed in place before the recomputation
    would give, silently, other gradients than the bare model's. What is written
    through ``.data`` cannot be seen. A changed mode is set back meanwhile.

    Args:
        name: The unit's, for the error.
        module: The unit.
        on_restore: Called before each recomputation.
        on_error: Called, with what happened, when a recomputation turns out wrong.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        on_restore: Callable[[], None],
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        self._name = name
        self.naming = None if on_error is None else Naming(name, on_error)
        """Names the unit in the errors of its recomputations."""
        self.on_late_change: Callable[[Buffers], None] = _ignore
        """Raises another error where a buffer has begun to change."""
        self._buffers: Buffers = ()
        self._on_restore = on_restore
        self._modules = tuple(module.modules())
        self._slots = self._slots_without(None)
        self.changes_itself = False
        """Whether its own forward changes its weights, as the first one told."""

    def begin_anew(self) -> None:
        """Look at the weights alone: what a forward changes is to be found out."""
        self._slots = self._slots_without(None)
        self._buffers = ()

    def leave_out(self, keys: Iterable[object]) -> None:
        """Look at all but these buffers: they are copied for each recomputation.

        Args:
            keys: Identity of the module's table, and name, of each.
        """
        buffers = set(keys)
        self._slots = self._slots_without(buffers)
        self._buffers = tuple(
            (buffers_of(module), name)
            for module in self._modules
            for name in _visible(buffers_of(module))
            if (id(buffers_of(module)), name) not in buffers
        )

    def buffer_versions(self) -> list[tuple[int, int]]:
        """Return which the buffers are that are not left out, and how often changed."""
        if not self._buffers:
            return []
        tensors = [there.get(name) for there, name in self._buffers]
        return [(0, -1) if t is None else (id(t), version(t)) for t in tensors]

    def refuse_late_change(self, before: list[tuple[int, int]]) -> None:
        """Stop a forward that has changed a buffer as never before.

        Args:
            before: The versions before it.
        """
        now = self.buffer_versions()
        changed = zip(self._buffers, before, now, strict=True)
        self.on_late_change(tuple(slot for slot, one, other in changed if one != other))

    def refuse_edited(self) -> None:
        """Stop a recomputation whose arguments' tensors were edited in place.

        Raises:
            RecomputationError: Always.
        """
        assert self.naming is not None
        self.naming.refuse("a tensor among its arguments was edited in place")

    def _slots_without(self, left_out: set[object] | None) -> Slots:
        """Name the weights, and the buffers that are not left out; None: all are."""
        slots: list[tuple[Mapping[str, torch.Tensor | None], str]] = []
        for module in self._modules:
            weights, buffers = parameters_of(module), buffers_of(module)
            slots.extend((weights, name) for name in _visible(weights))
            if left_out is not None:
                found = (
                    n for n in _visible(buffers) if (id(buffers), n) not in left_out
                )
                slots.extend((buffers, name) for name in found)
        return tuple(slots)

    def look(self, slots: Slots | None = None) -> Look:
        """Return what is there now, in these slots or in all."""
        slots = self._slots if slots is None else slots
        tensors = [there.get(name) for there, name in slots]
        versions = [version_of(tensor) for tensor in tensors if tensor is not None]
        return Look(slots, tensors, versions, tuple(map(_TRAINING, self._modules)))

    def restored(self, before: Look) -> contextlib.AbstractContextManager[None] | None:
        """Return what sets the modes back for a while; None where none was changed.

        Args:
            before: What was there when the forward had run.

        Raises:
            ChangedWeightsError: The weights are not those of the forward any more.
        """
        self._on_restore()
        now = self.look(before.slots)
        same = all(map(operator.is_, now.tensors, before.tensors))
        if not same or now.versions != before.versions:
            msg = (
                f"weights or buffers of {self._name} were replaced or changed in place "
                f"after its forward and before its backward (torch.func."
                f"functional_call, or an optimizer step in between?); recomputed with "
                f"them it would give other gradients. Run the backward before, or "
                f"leave the layer out with attach(units=...)"
            )
            raise ChangedWeightsError(msg)
        return None if now.modes == before.modes else self._in_modes(before.modes)

    @contextlib.contextmanager
    def _in_modes(self, modes: tuple[bool, ...]) -> Iterator[None]:
        now = tuple(map(_TRAINING, self._modules))
        self._set(modes)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, modes: tuple[bool, ...]) -> None:
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode


def _ignore(_: object) -> None:
    pass


def _visible(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Name the tensors that count their changes; inference tensors do not."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor is not None and not tensor.is_inference()
    ]
