"""A layer: what its calls change, and their actions in the running step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress
from typing import Any, NoReturn

from torch import nn

from mimose.exactness.device_checks import DeviceChecks
from mimose.exactness.findings import Findings
from mimose.exactness.guard import Found, Key, ModuleGuard
from mimose.exactness.side_effects import (
    FirstCall,
    Given,
    TensorSlot,
    accelerators_of,
    tensor_slots,
)
from mimose.exceptions import LateChangeError, RecomputationError
from mimose.inputs.compiled import SCRIPTED, code_inside
from mimose.tensors import operators_of

CONTAINED = "it edits a tensor in a list or dict that it owns"

_MOST_NEW_HOOKS = 3
_FILLS_LATER = "RreluWithNoiseBackward"


def note_shared_weights(layers: Sequence[Layer]) -> None:
    """Mark layers that have a weight in common."""
    owners: dict[int, set[int]] = {}
    for layer in layers:
        for weight in layer.module.parameters():
            owners.setdefault(id(weight), set()).add(layer.index)
    shared = set().union(*(who for who in owners.values() if len(who) > 1))
    for layer in layers:
        layer.shares_weights = layer.index in shared


class Layer:
    """A module that plans decide about, and its calls in the running step.

    Note: [Where a recomputation may end]
    A recomputation ends when the last needed tensor is saved, in the middle of an
    operator. Torch's RReLU saves its noise first and fills it afterwards, so a layer
    with RReLU runs to its end. RReLU is found by its name in the graph. The graph is
    read once for each number of tensors that calls save, because another number means
    another path through the layer.

    Args:
        index: Its place among the layers.
        name: Its qualified name.
        module: The module.
        findings: Records what is found about it.
        device_checks: Read flags on an accelerator after the step.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        findings: Findings,
        device_checks: DeviceChecks,
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self._findings = findings
        self.device_checks = device_checks
        self.slots: tuple[TensorSlot, ...] = ()
        """Places of tensors that its calls were seen to change."""
        self.changing: Collection[Key] = frozenset()
        """Their keys."""
        self.is_known = False
        """Whether a call in the present mode has shown what it changes."""
        self.is_compared = False
        """Whether a recomputation was compared with its call in the present mode."""
        self.is_doubted = False
        """Whether a recomputation differed; the next one shows why."""
        self.runs_to_end = False
        """Whether its recomputations may not end early."""
        self._ways: set[int] = set()
        """Numbers of tensors that its calls have saved."""
        self.excluded: set[str] = set()
        """Actions that it must not use."""
        self.actions: tuple[str, ...] = ()
        """The running step's actions, by call."""
        self.n_straight = 0
        """Number of first calls that are kept without bookkeeping, unless the step is
        measured."""
        self.n_calls = 0
        self._n_new_hooks = 0
        self.forward: Callable[..., Any] = module.forward
        self.waits = False
        """Whether its forward waits for other ranks, so that ranks agree on actions."""
        self.shares_weights = False
        """Whether another layer has one of its weights."""
        self._layout: object = None
        self._note_modules()
        self.guard = ModuleGuard(self)
        self.guard.enter()

    def plan(self, actions: tuple[str, ...], kept: str) -> None:
        """Set the actions of a step's calls, before the first call.

        Args:
            actions: By call.
            kept: The name of `keep`.
        """
        self.actions, self.n_calls, self.n_straight = actions, 0, 0
        if self.is_known:
            is_other = (i for i, action in enumerate(actions) if action != kept)
            self.n_straight = next(is_other, len(actions))

    def take_over(self, forward: Callable[..., Any]) -> None:
        """Record its original forward, which has been replaced."""
        self.forward = forward

    # --------------------------------------------------------------- what may not be

    @property
    def is_kept(self) -> bool:
        """Whether it was found that it cannot be recomputed."""
        return self.name in self._findings.kept

    def keep(self, why: str) -> None:
        """Never recompute it again."""
        self._findings.keep(self, why)

    def keep_alike(self, why: str) -> None:
        """Never recompute it again, nor layers that are built like it.

        If an earlier recomputation was right, the cause is in this call and not in how
        the layer is built: then only this layer is kept.
        """
        if self.is_compared:
            self._findings.keep(self, why)
        else:
            self._findings.keep_alike(self, why)

    def fail(self, why: str, cause: Exception | None = None) -> NoReturn:
        """Raise the error of a recomputation that differs from its forward.

        Args:
            why: What happened.
            cause: The exception that it raised, if any.

        Raises:
            RecomputationError: Always.
        """
        self.keep_alike(why)
        msg = (
            f"{self.name} cannot be recomputed: {why}. It is kept from the next step "
            f"on. This step's gradients are incomplete: zero them and go on, or run "
            f"steps with session.step(closure), which repeats such a step"
        )
        raise RecomputationError(msg) from cause

    def note_new_hooks(self) -> None:
        """Record a call that is kept for new hooks; after a few, keep the layer."""
        self._n_new_hooks += 1
        if self._n_new_hooks > _MOST_NEW_HOOKS:
            self.keep("hooks on modules inside it change from call to call")

    def exclude(self, action: str, why: str) -> None:
        """Never use an action for it again."""
        self.excluded.add(action)
        self._findings.exclude(self, action, why)

    def note_inexact(self, why: str) -> None:
        """Record that it is recomputed, but not bit for bit."""
        self._findings.note_inexact(self, why)

    # ---------------------------------------------------------------- what calls tell

    def learn(self, first: FirstCall) -> str:
        """Record what a first call has changed.

        If a tensor on an accelerator has no new version, only a deferred device check
        shows whether it changed. Until then it counts as changed.

        Args:
            first: The call, which has run once.

        Returns:
            Why it may not be recomputed; "" if it may.
        """
        changed, asked = first.changed()
        unclear = [slot for slot, _ in asked]
        known = {*self.slots, *changed}
        self._save({*known, *unclear})
        self.is_known = True
        self._findings.note_change()

        def tell(differ: Sequence[bool]) -> None:
            self._save({*known, *compress(unclear, differ)})

        if asked:
            self.device_checks.defer([flag for _, flag in asked], tell)
        return first.why_impure()

    def _save(self, slots: Iterable[TensorSlot]) -> None:
        self.slots = tuple(slots)
        self.changing = frozenset(slot.key for slot in self.slots)

    def may_change(self) -> tuple[TensorSlot, ...]:
        """Return the places that it changes; all places until a call has shown them."""
        if self.is_known or self.is_kept:
            return self.slots
        return (*self.slots, *tensor_slots(self.module.modules()))

    def note_compared(self, *, is_doubted: bool) -> None:
        """Record that a recomputation was compared, and whether it differed."""
        self.is_doubted, self.is_compared = is_doubted, not is_doubted

    def note_read(self, given: Given) -> None:
        """Record the inputs of a call that will be recomputed."""
        self._findings.read.append((self, given))

    def note_impure(self, why: str) -> None:
        """Record that the running step showed that it must not be recomputed."""
        self._findings.impure[self] = why

    def note_compiled(self) -> None:
        """Record that a call ran compiled code."""
        self.is_compiled = True
        self._findings.on_compiled()

    def note_way(self, n_saved: int, output: object, began: int) -> None:
        """Record a call's path: see Note: [Where a recomputation may end].

        Args:
            n_saved: Number of tensors that it saved.
            output: What it returned.
            began: What `next_sequence_number` returned when it began.
        """
        if n_saved not in self._ways:
            self._ways.add(n_saved)
            names = operators_of(output, began)
            if any(name.startswith(_FILLS_LATER) for name in names):
                self.runs_to_end = True

    def renew(self, modules: tuple[nn.Module, ...], tensors: Collection[Key]) -> None:
        """Record its modules and tensors; if they have changed, learn it again.

        Args:
            modules: Its module and those inside.
            tensors: Places of its tensors.
        """
        own = frozenset(key for key in tensors if "." not in key[1])
        before, self._layout = self._layout, (modules, own)
        if before is not None and before != self._layout:
            self._note_modules()
            self._save(())
            self.forget()

    def _note_modules(self) -> None:
        has_compiled, has_scripted = code_inside(self.module)
        self.is_compiled = has_compiled or has_scripted
        """Whether it runs compiled code, which a dispatch mode would change."""
        self.devices = accelerators_of(self.module)
        """The accelerators with its weights."""
        if has_scripted:
            self.keep(SCRIPTED)

    def forget(self) -> None:
        """Forget what its calls change, and whether they can be recomputed."""
        self.is_known = self.is_compared = self.is_doubted = False
        self.n_straight = 0
        self._ways.clear()
        self._findings.note_change()

    def _edits(self, found: Found) -> list[Any]:
        """Return the places of the tensors that a call has edited."""
        now = self.guard.left(found.state).versions
        pairs = zip(found.tensors, found.versions, now, strict=True)
        edited = {id(tensor) for tensor, before, after in pairs if before != after}
        return [k for k, tensor in found.state.tensors.items() if id(tensor) in edited]

    def contained_edits(self, found: Found) -> bool:
        """Whether a call has edited a tensor in a container that the layer owns.

        Args:
            found: The state that the call found.
        """
        return any("." in key[1] for key in self._edits(found))

    def raise_if_changed_late(self, found: Found) -> None:
        """Raise an error if its forward edited a tensor for the first time.

        Args:
            found: The state that the call found.

        Raises:
            LateChangeError: It did.
        """
        if found.are_edited:
            edited = self._edits(found)
            self.forget()
            if any("." in key[1] for key in edited):
                self.keep(CONTAINED)
            raise LateChangeError(self.name, edited)
