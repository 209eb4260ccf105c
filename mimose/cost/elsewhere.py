"""What actions that pack hold elsewhere, and what two neighbours hold between them.

See Note: [Boundaries] in ``planners/timeline.py``.

Note: [Copies of inputs]
What packs its input makes another one of it in its backward. Where the first is gone by
then, that is as if it had stayed; where somebody else holds it, there are two. Readings
of a backward are told as if there was one. An input goes as the next layer is entered,
or some layers later: what a ResNet's stage is handed lives on in the stage's own loop,
and embeddings in the model's forward. The planner's problem, which knows no "later",
counts such an input as held and a second one wherever there may be one; what a plan
does not hold of that is taken off its prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimose.cost.layout import AdjacentFamilies, neighbours_of
from mimose.cost.model import CostModel
from mimose.planners import ActionSpec, PlanningProblem
from mimose.types import Sizes, StepInput


class Elsewhere(NamedTuple):
    """Of one layer, (K,) by action."""

    host_bytes: list[float]
    input_bytes: list[float]
    """Of what it is handed, that it packs."""
    passes: list[float]
    """How many layers are left behind it until that has gone; infinite: all."""
    saved_output: list[float]
    """1 where it saves what it returns itself, else 0."""


def elsewhere(
    model: CostModel, family: str, around: AdjacentFamilies, sizes: Sizes
) -> Elsewhere:
    """Return what is known of one layer; where nobody has told, the safe side.

    That is an input that stays, and an output that is saved.

    Args:
        model: What was learned.
        family: The layer's.
        around: The families before and after it.
        sizes: Its own.
    """
    menu = model.menu
    if not menu.has_elsewhere:
        nothing = [0.0] * len(menu.specs)
        return Elsewhere(nothing, nothing, nothing, nothing)
    host, given, passes, saved = [], [], [], []
    for spec in menu.specs:
        host.append(_on_host(model, sizes, family, spec))
        given.append(_packed(model, sizes, family, around, spec.name))
        passes.append(_passes(model, family, around, spec.name))
        saved.append(float(saves(model, sizes, family, spec.name)))
    return Elsewhere(host, given, passes, saved)


def is_tried(
    model: CostModel, family: str, around: AdjacentFamilies, action: str
) -> bool:
    """Whether steps have shown what becomes of a layer's input under an action."""
    spec = model.menu.spec(action)
    if not (spec.packs or spec.needs_host):
        return True
    return bool(len(model.exact(family, "input let go", around, action)))


def _on_host(model: CostModel, sizes: Sizes, family: str, spec: ActionSpec) -> float:
    """Return what an action holds on the host; if nobody told, all that is kept."""
    series = model.exact(family, "host", spec.name)
    if not series.doubt(sizes):
        return series.predict(sizes)
    kept = model.exact(family, "held", model.menu.first)
    return kept.predict(sizes) if spec.needs_host else 0.0


def _packed(
    model: CostModel,
    sizes: Sizes,
    family: str,
    around: AdjacentFamilies,
    action: str,
) -> float:
    """Return what is packed of a layer's input: all of it, or nothing."""
    told = model.exact(family, "input let go", around, action).medians()
    series = model.exact(family, "input")
    if not any(n_bytes for _, n_bytes in told) or series.doubt(sizes):
        return 0.0
    return series.predict(sizes)


def _passes(
    model: CostModel, family: str, around: AdjacentFamilies, action: str
) -> float:
    """Return how late an input goes: as late as it ever did."""
    if len(model.exact(family, "input that stays", around, action)):
        return math.inf
    told = model.exact(family, "input passes", around, action).medians()
    return max((n_passed for _, n_passed in told), default=math.inf)


def saves(model: CostModel, sizes: Sizes, family: str, action: str) -> bool:
    """Whether a layer saves what it returns under an action; if nobody told, it does.

    Args:
        model: What was learned.
        sizes: The layer's own.
        family: The layer's.
        action: Under which it runs.
    """
    menu = model.menu
    if menu.spec(action).recomputes:
        return False
    # Who rebuilds tensors holds what it returns as who keeps them does.
    told_by = action if menu.spec(action).packs else menu.first
    series = model.exact(family, "output", told_by)
    return bool(series.doubt(sizes)) or series.predict(sizes) > 0.0


def boundaries(
    given: NDArray[np.float64],
    passes: NDArray[np.float64],
    may_save: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    """Return (E,) bytes of inputs, (E, K) who lets them go, and (E, K) second ones.

    Note: [Copies of inputs]

    Args:
        given: (E, K) bytes that each action packs.
        passes: (E, K) how late they go.
        may_save: (E,) whether the event in front may have saved them.
    """
    second = np.where(np.isinf(passes) | may_save[:, np.newaxis], given, 0.0)
    releases = (given > 0.0) & (passes == 0.0)
    return given.max(axis=1, initial=0.0), releases, second


def may_save_inputs(
    saved: NDArray[np.bool_], allowed: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return (E,) whether the event in front may save what it hands on.

    Args:
        saved: (E, K) who saves it under which action.
        allowed: (E, K) under which events may run.
    """
    found = np.zeros(len(saved), dtype=np.bool_)
    found[1:] = np.logical_and(saved, allowed)[:-1].any(axis=1)
    return found


class GoneInput(NamedTuple):
    """An input that a plan does not hold, though its problem may count it."""

    event: int
    n_bytes: float
    goes_before: int
    """The position of the event that is entered next when it has gone; of the root's
    exit the number of events, and one more behind that."""
    has_second: bool
    """Whether the problem counts a second one in the event's backward."""


def gone_inputs(
    model: CostModel,
    facts: StepInput,
    problem: PlanningProblem,
    actions: Sequence[str],
) -> Iterator[GoneInput]:
    """Yield the inputs that go under a plan: Note: [Copies of inputs].

    Args:
        model: What was learned.
        facts: The step's context and sizes.
        problem: That these fill.
        actions: The plan's, one an event.
    """
    if not model.menu.has_elsewhere:
        return
    pattern = model.pattern(facts)
    own, around = pattern.own_sizes(facts.sizes), neighbours_of(pattern.events)
    may_save = may_save_inputs(problem.saves_output, problem.allowed)
    index = {name: number for number, name in enumerate(problem.actions)}
    for at, action in enumerate(actions):
        family = pattern.events[at].family
        n_bytes = _packed(model, own[at], family, around[at], action)
        passes = _passes(model, family, around[at], action)
        is_saved = at > 0 and problem.saves_output[at - 1, index[actions[at - 1]]]
        if n_bytes and math.isfinite(passes) and not is_saved:
            yield GoneInput(at, n_bytes, at + 1 + int(passes), bool(may_save[at]))
