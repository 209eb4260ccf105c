"""Letting go of what can be rebuilt tensor by tensor, by some of a unit's operators.

After a unit's forward its part of autograd's graph is looked at. What activations,
norms, dropout and products of tensors have saved is let go, and rebuilt in backward by
running these operators again on what is still there. What takes products of matrices
stays. How it is found out what that is: see `mimose.actions.replay`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from mimose.actions.base import Means, Probe, UnitCall
from mimose.actions.keep import Keep
from mimose.actions.replay.book import NOTHING, Found, RecipeBook
from mimose.actions.replay.rebuild import drop
from mimose.actions.replay.unit_graph import Nodes, Ran
from mimose.exactness.late_answers import LateAnswers
from mimose.exactness.unit import Unit
from mimose.exceptions import RecomputationError
from mimose.inputs.shapes import argument_tensors
from mimose.memory.marks import Counted
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.planners import ActionSpec
from mimose.tensors import tensors_in, version
from mimose.torch_private import next_sequence_number, top_saved_hooks

_MOST_NODES = 4096


class Lean:
    """Holds what products of matrices have made, and rebuilds the rest.

    Args:
        spec: The action's.
    """

    def __init__(self, spec: ActionSpec) -> None:
        self.spec = spec
        self._keep = Keep()
        self._book = RecipeBook()

    def anew(self, means: Means) -> Lean:
        """Return the same action, which knows no recipe yet."""
        del means
        return Lean(self.spec)

    def state_dict(self) -> dict[str, Any]:
        """Return what calls let go, ready for JSON."""
        return self._book.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let calls let go the same.

        Args:
            state: What ``state_dict`` returned.
        """
        self._book.load_state_dict(state)

    def refuses(self, unit: Unit) -> str:
        """Return why nothing of a call can be let go."""
        if unit.is_compiled:
            return "what compiled code has saved cannot be told apart"
        if top_saved_hooks(True) is not None:
            return "somebody else's hooks have what it saves"
        return ""

    def run(self, call: UnitCall, probe: Probe | None) -> Any:
        """Run the forward, and let go what can be rebuilt."""
        began = next_sequence_number()
        given = list(argument_tensors(call.args, call.kwargs))
        inputs = [tensor for _, tensor in given]
        versions = list(map(version, inputs))
        output = self._keep.run(call, probe)
        has_room = has_spare = False
        if probe is not None:
            probe.trace.mark("ran", probe.index)
            # A trial may take as much again as the call holds.
            has_room = self._kept_bytes(probe) <= probe.trace.room_bytes
            has_spare = self._kept_bytes(probe) <= probe.trace.spare_bytes
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
        edited = tuple(
            number
            for number, tensor in enumerate(inputs)
            if version(tensor) != versions[number]
        )
        found, freed = NOTHING, 0.0
        try:
            nodes = Nodes(outputs, inputs, began, _MOST_NODES)
            paths = tuple(path for path, _ in given)
            ran = Ran(call.unit.module, inputs, outputs, nodes, edited, paths)
            may_make = has_room or probe is None
            found = self._book.find(ran, may_try=has_spare, may_make=may_make)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            # Nothing was let go yet: an operator may refuse what it is tried on.
            if is_out_of_memory(error):
                raise
            call.unit.exclude(self.spec.name, f"{type(error).__name__}: {error}")
        else:
            freed = self._let_go(found, ran, call, probe)
        if probe is not None:
            event = probe.trace.events[probe.index]
            if found.is_put_off:
                event.keep(self._keep.spec.name)
            else:
                left = max(0.0, self._kept_bytes(probe) - freed)
                event.tell_held(self.spec.name, left)
        return output

    def _let_go(
        self, found: Found, ran: Ran, call: UnitCall, probe: Probe | None
    ) -> float:
        """Let go what a recipe rebuilds; return the bytes that went."""
        if found.recipe is None:
            return 0.0
        return drop(found.recipe, ran, CallWatch(self.spec.name, call))

    def _kept_bytes(self, probe: Probe) -> float:
        """Return what the call holds as long as nothing is let go."""
        event = probe.trace.events[probe.index]
        return event.held_bytes.get(self._keep.spec.name, 0.0)

    def held_bytes(self, counted: Counted) -> None:
        """Return None: it takes the graph to tell."""
        del counted


class CallWatch:
    """Is told of what happens in a call's backward; holds nothing of the call."""

    __slots__ = ("_action", "_unit", "answers")

    def __init__(self, action: str, call: UnitCall) -> None:
        self.answers: LateAnswers = call.notes.answers
        self._action = action
        self._unit = call.unit

    def refuse(self, why: str) -> NoReturn:
        """Raise the error that names the unit, which is not run so any more.

        Raises:
            RecomputationError: Always.
        """
        unit = self._unit
        unit.exclude(self._action, why)
        msg = (
            f"{unit.name} cannot be rebuilt: {why}. It is not run under "
            f"{self._action!r} any more; this step's gradients are not complete: zero "
            f"them and go on, or run steps by session.step(closure), which repeats "
            f"such a step"
        )
        raise RecomputationError(msg)
