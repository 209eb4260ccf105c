"""A module planned for: what its calls change, and where the running step stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mimose.exact.changes import Slot, all_slots, union
from mimose.exact.first_call import FirstCall
from mimose.exact.guard import Buffers, Surroundings
from mimose.exact.handed import HandedObjects, Knowledge
from mimose.exact.late_answers import LateAnswers
from mimose.exact.random_state import accelerators_of
from mimose.exceptions import LateChangeError
from mimose.watch.compiled import is_compiled


class Unit:
    """A module planned for, and where its calls stand in the running step."""

    def __init__(self, index: int, name: str, module: nn.Module) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.slots: tuple[Slot, ...] = ()
        """What its forward changes, as far as its calls have told."""
        self.is_known = False
        """Whether a call has told in the present mode."""
        self.is_compared = False
        """Whether a recomputation was compared with its call in the present mode."""
        self.is_doubted = False
        """Whether it differed, and the next one is to tell why."""
        self.handed = HandedObjects(Knowledge())
        """What it does to objects among its arguments."""
        self.actions: tuple[str, ...] = ()
        """Under the running step's plan, by call."""
        self.calls = 0
        self.forward: Callable[..., Any] = module.forward
        self.is_compiled = is_compiled(module)
        self.devices = accelerators_of(module)
        """Where its weights are; on a CPU none."""
        self.is_kept = False
        """Whether it turned out that it cannot be recomputed."""
        self.surroundings = Surroundings(
            name,
            module,
            lambda: self.on_recompute(self),
            lambda why: self.on_failure(self, why),
        )
        self.surroundings.on_late_change = self._changed_late
        self.on_recompute: Callable[[Unit], None] = ignore
        """Called before it is recomputed."""
        self.on_failure: Callable[[Unit, str], None] = ignore
        """Called when it could not be recomputed."""

    def places(self) -> tuple[Slot, ...]:
        """Return what its forward changes; as long as none has told, all it could."""
        if self.is_known or self.is_kept:
            return self.slots
        return union(self.slots, all_slots(tuple(self.module.modules())))

    def learn(
        self,
        first: FirstCall,
        versions: tuple[list[int], list[int]],
        answers: LateAnswers,
    ) -> None:
        """Take note of what a first call has changed.

        Args:
            first: The call, run once.
            versions: Of the weights, before and after.
            answers: Tells what only an accelerator knows.
        """
        self.surroundings.changes_itself = versions[0] != versions[1]
        found = first.compare()
        known = union(self.slots, found.changed)
        self._save(union(known, found.unclear))
        self.is_known = True
        if not found.flags:
            return

        def tell(changed: Sequence[bool]) -> None:
            unclear = zip(found.unclear, changed, strict=True)
            same = {slot.key for slot, is_changed in unclear if not is_changed}
            same -= {slot.key for slot in known}
            self._save(tuple(slot for slot in self.slots if slot.key not in same))

        answers.ask(found.flags, tell)

    def _save(self, slots: tuple[Slot, ...]) -> None:
        self.slots = slots
        self.surroundings.leave_out([slot.key for slot in slots])

    def forget(self) -> None:
        """Find out anew what its calls change, and whether they can be repeated."""
        self.is_known = self.is_compared = self.is_doubted = False
        self.handed.forget()

    def _changed_late(self, where: Buffers) -> None:
        self.is_known = self.is_compared = False
        raise LateChangeError(self.name, [(id(there), name) for there, name in where])


def ignore(*_: object) -> None:
    """Do nothing: what is called as long as nobody asks to be."""
