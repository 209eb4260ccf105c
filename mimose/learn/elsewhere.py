"""What actions that pack hold elsewhere, and what two neighbours hold between them.

See Note: [Boundaries] in ``planners/timeline.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimose.learn.layout import AdjacentFamilies
from mimose.learn.model import CostModel
from mimose.planners import ActionSpec
from mimose.types import Sizes


class Elsewhere(NamedTuple):
    """Of one layer, (K,) by action."""

    host_bytes: list[float]
    input_bytes: list[float]
    """Of what it is handed, that it lets go."""
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
    if not any(spec.packs or spec.needs_host for spec in menu.specs):
        nothing = [0.0] * len(menu.specs)
        return Elsewhere(nothing, nothing, nothing)
    host, given, saved = [], [], []
    for spec in menu.specs:
        host.append(_on_host(model, sizes, family, spec))
        given.append(_let_go(model, sizes, family, around, spec.name))
        saved.append(float(_saves(model, sizes, family, spec.name)))
    return Elsewhere(host, given, saved)


def _on_host(model: CostModel, sizes: Sizes, family: str, spec: ActionSpec) -> float:
    """Return what an action holds on the host; if nobody told, all that is kept."""
    series = model.exact(family, "host", spec.name)
    if not series.doubt(sizes):
        return series.predict(sizes)
    kept = model.exact(family, "held", model.menu.first)
    return kept.predict(sizes) if spec.needs_host else 0.0


def _let_go(
    model: CostModel,
    sizes: Sizes,
    family: str,
    around: AdjacentFamilies,
    action: str,
) -> float:
    """Return what goes of a layer's input; nothing, if it has ever stayed."""
    if len(model.exact(family, "input that stays", around, action)):
        return 0.0
    series = model.exact(family, "input", around, action)
    return 0.0 if series.doubt(sizes) else series.predict(sizes)


def _saves(model: CostModel, sizes: Sizes, family: str, action: str) -> bool:
    """Whether a layer saves what it returns under an action."""
    menu = model.menu
    if menu.spec(action).recomputes:
        return False
    # Who rebuilds tensors holds what it returns as who keeps them does.
    told_by = action if menu.spec(action).packs else menu.first
    series = model.exact(family, "output", told_by)
    return bool(series.doubt(sizes)) or series.predict(sizes) > 0.0


def boundaries(
    given: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return (E,) bytes of inputs, and (E, K) who lets them go.

    Args:
        given: (E, K) bytes that each action lets go.
    """
    return given.max(axis=1, initial=0.0), given > 0.0
