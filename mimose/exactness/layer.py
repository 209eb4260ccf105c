"""A layer: what its calls change, and their actions in the running step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, compress
from typing import Any, NoReturn

from torch import nn

from mimose.exactness.context import accelerators_of
from mimose.exactness.findings import Findings
from mimose.exactness.guard import Found, Key, State, state_of_layer
from mimose.exactness.side_effects import FirstCall
from mimose.exactness.slots import TensorSlot, tensor_slots
from mimose.exceptions import ChangedWeightsError, LateChangeError, RecomputationError
from mimose.model.compiled import SCRIPTED, called_attribute, code_inside
from mimose.tensors import nodes_of
from mimose.torch_private import forward_hooks_of, is_of_own_function, version_of

CONTAINED = "it edits a tensor in a list or dict that it owns"

_MOST_NEW_HOOKS = 3
_FILLS_LATER = "RreluWithNoiseBackward"


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
    """

    def __init__(
        self, index: int, name: str, module: nn.Module, findings: Findings
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.findings = findings
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
        self.has_own_functions = False
        """Whether its calls were seen to run a user's ``autograd.Function``. If one was
        not seen, it is recomputed again where its backward reads a tensor twice."""
        self._ways: set[int] = set()
        """Numbers of tensors that its calls have saved."""
        self.excluded: set[str] = set()
        """Actions that it must not use."""
        self.actions: tuple[str, ...] = ()
        """The running step's actions, by call."""
        self.n_straight = 0
        """Number of first calls that are kept without bookkeeping, unless the step is
        measured."""
        self._n_new_hooks = 0
        self.forward: Callable[..., Any] = getattr(module, called_attribute(module))
        self.waits = False
        """Whether its forward waits for other ranks, so that ranks agree on actions."""
        self._layout: object = None
        self._last: State | None = None
        self._seen: State | None = None
        """The state that the last call found, if the next one may find it too."""
        self._hooks: list[weakref.ref[Any]] = []
        """Hooks on modules inside, in the last call."""
        self.has_new_hooks = False
        """Whether the last call found new hooks."""
        self._note_modules()
        self.enter()

    def plan(self, actions: tuple[str, ...], kept: str, is_measured: bool) -> None:
        """Set the actions of a step's calls, before the first call.

        Args:
            actions: By call.
            kept: The name of `keep`.
            is_measured: Whether the step is measured.
        """
        self.actions, self.n_straight = actions, 0
        if self.is_known and not is_measured:
            is_other = (i for i, action in enumerate(actions) if action != kept)
            self.n_straight = next(is_other, len(actions))

    # --------------------------------------------------------------- what may not be

    @property
    def is_kept(self) -> bool:
        """Whether it was found that it cannot be recomputed."""
        return self.name in self.findings.kept

    def keep(self, why: str) -> None:
        """Never recompute it again."""
        self.findings.keep(self.index, why)

    def keep_alike(self, why: str) -> None:
        """Never recompute it again, nor layers that are built like it.

        If an earlier recomputation was right, the cause is in this call and not in how
        the layer is built: then only this layer is kept.
        """
        if self.is_compared:
            self.keep(why)
        else:
            self.findings.keep_alike(self.index, why)

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
        self.findings.exclude(self.index, action, why)

    def wait_for_ranks(self, finer: Iterable[str]) -> None:
        """Record that its forward waits for other ranks.

        Args:
            finer: The actions that decide on each rank by itself, so not allowed.
        """
        self.waits = True
        self.excluded.update(finer)

    def learn(self, first: FirstCall) -> str:
        """Record what a first call has changed.

        If a tensor on an accelerator has no new version, only a deferred device check
        shows whether it changed. Until then it counts as changed.

        Args:
            first: The call, which has run once.

        Returns:
            Why it may not be recomputed; "" if it may.
        """
        changed, unclear = first.changed()
        known = {*self.slots, *changed}
        self._save({*known, *unclear})
        self.is_known = True
        self.findings.version += 1

        def on_flags_read(differ: Sequence[bool]) -> None:
            self._save({*known, *compress(unclear, differ)})

        self.findings.defer(list(unclear.values()), on_flags_read)
        return first.why_impure()

    def _save(self, slots: Iterable[TensorSlot]) -> None:
        self.slots = tuple(slots)
        self.changing = frozenset(slot.key for slot in self.slots)

    def may_change(self) -> tuple[TensorSlot, ...]:
        """Return the places that it changes; all places until a call has shown them."""
        if self.is_known or self.is_kept:
            return self.slots
        return (*self.slots, *tensor_slots(self.module.modules()))

    def note_compiled(self) -> None:
        """Record that a call ran compiled code."""
        self.is_compiled = True
        self.findings.on_compiled()

    def note_way(self, n_saved: int, output: object, began: int) -> None:
        """Record a call's path: see Note: [Where a recomputation may end].

        Args:
            n_saved: Number of tensors that it saved.
            output: What it returned.
            began: What `next_sequence_number` returned when it began.
        """
        if n_saved not in self._ways:
            self._ways.add(n_saved)
            nodes = nodes_of(output, began)
            if any(node.name().startswith(_FILLS_LATER) for node in nodes):
                self.runs_to_end = True
            if any(map(is_of_own_function, nodes)):
                self.has_own_functions = True

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
        self.findings.version += 1

    # --------------------------------------------------------- what a call has found

    def enter(self) -> Found:
        """Return the state that a call finds that begins now.

        See Note: [As a call finds it] of `mimose.exactness.guard`.
        If its modules or tensors have changed, its calls show anew what they change.
        """
        state, self.has_new_hooks = self._last, False
        if state is None or not state.is_now():
            modules = tuple(self.module.modules())
            state = state_of_layer(modules)
            own = frozenset(key for key in state.tensors if "." not in key[1])
            before, self._layout = self._layout, (modules, own)
            if before is not None and before != self._layout:
                self._note_modules()
                self._save(())
                self.forget()
            known = {id(ref()) for ref in self._hooks}
            tables = chain.from_iterable(map(forward_hooks_of, modules))
            hooks = [hook for own, _ in tables for hook in own.values()]
            self.has_new_hooks = not {id(hook) for hook in hooks} <= known
            self._hooks = [weakref.ref(hook) for hook in hooks]
            is_passing = state.trouble or state.has_graph or self.has_new_hooks
            self._last = None if is_passing else state
        return self.with_versions(state)

    def state_now(self) -> State:
        """Return what the layer contains now: another object if anything changed."""
        if self._seen is None or not self._seen.is_now():
            self._seen = state_of_layer(tuple(self.module.modules()))
        return self._seen

    def with_versions(self, state: State) -> Found:
        """Return a state with the tensors that nothing may edit, and their versions."""
        tensors = [t for key, t in state.tensors.items() if key not in self.changing]
        return Found(state, tensors, list(map(version_of, tensors)))

    @contextlib.contextmanager
    def restored(self, found: Found, *, has_run: bool) -> Iterator[None]:
        """Restore the state that a call found; put back today's state afterwards.

        Args:
            found: The state that the call found.
            has_run: Whether the call has ended. It has not if the layer takes a
                gradient in its forward, and so is recomputed within it.

        Raises:
            ChangedWeightsError: A tensor was edited since.
        """
        if has_run and found.are_edited:
            raise self._changed(found)
        state = found.state
        now = state if state.is_now() else State(state.tables)
        try:
            if now is not state:
                state.put()
            yield
        finally:
            if not now.is_now():
                now.put()

    def raise_if_changed_late(self, found: Found) -> None:
        """Raise an error if its forward edited a tensor for the first time.

        Args:
            found: The state that the call found.

        Raises:
            LateChangeError: It did.
        """
        if found.are_edited:
            edited = found.edited()
            self.forget()
            if any("." in key[1] for key in edited):
                self.keep(CONTAINED)
            raise LateChangeError(self.name, edited)

    def _changed(self, found: Found) -> ChangedWeightsError:
        _, name = found.edited()[0]
        msg = (
            f"{name or 'a weight'!r} of {self.name} was edited in place after "
            f"its forward and before its backward (by an optimizer step?), so a "
            f"recomputation would give wrong gradients. Run the backward first, or "
            f"exclude the layer with attach(layers=...)"
        )
        return ChangedWeightsError(msg)
