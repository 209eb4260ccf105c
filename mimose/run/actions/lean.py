"""Letting go of what cheap operators rebuild: no product of matrices runs again.

After a unit's forward its part of autograd's graph is looked at. What activations,
norms, dropout and products of tensors have saved is let go, and rebuilt in backward by
running these operators again on what is still there. How it is found out what that is:
see `mimose.run.actions.replay.recipe`.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from mimose.exceptions import RecomputationError
from mimose.measure.gauges import Counted
from mimose.planners.actions import LEAN
from mimose.run.actions.base import Probe, UnitCall
from mimose.run.actions.keep import Keep
from mimose.run.actions.replay.operators import settings_of
from mimose.run.actions.replay.rebuild import drop, evaluate
from mimose.run.actions.replay.recipe import Recipe, comes_out, holds, make_recipe
from mimose.run.actions.replay.unit_graph import Nodes, Ran, Signature, Slot, UnitGraph
from mimose.run.unit import Unit
from mimose.tensors import tensors_in
from mimose.torch_private import next_sequence_number, saved_value, top_saved_hooks
from mimose.watch.shapes import argument_tensors

_MOST_NODES = 4096
_MOST_RECIPES = 16
"""Kinds of graphs of a unit; of more nothing is let go."""
_TRIED_AGAIN = 64
"""A recipe is tried on all tensors in its second call, and in each so-manieth."""


class Lean:
    """Holds what products of matrices have made, and rebuilds the rest."""

    spec = LEAN

    def __init__(self) -> None:
        self._keep = Keep()
        self._recipes: weakref.WeakKeyDictionary[nn.Module, _Recipes] = (
            weakref.WeakKeyDictionary()
        )

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
        output = self._keep.run(call, probe)
        freed = self._let_go(call, output, began)
        if probe is not None:
            event = probe.trace.events[probe.index]
            kept = max(event.held_bytes.values(), default=0.0)
            event.tell_held(self.spec.name, max(0.0, kept - freed))
        return output

    def held_bytes(self, counted: Counted) -> None:
        """Return None: it takes the graph to tell."""
        del counted

    def _let_go(self, call: UnitCall, output: Any, began: int) -> float:
        """Let go what can be rebuilt; return how many bytes that were."""
        unit = call.unit
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
        inputs = [tensor for _, tensor in argument_tensors(call.args, call.kwargs)]
        if not outputs:
            return 0.0
        try:
            nodes = Nodes(outputs, inputs, began, _MOST_NODES)
        except LookupError as error:
            unit.exclude(self.spec.name, str(error))
            return 0.0
        ran = Ran(unit.module, inputs, outputs, nodes)
        recipes = self._recipes.setdefault(unit.module, _Recipes())
        try:
            recipe = recipes.of(ran)
        except _WrongError as error:
            unit.exclude(self.spec.name, str(error))
            return 0.0
        return 0.0 if recipe is None else drop(recipe, ran, partial(_refuse, unit))


class _WrongError(Exception):
    """A recipe does not come out any more."""


class _Recipes:
    """The recipes of one unit, by the signature of a call's graph."""

    def __init__(self) -> None:
        self._known: dict[Signature, Recipe | None] = {}
        self._n_used: dict[Signature, int] = {}

    def of(self, ran: Ran) -> Recipe | None:
        """Return the recipe for a call; None where nothing can be let go.

        Raises:
            _WrongError: It does not give what is there.
        """
        signature = ran.nodes.signature()
        if signature not in self._known:
            if len(self._known) >= _MOST_RECIPES:
                return None
            self._known[signature] = _made(ran)
        recipe = self._known[signature]
        if recipe is None:
            return None
        n_used = self._n_used[signature] = self._n_used.get(signature, 0) + 1
        is_due = n_used == 2 or n_used % _TRIED_AGAIN == 0
        if not _is_right(recipe, ran, in_full=is_due):
            self._known[signature] = None
            msg = "what its operators are told changes by itself"
            raise _WrongError(msg)
        return recipe


def _made(ran: Ran) -> Recipe | None:
    graph = UnitGraph(ran)
    with torch.no_grad():
        return make_recipe(
            graph, ran.module, partial(evaluate, ran=ran, slots=graph.slots)
        )


def _is_right(recipe: Recipe, ran: Ran, *, in_full: bool) -> bool:
    """Whether a recipe gives what is there: unsaved numbers are compared each time."""
    nodes = ran.nodes.nodes
    with torch.no_grad():
        for check in recipe.checks:
            slots = [s for s in (*check.operands, check.result) if isinstance(s, Slot)]
            found = {s: saved_value(nodes[s.node], s.name) for s in slots}
            if not holds(check, found, settings_of(check.kind, nodes[check.node])):
                return False
        if not in_full:
            return True
        graph = UnitGraph(ran)
        value = evaluate(recipe, ran, graph.slots)
        return comes_out(graph, recipe, [slot for slot, _ in recipe.drops], value)


def _refuse(unit: Unit, why: str) -> NoReturn:
    unit.exclude(LEAN.name, why)
    msg = (
        f"{unit.name} cannot be rebuilt: {why}. It is not run under {LEAN.name!r} any "
        f"more; this step's gradients are not complete: zero them and go on, or run "
        f"steps by session.step(closure), which repeats such a step"
    )
    raise RecomputationError(msg)
