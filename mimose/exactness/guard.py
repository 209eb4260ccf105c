"""What a recomputation has to find as its forward did.

Note: [Entered, left, recomputed]
What a layer reads is taken note of twice. As a call enters: attributes, hooks inside,
what chooses kernels, buffers by reference. As it leaves: weights, buffers and tensors
among the attributes, with their versions, and modes. A recomputation sets the former
and the modes back where they are others by then, and puts back behind it what it has
found; it does not begin where the weights are others.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import nn

from mimose.exactness.attributes import (
    INTERNAL,
    Attributes,
    Held,
    HeldObjects,
    Places,
    State,
)
from mimose.exactness.changes import BufferSlot
from mimose.exactness.global_flags import Flags, flags_now, with_flags
from mimose.exactness.inner_hooks import HookCalls, InnerHooks
from mimose.exactness.named_errors import Naming
from mimose.exactness.structure import Structure, Tables, filled_as
from mimose.exceptions import ChangedWeightsError
from mimose.inputs.compiled import plain_modules
from mimose.inputs.sharding import is_sharded
from mimose.tensors import version
from mimose.torch_private import (
    buffers_of,
    parameters_of,
    sharded_weights,
    version_of,
)

_TRAINING = operator.attrgetter("training")
_LEARNS = operator.attrgetter("requires_grad")


class Guarded(Protocol):
    """A unit that takes note of what its recomputations tell."""

    def note_recomputed(self) -> None:
        """Take note that it is about to be recomputed."""
        ...

    def keep_alike(self, why: str) -> None:
        """Never recompute it again."""
        ...

    def refuse_late_change(self, buffers: list[BufferSlot]) -> None:
        """Raise an error: its forward has changed buffers as never before."""
        ...


class Entered(NamedTuple):
    """What a call has found: Note: [Entered, left, recomputed]."""

    attributes: State
    places: Places
    """Where these attributes are."""
    variant: int
    """Of what flags there are among them."""
    modules: tuple[nn.Module, ...]
    tables: Tables
    """Of the modules."""
    hooks: HookCalls | None
    flags: Flags
    objects: Held
    buffers: tuple[list[Any], list[int]]
    """Those that no forward has changed yet, and their versions."""


class GuardState(NamedTuple):
    """What a call has left: Note: [Entered, left, recomputed]."""

    entered: Entered
    places: TensorPlaces
    tensors: list[Any]
    versions: list[int]
    modes: tuple[bool, ...]
    """Which modules are in training mode, and which of the tensors learn."""
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]]
    """Buffers that the forward has put others in place of: tables, names, the old."""


class TensorPlaces(NamedTuple):
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
    """Makes a recomputation find what its forward did: [Entered, left, recomputed].

    A weight or buffer that is replaced or changed in place before the recomputation
    would give, silently, other gradients than the bare model's; so would a tensor among
    its attributes. What is written through ``.data`` cannot be seen.

    Args:
        name: The unit's, for the error.
        module: The unit.
        unit: Takes note of its recomputations, and of those that went wrong.
        objects: Those that the layers hold.

    Attributes:
        naming: Names the unit in the errors of its recomputations.
        attributes: Those that are no tensors.
        changes_weights: Whether its own forward does, as the first one told.
        uncounted: The name of a tensor of its own whose edits nobody counts, since it
            was made under ``torch.inference_mode()``; "" without one.
        is_other: Whether a tensor has come among its attributes since its calls have
            told what they change. Until they have told anew, it is kept.
    """

    def __init__(
        self, name: str, module: nn.Module, unit: Guarded, objects: HeldObjects
    ) -> None:
        self._objects = objects
        self._once: set[tuple[int, str]] = set()
        """Where tensors have come late, by table and name."""
        self._name = name
        self._unit = unit
        self.naming = Naming(name, unit.keep_alike)
        self._structure = Structure(module)
        self._note()

    def renew(self) -> bool:
        """Look at the modules anew, if they are others; return whether they are.

        So they are where a tensor has come among the attributes.
        """
        if not self._structure.renew() and not self.is_other:
            return False
        self._note()
        return True

    def _note(self) -> None:
        self._modules = self._structure.modules
        self.attributes = Attributes(self._modules)
        # A compiler would make other code for each change of a table of hooks.
        self._hooks = InnerHooks(plain_modules(self._modules[0]))
        self.begin_anew()
        self.changes_weights = False
        self.uncounted = _uncounted(self._modules)

    def begin_anew(self) -> None:
        """Look at the weights alone: what a forward changes is to be found out."""
        self._all = _places(self._weights())
        self._buffers = TensorPlaces((), ())
        self._left_out: frozenset[object] = frozenset()
        self._places: Places | None = None
        """Of attributes, as tensors were last looked for; None: they are not."""
        self.is_other = False
        self._entered: Entered | None = None

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
        self._left_out = frozenset(slot.key for slot in left_out)
        self._buffers = _places(map(buffers_of, self._modules), self._left_out)
        self._all = self._tensors()
        self.attributes.read()
        self._places = self.attributes.places
        self.uncounted = _uncounted(self._modules)

    def _tensors(self) -> TensorPlaces:
        buffers = map(buffers_of, self._modules)
        tables = [*self._weights(), *buffers, *map(vars, self._modules)]
        return _places(tables, self._left_out)

    def _look_for_tensors(self) -> None:
        """Find out whether a tensor has come among the attributes, or an object."""
        self._places = self.attributes.places
        self._objects.note_anew()
        known = {(id(table), name) for table, name in zip(*self._all, strict=True)}
        found = zip(*self._tensors(), strict=True)
        new = [(t, name) for t, name in found if (id(t), name) not in known]
        if new:
            tables, names = zip(*new, strict=True)
            before = self._all
            self._all = TensorPlaces(before.tables + tables, before.names + names)
            keys = {(id(table), name) for table, name in new}
            self.is_other |= not keys <= self._once
            self._once |= keys

    # ------------------------------------------------------------------ the forward

    def enter(self) -> Entered:
        """Return what a call finds that begins now; the same as long as it is that."""
        state, flags = self.attributes.read(), flags_now()
        if self.attributes.places is not self._places is not None:
            self._look_for_tensors()
        hooks, buffers = self._hooks.call(), self._buffers.read()
        objects = self._objects.found()
        last = self._entered
        if (
            last is not None
            and state is last.attributes
            and hooks is None is last.hooks
            and flags == last.flags
            and objects is last.objects
            and not buffers[0]
            and not last.buffers[0]
        ):
            return last
        found = Entered(
            state,
            self.attributes.places,
            self.attributes.variant,
            self._modules,
            self._structure.tables,
            hooks,
            flags,
            objects,
            buffers,
        )
        self._entered = found if hooks is None else None  # what hooks hold is let go
        return found

    def leave(self, entered: Entered) -> GuardState:
        """Return what a call leaves that has run.

        Args:
            entered: What it found.

        Raises:
            LateChangeError: It has edited a buffer as never before.
        """
        replaced = self._replaced(*entered.buffers) if entered.buffers[0] else []
        tensors, versions = self._all.read()
        modes = _modes(self._modules, tensors)
        return GuardState(entered, self._all, tensors, versions, modes, replaced)

    def _replaced(
        self, before: list[Any], versions: list[int]
    ) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        now, versions_now = self._buffers.read()
        if versions_now == versions and all(map(operator.is_, now, before)):
            return []
        found = list(zip(*self._buffers, before, now, strict=True))
        edited = [
            BufferSlot(table, name)
            for (table, name, old, _), n in zip(found, versions, strict=True)
            if version(old) != n
        ]
        if edited:
            self._unit.refuse_late_change(edited)
        return [(t, name, old) for t, name, old, new in found if new is not old]

    def note_recomputed(self) -> None:
        """Take note that it is about to be recomputed, where no error names it."""
        self._unit.note_recomputed()

    # ------------------------------------------------------------------ recomputing

    def restored(
        self, before: GuardState
    ) -> contextlib.AbstractContextManager[None] | None:
        """Return what a recomputation is to run in; None where all is as it was.

        Where that is so, `settle` has to follow it.

        Args:
            before: What the forward has left.

        Raises:
            ChangedWeightsError: The weights are not those of the forward any more.
            RecomputationError: A tensor among the attributes is not.
        """
        tensors, versions = before.places.read()
        if not all(map(operator.is_, tensors, before.tensors)):
            self._refuse(before.places, map(operator.is_not, tensors, before.tensors))
        if versions != before.versions:
            self._refuse(before.places, map(operator.ne, versions, before.versions))
        entered = before.entered
        if (
            self.attributes.differ(entered.attributes)
            or self._hooks.any()
            or entered.hooks is not None
            or flags_now() != entered.flags
            or self._objects.differ(entered.objects)
            or before.replaced
            or _modes(entered.modules, tensors) != before.modes
            or self._structure.is_refilled()
            or self._structure.tables is not entered.tables
        ):
            return self._as_it_was(before)
        return None

    @contextlib.contextmanager
    def midway(self, entered: Entered) -> Iterator[None]:
        """Be what a recomputation runs in while its forward is still running.

        A layer that takes a gradient in its forward has itself recomputed so.

        Args:
            entered: What the forward has found.
        """
        with (
            self.attributes.as_in(entered.attributes, entered.places),
            self._hooks.as_in(entered.hooks),
        ):
            yield

    def settle(self, before: GuardState, containers: Sequence[Any]) -> None:
        """Put back what a recomputation that has ended early has left of attributes.

        Args:
            before: What the forward has left.
            containers: What `Attributes.containers` has returned before.
        """
        found = before.entered
        if self.attributes.differ(found.attributes):
            self.attributes.undo(found.attributes, found.places, containers)

    def refreshed(self, before: GuardState) -> GuardState:
        """Return what another recomputation finds, as this one leaves it."""
        tensors, versions = before.places.read()
        return before._replace(tensors=tensors, versions=versions)

    @contextlib.contextmanager
    def _as_it_was(self, before: GuardState) -> Iterator[None]:
        entered, tensors = before.entered, before.tensors
        with contextlib.ExitStack() as stack:
            stack.enter_context(filled_as(entered.tables))
            stack.enter_context(
                self.attributes.as_in(entered.attributes, entered.places)
            )
            stack.enter_context(entered.objects.as_then())
            stack.enter_context(self._hooks.as_in(entered.hooks))
            for table, name, old in before.replaced:
                stack.callback(table.__setitem__, name, table[name])
                table[name] = old
            stack.enter_context(with_flags(entered.flags))
            now = _modes(entered.modules, tensors)
            stack.callback(_set, entered.modules, now, tensors)
            _set(entered.modules, before.modes, tensors)
            yield

    def _refuse(self, places: TensorPlaces, is_changed: Iterable[bool]) -> NoReturn:
        table, name = next(compress(zip(*places, strict=True), is_changed))
        if any(table is vars(module) for module in self._modules):
            self.naming.refuse(f"its attribute {name!r} was changed after its forward")
        msg = (
            f"weights or buffers of {self._name} were replaced or changed in place "
            f"after its forward and before its backward (torch.func."
            f"functional_call, or an optimizer step in between?); recomputed with "
            f"them it would give other gradients. Run the backward before, or "
            f"leave the layer out with attach(layers=...)"
        )
        raise ChangedWeightsError(msg)


def _modes(modules: Sequence[nn.Module], tensors: Sequence[Any]) -> tuple[bool, ...]:
    """Return what is in training mode, and which of the tensors learn."""
    try:
        learn = tuple(map(_LEARNS, tensors))
    except AttributeError:  # no tensor any more
        learn = tuple(getattr(t, "requires_grad", False) for t in tensors)
    return (*map(_TRAINING, modules), *learn)


def _set(
    modules: Sequence[nn.Module], modes: Sequence[bool], tensors: Sequence[Any]
) -> None:
    n_modules = len(modules)
    for module, mode in zip(modules, modes[:n_modules], strict=True):
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
) -> TensorPlaces:
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
    return TensorPlaces(
        tuple(table for table, _ in found), tuple(name for _, name in found)
    )
