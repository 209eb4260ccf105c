"""Recipes that were made, for the calls to come.

Equal units share them. Each unit compares a recipe in full with what it would let go in
its first calls under it; from then on a few elements are compared in each call.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from functools import partial
from typing import NoReturn, TypeAlias

import cachetools
import torch
from torch import nn

from mimose.exact.late_answers import LateAnswers
from mimose.measure.stopwatch import UNTIMED
from mimose.run.actions.replay.choice import Choice, comes_out
from mimose.run.actions.replay.givens import hold
from mimose.run.actions.replay.looks import looks
from mimose.run.actions.replay.rebuild import evaluate
from mimose.run.actions.replay.recipe import Recipe
from mimose.run.actions.replay.unit_graph import Ran, Signature, UnitGraph

_Key: TypeAlias = tuple[type[nn.Module], Signature]

_KEYS = 256
"""Kinds of units and graphs that are remembered."""
_MOST = 16
"""Recipes for one kind of unit and graph; of what lies otherwise nothing is let go."""
_TRIALS = 2
"""Calls of each unit in which a recipe is compared in full."""


class RecipeBook:
    """The recipes of one action.

    Args:
        share: The products that may run again, as a share of those that rebuilding
            everything would take.

    Attributes:
        is_trial: Whether a recipe was made or tried for the last call, which takes as
            long as many calls.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.is_trial = False
        self._recipes: MutableMapping[_Key, list[Recipe]] = cachetools.LRUCache(_KEYS)
        self._n_tried: weakref.WeakKeyDictionary[nn.Module, dict[Recipe, int]] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, ran: Ran) -> Recipe | None:
        """Return a recipe that gives what is there; None where nothing can be let go.

        Args:
            ran: The call, nothing dropped yet.

        Raises:
            ValueError: The recipe of such calls does not come out any more.
        """
        self.is_trial = False
        key = type(ran.module), ran.signature()
        with torch.no_grad():
            if key not in self._recipes:
                made = self._make(ran)
                self._recipes[key] = [] if made is None else [made]
                return made
            known = self._recipes[key]
            for recipe in known:
                if looks(recipe.slots, ran) == recipe.looks and hold(recipe, ran):
                    self._try(recipe, ran)
                    return recipe
            if not 0 < len(known) < _MOST:
                return None
            made = self._make(ran)
            if made is not None:
                known.append(made)
            return made

    def _make(self, ran: Ran) -> Recipe | None:
        self.is_trial = True
        graph, watch = UnitGraph(ran), _Trial()
        trial = partial(evaluate, ran=ran, slots=graph.slots, watch=watch)
        is_dear = self._share > 0.0
        choice = Choice(ran, graph, trial, watch.flops, is_dear=is_dear)
        recipe = choice.recipe(self._share)
        if recipe is not None:
            self._n_tried.setdefault(ran.module, {})[recipe] = 1
        return recipe

    def _try(self, recipe: Recipe, ran: Ran) -> None:
        """Compare all that a recipe rebuilds, in a unit's first calls under it."""
        tried = self._n_tried.setdefault(ran.module, {})
        n_tried = tried.get(recipe, 0)
        if n_tried >= _TRIALS:
            return
        self.is_trial = True
        graph = UnitGraph(ran)
        value = evaluate(recipe, ran, graph.slots, _Trial())
        if not comes_out(graph, recipe, [slot for slot, _ in recipe.drops], value):
            msg = "its operators do not give again what they gave"
            raise ValueError(msg)
        tried[recipe] = n_tried + 1


class _Trial:
    """Is told of a trial.

    Attributes:
        flops: By node, what its products take.
    """

    stopwatch = UNTIMED

    def __init__(self) -> None:
        self.answers = LateAnswers()
        self.flops: dict[int, int] = {}

    def add_flops(self, node: int, flops: int) -> None:
        """Take in what a node's operator computes."""
        self.flops[node] = flops

    def refuse(self, why: str) -> NoReturn:
        """Raise: it does not come out."""
        raise RuntimeError(why)
