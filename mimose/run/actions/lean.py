"""Letting go of what cheap operators rebuild: no product of matrices runs again.

After a unit's forward its part of autograd's graph is looked at. What activations,
norms, dropout and products of tensors have saved is let go, and rebuilt in backward by
running these operators again on what is still there. How it is found out what that is:
see `mimose.run.actions.replay.recipe`.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from mimose.exceptions import RecomputationError
from mimose.measure.gauges import Counted
from mimose.measure.out_of_memory import is_out_of_memory
from mimose.planners.actions import LEAN
from mimose.run.actions.base import Probe, UnitCall
from mimose.run.actions.keep import Keep
from mimose.run.actions.replay.rebuild import drop, evaluate
from mimose.run.actions.replay.recipe import Recipe, comes_out, make_recipe
from mimose.run.actions.replay.unit_graph import Nodes, Ran, Signature, UnitGraph
from mimose.run.unit import Unit
from mimose.tensors import tensors_in
from mimose.torch_private import next_sequence_number, top_saved_hooks
from mimose.watch.shapes import argument_tensors

_MOST_NODES = 4096
_MOST_RECIPES = 16
"""Kinds of graphs of a unit; of more nothing is let go."""


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
        began, entered = next_sequence_number(), call.watch.start()
        output = self._keep.run(call, probe)
        call.watch.leave_out(entered)
        freed = self._let_go(call, output, began)
        call.watch.stop(entered)
        if probe is not None:
            event = probe.trace.events[probe.index]
            kept = event.held_bytes.get(self._keep.spec.name, 0.0)
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
        recipes = self._recipes.setdefault(unit.module, {})
        n_known = len(recipes)
        try:
            nodes = Nodes(outputs, inputs, began, _MOST_NODES)
            ran = Ran(unit.module, inputs, outputs, nodes)
            recipe = _recipe(recipes, ran)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            # Nothing was let go yet: an operator may refuse what it is tried on.
            if is_out_of_memory(error):
                raise
            unit.exclude(self.spec.name, f"{type(error).__name__}: {error}")
            return 0.0
        if len(recipes) > n_known:  # making one takes as long as many uses
            call.watch.spoil()
        if recipe is None:
            return 0.0
        return drop(recipe, ran, partial(_refuse, unit), call.watch)


_Recipes: TypeAlias = dict[Signature, Recipe | None]
"""Of one unit, by the signature of a call's graph; None where nothing can be let go."""


def _recipe(recipes: _Recipes, ran: Ran) -> Recipe | None:
    """Return a recipe that gives what is there; None where nothing can be let go.

    It is tried on all that it would let go, in every call: the graph's signature says
    nothing of layouts, of edits in the forward, or of tensors that are one in one call
    and two in another.

    Raises:
        ValueError: The recipe of such calls does not come out any more.
    """
    signature = ran.nodes.signature()
    with torch.no_grad():
        if signature not in recipes:
            if len(recipes) >= _MOST_RECIPES:
                return None
            graph = UnitGraph(ran)
            trial = partial(evaluate, ran=ran, slots=graph.slots)
            recipes[signature] = make_recipe(graph, ran.module, trial)
            return recipes[signature]
        recipe = recipes[signature]
        if recipe is None:
            return None
        graph = UnitGraph(ran)
        value = evaluate(recipe, ran, graph.slots)
        if comes_out(graph, recipe, [slot for slot, _ in recipe.drops], value):
            return recipe
    msg = "its operators do not give again what they gave"
    raise ValueError(msg)


def _refuse(unit: Unit, why: str) -> NoReturn:
    unit.exclude(LEAN.name, why)
    msg = (
        f"{unit.name} cannot be rebuilt: {why}. It is not run under {LEAN.name!r} any "
        f"more; this step's gradients are not complete: zero them and go on, or run "
        f"steps by session.step(closure), which repeats such a step"
    )
    raise RecomputationError(msg)
