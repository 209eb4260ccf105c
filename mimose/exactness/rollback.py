"""What a forward changes besides its output, saved so that it can be run again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import torch
from torch import nn

from mimose.exactness.context import RandomState, accelerators_of
from mimose.exactness.findings import Findings
from mimose.exactness.guard import Key, State, held_objects
from mimose.exactness.late_answers import LateAnswers
from mimose.exactness.side_effects import (
    Generators,
    SavedTensors,
    TensorSlot,
    running_statistics,
    tensor_slots,
    union,
)
from mimose.exactness.unit import Unit
from mimose.torch_private import buffers_of, submodules_of

_SMALL = 4096
"""Buffers of so many elements are saved each step, in case they begin to change."""


class Snapshot:
    """A model as when a step began: random state, and all that a forward may change.

    Args:
        model: The model.
        changing: Places of tensors that forwards are known to change.
        others: Those that they might change besides; saved where `take` is told to.
    """

    def __init__(
        self,
        model: nn.Module,
        changing: Iterable[TensorSlot],
        others: Iterable[TensorSlot],
    ) -> None:
        modules = list(model.modules())
        self._devices = accelerators_of(model)
        self._generators = Generators(modules)
        users = [module for module in modules if _is_of_users(module)]
        tables = [*map(vars, users), *map(submodules_of, users), *held_objects(users)]
        tables += [table for m in modules if (table := buffers_of(m))]
        self._tables = [table for table in tables if isinstance(table, dict)]
        self._state: State | None = None
        self._changing = union(changing)
        known = {slot.key for slot in self._changing}
        self._others = [slot for slot in union(others) if slot.key not in known]
        small = (slot for slot in self._others if slot.numel <= _SMALL)
        self._constants = [(slot, slot.read()) for slot in small]
        self._saved = SavedTensors(())

    def take(self, *, is_wide: bool = True) -> None:
        """Take the snapshot, over an earlier one.

        Args:
            is_wide: Whether to save what might change, too.
        """
        self._random = RandomState(self._devices)
        self._generators.take()
        if self._state is None or not self._state.is_now():
            self._state = State(self._tables)
        slots = [*self._changing, *self._others] if is_wide else self._changing
        self._saved = SavedTensors(slots)
        if not is_wide:
            self._constants = [(s, s.read_after(old)) for s, old in self._constants]
            self._saved.states += self._constants

    def compare(
        self, known: Iterable[TensorSlot]
    ) -> tuple[list[TensorSlot], list[tuple[TensorSlot, torch.Tensor]]]:
        """Return what has changed since; see `SavedTensors.compare`."""
        return self._saved.compare(known)

    def covers(self, keys: Iterable[Key]) -> bool:
        """Whether the tensors at all these places were saved."""
        return set(keys) <= {slot.key for slot, _ in self._saved.states}

    def restore(self) -> None:
        """Put everything back, tensors in place."""
        assert self._state is not None
        self._random.restore()
        self._generators.restore()
        self._state.put()
        for slot, state in self._saved.states:
            slot.restore(state)


class Rollback:
    """Saves before each forward what forwards change, and puts it back if one fails.

    As long as a unit has not told what its calls change, and in each step without a
    plan, all tensors that might change are saved and compared; else only those that are
    known to.

    Args:
        model: The root.
        units: Its units.
        answers: Tells what only an accelerator knows.
        findings: Tells when something of the units is found out.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        answers: LateAnswers,
        findings: Findings,
    ) -> None:
        self._findings = findings
        self._known_at = -1
        """The version of the findings with which all units were known."""
        self._model = model
        self._units = units
        self._answers = answers
        self._changing: tuple[TensorSlot, ...] = ()
        """What forwards were seen to change."""
        self._is_wide = True
        self._has_compared = False
        """Whether a forward has run to its end since a unit was last unknown."""
        self.renew()

    def renew(self) -> None:
        """Look at the model's modules anew: they are others."""
        self._snapshot = self.snapshot()
        self._is_settled = False

    def snapshot(self) -> Snapshot:
        """Return a snapshot, not yet taken, of what a forward changes."""
        modules = list(self._model.modules())
        units = [slot for unit in self._units for slot in unit.may_change()]
        known = union(running_statistics(modules), units, self._changing)
        return Snapshot(self._model, known, tensor_slots(modules))

    def take(self, *, is_planned: bool) -> None:
        """Save what the forward to come may change.

        Args:
            is_planned: Whether it runs under a plan and is not measured.
        """
        knows = self._known_at == self._findings.version
        if not knows:
            knows = all([unit.is_known or unit.is_kept for unit in self._units])
            self._known_at = self._findings.version if knows else -1
        if not knows or not self._is_settled:
            self._snapshot = self.snapshot()
        self._is_settled = knows
        self._has_compared = self._has_compared and knows
        self._is_wide = not (knows and is_planned and self._has_compared)
        self._snapshot.take(is_wide=self._is_wide)

    def narrow(self) -> None:
        """Ask nothing of the forward that has begun: it turned out one under a plan."""
        if self._is_settled and self._has_compared:
            self._is_wide = False

    def learn(self) -> None:
        """Take note, where all was saved, of what the forward has changed."""
        if not self._is_wide:
            return
        self._has_compared = True
        running = running_statistics(self._model.modules())
        changed, unclear = self._snapshot.compare(running)
        self._note(changed)
        if unclear:
            slots = [slot for slot, _ in unclear]
            self._answers.ask(
                [flag for _, flag in unclear],
                lambda differ: self._note(compress(slots, differ)),
            )

    def covers(self, keys: Iterable[Key]) -> bool:
        """Whether the tensors at all these places were saved."""
        return self._snapshot.covers(keys)

    def restore(self) -> None:
        """Put everything back, tensors in place."""
        self._snapshot.restore()

    def _note(self, slots: Iterable[TensorSlot]) -> None:
        changed = union(self._changing, slots)
        if len(changed) > len(self._changing):
            self._changing, self._is_settled = changed, False


def _is_of_users(module: nn.Module) -> bool:
    """Whether its forward may set attributes: torch's own modules set none."""
    return not type(module).__module__.startswith("torch.nn.")
