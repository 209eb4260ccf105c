"""Recipes that were made, for the calls to come.

Equal units share them. A recipe is compared in full with what it would let go in the
call that it is made of, and by each unit in its first calls where there is room for it.
What is rebuilt is compared in every call: see `mimose.actions.replay.seal`.

Note: [What went before]
What is too small to be let go depends on the sizes, and a recipe is made at whichever
come first. All made later for that kind of graph let go none but the same tensors,
in this process and in those to come: else what an action holds, as it was learned,
would not be what it holds. Small calls settle nothing, and their recipes are for small
calls alone: noise of less than 256 elements is not told from anything else, and stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import cachetools
import torch
from torch import nn

from mimose.actions.replay.choice import Choice, comes_out
from mimose.actions.replay.givens import hold
from mimose.actions.replay.looks import looks
from mimose.actions.replay.rebuild import evaluate
from mimose.actions.replay.recipe import Recipe
from mimose.actions.replay.unit_graph import Ran, Signature, Slot, UnitGraph
from mimose.exactness.late_answers import LateAnswers
from mimose.inputs.families import digest

_Key: TypeAlias = tuple[type[nn.Module], Signature]

_KEYS = 256
"""Kinds of units and graphs that are remembered."""
_MOST = 16
"""Recipes of one kind; then the oldest is forgotten."""
_TRIALS = 2
"""Calls of each unit in which a recipe is compared in full."""
_SMALL_BYTES = 16 * 1024
"""Calls that are given no more, and save none that takes more, are small: noise is told
by 256 elements, and a narrow layer saves few for each of its input's."""
_MOST_MADE = 64
"""Recipes made for one unit; of a unit that needs more nothing is let go."""


class _Known:
    """A recipe, and which units have tried it."""

    def __init__(self, recipe: Recipe, *, is_for_small: bool) -> None:
        self.recipe = recipe
        self.is_for_small = is_for_small
        """Whether it was made of a small call, and is for these alone."""
        self.n_tried: weakref.WeakKeyDictionary[nn.Module, int] = (
            weakref.WeakKeyDictionary()
        )
        self.is_wrong: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Units for which it did not come out."""


class Found(NamedTuple):
    """What a book says of a call."""

    recipe: Recipe | None = None
    """Gives what is there; None where nothing can be let go."""
    is_put_off: bool = False
    """Whether a recipe was to be made, and was not."""


NOTHING = Found()


class RecipeBook:
    """The recipes of one action in one session."""

    def __init__(self) -> None:
        self._known: MutableMapping[_Key, list[_Known]] = cachetools.LRUCache(_KEYS)
        self._small_nothing: MutableMapping[_Key, bool] = cachetools.LRUCache(_KEYS)
        """Kinds of which small calls can let nothing go."""
        self._n_made: weakref.WeakKeyDictionary[nn.Module, int] = (
            weakref.WeakKeyDictionary()
        )
        self._goes: MutableMapping[str, frozenset[Slot]] = cachetools.LRUCache(_KEYS)
        """What is let go, by kind of graph: Note: [What went before]."""

    def state_dict(self) -> dict[str, list[list[Any]]]:
        """Return what goes by kind of graph, ready for JSON.

        Note: [What went before]
        """
        return {
            kind: [list(slot) for slot in sorted(slots)]
            for kind, slots in self._goes.items()
        }

    def load_state_dict(self, state: Mapping[str, Iterable[Iterable[Any]]]) -> None:
        """Let go the same from now on; recipes are made anew.

        Args:
            state: What ``state_dict`` returned.
        """
        for mine in (self._known, self._small_nothing, self._goes):
            mine.clear()
        for kind, slots in state.items():
            self._goes[kind] = frozenset(Slot(*slot) for slot in slots)

    def find(self, ran: Ran, *, may_try: bool = True, may_make: bool = True) -> Found:
        """Find, or make, a recipe that gives what is there.

        Args:
            ran: The call, nothing dropped yet.
            may_try: Whether a known recipe may be compared in full, which takes memory
                that no plan has counted.
            may_make: Whether one may be made, which takes as much.
        """
        key = type(ran.module), ran.signature()
        with torch.no_grad():
            known = self._known.get(key, [])
            for each in known:
                if not self._fits(each, ran):
                    continue
                is_trial = may_try and self._is_new(each, ran)
                if not is_trial or self._comes_out(each, ran):
                    return Found(each.recipe)
            if key in self._known and not known:
                return NOTHING
            if key in self._small_nothing and _is_small(ran):
                return NOTHING
            if not may_make:
                return Found(is_put_off=True)
            return Found(self._make(key, known, ran))

    def _make(self, key: _Key, known: list[_Known], ran: Ran) -> Recipe | None:
        n_made = self._n_made.get(ran.module, 0)
        if n_made >= _MOST_MADE:
            return None
        graph = UnitGraph(ran)
        own = (s.n_bytes for s in graph.storages.values() if not s.is_fixed)
        is_small = _is_small(ran) and max(own, default=0) < _SMALL_BYTES
        self._n_made[ran.module] = n_made + 1
        trial = partial(evaluate, ran=ran, slots=graph.slots, watch=_Trial())
        kind = digest((type(ran.module).__qualname__, key[1]))
        recipe = Choice(ran, graph, trial).recipe(self._goes.get(kind, ()))
        if is_small and recipe is None:
            self._small_nothing[key] = True
            return None
        self._known[key] = known
        if recipe is not None:
            if not is_small:
                slots = frozenset(slot for slot, _ in recipe.drops)
                self._goes.setdefault(kind, slots)
            known.append(_Known(recipe, is_for_small=is_small))
            known[-1].n_tried[ran.module] = 1
            del known[:-_MOST]
        return recipe

    def _fits(self, known: _Known, ran: Ran) -> bool:
        """Whether a call is like those that a recipe is for."""
        if ran.module in known.is_wrong or (known.is_for_small and not _is_small(ran)):
            return False
        recipe = known.recipe
        return looks(recipe.slots, ran) == recipe.looks and hold(recipe, ran)

    def _is_new(self, known: _Known, ran: Ran) -> bool:
        """Whether a unit has yet to compare a recipe in full."""
        return known.n_tried.get(ran.module, 0) < _TRIALS

    def _comes_out(self, known: _Known, ran: Ran) -> bool:
        """Compare a recipe in full; where it differs, the unit never uses it."""
        recipe, module = known.recipe, ran.module
        graph = UnitGraph(ran)
        value = evaluate(recipe, ran, graph.slots, _Trial())
        if not comes_out(graph, recipe, [slot for slot, _ in recipe.drops], value):
            known.is_wrong.add(module)
            return False
        known.n_tried[module] = known.n_tried.get(module, 0) + 1
        return True


def _is_small(ran: Ran) -> bool:
    return max((tensor.nbytes for tensor in ran.inputs), default=0) < _SMALL_BYTES


class _Trial:
    """Is told of a trial."""

    def __init__(self) -> None:
        self.answers = LateAnswers()

    def refuse(self, why: str) -> NoReturn:
        """Raise: it does not come out."""
        raise RuntimeError(why)
