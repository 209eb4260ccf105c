"""A module planned for: what its calls change, and where the running step stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from mimose.exactness.attributes import HeldObjects
from mimose.exactness.changes import BufferSlot, buffer_slots, union
from mimose.exactness.early_saves import Branches
from mimose.exactness.findings import Findings
from mimose.exactness.first_call import FirstCall
from mimose.exactness.guard import ModuleGuard
from mimose.exactness.handed import HandedObjects, Knowledge
from mimose.exactness.impurities import own_slots
from mimose.exactness.late_answers import LateAnswers
from mimose.exactness.random_state import accelerators_of
from mimose.exceptions import LateChangeError
from mimose.inputs.compiled import SCRIPTED, CodeInside


def note_shared_weights(units: Sequence[Unit]) -> None:
    """Tell units that have a weight in common."""
    owners: dict[int, set[int]] = {}
    for unit in units:
        for weight in unit.module.parameters():
            owners.setdefault(id(weight), set()).add(unit.index)
    shared = set().union(*(who for who in owners.values() if len(who) > 1))
    for unit in units:
        unit.shares_weights = unit.index in shared


class Unit:
    """A module planned for, and where its calls stand in the running step.

    Args:
        index: Its place among the units.
        name: Its qualified name.
        module: The module.
        findings: Takes note of what is found of it.
        knowledge: What units do to objects that they are handed.
        answers: Tells what only an accelerator knows.
        objects: Those that the units hold.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        findings: Findings,
        knowledge: Knowledge,
        answers: LateAnswers,
        objects: HeldObjects,
    ) -> None:
        self._answers = answers
        self.index = index
        self.name = name
        self.module = module
        self._findings = findings
        self.buffers: tuple[BufferSlot, ...] = ()
        """Those that its forward changes, as far as its calls have told."""
        self.is_known = False
        """Whether a call has told in the present mode."""
        self.is_compared = False
        """Whether a recomputation was compared with its call in the present mode."""
        self.is_proven = False
        """Whether calls have followed a compared one in the present mode."""
        self.is_doubted = False
        """Whether it differed, and the next one is to tell why."""
        self.branches = Branches(module, answers)
        """Of which calls the recomputation may end early."""
        self.handed = HandedObjects(knowledge)
        """What it does to objects among its arguments."""
        self.excluded: set[str] = set()
        """Actions that it may not run under."""
        self.actions: tuple[str, ...] = ()
        """Under the running step's plan, by call."""
        self.n_straight = 0
        """So many of its first calls are simply kept, unless the step is measured."""
        self.calls = 0
        self.n_surrounded = 0
        """Calls that were kept for what was around them."""
        self.forward: Callable[..., Any] = module.forward
        self.waits = False
        """Whether its forward waits for other ranks: its actions are agreed."""
        self.found_flops = 0
        """Of the call that has shown that it runs compiled code."""
        self._note_modules()
        self.guard = ModuleGuard(name, module, self, objects)
        self.shares_weights = False
        """Whether another unit has one of its weights."""

    def plan(self, actions: tuple[str, ...], kept: str) -> None:
        """Take the actions of the calls to come, none of which was made.

        Args:
            actions: By call.
            kept: The action that does nothing.
        """
        self.actions, self.calls, self.n_straight = actions, 0, 0
        if self.is_known:
            is_other = (i for i, action in enumerate(actions) if action != kept)
            self.n_straight = next(is_other, len(actions))

    def take_over(self, forward: Callable[..., Any]) -> None:
        """Take note of the forward that is its own, now that another is in place."""
        self.forward = forward

    @property
    def is_kept(self) -> bool:
        """Whether it turned out that it cannot be recomputed."""
        return self.name in self._findings.kept

    @property
    def is_settled(self) -> bool:
        """Whether nothing of it is to be found out or saved around a recomputation."""
        return (
            self.is_known
            and self.is_compared
            and not self.buffers
            and not self.guard.changes_weights
            and not self.is_compiled
        )

    def keep(self, why: str) -> None:
        """Never recompute it again."""
        self._findings.keep(self, why)

    def keep_alike(self, why: str) -> None:
        """Never recompute it again, nor those that are built as it is.

        Where it was recomputed well before, the cause is in this call, and not in how
        it is built.
        """
        if self.is_proven:
            self._findings.keep(self, why)
        else:
            self._findings.keep_alike(self, why)

    def exclude(self, action: str, why: str) -> None:
        """Never run it under an action again."""
        self.excluded.add(action)
        self._findings.exclude(self, action, why)

    def note_inexact(self, why: str) -> None:
        """Take note that it is recomputed, but not to the bit."""
        self._findings.note_inexact(self, why)

    def note_recomputed(self) -> None:
        """Take note that it is about to be recomputed."""
        self._findings.note_recomputed(self)

    def changing(self) -> tuple[BufferSlot, ...]:
        """Return the buffers that it changes; as long as no call has told, all."""
        if self.is_known or self.is_kept:
            return self.buffers
        return union(self.buffers, buffer_slots(self.module.modules()))

    def learn(self, first: FirstCall, answers: LateAnswers) -> str:
        """Take note of what a first call has changed.

        Args:
            first: The call, run once.
            answers: Tells what only an accelerator knows.

        Returns:
            Why it may not be recomputed; empty where it may.
        """
        told = first.tell()
        self.guard.changes_weights = told.changes_weights
        unclear = [slot for slot, _ in told.unclear]
        known = union(self.buffers, told.buffers)
        self._save(union(known, unclear))
        self.is_known = True
        self._findings.note_change()
        if not unclear:
            return told.impurity

        def tell(changed: Sequence[bool]) -> None:
            pairs = zip(unclear, changed, strict=True)
            same = {slot.key for slot, is_changed in pairs if not is_changed}
            same -= {slot.key for slot in known}
            self._save(slot for slot in self.buffers if slot.key not in same)

        answers.ask([flag for _, flag in told.unclear], tell)
        return told.impurity

    def _save(self, buffers: Iterable[BufferSlot]) -> None:
        self.buffers = tuple(buffers)
        self.guard.watch(self.buffers)

    def impurity(self, changed: Mapping[object, str]) -> str:
        """Return why it may not be recomputed; empty where it may.

        Args:
            changed: What a forward of the model has changed, as `Rollback.learn` tells.
        """
        keys = (slot.key for slot in own_slots(self.module.modules(), 0))
        return next((changed[key] for key in keys if key in changed), "")

    def note_compared(self, *, is_doubted: bool) -> None:
        """Take note that a recomputation was compared, and whether it is in doubt."""
        self.is_doubted, self.is_compared = is_doubted, not is_doubted

    def renew(self) -> None:
        """Note anew what it consists of, if that is something else by now."""
        if self.guard.renew():
            self._note_modules()
            self.branches = Branches(self.module, self._answers)
            self.buffers = ()
            self.forget()

    def _note_modules(self) -> None:
        code = CodeInside(self.module)
        self.is_compiled = code.is_compiled or code.is_scripted
        """Whether a mode that sees operators would change what it runs."""
        self.devices = accelerators_of(self.module)
        """Where its weights are; on a CPU none."""
        if code.is_scripted:
            self.keep(SCRIPTED)

    def forget(self) -> None:
        """Find out anew what its calls change, and whether they can be repeated."""
        self.is_known = self.is_compared = self.is_doubted = self.is_proven = False
        self.n_straight = 0
        self.branches.forget()
        self._findings.note_change()
        self.handed.forget()

    def refuse_late_change(self, buffers: list[BufferSlot]) -> None:
        """Raise an error: its forward has changed buffers as never before.

        Raises:
            LateChangeError: Always.
        """
        self.is_known = self.is_compared = False
        self.n_straight = 0
        self._findings.note_change()
        raise LateChangeError(self.name, [slot.key for slot in buffers])
