"""What a forward changes besides its output, saved so that it can be run again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from torch import nn

from mimose.exactness.attributes import Attributes, HeldObjects
from mimose.exactness.changes import (
    Slot,
    buffer_slots,
    running_statistics,
    union,
)
from mimose.exactness.findings import Findings
from mimose.exactness.impurities import (
    GLOBAL_GENERATORS,
    AttributesSlot,
    RandomSlot,
    own_slots,
)
from mimose.exactness.late_answers import LateAnswers
from mimose.exactness.random_state import accelerators_of
from mimose.exactness.snapshot import Snapshot
from mimose.exactness.unit import Unit

_SMALL = 4096
"""Buffers of so many elements are saved each step, in case they begin to change."""


class Rollback:
    """Saves before each forward what forwards change, and puts it back if one fails.

    As long as a unit has not told what its calls change, and in each step without a
    plan, all that might change is saved and compared; else only what is known to.

    Args:
        model: The root.
        units: Its units.
        answers: Tells what only an accelerator knows.
        findings: Tells when something of the units is found out.
        objects: Those that the units hold.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        answers: LateAnswers,
        findings: Findings,
        objects: HeldObjects,
    ) -> None:
        self._objects = objects
        self._findings = findings
        self._known_at = -1
        """The version of the findings with which all units were known."""
        self._model = model
        self._units = units
        self._answers = answers
        self._changing: tuple[Slot, ...] = ()
        """What forwards were seen to change."""
        self.renew()
        self._is_wide = True
        self._has_compared = False
        """Whether a forward has run to its end since a unit was last unknown."""

    def renew(self) -> None:
        """Look at the model's modules anew: they are others."""
        modules = self._model.modules()
        self._attributes = Attributes(m for m in modules if _is_of_users(m))
        self._snapshot = self.snapshot()
        self._is_settled = False

    def snapshot(self) -> Snapshot:
        """Return a snapshot, not yet taken, of what a forward changes."""
        modules = list(self._model.modules())
        units = [slot for unit in self._units for slot in unit.changing()]
        small = [slot for slot in buffer_slots(modules) if slot.numel <= _SMALL]
        known = union(running_statistics(modules), units, self._changing)
        # Once a unit's calls have told, an edit shows in versions alone.
        planned = {
            id(module)
            for unit in self._units
            if not (unit.is_kept or unit.is_known)
            for module in unit.module.modules()
        }
        inside = own_slots([m for m in modules if id(m) in planned], math.inf)
        outside = own_slots([m for m in modules if id(m) not in planned], _SMALL)
        others = [*inside, *outside, *GLOBAL_GENERATORS]
        return Snapshot(accelerators_of(self._model), known, others, small)

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
        # Whatever is put back, it has to go with the numbers beside it.
        state = self._attributes.read()
        containers = self._attributes.containers()
        self._before = state, self._attributes.places, containers

    def narrow(self) -> None:
        """Ask nothing of the forward that has begun: it turned out one under a plan."""
        if self._is_settled and self._has_compared:
            self._is_wide = False

    def learn(self) -> Mapping[object, str]:
        """Take note, where all was saved, of what the forward has changed.

        Returns:
            By slot, what makes a layer impure that has it: see `Unit.impurity`.
        """
        if not self._is_wide:
            return {}
        self._has_compared = True
        running = running_statistics(self._model.modules())
        found = self._snapshot.compare(without=running)
        self._note(slot for slot, _ in found.changed)
        if found.flags:
            self._answers.ask(
                found.flags,
                lambda changed: self._note(compress(found.unclear, changed)),
            )
        return {
            slot.key: slot.why(state)
            for slot, state in found.changed
            if isinstance(slot, AttributesSlot | RandomSlot)
        }

    def covers(self, keys: Iterable[object]) -> bool:
        """Whether the slots of all these keys were saved."""
        return self._snapshot.covers(keys)

    def restore(self) -> None:
        """Put everything back, tensors in place."""
        self._snapshot.restore()
        if self._attributes.differ(self._before[0]):
            self._attributes.undo(*self._before)
        self._objects.put_back()

    def _note(self, slots: Iterable[Slot]) -> None:
        changed = union(self._changing, slots)
        if len(changed) > len(self._changing):
            self._changing, self._is_settled = changed, False


def _is_of_users(module: nn.Module) -> bool:
    """Whether its forward may set attributes: torch's own modules set none."""
    return not type(module).__module__.startswith("torch.nn.")
